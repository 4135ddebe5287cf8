// Soft codes, row by row.
#include "kernels.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

void walsh_hadamard(float* x, index_t n) {
  for (index_t half = 1; half < n; half *= 2)
    for (index_t i = 0; i < n; ++i)
      if (!(i & half)) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
}
void rotate_planes(float* x, index_t n, const float* p) {
  for (index_t i = 0; i < n / 2; ++i) {
    const float a = x[i], b = x[n / 2 + i];
    x[i] = p[i] * a - p[n / 2 + i] * b;
    x[n / 2 + i] = p[n / 2 + i] * a + p[i] * b;
  }
}

}  // namespace

index_t soft_hash_scratch(const SoftHashRows& h) {
  return sizeof(float) * (2 * h.columns + 16 + h.n_hashes * h.n_bits);
}

void soft_hash(const SoftHashRows& h) {
  float *x = h.scratch, *work = x + h.columns, *z = work + h.columns;
  for (index_t i = 0; i < h.rows; ++i) {
    for (index_t c = 0; c < h.columns; ++c)
      x[c] = c < h.n_features ? h.x[i * h.row_stride + c] * h.inverse_norm[i] : 0;
    if (h.family == Family::hyperplane) {
      for (index_t j = 0; j < h.n_hashes * h.n_bits; ++j) {
        z[j] = 0;
        for (index_t c = 0; c < h.n_features; ++c)
          z[j] += h.parameters[j * h.n_features + c] * x[c];
      }
    } else {
      rotate_planes(x, h.columns, h.parameters);
      walsh_hadamard(x, h.columns);
      rotate_planes(x, h.columns, h.parameters + h.columns);
      walsh_hadamard(x, h.columns);
      rotate_planes(x, h.columns, h.parameters + 2 * h.columns);
      for (index_t j = 0; j < h.n_hashes; ++j)
        for (int b = 0; b < h.n_bits; ++b) {
          const float* s = h.parameters + (3 + j / h.columns * h.n_bits + b) * h.columns;
          float sum = 0;
          for (index_t c = 0; c < h.columns; ++c)
            sum += __builtin_parityll(c & (j % h.columns)) ? -s[c] * x[c] : s[c] * x[c];
          z[j * h.n_bits + b] = sum / float(h.columns);
        }
    }
    for (index_t j = 0; j < h.n_hashes; ++j) {
      const float* v = z + j * h.n_bits;
      int code = 0, taken = 0;
      for (int b = 0; b < h.n_bits; ++b) code |= (v[b] > 0) << b;
      for (int k = 0; k < h.n_selected; ++k) {
        int best = -1;
        for (int b = 0; b < h.n_bits; ++b)
          if (!(taken >> b & 1) && (best < 0 || __builtin_fabsf(v[b]) < __builtin_fabsf(v[best])))
            best = b;
        taken |= 1 << best;
        const index_t at = (i * h.n_hashes + j) * h.n_selected + k;
        h.bits[at] = std::uint8_t(best);
        h.margins[at] = __builtin_fabsf(v[best]);
      }
      if (h.n_bits <= 8)
        static_cast<std::uint8_t*>(h.codes)[i * h.n_hashes + j] = std::uint8_t(code);
      else
        static_cast<std::uint16_t*>(h.codes)[i * h.n_hashes + j] = std::uint16_t(code);
    }
  }
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

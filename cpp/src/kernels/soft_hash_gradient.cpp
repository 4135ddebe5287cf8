// The gradient of soft codes in the unit vectors: of a margin, the sign of its projection times a
// row of the rotation.
#include "kernels.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

LSHKIT_INLINE bool bit_of(const SoftHashGradient& g, index_t pair, int bit) {
  const int code = g.code_bytes == 1 ? static_cast<const std::uint8_t*>(g.codes)[pair]
                                     : static_cast<const std::uint16_t*>(g.codes)[pair];
  return code >> bit & 1;
}

void walsh_hadamard(float* x, index_t n) {
  for (index_t half = 1; half < n; half *= 2)
    for (index_t i = 0; i < n; ++i)
      if (!(i & half)) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
}
void rotate_back(float* x, index_t n, const float* p) {
  for (index_t i = 0; i < n / 2; ++i) {
    const float a = x[i], b = x[n / 2 + i];
    x[i] = p[i] * a + p[n / 2 + i] * b;
    x[n / 2 + i] = p[i] * b - p[n / 2 + i] * a;
  }
}

}  // namespace

index_t soft_hash_gradient_scratch(const SoftHashGradient& g) {
  return sizeof(float) * (g.columns + 16);
}

void soft_hash_gradient(const SoftHashGradient& g) {
  float* sum = g.scratch;
  for (index_t i = 0; i < g.grad.rows; ++i) {
    std::memset(sum, 0, sizeof(float) * g.columns);
    for (index_t h = 0; h < g.n_hashes; ++h)
      for (int k = 0; k < g.n_selected; ++k) {
        const index_t pair = i * g.n_hashes + h;
        const int bit = g.bits[pair * g.n_selected + k];
        const float slope = g.margin_grads[pair * g.n_selected + k];
        const float signed_slope = bit_of(g, pair, bit) ? slope : -slope;
        if (g.family == Family::hyperplane) {
          const float* plane = g.parameters + (h * g.n_bits + bit) * g.columns;
          for (index_t c = 0; c < g.columns; ++c) sum[c] += signed_slope * plane[c];
        } else {
          const float* s = g.parameters + (3 + h / g.columns * g.n_bits + bit) * g.columns;
          for (index_t c = 0; c < g.columns; ++c)
            sum[c] += __builtin_parityll(c & (h % g.columns)) ? -s[c] * signed_slope
                                                              : s[c] * signed_slope;
        }
      }
    if (g.family == Family::hadamard) {
      rotate_back(sum, g.columns, g.parameters + 2 * g.columns);
      walsh_hadamard(sum, g.columns);
      rotate_back(sum, g.columns, g.parameters + g.columns);
      walsh_hadamard(sum, g.columns);
      rotate_back(sum, g.columns, g.parameters);
      for (index_t c = 0; c < g.columns; ++c) sum[c] /= float(g.columns);
    }
    std::memcpy(g.grad.row(i), sum, sizeof(float) * g.grad.columns);
  }
}

void plane_gradient(const PlaneGradient& g, index_t first, index_t last) {
  const index_t d = g.x.columns;
  for (index_t i = 0; i < g.x.rows; ++i) {
    const float inverse = g.inverse_norm[i];
    if (!(inverse > 0)) continue;
    const float* x = g.x.row(i);
    for (index_t h = first; h < last; ++h)
      for (int k = 0; k < g.n_selected; ++k) {
        const index_t pair = i * g.n_hashes + h;
        const int bit = g.bits[pair * g.n_selected + k];
        const float slope = g.margin_grads[pair * g.n_selected + k] * inverse;
        const float signed_slope = bit_of(g, pair, bit) ? slope : -slope;
        float* to = g.plane_grads + (h * g.n_bits + bit) * d;
        for (index_t c = 0; c < d; ++c) to[c] += signed_slope * x[c];
      }
  }
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

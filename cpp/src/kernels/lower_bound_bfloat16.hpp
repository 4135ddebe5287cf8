#pragma once
// The linear form of a bucket with AVX512-BF16 dot products: products of bfloat16, sums in float32.
// A word holds the bfloat16 of two neighbours in the dimension that is summed over, the lower in
// its lower half. On CPUs without the instruction it is not available.
#if defined(LSHKIT_ISA_AVX512) || defined(LSHKIT_ISA_AVX2)
#include <immintrin.h>
#endif

#include "kernels.hpp"
#include "matmul.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

using Word = std::uint32_t;

#if defined(LSHKIT_ISA_AVX512)
#define LSHKIT_BFLOAT16 __attribute__((noinline, target("avx512bf16")))

bool has_bfloat16_products() { return __builtin_cpu_supports("avx512bf16"); }

// to[i] = the bfloat16 of factor_i * x_i in words of two columns, each row `stride` words.
LSHKIT_BFLOAT16 void to_words(Matrix<const float> x, const float* factor, index_t stride,
                              Word* to) {
  for (index_t i = 0; i < x.rows; ++i)
    for (index_t c = 0; c < x.columns; c += 16) {
      const __m512 v = _mm512_loadu_ps(x.row(i) + c) * (factor ? factor[i] : 1.0f);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * stride + c / 2),
                          (__m256i)_mm512_cvtneps_pbh(v));
    }
}

// to[r / 2][c] = (from(r)[c], from(r + 1)[c]): words of two rows from words of two columns.
LSHKIT_BFLOAT16 void pair_rows(Rows<const Word> from, index_t rows, index_t columns, Word* to) {
  for (index_t r = 0; r < rows; r += 2, to += columns) {
    const Word *a = from(r), *b = from(r + 1 < rows ? r + 1 : r);
    for (index_t c = 0; c < columns; c += 16) {
      const int left = int(smaller(columns - c, 16));
      const auto mask = __mmask8((1u << left / 2) - 1);
      const __m256i x = _mm256_maskz_loadu_epi32(mask, a + c / 2);
      const __m256i y = r + 1 < rows ? _mm256_maskz_loadu_epi32(mask, b + c / 2) : __m256i{};
      const __m512i both = _mm512_or_si512(_mm512_cvtepu16_epi32(x),
                                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(y), 16));
      _mm512_mask_storeu_epi32(to + c, __mmask16((1u << left) - 1), both);
    }
  }
}

// The same from float32 rows, `scale` times them.
LSHKIT_BFLOAT16 void pair_rows(const float* from, index_t rows, index_t columns, float scale,
                               Word* to) {
  for (index_t r = 0; r < rows; r += 2)
    for (index_t c = 0; c < columns; c += 16) {
      const float* x = from + r * columns + c;
      const __m256i a = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x) * scale);
      const __m256i b = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + columns) * scale);
      _mm512_storeu_si512(to + r / 2 * columns + c,
                          _mm512_or_si512(_mm512_cvtepu16_epi32(a),
                                          _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16)));
    }
}

template <int Columns>
LSHKIT_BFLOAT16 void dot_panel(index_t rows, index_t depth, Rows<const Word> a, index_t a_stride,
                               const Word* b, index_t b_stride, Rows<float> c, index_t column) {
  constexpr int kRows = kTileRows<Columns>;
  for (index_t first = 0; first < rows; first += kRows) {
    const Word* row[kRows];
    LSHKIT_UNROLL
    for (int r = 0; r < kRows; ++r) row[r] = a(smaller(first + r, rows - 1));
    __m512 sum[kRows][Columns] = {};
    for (index_t k = 0; k < depth; ++k) {
      __m512bh v[Columns];
      LSHKIT_UNROLL
      for (int i = 0; i < Columns; ++i)
        v[i] = (__m512bh)_mm512_loadu_si512(b + k * b_stride + column + i * 16);
      LSHKIT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const auto s = (__m512bh)_mm512_set1_epi32(int(row[r][k * a_stride]));
        LSHKIT_UNROLL
        for (int i = 0; i < Columns; ++i) sum[r][i] = _mm512_dpbf16_ps(sum[r][i], s, v[i]);
      }
    }
    LSHKIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (first + r >= rows) break;
      float* out = c(first + r) + column;
      LSHKIT_UNROLL
      for (int i = 0; i < Columns; ++i)
        _mm512_storeu_ps(out + i * 16, _mm512_loadu_ps(out + i * 16) + sum[r][i]);
    }
  }
}
// c(r)[i] += sum over the words k < depth of a(r)[k * a_stride] . b[k * b_stride + i]; columns: a
// multiple of 16.
void add_dots(index_t rows, index_t columns, index_t depth, Rows<const Word> a, index_t a_stride,
              const Word* b, index_t b_stride, Rows<float> c) {
  index_t i = 0;
  for (; columns - i >= 64; i += 64) dot_panel<4>(rows, depth, a, a_stride, b, b_stride, c, i);
  for (; columns - i >= 32; i += 32) dot_panel<2>(rows, depth, a, a_stride, b, b_stride, c, i);
  for (; i < columns; i += 16) dot_panel<1>(rows, depth, a, a_stride, b, b_stride, c, i);
}
#else
bool has_bfloat16_products() { return false; }
void to_words(Matrix<const float>, const float*, index_t, Word*) {}
void pair_rows(Rows<const Word>, index_t, index_t, Word*) {}
void pair_rows(const float*, index_t, index_t, float, Word*) {}
void add_dots(index_t, index_t, index_t, Rows<const Word>, index_t, const Word*, index_t,
              Rows<float>) {}
#endif

// A head's rows in words: unit vectors of queries and keys, and output gradients and values with
// the bias, and one, as one more column. 2 n (d + d_v) bytes for each side.
struct Bfloat16Rows {
  static constexpr index_t kRows = 128;  // that are paired at once
  bool on;
  index_t d, dv;  // columns; dv with the bias and to an even number
  Word *query, *key, *grad, *value;
  Word *x, *y, *product;  // (kRows / 2, d), (kRows / 2, dv), (dv / 2, d)
  float* sum;             // (dv, d)

  Bfloat16Rows(const LowerBoundGradient& p, Cut& cut)
      : on(p.bfloat16_products && p.rank == 0 && !p.causal && p.query.columns % 16 == 0 &&
           p.value.columns % 16 == 0 && has_bfloat16_products()),
        d(p.query.columns),
        dv(p.value.columns + (p.bias ? 2 : 0)) {
    if (!on) return;
    query = cut.take<Word>(p.query.rows * d / 2);
    key = cut.take<Word>(p.key.rows * d / 2);
    grad = cut.take<Word>(p.query.rows * dv / 2);
    value = cut.take<Word>(p.key.rows * dv / 2);
    x = cut.take<Word>(kRows / 2 * d);
    y = cut.take<Word>(kRows / 2 * dv);
    product = cut.take<Word>(dv / 2 * d);
    sum = cut.take<float>(dv * d);
  }
  void fill(const LowerBoundGradient& p) const {
    if (!on) return;
    to_words(p.query, p.query_inverse_norm, d / 2, query);
    to_words(p.key, p.key_inverse_norm, d / 2, key);
    to_words(p.grad, nullptr, dv / 2, grad);
    to_words(p.value, nullptr, dv / 2, value);
    if (!p.bias) return;
    const index_t last = dv / 2 - 1;
    for (index_t i = 0; i < p.query.rows; ++i) {
      Word bits;
      std::memcpy(&bits, p.bias + i, sizeof(bits));
      const bool nan = (bits & 0x7fffffff) > 0x7f800000;  // quiet: rounding could lose it
      grad[i * (last + 1) + last] =
          nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
    for (index_t j = 0; j < p.key.rows; ++j) value[j * (last + 1) + last] = 0x3f80;  // one
  }
  // gradient_t += a_t^T (scale * the sum of a_f b_f^T), a: grad or value, b: unit vector.
  void apply(const Word* a_from, const Word* b_from, const std::int32_t* from, index_t n_from,
             const Word* a_to, const std::int32_t* to, index_t n_to, float scale,
             Matrix<float> gradient) const {
    std::memset(sum, 0, sizeof(float) * dv * d);
    for (index_t r = 0; r < n_from; r += kRows) {
      const index_t n = smaller(kRows, n_from - r);
      pair_rows({a_from, dv / 2, from + r}, n, dv, y);
      pair_rows({b_from, d / 2, from + r}, n, d, x);
      add_dots(dv, d, (n + 1) / 2, {y, 1}, dv, x, d, {sum, d});
    }
    pair_rows(sum, dv, d, scale, product);
    add_dots(n_to, d, dv / 2, {a_to, dv / 2, to}, 1, product, d,
             {gradient.data, gradient.stride, to});
  }
};

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

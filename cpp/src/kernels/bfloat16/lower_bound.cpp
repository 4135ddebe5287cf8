// A bucket of the lower bound's gradient (see kernels/lower_bound_bucket.hpp)
// with products of bfloat16 and sums in float32, by AVX512-BF16. Not on CPUs with AMX, where that
// has half the rate of float32: rows are gathered, and would have to be transposed for tiles.
#if defined(LSHKIT_ISA_AVX512_BF16) && !defined(LSHKIT_ISA_AMX)
#include "kernels/kernels.hpp"
#include "kernels/lower_bound_bfloat16.hpp"
#include "kernels/matmul.hpp"
#include "kernels/short_floats.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

using Word = std::uint32_t;

// to[r / 2][c] = (from(r)[c], from(r + 1)[c]): words of two rows from words of two columns.
LSHKIT_NOINLINE void pair_rows(Rows<const Word> from, index_t rows, index_t columns, Word* to) {
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
LSHKIT_NOINLINE void pair_rows(const float* from, index_t rows, index_t columns, float scale,
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

// to[k][r] = from(r)[k], zeros for r from `rows` to `width`, a multiple of 16; k: up to a multiple
// of 16 more than `depth`.
LSHKIT_NOINLINE void transpose_words(Rows<const Word> from, index_t rows, index_t depth,
                                     index_t width, Word* to) {
  for (index_t k = 0; k < depth; k += 16) {
    const auto mask = __mmask16((1u << smaller(depth - k, 16)) - 1);
    for (index_t first = 0; first < width; first += 16) {
      Vec<float> v[16];
      LSHKIT_UNROLL
      for (int r = 0; r < 16; ++r)
        v[r] = first + r < rows
                   ? _mm512_castsi512_ps(_mm512_maskz_loadu_epi32(mask, from(first + r) + k))
                   : __m512{};
      transpose<float>(v);
      LSHKIT_UNROLL
      for (int i = 0; i < 16; ++i) _mm512_storeu_ps(to + (k + i) * width + first, v[i]);
    }
  }
}

template <int Columns>
LSHKIT_NOINLINE void dot_panel(index_t rows, index_t depth, Rows<const Word> a, index_t a_stride,
                               const Word* b, index_t b_stride, Rows<float> c, index_t column,
                               RowsAhead& ahead) {
  constexpr int kRows = kTileRows<Columns>;
  for (index_t first = 0; first < rows; first += kRows) {
    fetch_rows(ahead, kRowsATile);
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
// multiple of 16. Between its tiles, rows of the next bucket are fetched.
void add_dots(index_t rows, index_t columns, index_t depth, Rows<const Word> a, index_t a_stride,
              const Word* b, index_t b_stride, Rows<float> c, RowsAhead& ahead) {
  index_t i = 0;
  for (; columns - i >= 64; i += 64)
    dot_panel<4>(rows, depth, a, a_stride, b, b_stride, c, i, ahead);
  for (; columns - i >= 32; i += 32)
    dot_panel<2>(rows, depth, a, a_stride, b, b_stride, c, i, ahead);
  for (; i < columns; i += 16) dot_panel<1>(rows, depth, a, a_stride, b, b_stride, c, i, ahead);
}

}  // namespace

void bfloat16_bucket(const Bfloat16Rows& w, const Bfloat16Side& from, const Bfloat16Side& to,
                     float scale, Matrix<float> gradient) {
  const index_t d = w.d, dv = w.dv;
  std::memset(w.sum, 0, sizeof(float) * dv * d);
  for (index_t r = 0; r < from.n; r += kPairedRows) {
    const index_t n = smaller(kPairedRows, from.n - r);
    pair_rows({from.a, dv / 2, from.rows + r}, n, dv, w.y);
    pair_rows({from.b, d / 2, from.rows + r}, n, d, w.x);
    add_dots(dv, d, (n + 1) / 2, {w.y, 1}, dv, w.x, d, {w.sum, d}, *w.ahead);
  }
  pair_rows(w.sum, dv, d, scale, w.product);
  add_dots(to.n, d, dv / 2, {to.a, dv / 2, to.rows}, 1, w.product, d,
           {gradient.data, gradient.stride, to.rows}, *w.ahead);
}

void bfloat16_pairs(const LowerBoundGradient& p, const Bfloat16Rows& w, const Bfloat16Side& queries,
                    const Bfloat16Side& keys) {
  const index_t nq = queries.n, nk = keys.n, d = w.d, depth = w.dv / 2;
  const index_t width = round_up(nk, 16);
  // Zeros in the columns of no key; the last key again would do, but for a NaN.
  transpose_words({keys.a, depth, keys.rows}, nk, depth, width, w.value_t);
  for (index_t i = 0; i < nq * width; i += 16) _mm512_storeu_ps(w.pair + i, __m512{});
  add_dots(nq, width, depth, {queries.a, depth, queries.rows}, 1, w.value_t, width, {w.pair, width},
           *w.ahead);
  if (p.query_grad.data) {
    for (index_t i = 0; i < nq * width; i += 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(w.weight + i / 2),
                          (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(w.pair + i) * p.scale));
    pair_rows({keys.b, d / 2, keys.rows}, nk, d, w.x);
    add_dots(nq, d, (nk + 1) / 2, {w.weight, width / 2}, 1, w.x, d,
             {p.query_grad.data, p.query_grad.stride, queries.rows}, *w.ahead);
  }
  if (p.key_grad.data) {
    if (nq % 2)
      for (index_t j = 0; j < width; j += 16) _mm512_storeu_ps(w.pair + nq * width + j, __m512{});
    pair_rows(w.pair, nq, width, p.scale, w.weight);
    pair_rows({queries.b, d / 2, queries.rows}, nq, d, w.x);
    add_dots(nk, d, (nq + 1) / 2, {w.weight, 1}, width, w.x, d,
             {p.key_grad.data, p.key_grad.stride, keys.rows}, *w.ahead);
  }
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit
#endif

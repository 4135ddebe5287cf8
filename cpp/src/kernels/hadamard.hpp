#pragma once
// The rotations of the fast Hadamard family on a tile of tokens: (columns, W), tokens in lanes.
#include "token_tile.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// The transform of R registers, of which the first Out outputs are computed.
template <int R, int Out = R, class V>
LSHKIT_INLINE void butterfly(V* v) {
  LSHKIT_UNROLL
  for (int half = R / 2; half >= Out; half /= 2) LSHKIT_UNROLL
  for (int i = 0; i < half; ++i) v[i] += v[i + half];
  constexpr int n = Out < R ? Out : R;
  LSHKIT_UNROLL
  for (int half = n / 2; half >= 1; half /= 2) LSHKIT_UNROLL
  for (int i = 0; i < n; ++i)
    if (!(i & half)) {
      const V a = v[i], b = v[i + half];
      v[i] = a + b;
      v[i + half] = a - b;
    }
}

// One radix-R pass at a stride. Terms: of from[i], or with signs of the sum of signs[j] * from[j]
// over so many j = i, i + columns ..
template <int R, int Terms = 0>
LSHKIT_INLINE void pass(const float* from, float* to, index_t columns, index_t stride,
                        const float* signs) {
  for (index_t base = 0; base < columns; base += R * stride)
    for (index_t i = base; i < base + stride; ++i) {
      F v[R];
      LSHKIT_UNROLL
      for (int k = 0; k < R; ++k) {
        const index_t at = i + k * stride;
        v[k] = load(from + at * W);
        if (Terms) v[k] *= signs[at];
        LSHKIT_UNROLL
        for (int t = 1; t < Terms; ++t)
          v[k] += load(from + (at + t * columns) * W) * signs[at + t * columns];
      }
      butterfly<R>(v);
      LSHKIT_UNROLL
      for (int k = 0; k < R; ++k) store(to + (i + k * stride) * W, v[k]);
    }
}

// The radix at a stride: 8, and what is left of `columns` at the last.
LSHKIT_INLINE int radix(index_t columns, index_t stride) {
  return int(smaller(8, columns / stride));
}

// The last pass of a rotation, of which the first `used` rows are wanted: take(row, projections).
template <int R, int Out, class Take>
LSHKIT_INLINE void last_pass_of(const float* from, index_t stride, index_t used, const Take& take) {
  for (index_t i = 0; i < stride; ++i) {
    F v[R];
    LSHKIT_UNROLL
    for (int k = 0; k < R; ++k) v[k] = load(from + (i + k * stride) * W);
    butterfly<R, Out>(v);
    LSHKIT_UNROLL
    for (int k = 0; k < Out; ++k)
      if (i + k * stride < used) take(i + k * stride, v[k]);
  }
}

template <int R, class Take>
LSHKIT_INLINE void last_pass(const float* from, index_t stride, index_t used, const Take& take) {
  if (used <= stride) return last_pass_of<R, 1>(from, stride, used, take);
  if (R > 2 && used <= 2 * stride) return last_pass_of<R, 2>(from, stride, used, take);
  if (R > 4 && used <= 4 * stride)
    return last_pass_of<R, (R > 4 ? 4 : R)>(from, stride, used, take);
  return last_pass_of<R, R>(from, stride, used, take);
}

// Rotates the planes (x_i, x_{i + D/2}); parameters: D/2 cosines, then D/2 sines.
LSHKIT_INLINE void rotate_planes(float* x, index_t columns, const float* parameters) {
  const index_t half = columns / 2;
  for (index_t i = 0; i < half; ++i) {
    const float c = parameters[i], s = parameters[half + i];
    const F a = load(x + i * W), b = load(x + (half + i) * W);
    store(x + i * W, c * a - s * b);
    store(x + (half + i) * W, s * a + c * b);
  }
}

LSHKIT_INLINE void transform(float* x, index_t columns, index_t top) {
  for (index_t stride = 1; stride < top; stride *= 8) pass<8>(x, x, columns, stride, nullptr);
  switch (radix(columns, top)) {
    case 8:
      return pass<8>(x, x, columns, top, nullptr);
    case 4:
      return pass<4>(x, x, columns, top, nullptr);
    default:
      return pass<2>(x, x, columns, top, nullptr);
  }
}

// The largest stride of a transform's passes.
LSHKIT_INLINE index_t top_stride(index_t columns) {
  index_t top = 8;
  while (top * 8 < columns) top *= 8;
  return top;
}

// z = G2 H G1 H G0 x, in its place.
LSHKIT_INLINE void shared_first_stage(float* z, index_t columns, const float* parameters) {
  const index_t top = top_stride(columns);
  rotate_planes(z, columns, parameters);
  transform(z, columns, top);
  rotate_planes(z, columns, parameters + columns);
  transform(z, columns, top);
  rotate_planes(z, columns, parameters + 2 * columns);
}

// Whether the rows of H that are used repeat after half of its columns.
LSHKIT_INLINE bool in_halves(index_t columns, index_t used) {
  return 2 * used <= columns && columns >= 32;
}

// The first `used` of `rows` rows of H S z: take(row, projections). These rows of H repeat after
// `rows` columns, so that a transform of the sums of z's Terms parts is left.
template <int Terms, class Take>
LSHKIT_INLINE void rotate_sums(const float* z, float* work, index_t rows, const float* signs,
                               index_t used, const Take& take) {
  const index_t top = top_stride(rows);
  pass<8, Terms>(z, work, rows, 1, signs);
  for (index_t stride = 8; stride < top; stride *= 8) pass<8>(work, work, rows, stride, nullptr);
  switch (radix(rows, top)) {
    case 8:
      return last_pass<8>(work, top, used, take);
    case 4:
      return last_pass<4>(work, top, used, take);
    default:
      return last_pass<2>(work, top, used, take);
  }
}
// H S z for the signs S of a rotation: take(row, projections) for the first `used` rows. work: as
// large as z.
template <class Take>
LSHKIT_INLINE void rotate(const float* z, float* work, index_t columns, const float* signs,
                          index_t used, const Take& take) {
  if (in_halves(columns, used)) return rotate_sums<2>(z, work, columns / 2, signs, used, take);
  rotate_sums<1>(z, work, columns, signs, used, take);
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

#pragma once
// The rotations of the fast Hadamard family on a tile of tokens: (columns, W), tokens in lanes.
#include "token_tile.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// The transform of R registers, of which the first Out outputs are computed.
template <int R, int Out = R>
LSHKIT_INLINE void butterfly(F* v) {
  LSHKIT_UNROLL
  for (int half = R / 2; half >= Out; half /= 2) LSHKIT_UNROLL
  for (int i = 0; i < half; ++i) v[i] += v[i + half];
  constexpr int n = Out < R ? Out : R;
  LSHKIT_UNROLL
  for (int half = n / 2; half >= 1; half /= 2) LSHKIT_UNROLL
  for (int i = 0; i < n; ++i)
    if (!(i & half)) {
      const F a = v[i], b = v[i + half];
      v[i] = a + b;
      v[i + half] = a - b;
    }
}

// One radix-R pass at a stride, of signs[i] * from[i] where there are signs.
template <int R, bool Signs>
LSHKIT_INLINE void pass(const float* from, float* to, index_t columns, index_t stride,
                        const float* signs) {
  for (index_t base = 0; base < columns; base += R * stride)
    for (index_t i = base; i < base + stride; ++i) {
      F v[R];
      LSHKIT_UNROLL
      for (int k = 0; k < R; ++k) {
        v[k] = load(from + (i + k * stride) * W);
        if (Signs) v[k] *= signs[i + k * stride];
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
  for (index_t stride = 1; stride < top; stride *= 8)
    pass<8, false>(x, x, columns, stride, nullptr);
  switch (radix(columns, top)) {
    case 8:
      return pass<8, false>(x, x, columns, top, nullptr);
    case 4:
      return pass<4, false>(x, x, columns, top, nullptr);
    default:
      return pass<2, false>(x, x, columns, top, nullptr);
  }
}

// The largest stride of a transform's passes.
LSHKIT_INLINE index_t top_stride(index_t columns) {
  index_t top = 8;
  while (top * 8 < columns) top *= 8;
  return top;
}

// H S z for the signs S of a rotation: take(row, projections) for the first `used` rows. work: as
// large as z.
template <class Take>
LSHKIT_INLINE void rotate(const float* z, float* work, index_t columns, index_t top,
                          const float* signs, index_t used, const Take& take) {
  pass<8, true>(z, work, columns, 1, signs);
  for (index_t stride = 8; stride < top; stride *= 8)
    pass<8, false>(work, work, columns, stride, nullptr);
  switch (radix(columns, top)) {
    case 8:
      return last_pass<8>(work, top, used, take);
    case 4:
      return last_pass<4>(work, top, used, take);
    default:
      return last_pass<2>(work, top, used, take);
  }
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

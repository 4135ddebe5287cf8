#pragma once
// The lower bound's gradient from R random coordinates of g . v a hash. With a random rotation U of
// D coordinates, drawn independently of the hash functions, and a group C of R of them,
//   g . v  ~  (D / R) sum_{r in C} (U g)_r (U v)_r,
// unbiased because every row u of U has E[u u^T] = 1 / D. The ceil(D / R) groups share the hashes
// evenly, each having some in turn: all coordinates serve alike. The products of a bucket are then
// (R x d) and not (d_v x d).
//
// U = H G2 H G1 H G0 / D^1.5: H the Hadamard matrix, G rotations of the planes (i, i + D/2) by
// random angles. With one G less, vectors along an axis have a variance 15 % off a uniformly random
// rotation's (measured, D = 64).
#include "kernels.hpp"
#include "matmul.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// Coordinates whose products with kSketchColumns registers of features stay in registers.
constexpr int kSketchRows = kRegisters >= 32 ? 8 : 4;
constexpr int kSketchColumns = 2;
constexpr int kRotations = 3;
constexpr index_t kSketchAhead = 24;  // rows that are prefetched

LSHKIT_INLINE void rotate_planes(const float* cosines, index_t size, float* block) {
  constexpr int W = kLanes<float>;
  const index_t half = size / 2;
  for (index_t i = 0; i < half; ++i) {
    float *upper = block + i * W, *lower = block + (i + half) * W;
    const Vec<float> u = load(upper), l = load(lower);
    const float cosine = cosines[i], sine = cosines[half + i];
    store(upper, cosine * u - sine * l);
    store(lower, sine * u + cosine * l);
  }
}
LSHKIT_INLINE void hadamard(index_t size, float* block) {
  constexpr int W = kLanes<float>;
  for (index_t step = 1; step < size; step *= 2)
    for (index_t first = 0; first < size; first += 2 * step)
      for (index_t i = first; i < first + step; ++i) {
        float *x = block + i * W, *y = block + (i + step) * W;
        const Vec<float> a = load(x), b = load(y);
        store(x, a + b);
        store(y, a - b);
      }
}

// What the sketch keeps of a head: the rotated values and gradients, a group after the other, each
// (rows, width) with the bias as one more coordinate. 2 n ceil(D / R) width floats, width being R
// (and 1 with a bias) rounded up to four.
struct Sketch {
  index_t rank, size, n_groups, width;  // size: D
  float *grad, *value;
  float *block, *rotated;  // (D, lanes) and (lanes, D)

  Sketch(const LowerBoundGradient& p, Cut& cut)
      : rank(p.rank),
        size(p.rotation_columns),
        n_groups(rank > 0 ? (size + rank - 1) / rank : 0),
        width(round_up(rank + (p.bias ? 1 : 0), 4)) {
    const index_t floats = n_groups * width;
    grad = cut.take<float>(floats * p.query.rows);
    value = cut.take<float>(floats * p.key.rows);
    block = cut.take<float>(rank > 0 ? size * kLanes<float> : 0);
    rotated = cut.take<float>(rank > 0 ? size * kLanes<float> : 0);
  }
  index_t group(index_t hash, index_t n_hashes) const { return hash * n_groups / n_hashes; }
  const float* group_of(const float* sketch, index_t rows, index_t group) const {
    return sketch + group * rows * width;
  }

  // scale * U x_i in groups; then, where there is room, last_i or without an array `constant`.
  LSHKIT_NOINLINE void rotate(Matrix<const float> x, const float* rotation, float scale,
                              const float* last, float constant, float* to) const {
    constexpr int W = kLanes<float>;
    const float normalized = 1 / (float(size) * __builtin_sqrtf(float(size)));
    for (index_t i = 0; i < x.rows; i += W) {
      const index_t n = smaller(W, x.rows - i);
      pack_transposed<float>(n, x.columns, W, {x.row(i), x.stride}, 1, nullptr, block);
      std::memset(block + x.columns * W, 0, sizeof(float) * (size - x.columns) * W);
      for (int g = 0; g < kRotations; ++g) {
        rotate_planes(rotation + g * size, size, block);
        hadamard(size, block);
      }
      pack_transposed<float>(size, W, size, {block, W}, scale * normalized, nullptr, rotated);
      for (index_t g = 0; g < n_groups; ++g)
        for (index_t r = 0; r < n; ++r) {
          float* out = to + (g * x.rows + i + r) * width;
          const float* from = rotated + r * size;
          const index_t first = g * rank, count = smaller(rank, size - first);
          for (index_t c = 0; c < count; ++c) out[c] = from[first + c];
          for (index_t c = count; c < rank; ++c) out[c] = from[c - count];  // the last group
          for (index_t c = rank; c < width; ++c) out[c] = 0;
          if (width > rank) out[rank] = last ? last[i + r] : constant;
        }
    }
  }
  void fill(const LowerBoundGradient& p) const {
    if (rank == 0) return;
    rotate(p.grad, p.rotation, 1, p.bias, 0, grad);
    rotate(p.value, p.rotation, p.scale * float(size) / float(rank), nullptr, p.bias ? p.scale : 0,
           value);
  }
};

// Queries or keys: their coordinates in the sketch, their features, and where the gradient of their
// unit vectors goes.
struct SketchSide {
  const float* sketch;
  Matrix<const float> x;
  const float* inverse_norm;
  Matrix<float> gradient;
};
// Those in one bucket, in ascending order, with kSketchAhead rows before and after them in memory.
struct SketchRows {
  const std::int32_t* order;
  index_t count;
};

// With M the sum of a_f b_f^T over the rows of `from` (a: sketch, b: unit vector), gradient_t +=
// a_t^T M for each row of `to`; causal: over the rows of `from` that come no later, in the
// direction of `step`, 1 or -1. Only Height coordinates and Columns registers of features, whose M
// stays in registers. Whole: all of their lanes count, else `lanes` of the last register.
template <int Height, int Columns, bool Whole>
LSHKIT_NOINLINE void sketch_block(const SketchSide& from, SketchRows from_rows,
                                  const SketchSide& to, SketchRows to_rows, index_t width,
                                  index_t first, index_t column, int lanes, bool causal,
                                  index_t step) {
  constexpr int W = kLanes<float>;
  if (Whole) lanes = W;
  Vec<float> sum[Height][Columns] = {};
  const std::int32_t* from_order = from_rows.order + (step > 0 ? 0 : from_rows.count - 1);
  const std::int32_t* to_order = to_rows.order + (step > 0 ? 0 : to_rows.count - 1);
  index_t next = 0;
  for (index_t t = 0; t < to_rows.count; ++t) {
    const index_t row = to_order[t * step];
    for (; next < from_rows.count; ++next) {
      const index_t f = from_order[next * step];
      if (causal && (f - row) * step > 0) break;
      const index_t later = from_order[(next + kSketchAhead) * step];
      prefetch(from.sketch + later * width + first);
      const float* later_x = from.x.row(later) + column;
      LSHKIT_UNROLL
      for (int c = 0; c < Columns; c += 64 / kVectorBytes) prefetch(later_x + c * W);
      const float* a = from.sketch + f * width + first;
      const float* b = from.x.row(f) + column;
      Vec<float> v[Columns];
      LSHKIT_UNROLL
      for (int c = 0; c < Columns; ++c)
        v[c] = (c + 1 < Columns || Whole ? load(b + c * W) : load_first(b + c * W, lanes)) *
               from.inverse_norm[f];
      LSHKIT_UNROLL
      for (int r = 0; r < Height; ++r) {
        const float s = a[r];
        LSHKIT_UNROLL
        for (int c = 0; c < Columns; ++c) sum[r][c] += s * v[c];
      }
    }
    const index_t later = to_order[(t + kSketchAhead) * step];
    prefetch(to.sketch + later * width + first);
    const float* later_out = to.gradient.row(later) + column;
    LSHKIT_UNROLL
    for (int c = 0; c < Columns; c += 64 / kVectorBytes) prefetch(later_out + c * W);
    if (next == 0) continue;
    const float* a = to.sketch + row * width + first;
    float* out = to.gradient.row(row) + column;
    Vec<float> total[Columns];
    LSHKIT_UNROLL
    for (int c = 0; c < Columns; ++c)
      total[c] = c + 1 < Columns || Whole ? load(out + c * W) : load_first(out + c * W, lanes);
    LSHKIT_UNROLL
    for (int r = 0; r < Height; ++r) {
      const float s = a[r];
      LSHKIT_UNROLL
      for (int c = 0; c < Columns; ++c) total[c] += s * sum[r][c];
    }
    LSHKIT_UNROLL
    for (int c = 0; c < Columns; ++c)
      if (c + 1 < Columns || Whole)
        store(out + c * W, total[c]);
      else
        store_first(out + c * W, total[c], lanes);
  }
}

// All of `to` from all of `from`, for kSketchColumns registers of features from `column` on.
LSHKIT_INLINE void sketch_columns(const SketchSide& from, SketchRows from_rows,
                                  const SketchSide& to, SketchRows to_rows, index_t width,
                                  index_t column, bool causal, index_t step) {
  constexpr int W = kLanes<float>;
  const index_t left = smaller(from.x.columns - column, kSketchColumns * W);
  const auto rows = [&](auto height, index_t first) {
    constexpr int Height = decltype(height)::value;
    const auto block = left == kSketchColumns * W ? sketch_block<Height, kSketchColumns, true>
                       : left > W                 ? sketch_block<Height, kSketchColumns, false>
                                                  : sketch_block<Height, 1, false>;
    block(from, from_rows, to, to_rows, width, first, column, int(left > W ? left - W : left),
          causal, step);
  };
  index_t r = 0;
  for (; r + kSketchRows <= width; r += kSketchRows)
    rows(std::integral_constant<int, kSketchRows>{}, r);
  if (kSketchRows > 4 && r < width) rows(std::integral_constant<int, 4>{}, r);
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

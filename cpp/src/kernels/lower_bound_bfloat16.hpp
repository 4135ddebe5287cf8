#pragma once
// What a bucket takes for its products of bfloat16: its pairs (bfloat16/lower_bound.cpp, by tiles
// bfloat16/lower_bound_tiles.cpp) and its linear form (the former). A word holds the bfloat16 of
// two neighbours in the dimension that is summed over, the lower in its lower half.
#include "kernels.hpp"
#include "rows_ahead.hpp"
#include "simd.hpp"

namespace lshkit {

constexpr index_t kPairedRows = 128;  // that are paired at once
// A head's rows in words: unit vectors of queries and keys, and output gradients and values with
// the bias, and one, as one more column. 2 n (d + d_v) bytes for each side.
struct Bfloat16Rows {
  RowsAhead* ahead;  // of the next bucket
  bool on, linear;   // linear: of that form too
  index_t d, dv;     // columns; dv with the bias and to an even number
  std::uint32_t *query, *key, *grad, *value;
  // In vectors: (kPairedRows / 2, d), (kPairedRows / 2, dv), (dv / 2, d), (dv, d).
  std::uint32_t *x, *y, *product;
  float* sum;
  std::uint32_t *value_t, *weight;  // (dv / 2, kPairedRows), (kPairedRows, kPairedRows / 2)
  float* pair;                      // (kPairedRows, kPairedRows)
  std::uint32_t* tiles;             // in their place
};
// Of a bucket: a is grad or value, b the unit vectors.
struct Bfloat16Side {
  const std::uint32_t *a, *b;
  const std::int32_t* rows;
  index_t n;
};

namespace LSHKIT_ISA {
namespace {

// Whether products are of words: of causal rows by tiles alone.
LSHKIT_INLINE bool takes_words(const LowerBoundGradient& p) {
  return p.bfloat16_products && lshkit::kernels().bfloat16_rows &&
         !(p.causal && lshkit::kernels().bfloat16_bucket) && p.query.columns % 16 == 0 &&
         p.value.columns % 16 == 0;
}

LSHKIT_INLINE Bfloat16Rows cut_words(const LowerBoundGradient& p, Cut& cut) {
  Bfloat16Rows w{};
  w.on = takes_words(p);
  if (!w.on) return w;
  w.linear = lshkit::kernels().bfloat16_bucket;
  w.d = p.query.columns;
  w.dv = p.value.columns + (p.bias ? 2 : 0);
  w.query = cut.take<std::uint32_t>(p.query.rows * w.d / 2);
  w.key = cut.take<std::uint32_t>(p.key.rows * w.d / 2);
  w.grad = cut.take<std::uint32_t>(p.query.rows * w.dv / 2);
  w.value = cut.take<std::uint32_t>(p.key.rows * w.dv / 2);
  if (!w.linear) {
    constexpr index_t t = kPairedRows / 16;
    const index_t depth = round_up(w.dv, 32) / 32, d = w.d / 16;
    const index_t tiles = t * t + larger(t * depth, t / 2 * d) + t * depth;
    w.tiles = cut.take<std::uint32_t>(tiles * 256);
    return w;
  }
  w.x = cut.take<std::uint32_t>(kPairedRows / 2 * w.d);
  w.y = cut.take<std::uint32_t>(kPairedRows / 2 * w.dv);
  w.product = cut.take<std::uint32_t>(w.dv / 2 * w.d);
  w.sum = cut.take<float>(w.dv * w.d);
  w.value_t = cut.take<std::uint32_t>(round_up(w.dv / 2, 16) * kPairedRows);
  w.weight = cut.take<std::uint32_t>(kPairedRows * kPairedRows / 2);
  w.pair = cut.take<float>(kPairedRows * kPairedRows);
  return w;
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

#pragma once
// The columns of a row, as many at a time as registers hold, and products of rows.
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int kVectors = kVectorBytes >= 64 ? 4 : 8;  // registers

// Columns [first, first + width) of a row, in `vectors` registers, which are full or not.
template <class T, int Vectors, bool Full>
struct Columns {
  static constexpr int vectors = Vectors, n = kLanes<T>;
  index_t first;
  int width;

  LSHKIT_INLINE void load_row(const T* row, Vec<T>* v) const {
    row += first;
    __asm__("" : "+r"(row));  // else GCC keeps `first + i * n` in as many registers as there are
    LSHKIT_UNROLL
    for (int i = 0; i < vectors; ++i)
      v[i] = Full ? load(row + i * n) : load_first(row + i * n, width - i * n);
  }
  LSHKIT_INLINE void store_row(T* row, const Vec<T>* v) const {
    row += first;
    __asm__("" : "+r"(row));
    LSHKIT_UNROLL
    for (int i = 0; i < vectors; ++i)
      Full ? store(row + i * n, v[i]) : store_first(row + i * n, v[i], width - i * n);
  }
};

// run(Columns) for all columns of a row: as many as kVectors registers hold at a time, and of what
// is left as many as Least do.
template <class T, int Least = kVectors, class Run>
LSHKIT_INLINE void each_columns(index_t columns, const Run& run) {
  constexpr int width = kVectors * kLanes<T>, least = Least * kLanes<T>;
  index_t first = 0;
  for (; first + width <= columns; first += width) run(Columns<T, kVectors, true>{first, width});
  if constexpr (Least < kVectors)
    for (; first + least <= columns; first += least) run(Columns<T, Least, true>{first, least});
  if (first < columns) run(Columns<T, Least, false>{first, int(columns - first)});
}

// products_k = factor * row . row found_k of `rows`. Up to three more are written.
template <class Index>
LSHKIT_INLINE void products_of(const float* row, float factor, Matrix<const float> rows,
                               const Index* found, index_t count, float* products) {
  each_columns<float, kVectors / 2>(rows.columns, [&](auto columns) LSHKIT_ALWAYS_INLINE {
    Vec<float> x[columns.vectors];
    columns.load_row(row, x);
    LSHKIT_UNROLL
    for (int c = 0; c < columns.vectors; ++c) x[c] *= factor;
    for (index_t k = 0; k < count; k += 4) {
      Vec<float> partial[4];
      LSHKIT_UNROLL
      for (int r = 0; r < 4; ++r) {
        Vec<float> v[columns.vectors];
        columns.load_row(rows.row(found[smaller(k + r, count - 1)]), v);
        partial[r] = v[0] * x[0];
        LSHKIT_UNROLL
        for (int c = 1; c < columns.vectors; ++c) partial[r] += v[c] * x[c];
      }
      Vec4 sums = sum_lanes4(partial[0], partial[1], partial[2], partial[3]), before;
      if (columns.first > 0) {
        std::memcpy(&before, products + k, sizeof(before));
        sums += before;
      }
      std::memcpy(products + k, &sums, sizeof(sums));
    }
  });
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

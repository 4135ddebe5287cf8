#pragma once
// The columns of a row, as many at a time as registers hold.
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

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

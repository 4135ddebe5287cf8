#pragma once
// Rows that the work after this one reads, prefetched a few at a time between its steps. A core
// waits for some dozen lines at once: a burst of prefetches stops it until there is room for the
// last of them, so that it does nothing while memory answers.
#include "simd.hpp"

namespace lshkit {

struct RowsAhead {
  struct Part {  // of a row: a matrix, in bytes
    const char* data;
    index_t stride, bytes;
  };
  struct Side {
    Part part[3];
    const std::int32_t* rows;
    index_t n;
  };
  Side side[2];
  index_t next;  // of the rows of both
};

namespace LSHKIT_ISA {
namespace {

constexpr index_t kRowsATile = 4;  // between the tiles of a product in registers

template <class T>
LSHKIT_INLINE RowsAhead::Part part_of_row(Matrix<T> m) {
  constexpr index_t size = sizeof(T);
  return {reinterpret_cast<const char*>(m.data), size * m.stride, m.data ? size * m.columns : 0};
}
LSHKIT_INLINE void fetch_rows(RowsAhead& a, index_t most) {
  const index_t first = a.side[0].n, end = smaller(a.next + most, first + a.side[1].n);
  for (; a.next < end; ++a.next) {
    const bool second = a.next >= first;
    const RowsAhead::Side& side = a.side[second];
    const index_t row = side.rows[second ? a.next - first : a.next];
    for (const RowsAhead::Part& m : side.part) prefetch_row(m.data + row * m.stride, m.bytes);
  }
}
LSHKIT_INLINE index_t rows_left(const RowsAhead& a) { return a.side[0].n + a.side[1].n - a.next; }

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

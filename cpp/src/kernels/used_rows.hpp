#pragma once
// Tables that are not cleared before rows are added to theirs: a mask for each row says whether it
// has been used, and loads take a row that has not for zeros. Of 4,096 probes in as many buckets
// clearing takes as long as adding. Where an instruction set has no loads by masks, empty_table
// clears.
#if defined(LSHKIT_ISA_AVX512)
#include <immintrin.h>
#endif

#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

using RowMask = std::uint16_t;  // all bits or none: one for each 32-bit lane of a register

#if defined(LSHKIT_ISA_AVX512)
constexpr bool kMasksRows = true;
template <class T>
LSHKIT_INLINE Vec<T> load_used(const T* row, RowMask used) {
  return Vec<T>(_mm512_maskz_loadu_epi32(used, row));
}
// The mask until now; the row is used from here on.
LSHKIT_INLINE RowMask use_row(RowMask* used) {
  const RowMask before = *used;
  *used = RowMask(~0);
  return before;
}
#else
constexpr bool kMasksRows = false;
template <class T>
LSHKIT_INLINE Vec<T> load_used(const T* row, RowMask) {
  return load(row);
}
LSHKIT_INLINE RowMask use_row(RowMask*) { return 0; }
#endif

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

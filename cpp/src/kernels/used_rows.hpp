#pragma once
// Tables that are not cleared before rows are added to theirs: a mask for each row says whether it
// has been used, and loads take a row that has not for zeros. In 16-bit tables, where all rows
// are added before any is read, the few that are left are cleared then. Of 4,096 probes in as many
// buckets clearing all took a fifth of a pass. Where many probes share a bucket masks take longer
// than that: there, and where an instruction set has no loads by masks, tables are cleared.
#if defined(LSHKIT_ISA_AVX512)
#include <immintrin.h>
#endif

#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

using RowMask = std::uint16_t;  // all bits or none: one for each 32-bit lane of a register
constexpr RowMask kAllUsed = RowMask(~0);

#if defined(LSHKIT_ISA_AVX512)
constexpr bool kMasksRows = true;
template <class T>
LSHKIT_INLINE Vec<T> load_used(const T* row, RowMask used) {
  return Vec<T>(_mm512_maskz_loadu_epi32(used, row));
}
// The mask of a row until now, which is used from here on.
LSHKIT_INLINE RowMask use_row(RowMask* used) {
  const RowMask before = *used;
  *used = kAllUsed;
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
// clear(row) for each row that has not been used.
template <class Clear>
LSHKIT_INLINE void clear_unused(const RowMask* used, index_t rows, const Clear& clear) {
#if defined(LSHKIT_ISA_AVX512)
  for (index_t first = 0; first < rows; first += 32) {
    const std::uint32_t there = first + 32 <= rows ? ~0u : (1u << (rows - first)) - 1;
    const __m512i masks = _mm512_maskz_loadu_epi16(there, used + first);
    std::uint32_t left = _mm512_mask_testn_epi16_mask(there, masks, masks);
    for (; left; left &= left - 1) clear(first + __builtin_ctz(left));
  }
#else
  (void)used, (void)rows, (void)clear;
#endif
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

#pragma once
// The sum verb in 16-bit integers, for attention of 16-bit inputs.
#include "bucket_sum.hpp"

namespace lshkit {

// In slices of kFastColumns columns.
inline index_t fast_slice_count(index_t n_values) {
  return (n_values + kFastColumns - 1) / kFastColumns;
}
// Slices [first, last), like sum_slices: in float32 by pairs where these are few, else in tables.
// For these values are rounded to multiples of a step of their column, 1/32767 of the largest
// bucket sum that is to be expected: no sum of the integers rounds. A slice whose values are not
// finite, whose step would be coarse against its values, or whose buckets left 16 bits in spite of
// a wider step, goes to sum_by_tables. The choice depends on the slice alone. Uses thread_scratch.
void fast_sum_slices(const HeadSum<float>& s, index_t first, index_t last);

}  // namespace lshkit

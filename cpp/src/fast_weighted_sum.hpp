#pragma once
// The weighted sums of one head in tables of 16-bit integers.
#include "weighted_bucket_sum.hpp"

namespace lshkit {

// As weighted_sum, of all slices, and weighted_sum_backward, for as many hashes from the head's
// first one on as 16 bits will do for: return the first hash that is not done.
index_t fast_weighted_sum(const WeightedHead<float>& head, Matrix<float> out, float* weight_sums);
index_t fast_weighted_sum_backward(const WeightedHead<float>& head, Matrix<const float> grad,
                                   const float* bias, Matrix<float> value_grad);

}  // namespace lshkit

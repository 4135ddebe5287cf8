#pragma once
// The weighted sum verb on a head of which a side has weights in all buckets: matrix products of
// chunks of rows, as weighted_sum and weighted_sum_backward otherwise.
#include "weighted_bucket_sum.hpp"

namespace lshkit {

// Sides give their weights by WeightedSide::dense, their gradients go to take_dense_grads.
bool dense_sum_pays(const WeightedHead<float>& head);
// Both return false, and have done nothing, where a value or gradient that is not finite would
// reach rows before it.
bool dense_sum(const WeightedHead<float>& head, Matrix<float> out, float* weight_sums,
               index_t first, index_t last);
bool dense_sum_backward(const WeightedHead<float>& head, Matrix<const float> grad,
                        const float* bias, Matrix<float> value_grad);

}  // namespace lshkit

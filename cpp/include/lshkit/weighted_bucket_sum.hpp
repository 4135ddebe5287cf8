#pragma once
// The sum verb with weights: a row belongs to n_probes buckets of each hash, with a weight in each.
// out[i] = scale * sum over hashes h, probes a of query i and probes b of key j in the same bucket
// of query_weight[i,h,a] * key_weight[j,h,b] * values[j]. Linear in the number of rows, and its
// gradients in values and weights are bucket sums and dot products with buckets: linear too.
#include "lshkit/bucket_sum.hpp"

namespace lshkit {

// Contiguous (batch, heads, rows, n_hashes, n_probes).
template <class T>
struct Probes {
  Codes codes;
  const T* weights = nullptr;  // null: ones
  index_t n_probes = 1;
};

// T: float or double. Every element of out is written.
template <class T>
void weighted_bucket_sum(const BucketSumShape& shape, Probes<T> queries, Probes<T> keys,
                         Tensor<const T> values, Mask key_mask, Order order, T scale, Tensor<T> out,
                         int threads);

template <class T>
struct WeightedSumGradients {
  Tensor<const T> out;  // gradient of the loss in the sums
  Tensor<T> values;  // every element is written; a masked key gets zeros, here and in its weights
  T *query_weights, *key_weights;  // like the weights; null: not wanted
};
template <class T>
void weighted_bucket_sum_backward(const BucketSumShape& shape, Probes<T> queries, Probes<T> keys,
                                  Tensor<const T> values, Mask key_mask, Order order, T scale,
                                  WeightedSumGradients<T> gradients, int threads);

}  // namespace lshkit

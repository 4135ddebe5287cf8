#pragma once
// The sum verb with weights where few rows share a bucket: what its kernels take. The probes of a
// key are chained by bucket, and a query reads the rows of the keys that it finds.
#include "kernel_arguments.hpp"

namespace lshkit {

// The probes of some hashes, those of one hash after the other: (n_hashes, rows, n_probes).
template <class T>
struct ChainedProbes {
  index_t rows;
  int n_probes;
  const std::uint16_t* codes;
  const T* weights;
  const std::uint8_t* valid;  // of rows; null: all
};
// Probe b of row j is number n_probes j + b + 1, 0 is none.
template <class T>
struct ChainedProbe {
  T weight;
  std::uint16_t row, next;  // in the same bucket
};

template <class T>
struct WeightedPairs {
  int n_hashes;
  index_t n_buckets;
  ChainedProbes<T> query, key;
  std::uint16_t* chains;     // (n_hashes, n_buckets): the first probe
  std::uint16_t* counts;     // (n_buckets)
  ChainedProbe<T>* chained;  // (n_hashes, key.rows * key.n_probes + 1)
  // Of the pairs that one query finds, as many as there may be.
  std::uint32_t *found_rows, *found_keys, *found_queries;  // key rows; probes of key and query
  T *found_weights, *found_dots;                           // products of two weights, of two rows
  Matrix<const T> values;
  T scale;
};

// sum_i = scale * the sum of weight * value over the pairs of query i, added to what is there or in
// its place. weight_sums: null, or gets the same of a column of ones, added.
template <class T>
struct WeightedPairSum : WeightedPairs<T> {
  Matrix<T> sum;
  bool accumulate;
  T* weight_sums;
};
// From grad, that of the sums, and bias (null: zeros), that of weight_sums. Null: not wanted. The
// gradients of weights are laid out as the weights are. All of them are added to.
template <class T>
struct WeightedPairGradient : WeightedPairs<T> {
  Matrix<const T> grad;
  const T* bias;
  T *query_weight_grads, *key_weight_grads;
  Matrix<T> value_grad;
};

}  // namespace lshkit

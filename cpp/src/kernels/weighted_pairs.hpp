#pragma once
// The sum verb with weights where few rows share a bucket: what its kernels take. The probes of
// keys are sorted by bucket, and a query reads the rows of the keys that it finds.
#include "kernel_arguments.hpp"

namespace lshkit {

// The probes of some hashes, those of one hash after the other: (n_hashes, rows, n_probes).
template <class T>
struct PairProbes {
  index_t rows;
  int n_probes;
  const std::uint16_t* codes;
  const T* weights;
  const std::uint8_t* valid;  // of rows; null: all
};
// Elements of found arrays that are written beyond `most`, besides two for each probe of a query.
constexpr int kPairsAhead = 64;

template <class T>
struct WeightedPairs {
  int n_hashes;
  index_t n_buckets;
  PairProbes<T> query, key;
  // The keys' probes of one hash by bucket. A key is its probe among those of the hash, in the
  // upper 16 bits, and its row.
  std::uint16_t* begins;  // (n_buckets + 1), in whole groups of four
  std::uint32_t* sorted_keys;
  T* sorted_weights;
  // The pairs of all hashes and queries, hash by hash: at most `most`. Those of hash h and query i
  // are the elements from found_begins[h * begins_stride + i] to the next number.
  index_t most, begins_stride;
  std::uint32_t *found_begins, *found_keys, *found_probes;  // null: probes of queries not wanted
  T* found_weights;                                         // products of two weights
  // The pairs of one query, of all hashes. Here a key's probe is one of all hashes.
  std::uint32_t *rows, *key_probes, *query_probes;  // null: probes not wanted
  T *weights, *dots;                                // products of two weights, of two rows
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

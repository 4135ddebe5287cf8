#pragma once
// The sum verb with weights where few rows share a bucket: what its kernels take. The probes of
// keys are linked by bucket, and a query reads the rows of the keys that it finds.
#include "kernel_arguments.hpp"

namespace lshkit {

// The probes of some hashes, those of one hash after the other: (n_hashes, rows, n_probes); of
// keys, one weight more, which is read as that of no key.
template <class T>
struct PairProbes {
  index_t rows;
  int n_probes;
  const std::uint16_t* codes;
  const T* weights;
  const std::uint8_t* valid;  // of rows; null: all
};

// A key's probe has the number row * n_probes + probe among those of a hash; rows * n_probes: none,
// of which the weight is read and not used. A query's has hash << kHashBit | row * n_probes +
// probe.
constexpr int kHashBit = 24;
// Elements of lists that are written beyond the most pairs, besides two for each probe of a query.
constexpr int kPairsAhead = 64;

// Pairs of a query and a key.
template <class T>
struct PairList {
  std::uint16_t* keys;    // their probes' numbers
  T* weights;             // products of two weights
  std::uint32_t* probes;  // those of queries, or null: not wanted
};

template <class T>
struct WeightedPairs {
  int n_hashes;
  index_t n_buckets;
  bool causal;  // query i sees the keys up to i
  PairProbes<T> query, key;
  // The keys' probes of one hash: the first in each bucket, and the next after each in its bucket.
  std::uint16_t* first;  // (n_buckets)
  std::uint16_t* next;   // (rows * n_probes + 1)
  // The pairs of all hashes and queries, hash by hash: at most `most`; causal: those of a hash and
  // its queries up to i at most most + (i + 1) * most_of_query. Those of hash h and query i are the
  // elements from begins[h * begins_stride + i] to the next number.
  index_t most, most_of_query, begins_stride;
  std::uint32_t* begins;
  PairList<T> found;
  PairList<T> pairs;  // of one query, of all hashes
  T* dots;            // of those
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

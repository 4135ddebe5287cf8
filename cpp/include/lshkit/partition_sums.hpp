#pragma once
// Sums of exp(q . x_j + b_j) over the rows of a data set, split for every query: the near rows,
// which share at least min_count of its buckets, exactly; the others through a uniform sample.
#include "lshkit/tensor.hpp"

namespace lshkit {

// The rows of each bucket of each hash.
struct BucketLists {
  const std::int32_t* order = nullptr;  // (n_hashes, n_rows): rows, bucket after bucket
  const std::int32_t* start = nullptr;  // (n_hashes, n_buckets + 1): where each bucket begins
  index_t n_hashes = 0, n_buckets = 0, n_rows = 0;
};

struct PartitionProblem {
  const float* queries = nullptr;  // (n_queries, n_features)
  index_t n_queries = 0, n_features = 0;
  const float* rows = nullptr;  // (lists.n_rows, n_features)
  const float* bias = nullptr;  // (lists.n_rows), null: zeros
  BucketLists lists;
  Codes probes;  // (n_queries, n_hashes, n_probes), distinct for a hash
  index_t n_probes = 1;
  index_t min_count = 1;                 // 1 to 3
  const std::int32_t* sample = nullptr;  // (n_sample) distinct rows, the same for all queries
  index_t n_sample = 0;
};

// With l_j the exponents: largest is their maximum over near and sampled rows, the sums are of
// exp(l_j - largest): over all near rows, and over the sampled rows that are not near, with the sum
// of the squares. 0 and -infinity where there is nothing.
struct PartitionSums {
  double largest, near, far, far_squares, near_rows, far_rows;
};

// out (n_queries). Memory: the sample, and for each thread 9 bytes a row.
void partition_sums(const PartitionProblem& problem, PartitionSums* out, int threads);

}  // namespace lshkit

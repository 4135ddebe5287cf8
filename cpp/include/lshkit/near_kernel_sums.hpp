#pragma once
// Sums of a kernel over the rows that share buckets with a query: what a density gets exactly.
#include "lshkit/hash_tables.hpp"
#include "lshkit/kernel_sums.hpp"

namespace lshkit {

template <class T>
struct NearKernelProblem {
  const T* queries = nullptr;  // (n_queries, n_features), scaled as the rows; of norm 1 for angular
  const T* rows = nullptr;     // (tables.n_rows, n_features)
  index_t n_queries = 0, n_features = 0;
  DensityKernel kernel = DensityKernel::gaussian;  // to angular
  int n_bits = 1;                                  // of angular
  const double* weights = nullptr;                 // (tables.n_rows) >= 0, or null: 1
  HashTables tables;
  Codes query_codes;               // (n_queries, n_hashes)
  index_t min_count = 1;           // buckets that a near row shares with the query: 1 to 255
  index_t max_bucket_size = 0;     // larger ones are left out
  const index_t* stops = nullptr;  // (n_stops), ascending, the last at least n_rows
  index_t n_stops = 1;
};

// exp(shift) * total is the sum of weight * k over `count` near rows.
struct NearKernelSum {
  double shift, total, squares, count;
};

// sums (n_queries, n_stops): of the near rows below stops[0], from there below stops[1], and so on.
// shift -inf where there is none. Memory: for each thread 13 bytes a row of the tables,
// 21 in double.
template <class T>
void near_kernel_sums(const NearKernelProblem<T>& problem, NearKernelSum* sums, int threads);

}  // namespace lshkit

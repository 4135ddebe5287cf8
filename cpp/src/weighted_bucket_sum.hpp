#pragma once
// The weighted sum verb on one head, for the clients that go head by head. A client gives the
// probes of a run of rows when they are asked for, a group of hashes at a time.
#include <functional>

#include "kernels/kernels.hpp"
#include "lshkit/weighted_bucket_sum.hpp"

namespace lshkit {

// Rows [first, first + rows) and hashes [hash, hash + group).
struct ProbeRun {
  index_t first, rows, hash, group;
};
template <class T>
struct WeightedSide {
  index_t rows, n_probes;
  const std::uint8_t* valid;  // (rows), null: all take part
  // Writes codes and weights: for one `group` of the run's hashes after the other, each contiguous
  // (run.rows, group, n_probes).
  std::function<void(const ProbeRun& run, index_t group, std::uint16_t* codes, T* weights)> probes;
  // Takes the gradient of the weights of a run, laid out as the weights are. Null: not wanted.
  std::function<void(const ProbeRun& run, index_t group, const T* weights, const T* weight_grads)>
      take_grads;
  index_t batch = 1;  // hashes whose probes are best made together
};

template <class T>
struct WeightedHead {
  WeightedSide<T> query, key;
  index_t n_hashes, n_buckets;
  Matrix<const T> values;
  Order order;
  T scale;
  bool fast = false;        // tables of 16-bit integers where their errors are small
  index_t first_hash = 0;   // those before are done: the sums are there
  index_t first_query = 0;  // those before are done, causal and forward: their sums are there
};

// out = the sums of the slices [first, last) of columns; see slice_count. weight_sums: the same of
// a column of ones, not wanted when null. Uses thread_scratch.
template <class T>
void weighted_sum(const WeightedHead<T>& head, Matrix<T> out, T* weight_sums, index_t first,
                  index_t last);
// From grad, the gradient of the sums, and bias (null: zeros), that of weight_sums. value_grad gets
// every row, those of keys that take no part too. Uses thread_scratch.
template <class T>
void weighted_sum_backward(const WeightedHead<T>& head, Matrix<const T> grad, const T* bias,
                           Matrix<T> value_grad);

}  // namespace lshkit

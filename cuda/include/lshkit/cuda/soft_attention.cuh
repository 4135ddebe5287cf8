#pragma once
// What attention with soft codes needs beside its verbs: the sums again from the output. Bound:
// device memory.
#include "lshkit/cuda/rows.cuh"

namespace lshkit::cuda {

struct RestoreSums {
  Elements out;
  const float* divisors = nullptr;  // (rows): what a row of sums was divided by
  index_t batch = 1, heads = 1, n_rows = 0, columns = 0;
  int counts = 0;         // the divisor is the last column
  float* sums = nullptr;  // (rows, columns + counts)
};

LSHKIT_KERNEL void __launch_bounds__(kRowThreads) restore_sums_kernel(RestoreSums a) {
  const index_t row = block_index() * kRowsOfBlock + warp_index();
  if (row >= a.batch * a.heads * a.n_rows) return;
  const index_t flat = row / a.n_rows, i = row % a.n_rows;
  const index_t from = flat / a.heads * a.out.batch + flat % a.heads * a.out.head + i * a.out.row;
  const float divisor = a.divisors[row];
  float* const sums = a.sums + row * (a.columns + a.counts);
  for (index_t c = lane_index(); c < a.columns + a.counts; c += kWarp)
    sums[c] = c < a.columns ? load_element<float>(a.out.data, from + c, a.out.element) * divisor
                            : divisor;
}

inline void restore_sums(const Queue& queue, const RestoreSums& a) {
  launch(queue, "restore_sums", restore_sums_kernel, blocks_of_rows(a.batch * a.heads * a.n_rows),
         kRowThreads, 0, a);
}

}  // namespace lshkit::cuda

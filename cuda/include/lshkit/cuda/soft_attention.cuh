#pragma once
// What attention with soft codes needs beside its verbs: the sums again from the output. Bound:
// device memory.
#include "lshkit/cuda/rows.cuh"

namespace lshkit::cuda {

struct RestoreSums : RowGrid {
  Elements out;
  const float* divisors = nullptr;  // (rows): what a row of sums was divided by
  int counts = 0;                   // the divisor is the last column
  float* sums = nullptr;            // (rows, columns + counts)
};

template <bool Eights>
__global__ void __launch_bounds__(kRowThreads) restore_sums_kernel(RestoreSums a) {
  for (int pass = 0; pass < kRowPasses; ++pass) {
    const RowLane<Eights> r(a, pass);
    const float divisor = r.exists() ? a.divisors[r.row()] : 0;
    const index_t from = r.offset_in(a.out), to = r.row() * (a.columns + a.counts);
    for (index_t first = 0; first < a.columns; first += r.step()) {
      float x[kHeld];
      r.load(a.out.data, a.out.element, from, first, x);
      LSHKIT_UNROLL
      for (int k = 0; k < kHeld; ++k) x[k] *= divisor;
      r.store(a.sums, Element::float32, to, first, x);
    }
    if (a.counts && r.exists() && r.lane == 0) a.sums[to + a.columns] = divisor;
  }
}

inline void restore_sums(const Queue& queue, const RestoreSums& a) {
  launch_rows(
      queue, "restore_sums", a,
      rows_of_eights(a.out, a.columns) && floats_of_eights(a.sums, a.columns, a.columns + a.counts),
      restore_sums_kernel<true>, restore_sums_kernel<false>);
}

}  // namespace lshkit::cuda

#pragma once
// The kernel sums of one instruction set: a run of keys against a run of queries in one thread.
#include <algorithm>
#include <cmath>

#include "lshkit/kernel_sums.hpp"

namespace lshkit {

template <class T>
struct KernelSumPass {
  KernelSumShape shape;
  const T* queries;
  const T* query_norms;  // half the squared length of each
  DensityKeys keys;      // shape.n_keys of them, from the first row
  KernelEdge edge;       // of the compact kernels
  KernelSum* sums;       // added to
  void* scratch;         // 64-byte aligned
  index_t skip = 0;      // so many of the first keys do not count
};

// The keys nearest to each query, the nearest first; of two as far, that of the smaller index.
template <class T>
struct NearestPass {
  KernelSumPass<T> rows;  // shape, queries, keys and scratch
  index_t n_nearest;      // 1 to n_keys
  std::int32_t* nearest;  // (n_queries, n_nearest)
};

inline void add(KernelSum& sum, const KernelSum& more) {
  if (more.total == 0 && more.squares == 0) {  // keys without weight
    if (sum.total == 0 && sum.squares == 0) sum.shift = std::max(sum.shift, more.shift);
    return;
  }
  if (sum.total == 0 && sum.squares == 0) {
    sum = more;
    return;
  }
  const double shift = std::max(sum.shift, more.shift);
  const double a = std::exp(sum.shift - shift), b = std::exp(more.shift - shift);
  sum = {shift, sum.total * a + more.total * b, sum.squares * a * a + more.squares * b * b};
}

}  // namespace lshkit

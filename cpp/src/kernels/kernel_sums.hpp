#pragma once
// The kernel sums of one instruction set: a run of keys against a run of queries in one thread.
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
};

}  // namespace lshkit

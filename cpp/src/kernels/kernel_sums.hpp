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
  RadialWeight radial;
  KernelSum* sums;  // added to
  void* scratch;    // 64-byte aligned
};

struct KernelSumTable {
  index_t (*scratch_f32)(index_t n_features);  // bytes
  index_t (*scratch_f64)(index_t n_features);
  void (*f32)(const KernelSumPass<float>&);
  void (*f64)(const KernelSumPass<double>&);
};

namespace base {
KernelSumTable kernel_sum_table();
}
namespace avx2 {
KernelSumTable kernel_sum_table();
}
namespace avx512 {
KernelSumTable kernel_sum_table();
}

}  // namespace lshkit

// lshkit._C: the core's functions on borrowed tensors. Arguments are checked in the bindings; every
// output is the caller's, so nothing is allocated.
#include <cstdlib>

#include "bindings.hpp"
#include "cuda_call.hpp"
#include "lshkit/runtime.hpp"
#include "lshkit/threads.hpp"

namespace lshkit {
namespace {

#ifdef __clang__
constexpr const char* kCompiler = __VERSION__;
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

}  // namespace

bool emulates_cuda() {
#ifdef LSHKIT_EMULATED_CUDA
  const char* on = std::getenv("LSHKIT_EMULATE_CUDA");
  return on && *on == '1';
#else
  return false;
#endif
}

}  // namespace lshkit

PYBIND11_MODULE(_C, module) {
  module.doc() =
      "The compiled core of lshkit; its functions write into arrays that they are given.";
  lshkit::bind_hash(module);
  lshkit::bind_kernel_sums(module);
  lshkit::bind_leave_one_out(module);
  lshkit::bind_binned_hash(module);
  lshkit::bind_buckets(module);
  lshkit::bind_collisions(module);
  lshkit::bind_attention(module);
  lshkit::bind_lsh_attention(module);
  lshkit::bind_soft_hash(module);
  lshkit::bind_soft(module);
  lshkit::bind_weighted_buckets(module);
  lshkit::bind_decoding(module);
  lshkit::bind_code_cache(module);
  lshkit::bind_partition_sums(module);
  lshkit::bind_draw(module);
  lshkit::bind_cells(module);
  lshkit::bind_pair_products(module);
  lshkit::bind_parameters(module);
  module.def("instruction_set", &lshkit::instruction_set);
  module.def("cache_sizes", [] {
    const lshkit::CacheSizes& sizes = lshkit::cache_sizes();
    return pybind11::make_tuple(sizes.l2, sizes.l3);
  });
  module.def("max_threads", &lshkit::max_threads);
  module.def("set_max_threads", &lshkit::set_max_threads);
  module.def("thread_backend", &lshkit::thread_backend);
  module.def("compiler", [] { return lshkit::kCompiler; });
  module.attr("instruction_sets") = LSHKIT_INSTRUCTION_SETS;  // those compiled in
  module.attr("with_cuda") = lshkit::kWithCuda;
  module.def("cuda_architectures", &lshkit::cuda_architectures);
}

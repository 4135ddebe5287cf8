#pragma once
// What the machine offers: instruction set, caches, threads and memory pages.
#include <cstddef>

#include "lshkit/tensor.hpp"

namespace lshkit {

// "base", "avx2", "avx512", "avx512_bf16" or "amx": the best that the machine runs, or the one that
// the environment variable LSHKIT_ISA names, which may also be "amx_twin". Read once;
// std::runtime_error for an unknown name, and for a set that does not run here, saying why.
const char* instruction_set();
// Bytes of a core's L2 cache and of the L3 cache: the work is cut so that it fits them. What the
// machine reports, or the environment variable LSHKIT_CACHE_SIZES, "L2,L3" in KB, as of another
// machine. Read once; std::runtime_error for anything else in the variable.
struct CacheSizes {
  index_t l2, l3;
};
const CacheSizes& cache_sizes();
// Of the calling thread: those that set_max_threads or OMP_NUM_THREADS asks for, or one for each
// processor. With OpenMP, 1 in a forked child.
int max_threads();
const char* thread_backend();  // "openmp" or "std"
// Asks for large pages (2 MB) where `bytes` of memory from `begin` on, of 4 MB or more, span them.
// Fresh results arrive as 4 KB pages otherwise, whose faults take as long as the attention itself.
void prefer_large_pages(void* begin, std::size_t bytes);

}  // namespace lshkit

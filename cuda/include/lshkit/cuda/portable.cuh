#pragma once
// One switch: nvcc compiles the kernels for the GPU; another compiler gets tests/emulation, which
// runs them on the host. Blocks and grids have one dimension, shared memory is all dynamic.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "lshkit/cuda/queue.hpp"
#include "lshkit/tensor.hpp"

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define LSHKIT_UNROLL _Pragma("unroll")
#define LSHKIT_KERNEL static __global__  // of a kernel that is no template
// At a multiple of 1024, as matrices of a warp group have to be.
#define LSHKIT_SHARED_MEMORY(name) extern __shared__ __align__(1024) unsigned char name[]
#else
#include "emulation.hpp"
#ifdef LSHKIT_EMULATED_PTX
#include "run_ptx.hpp"
#endif
#define LSHKIT_UNROLL
#define LSHKIT_KERNEL inline
#define LSHKIT_SHARED_MEMORY(name) unsigned char* const name = lshkit::emulation::shared_memory()
#endif

namespace lshkit::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline int thread_index() { return int(threadIdx.x); }
__device__ inline int lane_index() { return int(threadIdx.x) % kWarp; }
__device__ inline int warp_index() { return int(threadIdx.x) / kWarp; }
__device__ inline index_t block_index() { return index_t(blockIdx.x); }
__host__ __device__ constexpr index_t ceil_div(index_t a, index_t b) { return (a + b - 1) / b; }
__host__ __device__ constexpr index_t least(index_t a, index_t b) { return a < b ? a : b; }
__host__ __device__ constexpr index_t most(index_t a, index_t b) { return a > b ? a : b; }

// Of a number that is not 0.
__device__ inline int lowest_bit(unsigned bits) { return __popc((bits & (0u - bits)) - 1u); }
// Sums of a warp in a fixed order, the same number in every lane.
template <class T>
__device__ inline T warp_sum(T x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// Computed once, where the compiler would rather compute it again in each turn of a loop.
#ifdef __CUDACC__
__device__ inline void keep_in_register(std::uint32_t& x) { asm volatile("" : "+r"(x)); }
template <class T>
__device__ inline void keep_in_register(T*& x) {  // to global memory
  asm volatile("" : "+l"(x));
  __builtin_assume(__isGlobal(x));
}
#else
template <class T>
inline void keep_in_register(T&) {}
#endif

// Of the code that is being compiled: GPUs of compute capability 8.x have less shared memory, and
// need more registers where they have no products of four warps.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kBeforeHopper = true;
#else
constexpr bool kBeforeHopper = false;
#endif

#ifdef __CUDACC__
inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // or the next launch would report it once more
  throw std::runtime_error(std::string("lshkit: ") + what + ": " + cudaGetErrorString(status));
}
// Bytes of a block, beyond the 48 KB that need no asking.
inline index_t shared_limit(const Queue& queue) {
  int bytes = 0;
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, queue.device),
        "cudaDeviceGetAttribute");
  return bytes;
}
#else
inline index_t& emulated_shared_limit = emulation::shared_limit;  // a test may have less
inline index_t shared_limit(const Queue&) { return emulated_shared_limit; }
#endif

constexpr index_t kMaxBlocks = 0x7fffffff;

// Queues a kernel; no blocks are no work. Throws what the launch reports.
template <class... Parameters, class... Arguments>
void launch(const Queue& queue, const char* name, void (*kernel)(Parameters...), index_t blocks,
            int threads, std::size_t shared_bytes, const Arguments&... arguments) {
  if (blocks == 0) return;
  if (blocks > kMaxBlocks)
    throw std::runtime_error(std::string("lshkit: ") + name + " needs more than 2^31 - 1 blocks");
#ifdef __CUDACC__
  if (shared_bytes > 48 * 1024)  // always the most there is: another thread may launch it with more
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               int(shared_limit(queue))),
          name);
  kernel<<<unsigned(blocks), unsigned(threads), shared_bytes,
           static_cast<cudaStream_t>(queue.stream)>>>(arguments...);
  check(cudaGetLastError(), name);
#else
  (void)queue;
#ifdef LSHKIT_EMULATED_PTX
  emulation::launch(name, blocks, threads, shared_bytes, ptx::calls_of(kernel, arguments...));
#else
  emulation::launch(name, blocks, threads, shared_bytes, [&] { kernel(arguments...); });
#endif
#endif
}

// Cuts pieces off the caller's memory, or measures how much they need (base null).
class Cut {
 public:
  explicit Cut(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(index_t count) {
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    const index_t bytes = count * index_t(sizeof(T));
    index_t whole = ceil_div(bytes, 256) * 256;
#ifndef __CUDACC__
    whole += 256;  // that no kernel may touch
    if (base_) emulation::bound_piece(piece, std::size_t(bytes), std::size_t(whole));
#endif
    used_ += whole;
    return piece;
  }
  index_t used() const { return used_; }

 private:
  char* base_;
  index_t used_ = 0;
};

}  // namespace lshkit::cuda

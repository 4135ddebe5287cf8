#pragma once
// Runs CUDA kernels on the host, to test their source where there is no GPU: threadIdx and
// blockIdx, dynamic shared memory (poisoned, of the exact size), __syncthreads, full-mask shuffles
// and votes, integer atomics. A CUDA thread is a fibre and blocks run one after the other, always
// in the same order; a barrier that some thread never reaches is reported. With -fsanitize=thread
// the fibres are threads to the sanitizer, which barriers alone put in order: a missing barrier is
// a data race, and so are two blocks, of an even and of an odd number, that write to one place.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

namespace lshkit::emulation {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
void launch(unsigned blocks, unsigned threads, std::size_t shared_bytes,
            const std::function<void()>& kernel);
unsigned char* shared_memory();
void synchronize_block();
void synchronize_warp();
std::uint64_t exchange(std::uint64_t value, unsigned lane);  // what `lane` of this warp gave

template <class T>
T exchange_as(T value, unsigned lane) {
  static_assert(sizeof(T) <= 8, "64 bits at most");
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = exchange(bits, lane);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace lshkit::emulation

extern thread_local lshkit::emulation::Index threadIdx, blockIdx, blockDim, gridDim;

inline void __syncthreads() { lshkit::emulation::synchronize_block(); }
inline void __syncwarp(unsigned = 0xffffffffu) { lshkit::emulation::synchronize_warp(); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return lshkit::emulation::exchange_as(value, (threadIdx.x % 32) ^ unsigned(mask));
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return lshkit::emulation::exchange_as(value, unsigned(lane) % 32);
}
inline unsigned __ballot_sync(unsigned, int vote) {
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane)
    votes |= unsigned(__shfl_sync(0xffffffffu, vote != 0, lane)) << lane;
  return votes;
}
inline unsigned __match_any_sync(unsigned, unsigned value) {
  unsigned equal = 0;
  for (int lane = 0; lane < 32; ++lane)
    equal |= unsigned(__shfl_sync(0xffffffffu, value, lane) == value) << lane;
  return equal;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int atomicAdd(int* to, int value) { return __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }

#pragma once
// Runs CUDA kernels on the host, to test their source where there is no GPU: threadIdx and
// blockIdx, dynamic shared memory (poisoned, of the exact size), __syncthreads, full-mask shuffles
// and votes, integer atomics. A CUDA thread is a fibre and blocks run one after the other, in
// another order at each launch, and so do the threads of a block. Errors: a barrier that some
// thread never reaches, a shuffle of a warp of which some lanes have returned, lanes of a warp that
// wait for each other in different functions, a launch beyond what a GPU takes. With
// -fsanitize=thread the fibres are threads to the sanitizer, which barriers alone put in order: a
// missing barrier is a data race, also where lanes have met in a shuffle or vote, and so are two
// blocks, of an even and of an odd number, that write to one place. With -fsanitize=address each
// piece of scratch ends where it ends.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

namespace lshkit::emulation {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
inline std::int64_t shared_limit = 227 * 1024;  // bytes of a block; a test may have less

void launch(const char* name, std::int64_t blocks, std::int64_t threads, std::size_t shared_bytes,
            const std::function<void()>& kernel);
inline void check_mask(unsigned lanes) {
  if (lanes != 0xffffffffu) throw std::runtime_error("only whole warps are emulated");
}
inline const void* aligned(const void* pointer, std::size_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % bytes != 0)
    throw std::runtime_error("an access of " + std::to_string(bytes) +
                             " bytes that is not aligned");
  return pointer;
}
// Of `whole` bytes a kernel may touch the first `bytes`.
void bound_piece(void* piece, std::size_t bytes, std::size_t whole);
unsigned char* shared_memory();
std::size_t shared_bytes();
void synchronize_block();
void synchronize_warp();
constexpr int kGivenWords = 6;
struct Given {
  std::uint32_t words[kGivenWords];
};
void give_all(const std::uint32_t* mine, int count, Given* all);  // of every lane of this warp
unsigned ballot(bool vote);                                  // bit i: what lane i of this warp gave
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
inline void __syncwarp(unsigned lanes = 0xffffffffu) {
  lshkit::emulation::check_mask(lanes);
  lshkit::emulation::synchronize_warp();
}
template <class T>
T __shfl_xor_sync(unsigned lanes, T value, int mask) {
  lshkit::emulation::check_mask(lanes);
  return lshkit::emulation::exchange_as(value, (threadIdx.x % 32) ^ unsigned(mask));
}
template <class T>
T __shfl_sync(unsigned lanes, T value, int lane) {
  lshkit::emulation::check_mask(lanes);
  return lshkit::emulation::exchange_as(value, unsigned(lane) % 32);
}
inline unsigned __ballot_sync(unsigned lanes, int vote) {
  lshkit::emulation::check_mask(lanes);
  return lshkit::emulation::ballot(vote != 0);
}
inline unsigned __match_any_sync(unsigned lanes, unsigned value) {
  unsigned equal = 0;
  for (int lane = 0; lane < 32; ++lane)
    equal |= unsigned(__shfl_sync(lanes, value, lane) == value) << lane;
  return equal;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int atomicAdd(int* to, int value) { return __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }

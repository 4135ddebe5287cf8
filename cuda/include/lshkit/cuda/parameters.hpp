#pragma once
// The random numbers of fast Hadamard hashing on a GPU, from a seed that is there already: nothing
// is copied and nothing waits. Those of hyperplanes come from a generator that goes through its
// numbers one after the other, on the CPU (lshkit/hashing/parameters.py).
#include <cstdint>

#include "lshkit/cuda/queue.hpp"
#include "lshkit/tensor.hpp"

namespace lshkit::cuda {

// Of n_sets sets of (n_angle_rows + n_sign_rows, columns) numbers, columns a power of two >= 16:
// rows of columns / 2 cosines and as many sines of random angles, then rows of random signs.
struct RandomNumbers {
  const std::int64_t* seed = nullptr;  // on the device; its 64 bits, whatever they are
  std::uint64_t stream = 0;            // the key's other 64: streams are independent
  index_t n_sets = 0, n_angle_rows = 0, n_sign_rows = 0, columns = 0;
  float* out = nullptr;  // aligned to 16 bytes
};

void random_numbers(const Queue& queue, const RandomNumbers& numbers);

}  // namespace lshkit::cuda

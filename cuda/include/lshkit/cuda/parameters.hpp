#pragma once
// The random numbers of hash functions on a GPU, from a seed that is there already: nothing is
// copied and nothing waits. They are those of lshkit/hash_functions.py.
#include <cstdint>

#include "lshkit/cuda/queue.hpp"
#include "lshkit/tensor.hpp"

namespace lshkit::cuda {

// Of fast Hadamard hashing: n_sets sets of (n_angle_rows + n_sign_rows, columns) numbers, columns a
// power of two >= 64: rows of columns / 2 cosines and as many sines of random angles, then rows of
// random signs.
struct RandomNumbers {
  const std::int64_t* seed = nullptr;  // on the device; its 64 bits, whatever they are
  index_t n_sets = 0, n_angle_rows = 0, n_sign_rows = 0, columns = 0;
  float* out = nullptr;  // aligned to 16 bytes
};

// Of hyperplanes: n_sets times n_numbers standard normal numbers.
struct RandomNormals {
  const std::int64_t* seed = nullptr;  // as above
  index_t n_sets = 0, n_numbers = 0;
  float* out = nullptr;
};

void random_numbers(const Queue& queue, const RandomNumbers& numbers);
void random_normals(const Queue& queue, const RandomNormals& normals);

}  // namespace lshkit::cuda

#pragma once
// The random numbers of hash functions on a GPU, from a seed that is there already: nothing is
// copied and nothing waits.
#include <cstdint>

#include "lshkit/cuda/queue.hpp"
#include "lshkit/random_numbers.hpp"

namespace lshkit::cuda {

// With a seed on the device, of which the 64 bits are taken, whatever they are.
struct RandomNumbers : lshkit::RandomNumbers {
  const std::int64_t* seed = nullptr;
};
struct RandomNormals : lshkit::RandomNormals {
  const std::int64_t* seed = nullptr;
};

void random_numbers(const Queue& queue, const RandomNumbers& numbers);
void random_normals(const Queue& queue, const RandomNormals& normals);

}  // namespace lshkit::cuda

#pragma once
// The random numbers that make hash functions (hash.hpp), from a seed.
#include "lshkit/philox.hpp"
#include "lshkit/tensor.hpp"

namespace lshkit {

// Of fast Hadamard hashing: n_sets sets of (n_angle_rows + n_sign_rows, columns) numbers, columns a
// power of two >= 64: rows of columns / 2 cosines and as many sines of random angles, then rows of
// random signs. A word of the counter makes two angles or 64 signs.
struct RandomNumbers {
  index_t n_sets = 0, n_angle_rows = 0, n_sign_rows = 0, columns = 0;
  float* out = nullptr;  // on a GPU aligned to 16 bytes
};

// Of hyperplanes: n_sets times n_numbers standard normal numbers, two a word.
struct RandomNormals {
  index_t n_sets = 0, n_numbers = 0;
  float* out = nullptr;
};

void random_numbers(RandomKey key, const RandomNumbers& numbers);
void random_normals(RandomKey key, const RandomNormals& normals);

}  // namespace lshkit

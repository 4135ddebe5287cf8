#include "lshkit/random_numbers.hpp"

#include "kernels/kernels.hpp"

namespace lshkit {

void random_numbers(RandomKey key, const RandomNumbers& numbers) {
  kernels().random_numbers(key, numbers);
}

void random_normals(RandomKey key, const RandomNormals& normals) {
  kernels().random_normals(key, normals);
}

}  // namespace lshkit

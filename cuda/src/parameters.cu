// The random numbers of hash functions as the bindings call for them.
#include "lshkit/cuda/parameters.cuh"
#include "lshkit/cuda/runtime.cuh"

namespace lshkit::cuda {

void random_numbers(const Queue& queue, const RandomNumbers& numbers) {
  const DeviceGuard guard(queue);
  const index_t angles = numbers.n_angle_rows * numbers.columns / 4;
  const index_t words = numbers.n_sets * (angles + numbers.n_sign_rows * numbers.columns / 64);
  launch(queue, "random_numbers", random_numbers_kernel, ceil_div(words, kRandomThreads),
         kRandomThreads, 0, numbers);
}

void random_normals(const Queue& queue, const RandomNormals& normals) {
  const DeviceGuard guard(queue);
  const index_t words = normals.n_sets * ceil_div(normals.n_numbers, 2);
  launch(queue, "random_normals", random_normals_kernel, ceil_div(words, kRandomThreads),
         kRandomThreads, 0, normals);
}

}  // namespace lshkit::cuda

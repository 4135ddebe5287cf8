// lshkit._C: random numbers of hash functions, made on a GPU.
#include "lshkit/cuda/parameters.hpp"

#include "bindings.hpp"
#include "checks.hpp"
#include "cuda_call.hpp"

namespace lshkit {
namespace {

void check(const TensorView& seed, const TensorView& out) {
  seed.require_type({kInt64});
  if (seed.size() != 1) seed.wrong_value("one element is wanted, was " + seed.describe_shape());
  out.require_type({kFloat32}).require_dims(3, "(sets, rows, columns)");
  out.require_contiguous().require_writable();
}

// These are false where the tensors are on the CPU: its numbers come from numpy.

bool random_numbers(py::handle seed_object, index_t n_angle_rows, py::handle out_object) {
  const TensorView seed("seed", seed_object, kAnyPlace), out("out", out_object, kAnyPlace);
  check(seed, out);
  const index_t columns = out.shape(2),
                angle_rows = check_range("n_angle_rows", n_angle_rows, 0, out.shape(1));
  if (columns < 64 || (columns & (columns - 1)) != 0)
    out.wrong_value("columns as many as a power of two that is at least 64 are wanted, was " +
                    out.describe_shape());
  if (reinterpret_cast<std::uintptr_t>(out.data<void>()) % 16 != 0)
    out.wrong_value("must be aligned to 16 bytes");
  const CudaCall gpu({&seed, &out});
  return gpu.run([&](const auto& queue, void*) {
    cuda::RandomNumbers numbers;
    numbers.seed = seed.data<const std::int64_t>();
    numbers.n_sets = out.shape(0);
    numbers.n_angle_rows = angle_rows;
    numbers.n_sign_rows = out.shape(1) - angle_rows;
    numbers.columns = columns;
    numbers.out = out.data<float>();
    cuda::random_numbers(queue, numbers);
    return index_t(0);
  });
}

bool random_normals(py::handle seed_object, py::handle out_object) {
  const TensorView seed("seed", seed_object, kAnyPlace), out("out", out_object, kAnyPlace);
  check(seed, out);
  const CudaCall gpu({&seed, &out});
  return gpu.run([&](const auto& queue, void*) {
    cuda::RandomNormals normals;
    normals.seed = seed.data<const std::int64_t>();
    normals.n_sets = out.shape(0);
    normals.n_numbers = out.shape(1) * out.shape(2);
    normals.out = out.data<float>();
    cuda::random_normals(queue, normals);
    return index_t(0);
  });
}

}  // namespace

void bind_parameters(py::module_& module) {
  using namespace pybind11::literals;
  module.def("random_numbers", &random_numbers, "seed"_a, "n_angle_rows"_a, "out"_a);
  module.def("random_normals", &random_normals, "seed"_a, "out"_a);
}

}  // namespace lshkit

// lshkit._C: hash codes.
#include "lshkit/hash.hpp"

#include "bindings.hpp"
#include "checks.hpp"
#include "cuda_call.hpp"

namespace lshkit {
namespace {

bool hash_codes(py::handle x_object, py::handle parameters_object, int family, index_t n_bits,
                index_t n_hashes, py::handle codes_object, int threads) {
  const TensorView x("x", x_object, kAnyPlace),
      parameters("parameters", parameters_object, kAnyPlace);
  const TensorView codes("codes", codes_object, kAnyPlace);
  check_vectors(x, {kFloat32, kBfloat16, kFloat16});
  const HashFunctions functions =
      functions_of(parameters, family, n_bits, n_hashes, x.shape(1), x.shape(3), kMaxHashBits);
  check_codes(codes, {code_type(n_bits)}).require_output();
  codes.require_shape({x.shape(0), x.shape(1), x.shape(2), n_hashes});
  if (codes.size() == 0) return true;
  const CudaCall gpu({&x, &parameters, &codes});
  if (gpu.run([&](const auto& queue, void*) {
        check_range("n_bits", n_bits, 1, kMaxBits);
        cuda::hash(queue, functions, float_matrices<float, const void>(x), x.shape(0), x.shape(1),
                   x.shape(2), x.shape(3), codes.data<void>());
        return index_t(0);
      }))
    return true;  // not asked: that would wait for the GPU
  WithoutGil without_gil;
  return hash(functions, float_matrices<float, const void>(x), x.shape(0), x.shape(1), x.shape(2),
              x.shape(3), codes.data<void>(), threads);
}

}  // namespace

void bind_hash(py::module_& module) {
  using namespace pybind11::literals;
  module.def("hash", &hash_codes, "x"_a, "parameters"_a, "family"_a, "n_bits"_a, "n_hashes"_a,
             "codes"_a, "threads"_a = 0);
}

}  // namespace lshkit

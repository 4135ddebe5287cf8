// lshkit._C: soft codes and their gradient.
#include "lshkit/soft_hash.hpp"

#include "bindings.hpp"
#include "checks.hpp"
#include "cuda_call.hpp"
#include "lshkit/cuda/soft.hpp"

namespace lshkit {
namespace {

// The arrays of soft codes for the rows of x, with those that hold every probe.
struct SoftHashViews {
  TensorView codes, margins, weights;
  index_t n_probes;

  SoftHashViews(py::handle codes_object, py::handle margins_object, py::handle weights_object,
                const TensorView& x, index_t n_bits, index_t n_hashes, index_t probes)
      : codes("codes", codes_object, kAnyPlace),
        margins("margins", margins_object, kAnyPlace),
        weights("weights", weights_object, kAnyPlace),
        n_probes(check_range("n_probes", probes, 1, index_t{1} << n_bits)) {
    check_codes(codes, {code_type(n_bits)});
    codes.require_shape({x.shape(0), x.shape(1), x.shape(2), n_hashes});
    // Four dimensions are as many as a view has: hashes and what each has are one.
    margins.require_type({kInt32});
    weights.require_type({kFloat32});
    check(margins, x, n_hashes * selected_bits(n_probes));
    check(weights, x, n_hashes * n_probes);
  }
  static void check(const TensorView& view, const TensorView& x, index_t columns) {
    view.require_shape({x.shape(0), x.shape(1), x.shape(2), columns}).require_contiguous();
  }
  SoftCodes soft() const {
    return {codes.data<const void>(), codes.type() == kUint8 ? 1 : 2, margins.data<const float>()};
  }
};

bool soft_hash_codes(py::handle x_object, py::handle parameters_object, py::handle sharpness_object,
                     int family, index_t n_bits, index_t n_hashes, index_t n_probes,
                     py::handle codes_object, py::handle margins_object,
                     py::handle probe_codes_object, py::handle weights_object, int threads) {
  const TensorView x("x", x_object, kAnyPlace);
  const TensorView parameters("parameters", parameters_object, kAnyPlace);
  const TensorView sharpness_view("sharpness", sharpness_object, kAnyPlace);
  const TensorView probe_codes("probe_codes", probe_codes_object, kAnyPlace);
  check_vectors(x, kFloat32);
  const HashFunctions functions =
      functions_of(parameters, family, n_bits, n_hashes, x.shape(1), x.shape(3));
  const Sharpness sharpness(sharpness_view, x.shape(1));
  const SoftHashViews out(codes_object, margins_object, weights_object, x, n_bits, n_hashes,
                          n_probes);
  probe_codes.require_type({code_type(n_bits)});
  SoftHashViews::check(probe_codes, x, n_hashes * n_probes);
  for (const TensorView* view : {&out.codes, &out.margins, &out.weights, &probe_codes})
    view->require_output();
  if (out.codes.size() == 0) return true;
  const index_t batch = x.shape(0), heads = x.shape(1), rows = x.shape(2);
  const CudaCall gpu(
      {&x, &parameters, &sharpness_view, &out.codes, &out.margins, &out.weights, &probe_codes});
  if (gpu.run([&](const auto& queue, void* scratch) {
        return cuda::soft_hash(queue, functions, matrices<const float>(x), batch, heads, rows,
                               x.shape(3), n_probes, sharpness.data, sharpness.stride,
                               {out.codes.data<void>(), out.margins.data<float>()},
                               probe_codes.data<void>(), out.weights.data<float>(), scratch);
      }))
    return true;
  WithoutGil without_gil;
  const bool finite =
      soft_hash(functions, matrices<const float>(x), batch, heads, rows, x.shape(3), n_probes,
                out.codes.data<void>(), out.margins.data<float>(), threads);
  soft_probes(out.soft(), batch, heads, rows, n_hashes, n_probes, sharpness.data, sharpness.stride,
              probe_codes.data<void>(), out.weights.data<float>(), threads);
  return finite;
}

void soft_hash_gradient(py::handle x_object, py::handle parameters_object,
                        py::handle sharpness_object, int family, index_t n_bits, index_t n_hashes,
                        index_t n_probes, py::handle codes_object, py::handle margins_object,
                        py::handle weights_object, py::handle grad_weights_object,
                        py::handle grad_x_object, py::handle grad_sharpness_object,
                        py::handle grad_parameters_object, int threads) {
  const TensorView x("x", x_object, kAnyPlace);
  const TensorView parameters("parameters", parameters_object, kAnyPlace);
  const TensorView sharpness_view("sharpness", sharpness_object, kAnyPlace);
  const TensorView grad_weights("grad_weights", grad_weights_object, kAnyPlace);
  const TensorView grad_x("grad_x", grad_x_object, kAnyPlace);
  const TensorView grad_sharpness("grad_sharpness", grad_sharpness_object, kAnyPlace);
  check_vectors(x, kFloat32);
  const HashFunctions functions =
      functions_of(parameters, family, n_bits, n_hashes, x.shape(1), x.shape(3));
  const Sharpness sharpness(sharpness_view, x.shape(1));
  const SoftHashViews in(codes_object, margins_object, weights_object, x, n_bits, n_hashes,
                         n_probes);
  grad_weights.require_type({kFloat32});
  SoftHashViews::check(grad_weights, x, n_hashes * n_probes);
  check_vectors(grad_x, kFloat32).require_output();
  grad_x.require_shape({x.shape(0), x.shape(1), x.shape(2), x.shape(3)});
  grad_sharpness.require_type({kFloat32}).require_shape({x.shape(0), x.shape(1)});
  grad_sharpness.require_contiguous().require_output();
  std::optional<TensorView> grad_parameters;
  const SoftHashGradients gradients{
      matrices<float>(grad_x), grad_sharpness.data<float>(),
      parameter_gradient(grad_parameters, grad_parameters_object, parameters, functions.family)};
  const CudaCall gpu({&x, &parameters, &sharpness_view, &in.codes, &in.margins, &in.weights,
                      &grad_weights, &grad_x, &grad_sharpness,
                      grad_parameters ? &*grad_parameters : nullptr});
  if (gpu.run([&](const auto& queue, void* scratch) {
        return cuda::soft_hash_backward(
            queue, functions, matrices<const float>(x), x.shape(0), x.shape(1), x.shape(2),
            x.shape(3), n_probes, sharpness.data, sharpness.stride, in.soft(),
            in.weights.data<const float>(), grad_weights.data<const float>(), gradients, scratch);
      }))
    return;
  WithoutGil without_gil;
  soft_hash_backward(functions, matrices<const float>(x), x.shape(0), x.shape(1), x.shape(2),
                     x.shape(3), n_probes, sharpness.data, sharpness.stride, in.soft(),
                     in.weights.data<const float>(), grad_weights.data<const float>(), gradients,
                     threads);
}

}  // namespace

void bind_soft_hash(py::module_& module) {
  using namespace pybind11::literals;
  module.def("soft_hash", &soft_hash_codes, "x"_a, "parameters"_a, "sharpness"_a, "family"_a,
             "n_bits"_a, "n_hashes"_a, "n_probes"_a, "codes"_a, "margins"_a, "probe_codes"_a,
             "weights"_a, "threads"_a = 0);
  module.def("soft_hash_backward", &soft_hash_gradient, "x"_a, "parameters"_a, "sharpness"_a,
             "family"_a, "n_bits"_a, "n_hashes"_a, "n_probes"_a, "codes"_a, "margins"_a,
             "weights"_a, "grad_weights"_a, "grad_x"_a, "grad_sharpness"_a, "grad_parameters"_a,
             "threads"_a = 0);
}

}  // namespace lshkit

// lshkit._C: kernel sums.
#include "lshkit/kernel_sums.hpp"

#include "bindings.hpp"
#include "checks.hpp"

namespace lshkit {
namespace {

void find_kernel_sums(int kernel, index_t n_bits, py::handle queries_object, py::handle keys_object,
                      py::handle centre_object, py::handle scale_object, py::handle weights_object,
                      py::handle out_object, int threads, index_t n_keys, py::handle given_object,
                      py::handle widths_object, double edge_at) {
  const TensorView queries("queries", queries_object), keys("keys", keys_object);
  const TensorView out("out", out_object);
  queries.require_type({kFloat32, kFloat64}).require_dims(2, "(rows, n_features)");
  keys.require_type({kFloat32, kFloat64}).require_contiguous();
  queries.require_contiguous();
  const bool blocked = n_keys >= 0;
  if (blocked)
    keys.require_shape({TensorView::kAny, queries.shape(1), kKeyBlock});
  else
    keys.require_shape({TensorView::kAny, queries.shape(1)});
  KernelSumShape shape;
  shape.n_queries = queries.shape(0);
  shape.n_keys = keys.shape(0);
  if (blocked) shape.n_keys = check_range("n_keys", n_keys, 0, keys.shape(0) * kKeyBlock);
  shape.n_features = check_range("n_features", queries.shape(1), 1, index_t{1} << 32);
  shape.kernel = check_option("kernel", kernel, DensityKernel::cosine);
  shape.n_bits = static_cast<int>(check_range("n_bits", n_bits, 1, 64));
  std::optional<TensorView> centre, scale, weights;
  read_array(centre, "centre", centre_object, kFloat64, {shape.n_features});
  read_array(scale, "inverse_scale", scale_object, kFloat64, {shape.n_features});
  read_array(weights, "weights", weights_object, kFloat64, {shape.n_keys});
  if (centre.has_value() != scale.has_value())
    throw py::value_error("inverse_scale: centre and inverse_scale are wanted both or neither");
  KernelEdge edge;
  std::optional<TensorView> given, widths;
  if (read_array(given, "given", given_object, kFloat64, {shape.n_queries, shape.n_features})) {
    edge.queries = given->data<const double>();
  } else if (centre && shape.kernel >= DensityKernel::tophat) {
    throw py::value_error("given: compact kernels want the queries as the keys are, got None");
  }
  if (read_array(widths, "widths", widths_object, kFloat64, {shape.n_features}))
    edge.widths = widths->data<const double>();
  edge.edge = edge_at;
  out.require_type({kFloat64}).require_shape({shape.n_queries, 3}).require_contiguous();
  out.require_output();
  DensityKeys rows;
  rows.rows = keys.data<const void>();
  rows.blocked = blocked;
  rows.element = element_of(keys.type());
  if (centre) rows.centre = centre->data<const double>();
  if (scale) rows.inverse_scale = scale->data<const double>();
  if (weights) rows.weights = weights->data<const double>();
  if (shape.n_queries == 0) return;
  static_assert(sizeof(KernelSum) == 3 * sizeof(double));
  WithoutGil without_gil;
  dispatch(queries.type(), [&](auto element) {
    using T = decltype(element);
    kernel_sums<T>(shape, queries.data<const T>(), rows,
                   reinterpret_cast<KernelSum*>(out.data<double>()), threads, edge);
  });
}

}  // namespace

void bind_kernel_sums(py::module_& module) {
  using namespace pybind11::literals;
  module.def("kernel_sums", &find_kernel_sums, "kernel"_a, "n_bits"_a, "queries"_a, "keys"_a,
             "centre"_a, "inverse_scale"_a, "weights"_a, "out"_a, "threads"_a = 0, "n_keys"_a = -1,
             "given"_a = py::none(), "widths"_a = py::none(), "edge"_a = 1.0);
}

}  // namespace lshkit

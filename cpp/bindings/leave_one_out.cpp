// lshkit._C: leave-one-out sums of kernels at many bandwidths.
#include "lshkit/leave_one_out.hpp"

#include "bindings.hpp"
#include "checks.hpp"

namespace lshkit {
namespace {

static_assert(sizeof(LeftOutSum) == 2 * sizeof(double), "out is an array of them");

void find_left_out(int kernel, py::handle queries_object, py::handle own_object,
                   py::handle keys_object, py::handle weights_object, py::handle scales_object,
                   py::handle nearest_object, py::handle out_object, int threads) {
  const TensorView queries("queries", queries_object), keys("keys", keys_object);
  const TensorView own("own", own_object), scales("scales", scales_object);
  const TensorView nearest("nearest", nearest_object), out("out", out_object);
  queries.require_type({kFloat32, kFloat64}).require_dims(2, "(rows, n_features)");
  queries.require_contiguous();
  keys.require_type({queries.type()}).require_shape({TensorView::kAny, queries.shape(1)});
  keys.require_contiguous();
  LeaveOneOutShape shape;
  shape.n_queries = queries.shape(0);
  shape.n_keys = keys.shape(0);
  shape.n_features = check_range("n_features", queries.shape(1), 1, index_t{1} << 32);
  shape.kernel = check_option("kernel", kernel, DensityKernel::laplacian);
  own.require_type({kInt64}).require_shape({shape.n_queries}).require_contiguous();
  scales.require_type({kFloat64}).require_dims(1, "(n_scales)").require_contiguous();
  shape.n_scales = check_range("n_scales", scales.shape(0), 0, 1 << 16);
  std::optional<TensorView> weights;
  read_array(weights, "weights", weights_object, kFloat64, {shape.n_keys});
  nearest.require_type({kFloat64}).require_shape({shape.n_queries}).require_contiguous();
  nearest.require_output();
  out.require_type({kFloat64}).require_shape({shape.n_queries, shape.n_scales, 2});
  out.require_contiguous().require_output();
  if (shape.n_queries == 0) return;
  WithoutGil without_gil;
  dispatch(queries.type(), [&](auto element) {
    using T = decltype(element);
    LeaveOneOutProblem<T> p;
    p.shape = shape;
    p.queries = queries.data<const T>();
    p.own = own.data<const index_t>();
    p.keys = keys.data<const T>();
    p.weights = weights ? weights->data<const double>() : nullptr;
    p.scales = scales.data<const double>();
    p.nearest = nearest.data<double>();
    p.sums = reinterpret_cast<LeftOutSum*>(out.data<double>());
    leave_one_out(p, threads);
  });
}

}  // namespace

void bind_leave_one_out(py::module_& module) {
  using namespace pybind11::literals;
  module.def("leave_one_out", &find_left_out, "kernel"_a, "queries"_a, "own"_a, "keys"_a,
             "weights"_a, "scales"_a, "nearest"_a, "out"_a, "threads"_a = 0);
}

}  // namespace lshkit

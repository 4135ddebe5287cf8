// lshkit._C: kernel sums over the rows that share buckets with a query.
#include "lshkit/near_kernel_sums.hpp"

#include "bindings.hpp"
#include "table_views.hpp"

namespace lshkit {
namespace {

static_assert(sizeof(NearKernelSum) == 4 * sizeof(double), "out is an array of them");

void find_near_kernel_sums(int kernel, index_t n_bits, py::handle queries_object,
                           py::handle rows_object, py::handle weights_object,
                           const py::tuple& arrays, py::handle codes_object, index_t min_count,
                           index_t max_bucket_size, py::handle stops_object, py::handle out_object,
                           int threads) {
  const TensorView queries("queries", queries_object), rows("rows", rows_object);
  const TensorView codes("query_codes", codes_object), stops("stops", stops_object);
  const TensorView out("out", out_object);
  const TableViews views(arrays, code_type_of(codes), false);
  check_any_codes(codes, views.tables());
  queries.require_type({kFloat32, kFloat64}).require_contiguous();
  queries.require_shape({codes.shape(0), TensorView::kAny});
  rows.require_type({queries.type()}).require_contiguous();
  rows.require_shape({views.tables().n_rows, queries.shape(1)});
  stops.require_type({kInt64}).require_dims(1, "(segments)").require_contiguous();
  const index_t n_stops = check_range("stops", stops.shape(0), 1, 1024);
  out.require_type({kFloat64}).require_shape({codes.shape(0), n_stops, 4}).require_contiguous();
  out.require_output();
  std::optional<TensorView> weights;
  if (!weights_object.is_none()) {
    weights.emplace("weights", weights_object);
    weights->require_type({kFloat64}).require_shape({views.tables().n_rows}).require_contiguous();
  }
  dispatch(queries.type(), [&](auto element) {
    using T = decltype(element);
    NearKernelProblem<T> p;
    p.queries = queries.data<const T>();
    p.rows = rows.data<const T>();
    p.n_queries = codes.shape(0);
    p.n_features = check_range("n_features", queries.shape(1), 1, index_t{1} << 32);
    p.kernel = check_option("kernel", kernel, DensityKernel::angular);
    p.n_bits = static_cast<int>(check_range("n_bits", n_bits, 1, 64));
    if (weights) p.weights = weights->data<const double>();
    p.tables = views.tables();
    p.query_codes = view_of(codes);
    p.min_count = check_range("min_count", min_count, 1, 255);
    p.max_bucket_size = check_range("max_bucket_size", max_bucket_size, 0, index_t{1} << 31);
    p.stops = stops.data<const index_t>();
    p.n_stops = n_stops;
    WithoutGil without_gil;
    near_kernel_sums(p, reinterpret_cast<NearKernelSum*>(out.data<double>()), threads);
  });
}

}  // namespace

void bind_near_kernel_sums(py::module_& module) {
  using namespace pybind11::literals;
  module.def("near_kernel_sums", &find_near_kernel_sums, "kernel"_a, "n_bits"_a, "queries"_a,
             "rows"_a, "weights"_a, "tables"_a, "query_codes"_a, "min_count"_a, "max_bucket_size"_a,
             "stops"_a, "out"_a, "threads"_a = 0);
}

}  // namespace lshkit

// lshkit._C: rows in the cells of centres, and kernel sums over the cells around queries.
#include "lshkit/cells.hpp"

#include "bindings.hpp"
#include "checks.hpp"

namespace lshkit {
namespace {

static_assert(sizeof(KernelSum) == 3 * sizeof(double), "out is an array of them");
static_assert(sizeof(CountedSum) == 4 * sizeof(double), "out is an array of them");
constexpr index_t kMostCells = index_t{1} << 31;

void find_nearest(py::handle queries_object, py::handle blocks_object, index_t n_cells,
                  py::handle out_object, int threads) {
  const TensorView queries("queries", queries_object), blocks("centre_blocks", blocks_object);
  const TensorView out("out", out_object);
  check_range("n_cells", n_cells, 1, kMostCells);
  queries.require_type({kFloat32, kFloat64}).require_dims(2, "(queries, features)");
  queries.require_contiguous();
  blocks.require_type({queries.type()}).require_contiguous();
  blocks.require_shape({(n_cells + kKeyBlock - 1) / kKeyBlock, queries.shape(1), kKeyBlock});
  out.require_type({kInt32}).require_shape({queries.shape(0), TensorView::kAny});
  out.require_contiguous().require_output();
  const index_t n_probes = check_range("n_probes", out.shape(1), 1, n_cells);
  dispatch(queries.type(), [&](auto element) {
    using T = decltype(element);
    WithoutGil without_gil;
    nearest_cells(queries.data<const T>(), queries.shape(0), queries.shape(1),
                  blocks.data<const T>(), n_cells, out.data<std::int32_t>(), n_probes, threads);
  });
}

// Queries and their cells.
template <class T>
CellSumProblem<T> cell_problem(int kernel, index_t n_bits, const TensorView& queries,
                               const TensorView& probes, index_t n_cells) {
  CellSumProblem<T> p;
  p.kernel = check_option("kernel", kernel, DensityKernel::angular);
  p.n_bits = static_cast<int>(check_range("n_bits", n_bits, 1, 64));
  p.n_queries = queries.shape(0);
  p.n_features = check_range("n_features", queries.shape(1), 1, index_t{1} << 32);
  p.n_cells = n_cells;
  p.n_probes = check_range("n_probes", probes.shape(1), 1, n_cells);
  p.queries = queries.data<const T>();
  p.probes = probes.data<const std::int32_t>();
  for (index_t i = 0; i < p.n_queries * p.n_probes; ++i)
    check_range("probes", p.probes[i], 0, n_cells - 1);
  return p;
}

void check_probing(const TensorView& queries, const TensorView& probes) {
  queries.require_type({kFloat32, kFloat64}).require_dims(2, "(queries, features)");
  queries.require_contiguous();
  probes.require_type({kInt32}).require_shape({queries.shape(0), TensorView::kAny});
  probes.require_contiguous();
}

void sum_cells(int kernel, index_t n_bits, py::handle queries_object, py::handle probes_object,
               py::handle blocks_object, py::handle first_object, py::handle begin_object,
               py::handle end_object, py::handle weights_object, py::handle out_object,
               int threads) {
  const TensorView queries("queries", queries_object), probes("probes", probes_object);
  const TensorView blocks("blocks", blocks_object), first("first", first_object);
  const TensorView begin("begin", begin_object), end("end", end_object), out("out", out_object);
  check_probing(queries, probes);
  blocks.require_type({queries.type()}).require_contiguous();
  blocks.require_shape({TensorView::kAny, queries.shape(1), kKeyBlock});
  first.require_type({kInt64}).require_dims(1, "(cells)").require_contiguous();
  begin.require_type({kInt64}).require_shape({first.shape(0)}).require_contiguous();
  end.require_type({kInt64}).require_shape({first.shape(0)}).require_contiguous();
  out.require_type({kFloat64}).require_shape({queries.shape(0), 3}).require_contiguous();
  out.require_output();
  const index_t n_cells = check_range("cells", first.shape(0), 1, kMostCells);
  for (index_t cell = 0; cell < n_cells; ++cell) {
    const index_t block =
        check_range("first", first.data<const index_t>()[cell], 0, blocks.shape(0));
    check_range("begin", begin.data<const index_t>()[cell], 0,
                check_range("end", end.data<const index_t>()[cell], 0,
                            (blocks.shape(0) - block) * kKeyBlock));
  }
  std::optional<TensorView> weights;
  read_array(weights, "weights", weights_object, kFloat64, {blocks.shape(0), kKeyBlock});
  dispatch(queries.type(), [&](auto element) {
    using T = decltype(element);
    const auto p = cell_problem<T>(kernel, n_bits, queries, probes, n_cells);
    const CellBlocks<T> cells{blocks.data<const T>(), first.data<const index_t>(),
                              begin.data<const index_t>(), end.data<const index_t>(),
                              weights ? weights->data<const double>() : nullptr};
    WithoutGil without_gil;
    cell_kernel_sums(p, cells, reinterpret_cast<KernelSum*>(out.data<double>()), threads);
  });
}

void sum_listed(int kernel, index_t n_bits, py::handle queries_object, py::handle probes_object,
                py::handle rows_object, py::handle order_object, py::handle indptr_object,
                py::handle weights_object, index_t low, index_t high, py::handle out_object,
                int threads) {
  const TensorView queries("queries", queries_object), probes("probes", probes_object);
  const TensorView rows("rows", rows_object), order("order", order_object);
  const TensorView indptr("indptr", indptr_object), out("out", out_object);
  check_probing(queries, probes);
  rows.require_type({queries.type()}).require_contiguous();
  rows.require_shape({TensorView::kAny, queries.shape(1)});
  order.require_type({kInt32}).require_shape({rows.shape(0)}).require_contiguous();
  indptr.require_type({kInt64}).require_dims(1, "(cells + 1)").require_contiguous();
  out.require_type({kFloat64}).require_shape({queries.shape(0), 4}).require_contiguous();
  out.require_output();
  const index_t n_cells = check_range("cells", indptr.shape(0) - 1, 1, kMostCells);
  const index_t* at = indptr.data<const index_t>();
  for (index_t cell = 0; cell < n_cells; ++cell)
    check_range("indptr", at[cell + 1], check_range("indptr", at[cell], 0, rows.shape(0)),
                rows.shape(0));
  check_range("low", low, 0, rows.shape(0));
  check_range("high", high, low, rows.shape(0));
  std::optional<TensorView> weights;
  read_array(weights, "weights", weights_object, kFloat64, {rows.shape(0)});
  dispatch(queries.type(), [&](auto element) {
    using T = decltype(element);
    const auto p = cell_problem<T>(kernel, n_bits, queries, probes, n_cells);
    const CellRows<T> cells{rows.data<const T>(), weights ? weights->data<const double>() : nullptr,
                            order.data<const std::int32_t>(), at};
    WithoutGil without_gil;
    listed_kernel_sums(p, cells, low, high, reinterpret_cast<CountedSum*>(out.data<double>()),
                       threads);
  });
}

}  // namespace

void bind_cells(py::module_& module) {
  using namespace pybind11::literals;
  module.def("nearest_cells", &find_nearest, "queries"_a, "centre_blocks"_a, "n_cells"_a, "out"_a,
             "threads"_a = 0);
  module.def("cell_kernel_sums", &sum_cells, "kernel"_a, "n_bits"_a, "queries"_a, "probes"_a,
             "blocks"_a, "first"_a, "begin"_a, "end"_a, "weights"_a, "out"_a, "threads"_a = 0);
  module.def("listed_kernel_sums", &sum_listed, "kernel"_a, "n_bits"_a, "queries"_a, "probes"_a,
             "rows"_a, "order"_a, "indptr"_a, "weights"_a, "low"_a, "high"_a, "out"_a,
             "threads"_a = 0);
}

}  // namespace lshkit

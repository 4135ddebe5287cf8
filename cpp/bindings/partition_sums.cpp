// lshkit._C: sums of exponentials over near rows and a sample of the others.
#include "lshkit/partition_sums.hpp"

#include "bindings.hpp"
#include "checks.hpp"

namespace lshkit {
namespace {

static_assert(sizeof(PartitionSums) == 6 * sizeof(double), "out is an array of them");

void find_partition_sums(py::handle queries_object, py::handle rows_object, py::handle bias_object,
                         py::handle order_object, py::handle start_object, py::handle probes_object,
                         index_t min_count, py::handle sample_object, py::handle out_object,
                         int threads) {
  const TensorView queries("queries", queries_object), rows("rows", rows_object),
      order("order", order_object), start("start", start_object), probes("probes", probes_object),
      sample("sample", sample_object), out("out", out_object);
  PartitionProblem p;
  queries.require_type({kFloat32}).require_dims(2, "(rows, columns)").require_contiguous();
  p.n_queries = queries.shape(0);
  p.n_features = queries.shape(1);
  rows.require_type({kFloat32}).require_shape({TensorView::kAny, p.n_features});
  rows.require_contiguous();
  p.lists.n_rows = rows.shape(0);
  check_rows("rows", p.lists.n_rows);
  std::optional<TensorView> bias;
  if (read_array(bias, "bias", bias_object, kFloat32, {p.lists.n_rows}))
    p.bias = bias->data<const float>();
  order.require_type({kInt32}).require_dims(2, "(n_hashes, rows)");
  p.lists.n_hashes = check_range("n_hashes", order.shape(0), 1, 65535);
  order.require_shape({p.lists.n_hashes, p.lists.n_rows}).require_contiguous();
  start.require_type({kInt32}).require_shape({p.lists.n_hashes, TensorView::kAny});
  start.require_contiguous();
  p.lists.n_buckets = check_range("n_buckets", start.shape(1) - 1, 1, kMaxBuckets);
  probes.require_type({kUint8, kUint16});
  probes.require_shape({p.n_queries, p.lists.n_hashes, TensorView::kAny}).require_contiguous();
  p.n_probes = check_range("n_probes", probes.shape(2), 1, kMaxBuckets);
  p.min_count = check_range("min_count", min_count, 1, 3);
  sample.require_type({kInt32}).require_dims(1, "(rows)").require_contiguous();
  p.n_sample = sample.shape(0);
  out.require_type({kFloat64}).require_shape({p.n_queries, 6}).require_contiguous();
  out.require_output();
  p.queries = queries.data<const float>();
  p.rows = rows.data<const float>();
  p.lists.order = order.data<const std::int32_t>();
  p.lists.start = start.data<const std::int32_t>();
  p.probes = codes_of(probes);
  p.sample = sample.data<const std::int32_t>();
  WithoutGil without_gil;
  partition_sums(p, reinterpret_cast<PartitionSums*>(out.data<double>()), threads);
}

}  // namespace

void bind_partition_sums(py::module_& module) {
  using namespace pybind11::literals;
  module.def("partition_sums", &find_partition_sums, "queries"_a, "rows"_a, "bias"_a, "order"_a,
             "start"_a, "probes"_a, "min_count"_a, "sample"_a, "out"_a, "threads"_a = 0);
}

}  // namespace lshkit

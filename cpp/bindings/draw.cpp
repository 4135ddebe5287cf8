// lshkit._C: hash tables and the draw verb. The tables' arrays are the caller's.
#include <memory>

#include "bindings.hpp"
#include "table_views.hpp"

namespace lshkit {
namespace {

void build(py::handle codes_object, const py::tuple& arrays, py::handle n_buckets_object,
           int threads) {
  const TensorView codes("codes", codes_object);
  const TableViews views(arrays, code_type_of(codes), true);
  const HashTables& t = views.tables();
  check_any_codes(codes, t).require_shape({t.n_rows, t.n_hashes});
  const TensorView n_buckets("n_buckets", n_buckets_object);
  n_buckets.require_type({kInt64}).require_shape({t.n_hashes}).require_contiguous();
  WithoutGil without_gil;
  build_hash_tables(t, view_of(codes), n_buckets.data<index_t>(), threads);
}

void find_sizes(const py::tuple& arrays, py::handle codes_object, py::handle sizes_object,
                int threads) {
  const TensorView codes("query_codes", codes_object), sizes("sizes", sizes_object);
  const TableViews views(arrays, code_type_of(codes), false);
  check_any_codes(codes, views.tables());
  sizes.require_type({kInt64, kFloat64}).require_shape({codes.shape(0), codes.shape(1)});
  sizes.require_contiguous().require_output();
  const bool weights = sizes.type() == kFloat64;
  if (weights && !views.tables().weights) sizes.wrong_type("the tables have no weights");
  WithoutGil without_gil;
  if (weights)
    bucket_weights(views.tables(), view_of(codes), codes.shape(0), sizes.data<double>(), threads);
  else
    bucket_sizes(views.tables(), view_of(codes), codes.shape(0), sizes.data<std::int64_t>(),
                 threads);
}

void draw_members(const py::tuple& arrays, py::handle codes_object, bool rotate, std::uint64_t seed,
                  py::handle indices_object, py::handle probabilities_object,
                  py::handle tables_object, int threads) {
  const TensorView codes("query_codes", codes_object);
  const TensorView indices("indices", indices_object);
  const TensorView probabilities("probabilities", probabilities_object);
  const TensorView tables("table_numbers", tables_object);
  const TableViews views(arrays, code_type_of(codes), false);
  check_any_codes(codes, views.tables());
  indices.require_type({kInt64}).require_shape({codes.shape(0), TensorView::kAny});
  probabilities.require_type({kFloat64}).require_shape({codes.shape(0), indices.shape(1)});
  tables.require_type({kInt32}).require_shape({codes.shape(0), indices.shape(1)});
  for (const TensorView* x : {&indices, &probabilities, &tables})
    x->require_contiguous().require_output();
  if (indices.size() == 0) return;
  Draws out;
  out.n_samples = indices.shape(1);
  out.rotate = rotate;
  out.seed = seed;
  out.indices = indices.data<std::int64_t>();
  out.probabilities = probabilities.data<double>();
  out.tables = tables.data<std::int32_t>();
  WithoutGil without_gil;
  draw(views.tables(), view_of(codes), codes.shape(0), out, threads);
}

std::unique_ptr<BucketUnion> find_union(const py::tuple& arrays, py::handle codes_object,
                                        index_t max_size, py::handle indptr_object, int threads) {
  const TensorView codes("query_codes", codes_object), indptr("indptr", indptr_object);
  const TableViews views(arrays, code_type_of(codes), false);
  check_any_codes(codes, views.tables());
  indptr.require_type({kInt64}).require_shape({codes.shape(0) + 1}).require_contiguous();
  indptr.require_output();
  check_range("max_size", max_size, 0, std::numeric_limits<index_t>::max());
  WithoutGil without_gil;
  return std::make_unique<BucketUnion>(views.tables(), view_of(codes), codes.shape(0), max_size,
                                       indptr.data<std::int64_t>(), threads);
}

void copy_union(const BucketUnion& found, py::handle indices_object, py::handle counts_object,
                int threads) {
  const TensorView indices("indices", indices_object), counts("counts", counts_object);
  for (const TensorView* x : {&indices, &counts})
    x->require_type({kInt32}).require_shape({found.size()}).require_contiguous().require_output();
  WithoutGil without_gil;
  found.copy(indices.data<std::int32_t>(), counts.data<std::int32_t>(), threads);
}

}  // namespace

void bind_draw(py::module_& module) {
  using namespace pybind11::literals;
  py::class_<BucketUnion>(module, "BucketUnion")
      .def("size", &BucketUnion::size)
      .def("copy", &copy_union, "indices"_a, "counts"_a, "threads"_a = 0);
  module.def("build_hash_tables", &build, "codes"_a, "tables"_a, "n_buckets"_a, "threads"_a = 0);
  module.def("bucket_sizes", &find_sizes, "tables"_a, "query_codes"_a, "sizes"_a, "threads"_a = 0);
  module.def("draw", &draw_members, "tables"_a, "query_codes"_a, "rotate"_a, "seed"_a, "indices"_a,
             "probabilities"_a, "table_numbers"_a, "threads"_a = 0);
  module.def("bucket_union", &find_union, "tables"_a, "query_codes"_a, "max_size"_a, "indptr"_a,
             "threads"_a = 0);
}

}  // namespace lshkit

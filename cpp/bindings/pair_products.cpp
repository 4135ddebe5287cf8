// lshkit._C: dot products and distances of listed pairs.
#include "lshkit/pair_products.hpp"

#include "bindings.hpp"
#include "checks.hpp"

namespace lshkit {
namespace {

template <class Index>
void check_indices(const TensorView& indices, index_t n_keys) {
  const Index* index = indices.data<const Index>();
  for (index_t k = 0; k < indices.size(); ++k)
    if (index[k] < 0 || index[k] >= n_keys)
      indices.wrong_value("rows from 0 to " + std::to_string(n_keys - 1) + " are wanted, was " +
                          std::to_string(index[k]));
}

void find_pair_products(py::handle queries_object, py::handle keys_object, py::handle indptr_object,
                        py::handle indices_object, int measure, py::handle out_object,
                        int threads) {
  const TensorView queries("queries", queries_object), keys("keys", keys_object);
  const TensorView indptr("indptr", indptr_object), indices("indices", indices_object);
  const TensorView out("out", out_object);
  queries.require_type({kFloat32, kFloat64}).require_dims(2, "(n_q, n_features)");
  queries.require_contiguous_rows();
  keys.require_type({queries.type()}).require_shape({TensorView::kAny, queries.shape(1)});
  keys.require_contiguous_rows();
  indptr.require_type({kInt64}).require_shape({queries.shape(0) + 1}).require_contiguous();
  indices.require_type({kInt32, kInt64}).require_dims(1, "(nnz)").require_contiguous();
  out.require_type({queries.type()}).require_shape({indices.shape(0)}).require_contiguous();
  out.require_output();
  const auto* rows = indptr.data<const std::int64_t>();
  for (index_t i = 0; i < queries.shape(0); ++i)
    if (rows[i + 1] < rows[i])
      indptr.wrong_value("must not decrease, got " + std::to_string(rows[i]) + " before " +
                         std::to_string(rows[i + 1]));
  const std::int64_t last = rows[queries.shape(0)];
  if (rows[0] != 0 || last != indices.size())
    indptr.wrong_value("must start with 0 and end with the number of indices, " +
                       std::to_string(indices.size()) + ", got " + std::to_string(rows[0]) +
                       " and " + std::to_string(last));
  if (indices.type() == kInt32)
    check_indices<std::int32_t>(indices, keys.shape(0));
  else
    check_indices<std::int64_t>(indices, keys.shape(0));
  const PairMeasure kind = check_option("measure", measure, PairMeasure::l1_distance);
  dispatch(queries.type(), [&](auto number) {
    using T = decltype(number);
    PairProducts<T> p;
    p.queries = queries.data<const T>(), p.query_stride = queries.stride(0);
    p.keys = keys.data<const T>(), p.key_stride = keys.stride(0);
    p.n_queries = queries.shape(0), p.n_features = queries.shape(1);
    p.indptr = rows, p.indices = indices.data<const void>();
    p.index_bytes = indices.type().bits / 8;
    p.measure = kind;
    p.out = out.data<T>();
    WithoutGil without_gil;
    pair_products(p, threads);
  });
}

}  // namespace

void bind_pair_products(py::module_& module) {
  using namespace pybind11::literals;
  module.def("pair_products", &find_pair_products, "queries"_a, "keys"_a, "indptr"_a, "indices"_a,
             "measure"_a, "out"_a, "threads"_a = 0);
}

}  // namespace lshkit

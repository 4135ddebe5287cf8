// lshkit._C: the verbs on codes.
#include "bindings.hpp"
#include "checks.hpp"
#include "cuda_call.hpp"
#include "lshkit/bucket_sum.hpp"
#include "lshkit/cuda/bucket_table.hpp"

namespace lshkit {
namespace {

void sum_buckets(py::handle query_codes_object, py::handle key_codes_object,
                 py::handle values_object, index_t n_buckets, int order_code,
                 py::handle key_mask_object, double scale, py::handle out_object, int threads) {
  const TensorView query_codes("query_codes", query_codes_object, kAnyPlace);
  const TensorView key_codes("key_codes", key_codes_object, kAnyPlace);
  const TensorView values("values", values_object, kAnyPlace), out("out", out_object, kAnyPlace);
  check_codes(query_codes, {kUint8, kUint16});
  check_codes(key_codes, {query_codes.type()});
  BucketSumShape shape;
  shape.batch = query_codes.shape(0);
  shape.heads = query_codes.shape(1);
  shape.n_queries = query_codes.shape(2);
  shape.n_hashes = query_codes.shape(3);
  key_codes.require_shape({shape.batch, shape.heads, TensorView::kAny, shape.n_hashes});
  shape.n_keys = key_codes.shape(2);
  check_vectors(values, {kFloat32, kFloat64});
  values.require_shape({shape.batch, shape.heads, shape.n_keys, TensorView::kAny});
  shape.n_values = values.shape(3);
  shape.n_buckets = check_range("n_buckets", n_buckets, 1, kMaxBuckets);
  const Order order = check_option("order", order_code, Order::reversed);
  const MaskView key_mask("key_mask", key_mask_object, shape.batch, shape.n_keys);
  check_vectors(out, values.type()).require_output();
  out.require_shape({shape.batch, shape.heads, shape.n_queries, shape.n_values});
  if (out.size() == 0) return;
  const CudaCall gpu({&query_codes, &key_codes, &values, &out, key_mask.view()});
  if (gpu.run([&](const auto& queue, void*) {
        out.require_contiguous();
        dispatch(values.type(), [&](auto element) {
          using T = decltype(element);
          cuda::bucket_sum<T>(queue, shape, codes_of(query_codes), codes_of(key_codes),
                              matrices<const T>(values), key_mask.mask(), order,
                              static_cast<T>(scale), matrices<T>(out));
        });
        return index_t(0);
      }))
    return;
  WithoutGil without_gil;
  dispatch(values.type(), [&](auto element) {
    using T = decltype(element);
    bucket_sum<T>(shape, codes_of(query_codes), codes_of(key_codes), matrices<const T>(values),
                  key_mask.mask(), order, static_cast<T>(scale), matrices<T>(out), threads);
  });
}

// A table (n_hashes, n_buckets, n_values) with rows of codes (rows, n_hashes).
void check_table(const TensorView& table, const TensorView& codes) {
  table.require_type({kFloat32, kFloat64}).require_dims(3, "(n_hashes, n_buckets, n_values)");
  table.require_contiguous();
  check_range("n_hashes", table.shape(0), 1, kMaxHashes);
  check_range("n_buckets", table.shape(1), 1, kMaxBuckets);
  codes.require_type({kUint8, kUint16}).require_shape({TensorView::kAny, table.shape(0)});
  codes.require_contiguous();
}

void table_add(py::handle table_object, py::handle codes_object, py::handle values_object,
               double sign, int threads) {
  const TensorView table("table", table_object, kAnyPlace), codes("codes", codes_object, kAnyPlace);
  const TensorView values("values", values_object, kAnyPlace);
  check_table(table, codes);
  table.require_writable();
  values.require_type({table.type()}).require_shape({codes.shape(0), table.shape(2)});
  values.require_contiguous_rows();
  if (values.size() == 0) return;
  const CudaCall gpu({&table, &codes, &values});
  if (gpu.run([&](const auto& queue, void*) {
        dispatch(table.type(), [&](auto element) {
          using T = decltype(element);
          cuda::bucket_table_add<T>(queue, table.data<T>(), table.shape(0), table.shape(1),
                                    table.shape(2), codes_of(codes), values.data<const T>(),
                                    values.stride(0), codes.shape(0), static_cast<T>(sign));
        });
        return index_t(0);
      }))
    return;
  WithoutGil without_gil;
  dispatch(table.type(), [&](auto element) {
    using T = decltype(element);
    bucket_table_add<T>(table.data<T>(), table.shape(0), table.shape(1), table.shape(2),
                        codes_of(codes), values.data<const T>(), values.stride(0), codes.shape(0),
                        static_cast<T>(sign), threads);
  });
}

void table_query(py::handle table_object, py::handle codes_object, double scale,
                 py::handle out_object, int threads) {
  const TensorView table("table", table_object, kAnyPlace), codes("codes", codes_object, kAnyPlace);
  const TensorView out("out", out_object, kAnyPlace);
  check_table(table, codes);
  out.require_type({table.type()}).require_shape({codes.shape(0), table.shape(2)});
  out.require_contiguous().require_output();
  if (out.size() == 0) return;
  const CudaCall gpu({&table, &codes, &out});
  if (gpu.run([&](const auto& queue, void*) {
        dispatch(table.type(), [&](auto element) {
          using T = decltype(element);
          cuda::bucket_table_query<T>(queue, table.data<const T>(), table.shape(0), table.shape(1),
                                      table.shape(2), codes_of(codes), codes.shape(0),
                                      static_cast<T>(scale), out.data<T>());
        });
        return index_t(0);
      }))
    return;
  WithoutGil without_gil;
  dispatch(table.type(), [&](auto element) {
    using T = decltype(element);
    bucket_table_query<T>(table.data<const T>(), table.shape(0), table.shape(1), table.shape(2),
                          codes_of(codes), codes.shape(0), static_cast<T>(scale), out.data<T>(),
                          threads);
  });
}

}  // namespace

void bind_buckets(py::module_& module) {
  using namespace pybind11::literals;
  module.def("bucket_sum", &sum_buckets, "query_codes"_a, "key_codes"_a, "values"_a, "n_buckets"_a,
             "order"_a, "key_mask"_a, "scale"_a, "out"_a, "threads"_a = 0);
  module.def("bucket_table_add", &table_add, "table"_a, "codes"_a, "values"_a, "sign"_a,
             "threads"_a = 0);
  module.def("bucket_table_query", &table_query, "table"_a, "codes"_a, "scale"_a, "out"_a,
             "threads"_a = 0);
}

}  // namespace lshkit

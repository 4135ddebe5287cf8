// lshkit._C: the pairs verb. Two calls, as only the first knows the size of the second's results.
#include "lshkit/collisions.hpp"

#include "bindings.hpp"
#include "checks.hpp"
#include "cuda_call.hpp"
#include "lshkit/cuda/collisions.hpp"

namespace lshkit {
namespace {

struct CollisionViews {
  TensorView query_codes, key_codes, indptr;
  CollisionShape shape;
  std::optional<TensorView> key_mask;
  Order order;

  CollisionViews(py::handle query_object, py::handle key_object, py::handle mask_object,
                 bool causal, py::handle indptr_object)
      : query_codes("query_codes", query_object, kAnyPlace),
        key_codes("key_codes", key_object, kAnyPlace),
        indptr("indptr", indptr_object, kAnyPlace),
        order(causal ? Order::causal : Order::all) {
    query_codes.require_type({kUint8, kUint16}).require_dims(2, "(rows, n_hashes)");
    query_codes.require_contiguous();
    shape.n_queries = query_codes.shape(0);
    shape.n_hashes = check_range("n_hashes", query_codes.shape(1), 1, 65535);
    key_codes.require_type({query_codes.type()});
    key_codes.require_shape({TensorView::kAny, shape.n_hashes}).require_contiguous();
    shape.n_keys = key_codes.shape(0);
    check_rows("query_codes", shape.n_queries);
    check_rows("key_codes", shape.n_keys);
    if (!mask_object.is_none()) {
      key_mask.emplace("key_mask", mask_object, kAnyPlace);
      key_mask->require_type({kBool, kUint8}).require_shape({shape.n_keys}).require_contiguous();
    }
    indptr.require_type({kInt64}).require_shape({shape.n_queries + 1}).require_contiguous();
  }
  const std::uint8_t* mask() const {
    return key_mask ? key_mask->data<const std::uint8_t>() : nullptr;
  }
  const TensorView* mask_view() const { return key_mask ? &*key_mask : nullptr; }
};

void find_indptr(py::handle query_codes, py::handle key_codes, py::handle key_mask, bool causal,
                 py::handle indptr, int threads) {
  const CollisionViews in(query_codes, key_codes, key_mask, causal, indptr);
  in.indptr.require_output();
  const CudaCall gpu({&in.query_codes, &in.key_codes, in.mask_view(), &in.indptr});
  if (gpu.run([&](const auto& queue, void*) {
        cuda::collision_indptr(queue, in.shape, codes_of(in.query_codes), codes_of(in.key_codes),
                               in.mask(), in.order, in.indptr.data<std::int64_t>());
        return index_t(0);
      }))
    return;
  WithoutGil without_gil;
  collision_indptr(in.shape, codes_of(in.query_codes), codes_of(in.key_codes), in.mask(), in.order,
                   in.indptr.data<std::int64_t>(), threads);
}

void find_collisions(py::handle query_codes, py::handle key_codes, py::handle key_mask, bool causal,
                     py::handle indptr, py::handle indices_object, py::handle counts_object,
                     int threads) {
  const CollisionViews in(query_codes, key_codes, key_mask, causal, indptr);
  const TensorView indices("indices", indices_object, kAnyPlace);
  const TensorView counts("counts", counts_object, kAnyPlace);
  const CudaCall gpu(
      {&in.query_codes, &in.key_codes, in.mask_view(), &in.indptr, &indices, &counts});
  const auto* rows = in.indptr.data<const std::int64_t>();
  for (const TensorView* x : {&indices, &counts})
    x->require_type({kInt32}).require_dims(1, "(pairs)").require_contiguous().require_output();
  const bool on_cuda = in.indptr.on_cuda();  // its numbers are not looked at there
  if (!on_cuda) {
    const index_t n = in.shape.n_queries;
    bool ascends = rows[0] == 0;
    for (index_t i = 0; i < n; ++i) ascends = ascends && rows[i + 1] >= rows[i];
    if (!ascends) in.indptr.wrong_value("must start with 0 and not decrease");
    indices.require_shape({rows[n]});
  }
  counts.require_shape({indices.shape(0)});
  if (indices.size() == 0 && !on_cuda) return;
  if (gpu.run([&](const auto& queue, void*) {
        cuda::collisions(queue, in.shape, codes_of(in.query_codes), codes_of(in.key_codes),
                         in.mask(), in.order, rows, indices.shape(0), indices.data<std::int32_t>(),
                         counts.data<std::int32_t>());
        return index_t(0);
      }))
    return;
  WithoutGil without_gil;
  collisions(in.shape, codes_of(in.query_codes), codes_of(in.key_codes), in.mask(), in.order, rows,
             indices.data<std::int32_t>(), counts.data<std::int32_t>(), threads);
}

}  // namespace

void bind_collisions(py::module_& module) {
  using namespace pybind11::literals;
  module.def("collision_indptr", &find_indptr, "query_codes"_a, "key_codes"_a, "key_mask"_a,
             "causal"_a, "indptr"_a, "threads"_a = 0);
  module.def("collisions", &find_collisions, "query_codes"_a, "key_codes"_a, "key_mask"_a,
             "causal"_a, "indptr"_a, "indices"_a, "counts"_a, "threads"_a = 0);
}

}  // namespace lshkit

// lshkit._C: the sum verb with weights. The last two dimensions of codes and weights, n_hashes and
// n_probes, come as one.
#include "bindings.hpp"
#include "checks.hpp"
#include "cuda_call.hpp"
#include "lshkit/cuda/soft.hpp"
#include "lshkit/weighted_bucket_sum.hpp"

namespace lshkit {
namespace {

constexpr const char* kProbeAxes = "(batch, heads, rows, n_hashes * n_probes)";

// Codes of one side with their weights, if it has any.
struct ProbeViews {
  TensorView codes;
  std::optional<TensorView> weights;
  index_t n_probes;

  ProbeViews(const char* code_name, py::handle code_object, const char* weight_name,
             py::handle weight_object, const char* probes_name, index_t probes)
      : codes(code_name, code_object, kAnyPlace),
        n_probes(check_range(probes_name, probes, 1, kMaxBuckets)) {
    codes.require_type({kUint8, kUint16}).require_dims(4, kProbeAxes).require_contiguous();
    if (codes.shape(3) < 1 || codes.shape(3) % n_probes != 0)
      codes.wrong_value("a last dimension that is a multiple of " + std::to_string(n_probes) +
                        " probes is wanted, was " + codes.describe_shape());
    check_range("n_hashes", n_hashes(), 1, kMaxHashes);
    if (!weight_object.is_none()) weights.emplace(weight_name, weight_object, kAnyPlace);
  }
  index_t n_hashes() const { return codes.shape(3) / n_probes; }
  void check_weights(const TensorView& view, ElementType type) const {
    view.require_type({type}).require_contiguous();
    view.require_shape({codes.shape(0), codes.shape(1), codes.shape(2), codes.shape(3)});
  }
  template <class T>
  Probes<T> probes() const {
    return {codes_of(codes), weights ? weights->data<const T>() : nullptr, n_probes};
  }
};

struct WeightedViews {
  ProbeViews queries, keys;
  TensorView values, out;
  BucketSumShape shape;
  Order order;
  MaskView key_mask;

  WeightedViews(py::handle query_codes, py::handle query_weights, index_t query_probes,
                py::handle key_codes, py::handle key_weights, index_t key_probes,
                py::handle values_object, index_t n_buckets, int order_code, py::handle mask_object,
                const char* out_name, py::handle out_object)
      : queries("query_codes", query_codes, "query_weights", query_weights, "query_probes",
                query_probes),
        keys("key_codes", key_codes, "key_weights", key_weights, "key_probes", key_probes),
        values("values", values_object, kAnyPlace),
        out(out_name, out_object, kAnyPlace),
        shape(check_shape(n_buckets)),
        order(check_option("order", order_code, Order::reversed)),
        key_mask("key_mask", mask_object, shape.batch, shape.n_keys) {}

  // All tensors of a call with these; null for those that were not given.
  std::vector<const TensorView*> views(std::initializer_list<const TensorView*> more) const {
    std::vector<const TensorView*> all{
        &queries.codes, view_of(queries.weights), &keys.codes, view_of(keys.weights), &values,
        &out,           key_mask.view()};
    all.insert(all.end(), more);
    return all;
  }
  static const TensorView* view_of(const std::optional<TensorView>& view) {
    return view ? &*view : nullptr;
  }

 private:
  BucketSumShape check_shape(index_t n_buckets) const {
    BucketSumShape sizes;
    sizes.batch = queries.codes.shape(0);
    sizes.heads = queries.codes.shape(1);
    sizes.n_queries = queries.codes.shape(2);
    sizes.n_hashes = queries.n_hashes();
    keys.codes.require_type({queries.codes.type()});
    keys.codes.require_shape(
        {sizes.batch, sizes.heads, TensorView::kAny, sizes.n_hashes * keys.n_probes});
    sizes.n_keys = keys.codes.shape(2);
    check_vectors(values, {kFloat32, kFloat64});
    values.require_shape({sizes.batch, sizes.heads, sizes.n_keys, TensorView::kAny});
    sizes.n_values = values.shape(3);
    sizes.n_buckets = check_range("n_buckets", n_buckets, 1, kMaxBuckets);
    if (queries.weights) queries.check_weights(*queries.weights, values.type());
    if (keys.weights) keys.check_weights(*keys.weights, values.type());
    check_vectors(out, values.type());
    out.require_shape({sizes.batch, sizes.heads, sizes.n_queries, sizes.n_values});
    return sizes;
  }
};

void weighted_sum(py::handle query_codes, py::handle query_weights, index_t query_probes,
                  py::handle key_codes, py::handle key_weights, index_t key_probes,
                  py::handle values, index_t n_buckets, int order, py::handle key_mask,
                  double scale, py::handle out, int threads) {
  const WeightedViews in(query_codes, query_weights, query_probes, key_codes, key_weights,
                         key_probes, values, n_buckets, order, key_mask, "out", out);
  in.out.require_output();
  if (in.out.size() == 0) return;
  const CudaCall gpu(in.views({}));
  if (gpu.run([&](const auto& queue, void* scratch) {
        in.out.require_contiguous();
        index_t bytes = 0;
        dispatch(in.values.type(), [&](auto element) {
          using T = decltype(element);
          bytes = cuda::weighted_bucket_sum<T>(queue, in.shape, in.queries.probes<T>(),
                                               in.keys.probes<T>(), matrices<const T>(in.values),
                                               in.key_mask.mask(), in.order, static_cast<T>(scale),
                                               matrices<T>(in.out), scratch);
        });
        return bytes;
      }))
    return;
  WithoutGil without_gil;
  dispatch(in.values.type(), [&](auto element) {
    using T = decltype(element);
    weighted_bucket_sum<T>(in.shape, in.queries.probes<T>(), in.keys.probes<T>(),
                           matrices<const T>(in.values), in.key_mask.mask(), in.order,
                           static_cast<T>(scale), matrices<T>(in.out), threads);
  });
}

void weighted_sum_gradients(py::handle query_codes, py::handle query_weights, index_t query_probes,
                            py::handle key_codes, py::handle key_weights, index_t key_probes,
                            py::handle values, index_t n_buckets, int order, py::handle key_mask,
                            double scale, py::handle grad_out, py::handle grad_values_object,
                            py::handle grad_query_weights_object,
                            py::handle grad_key_weights_object, int threads) {
  const WeightedViews in(query_codes, query_weights, query_probes, key_codes, key_weights,
                         key_probes, values, n_buckets, order, key_mask, "grad_out", grad_out);
  for (const TensorView* x : {&in.out, &in.values})
    if (x->size() == 0) x->wrong_value("elements are wanted, was " + x->describe_shape());
  const TensorView grad_values("grad_values", grad_values_object, kAnyPlace);
  check_vectors(grad_values, in.values.type()).require_output();
  grad_values.require_shape({in.shape.batch, in.shape.heads, in.shape.n_keys, in.shape.n_values});
  std::optional<TensorView> weights[2];
  if (!grad_query_weights_object.is_none()) {
    weights[0].emplace("grad_query_weights", grad_query_weights_object, kAnyPlace);
    in.queries.check_weights(weights[0]->require_output(), in.values.type());
  }
  if (!grad_key_weights_object.is_none()) {
    weights[1].emplace("grad_key_weights", grad_key_weights_object, kAnyPlace);
    in.keys.check_weights(weights[1]->require_output(), in.values.type());
  }
  const auto gradients = [&](auto element) {
    using T = decltype(element);
    return WeightedSumGradients<T>{matrices<const T>(in.out), matrices<T>(grad_values),
                                   weights[0] ? weights[0]->data<T>() : nullptr,
                                   weights[1] ? weights[1]->data<T>() : nullptr};
  };
  const CudaCall gpu(in.views({&grad_values, in.view_of(weights[0]), in.view_of(weights[1])}));
  if (gpu.run([&](const auto& queue, void* scratch) {
        grad_values.require_contiguous();
        index_t bytes = 0;
        dispatch(in.values.type(), [&](auto element) {
          using T = decltype(element);
          bytes = cuda::weighted_bucket_sum_backward<T>(
              queue, in.shape, in.queries.probes<T>(), in.keys.probes<T>(),
              matrices<const T>(in.values), in.key_mask.mask(), in.order, static_cast<T>(scale),
              gradients(element), scratch);
        });
        return bytes;
      }))
    return;
  WithoutGil without_gil;
  dispatch(in.values.type(), [&](auto element) {
    using T = decltype(element);
    weighted_bucket_sum_backward<T>(in.shape, in.queries.probes<T>(), in.keys.probes<T>(),
                                    matrices<const T>(in.values), in.key_mask.mask(), in.order,
                                    static_cast<T>(scale), gradients(element), threads);
  });
}

}  // namespace

void bind_weighted_buckets(py::module_& module) {
  using namespace pybind11::literals;
  module.def("weighted_bucket_sum", &weighted_sum, "query_codes"_a, "query_weights"_a,
             "query_probes"_a, "key_codes"_a, "key_weights"_a, "key_probes"_a, "values"_a,
             "n_buckets"_a, "order"_a, "key_mask"_a, "scale"_a, "out"_a, "threads"_a = 0);
  module.def("weighted_bucket_sum_backward", &weighted_sum_gradients, "query_codes"_a,
             "query_weights"_a, "query_probes"_a, "key_codes"_a, "key_weights"_a, "key_probes"_a,
             "values"_a, "n_buckets"_a, "order"_a, "key_mask"_a, "scale"_a, "grad_out"_a,
             "grad_values"_a, "grad_query_weights"_a, "grad_key_weights"_a, "threads"_a = 0);
}

}  // namespace lshkit

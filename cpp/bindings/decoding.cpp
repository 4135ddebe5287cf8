// lshkit._C: attention step by step.
#include "lshkit/decoding.hpp"

#include "bindings.hpp"
#include "checks.hpp"
#include "cuda_call.hpp"
#include "lshkit/cuda/decoding.hpp"

namespace lshkit {
namespace {

// Rows of queries or keys, or None: no rows. A GPU reads short floats as they are.
class RowsView {
 public:
  RowsView(const char* name, py::handle object) {
    if (object.is_none()) return;
    view_.emplace(name, object, kAnyPlace);
    if (view_->on_cuda() || emulates_cuda())
      check_vectors(*view_, {kFloat32, kBfloat16, kFloat16});
    else
      check_vectors(*view_, kFloat32);
    check_rows(name, view_->shape(2));
  }
  const TensorView* view() const { return view_ ? &*view_ : nullptr; }
  const TensorView* operator->() const { return &*view_; }
  explicit operator bool() const { return view_.has_value(); }
  index_t rows() const { return view_ ? view_->shape(2) : 0; }
  template <class T>
  Tensor<T> matrices() const {
    return view_ ? lshkit::matrices<T>(*view_) : Tensor<T>{};
  }
  template <class Void>
  FloatTensor<float, Void> any_matrices() const {
    return view_ ? float_matrices<float, Void>(*view_) : FloatTensor<float, Void>{};
  }

 private:
  std::optional<TensorView> view_;
};

void decode_rows(py::handle sums_object, py::handle counts_object, index_t batch,
                 py::handle parameters_object, int family, index_t n_bits, index_t n_hashes,
                 py::handle sharpness_object, index_t query_probes, index_t key_probes,
                 int normalize, py::handle query_object, py::handle key_object,
                 py::handle value_object, py::handle mask_object, bool causal,
                 py::handle out_object, int threads) {
  const TensorView sums("sums", sums_object, kAnyPlace);
  const TensorView parameters("parameters", parameters_object, kAnyPlace);
  const RowsView query("query", query_object), key("key", key_object);
  const RowsView value("value", value_object), out("out", out_object);

  sums.require_type({kFloat32, kFloat16})
      .require_dims(4, "(batch * key_heads, n_hashes, n_buckets, n_values)");
  sums.require_contiguous().require_writable();
  check_range("batch", batch, 1, std::numeric_limits<std::int32_t>::max());
  check_range("n_bits", n_bits, 1, kMaxBits);
  const index_t n_buckets = index_t{1} << n_bits;
  sums.require_shape({TensorView::kAny, n_hashes, n_buckets, TensorView::kAny});
  if (sums.shape(0) == 0 || sums.shape(0) % batch != 0)
    sums.wrong_value("tables of " + std::to_string(batch) + " sequences are wanted, was " +
                     sums.describe_shape());
  DecodingTables tables;
  tables.batch = batch;
  tables.key_heads = sums.shape(0) / batch;
  tables.n_values = sums.shape(3);
  tables.type = sums.type() == kFloat32 ? TableType::float32 : TableType::float16;
  tables.sums = sums.data<void>();

  DecodingInputs in;
  in.n_keys = key.rows();
  in.n_queries = query.rows();
  in.causal = causal;
  const RowsView& given = key ? key : query;
  if (!given) throw py::type_error("query and key: one of them is wanted, were None");
  in.n_features = given->shape(3);
  if (bool(key) != bool(value)) throw py::type_error("value: is wanted with key, and only then");
  if (bool(query) != bool(out)) throw py::type_error("out: is wanted with query, and only then");
  if (key) {
    key->require_shape({batch, tables.key_heads, in.n_keys, in.n_features});
    value->require_shape({batch, tables.key_heads, in.n_keys, tables.n_values});
  }
  if (query) {
    query->require_shape({batch, TensorView::kAny, in.n_queries, in.n_features});
    if (query->shape(1) == 0 || query->shape(1) % tables.key_heads != 0)
      query->wrong_value("heads that are a multiple of the " + std::to_string(tables.key_heads) +
                         " key heads are wanted, was " + query->describe_shape());
    tables.group = query->shape(1) / tables.key_heads;
    out->require_output().require_shape({batch, query->shape(1), in.n_queries, tables.n_values});
  }
  if (in.n_features == 0)
    given->wrong_value("features are wanted, was shape " + given->describe_shape());
  if (causal && in.n_keys != in.n_queries)
    throw py::value_error("key: as many rows as query has (" + std::to_string(in.n_queries) +
                          ") are wanted, was " + std::to_string(in.n_keys));
  const HashFunctions functions =
      functions_of(parameters, family, n_bits, n_hashes, tables.key_heads, in.n_features);
  DecodingProbes probes;
  std::optional<TensorView> sharpness;
  if (!sharpness_object.is_none()) {
    sharpness.emplace("sharpness", sharpness_object, kAnyPlace);
    const Sharpness numbers(*sharpness, tables.key_heads);
    probes.queries = check_range("query_probes", query_probes, 1, n_buckets);
    probes.keys = check_range("key_probes", key_probes, 1, n_buckets);
    probes.sharpness = numbers.data;
    probes.sharpness_stride = numbers.stride;
  }
  const Normalize options = check_option("normalize", normalize, Normalize::l2);
  const MaskView key_mask("key_mask", mask_object, batch, in.n_keys);
  std::optional<TensorView> counts;
  if (!counts_object.is_none()) {
    counts.emplace("counts", counts_object, kAnyPlace);
    counts->require_type({kFloat32}).require_shape({sums.shape(0), n_hashes, n_buckets});
    counts->require_contiguous().require_writable();
    tables.counts = counts->data<float>();
  } else if (options == Normalize::sum) {
    throw py::type_error("counts: are wanted to normalize by the sum of the weights, was None");
  }
  const CudaCall gpu({&sums, &parameters, query.view(), key.view(), value.view(), out.view(),
                      key_mask.view(), counts ? &*counts : nullptr,
                      sharpness ? &*sharpness : nullptr});
  if (gpu.run([&](const auto& queue, void* scratch) {
        cuda::DecodingRows rows{in.n_queries,
                                in.n_keys,
                                in.n_features,
                                query.any_matrices<const void>(),
                                key.any_matrices<const void>(),
                                value.any_matrices<const void>(),
                                key_mask.mask(),
                                causal};
        return cuda::decode(queue, tables, functions, probes, options, rows,
                            out.any_matrices<void>(), scratch);
      }))
    return;
  in.query = query.matrices<const float>();
  in.key = key.matrices<const float>();
  in.value = value.matrices<const float>();
  in.key_mask = key_mask.mask();
  const Tensor<float> result = out.matrices<float>();
  WithoutGil without_gil;
  decode(tables, functions, probes, options, in, result, threads);
}

// Asks for large pages: a step touches rows all over the tables.
void use_large_pages(py::handle tensor) { TensorView("tensor", tensor).require_output(); }

}  // namespace

void bind_decoding(py::module_& module) {
  using namespace pybind11::literals;
  module.def("decode", &decode_rows, "sums"_a, "counts"_a, "batch"_a, "parameters"_a, "family"_a,
             "n_bits"_a, "n_hashes"_a, "sharpness"_a, "query_probes"_a, "key_probes"_a,
             "normalize"_a, "query"_a, "key"_a, "value"_a, "key_mask"_a, "causal"_a, "out"_a,
             "threads"_a = 0);
  module.def("use_large_pages", &use_large_pages, "tensor"_a);
}

}  // namespace lshkit

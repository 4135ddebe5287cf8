// lshkit._C: the core's functions on borrowed tensors. Arguments are checked here, under the names
// that Python gives them; the core trusts. Every output is the caller's, so nothing is allocated.
#include <pybind11/pybind11.h>

#include <limits>
#include <optional>
#include <string>

#include "lshkit/attention.hpp"
#include "lshkit/bucket_sum.hpp"
#include "lshkit/hash.hpp"
#include "lshkit/runtime.hpp"
#include "lshkit/tensor.hpp"
#include "tensor_view.hpp"

namespace lshkit {
namespace {

constexpr const char* kVectorAxes = "(batch, heads, rows, columns)";
constexpr const char* kCodeAxes = "(batch, heads, rows, n_hashes)";
constexpr int kMaxBits = 16;
constexpr index_t kMaxBuckets = index_t{1} << kMaxBits;  // what a uint16 code can name
constexpr index_t kMaxHashes = index_t{1} << 24;

index_t check_range(const char* name, index_t value, index_t low, index_t high) {
  if (value < low || value > high)
    throw py::value_error(std::string(name) + ": " + std::to_string(low) + " to " +
                          std::to_string(high) + " is wanted, was " + std::to_string(value));
  return value;
}
// Attention keeps the positions of rows in 32 bits.
void check_rows(const char* name, index_t rows) {
  if (rows > std::numeric_limits<std::int32_t>::max())
    throw py::value_error(std::string(name) + ": fewer than 2^31 rows are wanted, was " +
                          std::to_string(rows));
}
template <class Enum>
Enum check_option(const char* name, int code, Enum last) {
  return static_cast<Enum>(check_range(name, code, 0, static_cast<index_t>(last)));
}

template <class T>
Tensor<T> matrices(const TensorView& view) {
  return {view.data<T>(), view.stride(0), view.stride(1), view.stride(2)};
}

const TensorView& check_vectors(const TensorView& view, std::initializer_list<ElementType> types) {
  return view.require_type(types).require_dims(4, kVectorAxes).require_contiguous_rows();
}
const TensorView& check_vectors(const TensorView& view, ElementType type) {
  return check_vectors(view, {type});
}
const TensorView& check_codes(const TensorView& view, std::initializer_list<ElementType> types) {
  view.require_type(types).require_dims(4, kCodeAxes).require_contiguous();
  if (view.shape(3) < 1 || view.shape(3) > kMaxHashes)
    view.wrong_value("1 to " + std::to_string(kMaxHashes) + " hashes are wanted, was " +
                     view.describe_shape());
  return view;
}
Codes codes_of(const TensorView& view) {
  return {view.data<const void>(), view.type() == kUint8 ? 1 : 2};
}
ElementType code_type(index_t n_bits) { return n_bits <= 8 ? kUint8 : kUint16; }

// (batch, n_keys), or None: every key takes part.
class MaskView {
 public:
  MaskView(const char* name, py::handle object, index_t batch, index_t n_keys) {
    if (object.is_none()) return;
    view_.emplace(name, object);
    view_->require_type({kBool, kUint8}).require_shape({batch, n_keys}).require_contiguous_rows();
  }
  Mask mask() const {
    return view_ ? Mask{view_->data<const std::uint8_t>(), view_->stride(0)} : Mask{};
  }

 private:
  std::optional<TensorView> view_;
};

// The arrays that make a set of hash functions, as hash.hpp lays them out.
HashFunctions functions_of(const TensorView& parameters, int family_code, index_t n_bits,
                           index_t n_hashes, index_t heads, index_t n_features) {
  HashFunctions functions;
  functions.family = check_option("family", family_code, Family::hadamard);
  functions.n_bits = static_cast<int>(check_range("n_bits", n_bits, 1, kMaxBits));
  functions.n_hashes = check_range("n_hashes", n_hashes, 1, kMaxHashes);
  parameters.require_type({kFloat32}).require_dims(3, "(1 or heads, rows, columns)");
  parameters.require_contiguous();
  const index_t columns = parameters.shape(2);
  index_t rows = n_hashes * n_bits;
  if (functions.family == Family::hyperplane) {
    parameters.require_shape({TensorView::kAny, rows, n_features});
  } else {
    if (columns < 64 || columns < n_features || (columns & (columns - 1)) != 0)
      parameters.wrong_value("columns as many as a power of two that is at least 64 and at least " +
                             std::to_string(n_features) + " (n_features) are wanted, was shape " +
                             parameters.describe_shape());
    rows = 3 + ((n_hashes + columns - 1) / columns) * n_bits;
    parameters.require_shape({TensorView::kAny, rows, TensorView::kAny});
  }
  if (parameters.shape(0) != 1) parameters.require_shape({heads, rows, columns});
  functions.parameters = parameters.data<const float>();
  functions.head_stride = parameters.shape(0) == 1 ? 0 : rows * columns;
  functions.columns = columns;
  return functions;
}

// float or double, by the type of a checked view: call(T{}).
template <class Call>
void dispatch(ElementType type, Call&& call) {
  if (type == kFloat32)
    call(float{});
  else
    call(double{});
}

bool hash_codes(py::handle x_object, py::handle parameters_object, int family, index_t n_bits,
                index_t n_hashes, py::handle codes_object, int threads) {
  const TensorView x("x", x_object), parameters("parameters", parameters_object);
  const TensorView codes("codes", codes_object);
  check_vectors(x, kFloat32);
  const HashFunctions functions =
      functions_of(parameters, family, n_bits, n_hashes, x.shape(1), x.shape(3));
  check_codes(codes, {code_type(n_bits)}).require_output();
  codes.require_shape({x.shape(0), x.shape(1), x.shape(2), n_hashes});
  if (codes.size() == 0) return true;
  py::gil_scoped_release without_gil;
  return hash(functions, matrices<const float>(x), x.shape(0), x.shape(1), x.shape(2), x.shape(3),
              codes.data<void>(), threads);
}

void sum_buckets(py::handle query_codes_object, py::handle key_codes_object,
                 py::handle values_object, index_t n_buckets, int order_code,
                 py::handle key_mask_object, double scale, py::handle out_object, int threads) {
  const TensorView query_codes("query_codes", query_codes_object);
  const TensorView key_codes("key_codes", key_codes_object);
  const TensorView values("values", values_object), out("out", out_object);
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
  py::gil_scoped_release without_gil;
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
  const TensorView table("table", table_object), codes("codes", codes_object);
  const TensorView values("values", values_object);
  check_table(table, codes);
  table.require_writable();
  values.require_type({table.type()}).require_shape({codes.shape(0), table.shape(2)});
  values.require_contiguous_rows();
  if (values.size() == 0) return;
  py::gil_scoped_release without_gil;
  dispatch(table.type(), [&](auto element) {
    using T = decltype(element);
    bucket_table_add<T>(table.data<T>(), table.shape(0), table.shape(1), table.shape(2),
                        codes_of(codes), values.data<const T>(), values.stride(0), codes.shape(0),
                        static_cast<T>(sign), threads);
  });
}

void table_query(py::handle table_object, py::handle codes_object, double scale,
                 py::handle out_object, int threads) {
  const TensorView table("table", table_object), codes("codes", codes_object);
  const TensorView out("out", out_object);
  check_table(table, codes);
  out.require_type({table.type()}).require_shape({codes.shape(0), table.shape(2)});
  out.require_contiguous().require_output();
  if (out.size() == 0) return;
  py::gil_scoped_release without_gil;
  dispatch(table.type(), [&](auto element) {
    using T = decltype(element);
    bucket_table_query<T>(table.data<const T>(), table.shape(0), table.shape(1), table.shape(2),
                          codes_of(codes), codes.shape(0), static_cast<T>(scale), out.data<T>(),
                          threads);
  });
}

// The inputs that the four attention functions share, with the output or its gradient.
struct AttentionViews {
  TensorView query, key, value, out;
  AttentionShape shape;
  MaskView key_mask;

  AttentionViews(py::handle query_object, py::handle key_object, py::handle value_object,
                 py::handle mask_object, const char* out_name, py::handle out_object,
                 std::initializer_list<ElementType> types)
      : query("query", query_object),
        key("key", key_object),
        value("value", value_object),
        out(out_name, out_object),
        shape(check_shape(types)),
        key_mask("key_mask", mask_object, shape.batch, shape.n_keys) {}

  template <class T>
  AttentionInputs<T> inputs() const {
    return {matrices<const T>(query), matrices<const T>(key), matrices<const T>(value),
            key_mask.mask()};
  }

 private:
  AttentionShape check_shape(std::initializer_list<ElementType> types) const {
    check_vectors(query, types);
    check_vectors(key, query.type());
    check_vectors(value, query.type());
    check_vectors(out, query.type());
    AttentionShape sizes;
    sizes.batch = query.shape(0);
    sizes.heads = query.shape(1);
    sizes.n_queries = query.shape(2);
    sizes.n_features = query.shape(3);
    key.require_shape({sizes.batch, sizes.heads, TensorView::kAny, sizes.n_features});
    sizes.n_keys = key.shape(2);
    value.require_shape({sizes.batch, sizes.heads, sizes.n_keys, TensorView::kAny});
    sizes.n_values = value.shape(3);
    out.require_shape({sizes.batch, sizes.heads, sizes.n_queries, sizes.n_values});
    check_rows("query", sizes.n_queries);
    check_rows("key", sizes.n_keys);
    return sizes;
  }
};

struct GradientViews {
  TensorView query, key, value;

  GradientViews(const AttentionViews& in, py::handle query_object, py::handle key_object,
                py::handle value_object)
      : query("grad_query", query_object),
        key("grad_key", key_object),
        value("grad_value", value_object) {
    check_like(query, in.query);
    check_like(key, in.key);
    check_like(value, in.value);
  }
  bool empty() const { return query.size() == 0 && key.size() == 0 && value.size() == 0; }

  template <class T>
  AttentionGradients<T> gradients(const AttentionViews& in) const {
    return {matrices<const T>(in.out), matrices<T>(query), matrices<T>(key), matrices<T>(value)};
  }

 private:
  static void check_like(const TensorView& gradient, const TensorView& of) {
    check_vectors(gradient, of.type()).require_output();
    gradient.require_shape({of.shape(0), of.shape(1), of.shape(2), of.shape(3)});
  }
};

AttentionOptions check_options(bool causal, int normalize, int gradient = 0) {
  AttentionOptions options;
  options.causal = causal;
  options.normalize = check_option("normalize", normalize, Normalize::l2);
  options.gradient = check_option("gradient", gradient, Gradient::expected);
  return options;
}

void check_attention_codes(const TensorView& codes, const TensorView& rows_of, index_t n_bits,
                           index_t n_hashes) {
  check_codes(codes, {code_type(n_bits)});
  codes.require_shape({rows_of.shape(0), rows_of.shape(1), rows_of.shape(2), n_hashes});
}

void sampled_forward(py::handle query, py::handle key, py::handle value, py::handle key_mask,
                     py::handle parameters_object, int family, index_t n_bits, index_t n_hashes,
                     bool causal, int normalize, py::handle out, py::handle query_codes_object,
                     py::handle key_codes_object, int threads) {
  const AttentionViews in(query, key, value, key_mask, "out", out, {kFloat32});
  const TensorView parameters("parameters", parameters_object);
  const TensorView query_codes("query_codes", query_codes_object);
  const TensorView key_codes("key_codes", key_codes_object);
  const HashFunctions functions =
      functions_of(parameters, family, n_bits, n_hashes, in.shape.heads, in.shape.n_features);
  const AttentionOptions options = check_options(causal, normalize);
  in.out.require_output();
  check_attention_codes(query_codes.require_output(), in.query, n_bits, n_hashes);
  check_attention_codes(key_codes.require_output(), in.key, n_bits, n_hashes);
  if (in.out.size() == 0 && query_codes.size() == 0 && key_codes.size() == 0) return;
  py::gil_scoped_release without_gil;
  yoso_forward(in.shape, options, functions, in.inputs<float>(), matrices<float>(in.out),
               query_codes.data<void>(), key_codes.data<void>(), threads);
}

void sampled_backward(py::handle query, py::handle key, py::handle value, py::handle key_mask,
                      py::handle query_codes_object, py::handle key_codes_object, index_t n_bits,
                      bool causal, int normalize, int gradient, py::handle grad_out,
                      py::handle grad_query, py::handle grad_key, py::handle grad_value,
                      int threads) {
  const AttentionViews in(query, key, value, key_mask, "grad_out", grad_out, {kFloat32});
  const GradientViews gradients(in, grad_query, grad_key, grad_value);
  const TensorView query_codes("query_codes", query_codes_object);
  const TensorView key_codes("key_codes", key_codes_object);
  check_range("n_bits", n_bits, 1, kMaxBits);
  query_codes.require_dims(4, kCodeAxes);
  const index_t n_hashes = query_codes.shape(3);
  check_attention_codes(query_codes, in.query, n_bits, n_hashes);
  check_attention_codes(key_codes, in.key, n_bits, n_hashes);
  const AttentionOptions options = check_options(causal, normalize, gradient);
  if (gradients.empty()) return;
  py::gil_scoped_release without_gil;
  yoso_backward(in.shape, options, static_cast<int>(n_bits), n_hashes, in.inputs<float>(),
                codes_of(query_codes), codes_of(key_codes), gradients.gradients<float>(in),
                threads);
}

void expectation_forward(py::handle query, py::handle key, py::handle value, py::handle key_mask,
                         index_t n_bits, bool causal, int normalize, py::handle out, int threads) {
  const AttentionViews in(query, key, value, key_mask, "out", out, {kFloat32, kFloat64});
  check_range("n_bits", n_bits, 1, kMaxBits);
  const AttentionOptions options = check_options(causal, normalize);
  in.out.require_output();
  if (in.out.size() == 0) return;
  py::gil_scoped_release without_gil;
  dispatch(in.query.type(), [&](auto element) {
    using T = decltype(element);
    expected_forward<T>(in.shape, options, static_cast<int>(n_bits), in.inputs<T>(),
                        matrices<T>(in.out), threads);
  });
}

void expectation_backward(py::handle query, py::handle key, py::handle value, py::handle key_mask,
                          index_t n_bits, bool causal, int normalize, int gradient,
                          py::handle grad_out, py::handle grad_query, py::handle grad_key,
                          py::handle grad_value, int threads) {
  const AttentionViews in(query, key, value, key_mask, "grad_out", grad_out, {kFloat32, kFloat64});
  const GradientViews gradients(in, grad_query, grad_key, grad_value);
  check_range("n_bits", n_bits, 1, kMaxBits);
  const AttentionOptions options = check_options(causal, normalize, gradient);
  if (gradients.empty()) return;
  py::gil_scoped_release without_gil;
  dispatch(in.query.type(), [&](auto element) {
    using T = decltype(element);
    expected_backward<T>(in.shape, options, static_cast<int>(n_bits), in.inputs<T>(),
                         gradients.gradients<T>(in), threads);
  });
}

#ifdef __clang__
constexpr const char* kCompiler = __VERSION__;
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

}  // namespace
}  // namespace lshkit

PYBIND11_MODULE(_C, module) {
  using namespace pybind11::literals;
  module.doc() =
      "The compiled core of lshkit; its functions write into arrays that they are given.";
  module.def("hash", &lshkit::hash_codes, "x"_a, "parameters"_a, "family"_a, "n_bits"_a,
             "n_hashes"_a, "codes"_a, "threads"_a = 0);
  module.def("bucket_sum", &lshkit::sum_buckets, "query_codes"_a, "key_codes"_a, "values"_a,
             "n_buckets"_a, "order"_a, "key_mask"_a, "scale"_a, "out"_a, "threads"_a = 0);
  module.def("bucket_table_add", &lshkit::table_add, "table"_a, "codes"_a, "values"_a, "sign"_a,
             "threads"_a = 0);
  module.def("bucket_table_query", &lshkit::table_query, "table"_a, "codes"_a, "scale"_a, "out"_a,
             "threads"_a = 0);
  module.def("yoso_forward", &lshkit::sampled_forward, "query"_a, "key"_a, "value"_a, "key_mask"_a,
             "parameters"_a, "family"_a, "n_bits"_a, "n_hashes"_a, "causal"_a, "normalize"_a,
             "out"_a, "query_codes"_a, "key_codes"_a, "threads"_a = 0);
  module.def("yoso_backward", &lshkit::sampled_backward, "query"_a, "key"_a, "value"_a,
             "key_mask"_a, "query_codes"_a, "key_codes"_a, "n_bits"_a, "causal"_a, "normalize"_a,
             "gradient"_a, "grad_out"_a, "grad_query"_a, "grad_key"_a, "grad_value"_a,
             "threads"_a = 0);
  module.def("expected_forward", &lshkit::expectation_forward, "query"_a, "key"_a, "value"_a,
             "key_mask"_a, "n_bits"_a, "causal"_a, "normalize"_a, "out"_a, "threads"_a = 0);
  module.def("expected_backward", &lshkit::expectation_backward, "query"_a, "key"_a, "value"_a,
             "key_mask"_a, "n_bits"_a, "causal"_a, "normalize"_a, "gradient"_a, "grad_out"_a,
             "grad_query"_a, "grad_key"_a, "grad_value"_a, "threads"_a = 0);
  module.def("instruction_set", &lshkit::instruction_set);
  module.def("max_threads", &lshkit::max_threads);
  module.def("has_openmp", &lshkit::has_openmp);
  module.def("compiler", [] { return lshkit::kCompiler; });
  module.attr("instruction_sets") = LSHKIT_INSTRUCTION_SETS;  // those compiled in
  module.attr("with_cuda") = false;
}

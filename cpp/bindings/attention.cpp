// lshkit._C: sampled and expected attention.
#include "lshkit/attention.hpp"

#include "bindings.hpp"
#include "checks.hpp"

namespace lshkit {
namespace {

constexpr auto kSampledTypes = {kFloat32, kBfloat16, kFloat16};
constexpr auto kExpectedTypes = {kFloat32, kFloat64, kBfloat16, kFloat16};

// The inputs that the four attention functions share, with the output or its gradient.
struct AttentionViews {
  TensorView query, key, value, out;
  AttentionShape shape;
  MaskView key_mask;
  StartsView query_starts, key_starts;

  AttentionViews(py::handle query_object, py::handle key_object, py::handle value_object,
                 py::handle mask_object, const char* out_name, py::handle out_object,
                 std::initializer_list<ElementType> types, py::handle query_starts_object,
                 py::handle key_starts_object)
      : query("query", query_object),
        key("key", key_object),
        value("value", value_object),
        out(out_name, out_object),
        shape(check_shape(types)),
        key_mask("key_mask", mask_object, shape.batch, shape.n_keys),
        query_starts("query_starts", query_starts_object, shape.n_queries),
        key_starts("key_starts", key_starts_object, shape.n_keys) {
    if (query_starts.sequences() != key_starts.sequences())
      throw py::value_error("key_starts: as many sequences as in query_starts (" +
                            std::to_string(query_starts.sequences()) + ") are wanted, was " +
                            std::to_string(key_starts.sequences()));
    if (query_starts.data() && shape.batch != 1)
      query.wrong_value("packed sequences have a batch of 1, was shape " + query.describe_shape());
    shape.sequences = query_starts.sequences();
    shape.query_starts = query_starts.data();
    shape.key_starts = key_starts.data();
  }

  template <class T>
  AttentionInputs<T> inputs() const {
    return {float_matrices<T, const void>(query), float_matrices<T, const void>(key),
            float_matrices<T, const void>(value), key_mask.mask()};
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
    key.require_shape({sizes.batch, TensorView::kAny, TensorView::kAny, sizes.n_features});
    sizes.key_heads = key.shape(1);
    if (sizes.key_heads == 0 ? sizes.heads != 0 : sizes.heads % sizes.key_heads != 0)
      key.wrong_value("a number of heads that divides query's " + std::to_string(sizes.heads) +
                      " is wanted, was shape " + key.describe_shape());
    sizes.n_keys = key.shape(2);
    value.require_shape({sizes.batch, sizes.key_heads, sizes.n_keys, TensorView::kAny});
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
    return {float_matrices<T, const void>(in.out), float_matrices<T, void>(query),
            float_matrices<T, void>(key), float_matrices<T, void>(value)};
  }

 private:
  static void check_like(const TensorView& gradient, const TensorView& of) {
    check_vectors(gradient, of.type()).require_output();
    gradient.require_shape({of.shape(0), of.shape(1), of.shape(2), of.shape(3)});
  }
};

AttentionOptions check_options(bool causal, int normalize, int gradient, Gradient last_gradient,
                               index_t window, int precision) {
  AttentionOptions options;
  options.causal = causal;
  options.normalize = check_option("normalize", normalize, Normalize::l2);
  options.gradient = check_option("gradient", gradient, last_gradient);
  options.window = check_range("window", window, 0, std::numeric_limits<std::int32_t>::max());
  options.precision = check_option("precision", precision, Precision::fast);
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
                     py::handle key_codes_object, int threads, index_t window, int precision,
                     py::handle query_starts, py::handle key_starts) {
  const AttentionViews in(query, key, value, key_mask, "out", out, kSampledTypes, query_starts,
                          key_starts);
  const TensorView parameters("parameters", parameters_object);
  const TensorView query_codes("query_codes", query_codes_object);
  const TensorView key_codes("key_codes", key_codes_object);
  const HashFunctions functions =
      functions_of(parameters, family, n_bits, n_hashes, in.shape.key_heads, in.shape.n_features);
  const AttentionOptions options =
      check_options(causal, normalize, 0, Gradient::unbiased, window, precision);
  in.out.require_output();
  check_attention_codes(query_codes.require_output(), in.query, n_bits, n_hashes);
  check_attention_codes(key_codes.require_output(), in.key, n_bits, n_hashes);
  if (in.out.size() == 0 && query_codes.size() == 0 && key_codes.size() == 0) return;
  py::gil_scoped_release without_gil;
  yoso_forward(in.shape, options, functions, in.inputs<float>(),
               float_matrices<float, void>(in.out), query_codes.data<void>(),
               key_codes.data<void>(), threads);
}

void sampled_backward(py::handle query, py::handle key, py::handle value, py::handle key_mask,
                      py::handle query_codes_object, py::handle key_codes_object, index_t n_bits,
                      bool causal, int normalize, int gradient, py::handle grad_out,
                      py::handle grad_query, py::handle grad_key, py::handle grad_value,
                      int threads, index_t window, py::handle query_starts, py::handle key_starts) {
  const AttentionViews in(query, key, value, key_mask, "grad_out", grad_out, kSampledTypes,
                          query_starts, key_starts);
  const GradientViews gradients(in, grad_query, grad_key, grad_value);
  const TensorView query_codes("query_codes", query_codes_object);
  const TensorView key_codes("key_codes", key_codes_object);
  check_range("n_bits", n_bits, 1, kMaxBits);
  query_codes.require_dims(4, kCodeAxes);
  const index_t n_hashes = query_codes.shape(3);
  check_attention_codes(query_codes, in.query, n_bits, n_hashes);
  check_attention_codes(key_codes, in.key, n_bits, n_hashes);
  const AttentionOptions options =
      check_options(causal, normalize, gradient, Gradient::unbiased, window, 0);
  if (gradients.empty()) return;
  py::gil_scoped_release without_gil;
  yoso_backward(in.shape, options, static_cast<int>(n_bits), n_hashes, in.inputs<float>(),
                codes_of(query_codes), codes_of(key_codes), gradients.gradients<float>(in),
                threads);
}

void expectation_forward(py::handle query, py::handle key, py::handle value, py::handle key_mask,
                         index_t n_bits, bool causal, int normalize, py::handle out, int threads,
                         py::handle query_starts, py::handle key_starts) {
  const AttentionViews in(query, key, value, key_mask, "out", out, kExpectedTypes, query_starts,
                          key_starts);
  check_range("n_bits", n_bits, 1, kMaxBits);
  const AttentionOptions options = check_options(causal, normalize, 0, Gradient::expected, 0, 0);
  in.out.require_output();
  if (in.out.size() == 0) return;
  py::gil_scoped_release without_gil;
  dispatch(in.query.type(), [&](auto element) {
    using T = decltype(element);
    expected_forward<T>(in.shape, options, static_cast<int>(n_bits), in.inputs<T>(),
                        float_matrices<T, void>(in.out), threads);
  });
}

void expectation_backward(py::handle query, py::handle key, py::handle value, py::handle key_mask,
                          index_t n_bits, bool causal, int normalize, int gradient,
                          py::handle grad_out, py::handle grad_query, py::handle grad_key,
                          py::handle grad_value, int threads, py::handle query_starts,
                          py::handle key_starts) {
  const AttentionViews in(query, key, value, key_mask, "grad_out", grad_out, kExpectedTypes,
                          query_starts, key_starts);
  const GradientViews gradients(in, grad_query, grad_key, grad_value);
  check_range("n_bits", n_bits, 1, kMaxBits);
  const AttentionOptions options =
      check_options(causal, normalize, gradient, Gradient::expected, 0, 0);
  if (gradients.empty()) return;
  py::gil_scoped_release without_gil;
  dispatch(in.query.type(), [&](auto element) {
    using T = decltype(element);
    expected_backward<T>(in.shape, options, static_cast<int>(n_bits), in.inputs<T>(),
                         gradients.gradients<T>(in), threads);
  });
}

}  // namespace

void bind_attention(py::module_& module) {
  using namespace pybind11::literals;
  module.def("yoso_forward", &sampled_forward, "query"_a, "key"_a, "value"_a, "key_mask"_a,
             "parameters"_a, "family"_a, "n_bits"_a, "n_hashes"_a, "causal"_a, "normalize"_a,
             "out"_a, "query_codes"_a, "key_codes"_a, "threads"_a = 0, py::kw_only(),
             "window"_a = 0, "precision"_a = 0, "query_starts"_a = py::none(),
             "key_starts"_a = py::none());
  module.def("yoso_backward", &sampled_backward, "query"_a, "key"_a, "value"_a, "key_mask"_a,
             "query_codes"_a, "key_codes"_a, "n_bits"_a, "causal"_a, "normalize"_a, "gradient"_a,
             "grad_out"_a, "grad_query"_a, "grad_key"_a, "grad_value"_a, "threads"_a = 0,
             py::kw_only(), "window"_a = 0, "query_starts"_a = py::none(),
             "key_starts"_a = py::none());
  module.def("expected_forward", &expectation_forward, "query"_a, "key"_a, "value"_a, "key_mask"_a,
             "n_bits"_a, "causal"_a, "normalize"_a, "out"_a, "threads"_a = 0, py::kw_only(),
             "query_starts"_a = py::none(), "key_starts"_a = py::none());
  module.def("expected_backward", &expectation_backward, "query"_a, "key"_a, "value"_a,
             "key_mask"_a, "n_bits"_a, "causal"_a, "normalize"_a, "gradient"_a, "grad_out"_a,
             "grad_query"_a, "grad_key"_a, "grad_value"_a, "threads"_a = 0, py::kw_only(),
             "query_starts"_a = py::none(), "key_starts"_a = py::none());
}

}  // namespace lshkit

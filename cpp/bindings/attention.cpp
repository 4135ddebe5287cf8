// lshkit._C: sampled and expected attention.
#include "lshkit/attention.hpp"

#include "attention_views.hpp"
#include "bindings.hpp"
#include "cuda_call.hpp"

namespace lshkit {
namespace {

AttentionOptions check_options(bool causal, int normalize, int gradient, Gradient last_gradient) {
  AttentionOptions options;
  options.causal = causal;
  options.normalize = check_option("normalize", normalize, Normalize::l2);
  options.gradient = check_option("gradient", gradient, last_gradient);
  return options;
}

void check_attention_codes(const TensorView& codes, const TensorView& rows_of, index_t n_bits,
                           index_t n_hashes) {
  check_codes(codes, {code_type(n_bits)});
  codes.require_shape({rows_of.shape(0), rows_of.shape(1), rows_of.shape(2), n_hashes});
}

// The output and its divisors that a backward may be given, or neither.
struct KeptViews {
  std::optional<TensorView> out;
  std::optional<DivisorsView> divisors;

  KeptViews(py::handle out_object, py::handle divisors_object, const AttentionViews& in,
            Normalize normalize) {
    if (out_object.is_none() || normalize == Normalize::none) return;
    if (divisors_object.is_none()) throw py::value_error("divisors: out needs them, was None");
    check_vectors(out.emplace("out", out_object, kAnyPlace), in.query.type());
    out->require_shape({in.out.shape(0), in.out.shape(1), in.out.shape(2), in.out.shape(3)});
    divisors.emplace(divisors_object, in.shape, normalize);
  }
  KeptOutput kept() const {
    if (!out) return {};
    return {float_matrices<float, const void>(*out), divisors->data()};
  }
  std::vector<const TensorView*> views() const {
    if (!out) return {};
    return {&*out, divisors->view()};
  }
};

// Codes of a subset of the hashes, or none.
struct GradientCodeViews {
  std::optional<TensorView> queries, keys;

  GradientCodeViews(py::handle query_object, py::handle key_object, const AttentionViews& in,
                    index_t n_bits) {
    if (query_object.is_none() && key_object.is_none()) return;
    queries.emplace("gradient_query_codes", query_object, kAnyPlace);
    keys.emplace("gradient_key_codes", key_object, kAnyPlace);
    queries->require_dims(4, kCodeAxes);
    check_attention_codes(*queries, in.query, n_bits, queries->shape(3));
    check_attention_codes(*keys, in.key, n_bits, queries->shape(3));
  }
  GradientCodes codes() const {
    if (!queries) return {};
    return {codes_of(*queries), codes_of(*keys), queries->shape(3)};
  }
  std::vector<const TensorView*> views() const {
    if (!queries) return {};
    return {&*queries, &*keys};
  }
};

void sampled_forward(py::handle query, py::handle key, py::handle value, py::handle key_mask,
                     py::handle parameters_object, int family, index_t n_bits, index_t n_hashes,
                     bool causal, int normalize, py::handle out, py::handle query_codes_object,
                     py::handle key_codes_object, int threads, py::handle query_starts,
                     py::handle key_starts, py::handle divisors_object) {
  const AttentionViews in(query, key, value, key_mask, "out", out, kSampledTypes, query_starts,
                          key_starts);
  const TensorView parameters("parameters", parameters_object, kAnyPlace);
  const TensorView query_codes("query_codes", query_codes_object, kAnyPlace);
  const TensorView key_codes("key_codes", key_codes_object, kAnyPlace);
  const HashFunctions functions =
      functions_of(parameters, family, n_bits, n_hashes, in.shape.key_heads, in.shape.n_features);
  const AttentionOptions options = check_options(causal, normalize, 0, Gradient::unbiased);
  in.out.require_output();
  check_attention_codes(query_codes.require_output(), in.query, n_bits, n_hashes);
  check_attention_codes(key_codes.require_output(), in.key, n_bits, n_hashes);
  std::optional<DivisorsView> divisors;
  if (!divisors_object.is_none()) {
    divisors.emplace(divisors_object, in.shape, options.normalize);
    divisors->require_output();
  }
  if (in.out.size() == 0 && query_codes.size() == 0 && key_codes.size() == 0) return;
  const CudaCall gpu(
      in.views({&parameters, &query_codes, &key_codes, divisors ? divisors->view() : nullptr}));
  float* const to_divisors = divisors ? divisors->data() : nullptr;
  if (gpu.run([&](const auto& queue, void* scratch) {
        return cuda::yoso_forward(queue, in.shape, options, functions, in.inputs<float>(),
                                  float_matrices<float, void>(in.out), query_codes.data<void>(),
                                  key_codes.data<void>(), scratch, to_divisors);
      }))
    return;
  WithoutGil without_gil;
  yoso_forward(in.shape, options, functions, in.inputs<float>(),
               float_matrices<float, void>(in.out), query_codes.data<void>(),
               key_codes.data<void>(), threads, to_divisors);
}

void sampled_backward(py::handle query, py::handle key, py::handle value, py::handle key_mask,
                      py::handle query_codes_object, py::handle key_codes_object, index_t n_bits,
                      bool causal, int normalize, int gradient, py::handle grad_out,
                      py::handle grad_query, py::handle grad_key, py::handle grad_value,
                      int threads, bool bfloat16_products, py::handle query_starts,
                      py::handle key_starts, py::handle gradient_query_codes,
                      py::handle gradient_key_codes, py::handle out, py::handle divisors) {
  const AttentionViews in(query, key, value, key_mask, "grad_out", grad_out, kSampledTypes,
                          query_starts, key_starts);
  const GradientViews gradients(in, grad_query, grad_key, grad_value);
  const TensorView query_codes("query_codes", query_codes_object, kAnyPlace);
  const TensorView key_codes("key_codes", key_codes_object, kAnyPlace);
  check_range("n_bits", n_bits, 1, kMaxBits);
  query_codes.require_dims(4, kCodeAxes);
  const index_t n_hashes = query_codes.shape(3);
  check_attention_codes(query_codes, in.query, n_bits, n_hashes);
  check_attention_codes(key_codes, in.key, n_bits, n_hashes);
  AttentionOptions options = check_options(causal, normalize, gradient, Gradient::unbiased);
  if (options.gradient == Gradient::exact)
    throw py::value_error("gradient: 1 (exact) is the expectation's alone, wanted 0, 2 or 3");
  options.bfloat16_products = bfloat16_products;
  const GradientCodeViews subset(gradient_query_codes, gradient_key_codes, in, n_bits);
  options.gradient_codes = subset.codes();
  const KeptViews kept(out, divisors, in, options.normalize);
  options.kept = kept.kept();
  if (gradients.empty()) return;
  std::vector<const TensorView*> views = in.views({&query_codes, &key_codes});
  for (const auto& more : {subset.views(), kept.views(), gradients.views()})
    views.insert(views.end(), more.begin(), more.end());
  const CudaCall gpu(views);
  if (gpu.run([&](const auto& queue, void* scratch) {
        return cuda::yoso_backward(queue, in.shape, options, static_cast<int>(n_bits), n_hashes,
                                   in.inputs<float>(), codes_of(query_codes), codes_of(key_codes),
                                   gradients.gradients<float>(in), scratch);
      }))
    return;
  WithoutGil without_gil;
  yoso_backward(in.shape, options, static_cast<int>(n_bits), n_hashes, in.inputs<float>(),
                codes_of(query_codes), codes_of(key_codes), gradients.gradients<float>(in),
                threads);
}

void expectation_forward(py::handle query, py::handle key, py::handle value, py::handle key_mask,
                         index_t n_bits, bool causal, int normalize, py::handle out, int threads,
                         py::handle query_starts, py::handle key_starts,
                         py::handle divisors_object) {
  const AttentionViews in(query, key, value, key_mask, "out", out, kExpectedTypes, query_starts,
                          key_starts);
  check_range("n_bits", n_bits, 1, kMaxBits);
  const AttentionOptions options = check_options(causal, normalize, 0, Gradient::exact);
  in.out.require_output();
  std::optional<DivisorsView> divisors;
  if (!divisors_object.is_none()) {
    if (in.query.type() == kFloat64)
      throw py::value_error("divisors: None is wanted with float64 inputs");
    divisors.emplace(divisors_object, in.shape, options.normalize);
    divisors->require_output();
  }
  if (in.out.size() == 0) return;
  const CudaCall gpu(in.views({divisors ? divisors->view() : nullptr}));
  float* const to_divisors = divisors ? divisors->data() : nullptr;
  if (gpu.run([&](const auto& queue, void* scratch) {
        in.query.require_type(kSampledTypes);
        return cuda::expected_forward(queue, in.shape, options, static_cast<int>(n_bits),
                                      in.inputs<float>(), float_matrices<float, void>(in.out),
                                      scratch, to_divisors);
      }))
    return;
  WithoutGil without_gil;
  dispatch(in.query.type(), [&](auto element) {
    using T = decltype(element);
    T* written = nullptr;
    if constexpr (std::is_same_v<T, float>) written = to_divisors;
    expected_forward<T>(in.shape, options, static_cast<int>(n_bits), in.inputs<T>(),
                        float_matrices<T, void>(in.out), threads, written);
  });
}

void expectation_backward(py::handle query, py::handle key, py::handle value, py::handle key_mask,
                          index_t n_bits, bool causal, int normalize, int gradient,
                          py::handle grad_out, py::handle grad_query, py::handle grad_key,
                          py::handle grad_value, int threads, py::handle query_starts,
                          py::handle key_starts, py::handle out, py::handle divisors) {
  const AttentionViews in(query, key, value, key_mask, "grad_out", grad_out, kExpectedTypes,
                          query_starts, key_starts);
  const GradientViews gradients(in, grad_query, grad_key, grad_value);
  check_range("n_bits", n_bits, 1, kMaxBits);
  AttentionOptions options = check_options(causal, normalize, gradient, Gradient::exact);
  if (!out.is_none() && in.query.type() == kFloat64)
    throw py::value_error("out: None is wanted with float64 inputs");
  const KeptViews kept(out, divisors, in, options.normalize);
  options.kept = kept.kept();
  if (gradients.empty()) return;
  std::vector<const TensorView*> views = in.views({});
  for (const auto& more : {kept.views(), gradients.views()})
    views.insert(views.end(), more.begin(), more.end());
  const CudaCall gpu(views);
  if (gpu.run([&](const auto& queue, void* scratch) {
        in.query.require_type(kSampledTypes);
        return cuda::expected_backward(queue, in.shape, options, static_cast<int>(n_bits),
                                       in.inputs<float>(), gradients.gradients<float>(in), scratch);
      }))
    return;
  WithoutGil without_gil;
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
             "query_starts"_a = py::none(), "key_starts"_a = py::none(), "divisors"_a = py::none());
  module.def("yoso_backward", &sampled_backward, "query"_a, "key"_a, "value"_a, "key_mask"_a,
             "query_codes"_a, "key_codes"_a, "n_bits"_a, "causal"_a, "normalize"_a, "gradient"_a,
             "grad_out"_a, "grad_query"_a, "grad_key"_a, "grad_value"_a, "threads"_a = 0,
             py::kw_only(), "bfloat16_products"_a = false, "query_starts"_a = py::none(),
             "key_starts"_a = py::none(), "gradient_query_codes"_a = py::none(),
             "gradient_key_codes"_a = py::none(), "out"_a = py::none(), "divisors"_a = py::none());
  module.def("expected_forward", &expectation_forward, "query"_a, "key"_a, "value"_a, "key_mask"_a,
             "n_bits"_a, "causal"_a, "normalize"_a, "out"_a, "threads"_a = 0, py::kw_only(),
             "query_starts"_a = py::none(), "key_starts"_a = py::none(), "divisors"_a = py::none());
  module.def("expected_backward", &expectation_backward, "query"_a, "key"_a, "value"_a,
             "key_mask"_a, "n_bits"_a, "causal"_a, "normalize"_a, "gradient"_a, "grad_out"_a,
             "grad_query"_a, "grad_key"_a, "grad_value"_a, "threads"_a = 0, py::kw_only(),
             "query_starts"_a = py::none(), "key_starts"_a = py::none(), "out"_a = py::none(),
             "divisors"_a = py::none());
}

}  // namespace lshkit

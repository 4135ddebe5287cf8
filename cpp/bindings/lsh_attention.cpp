// lshkit._C: softmax attention from colliding pairs.
#include "lshkit/lsh_attention.hpp"

#include "attention_views.hpp"
#include "bindings.hpp"

namespace lshkit {
namespace {

constexpr auto kTypes = {kFloat32};

// What both directions take, checked.
struct LshViews : AttentionViews {
  TensorView query_codes, key_codes;
  LshAttentionOptions options;

  LshViews(py::handle query, py::handle key, py::handle value, py::handle mask,
           py::handle query_codes_object, py::handle key_codes_object, index_t n_bits, double scale,
           int weighting, bool causal, index_t offset, index_t window, index_t n_sinks,
           const char* out_name, py::handle out)
      : AttentionViews(query, key, value, mask, out_name, out, kTypes, py::none(), py::none()),
        query_codes("query_codes", query_codes_object),
        key_codes("key_codes", key_codes_object) {
    check_range("n_bits", n_bits, 1, kMaxBits);
    query_codes.require_dims(4, kCodeAxes);
    options.n_bits = static_cast<int>(n_bits);
    options.n_hashes = check_range("n_hashes", query_codes.shape(3), 1, 65535);
    check(query_codes, this->query);
    check(key_codes, this->key);
    if (!(scale > 0))
      throw py::value_error("scale: a number > 0 is wanted, was " + std::to_string(scale));
    options.scale = static_cast<float>(scale);
    options.weighting = check_option("weighting", weighting, Weighting::magicpig);
    options.causal = causal;
    constexpr index_t kMost = index_t{1} << 40;
    options.offset = check_range("offset", offset, -kMost, kMost);
    options.window = check_range("window", window, 0, kMost);
    options.n_sinks = check_range("n_sinks", n_sinks, 0, kMost);
  }
  LshAttentionInputs tensors() const {
    return {matrices<const float>(query), matrices<const float>(key),
            matrices<const float>(value), key_mask.mask(),
            codes_of(query_codes),        codes_of(key_codes)};
  }

 private:
  void check(const TensorView& codes, const TensorView& of) const {
    check_codes(codes, {code_type(options.n_bits)});
    codes.require_shape({of.shape(0), of.shape(1), of.shape(2), options.n_hashes});
  }
};

void forward(py::handle query, py::handle key, py::handle value, py::handle key_mask,
             py::handle query_codes, py::handle key_codes, index_t n_bits, double scale,
             int weighting, bool causal, index_t offset, index_t window, index_t n_sinks,
             py::handle out, py::handle log_sum_object, py::handle pairs_object, int threads) {
  const LshViews in(query, key, value, key_mask, query_codes, key_codes, n_bits, scale, weighting,
                    causal, offset, window, n_sinks, "out", out);
  const TensorView log_sum("log_sum", log_sum_object), pairs("pairs", pairs_object);
  in.out.require_output();
  for (const TensorView* view : {&log_sum, &pairs}) {
    view->require_type({view == &pairs ? kInt32 : kFloat64}).require_contiguous().require_output();
    view->require_shape({in.shape.batch, in.shape.heads, in.shape.n_queries});
  }
  if (log_sum.size() == 0) return;
  WithoutGil without_gil;
  lsh_attention_forward(in.shape, in.options, in.tensors(), matrices<float>(in.out),
                        log_sum.data<double>(), pairs.data<std::int32_t>(), threads);
}

void backward(py::handle query, py::handle key, py::handle value, py::handle key_mask,
              py::handle query_codes, py::handle key_codes, index_t n_bits, double scale,
              int weighting, bool causal, index_t offset, index_t window, index_t n_sinks,
              py::handle grad_out, py::handle out_object, py::handle log_sum_object,
              py::handle grad_query, py::handle grad_key, py::handle grad_value, int threads) {
  const LshViews in(query, key, value, key_mask, query_codes, key_codes, n_bits, scale, weighting,
                    causal, offset, window, n_sinks, "grad_out", grad_out);
  const TensorView out("out", out_object), log_sum("log_sum", log_sum_object);
  const GradientViews gradients(in, grad_query, grad_key, grad_value);
  const AttentionShape& s = in.shape;
  check_vectors(out, kFloat32).require_shape({s.batch, s.heads, s.n_queries, s.n_values});
  log_sum.require_type({kFloat64}).require_contiguous();
  log_sum.require_shape({s.batch, s.heads, s.n_queries});
  if (gradients.empty()) return;
  const std::vector<const TensorView*> wanted = gradients.views();
  const auto to = [&](int i) { return wanted[i] ? matrices<float>(*wanted[i]) : Tensor<float>{}; };
  WithoutGil without_gil;
  lsh_attention_backward(s, in.options, in.tensors(),
                         {matrices<const float>(out), matrices<const float>(in.out),
                          log_sum.data<const double>(), to(0), to(1), to(2)},
                         threads);
}

}  // namespace

void bind_lsh_attention(py::module_& module) {
  using namespace pybind11::literals;
  module.def("lsh_attention_forward", &forward, "query"_a, "key"_a, "value"_a, "key_mask"_a,
             "query_codes"_a, "key_codes"_a, "n_bits"_a, "scale"_a, "weighting"_a, "causal"_a,
             "offset"_a, "window"_a, "n_sinks"_a, "out"_a, "log_sum"_a, "pairs"_a, "threads"_a = 0);
  module.def("lsh_attention_backward", &backward, "query"_a, "key"_a, "value"_a, "key_mask"_a,
             "query_codes"_a, "key_codes"_a, "n_bits"_a, "scale"_a, "weighting"_a, "causal"_a,
             "offset"_a, "window"_a, "n_sinks"_a, "grad_out"_a, "out"_a, "log_sum"_a,
             "grad_query"_a, "grad_key"_a, "grad_value"_a, "threads"_a = 0);
}

}  // namespace lshkit

// lshkit._C: attention with soft codes. Margins are int32: whoever rounds floats, as to keep less
// for a backward pass, would lose the numbers of their bits. n_hashes and n_selected are one last
// dimension of them.
#include "lshkit/cuda/soft.hpp"

#include "attention_views.hpp"
#include "bindings.hpp"
#include "cuda_call.hpp"
#include "lshkit/soft_attention.hpp"

namespace lshkit {
namespace {

struct SoftCodeViews {
  TensorView codes, margins;

  SoftCodeViews(const std::string& side, py::handle codes_object, py::handle margins_object)
      : codes((side + "_codes").c_str(), codes_object, kAnyPlace),
        margins((side + "_margins").c_str(), margins_object, kAnyPlace) {}

  void check(index_t batch, index_t heads, index_t rows, const HashFunctions& functions,
             index_t n_probes) const {
    const index_t selected = functions.n_hashes * selected_bits(n_probes);
    codes.require_type({code_type(functions.n_bits)}).require_contiguous();
    codes.require_shape({batch, heads, rows, functions.n_hashes});
    margins.require_type({kInt32}).require_contiguous();
    margins.require_shape({batch, heads, rows, selected});
  }
  SoftCodes soft() const {
    return {codes.data<const void>(), codes.type() == kUint8 ? 1 : 2, margins.data<const float>()};
  }
  SoftCodesOut output() const {
    codes.require_output();
    margins.require_output();
    return {codes.data<void>(), margins.data<float>()};
  }
};

// What forward and backward share; out is the output or its gradient.
struct SoftViews {
  AttentionViews in;
  TensorView parameters, sharpness;
  HashFunctions functions;
  SoftOptions options;

  SoftViews(py::handle query, py::handle key, py::handle value, py::handle mask,
            py::handle parameters_object, py::handle sharpness_object, int family, index_t n_bits,
            index_t n_hashes, index_t query_probes, index_t key_probes, bool causal, int normalize,
            const char* out_name, py::handle out, py::handle query_starts, py::handle key_starts)
      : in(query, key, value, mask, out_name, out, kSampledTypes, query_starts, key_starts),
        parameters("parameters", parameters_object, kAnyPlace),
        sharpness("sharpness", sharpness_object, kAnyPlace),
        functions(functions_of(parameters, family, n_bits, n_hashes, in.shape.key_heads,
                               in.shape.n_features)) {
    options.causal = causal;
    options.normalize = check_option("normalize", normalize, Normalize::l2);
    options.query_probes =
        check_range("query_probes", query_probes, 1, index_t{1} << functions.n_bits);
    options.key_probes = check_range("key_probes", key_probes, 1, index_t{1} << functions.n_bits);
    const Sharpness numbers(sharpness, in.shape.key_heads);
    options.sharpness = numbers.data;
    options.sharpness_stride = numbers.stride;
  }
  // All tensors of a call with these; null for those that were not given.
  std::vector<const TensorView*> views(const SoftCodeViews& q, const SoftCodeViews& k,
                                       std::initializer_list<const TensorView*> more) const {
    std::vector<const TensorView*> all =
        in.views({&parameters, &sharpness, &q.codes, &q.margins, &k.codes, &k.margins});
    all.insert(all.end(), more);
    return all;
  }
  void check_codes_of(const SoftCodeViews& queries, const SoftCodeViews& keys) const {
    const AttentionShape& shape = in.shape;
    queries.check(shape.batch, shape.heads, shape.n_queries, functions, options.query_probes);
    keys.check(shape.batch, shape.key_heads, shape.n_keys, functions, options.key_probes);
  }
};

void soft_forward(py::handle query, py::handle key, py::handle value, py::handle key_mask,
                  py::handle parameters, py::handle sharpness, int family, index_t n_bits,
                  index_t n_hashes, index_t query_probes, index_t key_probes, bool causal,
                  int normalize, py::handle out, py::handle query_codes, py::handle query_margins,
                  py::handle key_codes, py::handle key_margins, py::handle divisors_object,
                  int threads, py::handle query_starts, py::handle key_starts) {
  const SoftViews soft(query, key, value, key_mask, parameters, sharpness, family, n_bits, n_hashes,
                       query_probes, key_probes, causal, normalize, "out", out, query_starts,
                       key_starts);
  const SoftCodeViews queries("query", query_codes, query_margins);
  const SoftCodeViews keys("key", key_codes, key_margins);
  const AttentionViews& in = soft.in;
  soft.check_codes_of(queries, keys);
  const SoftCodesOut query_output = queries.output(), key_output = keys.output();
  const DivisorsView divisors(divisors_object, in.shape, soft.options.normalize);
  divisors.require_output();
  in.out.require_output();
  if (in.out.size() == 0 && queries.codes.size() == 0 && keys.codes.size() == 0) return;
  const CudaCall gpu(soft.views(queries, keys, {divisors.view()}));
  if (gpu.run([&](const auto& queue, void* scratch) {
        return cuda::soft_attention_forward(queue, in.shape, soft.options, soft.functions,
                                            in.inputs<float>(), float_matrices<float, void>(in.out),
                                            divisors.data(), query_output, key_output, scratch);
      }))
    return;
  WithoutGil without_gil;
  soft_attention_forward(in.shape, soft.options, soft.functions, in.inputs<float>(),
                         float_matrices<float, void>(in.out), divisors.data(), query_output,
                         key_output, threads);
}

void soft_backward(py::handle query, py::handle key, py::handle value, py::handle key_mask,
                   py::handle parameters, py::handle sharpness, int family, index_t n_bits,
                   index_t n_hashes, index_t query_probes, index_t key_probes, bool causal,
                   int normalize, py::handle grad_out, py::handle query_codes,
                   py::handle query_margins, py::handle key_codes, py::handle key_margins,
                   py::handle divisors_object, py::handle out_object, py::handle grad_query,
                   py::handle grad_key, py::handle grad_value, py::handle grad_sharpness_object,
                   int threads, py::handle query_starts, py::handle key_starts,
                   py::handle grad_parameters_object) {
  const SoftViews soft(query, key, value, key_mask, parameters, sharpness, family, n_bits, n_hashes,
                       query_probes, key_probes, causal, normalize, "grad_out", grad_out,
                       query_starts, key_starts);
  const SoftCodeViews queries("query", query_codes, query_margins);
  const SoftCodeViews keys("key", key_codes, key_margins);
  const AttentionViews& in = soft.in;
  soft.check_codes_of(queries, keys);
  const DivisorsView divisors(divisors_object, in.shape, soft.options.normalize);
  Input<float> out;
  std::optional<TensorView> out_view, grad_sharpness_view, grad_parameters_view;
  if (!out_object.is_none() || soft.options.normalize != Normalize::none) {
    const TensorView& view = out_view.emplace("out", out_object, kAnyPlace);
    check_vectors(view, in.query.type());
    view.require_shape({in.out.shape(0), in.out.shape(1), in.out.shape(2), in.out.shape(3)});
    out = float_matrices<float, const void>(view);
  }
  const GradientViews gradients(in, grad_query, grad_key, grad_value);
  float* grad_sharpness = nullptr;
  if (!grad_sharpness_object.is_none()) {
    const TensorView& grad =
        grad_sharpness_view.emplace("grad_sharpness", grad_sharpness_object, kAnyPlace);
    grad.require_type({kFloat32}).require_contiguous().require_writable();
    grad.require_shape({in.shape.sequences ? in.shape.sequences : in.shape.batch, in.shape.heads});
    grad_sharpness = grad.data<float>();
  }
  float* grad_parameters = parameter_gradient(grad_parameters_view, grad_parameters_object,
                                              soft.parameters, soft.functions.family);
  std::vector<const TensorView*> views = soft.views(queries, keys, {divisors.view()});
  for (const auto* view : {&out_view, &grad_sharpness_view, &grad_parameters_view})
    if (*view) views.push_back(&**view);
  for (const TensorView* view : gradients.views()) views.push_back(view);
  const CudaCall gpu(views);
  if (gpu.run([&](const auto& queue, void* scratch) {
        return cuda::soft_attention_backward(
            queue, in.shape, soft.options, soft.functions, in.inputs<float>(), out, divisors.data(),
            queries.soft(), keys.soft(), gradients.gradients<float>(in), grad_sharpness,
            grad_parameters, scratch);
      }))
    return;
  WithoutGil without_gil;
  soft_attention_backward(in.shape, soft.options, soft.functions, in.inputs<float>(), out,
                          divisors.data(), queries.soft(), keys.soft(),
                          gradients.gradients<float>(in), grad_sharpness, grad_parameters, threads);
}

}  // namespace

void bind_soft(py::module_& module) {
  using namespace pybind11::literals;
  module.def("soft_attention_forward", &soft_forward, "query"_a, "key"_a, "value"_a, "key_mask"_a,
             "parameters"_a, "sharpness"_a, "family"_a, "n_bits"_a, "n_hashes"_a, "query_probes"_a,
             "key_probes"_a, "causal"_a, "normalize"_a, "out"_a, "query_codes"_a, "query_margins"_a,
             "key_codes"_a, "key_margins"_a, "divisors"_a, "threads"_a = 0, py::kw_only(),
             "query_starts"_a = py::none(), "key_starts"_a = py::none());
  module.def("soft_attention_backward", &soft_backward, "query"_a, "key"_a, "value"_a, "key_mask"_a,
             "parameters"_a, "sharpness"_a, "family"_a, "n_bits"_a, "n_hashes"_a, "query_probes"_a,
             "key_probes"_a, "causal"_a, "normalize"_a, "grad_out"_a, "query_codes"_a,
             "query_margins"_a, "key_codes"_a, "key_margins"_a, "divisors"_a, "out"_a,
             "grad_query"_a, "grad_key"_a, "grad_value"_a, "grad_sharpness"_a, "threads"_a = 0,
             py::kw_only(), "query_starts"_a = py::none(), "key_starts"_a = py::none(),
             "grad_parameters"_a = py::none());
}

}  // namespace lshkit

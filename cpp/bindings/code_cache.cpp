// lshkit._C: a cache of codes, and attention over it.
#include "lshkit/code_cache.hpp"

#include "bindings.hpp"
#include "checks.hpp"

namespace lshkit {
namespace {

constexpr index_t kMaxFeatures = 4096;

struct CodedKeysViews {
  TensorView key, value, codes, planes, centre, norm, value_centre, value_norm, starts;
  CodedKeys keys;

  CodedKeysViews(py::handle key_object, py::handle value_object, py::handle codes_object,
                 py::handle planes_object, py::handle centre_object, py::handle norm_object,
                 py::handle value_centre_object, py::handle value_norm_object,
                 py::handle starts_object)
      : key("key", key_object),
        value("value", value_object),
        codes("codes", codes_object),
        planes("planes", planes_object),
        centre("centre", centre_object),
        norm("norm", norm_object),
        value_centre("value_centre", value_centre_object),
        value_norm("value_norm", value_norm_object),
        starts("starts", starts_object) {
    check_vectors(key, {kFloat32, kBfloat16, kFloat16});
    check_rows("key", key.shape(2));
    check_vectors(value, {key.type()});
    keys.batch = key.shape(0);
    keys.key_heads = key.shape(1);
    keys.rows = key.shape(2);
    keys.n_features = check_range("key's features", key.shape(3), 1, kMaxFeatures);
    planes.require_type({kFloat32}).require_contiguous();
    planes.require_shape({keys.key_heads, keys.n_features, TensorView::kAny});
    keys.n_bits = check_range("planes' bits", planes.shape(2), 64, 256);
    if (keys.n_bits % 64 != 0) planes.wrong_value("a multiple of 64 bits is wanted");
    codes.require_type({kUint8}).require_contiguous().require_writable();
    codes.require_shape({keys.batch, keys.key_heads, TensorView::kAny, block_bytes(keys.n_bits)});
    keys.n_blocks = codes.shape(2);
    if (keys.n_blocks * kCodeBlock < keys.rows)
      codes.wrong_value("a block for every 64 keys is wanted, was " + codes.describe_shape());
    centre.require_type({kFloat32}).require_contiguous();
    centre.require_shape({keys.batch, keys.key_heads, keys.n_features});
    for (const TensorView* view : {&norm, &value_norm}) {
      view->require_type({kFloat32}).require_contiguous();
      view->require_shape({keys.batch, keys.key_heads});
    }
    starts.require_type({kInt64}).require_contiguous().require_shape({keys.batch});
    keys.starts = starts.data<const std::int64_t>();
    for (index_t b = 0; b < keys.batch; ++b) check_range("starts", keys.starts[b], 0, keys.rows);
    value.require_shape({keys.batch, keys.key_heads, keys.rows, TensorView::kAny});
    keys.n_values = value.shape(3);
    value_centre.require_type({kFloat32}).require_contiguous();
    value_centre.require_shape({keys.batch, keys.key_heads, keys.n_values});
    keys.key = float_matrices<float, const void>(key);
    keys.value = float_matrices<float, const void>(value);
    keys.codes = codes.data<std::uint8_t>();
    keys.planes = planes.data<const float>();
    keys.centre = centre.data<const float>();
    keys.norm = norm.data<const float>();
    keys.value_centre = value_centre.data<const float>();
    keys.value_norm = value_norm.data<const float>();
  }
};

void code_keys_of(py::handle key, py::handle value, py::handle codes, py::handle planes,
                  py::handle centre, py::handle norm, py::handle value_centre,
                  py::handle value_norm, py::handle starts, index_t sequence, index_t begin,
                  index_t end, int threads) {
  const CodedKeysViews views(key, value, codes, planes, centre, norm, value_centre, value_norm,
                             starts);
  check_range("sequence", sequence, 0, views.keys.batch - 1);
  check_range("end", end, 0, views.keys.rows - views.keys.starts[sequence]);
  check_range("begin", begin, 0, end);
  WithoutGil without_gil;
  code_keys(views.keys, sequence, begin, end, threads);
}

void code_step_of(py::handle query_object, py::handle key, py::handle value, py::handle codes,
                  py::handle planes, py::handle centre, py::handle norm, py::handle value_centre,
                  py::handle value_norm, py::handle starts, double scale, index_t n_sinks,
                  index_t window, double epsilon, double quantile, double min_share,
                  double max_share, index_t exact_up_to, std::uint64_t seed, py::handle out_object,
                  py::handle log_sum_object, py::handle error_object, py::handle n_read_object,
                  int threads) {
  const CodedKeysViews views(key, value, codes, planes, centre, norm, value_centre, value_norm,
                             starts);
  const TensorView query("query", query_object);
  const TensorView out("out", out_object), log_sum("log_sum", log_sum_object);
  const TensorView error("error", error_object), n_read("n_read", n_read_object);
  const CodedKeys& keys = views.keys;
  check_vectors(query, kFloat32);
  query.require_shape({keys.batch, TensorView::kAny, TensorView::kAny, keys.n_features});
  const index_t heads = query.shape(1), n = query.shape(2);
  if (heads == 0 || heads % keys.key_heads != 0)
    query.wrong_value("heads that are a multiple of the " + std::to_string(keys.key_heads) +
                      " key heads are wanted, was " + query.describe_shape());
  check_range("query's rows", n, 0, keys.rows);
  check_vectors(out, kFloat32).require_output();
  out.require_shape({keys.batch, heads, n, keys.n_values});
  for (const TensorView* view : {&log_sum, &error, &n_read}) {
    view->require_type({view == &n_read ? kInt32 : kFloat32}).require_contiguous();
    view->require_writable().require_shape({keys.batch, heads, n});
  }
  CodeStepOptions options;
  options.scale = float(scale);
  options.n_sinks = check_range("n_sinks", n_sinks, 0, std::numeric_limits<std::int32_t>::max());
  options.window = check_range("window", window, 1, std::numeric_limits<std::int32_t>::max());
  options.epsilon = float(epsilon);
  options.quantile = float(quantile);
  options.min_share = float(min_share);
  options.max_share = float(max_share);
  options.exact_up_to = exact_up_to;
  options.seed = seed;
  if (out.size() == 0) return;
  WithoutGil without_gil;
  code_step(keys, matrices<const float>(query), heads, n, options,
            {matrices<float>(out), log_sum.data<float>(), error.data<float>(),
             n_read.data<std::int32_t>()},
            threads);
}

}  // namespace

void bind_code_cache(py::module_& module) {
  using namespace pybind11::literals;
  module.def("code_keys", &code_keys_of, "key"_a, "value"_a, "codes"_a, "planes"_a, "centre"_a,
             "norm"_a, "value_centre"_a, "value_norm"_a, "starts"_a, "sequence"_a, "begin"_a,
             "end"_a, "threads"_a = 0);
  module.def("code_step", &code_step_of, "query"_a, "key"_a, "value"_a, "codes"_a, "planes"_a,
             "centre"_a, "norm"_a, "value_centre"_a, "value_norm"_a, "starts"_a, "scale"_a,
             "n_sinks"_a, "window"_a, "epsilon"_a, "quantile"_a, "min_share"_a, "max_share"_a,
             "exact_up_to"_a, "seed"_a, "out"_a, "log_sum"_a, "error"_a, "n_read"_a,
             "threads"_a = 0);
}

}  // namespace lshkit

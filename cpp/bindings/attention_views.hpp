#pragma once
// What the attention functions take, checked.
#include <optional>
#include <vector>

#include "checks.hpp"
#include "lshkit/attention.hpp"

namespace lshkit {

inline constexpr auto kSampledTypes = {kFloat32, kBfloat16, kFloat16};
inline constexpr auto kExpectedTypes = {kFloat32, kFloat64, kBfloat16, kFloat16};

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
      : query("query", query_object, kAnyPlace),
        key("key", key_object, kAnyPlace),
        value("value", value_object, kAnyPlace),
        out(out_name, out_object, kAnyPlace),
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

  // All tensors of a call with these; null for those that were not given.
  std::vector<const TensorView*> views(std::initializer_list<const TensorView*> more) const {
    std::vector<const TensorView*> all{
        &query, &key, &value, &out, key_mask.view(), query_starts.view(), key_starts.view()};
    all.insert(all.end(), more);
    return all;
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

// What the rows of sums were divided by; with no normalisation no columns.
class DivisorsView {
 public:
  DivisorsView(py::handle object, const AttentionShape& shape, Normalize normalize)
      : view_("divisors", object, kAnyPlace), wanted_(normalize != Normalize::none) {
    view_.require_type({kFloat32}).require_contiguous();
    view_.require_shape({shape.batch, shape.heads, wanted_ ? shape.n_queries : 0});
  }
  void require_output() const { view_.require_output(); }
  float* data() const { return wanted_ ? view_.data<float>() : nullptr; }
  const TensorView* view() const { return wanted_ ? &view_ : nullptr; }

 private:
  TensorView view_;
  bool wanted_;
};

// Of the inputs whose gradient is wanted; None for the others.
class GradientViews {
 public:
  GradientViews(const AttentionViews& in, py::handle query, py::handle key, py::handle value) {
    emplace(query_, "grad_query", query, in.query);
    emplace(key_, "grad_key", key, in.key);
    emplace(value_, "grad_value", value, in.value);
  }
  bool empty() const {
    for (const TensorView* view : views())
      if (view && view->size() > 0) return false;
    return true;
  }
  // Null for those that are not wanted.
  std::vector<const TensorView*> views() const {
    return {query_ ? &*query_ : nullptr, key_ ? &*key_ : nullptr, value_ ? &*value_ : nullptr};
  }

  template <class T>
  AttentionGradients<T> gradients(const AttentionViews& in) const {
    return {float_matrices<T, const void>(in.out), output<T>(query_), output<T>(key_),
            output<T>(value_)};
  }

 private:
  static void emplace(std::optional<TensorView>& view, const char* name, py::handle object,
                      const TensorView& of) {
    if (object.is_none()) return;
    const TensorView& gradient = view.emplace(name, object, kAnyPlace);
    check_vectors(gradient, of.type()).require_output();
    gradient.require_shape({of.shape(0), of.shape(1), of.shape(2), of.shape(3)});
  }
  template <class T>
  static Output<T> output(const std::optional<TensorView>& view) {
    return view ? float_matrices<T, void>(*view) : Output<T>{};
  }

  std::optional<TensorView> query_, key_, value_;
};

}  // namespace lshkit

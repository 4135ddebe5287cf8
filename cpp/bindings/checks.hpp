#pragma once
// Checks that the bindings share, under the names that Python gives the arguments; the core trusts.
#include <pybind11/pybind11.h>

#include <limits>
#include <optional>
#include <string>

#include "lshkit/hash.hpp"
#include "lshkit/tensor.hpp"
#include "tensor_view.hpp"

namespace lshkit {

constexpr const char* kVectorAxes = "(batch, heads, rows, columns)";
constexpr const char* kCodeAxes = "(batch, heads, rows, n_hashes)";
constexpr int kMaxBits = 16;
constexpr int kMaxHashBits = 64;  // of codes that no table of buckets is kept for
constexpr index_t kMaxBuckets = index_t{1} << kMaxBits;  // what a uint16 code can name
constexpr index_t kMaxHashes = index_t{1} << 24;

inline index_t check_range(const char* name, index_t value, index_t low, index_t high) {
  if (value < low || value > high)
    throw py::value_error(std::string(name) + ": " + std::to_string(low) + " to " +
                          std::to_string(high) + " is wanted, was " + std::to_string(value));
  return value;
}
// Attention keeps the positions of rows in 32 bits.
inline void check_rows(const char* name, index_t rows) {
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

inline Element element_of(ElementType type) {
  if (type == kBfloat16) return Element::bfloat16;
  if (type == kFloat16) return Element::float16;
  return type == kFloat64 ? Element::float64 : Element::float32;
}
// Computed with in T; Void: void or const void.
template <class T, class Void>
FloatTensor<T, Void> float_matrices(const TensorView& view) {
  return {view.data<Void>(), view.stride(0), view.stride(1), view.stride(2),
          element_of(view.type())};
}

inline const TensorView& check_vectors(const TensorView& view,
                                       std::initializer_list<ElementType> types) {
  return view.require_type(types).require_dims(4, kVectorAxes).require_contiguous_rows();
}
inline const TensorView& check_vectors(const TensorView& view, ElementType type) {
  return check_vectors(view, {type});
}
inline const TensorView& check_codes(const TensorView& view,
                                     std::initializer_list<ElementType> types) {
  view.require_type(types).require_dims(4, kCodeAxes).require_contiguous();
  if (view.shape(3) < 1 || view.shape(3) > kMaxHashes)
    view.wrong_value("1 to " + std::to_string(kMaxHashes) + " hashes are wanted, was " +
                     view.describe_shape());
  return view;
}
inline Codes codes_of(const TensorView& view) {
  return {view.data<const void>(), view.type() == kUint8 ? 1 : 2};
}
inline ElementType code_type(index_t n_bits) {
  if (n_bits <= 16) return n_bits <= 8 ? kUint8 : kUint16;
  return n_bits <= 32 ? kUint32 : kUint64;
}

// An array that may be None: whether it is not.
inline bool read_array(std::optional<TensorView>& view, const char* name, py::handle object,
                       ElementType type, std::initializer_list<std::int64_t> shape) {
  if (object.is_none()) return false;
  view.emplace(name, object).require_type({type}).require_shape(shape).require_contiguous();
  return true;
}

// (batch, n_keys), or None: every key takes part.
class MaskView {
 public:
  MaskView(const char* name, py::handle object, index_t batch, index_t n_keys) {
    if (object.is_none()) return;
    view_.emplace(name, object, kAnyPlace);
    view_->require_type({kBool, kUint8}).require_shape({batch, n_keys}).require_contiguous_rows();
  }
  Mask mask() const {
    return view_ ? Mask{view_->data<const std::uint8_t>(), view_->stride(0)} : Mask{};
  }
  const TensorView* view() const { return view_ ? &*view_ : nullptr; }

 private:
  std::optional<TensorView> view_;
};

// The arrays that make a set of hash functions, as hash.hpp lays them out.
inline HashFunctions functions_of(const TensorView& parameters, int family_code, index_t n_bits,
                                  index_t n_hashes, index_t heads, index_t n_features,
                                  int max_bits = kMaxBits) {
  HashFunctions functions;
  functions.family = check_option("family", family_code, Family::hadamard);
  functions.n_bits = static_cast<int>(check_range("n_bits", n_bits, 1, max_bits));
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

// (1 or heads): one number for all heads, or one each.
struct Sharpness {
  const float* data;
  index_t stride;

  Sharpness(const TensorView& view, index_t heads) {
    view.require_type({kFloat32}).require_dims(1, "(1 or heads)").require_contiguous();
    if (view.shape(0) != 1) view.require_shape({heads});
    data = view.data<const float>();
    stride = view.shape(0) == 1 ? 0 : 1;
  }
};

// The gradient of the hash functions of soft codes, where it is wanted.
inline float* parameter_gradient(std::optional<TensorView>& view, py::handle object,
                                 const TensorView& parameters, Family family) {
  if (object.is_none()) return nullptr;
  const TensorView& grad = view.emplace("grad_parameters", object, kAnyPlace);
  if (family != Family::hyperplane)
    grad.wrong_value("only hyperplanes have a gradient: None is wanted");
  grad.require_type({kFloat32}).require_contiguous().require_output();
  grad.require_shape({parameters.shape(0), parameters.shape(1), parameters.shape(2)});
  return grad.data<float>();
}

// What a checked view is computed with in, float or double: call(T{}).
template <class Call>
void dispatch(ElementType type, Call&& call) {
  if (type == kFloat64)
    call(double{});
  else
    call(float{});
}

// The rows at which packed sequences start, and at last their number; or None.
class StartsView {
 public:
  StartsView(const char* name, py::handle object, index_t rows) {
    if (object.is_none()) return;
    view_.emplace(name, object, kAnyPlace);
    view_->require_type({kInt64}).require_dims(1, "(sequences + 1)").require_contiguous();
    const index_t count = view_->shape(0);
    const index_t* starts = view_->data<const index_t>();
    if (count >= 2 && view_->on_cuda()) return;  // a kernel reads them, and stays in the tensors
    if (count < 2 || starts[0] != 0 || starts[count - 1] != rows)
      view_->wrong_value("numbers from 0 to " + std::to_string(rows) + " (the rows) are wanted");
    for (index_t s = 1; s < count; ++s)
      if (starts[s] < starts[s - 1])
        view_->wrong_value("increasing numbers are wanted, " + std::to_string(starts[s]) +
                           " came after " + std::to_string(starts[s - 1]));
  }
  index_t sequences() const { return view_ ? view_->shape(0) - 1 : 0; }
  const index_t* data() const { return view_ ? view_->data<const index_t>() : nullptr; }
  const TensorView* view() const { return view_ ? &*view_ : nullptr; }

 private:
  std::optional<TensorView> view_;
};

}  // namespace lshkit

#pragma once
// A borrowed view of somebody's tensor: no copy, and no link to the library that owns it. In order:
//   1. type(x).__dlpack_c_exchange_api__   torch >= 2.10: one C call
//   2. the buffer protocol                 numpy
//   3. x.__dlpack__()                      older torch, jax, cupy
// A view lives for one call, in which the caller's reference keeps x alive. Every check is made
// here, once, under the argument's name; what comes out is memory that may be read.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "dlpack.hpp"
#include "lshkit/runtime.hpp"

namespace lshkit {

namespace py = pybind11;

#ifdef LSHKIT_WITH_CUDA
constexpr bool kWithCuda = true;
#else
constexpr bool kWithCuda = false;
#endif

struct ElementType {
  std::uint8_t code, bits;
  bool operator==(ElementType other) const { return code == other.code && bits == other.bits; }
};
constexpr ElementType kFloat32{dlpack::floating, 32}, kFloat64{dlpack::floating, 64};
constexpr ElementType kBfloat16{dlpack::bfloat, 16}, kFloat16{dlpack::floating, 16};
constexpr ElementType kUint8{dlpack::unsigned_integer, 8}, kUint16{dlpack::unsigned_integer, 16};
constexpr ElementType kUint32{dlpack::unsigned_integer, 32};
constexpr ElementType kUint64{dlpack::unsigned_integer, 64};
constexpr ElementType kInt32{dlpack::signed_integer, 32}, kInt64{dlpack::signed_integer, 64};
constexpr ElementType kBool{dlpack::boolean, 8};

inline std::string to_string(ElementType type) {
  switch (type.code) {
    case dlpack::signed_integer:
      return "int" + std::to_string(type.bits);
    case dlpack::unsigned_integer:
      return "uint" + std::to_string(type.bits);
    case dlpack::floating:
      return "float" + std::to_string(type.bits);
    case dlpack::bfloat:
      return "bfloat" + std::to_string(type.bits);
    case dlpack::complex:
      return "complex" + std::to_string(type.bits);
    case dlpack::boolean:
      return "bool";
    default:
      return std::to_string(type.bits) + "-bit elements of DLPack type " +
             std::to_string(type.code);
  }
}

class TensorView {
 public:
  static constexpr int kMaxDims = 4;
  // A size that require_shape() leaves open.
  static constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::min();

  // Functions that have CUDA kernels take tensors of Place::any.
  enum class Place { cpu, any };

  TensorView(const char* name, py::handle object, Place place = Place::cpu)
      : name_(name), place_(place) {
    if (!borrow_by_exchange_api(object) && !borrow_by_buffer(object) && !borrow_by_dlpack(object))
      wrong_type(std::string("a tensor or an array is wanted, was ") + type_name(object));
    if (size() > 0 && data_ == nullptr)
      wrong_type(std::string("a tensor with memory is wanted, was a ") + type_name(object) +
                 " without (fake, meta or otherwise unmaterialised)");
    if (size() > 0 && !aligned()) wrong_value("its elements are not aligned in memory");
  }
  TensorView(const TensorView&) = delete;
  TensorView& operator=(const TensorView&) = delete;

  ElementType type() const { return type_; }
  dlpack::Device device() const { return device_; }
  bool on_cuda() const { return device_.type == dlpack::cuda; }
  // Of the library that owns the tensor, or null.
  const dlpack::ExchangeApi* exchange_api() const { return api_; }
  std::int64_t shape(int dim) const { return shape_[dim]; }
  // In elements; 0 for dimensions of size 1, whose stride means nothing.
  std::int64_t stride(int dim) const { return shape_[dim] == 1 ? 0 : strides_[dim]; }
  std::int64_t size() const {
    std::int64_t product = 1;
    for (int dim = 0; dim < n_dims_; ++dim) product *= shape_[dim];
    return product;
  }
  template <class T>
  T* data() const {
    return static_cast<T*>(data_);
  }

  const TensorView& require_type(std::initializer_list<ElementType> wanted) const {
    std::string names;
    for (ElementType type : wanted) {
      if (type == type_) return *this;
      names += (names.empty() ? "" : " or ") + to_string(type);
    }
    wrong_type("dtype " + names + " is wanted, was " + to_string(type_));
  }
  const TensorView& require_dims(int wanted, const char* axes) const {
    if (n_dims_ != wanted)
      wrong_value(std::to_string(wanted) + " dimensions " + axes + " are wanted, was " +
                  describe_shape());
    return *this;
  }
  const TensorView& require_shape(std::initializer_list<std::int64_t> wanted) const {
    bool equal = n_dims_ == static_cast<int>(wanted.size());
    for (int dim = 0; equal && dim < n_dims_; ++dim)
      equal = wanted.begin()[dim] == kAny || wanted.begin()[dim] == shape_[dim];
    if (!equal)
      wrong_value("shape " + describe(wanted.begin(), static_cast<int>(wanted.size())) +
                  " is wanted, was " + describe_shape());
    return *this;
  }
  const TensorView& require_contiguous_rows() const {
    if (size() > 0 && shape_[n_dims_ - 1] > 1 && strides_[n_dims_ - 1] != 1)
      wrong_value("the last dimension must be contiguous, its stride was " +
                  std::to_string(strides_[n_dims_ - 1]));
    return *this;
  }
  bool contiguous() const {
    std::int64_t step = 1;
    for (int dim = n_dims_ - 1; size() > 0 && dim >= 0; step *= shape_[dim--])
      if (shape_[dim] != 1 && strides_[dim] != step) return false;
    return true;
  }
  const TensorView& require_contiguous() const {
    if (!contiguous())
      wrong_value("must be contiguous, strides were " + describe(strides_, n_dims_));
    return *this;
  }
  const TensorView& require_writable() const {
    if (read_only_) wrong_value("is written to, but was read-only");
    if (size() > 0 && may_overlap())
      wrong_value("is written to, but some of its elements share memory: strides were " +
                  describe(strides_, n_dims_));
    return *this;
  }

  // Writable, and mostly fresh memory of which every element will be written.
  const TensorView& require_output() const {
    require_writable();
    if (contiguous() && !on_cuda())
      prefer_large_pages(data_, std::size_t(size()) * (type_.bits / 8));
    return *this;
  }

  std::string describe_shape() const { return describe(shape_, n_dims_); }
  [[noreturn]] void wrong_type(const std::string& what) const {
    throw py::type_error(name_ + ": " + what);
  }
  [[noreturn]] void wrong_value(const std::string& what) const {
    throw py::value_error(name_ + ": " + what);
  }

 private:
  struct ReleaseBuffer {
    void operator()(Py_buffer* buffer) const {
      PyBuffer_Release(buffer);
      delete buffer;
    }
  };
  struct CallDeleter {
    template <class Managed>
    void operator()(Managed* managed) const {
      if (managed->deleter) managed->deleter(managed);
    }
  };
  // What is known of a type of tensor; looked up once for calls in a row with the same type.
  struct TypeFacts {
    PyTypeObject* type = nullptr;
    const dlpack::ExchangeApi* api = nullptr;
    PyObject* is_neg = nullptr;  // torch's method, or null
  };

  static const char* type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

  static const TypeFacts& facts_of(PyTypeObject* type) {
    static TypeFacts last;  // under the GIL; owns its references, so that no address is used twice
    if (type == last.type) return last;
    TypeFacts facts;
    const py::handle object(reinterpret_cast<PyObject*>(type));
    const py::object capsule = py::getattr(object, "__dlpack_c_exchange_api__", py::none());
    if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
      auto* header = static_cast<dlpack::ExchangeHeader*>(
          PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
      while (header && header->version.major != dlpack::kMajorVersion) header = header->previous;
      facts.api = reinterpret_cast<const dlpack::ExchangeApi*>(header);
      if (facts.api && !facts.api->borrow) facts.api = nullptr;  // it is optional
    }
    if (py::hasattr(object, "is_neg"))
      facts.is_neg = py::object(object.attr("is_neg")).release().ptr();
    Py_INCREF(type);
    facts.type = type;
    std::swap(last, facts);
    Py_XDECREF(reinterpret_cast<PyObject*>(facts.type));
    Py_XDECREF(facts.is_neg);
    return last;
  }

  bool borrow_by_exchange_api(py::handle object) {
    const TypeFacts facts = facts_of(Py_TYPE(object.ptr()));
    if (!facts.api) return false;
    dlpack::Tensor tensor{};
    if (facts.api->borrow(object.ptr(), &tensor) != 0) not_borrowed(object);
    api_ = facts.api;
    take(tensor);
    if (facts.is_neg && type_.code == dlpack::floating) {
      // torch negates the imaginary part of a conjugate lazily: its memory is not what it shows.
      const auto is_neg = py::reinterpret_borrow<py::object>(facts.is_neg);
      const auto negated =
          py::reinterpret_steal<py::object>(PyObject_CallOneArg(is_neg.ptr(), object.ptr()));
      if (!negated) throw py::error_already_set();
      if (negated.ptr() == Py_True)
        wrong_type("a lazily negated tensor is not taken: call resolve_neg() first");
    }
    return true;
  }

  bool borrow_by_buffer(py::handle object) {
    if (!PyObject_CheckBuffer(object.ptr())) return false;
    auto buffer = std::make_unique<Py_buffer>();
    if (PyObject_GetBuffer(object.ptr(), buffer.get(), PyBUF_RECORDS_RO) != 0) not_borrowed(object);
    buffer_.reset(buffer.release());
    read_only_ = buffer_->readonly != 0;
    take_dims(buffer_->ndim);
    data_ = buffer_->buf;
    type_ = type_of_format(buffer_->format ? buffer_->format : "B", buffer_->itemsize);
    for (int dim = 0; dim < n_dims_; ++dim) {
      shape_[dim] = buffer_->shape[dim];
      if (shape_[dim] > 1 && buffer_->strides[dim] % buffer_->itemsize != 0)
        wrong_value("its elements are not aligned in memory");
      strides_[dim] = buffer_->strides[dim] / buffer_->itemsize;
    }
    return true;
  }

  bool borrow_by_dlpack(py::handle object) {
    if (!py::hasattr(object, "__dlpack__") || !py::hasattr(object, "__dlpack_device__"))
      return false;
    py::object capsule;
    try {
      py::dict options;
      const py::tuple device = object.attr("__dlpack_device__")();
      // -1: the producer does not synchronise with the default stream, which is not ours.
      if (py::cast<int>(device[0]) == dlpack::cuda) options["stream"] = -1;
      try {
        capsule =
            object.attr("__dlpack__")(**options, py::arg("max_version") = py::make_tuple(1, 0));
      } catch (py::error_already_set& error) {
        if (!error.matches(PyExc_TypeError)) throw;
        capsule = object.attr("__dlpack__")(**options);  // a producer from before DLPack 1.0
      }
    } catch (py::error_already_set& error) {
      error.restore();
      not_borrowed(object);
    }
    // A renamed capsule leaves the deleter to us.
    if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
      versioned_.reset(static_cast<dlpack::ManagedTensorVersioned*>(
          PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned")));
      PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
      if (versioned_->version.major != dlpack::kMajorVersion)
        wrong_type("DLPack version 1 is wanted, was " + std::to_string(versioned_->version.major));
      read_only_ = (versioned_->flags & dlpack::kReadOnlyFlag) != 0;
      take(versioned_->tensor);
    } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
      managed_.reset(
          static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor")));
      PyCapsule_SetName(capsule.ptr(), "used_dltensor");
      take(managed_->tensor);
    } else {
      wrong_type(std::string("__dlpack__() of ") + type_name(object) + " gave no DLPack capsule");
    }
    return true;
  }

  void take(const dlpack::Tensor& tensor) {
    device_ = tensor.device;
    if (on_cuda() && !kWithCuda)
      wrong_value(
          "is a CUDA tensor, and this build of lshkit has no CUDA kernels: install it from source "
          "where there is nvcc, with pip install -C cmake.define.LSHKIT_CUDA=ON");
    if (on_cuda() && place_ == Place::cpu)
      wrong_value("is a CUDA tensor, and this function has CPU kernels only");
    if (!on_cuda() && tensor.device.type != dlpack::cpu &&
        tensor.device.type != dlpack::cuda_pinned_host)
      wrong_value("a CPU tensor is wanted, was on DLPack device type " +
                  std::to_string(tensor.device.type));
    type_ = {tensor.dtype.code, tensor.dtype.bits};
    if (tensor.dtype.lanes != 1) wrong_type("vector elements are not taken");
    take_dims(tensor.n_dims);
    std::copy_n(tensor.shape, n_dims_, shape_);
    if (tensor.strides) {
      std::copy_n(tensor.strides, n_dims_, strides_);
    } else {
      std::int64_t step = 1;
      for (int dim = n_dims_ - 1; dim >= 0; step *= shape_[dim--]) strides_[dim] = step;
    }
    data_ = tensor.data ? static_cast<char*>(tensor.data) + tensor.byte_offset : nullptr;
  }

  void take_dims(int n_dims) {
    if (n_dims > kMaxDims)
      wrong_value("at most " + std::to_string(kMaxDims) + " dimensions are taken, was " +
                  std::to_string(n_dims));
    n_dims_ = n_dims;
  }

  ElementType type_of_format(const char* format, Py_ssize_t item_size) const {
    const char* letter = format;
    if (*letter == '@' || *letter == '=' || *letter == '<') ++letter;
    const auto bits = static_cast<std::uint8_t>(item_size * 8);
    if (letter[0] == 'Z' && letter[1] && !letter[2]) return {dlpack::complex, bits};
    if (letter[0] && !letter[1]) {
      if (std::strchr("efd", *letter)) return {dlpack::floating, bits};
      if (std::strchr("bhilqn", *letter)) return {dlpack::signed_integer, bits};
      if (std::strchr("BHILQN", *letter)) return {dlpack::unsigned_integer, bits};
      if (*letter == '?') return {dlpack::boolean, bits};
    }
    wrong_type(std::string("elements of buffer format '") + format + "' are not taken");
  }

  bool aligned() const {
    const std::uintptr_t bytes = type_.bits / 8;
    return bytes == 0 || reinterpret_cast<std::uintptr_t>(data_) % bytes == 0;
  }

  // True unless every stride steps over all that the dimensions of smaller strides reach.
  bool may_overlap() const {
    const auto step = [this](int dim) {
      return strides_[dim] < 0 ? -strides_[dim] : strides_[dim];
    };
    for (int dim = 0; dim < n_dims_; ++dim) {
      if (shape_[dim] == 1) continue;
      std::int64_t reach = 0;
      for (int inner = 0; inner < n_dims_; ++inner)
        if (step(inner) < step(dim) || (step(inner) == step(dim) && inner < dim))
          reach += (shape_[inner] - 1) * step(inner);
      if (step(dim) <= reach) return true;
    }
    return false;
  }

  // Turns the pending Python error into a TypeError that names the argument and keeps its cause.
  [[noreturn]] void not_borrowed(py::handle object) const {
    py::error_already_set cause;
    std::string reason = cause.what();
    reason.resize(std::min(reason.find('\n'), reason.size()));
    cause.restore();
    py::raise_from(PyExc_TypeError, (name_ + ": a dense tensor with memory is wanted, was a " +
                                     type_name(object) + " (" + reason + ")")
                                        .c_str());
    throw py::error_already_set();
  }

  static std::string describe(const std::int64_t* numbers, int count) {
    std::string text = "(";
    for (int i = 0; i < count; ++i)
      text +=
          (i ? ", " : "") + (numbers[i] == kAny ? std::string("*") : std::to_string(numbers[i]));
    return text + (count == 1 ? ",)" : ")");
  }

  std::string name_;
  Place place_;
  dlpack::Device device_{dlpack::cpu, 0};
  const dlpack::ExchangeApi* api_ = nullptr;
  void* data_ = nullptr;
  ElementType type_{};
  int n_dims_ = 0;
  std::int64_t shape_[kMaxDims] = {}, strides_[kMaxDims] = {};
  bool read_only_ = false;
  // At most one of them is held, until the view goes.
  std::unique_ptr<Py_buffer, ReleaseBuffer> buffer_;
  std::unique_ptr<dlpack::ManagedTensorVersioned, CallDeleter> versioned_;
  std::unique_ptr<dlpack::ManagedTensor, CallDeleter> managed_;
};

constexpr auto kAnyPlace = TensorView::Place::any;

}  // namespace lshkit

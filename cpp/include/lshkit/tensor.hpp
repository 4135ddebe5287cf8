#pragma once
// Borrowed views of the caller's memory. The core owns no tensor and knows neither Python nor
// torch.
#include <cstdint>

namespace lshkit {

using index_t = std::int64_t;  // every size, stride and offset: products of them exceed 32 bits

// A (batch, heads, rows, columns) tensor. Columns are contiguous; strides are in elements, may be
// zero (broadcast) and need not be ordered, so a transposed (B, N, H, D) tensor is a view too.
template <class T>
struct Tensor {
  T* data = nullptr;
  index_t batch_stride = 0;
  index_t head_stride = 0;
  index_t row_stride = 0;

  T* matrix(index_t batch, index_t head) const {
    return data + batch * batch_stride + head * head_stride;
  }
};

// The floats that a tensor's elements may be.
enum class Element : int { float32 = 0, float64 = 1, bfloat16 = 2, float16 = 3 };
template <class T>
constexpr Element kElement = sizeof(T) == 4 ? Element::float32 : Element::float64;
constexpr index_t element_bytes(Element element) {
  return element == Element::float64 ? 8 : element == Element::float32 ? 4 : 2;
}

// A Tensor that is computed with in T (float or double) and whose elements may be shorter: rows are
// converted where they are used, never the whole of it. Void: const void or void.
template <class T, class Void>
struct FloatTensor {
  Void* data = nullptr;
  index_t batch_stride = 0;
  index_t head_stride = 0;
  index_t row_stride = 0;
  Element element = kElement<T>;

  FloatTensor() = default;
  FloatTensor(Void* elements, index_t batch, index_t head, index_t row, Element kind = kElement<T>)
      : data(elements), batch_stride(batch), head_stride(head), row_stride(row), element(kind) {}
  template <class Same>
  FloatTensor(Tensor<Same> t)
      : FloatTensor(t.data, t.batch_stride, t.head_stride, t.row_stride, kElement<T>) {
    static_assert(sizeof(Same) == sizeof(T), "other elements are named by their kind");
  }
  bool converted() const { return element != kElement<T>; }
  Void* row(index_t batch, index_t head, index_t index) const {
    const index_t offset = batch * batch_stride + head * head_stride + index * row_stride;
    return static_cast<Void*>(
        const_cast<char*>(static_cast<const char*>(static_cast<const void*>(data))) +
        offset * element_bytes(element));
  }
};
template <class T>
using Input = FloatTensor<T, const void>;
template <class T>
using Output = FloatTensor<T, void>;

// A key mask (batch, rows) of bytes, shared by the heads: nonzero takes part. No data: all do.
struct Mask {
  const std::uint8_t* data = nullptr;
  index_t batch_stride = 0;  // rows are contiguous

  const std::uint8_t* rows(index_t batch) const {
    return data ? data + batch * batch_stride : nullptr;
  }
};

// Codes are contiguous (batch, heads, rows, n_hashes) arrays of uint8 or uint16.
struct Codes {
  const void* data = nullptr;
  int bytes = 1;  // 1 or 2 a code

  const void* matrix(index_t flat_head, index_t rows, index_t n_hashes) const {
    return static_cast<const char*>(data) + flat_head * rows * n_hashes * bytes;
  }
  // From a row of all heads' rows in turn.
  const void* rows(index_t row, index_t n_hashes) const {
    return static_cast<const char*>(data) + row * n_hashes * bytes;
  }
};

// Which keys a query sees. "reversed" is the transpose of "causal": the gradient of the values.
enum class Order : int { all = 0, causal = 1 /* key <= query */, reversed = 2 /* key >= query */ };

}  // namespace lshkit

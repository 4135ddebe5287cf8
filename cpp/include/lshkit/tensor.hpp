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
};

// Which keys a query sees. "reversed" is the transpose of "causal": the gradient of the values.
enum class Order : int { all = 0, causal = 1 /* key <= query */, reversed = 2 /* key >= query */ };

}  // namespace lshkit

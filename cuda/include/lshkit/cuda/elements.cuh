#pragma once
// Elements of the tensors as float, whatever they are stored as; rows of heads and of packed
// sequences.
#include "lshkit/attention.hpp"
#include "lshkit/cuda/portable.cuh"

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

namespace lshkit::cuda {

__device__ inline float float_of_bits(std::uint32_t bits) {
#ifdef __CUDACC__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}
__device__ inline std::uint32_t bits_of_float(float x) {
#ifdef __CUDACC__
  return __float_as_uint(x);
#else
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof x);
  return bits;
#endif
}
__device__ inline float not_a_number() { return float_of_bits(0x7fc00000u); }

__device__ inline float from_bfloat16(std::uint16_t x) {
  return float_of_bits(std::uint32_t(x) << 16);
}
// To the nearest, ties to even.
__device__ inline std::uint16_t to_bfloat16(float x) {
  const std::uint32_t bits = bits_of_float(x);
  if (x != x) return std::uint16_t(bits >> 16 | 0x40);
  return std::uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#ifdef __CUDACC__
__device__ inline float from_float16(std::uint16_t x) { return __half2float(__ushort_as_half(x)); }
__device__ inline std::uint16_t to_float16(float x) { return __half_as_ushort(__float2half_rn(x)); }
#else
inline float from_float16(std::uint16_t x) {
  const std::uint32_t sign = std::uint32_t(x & 0x8000) << 16, rest = x & 0x7fff;
  if (rest >= 0x7c00) return float_of_bits(sign | 0x7f800000u | (rest & 0x3ff) << 13);
  // 2^112 brings the exponent to where a float has it, of subnormal numbers too.
  return float_of_bits(bits_of_float(float_of_bits(rest << 13) * 5.192296858534828e33f) | sign);
}
inline std::uint16_t to_float16(float x) {
  const std::uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000u) return std::uint16_t(sign | 0x7e00 | (rest >> 13 & 0x3ff));
  if (rest >= 0x47800000u) return std::uint16_t(sign | 0x7c00);
  if (rest < 0x38800000u)  // subnormal: the sum with 1/2 rounds at 2^-24
    return std::uint16_t(sign | (bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000u));
  return std::uint16_t(sign | ((rest + 0xfff + (rest >> 13 & 1) - 0x38000000u) >> 13));
}
#endif

template <class T>
__device__ inline T load_element(const void* data, index_t i, Element element) {
  switch (element) {
    case Element::float32:
      return T(static_cast<const float*>(data)[i]);
    case Element::float64:
      return T(static_cast<const double*>(data)[i]);
    case Element::bfloat16:
      return T(from_bfloat16(static_cast<const std::uint16_t*>(data)[i]));
    default:
      return T(from_float16(static_cast<const std::uint16_t*>(data)[i]));
  }
}
template <class T>
__device__ inline void store_element(void* data, index_t i, Element element, T x) {
  switch (element) {
    case Element::float32:
      static_cast<float*>(data)[i] = float(x);
      break;
    case Element::float64:
      static_cast<double*>(data)[i] = double(x);
      break;
    case Element::bfloat16:
      static_cast<std::uint16_t*>(data)[i] = to_bfloat16(float(x));
      break;
    default:
      static_cast<std::uint16_t*>(data)[i] = to_float16(float(x));
  }
}

__device__ inline bool is_finite(float x) { return x - x == 0; }

// (batch, heads, rows, columns) of floats of some kind, strides in elements. Every stride may be
// zero: a mean's gradient arrives so.
struct Elements {
  const void* data = nullptr;
  index_t batch = 0, head = 0, row = 0;
  Element element = Element::float32;

  Elements() = default;
  template <class T, class Void>
  explicit Elements(const FloatTensor<T, Void>& x)
      : data(x.data),
        batch(x.batch_stride),
        head(x.head_stride),
        row(x.row_stride),
        element(x.element) {}
  // Contiguous rows of every head in turn, heads of a batch.
  template <class T>
  Elements(const T* rows, index_t heads, index_t n_rows, index_t columns)
      : data(rows),
        batch(heads * n_rows * columns),
        head(n_rows * columns),
        row(columns),
        element(kElement<T>) {}
};

// Queries or keys: n_rows rows of `heads` heads, each met by `group` heads of queries in turn.
struct Side {
  index_t n_rows = 0, heads = 1, group = 1;
  const index_t* starts = nullptr;  // of packed sequences, on the device; null: a batch
};
// The rows of a side that one head of queries of one sequence meets.
struct Span {
  index_t batch, head, first, count;
  index_t flat;   // of `first`, of all rows of all heads of this side in turn
  index_t owned;  // likewise, where every head of queries has rows of its own
};

// task: sequence * query_heads + head of queries.
__device__ inline Span span_of(const Side& side, index_t query_heads, index_t task) {
  const index_t sequence = task / query_heads, query_head = task % query_heads;
  Span s;
  s.batch = side.starts ? 0 : sequence;
  s.head = query_head / side.group;
  s.first = 0;
  s.count = side.n_rows;
  if (side.starts) {  // whatever they hold, no row beyond the tensor is touched
    s.first = side.starts[sequence] < 0 ? 0 : least(side.starts[sequence], side.n_rows);
    const index_t end = least(side.starts[sequence + 1], side.n_rows);
    s.count = end > s.first ? end - s.first : 0;
  }
  s.flat = (s.batch * side.heads + s.head) * side.n_rows + s.first;
  s.owned = (s.batch * query_heads + query_head) * side.n_rows + s.first;
  return s;
}
// Where row i of a span lies in a tensor of its side.
__device__ inline index_t offset_of(const Elements& x, const Span& s, index_t i) {
  return s.batch * x.batch + s.head * x.head + (s.first + i) * x.row;
}

__device__ inline std::uint32_t load_code(const void* codes, int bytes, index_t i) {
  return bytes == 1 ? static_cast<const std::uint8_t*>(codes)[i]
                    : static_cast<const std::uint16_t*>(codes)[i];
}

}  // namespace lshkit::cuda

#pragma once
// Elements of the tensors as float, whatever they are stored as; rows of heads and of packed
// sequences.
#include "lshkit/attention.hpp"
#include "lshkit/cuda/portable.cuh"

#ifdef __CUDACC__
#include <cuda_bf16.h>
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
#ifdef __CUDACC__
__device__ inline float from_float16(std::uint16_t x) { return __half2float(__ushort_as_half(x)); }
// To the nearest, ties to even; and two in a word, the first in its low half.
__device__ inline std::uint16_t to_float16(float x) { return __half_as_ushort(__float2half_rn(x)); }
__device__ inline std::uint16_t to_bfloat16(float x) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
__device__ inline std::uint32_t to_float16_pair(float x, float y) {
  const __half2 pair = __floats2half2_rn(x, y);
  return std::uint32_t(__half_as_ushort(pair.x)) | std::uint32_t(__half_as_ushort(pair.y)) << 16;
}
__device__ inline std::uint32_t to_bfloat16_pair(float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return std::uint32_t(__bfloat16_as_ushort(pair.x)) | std::uint32_t(__bfloat16_as_ushort(pair.y))
                                                           << 16;
}
#else
inline std::uint16_t to_bfloat16(float x) {
  const std::uint32_t bits = bits_of_float(x);
  if (x != x) return std::uint16_t(bits >> 16 | 0x40);
  return std::uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
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
inline std::uint32_t to_float16_pair(float x, float y) {
  return to_float16(x) | std::uint32_t(to_float16(y)) << 16;
}
inline std::uint32_t to_bfloat16_pair(float x, float y) {
  return to_bfloat16(x) | std::uint32_t(to_bfloat16(y)) << 16;
}
#endif

// What a thread loads and stores at once, from addresses that 16 divides.
struct alignas(16) Quad {
  std::uint32_t word[4];
};
__device__ inline Quad load_quad(const void* from) {
#ifdef __CUDACC__
  return *static_cast<const Quad*>(from);
#else
  Quad q;
  std::memcpy(&q, emulation::aligned(from, sizeof q), sizeof q);
  return q;
#endif
}
__device__ inline void store_quad(void* to, const Quad& q) {
#ifdef __CUDACC__
  *static_cast<Quad*>(to) = q;
#else
  std::memcpy(const_cast<void*>(emulation::aligned(to, sizeof q)), &q, sizeof q);
#endif
}

template <Element E>
constexpr int kElementBytes = E == Element::float64   ? 8
                              : E == Element::float32 ? 4
                                                      : 2;

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

// Eight numbers, of an address that 16 divides; not of float64.
__device__ inline void load_eight(const void* data, index_t i, Element element, float* x) {
  if (element == Element::float32) {
    const float* const from = static_cast<const float*>(data) + i;
    const Quad first = load_quad(from), second = load_quad(from + 4);
    LSHKIT_UNROLL
    for (int k = 0; k < 4; ++k) {
      x[k] = float_of_bits(first.word[k]);
      x[4 + k] = float_of_bits(second.word[k]);
    }
    return;
  }
  const Quad q = load_quad(static_cast<const std::uint16_t*>(data) + i);
  LSHKIT_UNROLL
  for (int k = 0; k < 4; ++k) {
    const std::uint32_t w = q.word[k];
    const bool brain = element == Element::bfloat16;
    x[2 * k] = brain ? float_of_bits(w << 16) : from_float16(std::uint16_t(w));
    x[2 * k + 1] = brain ? float_of_bits(w & 0xffff0000u) : from_float16(std::uint16_t(w >> 16));
  }
}
__device__ inline void store_eight(void* data, index_t i, Element element, const float* x) {
  if (element == Element::float32) {
    float* const to = static_cast<float*>(data) + i;
    Quad first, second;
    LSHKIT_UNROLL
    for (int k = 0; k < 4; ++k) {
      first.word[k] = bits_of_float(x[k]);
      second.word[k] = bits_of_float(x[4 + k]);
    }
    store_quad(to, first);
    store_quad(to + 4, second);
    return;
  }
  Quad q;
  LSHKIT_UNROLL
  for (int k = 0; k < 4; ++k)
    q.word[k] = element == Element::bfloat16 ? to_bfloat16_pair(x[2 * k], x[2 * k + 1])
                                             : to_float16_pair(x[2 * k], x[2 * k + 1]);
  store_quad(static_cast<std::uint16_t*>(data) + i, q);
}

__device__ inline bool is_finite(float x) { return x - x == 0; }

// The bits that a float's number has in some element, and a float rounded to so many of them.
constexpr int significand_bits(Element e) {
  return e == Element::bfloat16 ? 8 : e == Element::float16 ? 11 : 24;
}
__device__ inline float rounded(float x, int significand) {
  const int dropped = 24 - significand;
  if (dropped == 0 || !is_finite(x)) return x;
  const std::uint32_t bits = bits_of_float(x), unit = 1u << dropped;
  return float_of_bits((bits + unit / 2 - 1 + (bits >> dropped & 1)) & ~(unit - 1));
}

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

// Can every row be loaded eight numbers at a time?
inline bool rows_of_eights(const Elements& x, index_t columns) {
  const index_t bytes = element_bytes(x.element);
  return x.element != Element::float64 && columns % 8 == 0 &&
         reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 && x.batch * bytes % 16 == 0 &&
         x.head * bytes % 16 == 0 && x.row * bytes % 16 == 0;
}

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

// task: sequence * query_heads + head of queries. Divided in 32 bits, as tasks are numbered as
// blocks, which is faster; or in 64, by a call, which takes fewer registers.
template <class Number = std::uint32_t>
__device__ inline Span span_of(const Side& side, index_t query_heads, index_t task) {
  const auto all = Number(task), heads = Number(query_heads);
  const Number sequence = all / heads, query_head = all % heads;
  Span s;
  s.batch = side.starts ? 0 : sequence;
  s.head = query_head / Number(side.group);
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

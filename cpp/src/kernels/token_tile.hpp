#pragma once
// A tile of W tokens, tokens in lanes: what is rows in memory is transposed on its way.
#include "kernels.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int W = kLanes<float>;
using F = Vec<float>;
using I = Int<float>;

// r[i] = the tile's values of feature first + i, lane = token; tokens past `count` repeat the last.
LSHKIT_INLINE void load_tile(const HashRows& h, index_t token, index_t count, index_t first, F* r) {
  const index_t width = h.n_features - first;
  LSHKIT_UNROLL
  for (int t = 0; t < W; ++t) {
    const float* row = h.x + (token + (t < count ? t : count - 1)) * h.row_stride + first;
    r[t] = width >= W ? load(row) : load_first(row, int(width));
  }
  transpose<float>(r);
}

// A code depends on a row's direction alone, but float32 holds the projections of rows far from 1
// in size badly or not at all: such rows are brought nearer by a power of two, which changes no
// bit.
constexpr float kSmallSquare = 0x1p-110f, kLargeSquare = 0x1p110f;

LSHKIT_INLINE bool any_lane(I v) {
  std::uint64_t words[kVectorBytes / 8], any = 0;
  std::memcpy(words, &v, sizeof(words));
  for (const std::uint64_t word : words) any |= word;
  return any != 0;
}

// Whether all rows of a tile may stay as they are, by their sums of squares. NaN may not.
struct Squares {
  F sum[4] = {};  // so that no addition waits for the one before

  LSHKIT_INLINE void add(int i, F x) { sum[i % 4] += x * x; }
  LSHKIT_INLINE bool well_scaled() const {
    const F all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    return !any_lane(~((all > kSmallSquare) & (all < kLargeSquare)));
  }
};

// The tile's rows, (size, W), at sizes that float32 holds well. False where one is not finite.
inline bool scale_tile(float* x, index_t size) {
  I largest = {};  // finite numbers without their signs are in the order of their bits
  for (index_t i = 0; i < size; ++i) {
    const I bits = (I)load(x + i * W) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  constexpr std::int32_t kSmall = (127 - 60) << 23, kLarge = (127 + 60) << 23;
  const F down = broadcast(0x1p-100f), up = broadcast(0x1p100f), one = broadcast(1.0f);
  const I large = largest > kLarge, small = (largest < kSmall) & (largest != I{});
  if (!any_lane(large | small)) return true;  // but for rows of zeros
  const F scale = large ? down : small ? up : one;
  for (index_t i = 0; i < size; ++i) store(x + i * W, load(x + i * W) * scale);
  return !any_lane(largest >= 0x7f800000);
}

// (item, lane) to rows of `width` items, a stride apart: as many items as fit share a lane, so that
// one transpose moves them all. Reads the items up to a multiple of W * kPacked.
template <class T>
void store_rows(const std::int32_t* items, index_t width, T* rows, index_t stride, index_t count) {
  constexpr int kPacked = sizeof(std::int32_t) / sizeof(T), kItems = W * kPacked;
  for (index_t first = 0; first < width; first += kItems) {
    I r[W];
    LSHKIT_UNROLL
    for (int i = 0; i < W; ++i) {
      r[i] = load(items + (first + i * kPacked) * W);
      LSHKIT_UNROLL
      for (int k = 1; k < kPacked; ++k)
        r[i] |= load(items + (first + i * kPacked + k) * W) << (8 * int(sizeof(T)) * k);
    }
    transpose<std::int32_t>(r);
    const index_t left = smaller(kItems, width - first);
    if (left == kItems && count >= W) {
      LSHKIT_UNROLL
      for (int t = 0; t < W; ++t) std::memcpy(rows + t * stride + first, &r[t], kVectorBytes);
    } else if (left == kItems / 2 && count >= W) {  // 32 hashes of 8 bits, in registers of 64 bytes
      LSHKIT_UNROLL
      for (int t = 0; t < W; ++t) std::memcpy(rows + t * stride + first, &r[t], kVectorBytes / 2);
    } else {
      I part[W];  // r's rows by a number that is not constant: r stays in registers above
      LSHKIT_UNROLL
      for (int t = 0; t < W; ++t) part[t] = r[t];
      for (int t = 0; t < W && t < count; ++t)
        std::memcpy(rows + t * stride + first, &part[t], sizeof(T) * left);
    }
  }
}

// The way back, widened to 32 bits; writes the items up to a multiple of W * kPacked. Lanes past
// `count` repeat the last row.
template <class T>
void load_rows(const T* rows, index_t stride, index_t width, index_t count, std::int32_t* items) {
  constexpr int kPacked = sizeof(std::int32_t) / sizeof(T), kItems = W * kPacked;
  constexpr std::uint32_t kMask = kPacked == 1 ? ~0u : (1u << (32 / kPacked)) - 1;
  for (index_t first = 0; first < width; first += kItems) {
    const index_t left = smaller(kItems, width - first);
    I r[W];
    for (int t = 0; t < W; ++t) {
      const T* row = rows + (t < count ? t : count - 1) * stride + first;
      if (left == kItems) {
        std::memcpy(&r[t], row, kVectorBytes);
      } else {
        r[t] = I{};
        std::memcpy(&r[t], row, sizeof(T) * left);
      }
    }
    transpose<std::int32_t>(r);
    LSHKIT_UNROLL
    for (int i = 0; i < W; ++i) LSHKIT_UNROLL
    for (int k = 0; k < kPacked; ++k)
      store(items + (first + i * kPacked + k) * W,
            (r[i] >> (32 / kPacked * k)) & std::int32_t(kMask));
  }
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

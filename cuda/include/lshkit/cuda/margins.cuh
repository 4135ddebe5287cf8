#pragma once
// Margins with the numbers of their bits (lshkit/soft_hash.hpp).
#include "lshkit/cuda/words.cuh"
#include "lshkit/soft_hash.hpp"

namespace lshkit::cuda {

__device__ inline std::uint32_t margin_word(float z, int bit) {
  return (bits_of_float(z) & (0x7fffffffu & ~kBitOfMargin)) | std::uint32_t(bit);
}
__device__ inline int bit_of_margin(float margin) {
  return int(bits_of_float(margin) & kBitOfMargin);
}
// The middle of what the number's bits leave open; zero stays zero.
__device__ inline float size_of_margin(float margin) {
  const std::uint32_t word = bits_of_float(margin);
  return float_of_bits(word > kBitOfMargin ? (word & ~kBitOfMargin) | 8 : 0);
}

}  // namespace lshkit::cuda

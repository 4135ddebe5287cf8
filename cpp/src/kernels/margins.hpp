#pragma once
// Margins, and their gradients, with the numbers of their bits (soft_hash.hpp), a register at a
// time.
#include "lshkit/soft_hash.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr std::int32_t kBitOfWord = std::int32_t(kBitOfMargin);
// Numbers of bits, to be broadcast from memory, which is part of the operation that takes them.
constexpr std::int32_t kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// The bits of margins without the numbers.
LSHKIT_INLINE Vec<std::int32_t> without_bits(Vec<std::int32_t> words) {
  return (words & ~kBitOfWord) | (((words & 0x7fffffff) > kBitOfWord) & 8);
}
LSHKIT_INLINE Vec<float> without_bits(Vec<float> margins) {
  Vec<std::int32_t> words;
  std::memcpy(&words, &margins, sizeof(words));
  words = without_bits(words);
  std::memcpy(&margins, &words, sizeof(margins));
  return margins;
}
// Gradients with the numbers of their margins.
LSHKIT_INLINE Vec<float> with_bits_of(Vec<float> margins, Vec<float> gradients) {
  Vec<std::int32_t> from, to;
  std::memcpy(&from, &margins, sizeof(from));
  std::memcpy(&to, &gradients, sizeof(to));
  to = (to & ~kBitOfWord) | (from & kBitOfWord);
  std::memcpy(&gradients, &to, sizeof(gradients));
  return gradients;
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

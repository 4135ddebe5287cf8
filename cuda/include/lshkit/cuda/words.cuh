#pragma once
// Bytes and bits of words, and several words that move at once.
#include "lshkit/cuda/elements.cuh"

namespace lshkit::cuda {

struct alignas(8) Two {
  float x, y;
};
__device__ inline Two load_two(const void* from) {
#ifdef __CUDACC__
  return *static_cast<const Two*>(from);
#else
  return *static_cast<const Two*>(emulation::aligned(from, sizeof(Two)));
#endif
}

// Words that lie next to each other, by one load: from an address that their size divides.
template <class Word, int Count>
struct alignas(sizeof(Word) * Count) Words {
  Word word[Count] = {};
};
template <class Word, int Count>
__device__ inline void load_words(const void* from, Words<Word, Count>& to) {
#ifdef __CUDACC__
  to = *static_cast<const Words<Word, Count>*>(from);
#else
  std::memcpy(&to, emulation::aligned(from, sizeof to), sizeof to);
#endif
}
template <class Word, int Count>
__device__ inline void store_words(void* to, const Words<Word, Count>& from) {
#ifdef __CUDACC__
  *static_cast<Words<Word, Count>*>(to) = from;
#else
  std::memcpy(const_cast<void*>(emulation::aligned(to, sizeof from)), &from, sizeof from);
#endif
}
// Elements that lie next to each other, by one load, of more than 16 bytes by two; zeros without.
// Nothing but the load is conditional: the zeros are of words, and numbers are made of either.
template <Element E, int Count, class T>
__device__ inline void load_columns(const void* from, bool loads, T* x) {
  constexpr int kBytes = kElementBytes<E>;
  if constexpr (kBytes * Count > 16) {
    load_columns<E, Count / 2>(from, loads, x);
    load_columns<E, Count / 2>(static_cast<const char*>(from) + kBytes * Count / 2, loads,
                               x + Count / 2);
  } else if constexpr (kBytes == 2 && Count > 1) {
    Words<std::uint32_t, Count / 2> pairs;
    if (loads) load_words(from, pairs);
    LSHKIT_UNROLL
    for (int k = 0; k < Count; k += 2) {
      const std::uint32_t both = pairs.word[k / 2];
      const bool brain = E == Element::bfloat16;
      x[k] = brain ? float_of_bits(both << 16) : from_float16(std::uint16_t(both));
      x[k + 1] =
          brain ? float_of_bits(both & 0xffff0000u) : from_float16(std::uint16_t(both >> 16));
    }
  } else if constexpr (kBytes == 2) {
    std::uint32_t word = 0;
    if (loads) word = *static_cast<const std::uint16_t*>(from);
    *x = E == Element::bfloat16 ? float_of_bits(word << 16) : from_float16(std::uint16_t(word));
  } else {
    Words<T, Count> row;
    static_assert(sizeof(T) == kBytes, "");
    if (loads) load_words(from, row);
    LSHKIT_UNROLL
    for (int k = 0; k < Count; ++k) x[k] = row.word[k];
  }
}
// To float32, float64 or, rounded, bfloat16; 16 bytes at a time at most.
template <Element E, int Count, class T>
__device__ inline void store_columns(void* to, const T* x) {
  constexpr int kBytes = kElementBytes<E>;
  if constexpr (kBytes * Count > 16) {
    store_columns<E, Count / 2>(to, x);
    store_columns<E, Count / 2>(static_cast<char*>(to) + kBytes * Count / 2, x + Count / 2);
  } else if constexpr (kBytes > 2) {
    static_assert(sizeof(T) == kBytes, "");
    Words<T, Count> row;
    LSHKIT_UNROLL
    for (int k = 0; k < Count; ++k) row.word[k] = x[k];
    store_words(to, row);
  } else if constexpr (Count > 1) {
    Words<std::uint32_t, Count / 2> pairs;
    LSHKIT_UNROLL
    for (int k = 0; k < Count; k += 2) pairs.word[k / 2] = to_bfloat16_pair(x[k], x[k + 1]);
    store_words(to, pairs);
  } else {
    *static_cast<std::uint16_t*>(to) = to_bfloat16(*x);
  }
}

// To where 8 bytes are aligned. As one number: of two floats the compiler makes two stores where
// another branch stores them singly.
__device__ inline void store_two(float* to, Two two) {
  const std::uint64_t bits = std::uint64_t(bits_of_float(two.y)) << 32 | bits_of_float(two.x);
#ifdef __CUDACC__
  *reinterpret_cast<std::uint64_t*>(to) = bits;
#else
  std::memcpy(const_cast<void*>(emulation::aligned(to, sizeof bits)), &bits, sizeof bits);
#endif
}
__host__ __device__ inline bool is_aligned(const void* p, int bytes) {
  return reinterpret_cast<std::uintptr_t>(p) % std::uintptr_t(bytes) == 0;
}

// Bytes of (a, b), of which `selector` has one nibble for each of the result.
__device__ inline std::uint32_t select_bytes(std::uint32_t a, std::uint32_t b,
                                             std::uint32_t selector) {
#ifdef __CUDACC__
  return __byte_perm(a, b, selector);
#else
  const std::uint64_t both = std::uint64_t(b) << 32 | a;
  std::uint32_t out = 0;
  for (int i = 0; i < 4; ++i)
    out |= std::uint32_t(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
#endif
}

// bits * 2 + (the sign of x), in one instruction.
__device__ inline std::uint32_t shift_in_sign(std::uint32_t bits, float x) {
#ifdef __CUDACC__
  return __funnelshift_l(bits_of_float(x), bits, 1);
#else
  return bits << 1 | bits_of_float(x) >> 31;
#endif
}

}  // namespace lshkit::cuda

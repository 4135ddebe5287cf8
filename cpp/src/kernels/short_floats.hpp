#pragma once
// A register of floats from bfloat16 or float16 and back, rounded to nearest even; NaN stays NaN.
#if defined(LSHKIT_ISA_AVX512) || defined(LSHKIT_ISA_AVX2)
#include <immintrin.h>
#endif

#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

using Half = std::uint16_t;  // the bits of either format
using Words = std::uint32_t __attribute__((vector_size(kVectorBytes)));
using Halves = Half __attribute__((vector_size(kVectorBytes / 2)));

LSHKIT_INLINE Halves load_half(const Half* p) {
  Halves h;
  std::memcpy(&h, p, sizeof(h));
  return h;
}
LSHKIT_INLINE void store_half(Half* p, Halves h) { std::memcpy(p, &h, sizeof(h)); }
// The first `count` lanes (0 to all) from memory, zero in the others.
LSHKIT_INLINE Halves load_first_half(const Half* p, int count) {
  if (count >= kLanes<float>) return load_half(p);
  Halves h = {};
  if (count > 0) std::memcpy(&h, p, sizeof(Half) * count);
  return h;
}

// Numbers of 16 bits in lanes of 32, in one instruction, of which GCC makes three or four.
LSHKIT_INLINE Words to_words(Halves h) {
#if defined(LSHKIT_ISA_AVX512)
  return Words(_mm512_maskz_cvtepu16_epi32(0xffff, __m256i(h)));
#else
  return __builtin_convertvector(h, Words);
#endif
}

struct Bfloat16 {
  LSHKIT_INLINE static Vec<float> widen(Halves h) { return Vec<float>(to_words(h) << 16); }
  // Of words of two numbers.
  LSHKIT_INLINE static Vec<float> lower(Words w) { return Vec<float>(w << 16); }
  LSHKIT_INLINE static Vec<float> upper(Words w) { return Vec<float>(w & 0xffff0000); }
  LSHKIT_INLINE static Halves narrow(Vec<float> x) {
    const Words bits = Words(x), rounded = bits + (0x7fff + ((bits >> 16) & 1));
    const Words nan = (bits >> 16) | 0x40;  // quiet: rounding could make an infinity of it
    const Words is_nan = Words(x != x);
    return __builtin_convertvector((is_nan & nan) | (~is_nan & (rounded >> 16)), Halves);
  }
};

struct Float16 {
  // Of words of two numbers.
  LSHKIT_INLINE static Vec<float> lower(Words w) {
    return widen(__builtin_convertvector(w & 0xffff, Halves));
  }
  LSHKIT_INLINE static Vec<float> upper(Words w) {
    return widen(__builtin_convertvector(w >> 16, Halves));
  }
#if defined(LSHKIT_ISA_AVX512)
  LSHKIT_INLINE static Vec<float> widen(Halves h) {
    return _mm512_maskz_cvtph_ps(0xffff, __m256i(h));
  }
  LSHKIT_INLINE static Halves narrow(Vec<float> x) {
    return Halves(_mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#elif defined(LSHKIT_ISA_AVX2)
  LSHKIT_INLINE static Vec<float> widen(Halves h) { return _mm256_cvtph_ps(__m128i(h)); }
  LSHKIT_INLINE static Halves narrow(Vec<float> x) {
    return Halves(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#else
  // Both ways by arithmetic: a product with a power of two moves the exponent, also of subnormals.
  LSHKIT_INLINE static Vec<float> widen(Halves h) {
    const Words bits = __builtin_convertvector(h, Words), sign = (bits & 0x8000) << 16;
    const Words magnitude = bits & 0x7fff;
    const Vec<float> scaled = Vec<float>(magnitude << 13) * 0x1p112f;
    const Words special = Words(magnitude >= 0x7c00);  // infinity and NaN
    return Vec<float>(sign | (special & ((magnitude << 13) | 0x7f800000)) |
                      (~special & Words(scaled)));
  }
  LSHKIT_INLINE static Halves narrow(Vec<float> x) {
    const Words bits = Words(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    // Normal results: round the 13 bits that go. Subnormal ones: adding 1/2 in units of 2^-24
    // rounds at their last bit.
    const Words normal = (magnitude + (0xfff + ((magnitude >> 13) & 1)) - (112u << 23)) >> 13;
    const Words subnormal = Words(Vec<float>(magnitude) + 0.5f) - 0x3f000000;
    const Words small = Words(magnitude < 0x38800000), large = Words(magnitude >= 0x477ff000);
    const Words is_nan = Words(magnitude > 0x7f800000);
    Words half = (small & subnormal) | (~small & normal);
    half = (large & 0x7c00) | (~large & half);
    half = (is_nan & (0x7e00 | ((magnitude >> 13) & 0x3ff))) | (~is_nan & half);
    return __builtin_convertvector(sign | half, Halves);
  }
#endif
};

// A register of a row's numbers, zeros behind the first `count`: of T, or of a 16-bit format.
template <class T>
LSHKIT_INLINE Vec<T> first_lanes(const T* row, index_t count) {
  return load_first(row, int(smaller(count, kLanes<T>)));
}
template <class Format = Bfloat16>
LSHKIT_INLINE Vec<float> first_lanes(const Half* row, index_t count) {
  return Format::widen(load_first_half(row, int(smaller(count, kLanes<float>))));
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

// bfloat16 and float16 to float and back.
#include "kernels.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

using Half = std::uint16_t;
constexpr int W = kLanes<float>;
using U = std::uint32_t __attribute__((vector_size(kVectorBytes)));
using H = Half __attribute__((vector_size(kVectorBytes / 2)));

LSHKIT_INLINE H load_half(const Half* p) {
  H h;
  std::memcpy(&h, p, sizeof(h));
  return h;
}
LSHKIT_INLINE void store_half(Half* p, H h) { std::memcpy(p, &h, sizeof(h)); }

struct Bfloat16 {
  LSHKIT_INLINE static Vec<float> widen(H h) {
    return Vec<float>(__builtin_convertvector(h, U) << 16);
  }
  LSHKIT_INLINE static H narrow(Vec<float> x) {
    const U bits = U(x), rounded = bits + (0x7fff + ((bits >> 16) & 1));
    const U nan = (bits >> 16) | 0x40;  // quiet: rounding could make an infinity of it
    const U is_nan = U(x != x);
    return __builtin_convertvector((is_nan & nan) | (~is_nan & (rounded >> 16)), H);
  }
};

struct Float16 {
#if defined(LSHKIT_ISA_AVX512)
  LSHKIT_INLINE static Vec<float> widen(H h) { return _mm512_maskz_cvtph_ps(0xffff, __m256i(h)); }
  LSHKIT_INLINE static H narrow(Vec<float> x) {
    return H(_mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#elif defined(LSHKIT_ISA_AVX2)
  LSHKIT_INLINE static Vec<float> widen(H h) { return _mm256_cvtph_ps(__m128i(h)); }
  LSHKIT_INLINE static H narrow(Vec<float> x) {
    return H(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#else
  // Both ways by arithmetic: a product with a power of two moves the exponent, also of subnormals.
  LSHKIT_INLINE static Vec<float> widen(H h) {
    const U bits = __builtin_convertvector(h, U), sign = (bits & 0x8000) << 16;
    const U magnitude = bits & 0x7fff;
    const Vec<float> scaled = Vec<float>(magnitude << 13) * 0x1p112f;
    const U special = U(magnitude >= 0x7c00);  // infinity and NaN
    return Vec<float>(sign | (special & ((magnitude << 13) | 0x7f800000)) | (~special & U(scaled)));
  }
  LSHKIT_INLINE static H narrow(Vec<float> x) {
    const U bits = U(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    // Normal results: round the 13 bits that go. Subnormal ones: adding 1/2 in units of 2^-24
    // rounds at their last bit.
    const U normal = (magnitude + (0xfff + ((magnitude >> 13) & 1)) - (112u << 23)) >> 13;
    const U subnormal = U(Vec<float>(magnitude) + 0.5f) - 0x3f000000;
    const U small = U(magnitude < 0x38800000), large = U(magnitude >= 0x477ff000);
    const U is_nan = U(magnitude > 0x7f800000);
    U half = (small & subnormal) | (~small & normal);
    half = (large & 0x7c00) | (~large & half);
    half = (is_nan & (0x7e00 | ((magnitude >> 13) & 0x3ff))) | (~is_nan & half);
    return __builtin_convertvector(sign | half, H);
  }
#endif
};

template <class Format>
void widen_all(const Half* from, index_t count, float* to) {
  index_t i = 0;
  for (; i + W <= count; i += W) store(to + i, Format::widen(load_half(from + i)));
  if (i == count) return;
  Half last[W] = {};
  std::memcpy(last, from + i, sizeof(Half) * (count - i));
  store_first(to + i, Format::widen(load_half(last)), int(count - i));
}
template <class Format>
void narrow_all(const float* from, index_t count, Half* to) {
  index_t i = 0;
  for (; i + W <= count; i += W) store_half(to + i, Format::narrow(load(from + i)));
  if (i == count) return;
  Half last[W];
  store_half(last, Format::narrow(load_first(from + i, int(count - i))));
  std::memcpy(to + i, last, sizeof(Half) * (count - i));
}

}  // namespace

void widen(const void* from, Element element, index_t count, float* to) {
  const auto convert = element == Element::bfloat16 ? widen_all<Bfloat16> : widen_all<Float16>;
  convert(static_cast<const Half*>(from), count, to);
}
void narrow(const float* from, index_t count, Element element, void* to) {
  const auto convert = element == Element::bfloat16 ? narrow_all<Bfloat16> : narrow_all<Float16>;
  convert(from, count, static_cast<Half*>(to));
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

#pragma once
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

typedef std::uint32_t Unsigned __attribute__((vector_size(kVectorBytes)));

// exp(-u) for u >= 0, within 2 units in the last place; NaN stays, below 2^-125 it is 2^-125.
LSHKIT_INLINE Vec<float> exp_minus(Vec<float> u) {
  const Vec<float> largest = broadcast(86.6f), magic = broadcast(12582912.0f);  // 1.5 * 2^23
  u = u > largest ? largest : u;
  const Vec<float> shifted = u * 1.44269504f + magic;  // its low bits are u / log 2, rounded
  const Vec<float> n = shifted - magic;
  // Two parts of log 2, so that n times the first is exact.
  const Vec<float> x = (n * 0.693359375f - u) - n * 2.12194440e-4f;
  Vec<float> p = x * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * x + 8.3334519073e-3f;
  p = p * x + 4.1665795894e-2f;
  p = p * x + 1.6666665459e-1f;
  p = p * x + 5.0000001201e-1f;
  p = p * x * x + x + 1.0f;
  Unsigned bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (127u - (bits & 255u)) << 23;
  Vec<float> power;
  std::memcpy(&power, &bits, sizeof(power));
  return p * power;
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

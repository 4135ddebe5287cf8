#pragma once
// What the CPU and CUDA make random numbers of hash functions from, so that both have the same:
// words by counter, and cosines and sines that are rounded once.
#include <cmath>
#include <cstdint>

#include "lshkit/anywhere.hpp"

#ifdef __CUDA_ARCH__
#define LSHKIT_UNROLL_ROUNDS _Pragma("unroll")
#else
#define LSHKIT_UNROLL_ROUNDS
#endif

namespace lshkit {

// The key of the counter's cipher: the seed, of up to 128 bits.
struct RandomKey {
  std::uint64_t low = 0, high = 0;
};

// The upper 64 bits of a product; the lower go to `low`.
LSHKIT_ANYWHERE std::uint64_t wide_product(std::uint64_t a, std::uint64_t b, std::uint64_t& low) {
  low = a * b;
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>(Wide(a) * b >> 64);
#endif
}

// Four words, from block i of Philox 4x64 with 10 rounds (Salmon et al., SC 2011), whose counter is
// 1 + i: words 4 i to 4 i + 3 of numpy.random.Philox(key=key).random_raw.
LSHKIT_ANYWHERE void philox_block(RandomKey key, std::uint64_t i, std::uint64_t (&c)[4]) {
  c[0] = 1 + i;
  c[1] = c[2] = c[3] = 0;
  LSHKIT_UNROLL_ROUNDS
  for (int round = 0; round < 10; ++round) {
    std::uint64_t low0, low2;
    const std::uint64_t high0 = wide_product(0xD2E7470EE14C6C93u, c[0], low0);
    const std::uint64_t high2 = wide_product(0xCA5A826395121157u, c[2], low2);
    c[0] = high2 ^ c[1] ^ key.low;
    c[1] = low2;
    c[2] = high0 ^ c[3] ^ key.high;
    c[3] = low0;
    key.low += 0x9E3779B97F4A7C15u;  // the golden ratio, and the root of 3 less 1
    key.high += 0xBB67AE8584CAA73Bu;
  }
}

// From 0 to 2 pi.
LSHKIT_ANYWHERE float random_angle(std::uint32_t bits) {
  return float(bits) * float(2 * 3.14159265358979323846 / 4294967296.0);
}

// Of an angle from 0 to 2 pi, in double for what is rounded once: the nearest floats. (The CUDA
// library's cosf would keep an array in memory for angles that do not come here.)
LSHKIT_ANYWHERE void cosine_and_sine(float angle, float* cosine, float* sine) {
  using std::fma;
  const int quarter = int(double(angle) * 0.63661977236758134308 + 0.5);
  const double r = fma(double(-quarter), 1.57079632679489661923, double(angle)), s = r * r;
  double c = -1 / 87178291200.0, d = 1 / 6227020800.0;  // Taylor's series: |r| is at most pi / 4
  c = fma(c, s, 1 / 479001600.0);
  c = fma(c, s, -1 / 3628800.0);
  d = fma(d, s, -1 / 39916800.0);
  c = fma(c, s, 1 / 40320.0);
  d = fma(d, s, 1 / 362880.0);
  c = fma(c, s, -1 / 720.0);
  d = fma(d, s, -1 / 5040.0);
  c = fma(c, s, 1 / 24.0);
  d = fma(d, s, 1 / 120.0);
  c = fma(c, s, -0.5);
  d = fma(d, s, -1 / 6.0);
  c = fma(c, s, 1.0);
  d = fma(d * s, r, r);
  const bool swapped = quarter & 1;
  const float a = float(swapped ? d : c), b = float(swapped ? c : d);
  *cosine = (quarter + 1) & 2 ? -a : a;
  *sine = quarter & 2 ? -b : b;
}

// Of a word two normal numbers (Box and Muller 1958). The radius in double: float has no numbers
// close enough to 1, whose logarithms are the small radii.
LSHKIT_ANYWHERE void two_normals(std::uint64_t bits, float (&normals)[2]) {
  using std::log;
  using std::sqrt;
  const double uniform = (double(std::uint32_t(bits)) + 0.5) / 4294967296.0;
  const float radius = float(sqrt(-2 * log(uniform)));
  cosine_and_sine(random_angle(std::uint32_t(bits >> 32)), normals, normals + 1);
  normals[0] *= radius;
  normals[1] *= radius;
}

}  // namespace lshkit

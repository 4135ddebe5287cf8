#pragma once
// Random numbers of hash functions, the very words of the CPU's (lshkit/hash_functions.py):
// Philox 4x64 with 10 rounds (Salmon et al., SC 2011), key = (seed, 0). Word i is
// element i % 4 of the block of counter 1 + i / 4, so that a thread makes any word by itself.
//
// A thread has a word: two angles, two normals or 64 signs. Each makes the block of four that its
// word is in: 20 products of 64 bits, which all four lanes repeat, and no number passes between
// threads. Of 12 heads of 64 columns, 8 bits and 32 hashes fast Hadamard hashing has 672 words and
// 34 KB, and a thread at most 832 instructions (sm_90, no loop): the time is that of a launch.
#include "lshkit/cuda/elements.cuh"
#include "lshkit/cuda/parameters.hpp"

namespace lshkit::cuda {

constexpr int kRandomThreads = 64;

// The upper 64 bits of a product; the lower go to `low`.
__device__ inline std::uint64_t wide_product(std::uint64_t a, std::uint64_t b, std::uint64_t& low) {
  low = a * b;
#ifdef __CUDACC__
  return __umul64hi(a, b);
#else
  return std::uint64_t((unsigned __int128)a * b >> 64);
#endif
}

__device__ inline std::uint64_t philox_word(std::uint64_t seed, std::uint64_t word) {
  std::uint64_t other = 0, c0 = 1 + word / 4, c1 = 0, c2 = 0, c3 = 0;
  LSHKIT_UNROLL
  for (int round = 0; round < 10; ++round) {
    std::uint64_t low0, low2;
    const std::uint64_t high0 = wide_product(0xD2E7470EE14C6C93u, c0, low0);
    const std::uint64_t high2 = wide_product(0xCA5A826395121157u, c2, low2);
    c0 = high2 ^ c1 ^ seed;
    c1 = low2;
    c2 = high0 ^ c3 ^ other;
    c3 = low0;
    seed += 0x9E3779B97F4A7C15u;  // the golden ratio, and the root of 3 less 1
    other += 0xBB67AE8584CAA73Bu;
  }
  const bool late = word & 2, odd = word & 1;
  return late ? (odd ? c3 : c2) : (odd ? c1 : c0);
}

// Of an angle from 0 to 2 pi, in double for what is rounded once: the nearest floats, where the
// library's cosf would keep an array in memory for angles that do not come here.
__device__ inline void cosine_and_sine(float angle, float* cosine, float* sine) {
  const int quarter = int(double(angle) * 0.63661977236758134308 + 0.5);
  const double r = fma(double(-quarter), 1.57079632679489661923, double(angle)), s = r * r;
  double c = 1 / 479001600.0, d = 1 / 6227020800.0;  // Taylor's series: |r| is at most pi / 4
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

__device__ inline float random_angle(std::uint32_t bits) {
  return float(bits) * float(2 * 3.14159265358979323846 / 4294967296.0);
}

LSHKIT_KERNEL void __launch_bounds__(kRandomThreads) random_numbers_kernel(RandomNumbers a) {
  const index_t half = a.columns / 2, angle_words = a.n_angle_rows * half / 2;
  const index_t words = angle_words + a.n_sign_rows * a.columns / 64;
  const index_t i = block_index() * kRandomThreads + thread_index();
  if (i >= a.n_sets * words) return;
  std::uint64_t bits = philox_word(std::uint64_t(*a.seed), std::uint64_t(i));
  const index_t word = i % words;
  float* out = a.out + i / words * (a.n_angle_rows + a.n_sign_rows) * a.columns;
  if (word < angle_words) {
    for (int k = 0; k < 2; ++k, bits >>= 32) {
      const index_t angle = 2 * word + k;
      float* const to = out + angle / half * a.columns + angle % half;
      cosine_and_sine(random_angle(std::uint32_t(bits)), to, to + half);
    }
    return;
  }
  out += a.n_angle_rows * a.columns + (word - angle_words) * 64;
  for (int k = 0; k < 64; k += 4, bits >>= 4) {
    const auto sign = [&](int bit) { return bits >> bit & 1 ? -1.0f : 1.0f; };
#ifdef __CUDACC__
    *reinterpret_cast<float4*>(out + k) = make_float4(sign(0), sign(1), sign(2), sign(3));
#else
    emulation::aligned(out + k, 16);
    for (int bit = 0; bit < 4; ++bit) out[k + bit] = sign(bit);
#endif
  }
}

// Two of a word (Box and Muller 1958).
LSHKIT_KERNEL void __launch_bounds__(kRandomThreads) random_normals_kernel(RandomNormals a) {
  const index_t words = (a.n_numbers + 1) / 2, i = block_index() * kRandomThreads + thread_index();
  if (i >= a.n_sets * words) return;
  const std::uint64_t bits = philox_word(std::uint64_t(*a.seed), std::uint64_t(i));
  const index_t set = i / words, number = 2 * (i - set * words);
  const double uniform = (double(std::uint32_t(bits)) + 0.5) / 4294967296.0;
  const float radius = float(sqrt(-2 * log(uniform)));
  float cosine, sine;
  cosine_and_sine(random_angle(std::uint32_t(bits >> 32)), &cosine, &sine);
  float* const out = a.out + set * a.n_numbers + number;
  out[0] = radius * cosine;
  if (number + 1 < a.n_numbers) out[1] = radius * sine;
}

}  // namespace lshkit::cuda

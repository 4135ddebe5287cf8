#pragma once
// Random numbers of hash functions, those of the CPU (cpp/src/kernels/random_numbers.cpp). Word i
// is element i % 4 of block i / 4, so that a thread makes any word by itself.
//
// A thread has a word: two angles, two normals or 64 signs. Each makes the block of four that its
// word is in: 20 products of 64 bits, which all four lanes repeat, and no number passes between
// threads. Of 12 heads of 64 columns, 8 bits and 32 hashes fast Hadamard hashing has 672 words and
// 34 KB, and a thread at most 832 instructions (sm_90, no loop): the time is that of a launch.
#include "lshkit/cuda/elements.cuh"
#include "lshkit/cuda/parameters.hpp"

namespace lshkit::cuda {

constexpr int kRandomThreads = 64;

__device__ inline std::uint64_t philox_word(std::uint64_t seed, std::uint64_t word) {
  std::uint64_t c[4];
  philox_block({seed, 0}, word / 4, c);
  const bool late = word & 2, odd = word & 1;
  return late ? (odd ? c[3] : c[2]) : (odd ? c[1] : c[0]);
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
  float normals[2];
  two_normals(bits, normals);
  float* const out = a.out + set * a.n_numbers + number;
  out[0] = normals[0];
  if (number + 1 < a.n_numbers) out[1] = normals[1];
}

}  // namespace lshkit::cuda

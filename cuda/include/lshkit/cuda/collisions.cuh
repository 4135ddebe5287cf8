#pragma once
// The pairs verb by comparison: every query's codes against every key's, twice, once for the number
// of each query's keys and once to write them. A warp has four queries and meets 64 keys at a time,
// two a lane, so that its keys come out in order; codes are compared four (or two) to a word.
//
// Bound: arithmetic, per pair and word of codes six instructions (97 for 16 of them in a loop):
// 65536 x 65536 pairs of 32 one-byte hashes are 3.4e10 words, twice. No scratch.
#include "lshkit/cuda/elements.cuh"

namespace lshkit::cuda {

constexpr int kCollisionThreads = 256, kCollisionWarps = kCollisionThreads / kWarp;
constexpr int kCollisionQueries = 4;  // of a warp
constexpr int kCollisionKeys = 2;     // of a lane
constexpr int kCollisionWords = 32;   // of codes that are in shared memory at once, of a row
constexpr int kCollisionScan = 256;

struct Collisions {
  const void *query_codes = nullptr, *key_codes = nullptr;  // (rows, n_hashes)
  index_t n_queries = 0, n_keys = 0, n_hashes = 1;
  const std::uint8_t* key_mask = nullptr;  // (n_keys), or null
  bool causal = false;
  std::int64_t* indptr = nullptr;  // (n_queries + 1): written from 1 on, or read
  index_t size = 0;                // of indices and counts
  std::int32_t *indices = nullptr, *counts = nullptr;
};

// Word w of a row's codes, and `rest` in the place of those beyond the last.
template <int Bytes>
__device__ inline std::uint32_t code_word(const void* codes, index_t row, index_t n_hashes,
                                          index_t w, std::uint32_t rest) {
  std::uint32_t word = 0;
  LSHKIT_UNROLL
  for (int k = 0; k < 4 / Bytes; ++k) {
    const index_t hash = w * (4 / Bytes) + k;
    const std::uint32_t code =
        hash < n_hashes ? load_code(codes, Bytes, row * n_hashes + hash) : rest;
    word |= code << (8 * Bytes * k);
  }
  return word;
}

// Codes of a word that are not zero, each as a one in its place.
template <int Bytes>
__device__ inline std::uint32_t unequal_codes(std::uint32_t x) {
  constexpr std::uint32_t low = Bytes == 1 ? 0x7f7f7f7fu : 0x7fff7fffu;
  return (((x & low) + low) | x) >> (8 * Bytes - 1) & (Bytes == 1 ? 0x01010101u : 0x00010001u);
}

template <int Bytes, bool Fill>
__global__ void __launch_bounds__(kCollisionThreads) collisions_kernel(Collisions a) {
  constexpr int kKeys = kWarp * kCollisionKeys, kQueries = kCollisionWarps * kCollisionQueries;
  constexpr int kStep = kKeys + 1, kCodes = 4 / Bytes;
  static_assert(kCollisionWords < 256, "a byte counts the words");
  LSHKIT_SHARED_MEMORY(memory);
  auto* const keys = reinterpret_cast<std::uint32_t*>(memory);    // (words, kStep)
  std::uint32_t* const queries = keys + kCollisionWords * kStep;  // (kQueries, words)
  const int lane = lane_index();
  const index_t first = block_index() * kQueries;
  const index_t own = first + warp_index() * kCollisionQueries;
  const index_t words = ceil_div(a.n_hashes, kCodes);
  const index_t end = a.causal ? least(a.n_keys, first + kQueries) : a.n_keys;
  index_t found[kCollisionQueries] = {}, limit[kCollisionQueries] = {};
  if (Fill) {
    LSHKIT_UNROLL
    for (int q = 0; q < kCollisionQueries; ++q)
      if (own + q < a.n_queries) {
        found[q] = a.indptr[own + q];
        limit[q] = least(a.size, a.indptr[own + q + 1]);
      }
  }
  for (index_t start = 0; start < end; start += kKeys) {
    std::uint32_t equal[kCollisionQueries][kCollisionKeys] = {};
    for (index_t word = 0; word < words; word += kCollisionWords) {
      const int n = int(least(kCollisionWords, words - word));
      __syncthreads();
      for (int i = thread_index(); i < kKeys * kCollisionWords; i += kCollisionThreads) {
        const index_t j = start + i / kCollisionWords;
        const int w = i % kCollisionWords;
        if (w < n && j < a.n_keys)
          keys[w * kStep + i / kCollisionWords] =
              code_word<Bytes>(a.key_codes, j, a.n_hashes, word + w, 0);
      }
      for (int i = thread_index(); i < kQueries * kCollisionWords; i += kCollisionThreads) {
        const index_t row = first + i / kCollisionWords;
        const int w = i % kCollisionWords;
        if (w < n && row < a.n_queries)
          queries[i] = code_word<Bytes>(a.query_codes, row, a.n_hashes, word + w, 1);
      }
      __syncthreads();
      std::uint32_t unequal[kCollisionQueries][kCollisionKeys] = {};
      for (int w = 0; w < n; ++w) {
        std::uint32_t key[kCollisionKeys];
        LSHKIT_UNROLL
        for (int k = 0; k < kCollisionKeys; ++k) key[k] = keys[w * kStep + k * kWarp + lane];
        LSHKIT_UNROLL
        for (int q = 0; q < kCollisionQueries; ++q) {
          const std::uint32_t query =
              queries[(warp_index() * kCollisionQueries + q) * kCollisionWords + w];
          LSHKIT_UNROLL
          for (int k = 0; k < kCollisionKeys; ++k)
            unequal[q][k] += unequal_codes<Bytes>(query ^ key[k]);
        }
      }
      LSHKIT_UNROLL
      for (int q = 0; q < kCollisionQueries; ++q) LSHKIT_UNROLL
      for (int k = 0; k < kCollisionKeys; ++k) {
        const std::uint32_t u = unequal[q][k];
        equal[q][k] += std::uint32_t(n * kCodes) -
                       (Bytes == 1 ? u * 0x01010101u >> 24 : (u & 0xffffu) + (u >> 16));
      }
    }
    LSHKIT_UNROLL
    for (int q = 0; q < kCollisionQueries; ++q) LSHKIT_UNROLL
    for (int k = 0; k < kCollisionKeys; ++k) {
      const index_t i = own + q, j = start + k * kWarp + lane;
      const bool collides = i < a.n_queries && j < a.n_keys && (!a.causal || j <= i) &&
                            (!a.key_mask || a.key_mask[j]) && equal[q][k] > 0;
      const unsigned hits = __ballot_sync(kAllLanes, collides);
      if (Fill && collides) {
        const index_t at = found[q] + __popc(hits & ((1u << lane) - 1));
        if (at < limit[q]) {
          a.indices[at] = std::int32_t(j);
          a.counts[at] = std::int32_t(equal[q][k]);
        }
      }
      found[q] += __popc(hits);
    }
  }
  if (!Fill && lane == 0) {
    LSHKIT_UNROLL
    for (int q = 0; q < kCollisionQueries; ++q)
      if (own + q < a.n_queries) a.indptr[own + q + 1] = found[q];
  }
}

// Sums of the numbers so far in their place, by one block; the first becomes 0.
LSHKIT_KERNEL void __launch_bounds__(kCollisionScan)
    sums_so_far_kernel(std::int64_t* numbers, index_t count) {
  LSHKIT_SHARED_MEMORY(memory);
  auto* const sums = reinterpret_cast<std::int64_t*>(memory);  // (kCollisionScan)
  const int thread = thread_index();
  std::int64_t before = 0;
  for (index_t first = 0; first < count; first += kCollisionScan) {
    const index_t at = first + thread;
    __syncthreads();
    sums[thread] = at > 0 && at < count ? numbers[at] : 0;
    for (int step = 1; step < kCollisionScan; step *= 2) {
      __syncthreads();
      const std::int64_t other = thread >= step ? sums[thread - step] : 0;
      __syncthreads();
      sums[thread] += other;
    }
    __syncthreads();
    if (at < count) numbers[at] = before + sums[thread];
    before += sums[kCollisionScan - 1];
  }
}

template <bool Fill>
void find_collisions(const Queue& queue, const Collisions& a, int code_bytes) {
  constexpr int kRows = kCollisionWarps * kCollisionQueries;
  const std::size_t bytes =
      sizeof(std::uint32_t) * kCollisionWords * (kWarp * kCollisionKeys + 1 + kRows);
  const auto kernel = code_bytes == 1 ? collisions_kernel<1, Fill> : collisions_kernel<2, Fill>;
  launch(queue, "collisions", kernel, ceil_div(a.n_queries, kRows), kCollisionThreads, bytes, a);
}
inline void sums_so_far(const Queue& queue, std::int64_t* numbers, index_t count) {
  launch(queue, "sums_so_far", sums_so_far_kernel, 1, kCollisionScan,
         sizeof(std::int64_t) * kCollisionScan, numbers, count);
}

}  // namespace lshkit::cuda

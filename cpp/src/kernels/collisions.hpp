#pragma once
// Every distinct pair that collides, once and with its count: a block of 128 keys is compared with
// a query in all hashes at once. Quadratic, with a small factor: n_hashes / 64 comparisons and
// additions of a vector for each pair of a query and a key, whether it collides or not.
#if defined(LSHKIT_ISA_AVX512) || defined(LSHKIT_ISA_AVX2)
#include <immintrin.h>
#endif

#include "kernels.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int kBlock = 128, kWord = 64;  // keys of a block, and those that a word has bits for

// A bit for each of the 64 counts that is not zero.
#if defined(LSHKIT_ISA_AVX512)
LSHKIT_INLINE std::uint64_t nonzero(const std::uint8_t* counts) {
  const __m512i v = _mm512_loadu_si512(counts);
  return _mm512_test_epi8_mask(v, v);
}
LSHKIT_INLINE std::uint64_t nonzero(const std::uint16_t* counts) {
  const __m512i low = _mm512_loadu_si512(counts), high = _mm512_loadu_si512(counts + 32);
  return _mm512_test_epi16_mask(low, low) | std::uint64_t(_mm512_test_epi16_mask(high, high)) << 32;
}
#elif defined(LSHKIT_ISA_AVX2)
LSHKIT_INLINE std::uint64_t nonzero(const std::uint8_t* counts) {
  std::uint64_t bits = 0;
  for (int i = 0; i < 2; ++i) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(counts + 32 * i));
    const unsigned zero =
        unsigned(_mm256_movemask_epi8(_mm256_cmpeq_epi8(v, _mm256_setzero_si256())));
    bits |= std::uint64_t(~zero) << (32 * i);
  }
  return bits;
}
LSHKIT_INLINE std::uint64_t nonzero(const std::uint16_t* counts) {
  std::uint8_t flags[kWord];
  for (int i = 0; i < kWord; ++i) flags[i] = counts[i] != 0;
  return nonzero(flags);
}
#else  // without flags in between, whose loop GCC 12 compiles wrongly for NEON with -O2
template <class Code>
LSHKIT_INLINE std::uint64_t nonzero(const Code* counts) {
  std::uint64_t bits = 0;
  for (int i = 0; i < kWord; ++i) bits |= std::uint64_t(counts[i] != 0) << i;
  return bits;
}
#endif

// counts[j] = the number of hashes in which key j of the block has the query's code.
#if defined(LSHKIT_ISA_AVX512)
LSHKIT_INLINE __m512i count_equal(__m512i keys, std::uint8_t code, __m512i count) {
  const __mmask64 equal = _mm512_cmpeq_epi8_mask(keys, _mm512_set1_epi8(char(code)));
  return _mm512_mask_add_epi8(count, equal, count, _mm512_set1_epi8(1));
}
LSHKIT_INLINE __m512i count_equal(__m512i keys, std::uint16_t code, __m512i count) {
  const __mmask32 equal = _mm512_cmpeq_epi16_mask(keys, _mm512_set1_epi16(short(code)));
  return _mm512_mask_add_epi16(count, equal, count, _mm512_set1_epi16(1));
}
template <class Code>
LSHKIT_INLINE void count_collisions(const Code* query, const Code* block, index_t n_hashes,
                                    Code* counts) {
  constexpr int kSums = kBlock * sizeof(Code) / 64, kCodes = 64 / sizeof(Code);
  __m512i sum[kSums] = {};
  LSHKIT_UNROLL
  for (index_t h = 0; h < n_hashes; ++h) LSHKIT_UNROLL
  for (int i = 0; i < kSums; ++i)
    sum[i] = count_equal(_mm512_loadu_si512(block + h * kBlock + i * kCodes), query[h], sum[i]);
  LSHKIT_UNROLL
  for (int i = 0; i < kSums; ++i) _mm512_storeu_si512(counts + i * kCodes, sum[i]);
}
#else
template <class Code>
LSHKIT_INLINE void count_collisions(const Code* query, const Code* block, index_t n_hashes,
                                    Code* counts) {
  constexpr int n = kBlock * sizeof(Code) / kVectorBytes, kCodes = kVectorBytes / sizeof(Code);
  typedef Code Packed __attribute__((vector_size(kVectorBytes)));
  Packed sum[n] = {};
  for (index_t h = 0; h < n_hashes; ++h) {
    const Packed code = query[h] - Packed{};
    LSHKIT_UNROLL
    for (int i = 0; i < n; ++i) {
      Packed key;
      std::memcpy(&key, block + h * kBlock + i * kCodes, kVectorBytes);
      sum[i] -= Packed(key == code);
    }
  }
  LSHKIT_UNROLL
  for (int i = 0; i < n; ++i) std::memcpy(counts + i * kCodes, &sum[i], kVectorBytes);
}
#endif

// The type that codes are compared and collisions counted in: one byte while both fit.
LSHKIT_INLINE bool bytes_suffice(const PairCodes& p) {
  return p.code_bytes == 1 && p.n_hashes < 256;
}

struct CollisionScratch {
  void *block_codes, *query_codes;  // (n_hashes, kBlock) and (n_hashes), in the counting type
  CollisionScratch() = default;
  CollisionScratch(const PairCodes& p, Cut& cut) {
    block_codes = cut.take<std::uint16_t>(p.n_hashes * kBlock);
    query_codes = cut.take<std::uint16_t>(p.n_hashes);
  }
};

template <class Code>
LSHKIT_INLINE Code code_at(const PairCodes& p, const void* codes, index_t row, index_t hash) {
  const index_t i = row * p.n_hashes + hash;
  return Code(p.code_bytes == 1 ? static_cast<const std::uint8_t*>(codes)[i]
                                : static_cast<const std::uint16_t*>(codes)[i]);
}

// The keys of a block that a query collides with, ascending, and of each what the caller makes of
// its count: in the caller's memory, of kBlock + 4 each. Up to three more follow that repeat the
// first, with a value of zero, for loops that take four.
template <class Value>
struct Colliding {
  std::uint8_t* keys;  // in the block
  Value* values;
  index_t query = 0;
  int n = 0;
};

// visit() for each query that collides with one of the keys j0 ... j0 + n - 1, n <= kBlock: `to`
// has its keys and values then. value_of(count) is listed where the count is read: looked up later
// it costs 5 % of a gradient.
template <class Code, class Value, class ValueOf, class Visit>
LSHKIT_INLINE void for_each_query(const PairCodes& p, const CollisionScratch& s, index_t j0,
                                  index_t n, Colliding<Value>& to, const ValueOf& value_of,
                                  const Visit& visit) {
  Code* block_codes = static_cast<Code*>(s.block_codes);
  std::uint64_t valid[kBlock / kWord] = {};
  if (n < kBlock) std::memset(block_codes, 0, sizeof(Code) * p.n_hashes * kBlock);
  for (index_t j = 0; j < n; ++j) {
    valid[j / kWord] |= std::uint64_t(!p.key_valid || p.key_valid[j0 + j]) << (j % kWord);
    for (index_t h = 0; h < p.n_hashes; ++h)
      block_codes[h * kBlock + j] = code_at<Code>(p, p.key_codes, j0 + j, h);
  }
  for (index_t i = p.causal ? larger(0, j0 - p.first_query) : 0; i < p.n_queries; ++i) {
    if (p.query_valid && !p.query_valid[i]) continue;
    const Code* codes = static_cast<const Code*>(p.query_codes) + i * p.n_hashes;
    if (sizeof(Code) != std::size_t(p.code_bytes)) {
      Code* wide = static_cast<Code*>(s.query_codes);
      for (index_t h = 0; h < p.n_hashes; ++h) wide[h] = code_at<Code>(p, p.query_codes, i, h);
      codes = wide;
    }
    Code block_counts[kBlock];
    count_collisions(codes, block_codes, p.n_hashes, block_counts);
    std::uint8_t* const keys = to.keys;
    Value* const values = to.values;
    int found = 0;
    LSHKIT_UNROLL
    for (int w = 0; w < kBlock / kWord; ++w) {
      std::uint64_t hits = nonzero(block_counts + w * kWord) & valid[w];
      // the key of the word that a causal query sees last
      const index_t last = p.first_query + i - j0 - w * kWord;
      if (p.causal && last < kWord - 1) hits &= last < 0 ? 0 : (std::uint64_t(2) << last) - 1;
      // Four at a time: the end of the loop is then guessed right more often than not. What is
      // listed too many is overwritten by the next word's or by the padding.
      const int count = __builtin_popcountll(hits);
      for (int t = 0; t < count; t += 4) LSHKIT_UNROLL
      for (int u = 0; u < 4; ++u, hits &= hits - 1) {
        const int key = w * kWord + __builtin_ctzll(hits | std::uint64_t(1) << 63);
        keys[found + t + u] = std::uint8_t(key);
        values[found + t + u] = value_of(block_counts[key]);
      }
      found += count;
    }
    if (!found) continue;
    for (int t = found; t < found + 3; ++t) {
      keys[t] = keys[0];
      values[t] = 0;
    }
    to.query = i;
    to.n = found;
    visit();
  }
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

// The lower bound's gradient pair by pair: a block of 128 keys is compared with a query in all
// hashes at once, and every pair that collides is visited once, with its count. Quadratic, with a
// small factor: n_hashes / 64 vector operations a pair to compare, 6 d flops for each of those that
// collide.
#include "kernels.hpp"
#include "matmul.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int W = kLanes<float>;
using F = Vec<float>;
using Problem = LowerBoundGradient;

constexpr int kBlock = 128, kWord = 64;  // keys of a block, and those that a word has bits for

// A bit for each of the 64 counts that is not zero.
LSHKIT_INLINE std::uint64_t nonzero(const std::uint8_t* counts) {
  std::uint64_t bits = 0;
#if defined(LSHKIT_ISA_AVX512)
  const __m512i v = _mm512_loadu_si512(counts);
  bits = _mm512_test_epi8_mask(v, v);
#elif defined(LSHKIT_ISA_AVX2)
  for (int i = 0; i < 2; ++i) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(counts + 32 * i));
    const unsigned zero =
        unsigned(_mm256_movemask_epi8(_mm256_cmpeq_epi8(v, _mm256_setzero_si256())));
    bits |= std::uint64_t(~zero) << (32 * i);
  }
#else
  for (int i = 0; i < kWord; ++i) bits |= std::uint64_t(counts[i] != 0) << i;
#endif
  return bits;
}
LSHKIT_INLINE std::uint64_t nonzero(const std::uint16_t* counts) {
  std::uint8_t flags[kWord];
  for (int i = 0; i < kWord; ++i) flags[i] = counts[i] != 0;
  return nonzero(flags);
}

// counts[j] = the number of hashes in which key j of the block has the query's code.
#if defined(LSHKIT_ISA_AVX512)
LSHKIT_INLINE void count_collisions(const std::uint8_t* query, const std::uint8_t* block,
                                    index_t n_hashes, std::uint8_t* counts) {
  const __m512i one = _mm512_set1_epi8(1);
  __m512i sum[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  LSHKIT_UNROLL
  for (index_t h = 0; h < n_hashes; ++h) {
    const __m512i code = _mm512_set1_epi8(char(query[h]));
    LSHKIT_UNROLL
    for (int w = 0; w < 2; ++w) {
      const __m512i keys = _mm512_loadu_si512(block + h * kBlock + w * kWord);
      sum[w] = _mm512_mask_add_epi8(sum[w], _mm512_cmpeq_epi8_mask(keys, code), sum[w], one);
    }
  }
  for (int w = 0; w < 2; ++w) _mm512_storeu_si512(counts + w * kWord, sum[w]);
}
#endif
template <class Code>
LSHKIT_INLINE void count_collisions(const Code* query, const Code* block, index_t n_hashes,
                                    Code* counts) {
  constexpr int kBytes = kVectorBytes > 32 ? 32 : kVectorBytes;
  constexpr int n = kBlock * sizeof(Code) / kBytes, kCodes = kBytes / sizeof(Code);
  typedef Code Packed __attribute__((vector_size(kBytes)));
  Packed sum[n] = {};
  for (index_t h = 0; h < n_hashes; ++h) {
    const Packed code = query[h] - Packed{};
    LSHKIT_UNROLL
    for (int i = 0; i < n; ++i) {
      Packed key;
      std::memcpy(&key, block + h * kBlock + i * kCodes, kBytes);
      sum[i] -= Packed(key == code);
    }
  }
  LSHKIT_UNROLL
  for (int i = 0; i < n; ++i) std::memcpy(counts + i * kCodes, &sum[i], kBytes);
}

struct PairScratch {
  float *key, *value, *key_grad;     // (kBlock, padded columns)
  float *query, *grad, *query_grad;  // one padded row each
  float* weight;                     // of a count
  void *block_codes, *query_codes;   // (n_hashes, kBlock) and (n_hashes), in the counting type
  index_t d, dv;                     // padded
  PairScratch(const Problem& p, Cut& cut)
      : d(round_up(p.query.columns, W)), dv(round_up(p.value.columns, W)) {
    key = cut.take<float>(kBlock * d);
    value = cut.take<float>(kBlock * dv);
    key_grad = cut.take<float>(kBlock * d);
    query = cut.take<float>(d);
    grad = cut.take<float>(dv);
    query_grad = cut.take<float>(d);
    weight = cut.take<float>(p.n_hashes + 1);
    block_codes = cut.take<std::uint16_t>(p.n_hashes * kBlock);
    query_codes = cut.take<std::uint16_t>(p.n_hashes);
  }
};

// Query i against the listed keys of the block, of which there are three more with weight zero.
// Vectors > 0: unpadded rows of that many registers, kept there; else rows of any length.
template <int Vectors>
LSHKIT_NOINLINE void visit(const Problem& p, const PairScratch& s, index_t i,
                           const std::uint8_t* keys, const float* weights, int n) {
  constexpr int kMost = Vectors ? Vectors : 1;
  const index_t d = p.query.columns, dv = p.value.columns;
  const int kv = Vectors ? Vectors : int(s.d / W), vv = Vectors ? Vectors : int(s.dv / W);
  const index_t key_stride = kv * W, value_stride = vv * W;
  const float bias = p.bias ? p.bias[i] : 0;
  float* out = p.query_grad.row(i);
  F g[kMost], q[kMost], dq[kMost];
  if (Vectors) {
    LSHKIT_UNROLL
    for (int c = 0; c < kMost; ++c) {
      g[c] = load(p.grad.row(i) + c * W);
      q[c] = load(p.query.row(i) + c * W) * p.query_inverse_norm[i];
      dq[c] = load(out + c * W);
    }
  } else {
    pack<float>(1, d, s.d, {p.query.row(i), 0}, p.query_inverse_norm[i], nullptr, s.query);
    pack<float>(1, dv, s.dv, {p.grad.row(i), 0}, 1, nullptr, s.grad);
    pack<float>(1, d, s.d, {out, 0}, 1, nullptr, s.query_grad);
  }
  for (int first = 0; first < n; first += 4) {
    F dot[4] = {};
    LSHKIT_UNROLL
    for (int t = 0; t < 4; ++t) {
      const float* v = s.value + keys[first + t] * value_stride;
      LSHKIT_UNROLL
      for (int c = 0; c < vv; ++c)
        dot[t] += (Vectors ? g[Vectors ? c : 0] : load(s.grad + c * W)) * load(v + c * W);
    }
    const Vec4 sums = sum_lanes4(dot[0], dot[1], dot[2], dot[3]) + bias;
    LSHKIT_UNROLL
    for (int t = 0; t < 4; ++t) {
      // Weights one by one: a vector load of what has just been stored in parts would wait for it.
      const F b = broadcast<float>(sums[t]) * weights[first + t];
      const float* k = s.key + keys[first + t] * key_stride;
      float* dk = s.key_grad + keys[first + t] * key_stride;
      LSHKIT_UNROLL
      for (int c = 0; c < kv; ++c) {
        const F query = Vectors ? q[Vectors ? c : 0] : load(s.query + c * W);
        if (Vectors)
          dq[Vectors ? c : 0] += b * load(k + c * W);
        else
          store(s.query_grad + c * W, load(s.query_grad + c * W) + b * load(k + c * W));
        store(dk + c * W, load(dk + c * W) + b * query);
      }
    }
  }
  if (Vectors) LSHKIT_UNROLL
  for (int c = 0; c < kMost; ++c) store(out + c * W, dq[c]);
  else std::memcpy(out, s.query_grad, sizeof(float) * d);
}

using Visitor = void (*)(const Problem&, const PairScratch&, index_t, const std::uint8_t*,
                         const float*, int);
// The visitor for the problem's row lengths.
Visitor visitor(const PairScratch& s, const Problem& p) {
  if (s.d != s.dv || s.d != p.query.columns || s.dv != p.value.columns) return visit<0>;
  switch (s.d / W) {
    case 2:
      return visit<2>;
    case 4:
      return visit<4>;
    case 8:
      return visit<8>;
    default:
      return visit<0>;
  }
}

template <class Code>
LSHKIT_INLINE Code code_at(const Problem& p, const void* codes, index_t row, index_t hash) {
  const index_t i = row * p.n_hashes + hash;
  return Code(p.code_bytes == 1 ? static_cast<const std::uint8_t*>(codes)[i]
                                : static_cast<const std::uint16_t*>(codes)[i]);
}

// Code: the type that codes are compared and collisions counted in.
template <class Code>
void pairs(const Problem& p) {
  Cut cut{p.scratch};
  PairScratch s(p, cut);
  Code* block_codes = static_cast<Code*>(s.block_codes);
  const index_t d = p.query.columns, dv = p.value.columns;
  const Visitor visit_keys = visitor(s, p);
  for (index_t count = 0; count <= p.n_hashes; ++count) s.weight[count] = p.scale * float(count);
  clear(p.query_grad);
  for (index_t j0 = 0; j0 < p.key.rows; j0 += kBlock) {
    const index_t n = smaller(kBlock, p.key.rows - j0);
    pack<float>(n, d, s.d, {p.key.row(j0), p.key.stride}, 1, p.key_inverse_norm + j0, s.key);
    pack<float>(n, dv, s.dv, {p.value.row(j0), p.value.stride}, 1, nullptr, s.value);
    std::memset(s.key_grad, 0, sizeof(float) * kBlock * s.d);
    std::uint64_t valid[kBlock / kWord] = {};
    for (index_t j = 0; j < n; ++j) {
      valid[j / kWord] |= std::uint64_t(p.key_valid[j0 + j] != 0) << (j % kWord);
      for (index_t h = 0; h < p.n_hashes; ++h)
        block_codes[h * kBlock + j] = code_at<Code>(p, p.key_codes, j0 + j, h);
    }
    for (index_t i = p.causal ? j0 : 0; i < p.query.rows; ++i) {
      if (!p.query_valid[i]) continue;
      const Code* codes = static_cast<const Code*>(p.query_codes) + i * p.n_hashes;
      if (sizeof(Code) != std::size_t(p.code_bytes)) {
        Code* wide = static_cast<Code*>(s.query_codes);
        for (index_t h = 0; h < p.n_hashes; ++h) wide[h] = code_at<Code>(p, p.query_codes, i, h);
        codes = wide;
      }
      Code counts[kBlock];
      count_collisions(codes, block_codes, p.n_hashes, counts);
      std::uint8_t keys[kBlock + 4];
      float weights[kBlock + 4];
      int found = 0;
      LSHKIT_UNROLL
      for (int w = 0; w < kBlock / kWord; ++w) {
        std::uint64_t hits = nonzero(counts + w * kWord) & valid[w];
        const index_t last = i - j0 - w * kWord;  // key of the word that a causal query sees last
        if (p.causal && last < kWord - 1) hits &= last < 0 ? 0 : (std::uint64_t(2) << last) - 1;
        // Four at a time: the end of the loop is then guessed right more often than not. What is
        // listed too many is overwritten by the next word's or by the padding.
        const int count = __builtin_popcountll(hits);
        for (int t = 0; t < count; t += 4) LSHKIT_UNROLL
        for (int u = 0; u < 4; ++u, hits &= hits - 1) {
          const int key = w * kWord + __builtin_ctzll(hits | std::uint64_t(1) << 63);
          keys[found + t + u] = std::uint8_t(key);
          weights[found + t + u] = s.weight[counts[key]];
        }
        found += count;
      }
      if (!found) continue;
      for (int t = found; t < found + 3; ++t) {
        keys[t] = keys[0];
        weights[t] = 0;
      }
      visit_keys(p, s, i, keys, weights, found);
    }
    for (index_t j = 0; j < n; ++j)
      std::memcpy(p.key_grad.row(j0 + j), s.key_grad + j * s.d, sizeof(float) * d);
  }
}

}  // namespace

index_t lower_bound_pairs_scratch(const LowerBoundGradient& p) {
  Cut cut{nullptr};
  PairScratch scratch(p, cut);
  return cut.used;
}

void lower_bound_pairs(const LowerBoundGradient& p) {
  if (p.code_bytes == 1 && p.n_hashes < 256)
    pairs<std::uint8_t>(p);
  else
    pairs<std::uint16_t>(p);
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

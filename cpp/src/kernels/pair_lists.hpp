#pragma once
// Pairs of queries and a block of keys that are used, listed for several queries at a time: their
// probabilities are computed a register at a time, and pairs by the hundred hide how long that
// takes.
#include "colliding_softmax.hpp"
#include "collision_probability.hpp"
#include "collisions.hpp"
#include "matmul.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int W = kLanes<float>;
using F = Vec<float>;

// In the place of a pair's cosine: its probability is 1; it fills up the list.
constexpr float kCertain = 2, kNoPair = -2;

struct PairList {
  static constexpr int kFull = 256, kMost = kFull + kBlock + 2 * W;
  int n = 0, queries = 0;
  index_t query[kFull];
  int first[kFull + 1], count[kFull];  // of a query's pairs, padded to whole registers
  std::uint8_t key[kMost];
  float dot[kMost], cosine[kMost], weight[kMost];  // q . k; 1 / pi

  bool full() const { return n >= kFull || queries >= kFull; }
};

// The block of keys, and what belongs to it.
struct KeyBlock {
  index_t d, dv;       // padded
  float *key, *value;  // (kBlock, d) and (kBlock, dv)
  void *codes, *wide;  // (n_hashes, kBlock), and a query's (n_hashes), in the counting type
  index_t first = 0;
  int n = 0;
  std::uint64_t valid[kBlock / kWord] = {}, sinks[kBlock / kWord] = {};

  KeyBlock(const SoftmaxKeys& keys, index_t n_hashes, Cut& cut)
      : d(round_up(keys.key.columns, W)), dv(round_up(keys.value.columns, W)) {
    key = cut.take<float>(kBlock * d);
    value = cut.take<float>(kBlock * dv);
    codes = cut.take<std::uint16_t>(n_hashes * kBlock);
    wide = cut.take<std::uint16_t>(n_hashes);
  }

  template <class Code>
  LSHKIT_INLINE void fill(const SoftmaxKeys& k, const LshAttentionOptions& o, int code_bytes,
                          index_t j0) {
    first = j0;
    n = int(smaller(kBlock, k.key.rows - j0));
    // Rows that take no part are zeros, whatever they hold.
    pack<float>(n, k.key.columns, d, {k.key.row(j0), k.key.stride}, 1, nullptr, key);
    pack<float>(n, k.value.columns, dv, {k.value.row(j0), k.value.stride}, 1, nullptr, value);
    for (int w = 0; w < kBlock / kWord; ++w) valid[w] = sinks[w] = 0;
    for (int j = 0; j < n; ++j) {
      valid[j / kWord] |= std::uint64_t(k.valid[j0 + j] != 0) << (j % kWord);
      sinks[j / kWord] |= std::uint64_t(j0 + j < k.last_sink) << (j % kWord);
      if (!k.valid[j0 + j]) {
        std::memset(key + j * d, 0, sizeof(float) * d);
        std::memset(value + j * dv, 0, sizeof(float) * dv);
      }
      for (index_t h = 0; h < o.n_hashes; ++h) {
        const index_t at = (j0 + j) * o.n_hashes + h;
        static_cast<Code*>(codes)[h * kBlock + j] =
            Code(code_bytes == 1 ? static_cast<const std::uint8_t*>(k.codes)[at]
                                 : static_cast<const std::uint16_t*>(k.codes)[at]);
      }
    }
  }
};

// Bits [first, last) of the block's, those of word w.
LSHKIT_INLINE std::uint64_t range_bits(index_t first, index_t last, int w) {
  first = larger(0, first - w * kWord);
  last = smaller(kWord, last - w * kWord);
  if (first >= last) return 0;
  const std::uint64_t below = last == kWord ? ~std::uint64_t(0) : (std::uint64_t(1) << last) - 1;
  return below & ~((std::uint64_t(1) << first) - 1);
}

// Lists the keys of the block that query i uses, each with kCertain or 0 for its cosine. Returns
// their number; the list is filled up with kNoPair.
template <class Code>
LSHKIT_INLINE int list_keys(const LshAttentionOptions& o, int code_bytes, const KeyBlock& block,
                            const SoftmaxQueries& q, index_t i, PairList& list) {
  const Code* codes = static_cast<const Code*>(q.codes) + i * o.n_hashes;
  if (sizeof(Code) != std::size_t(code_bytes)) {
    Code* wide = static_cast<Code*>(block.wide);
    const auto* narrow = static_cast<const std::uint8_t*>(q.codes) + i * o.n_hashes;
    for (index_t h = 0; h < o.n_hashes; ++h) wide[h] = narrow[h];
    codes = wide;
  }
  Code counts[kBlock];
  count_collisions(codes, static_cast<const Code*>(block.codes), o.n_hashes, counts);
  if (o.weighting == Weighting::magicpig)
    for (int j = 0; j < kBlock; ++j) counts[j] = Code(counts[j] >> 1);
  const index_t at = q.position + i - block.first;  // the query's own column
  const index_t end = o.causal ? at + 1 : kBlock;
  const bool all_certain = o.weighting == Weighting::none;
  std::uint8_t* keys = list.key + list.n;
  float* cosine = list.cosine + list.n;
  int found = 0;
  for (int w = 0; w < kBlock / kWord; ++w) {
    const std::uint64_t seen = block.valid[w] & range_bits(0, end, w);
    const std::uint64_t certain =
        block.sinks[w] | range_bits(at - o.window + 1, o.causal ? at + 1 : at + o.window, w);
    std::uint64_t hits = (nonzero(counts + w * kWord) | certain) & seen;
    const std::uint64_t sure = all_certain ? ~std::uint64_t(0) : certain;
    // Four at a time, as in for_each_query; what is listed too many is overwritten.
    const int count = __builtin_popcountll(hits);
    for (int t = 0; t < count; t += 4) LSHKIT_UNROLL
    for (int u = 0; u < 4; ++u, hits &= hits - 1) {
      const int bit = __builtin_ctzll(hits | std::uint64_t(1) << 63);
      keys[found + t + u] = std::uint8_t(w * kWord + bit);
      cosine[found + t + u] = (sure >> bit & 1) ? kCertain : 0;
    }
    found += count;
  }
  const int padded = int(round_up(found, W));
  for (int t = found; t < padded; ++t) {
    keys[t] = keys[0];
    cosine[t] = kNoPair;
  }
  return found;
}

// 1 / pi of the listed pairs, zero where there is none.
LSHKIT_INLINE void weigh(const LshAttentionOptions& o, PairList& list) {
  const float m = float(o.n_hashes);
  const F one = broadcast(1.0f), zero = {}, smallest = broadcast(1e-20f);
  for (int t = 0; t < list.n; t += W) {
    const F x = load(list.cosine + t);
    F weight = one;
    if (o.weighting != Weighting::none) {
      const F p = probability<float>(x, o.n_bits), miss = log1p_minus(p);
      F pi = -expm1(m * miss);
      if (o.weighting == Weighting::magicpig) {
        // The difference cancels for small p; its series does not.
        const F series = p * p * (0.5f * m * (m - 1)) *
                         (1 - p * (2.0f / 3 * (m - 2)) + p * p * (0.25f * (m - 2) * (m - 3)));
        const F twice = pi - m * p * (expm1((m - 1) * miss) + 1);
        pi = select(m * p < broadcast(0.06f), series, twice);
      }
      weight = select(pi < smallest, zero, one / select(pi < smallest, one, pi));
    }
    weight = select(x > broadcast(1.5f), one, weight);
    store(list.weight + t, select(x < broadcast(-1.5f), zero, weight));
  }
}

// A row in N registers, or (N = 0) in memory, of n registers.
template <int N>
struct Row {
  F lanes[N ? N : 1];
  const float* memory;
  int n;

  // to: a padded row, where the tensor's own has no whole registers.
  LSHKIT_INLINE Row(const float* x, index_t columns, int registers, float* to)
      : memory(to), n(N ? N : registers) {
    for (int c = 0; c < n; ++c)
      store(to + c * W, load_first(x + c * W, int(smaller(columns - c * W, W))));
    if (N) LSHKIT_UNROLL
    for (int c = 0; c < N; ++c) lanes[c] = load(to + c * W);
  }
  LSHKIT_INLINE F at(int c) const { return N ? lanes[N ? c : 0] : load(memory + c * W); }
};

// Hidden from the compiler, which would else compute an address for each register of a row.
LSHKIT_INLINE index_t row_offset(std::uint8_t key, index_t stride) {
  index_t at = key * stride;
  asm("" : "+r"(at));
  return at;
}

// out[t] = row . rows[keys[t]], for count of them, to a multiple of four.
template <int N>
LSHKIT_INLINE void dots(const Row<N>& row, const float* rows, index_t stride,
                        const std::uint8_t* keys, int count, float* out) {
  for (int t = 0; t < count; t += 4) {
    F dot[4] = {};
    LSHKIT_UNROLL
    for (int u = 0; u < 4; ++u) {
      const float* x = rows + row_offset(keys[t + u], stride);
      LSHKIT_UNROLL
      for (int c = 0; c < row.n; ++c) dot[u] += row.at(c) * load(x + c * W);
    }
    const Vec4 sums = sum_lanes4(dot[0], dot[1], dot[2], dot[3]);
    std::memcpy(out + t, &sums, sizeof sums);
  }
}

// Lists query i's pairs with their products and cosines. Returns how many they are.
template <class Code, int N>
LSHKIT_NOINLINE int append(const LshAttentionOptions& o, int code_bytes, const SoftmaxKeys& k,
                           const KeyBlock& block, const SoftmaxQueries& q, index_t i, float* row_of,
                           PairList& list) {
  const int found = list_keys<Code>(o, code_bytes, block, q, i, list);
  if (!found) return 0;
  const Row<N> row(q.query.row(i), q.query.columns, int(block.d / W), row_of);
  const std::uint8_t* keys = list.key + list.n;
  float *dot = list.dot + list.n, *cosine = list.cosine + list.n;
  dots(row, block.key, block.d, keys, found, dot);
  const float* inverse = k.inverse_norm + block.first;
  const float own = q.inverse_norm[i];
  for (int t = 0; t < found; ++t) {
    const float other = inverse[keys[t]];
    // Rows of zeros have the code 0 and no angle: alike to each other, at right angles to others.
    const float x = own == 0 && other == 0 ? 1 : dot[t] * own * other;
    cosine[t] = cosine[t] == kCertain ? kCertain : x;
  }
  const int padded = int(round_up(found, W));
  for (int t = found; t < padded; ++t) dot[t] = dot[0];
  list.query[list.queries] = i;
  list.first[list.queries] = list.n;
  list.count[list.queries++] = found;
  list.n += padded;
  list.first[list.queries] = list.n;
  return found;
}

// The registers of a row where keys and values have equally many and there is a kernel, else 0.
LSHKIT_INLINE int row_registers(const SoftmaxKeys& k) {
  const index_t n = round_up(k.key.columns, W) / W;
  if (n != round_up(k.value.columns, W) / W) return 0;
  return n == 2 || n == 4 || n == 8 ? int(n) : 0;
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

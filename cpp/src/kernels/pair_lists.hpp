#pragma once
// Pairs of queries and a block of keys that are used. They are found by bits: for each hash and
// bucket those of the block's keys in it, so that a query takes 32 bytes a hash for 256 keys; or,
// where few collide, by going through buckets of all rows. Then they are listed, for several
// queries at a time: their probabilities are computed a register at a time, and pairs by the
// hundred hide how long that takes.
#include <type_traits>

#include "colliding_softmax.hpp"
#include "collision_probability.hpp"
#include "matmul.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int W = kLanes<float>;
using F = Vec<float>;

constexpr int kWord = 64;
// Keys of a block: where few collide, enough for a query to find some, as long as keys and values
// take a MB.
constexpr int kKeys = 256, kWords = kKeys / kWord, kMostKeys = 2048;
constexpr index_t kBlockFloats = 1 << 18;
constexpr int kHashes = 32;  // whose buckets' bits are kept at a time: 256 KB of 8-bit codes
// A bit for each key of a block, in registers.
struct Bits {
  static constexpr int kBytes = kVectorBytes < kKeys / 8 ? kVectorBytes : kKeys / 8;
  static constexpr int n = kKeys / 8 / kBytes;
  typedef std::uint64_t Part __attribute__((vector_size(kBytes)));
  Part part[n];

  LSHKIT_INLINE explicit Bits(const std::uint64_t* words) { std::memcpy(part, words, kKeys / 8); }
  LSHKIT_INLINE void store(std::uint64_t* words) const { std::memcpy(words, part, kKeys / 8); }
  LSHKIT_INLINE void add(const Bits& more) {
    for (int i = 0; i < n; ++i) part[i] |= more.part[i];
  }
  LSHKIT_INLINE void keep(const Bits& those) {
    for (int i = 0; i < n; ++i) part[i] &= those.part[i];
  }
};

// In the place of a pair's cosine: its probability is 1; it fills up the list.
constexpr float kCertain = 2, kNoPair = -2;

struct PairList {
  static constexpr int kFull = 256, kMost = kFull + kMostKeys + 2 * W;
  int n = 0, queries = 0;
  index_t query[kFull];
  int first[kFull + 1], count[kFull];  // of a query's pairs, padded to whole registers
  std::uint16_t key[kMost];
  float dot[kMost], cosine[kMost], weight[kMost];  // q . k; 1 / pi

  bool full() const { return n >= kFull || queries >= kFull; }
};

// The block of keys, and what belongs to it.
struct KeyBlock {
  index_t d, dv;       // padded
  index_t most;        // keys of a block, a multiple of kKeys
  float *key, *value;  // (most, d) and (most, dv)
  // By comparison: (kHashes, n_low + n_high, kWords), by the codes' low bytes and by their high
  // ones
  std::uint64_t* buckets = nullptr;
  std::uint64_t* hits;      // (n_queries, words), the block's keys that collide
  std::uint64_t* once;      // magicpig: those in one hash at least
  std::uint64_t* all_hits;  // the hits of all blocks, all_stride words each, or null
  std::uint64_t* row;       // (2, words of all keys), of one query
  index_t words, n_blocks, all_stride = 0, n_low, n_high;
  index_t first = 0;
  int n = 0;
  bool has_sinks = false;
  std::uint64_t valid[kMostKeys / kWord], sinks[kMostKeys / kWord];

  // keep_all: the hits of all blocks are found at once.
  KeyBlock(const SoftmaxKeys& keys, const LshAttentionOptions& o, index_t n_queries,
           bool by_buckets, bool keep_all, Cut& cut)
      : d(round_up(keys.key.columns, W)),
        dv(round_up(keys.value.columns, W)),
        most(kKeys),
        n_low(index_t(1) << smaller(o.n_bits, 8)),
        n_high(o.n_bits > 8 ? index_t(1) << (o.n_bits - 8) : 0) {
    while (by_buckets && 2 * most <= kMostKeys && 2 * most * (d + dv) <= kBlockFloats) most *= 2;
    words = most / kWord;
    n_blocks = (keys.key.rows + most - 1) / most;
    key = cut.take<float>(most * d);
    value = cut.take<float>(most * dv);
    if (!by_buckets)
      buckets = cut.take<std::uint64_t>(smaller(kHashes, o.n_hashes) * (n_low + n_high) * kWords);
    all_hits = hits = once = row = nullptr;
    if (keep_all) {
      all_stride = n_queries * words + kWord;  // no power of two: blocks share cache sets
      all_hits = cut.take<std::uint64_t>(n_blocks * all_stride);
      row = cut.take<std::uint64_t>(2 * n_blocks * words);
    } else {
      hits = cut.take<std::uint64_t>(n_queries * words);
      if (o.weighting == Weighting::magicpig) once = cut.take<std::uint64_t>(n_queries * words);
    }
  }

  LSHKIT_INLINE void fill(const SoftmaxKeys& k, index_t j0) {
    first = j0;
    n = int(smaller(most, k.key.rows - j0));
    has_sinks = j0 < k.last_sink;
    // Rows that take no part are zeros, whatever they hold.
    pack<float>(n, k.key.columns, d, {k.key.row(j0), k.key.stride}, 1, nullptr, key);
    pack<float>(n, k.value.columns, dv, {k.value.row(j0), k.value.stride}, 1, nullptr, value);
    for (index_t w = 0; w < most / kWord; ++w) valid[w] = sinks[w] = 0;
    for (int j = 0; j < n; ++j) {
      valid[j / kWord] |= std::uint64_t(k.valid[j0 + j] != 0) << (j % kWord);
      sinks[j / kWord] |= std::uint64_t(j0 + j < k.last_sink) << (j % kWord);
      if (!k.valid[j0 + j]) {
        std::memset(key + j * d, 0, sizeof(float) * d);
        std::memset(value + j * dv, 0, sizeof(float) * dv);
      }
    }
  }

  void clear_hits(index_t n_queries) const {
    std::memset(hits, 0, sizeof(std::uint64_t) * n_queries * words);
    if (once) std::memset(once, 0, sizeof(std::uint64_t) * n_queries * words);
  }
};

// Marks key j of those that hits tell of; Twice: from the second time on.
template <bool Twice>
LSHKIT_INLINE void mark(std::uint64_t* hits, std::uint64_t* once, index_t j) {
  const std::uint64_t bit = std::uint64_t(1) << (j % kWord);
  hits[j / kWord] |= Twice ? once[j / kWord] & bit : bit;
  if (Twice) once[j / kWord] |= bit;
}

// hits of the queries [begin, end): the block's keys that collide in some hash or, Twice, in two.
template <class Code, bool Twice>
LSHKIT_NOINLINE void find_hits(const LshAttentionOptions& o, const SoftmaxKeys& k,
                               const KeyBlock& block, const SoftmaxQueries& q, index_t begin,
                               index_t end) {
  constexpr bool kHigh = sizeof(Code) > 1;
  const index_t n_hashes = o.n_hashes, table = (block.n_low + block.n_high) * kWords;
  const Code* key_codes = static_cast<const Code*>(k.codes) + block.first * n_hashes;
  const Code* query_codes = static_cast<const Code*>(q.codes);
  block.clear_hits(q.query.rows);
  for (index_t h0 = 0; h0 < n_hashes; h0 += kHashes) {
    const index_t group = smaller(kHashes, n_hashes - h0);
    std::memset(block.buckets, 0, sizeof(std::uint64_t) * group * table);
    for (int j = 0; j < block.n; ++j) {
      const std::uint64_t bit = std::uint64_t(1) << (j % kWord);
      for (index_t h = 0; h < group; ++h) {
        const index_t code = key_codes[j * n_hashes + h0 + h];
        std::uint64_t* words = block.buckets + h * table + j / kWord;
        words[(code & 255) * kWords] |= bit;
        if (kHigh) words[(block.n_low + (code >> 8)) * kWords] |= bit;
      }
    }
    for (index_t i = begin; i < end; ++i) {
      const Code* codes = query_codes + i * n_hashes + h0;
      std::uint64_t* hits = block.hits + i * kWords;
      Bits more(hits), some(Twice ? block.once + i * kWords : hits);
      LSHKIT_UNROLL
      for (index_t h = 0; h < group; ++h) {
        const std::uint64_t* words = block.buckets + h * table;
        const index_t code = codes[h];
        Bits keys(words + (code & 255) * kWords);
        if (kHigh) keys.keep(Bits(words + (block.n_low + (code >> 8)) * kWords));
        if (Twice) {
          Bits again = keys;
          again.keep(some);
          more.add(again);
        }
        some.add(keys);
      }
      (Twice ? more : some).store(hits);
      if (Twice) some.store(block.once + i * kWords);
    }
  }
}

// The same for all blocks, from the buckets of the keys that take part.
template <class Code, bool Twice>
LSHKIT_NOINLINE void find_all_hits(const LshAttentionOptions& o, const BucketRows& keys,
                                   const KeyBlock& block, const SoftmaxQueries& q) {
  const Code* codes = static_cast<const Code*>(q.codes);
  const index_t all_words = block.n_blocks * block.words;
  for (index_t i = 0; i < q.query.rows; ++i, codes += o.n_hashes) {
    const index_t last = o.causal ? q.position + i : keys.n_rows;
    std::memset(block.row, 0, sizeof(std::uint64_t) * (Twice ? 2 : 1) * all_words);
    for (index_t h0 = 0; h0 < o.n_hashes; h0 += kHashes) {
      // Buckets lie far from each other: all of them are on their way before one is read.
      const std::int32_t *begin[kHashes], *end[kHashes];
      const int group = int(smaller(kHashes, o.n_hashes - h0));
      for (int h = 0; h < group; ++h) {
        const std::int32_t* start =
            keys.start + (h0 + h) * (keys.n_buckets + 1) + index_t(codes[h0 + h]);
        const std::int32_t* order = keys.order + (h0 + h) * keys.n_rows;
        begin[h] = order + start[0];
        end[h] = order + start[1];
        for (int line = 0; line < 3; ++line) __builtin_prefetch(begin[h] + 16 * line);
      }
      for (int h = 0; h < group; ++h)
        for (const std::int32_t* j = begin[h]; j < end[h]; ++j) {
          if (*j > last) break;
          mark<Twice>(block.row, block.row + all_words, *j);
        }
    }
    for (index_t b = 0; b < block.n_blocks; ++b)
      std::memcpy(block.all_hits + b * block.all_stride + i * block.words,
                  block.row + b * block.words, sizeof(std::uint64_t) * block.words);
  }
}

// The same for a block, from the buckets of the queries [begin, end) of a head.
template <class Code, bool Twice>
LSHKIT_NOINLINE void find_queries(const LshAttentionOptions& o, const BucketRows& queries,
                                  const SoftmaxKeys& k, const KeyBlock& block, index_t begin,
                                  index_t end) {
  block.clear_hits(end);
  for (index_t h = 0; h < o.n_hashes; ++h) {
    const Code* codes = static_cast<const Code*>(k.codes) + block.first * o.n_hashes + h;
    const std::int32_t* order = queries.order + h * queries.n_rows;
    for (index_t j = 0; j < block.n; ++j) {
      const std::int32_t* start =
          queries.start + h * (queries.n_buckets + 1) + codes[j * o.n_hashes];
      for (index_t t = start[1]; t-- > start[0] && order[t] >= begin;) {
        const index_t at = order[t] * block.words;
        mark<Twice>(block.hits + at, block.once + at, j);
      }
    }
  }
}

// run(code, twice): their types are those of the codes, and of whether two collisions are wanted.
template <class Run>
LSHKIT_INLINE void for_codes(const LshAttentionOptions& o, int code_bytes, const Run& run) {
  using Yes = std::true_type;
  using No = std::false_type;
  if (o.weighting == Weighting::magicpig)
    code_bytes == 1 ? run(std::uint8_t(), Yes()) : run(std::uint16_t(), Yes());
  else
    code_bytes == 1 ? run(std::uint8_t(), No()) : run(std::uint16_t(), No());
}

// Bits [first, last) of the block's, those of word w.
LSHKIT_INLINE std::uint64_t range_bits(index_t first, index_t last, int w) {
  first = larger(0, first - w * kWord);
  last = smaller(kWord, last - w * kWord);
  if (first >= last) return 0;
  const std::uint64_t below = last == kWord ? ~std::uint64_t(0) : (std::uint64_t(1) << last) - 1;
  return below & ~((std::uint64_t(1) << first) - 1);
}

// Lists the keys of the block that query i uses, each with its inverse norm for the cosine, or -1
// where the probability is 1. Returns their number; the list is filled up to whole registers.
LSHKIT_INLINE int list_keys(const LshAttentionOptions& o, const SoftmaxKeys& k,
                            const KeyBlock& block, const SoftmaxQueries& q, index_t i,
                            PairList& list) {
  const index_t at = q.position + i - block.first;  // the query's own column
  const index_t end = o.causal ? at + 1 : block.n;
  const index_t first_near = at - o.window + 1, end_near = o.causal ? at + 1 : at + o.window;
  const bool some_certain = block.has_sinks || (first_near < block.n && end_near > 0);
  const std::uint64_t* hits = block.hits + i * block.words;
  const int words = (block.n + kWord - 1) / kWord;
  std::uint64_t used[kMostKeys / kWord], certain[kMostKeys / kWord];
  if (some_certain) {
    for (int w = 0; w < words; ++w) {
      certain[w] = block.sinks[w] | range_bits(first_near, end_near, w);
      used[w] = (hits[w] | certain[w]) & block.valid[w];
    }
  } else {
    for (int w = 0; w < words; ++w) used[w] = hits[w] & block.valid[w];
  }
  if (end < block.n)
    for (int w = int(end / kWord); w < words; ++w) used[w] &= range_bits(0, end, w);
  std::uint16_t* keys = list.key + list.n;
  int found = 0;
  for (int w = 0; w < words; ++w) {
    // Four at a time, without a look whether there is one: the end of the loop is then guessed
    // right more often than not. What is listed too many is overwritten.
    std::uint64_t left = used[w];
    const int count = __builtin_popcountll(left);
    int t = 0;
    do {
      LSHKIT_UNROLL
      for (int u = 0; u < 4; ++u, left &= left - 1)
        keys[found + t + u] =
            std::uint16_t(w * kWord + __builtin_ctzll(left | std::uint64_t(1) << (kWord - 1)));
    } while ((t += 4) < count);
    found += count;
  }
  const float* inverse = k.inverse_norm + block.first;
  float* cosine = list.cosine + list.n;
  if (o.weighting == Weighting::none)
    for (int t = 0; t < found; ++t) cosine[t] = -1;
  else
    for (int t = 0; t < found; ++t) cosine[t] = inverse[keys[t]];
  if (some_certain)
    for (int t = 0; t < found; ++t)
      if (certain[keys[t] / kWord] >> (keys[t] % kWord) & 1) cosine[t] = -1;
  for (int t = found; t < round_up(found, W); ++t) {
    keys[t] = keys[0];
    cosine[t] = 0;
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

// out[t] = row . rows[keys[t]], for count of them, to a multiple of four.
template <int N>
LSHKIT_INLINE void dots(const Row<N>& row, const float* rows, index_t stride,
                        const std::uint16_t* keys, int count, float* out) {
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
template <int N>
LSHKIT_NOINLINE int append(const LshAttentionOptions& o, const SoftmaxKeys& k,
                           const KeyBlock& block, const SoftmaxQueries& q, index_t i, float* row_of,
                           PairList& list) {
  const int found = list_keys(o, k, block, q, i, list);
  if (!found) return 0;
  const Row<N> row(q.query.row(i), q.query.columns, int(block.d / W), row_of);
  const std::uint16_t* keys = list.key + list.n;
  float *dot = list.dot + list.n, *cosine = list.cosine + list.n;
  dots(row, block.key, block.d, keys, found, dot);
  const int padded = int(round_up(found, W));
  for (int t = found; t < padded; ++t) dot[t] = dot[0];
  const F own = broadcast(q.inverse_norm[i]), zero = {};
  for (int t = 0; t < padded; t += W) {
    const F inverse = load(cosine + t);
    F x = load(dot + t) * own * inverse;
    // Rows of zeros have the code 0 and no angle: alike to each other, at right angles to others.
    if (q.inverse_norm[i] == 0) x = select(inverse == zero, broadcast(1.0f), x);
    store(cosine + t, select(inverse < zero, broadcast(kCertain), x));
  }
  for (int t = found; t < padded; ++t) cosine[t] = kNoPair;
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

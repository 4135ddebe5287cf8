// The expectation of bfloat16 rows (see kernels/expected_attention.cpp), with products of bfloat16
// and sums in float32. A chunk of keys is packed once and meets the queries block by block. By
// tiles also the samples of short sequences: of each pair the codes that it shares are counted in
// the place of its probability, in some n_hashes / 50 cycles, where tables take a time per row.
//
// Rows are scaled by powers of two alone, which rounds nothing, so cosines are those of float32.
// Rounded to bfloat16, by 2^-8 of each at most: probabilities, the weights of pairs in the
// gradient, and the output's gradient where it is summed for the values; g . v takes two parts of
// it. Counts are exact.
#include "kernels/bfloat16/tiles.hpp"
#include "kernels/collision_probability.hpp"
#include "kernels/collisions.hpp"
#include "kernels/kernels.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr index_t kKeys = 128, kQueries = 64;  // rows of a chunk and of a block, at most
constexpr index_t kPair = 2 * kTile;           // rows are padded to pairs of tiles
constexpr int W = kLanes<float>;
constexpr int kAtOnce = kPair / W;  // registers
using F = Vec<float>;

// The power of two that brings a row to a norm of 1/2 to 1; 0 for one without an inverse norm.
float power_near(float inverse_norm) {
  if (!(inverse_norm > 0)) return 0;
  std::uint32_t bits;
  std::memcpy(&bits, &inverse_norm, sizeof(bits));
  bits &= 0x7f800000;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return power < 0x1p-126f ? 0x1p-126f : power;
}

// Rows to be packed, and the factors of each.
struct Listed {
  const float* row[kKeys];
  float factor[kKeys];
  index_t n = 0;

  void add(const float* x, float f) {
    row[n] = x;
    factor[n++] = f;
  }
};

// What is packed of a head's queries, blocks of kQueries rows one after the other.
struct Queries {
  index_t rows;  // padded
  Word *query, *query_t, *grad, *grad_rest, *grad_t;
  float *scale, *bias;

  Queries(index_t n, index_t d, index_t dv, bool gradient, Cut& cut) : rows(round_up(n, kPair)) {
    query = cut.take<Word>(rows * kTile * depth_of(d));
    scale = cut.take<float>(rows);
    if (!gradient) return;
    query_t = cut.take<Word>(rows / 2 * kTile * tiles_of(d));
    grad = cut.take<Word>(rows * kTile * depth_of(dv));
    grad_rest = cut.take<Word>(rows * kTile * depth_of(dv));
    grad_t = cut.take<Word>(rows / 2 * kTile * tiles_of(dv));
    bias = cut.take<float>(rows);
  }
};

// The codes that a block's queries share with a chunk's keys, in the place of probabilities. Code:
// the type of a code and a count, void for no counts.
template <class Code>
class Counts {
 public:
  static constexpr bool kUsed = true;

  Counts(const CountedPairs& codes, index_t n_queries, void* memory)
      : queries_(static_cast<const Code*>(codes.query_codes)),
        keys_(static_cast<const Code*>(codes.key_codes)),
        n_hashes_(codes.n_hashes),
        n_queries_(n_queries),
        counts_(static_cast<Code*>(memory)),
        chunk_(counts_ + kQueries * kBlock) {}
  void list(const std::int32_t* keys, index_t n) const {
    for (index_t j = 0; j < n; ++j)
      for (index_t h = 0; h < n_hashes_; ++h)
        chunk_[h * kBlock + j] = keys_[keys[j] * n_hashes_ + h];
  }
  void count(index_t first, index_t rows) const {
    for (index_t r = 0; r < rows; ++r)
      if (first + r < n_queries_)
        count_collisions(queries_ + (first + r) * n_hashes_, chunk_, n_hashes_,
                         counts_ + r * kBlock);
      else
        std::memset(counts_ + r * kBlock, 0, sizeof(Code) * kBlock);
  }
  LSHKIT_INLINE F at(index_t row, index_t key) const {
    typedef Code Lanes __attribute__((vector_size(W * sizeof(Code))));
    Lanes counts;
    std::memcpy(&counts, counts_ + row * kBlock + key, sizeof(counts));
    return __builtin_convertvector(__builtin_convertvector(counts, Int<float>), F);
  }
  float scale() const { return 1 / float(n_hashes_); }

 private:
  const Code *queries_, *keys_;
  index_t n_hashes_, n_queries_;
  Code *counts_, *chunk_;  // (kQueries, kBlock), (n_hashes, kBlock)
};
static_assert(kBlock == kKeys, "");
template <>
struct Counts<void> {
  static constexpr bool kUsed = false;

  Counts(const CountedPairs&, index_t, void*) {}
  void list(const std::int32_t*, index_t) const {}
  void count(index_t, index_t) const {}
  F at(index_t, index_t) const { return F{}; }
  float scale() const { return 1; }
};

struct Scratch {
  index_t d, dv;  // tiles of columns
  Queries queries;
  std::int32_t* keys;  // the chunk's rows
  float* key_scale;
  Word *rows, *key, *key_pairs, *value, *pair, *pair_pairs, *probability_pairs;
  float *x, *s, *out, *key_grad, *value_grad;
  void* counts;

  Scratch(index_t n_queries, index_t n_features, index_t n_values, bool gradient, index_t n_hashes,
          Cut& cut)
      : d(tiles_of(n_features)),
        dv(tiles_of(n_values)),
        queries(n_queries, n_features, n_values, gradient, cut) {
    const index_t deep = larger(depth_of(n_features), depth_of(n_values)), wide = larger(d, dv);
    keys = cut.take<std::int32_t>(kKeys);
    key_scale = cut.take<float>(kKeys);
    rows = cut.take<Word>(kKeys * kTile * deep);
    key = cut.take<Word>(kKeys * kTile * deep);
    value = cut.take<Word>(kKeys * kTile * deep);
    pair = cut.take<Word>(kQueries * kKeys / 2);
    x = cut.take<float>(kQueries * kKeys);
    out = cut.take<float>(kQueries * kTile * wide);
    counts = cut.take<std::uint16_t>(n_hashes ? (kQueries + n_hashes) * kBlock : 0);
    if (!gradient) return;
    key_pairs = cut.take<Word>(kKeys / 2 * kTile * d);
    pair_pairs = cut.take<Word>(kQueries * kKeys / 2);
    probability_pairs = cut.take<Word>(kQueries * kKeys / 2);
    s = cut.take<float>(kQueries * kKeys);
    key_grad = cut.take<float>(kKeys * kTile * d);
    value_grad = cut.take<float>(kKeys * kTile * dv);
  }
};

// counted: and of a size that products of counts keep, from 2^-126 (tiles take smaller ones for
// zero) to 2^100, or zero.
bool finite(Matrix<const float> m, const std::uint8_t* valid, bool counted = false) {
  F check = {};
  Int<float> beyond = {};
  for (index_t r = 0; r < m.rows; ++r)
    for (index_t c = 0; (!valid || valid[r]) && c < m.columns; c += W) {
      const F x = load_first(m.row(r) + c, int(m.columns - c));
      check += x - x;
      const Int<float> size = Int<float>(x) & 0x7fffffff;
      beyond |= ((size > 0) & (size < 0x00800000)) | (size >= 0x71800000);
    }
  if (counted)
    for (int i = 0; i < W; ++i)
      if (beyond[i]) return false;
  return sum_lanes(check) == 0;
}

// Calls chunk(n) with the next keys that take part, n of them, listed in s.keys. Causal ones are
// fewer: a block of queries is multiplied by all of a chunk.
template <class Body>
LSHKIT_INLINE void for_key_chunks(const Scratch& s, index_t n_keys, const std::uint8_t* valid,
                                  bool causal, const Body& chunk) {
  const index_t most = causal ? kQueries : kKeys;
  for (index_t next = 0; next < n_keys;) {
    index_t n = 0;
    for (; next < n_keys && n < most; ++next)
      if (!valid || valid[next]) s.keys[n++] = std::int32_t(next);
    if (n > 0) chunk(n);
  }
}
// block(first row, padded rows) for the blocks with a query that sees one of the chunk's keys.
template <class Body>
LSHKIT_INLINE void for_query_blocks(const Scratch& s, bool causal, index_t first_query,
                                    const Body& block) {
  const index_t first = causal ? larger(0, s.keys[0] - first_query) : 0;
  for (index_t i = first / kQueries * kQueries; i < s.queries.rows; i += kQueries)
    block(i, smaller(kQueries, s.queries.rows - i));
}
// Of a chunk's n keys the first so many are seen by a query.
LSHKIT_INLINE index_t keys_seen(const Scratch& s, index_t n, bool causal, index_t query) {
  while (causal && n > 0 && s.keys[n - 1] > query) --n;
  return n;
}

// Unit rows but for scale_r, as A.
void pack_queries(Matrix<const float> x, const float* inverse_norm, const Queries& q) {
  const index_t depth = depth_of(x.columns);
  for (index_t i = 0; i < q.rows; i += kQueries) {
    Listed rows;
    for (index_t r = i; r < smaller(i + kQueries, q.rows); ++r) {
      const float power = r < x.rows ? power_near(inverse_norm[r]) : 0;
      q.scale[r] = power > 0 ? inverse_norm[r] / power : 0;
      rows.add(power > 0 ? x.row(r) : nullptr, power);
    }
    pack_rows(rows.n, x.columns, rows.row, rows.factor, q.query + i * kTile * depth);
  }
}
// The factors that the gradient has besides.
void pack_gradients(const ExpectedGradient<float>& p, const Queries& q) {
  const index_t d = p.query.columns, dv = p.grad.columns;
  const auto transpose_tiles = [](Word* tiles, index_t n) {
    alignas(64) Word tile[kTileSize];
    for (; n-- > 0; tiles += kTileSize) {
      std::memcpy(tile, tiles, sizeof(tile));
      transpose_tile(tile, tiles);
    }
  };
  for (index_t i = 0; i < q.rows; i += kQueries) {
    Listed rows, grads;
    for (index_t r = i; r < smaller(i + kQueries, q.rows); ++r) {
      const bool valid = r < p.query.rows && p.query_valid[r];
      rows.add(valid ? p.query.row(r) : nullptr, valid ? power_near(p.query_inverse_norm[r]) : 0);
      grads.add(valid ? p.grad.row(r) : nullptr, valid);
      q.bias[r] = valid && p.bias ? p.bias[r] : 0;
    }
    const index_t depth = depth_of(rows.n);
    Word *query_t = q.query_t + i / 2 * kTile * tiles_of(d),
         *grad_t = q.grad_t + i / 2 * kTile * tiles_of(dv);
    pack_pairs(rows.n, d, rows.row, rows.factor, query_t);
    transpose_tiles(query_t, tiles_of(d) * depth);
    const index_t at = i * kTile * depth_of(dv);
    pack_rows(grads.n, dv, grads.row, grads.factor, q.grad + at, q.grad_rest + at);
    pack_pairs(grads.n, dv, grads.row, grads.factor, grad_t);
    transpose_tiles(grad_t, tiles_of(dv) * depth);
  }
}

// A chunk's rows as B, summed over their columns.
void pack_transposed(const Listed& x, index_t columns, const Scratch& s, Word* b) {
  pack_rows(x.n, columns, x.row, x.factor, s.rows);
  for (index_t t = 0; t < tiles_of(x.n) * depth_of(columns); ++t)
    transpose_tile(s.rows + t * kTileSize, b + t * kTileSize);
}
// Lists the chunk's keys, with what their powers of two leave in s.key_scale, and values. Returns
// their number, padded. No inverse norms: no keys.
index_t list_keys(Matrix<const float> key, Matrix<const float> value, const float* inverse_norm,
                  index_t n, const Scratch& s, Listed& keys, Listed& values) {
  const index_t padded = round_up(n, kPair);
  for (index_t r = 0; r < padded; ++r) {
    const index_t row = s.keys[r < n ? r : 0];
    const float power = r < n && inverse_norm ? power_near(inverse_norm[row]) : 0;
    s.key_scale[r] = power > 0 ? inverse_norm[row] / power : 0;
    keys.add(inverse_norm ? key.row(row) : nullptr, power);
    values.add(value.row(row), r < n);
  }
  return padded;
}

LSHKIT_INLINE F lanes_before(F x, index_t lane, index_t end) {  // zero from `end` on
  if (lane + W <= end) return x;
  Int<float> index;
  for (int i = 0; i < W; ++i) index[i] = i;
  return select(index < int(end - lane), x, F{});
}
// y_r += tiles of C, rows and columns as y has them.
LSHKIT_INLINE void add_tiles(const float* c, index_t columns, index_t first, index_t rows,
                             Matrix<float> y) {
  for (index_t r = 0; r < smaller(rows, y.rows - first); ++r)
    for (index_t k = 0; k < y.columns; k += W) {
      const float* from = c + (r / kTile * columns + k / kTile) * kTileSize + r % kTile * kTile;
      float* to = y.row(first + r) + k;
      const int count = int(smaller(y.columns - k, W));
      store_first(to, load_first(to, count) + load(from + k % kTile), count);
    }
}
void clear(Matrix<float> m) {
  for (index_t i = 0; i < m.rows; ++i) std::memset(m.row(i), 0, sizeof(float) * m.columns);
}

void scale(Matrix<float> m, float factor) {
  for (index_t i = 0; i < m.rows; ++i)
    for (index_t c = 0; c < m.columns; ++c) m.row(i)[c] *= factor;
}

template <class Code>
bool sum(const ExpectedSum<float>& p, const CountedPairs& codes) {
  constexpr bool kCounted = Counts<Code>::kUsed;
  // Hidden, or with a count of zero, but 0 * NaN is NaN.
  if ((p.causal || kCounted) && !finite(p.value, p.key_valid, kCounted)) return false;
  const index_t d = p.query.columns, dv = p.value.columns;
  Cut cut{p.scratch};
  const Scratch s(p.out.rows, d, dv, false, codes.n_hashes, cut);
  const Counts<Code> counts(codes, p.out.rows, s.counts);
  const TileUse tiles;
  clear(p.out);
  if (p.row_sum) std::memset(p.row_sum, 0, sizeof(float) * p.out.rows);
  if (!kCounted) pack_queries(p.query, p.query_inverse_norm, s.queries);
  for_key_chunks(s, p.value.rows, p.key_valid, p.causal, [&](index_t n_keys) {
    Listed keys, values;
    const index_t nk = list_keys(p.key, p.value, p.key_inverse_norm, n_keys, s, keys, values);
    counts.list(s.keys, n_keys);
    if (!kCounted) pack_transposed(keys, d, s, s.key);
    pack_pairs(nk, dv, values.row, values.factor, s.value);
    for_query_blocks(s, p.causal, p.first_query, [&](index_t i, index_t nq) {
      counts.count(i, nq);
      if (!kCounted)
        multiply(tiles_of(nq), tiles_of(nk), depth_of(d), s.queries.query + i * kTile * depth_of(d),
                 s.key, s.x, false);
      for (index_t r = 0; r < nq; ++r) {
        const index_t seen = keys_seen(s, n_keys, p.causal, p.first_query + i + r);
        const F scale = broadcast<float>(kCounted ? 0 : s.queries.scale[i + r]);
        const float* x = s.x + r / kTile * nk * kTile + r % kTile * kTile;
        F sum = {};
        for (index_t first = 0; first < nk; first += kAtOnce * W) {
          F cosine[kAtOnce], weight[kAtOnce];
          LSHKIT_UNROLL
          for (int i = 0; i < kAtOnce; ++i) {
            const index_t c = first + i * W;
            if (kCounted)
              weight[i] = counts.at(r, c);
            else
              cosine[i] =
                  load(x + c / kTile * kTileSize + c % kTile) * scale * load(s.key_scale + c);
          }
          if (!kCounted) probabilities<float>(cosine, p.n_bits, weight);
          LSHKIT_UNROLL
          for (int i = 0; i < kAtOnce; ++i) {
            const index_t c = first + i * W;
            const Halves rounded = to_bfloat16(lanes_before(weight[i], c, seen));
            if (p.row_sum) sum += Bfloat16::widen(rounded);
            store_half(row_of_a(s.pair, depth_of(nk), r, c), rounded);
          }
        }
        if (p.row_sum && i + r < p.out.rows) p.row_sum[i + r] += sum_lanes(sum);
      }
      multiply(tiles_of(nq), s.dv, depth_of(nk), s.pair, s.value, s.out, false);
      add_tiles(s.out, s.dv, i, nq, p.out);
    });
  });
  if (kCounted) scale(p.out, counts.scale());
  return true;
}

template <class Code>
bool gradient(const ExpectedGradient<float>& p, const CountedPairs& codes) {
  constexpr bool kCounted = Counts<Code>::kUsed;
  if ((p.causal || kCounted) &&
      !(finite(p.value, p.key_valid, kCounted) && finite(p.grad, p.query_valid, kCounted)))
    return false;
  const index_t d = p.query.columns, dv = p.value.columns;
  Cut cut{p.scratch};
  const Scratch s(p.query.rows, d, dv, true, codes.n_hashes, cut);
  const Counts<Code> counts(codes, p.query.rows, s.counts);
  const F slope = broadcast<float>(0.5f * float(p.n_bits) * counts.scale());
  const Queries& q = s.queries;
  const TileUse tiles;
  const bool of_pairs = p.query_grad.data || p.key_grad.data;
  clear(p.query_grad);
  clear(p.key_grad);
  clear(p.value_grad);
  pack_queries(p.query, p.query_inverse_norm, q);
  pack_gradients(p, q);
  for_key_chunks(s, p.key.rows, p.key_valid, p.causal, [&](index_t n_keys) {
    Listed keys, values;
    const index_t nk = list_keys(p.key, p.value, p.key_inverse_norm, n_keys, s, keys, values);
    counts.list(s.keys, n_keys);
    if (!kCounted) pack_transposed(keys, d, s, s.key);
    pack_transposed(values, dv, s, s.value);
    pack_pairs(nk, d, keys.row, keys.factor, s.key_pairs);
    bool add = false;
    for_query_blocks(s, p.causal, 0, [&](index_t i, index_t nq) {
      // x: cosines; s: g . v, of both parts of g, since what is left of it may cancel
      const index_t rows = tiles_of(nq), columns = tiles_of(nk), deep = depth_of(dv);
      counts.count(i, nq);
      if (!kCounted)
        multiply(rows, columns, depth_of(d), q.query + i * kTile * depth_of(d), s.key, s.x, false);
      if (of_pairs) {
        multiply(rows, columns, deep, q.grad + i * kTile * deep, s.value, s.s, false);
        multiply(rows, columns, deep, q.grad_rest + i * kTile * deep, s.value, s.s, true);
      }
      index_t seen[kQueries];
      for (index_t r = 0; r < nq; ++r) seen[r] = keys_seen(s, n_keys, p.causal, i + r);
      for (index_t r = 0; r < nq; r += 2)
        for (index_t c = 0; c < nk; c += W) {
          const F scale = load(s.key_scale + c);
          F cosine[2], probability[2], weight[2], dot[2];
          LSHKIT_UNROLL
          for (int odd = 0; odd < 2; ++odd) {
            const index_t row = r + odd, at = (row / kTile * tiles_of(nk) + c / kTile) * kTileSize +
                                              row % kTile * kTile + c % kTile;
            dot[odd] = load(s.s + at) + q.bias[i + row];
            if (kCounted) {
              probability[odd] = counts.at(row, c);
              weight[odd] = probability[odd] * slope;
            } else {
              cosine[odd] = load(s.x + at) * q.scale[i + row] * scale;
            }
          }
          if (!kCounted) weights<float>(cosine, p.n_bits, p.weight, probability, weight);
          Halves rounded[2], scaled[2];
          LSHKIT_UNROLL
          for (int odd = 0; odd < 2; ++odd) {
            const index_t row = r + odd;
            const index_t end = seen[row];
            F pair = weight[odd] * dot[odd];
            if (kCounted) pair = select(weight[odd] > F{}, pair, F{});  // not of an infinite dot
            pair = lanes_before(pair, c, end);
            store_half(row_of_a(s.pair, depth_of(nk), row, c), to_bfloat16(pair * scale));
            scaled[odd] = to_bfloat16(pair * q.scale[i + row]);
            rounded[odd] = to_bfloat16(lanes_before(probability[odd], c, end));
          }
          const index_t at = (c / kTile * depth_of(nq) + r / kPair) * kTileSize +
                             r % kPair / 2 * kTile + c % kTile;
          const Words pairs = pair_up(scaled[0], scaled[1]);
          std::memcpy(s.pair_pairs + at, &pairs, sizeof(pairs));
          const Words of_values = pair_up(rounded[0], rounded[1]);
          std::memcpy(s.probability_pairs + at, &of_values, sizeof(of_values));
        }
      if (p.query_grad.data) {
        multiply(tiles_of(nq), s.d, depth_of(nk), s.pair, s.key_pairs, s.out, false);
        add_tiles(s.out, s.d, i, nq, p.query_grad);
      }
      // Transposed: a column for each key.
      if (p.key_grad.data)
        multiply(s.d, tiles_of(nk), depth_of(nq), q.query_t + i / 2 * kTile * s.d, s.pair_pairs,
                 s.key_grad, add);
      if (p.value_grad.data)
        multiply(s.dv, tiles_of(nk), depth_of(nq), q.grad_t + i / 2 * kTile * s.dv,
                 s.probability_pairs, s.value_grad, add);
      add = true;
    });
    if (!add) return;
    for (index_t r = 0; r < n_keys; ++r) {
      const index_t at = r / kTile * kTileSize + r % kTile;
      for (index_t c = 0; c < d && p.key_grad.data; ++c)
        p.key_grad.row(s.keys[r])[c] = s.key_grad[at + c / kTile * nk * kTile + c % kTile * kTile];
      for (index_t c = 0; c < dv && p.value_grad.data; ++c)
        p.value_grad.row(s.keys[r])[c] =
            s.value_grad[at + c / kTile * nk * kTile + c % kTile * kTile];
    }
  });
  if (kCounted && p.value_grad.data) scale(p.value_grad, counts.scale());
  return true;
}

}  // namespace

index_t expected_bfloat16_scratch(Matrix<const float> query, Matrix<const float> value,
                                  bool gradient, index_t n_hashes) {
  Cut cut{nullptr};
  Scratch scratch(query.rows, query.columns, value.columns, gradient, n_hashes, cut);
  return cut.used;
}
bool expected_bfloat16_sum(const ExpectedSum<float>& p) { return sum<void>(p, {}); }
bool expected_bfloat16_gradient(const ExpectedGradient<float>& p) { return gradient<void>(p, {}); }

#if !defined(LSHKIT_TILES_IN_VECTORS)
bool counted_sum(const ExpectedSum<float>& p, const CountedPairs& codes) {
  return codes.code_bytes == 1 ? sum<std::uint8_t>(p, codes) : sum<std::uint16_t>(p, codes);
}
bool counted_gradient(const ExpectedGradient<float>& p, const CountedPairs& codes) {
  return codes.code_bytes == 1 ? gradient<std::uint8_t>(p, codes)
                               : gradient<std::uint16_t>(p, codes);
}
#endif

}  // namespace LSHKIT_ISA
}  // namespace lshkit

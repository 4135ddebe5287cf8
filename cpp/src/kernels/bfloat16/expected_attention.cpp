// The expectation of bfloat16 rows (see kernels/expected_attention.cpp), with products of bfloat16
// and sums in float32. A chunk of keys is packed once and meets the queries block by block.
//
// Rows are scaled by powers of two alone, and only where their norms are far from 1, which rounds
// nothing: cosines are those of float32.
// Rounded to bfloat16, by 2^-8 of each at most: probabilities, the weights of pairs in the
// gradient, and the output's gradient where it is summed for the values; g . v takes two parts of
// it.
#include "kernels/bfloat16/tiles.hpp"
#include "kernels/collision_probability.hpp"
#include "kernels/kernels.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr index_t kKeys = 128, kQueries = 64;  // rows of a chunk and of a block, at most
constexpr index_t kPair = 2 * kTile;           // rows are padded to pairs of tiles
constexpr int W = kLanes<float>;
constexpr int kAtOnce = kPair / W;  // registers
using F = Vec<float>;

// A power of two that brings a row to a norm which leaves room in float32: 1 where that does; 0 for
// a row without an inverse norm.
float power_near(float inverse_norm) {
  if (inverse_norm > 0x1p-40f && inverse_norm < 0x1p40f) return 1;
  if (!(inverse_norm > 0)) return 0;
  std::uint32_t bits;
  std::memcpy(&bits, &inverse_norm, sizeof(bits));
  bits &= 0x7f800000;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return power < 0x1p-126f ? 0x1p-126f : power;
}

// Rows to be packed, and the factors of each. Row: float, or Half for bfloat16.
template <class Row>
struct Listed {
  const Row* row[kKeys];
  float factor[kKeys];
  index_t n = 0;

  void add(const Row* x, float f) {
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

struct Scratch {
  index_t d, dv;  // tiles of columns
  Queries queries;
  std::int32_t* keys;  // the chunk's rows
  float* key_scale;
  Word *rows, *key, *key_pairs, *value, *pair, *pair_pairs, *probability_pairs;
  float *x, *s, *out, *key_grad, *value_grad;

  Scratch(index_t n_queries, index_t n_features, index_t n_values, bool gradient, Cut& cut)
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
    if (!gradient) return;
    key_pairs = cut.take<Word>(kKeys / 2 * kTile * d);
    pair_pairs = cut.take<Word>(kQueries * kKeys / 2);
    probability_pairs = cut.take<Word>(kQueries * kKeys / 2);
    s = cut.take<float>(kQueries * kKeys);
    key_grad = cut.take<float>(kKeys * kTile * d);
    value_grad = cut.take<float>(kKeys * kTile * dv);
  }
};

template <class Row>
bool finite(Matrix<const Row> m, const std::uint8_t* valid) {
  F check = {};
  for (index_t r = 0; r < m.rows; ++r)
    for (index_t c = 0; valid[r] && c < m.columns; c += W) {
      const F x = first_lanes(m.row(r) + c, m.columns - c);
      check += x - x;
    }
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
      if (valid[next]) s.keys[n++] = std::int32_t(next);
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
template <class Row>
void pack_queries(Matrix<const Row> x, const float* inverse_norm, const Queries& q) {
  const index_t depth = depth_of(x.columns);
  for (index_t i = 0; i < q.rows; i += kQueries) {
    Listed<Row> rows;
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
    Listed<float> rows, grads;
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
template <class Row>
void pack_transposed(const Listed<Row>& x, index_t columns, const Scratch& s, Word* b) {
  pack_rows(x.n, columns, x.row, x.factor, s.rows);
  for (index_t t = 0; t < tiles_of(x.n) * depth_of(columns); ++t)
    transpose_tile(s.rows + t * kTileSize, b + t * kTileSize);
}
// Lists the chunk's keys, with what their powers of two leave in s.key_scale, and values. Returns
// their number, padded.
template <class Row>
index_t list_keys(Matrix<const Row> key, Matrix<const Row> value, const float* inverse_norm,
                  index_t n, const Scratch& s, Listed<Row>& keys, Listed<Row>& values) {
  const index_t padded = round_up(n, kPair);
  for (index_t r = 0; r < padded; ++r) {
    const index_t row = s.keys[r < n ? r : 0];
    const float power = r < n ? power_near(inverse_norm[row]) : 0;
    s.key_scale[r] = power > 0 ? inverse_norm[row] / power : 0;
    keys.add(key.row(row), power);
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
// The probabilities of the cosines s.x of a block's rows from `from` to `end`, as A in s.pair;
// zeros from seen[r] on. Of two rows and a column of A at a time: two columns of C.
void store_probabilities(const Scratch& s, const float* query_scale, index_t from, index_t end,
                         index_t nk, const index_t* seen, int n_bits) {
  constexpr int kRows = 2;
  for (index_t first = 0; first < nk; first += kPair) {
    F scale[kAtOnce];
    LSHKIT_UNROLL
    for (int k = 0; k < kAtOnce; ++k) scale[k] = load(s.key_scale + first + k * W);
    for (index_t r = from; r < end; r += kRows) {
      const float* x = s.x + ((r - from) / kTile * nk + first) * kTile + r % kTile * kTile;
      F cosine[kRows * kAtOnce], weight[kRows * kAtOnce];
      LSHKIT_UNROLL
      for (int k = 0; k < kRows * kAtOnce; ++k) {
        const int row = k / kAtOnce, c = k % kAtOnce * W;
        cosine[k] = load(x + c / kTile * kTileSize + row * kTile + c % kTile) *
                    query_scale[r + row] * scale[k % kAtOnce];
      }
      probabilities<float, true>(cosine, n_bits, weight);
      Half* to = row_of_a(s.pair, depth_of(nk), r, first);
      LSHKIT_UNROLL
      for (int k = 0; k < kRows * kAtOnce; ++k) {
        const int row = k / kAtOnce, c = k % kAtOnce * W;
        const F sees = lanes_before(weight[k], first + c, seen[r + row]);
        store_half(to + row * 2 * kTile + c, to_bfloat16(sees));
      }
    }
  }
}
// Of nk numbers of row r of an A.
float sum_of_row(Word* a, index_t r, index_t nk) {
  F sum = {};
  for (index_t c = 0; c < nk; c += W)
    sum += Bfloat16::widen(load_half(row_of_a(a, depth_of(nk), r, c)));
  return sum_lanes(sum);
}
// y_r (+)= tiles of C, rows and columns as y has them.
LSHKIT_INLINE void add_tiles(const float* c, index_t columns, index_t first, index_t rows,
                             Matrix<float> y, bool add = true) {
  for (index_t r = 0; r < smaller(rows, y.rows - first); ++r)
    for (index_t k = 0; k < y.columns; k += W) {
      const float* from = c + (r / kTile * columns + k / kTile) * kTileSize + r % kTile * kTile;
      float* to = y.row(first + r) + k;
      const int count = int(smaller(y.columns - k, W));
      const F sum = load(from + k % kTile);
      store_first(to, add ? load_first(to, count) + sum : sum, count);
    }
}
void clear(Matrix<float> m) {
  for (index_t i = 0; i < m.rows; ++i) std::memset(m.row(i), 0, sizeof(float) * m.columns);
}

}  // namespace

index_t expected_bfloat16_scratch(index_t n_queries, index_t n_features, index_t n_values,
                                  bool gradient) {
  Cut cut{nullptr};
  Scratch scratch(n_queries, n_features, n_values, gradient, cut);
  return cut.used;
}

bool expected_bfloat16_sum(const ExpectedBfloat16Sum& p) {
  if (p.causal && !finite(p.value, p.key_valid)) return false;  // hidden, but 0 * NaN is NaN
  const index_t d = p.query.columns, dv = p.value.columns;
  Cut cut{p.scratch};
  const Scratch s(p.query.rows, d, dv, false, cut);
  const TileUse tiles;
  bool add = p.causal;  // a chunk of causal keys has sums of some queries
  if (add) clear(p.out);
  if (p.row_sum) std::memset(p.row_sum, 0, sizeof(float) * p.out.rows);
  pack_queries(p.query, p.query_inverse_norm, s.queries);
  for_key_chunks(s, p.key.rows, p.key_valid, p.causal, [&](index_t n_keys) {
    Listed<Half> keys, values;
    const index_t nk = list_keys(p.key, p.value, p.key_inverse_norm, n_keys, s, keys, values);
    pack_transposed(keys, d, s, s.key);
    pack_pairs(nk, dv, values.row, values.factor, s.value);
    for_query_blocks(s, p.causal, p.first_query, [&](index_t i, index_t nq) {
      index_t seen[kQueries];
      for (index_t r = 0; r < nq; ++r)
        seen[r] = keys_seen(s, n_keys, p.causal, p.first_query + i + r);
      // Causal ones in halves: 0.90 of the time, where others take 1.02.
      const index_t at_once = p.causal ? kPair : nq;
      for (index_t r = 0; r < nq; r += at_once) {
        multiply(tiles_of(at_once), tiles_of(nk), depth_of(d),
                 s.queries.query + (i + r) * kTile * depth_of(d), s.key, s.x, false);
        store_probabilities(s, s.queries.scale + i, r, r + at_once, nk, seen, p.n_bits);
      }
      for (index_t r = 0; p.row_sum && r < smaller(nq, p.out.rows - i); ++r)
        p.row_sum[i + r] += sum_of_row(s.pair, r, nk);
      multiply(tiles_of(nq), s.dv, depth_of(nk), s.pair, s.value, s.out, false);
      add_tiles(s.out, s.dv, i, nq, p.out, add);
    });
    add = true;
  });
  if (!add) clear(p.out);
  return true;
}

bool expected_bfloat16_gradient(const ExpectedGradient<float>& p) {
  if (p.causal && !(finite(p.value, p.key_valid) && finite(p.grad, p.query_valid))) return false;
  const index_t d = p.query.columns, dv = p.value.columns;
  Cut cut{p.scratch};
  const Scratch s(p.query.rows, d, dv, true, cut);
  const Queries& q = s.queries;
  const TileUse tiles;
  const bool of_pairs = p.query_grad.data || p.key_grad.data;
  clear(p.query_grad);
  clear(p.key_grad);
  clear(p.value_grad);
  pack_queries(p.query, p.query_inverse_norm, q);
  pack_gradients(p, q);
  for_key_chunks(s, p.key.rows, p.key_valid, p.causal, [&](index_t n_keys) {
    Listed<float> keys, values;
    const index_t nk = list_keys(p.key, p.value, p.key_inverse_norm, n_keys, s, keys, values);
    pack_transposed(keys, d, s, s.key);
    pack_transposed(values, dv, s, s.value);
    pack_pairs(nk, d, keys.row, keys.factor, s.key_pairs);
    bool add = false;
    for_query_blocks(s, p.causal, 0, [&](index_t i, index_t nq) {
      // x: cosines; s: g . v, of both parts of g, since what is left of it may cancel
      const index_t rows = tiles_of(nq), columns = tiles_of(nk), deep = depth_of(dv);
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
            cosine[odd] = load(s.x + at) * q.scale[i + row] * scale;
            dot[odd] = load(s.s + at) + q.bias[i + row];
          }
          weights<float, true>(cosine, p.n_bits, p.weight, probability, weight);
          Halves rounded[2], scaled[2];
          LSHKIT_UNROLL
          for (int odd = 0; odd < 2; ++odd) {
            const index_t row = r + odd;
            const index_t end = seen[row];
            const F pair = lanes_before(weight[odd] * dot[odd], c, end);
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
  return true;
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

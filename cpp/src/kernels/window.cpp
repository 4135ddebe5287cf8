// The near window: pairs close to the diagonal take their exact weight instead of the sampled one.
// What is added is the difference of the two, so that the sampled kernels need not know of it (and
// a share that was added and is taken out leaves its rounding, 1e-7 of 1 / n_hashes and more). A
// chunk of keys meets the runs of queries that see some of it, as in expected_attention.cpp, but
// only in the columns of the band. Bound: flops, 4 d a pair forward and 10 d backward, and n_hashes
// comparisons of a byte a pair.
#include "collision_probability.hpp"
#include "collisions.hpp"
#include "kernels.hpp"
#include "matmul.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr index_t kKeys = kBlock, kQueries = 24;  // rows of a chunk
constexpr int W = kLanes<float>;
using F = Vec<float>;

struct Scratch {
  float *key, *key_t, *value, *value_t;  // a chunk of keys: unit rows, transposed; values likewise
  float *query, *grad;                   // a chunk of queries (unit rows) and of gradients
  float *x, *s;                          // its pairs, (kQueries, kKeys)
  float* counts;                         // of one query's collisions
  CollisionScratch codes;
  index_t d, dv;  // padded
  Scratch(const WindowPairs& p, Cut& cut)
      : codes(p.codes, cut), d(round_up(p.query.columns, W)), dv(round_up(p.value.columns, W)) {
    key = cut.take<float>(kKeys * d);
    key_t = cut.take<float>(kKeys * d);
    value = cut.take<float>(kKeys * dv);
    value_t = cut.take<float>(kKeys * dv);
    query = cut.take<float>(kQueries * d);
    grad = cut.take<float>(kQueries * dv);
    x = cut.take<float>(kQueries * kKeys);
    s = cut.take<float>(kQueries * kKeys);
    counts = cut.take<float>(kKeys);
  }
};

struct Columns {
  index_t first, last;
};

// s.counts[c] = in how many hashes key c of the chunk has query i's code. Code: see collisions.hpp.
template <class Code>
LSHKIT_NOINLINE void count_chunk(const WindowPairs& p, const Scratch& s, index_t i) {
  const PairCodes& pairs = p.codes;
  const Code* query = static_cast<const Code*>(pairs.query_codes) + i * pairs.n_hashes;
  if (sizeof(Code) != std::size_t(pairs.code_bytes)) {
    Code* wide = static_cast<Code*>(s.codes.query_codes);
    for (index_t h = 0; h < pairs.n_hashes; ++h)
      wide[h] = code_at<Code>(pairs, pairs.query_codes, i, h);
    query = wide;
  }
  Code counts[kKeys];
  count_collisions(query, static_cast<const Code*>(s.codes.block_codes), pairs.n_hashes, counts);
  for (index_t c = 0; c < kKeys; ++c) s.counts[c] = float(counts[c]);
}

// What query i sees in the window of the n keys from j0 on, as columns of the chunk.
LSHKIT_INLINE Columns seen(const WindowPairs& p, index_t i, index_t j0, index_t n) {
  const index_t end = p.causal ? i + 1 : i + p.window;
  return {larger(0, i - p.window + 1 - j0), smaller(n, end - j0)};
}

// What a pair in the window weighs in the gradient beyond what the sampled kernels have given it,
// where `share` of the hashes collide. Through excess, p - share: the same of its value.
LSHKIT_INLINE F weight_excess(const WindowGradient& p, F x, F share, F* excess) {
  F probability;
  const F exact = weight<float>(x, p.n_bits, p.weight, &probability), zero = {};
  *excess = probability - share;
  switch (p.weight) {
    case Gradient::lower_bound:
      return *excess * (0.5f * float(p.n_bits));
    case Gradient::collided:
      return select(share > zero, zero, exact);
    default:
      return exact -
             select(share > zero, unbiased_weight(x, p.n_bits, float(p.codes.n_hashes)), zero);
  }
}

LSHKIT_INLINE void clear_invalid(const std::uint8_t* valid, index_t rows, float* to,
                                 index_t stride) {
  for (index_t r = 0; r < rows; ++r)
    if (!valid[r]) std::memset(to + r * stride, 0, sizeof(float) * stride);
}

bool finite(Matrix<const float> m, index_t first, index_t rows, const std::uint8_t* valid) {
  F check = {};
  for (index_t r = first; r < first + rows; ++r)
    for (index_t c = 0; c < m.columns && valid[r]; c += W) {
      const F x = load_first(m.row(r) + c, int(smaller(m.columns - c, W)));
      check += x - x;
    }
  return sum_lanes(check) == 0;
}

// Runs block(i, n_queries, columns) over the chunk's queries in [first, last), block by block where
// the zero weights of unseen pairs may hide them, one by one where a NaN would survive that.
template <class Whole, class Block>
LSHKIT_INLINE void for_query_blocks(const WindowPairs& p, index_t j0, index_t n, index_t first,
                                    index_t last, const Whole& whole, const Block& block) {
  first = larger(first, p.causal ? j0 : j0 - p.window + 1);
  last = smaller(last, j0 + n - 1 + p.window);
  for (index_t i = first; i < last; i += kQueries) {
    const index_t nq = smaller(kQueries, last - i);
    if (whole(i, nq))
      block(i, nq, Columns{seen(p, i, j0, n).first, seen(p, i + nq - 1, j0, n).last});
    else
      for (index_t r = i; r < i + nq; ++r) block(r, 1, seen(p, r, j0, n));
  }
}

template <class Code>
void fill_key_chunk(const WindowPairs& p, const Scratch& s, index_t j0, index_t n) {
  const index_t d = p.query.columns, dv = p.value.columns;
  const std::uint8_t* valid = p.key_valid + j0;
  // Rows that take no part are zeros, whatever they hold.
  pack<float>(n, d, s.d, {p.key.row(j0), p.key.stride}, 1, p.key_inverse_norm + j0, s.key);
  pack<float>(n, dv, s.dv, {p.value.row(j0), p.value.stride}, 1, nullptr, s.value);
  clear_invalid(valid, n, s.key, s.d);
  clear_invalid(valid, n, s.value, s.dv);
  pack_transposed<float>(n, d, kKeys, {s.key, s.d}, 1, nullptr, s.key_t);
  Code* block_codes = static_cast<Code*>(s.codes.block_codes);
  for (index_t j = 0; j < n; ++j)
    for (index_t h = 0; h < p.codes.n_hashes; ++h)
      block_codes[h * kKeys + j] = code_at<Code>(p.codes, p.codes.key_codes, j0 + j, h);
}

// What of pairs[c] belongs to no pair of valid rows in query i's window becomes zero.
LSHKIT_INLINE void hide(const WindowPairs& p, index_t i, index_t j0, index_t n, Columns block,
                        float* pairs) {
  const Columns own = p.query_valid[i] ? seen(p, i, j0, n) : Columns{block.last, block.last};
  for (index_t c = block.first; c < block.last; ++c)
    if (c < own.first || c >= own.last || !p.key_valid[j0 + c]) pairs[c] = 0;
}

// The registers of columns that hold c.
LSHKIT_INLINE Columns whole_registers(Columns c) { return {c.first / W * W, round_up(c.last, W)}; }

template <class Code>
void sum(const WindowSum& p) {
  Cut cut{p.scratch};
  const Scratch s(p, cut);
  const index_t d = p.query.columns, dv = p.value.columns;
  const float scale = 1 / float(p.codes.n_hashes);
  const index_t first_key = larger(0, p.first - p.window + 1) / kKeys * kKeys;
  for (index_t j0 = first_key; j0 < p.key.rows; j0 += kKeys) {
    if (j0 >= (p.causal ? p.last : p.last + p.window - 1)) break;
    const index_t n = smaller(kKeys, p.key.rows - j0);
    fill_key_chunk<Code>(p, s, j0, n);
    const bool finite_values = finite(p.value, j0, n, p.key_valid);
    for_query_blocks(
        p, j0, n, p.first, p.last, [&](index_t, index_t) { return finite_values; },
        [&](index_t i, index_t nq, Columns c) {
          const Columns wide = whole_registers(c);
          matmul<float>(nq, wide.last - wide.first, d, {p.query.row(i), p.query.stride}, 1,
                        s.key_t + wide.first, kKeys, {s.x + wide.first, kKeys}, false);
          for (index_t r = 0; r < nq; ++r) {
            float* x = s.x + r * kKeys;
            count_chunk<Code>(p, s, i + r);
            for (index_t t = wide.first; t < wide.last; t += W) {
              const F exact =
                  probability<float>(load(x + t) * p.query_inverse_norm[i + r], p.n_bits);
              store(x + t, exact - load(s.counts + t) * scale);
            }
            hide(p, i + r, j0, n, c, x);
            for (index_t t = c.first; t < c.last && p.row_sum; ++t) p.row_sum[i + r] += x[t];
          }
          matmul<float>(nq, dv, c.last - c.first, {s.x + c.first, kKeys}, 1,
                        s.value + c.first * s.dv, s.dv, {p.out.row(i), p.out.stride}, true);
        });
  }
}

template <class Code>
void gradient(const WindowGradient& p) {
  Cut cut{p.scratch};
  const Scratch s(p, cut);
  const index_t d = p.query.columns, dv = p.value.columns;
  const float scale = 1 / float(p.codes.n_hashes);
  const bool of_pairs = p.query_grad.data || p.key_grad.data;
  for (index_t j0 = 0; j0 < p.key.rows; j0 += kKeys) {
    const index_t n = smaller(kKeys, p.key.rows - j0);
    fill_key_chunk<Code>(p, s, j0, n);
    pack_transposed<float>(n, dv, kKeys, {s.value, s.dv}, 1, nullptr, s.value_t);
    for_query_blocks(
        p, j0, n, 0, p.query.rows,
        [&](index_t i, index_t nq) { return finite(p.grad, i, nq, p.query_valid); },
        [&](index_t i, index_t nq, Columns c) {
          const Columns wide = whole_registers(c);
          const index_t columns = wide.last - wide.first, keys = c.last - c.first;
          const Rows<const float> queries{p.query.row(i), p.query.stride};
          const Rows<const float> grads{p.grad.row(i), p.grad.stride};
          // x: cosines, then what p is above the share of collisions; s: g . v, then its share in
          // the gradient
          matmul<float>(nq, columns, d, queries, 1, s.key_t + wide.first, kKeys,
                        {s.x + wide.first, kKeys}, false);
          if (of_pairs)
            matmul<float>(nq, columns, dv, grads, 1, s.value_t + wide.first, kKeys,
                          {s.s + wide.first, kKeys}, false);
          for (index_t r = 0; r < nq; ++r) {
            float *x = s.x + r * kKeys, *pair = s.s + r * kKeys;
            const float bias = p.bias ? p.bias[i + r] : 0;
            count_chunk<Code>(p, s, i + r);
            for (index_t t = wide.first; t < wide.last; t += W) {
              F excess;
              const F w = weight_excess(p, load(x + t) * p.query_inverse_norm[i + r],
                                        load(s.counts + t) * scale, &excess);
              store(pair + t, w * (load(pair + t) + bias));
              store(x + t, excess);
            }
            hide(p, i + r, j0, n, c, x);
            hide(p, i + r, j0, n, c, pair);
          }
          if (p.value_grad.data) {
            pack<float>(nq, dv, s.dv, grads, 1, nullptr, s.grad);
            clear_invalid(p.query_valid + i, nq, s.grad, s.dv);
            matmul<float>(keys, dv, nq, {s.x + c.first, 1}, kKeys, s.grad, s.dv,
                          {p.value_grad.row(j0 + c.first), p.value_grad.stride}, true);
          }
          if (p.query_grad.data)
            matmul<float>(nq, d, keys, {s.s + c.first, kKeys}, 1, s.key + c.first * s.d, s.d,
                          {p.query_grad.row(i), p.query_grad.stride}, true);
          if (p.key_grad.data) {
            pack<float>(nq, d, s.d, queries, 1, p.query_inverse_norm + i, s.query);
            clear_invalid(p.query_valid + i, nq, s.query, s.d);
            matmul<float>(keys, d, nq, {s.s + c.first, 1}, kKeys, s.query, s.d,
                          {p.key_grad.row(j0 + c.first), p.key_grad.stride}, true);
          }
        });
  }
}

}  // namespace

index_t window_scratch(const WindowPairs& p) {
  Cut cut{nullptr};
  Scratch scratch(p, cut);
  return cut.used;
}
void window_sum(const WindowSum& p) {
  bytes_suffice(p.codes) ? sum<std::uint8_t>(p) : sum<std::uint16_t>(p);
}
void window_gradient(const WindowGradient& p) {
  bytes_suffice(p.codes) ? gradient<std::uint8_t>(p) : gradient<std::uint16_t>(p);
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

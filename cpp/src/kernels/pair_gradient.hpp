#pragma once
// The gradient of queries and keys pair by pair, for the pairs that collide. A block of 128 keys
// meets all queries, whose pairs with it are listed by the thousand: the list is gone through for
// the products of output gradients and values, for cosines where these are needed, for the queries'
// gradients and for the keys', so that one of the block's arrays is in use at a time, 32 KB of 64
// columns, about the L1 cache. Bound: 6 d flops a pair and loads and stores of 16 d bytes, with the
// cosine 8 d and 20 d.
#include "collisions.hpp"
#include "kernels.hpp"
#include "matmul.hpp"
#include "row_columns.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

LSHKIT_INLINE PairCodes codes_of(const SampledGradient& p) {
  return {p.query_codes, p.key_codes,   p.code_bytes, p.n_hashes, p.query.rows,
          p.key.rows,    p.query_valid, p.key_valid,  p.causal,   0};
}

// Pairs of some queries with a block's keys. A query's are a multiple of four, of which the last
// may repeat its first with a weight of zero.
struct PairList {
  static constexpr int kFull = 4096, kMost = kFull + kBlock + kLanes<float>;
  int n = 0, queries = 0;
  std::int32_t *query, *first;  // first: of a query's pairs
  std::uint8_t* key;
  float *weight, *product, *cosine;

  PairList(bool cosines, Cut& cut)
      : query(cut.take<std::int32_t>(kMost / 4 + 1)),
        first(cut.take<std::int32_t>(kMost / 4 + 1)),
        key(cut.take<std::uint8_t>(kMost)),
        weight(cut.take<float>(kMost)),
        product(cut.take<float>(kMost)),
        cosine(cosines ? cut.take<float>(kMost) : nullptr) {}

  // use(query, its first pair, how many)
  template <class Use>
  LSHKIT_INLINE void each_query(const Use& use) const {
    for (int r = 0; r < queries; ++r) use(query[r], first[r], first[r + 1] - first[r]);
  }
};

struct PairScratch {
  index_t d, dv;                  // padded
  float *key, *value, *key_grad;  // (kBlock, padded columns); key: unit vectors
  CollisionScratch collisions;
  PairList list;

  PairScratch(const PairGradient<float>& p, const PairCodes& codes, bool cosines, Cut& cut)
      : d(round_up(p.query.columns, kLanes<float>)),
        dv(round_up(p.value.columns, kLanes<float>)),
        key(cut.take<float>(kBlock * d)),
        value(cut.take<float>(kBlock * dv)),
        key_grad(cut.take<float>(kBlock * d)),
        collisions(codes, cut),
        list(cosines, cut) {}
};

// Arguments are copies: stores to rows might change what a reference points to.

// product = weight * (g . v + bias), and cosine where that is wanted.
LSHKIT_NOINLINE void multiply_pairs(const PairGradient<float> p, const PairScratch s) {
  const PairList l = s.list;
  const Matrix<const float> values{s.value, s.dv, kBlock, p.value.columns};
  const Matrix<const float> keys{s.key, s.d, kBlock, p.query.columns};
  l.each_query([&](index_t i, int first, int count) LSHKIT_ALWAYS_INLINE {
    products_of(p.grad.row(i), 1, values, l.key + first, count, l.product + first);
    const float bias = p.bias ? p.bias[i] : 0;
    for (int t = first; t < first + count; t += 4) {
      Vec4 product, weight;
      std::memcpy(&product, l.product + t, sizeof(product));
      std::memcpy(&weight, l.weight + t, sizeof(weight));
      product = weight * (product + bias);
      std::memcpy(l.product + t, &product, sizeof(product));
    }
  });
  if (!l.cosine) return;
  l.each_query([&](index_t i, int first, int count) LSHKIT_ALWAYS_INLINE {
    products_of(p.query.row(i), p.query_inverse_norm[i], keys, l.key + first, count,
                l.cosine + first);
  });
}

// dq += product k
LSHKIT_NOINLINE void add_to_queries(const PairGradient<float> p, const PairScratch s) {
  const PairList l = s.list;
  l.each_query([&](index_t i, int first, int count) LSHKIT_ALWAYS_INLINE {
    each_columns<float, kVectors / 2>(p.query.columns, [&](auto columns) LSHKIT_ALWAYS_INLINE {
      Vec<float> sum[columns.vectors], row[columns.vectors];
      columns.load_row(p.query_grad.row(i), sum);
      for (int t = first; t < first + count; ++t) {
        const Vec<float> product = broadcast(l.product[t]);
        columns.load_row(s.key + row_offset(l.key[t], s.d), row);
        LSHKIT_UNROLL
        for (int c = 0; c < columns.vectors; ++c) sum[c] += product * row[c];
      }
      columns.store_row(p.query_grad.row(i), sum);
    });
  });
}

// dk += product q
LSHKIT_NOINLINE void add_to_keys(const PairGradient<float> p, const PairScratch s) {
  const PairList l = s.list;
  l.each_query([&](index_t i, int first, int count) LSHKIT_ALWAYS_INLINE {
    each_columns<float, kVectors / 2>(p.query.columns, [&](auto columns) LSHKIT_ALWAYS_INLINE {
      Vec<float> query[columns.vectors], sum[columns.vectors];
      columns.load_row(p.query.row(i), query);
      LSHKIT_UNROLL
      for (int c = 0; c < columns.vectors; ++c) query[c] *= p.query_inverse_norm[i];
      for (int t = first; t < first + count; ++t) {
        float* const to = s.key_grad + row_offset(l.key[t], s.d);
        const Vec<float> product = broadcast(l.product[t]);
        columns.load_row(to, sum);
        LSHKIT_UNROLL
        for (int c = 0; c < columns.vectors; ++c) sum[c] += product * query[c];
        columns.store_row(to, sum);
      }
    });
  });
}

// weight_of(count): of a pair that collides in so many hashes. weigh(list) changes the products.
template <class Code, class WeightOf, class Weigh>
LSHKIT_INLINE void pair_gradient(const PairGradient<float>& p, const PairCodes& codes,
                                 PairScratch& s, const WeightOf& weight_of, const Weigh& weigh) {
  const index_t d = p.query.columns;
  PairList& list = s.list;
  const auto flush = [&] {
    list.first[list.queries] = list.n;
    multiply_pairs(p, s);
    weigh(list);
    if (p.query_grad.data) add_to_queries(p, s);
    if (p.key_grad.data) add_to_keys(p, s);
    list.n = list.queries = 0;
  };
  clear(p.query_grad);
  for (index_t j0 = 0; j0 < p.key.rows; j0 += kBlock) {
    const index_t n = smaller(kBlock, p.key.rows - j0);
    pack<float>(n, d, s.d, {p.key.row(j0), p.key.stride}, 1, p.key_inverse_norm + j0, s.key);
    pack<float>(n, p.value.columns, s.dv, {p.value.row(j0), p.value.stride}, 1, nullptr, s.value);
    if (p.key_grad.data) std::memset(s.key_grad, 0, sizeof(float) * kBlock * s.d);
    Colliding<float> found{list.key, list.weight};
    for_each_query<Code>(codes, s.collisions, j0, n, found, weight_of, [&] {
      list.query[list.queries] = std::int32_t(found.query);
      list.first[list.queries++] = list.n;
      list.n += int(round_up(found.n, 4));
      if (list.n >= PairList::kFull) flush();
      found.keys = list.key + list.n;
      found.values = list.weight + list.n;
    });
    flush();
    for (index_t j = 0; j < n && p.key_grad.data; ++j)
      std::memcpy(p.key_grad.row(j0 + j), s.key_grad + j * s.d, sizeof(float) * d);
  }
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

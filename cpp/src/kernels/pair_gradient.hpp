#pragma once
// The gradient of queries and keys pair by pair, for the pairs that collide: a block of 128 keys
// stays in the L2 cache while all queries pass. 6 d flops a pair, 8 d where its cosine is needed.
#include "collisions.hpp"
#include "kernels.hpp"
#include "matmul.hpp"
#include "simd.hpp"
#include "wanted_gradients.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

LSHKIT_INLINE PairCodes codes_of(const SampledGradient& p) {
  return {p.query_codes, p.key_codes,   p.code_bytes, p.n_hashes, p.query.rows,
          p.key.rows,    p.query_valid, p.key_valid,  p.causal,   0};
}

struct PairScratch {
  float *key, *value, *key_grad;     // (kBlock, padded columns)
  float *query, *grad, *query_grad;  // one padded row each
  index_t d, dv;                     // padded
  CollisionScratch collisions;

  PairScratch(const PairGradient<float>& p, const PairCodes& codes, Cut& cut)
      : d(round_up(p.query.columns, kLanes<float>)), dv(round_up(p.value.columns, kLanes<float>)) {
    key = cut.take<float>(kBlock * d);
    value = cut.take<float>(kBlock * dv);
    key_grad = cut.take<float>(kBlock * d);
    query = cut.take<float>(d);
    grad = cut.take<float>(dv);
    query_grad = cut.take<float>(d);
    collisions = CollisionScratch(codes, cut);
  }
};

// Query i and a block's keys. Vectors > 0: unpadded rows of that many registers, kept there; else
// rows of any length. ToQuery, ToKey: which gradients gain what is added.
template <int Vectors, bool ToQuery, bool ToKey>
struct PairRow {
  static constexpr int W = kLanes<float>, kMost = Vectors ? Vectors : 1;
  using F = Vec<float>;
  const PairScratch& s;
  float* out;
  int kv, vv;
  index_t d, key_stride, value_stride;
  float bias;
  F g[kMost], q[kMost], dq[kMost];

  LSHKIT_INLINE PairRow(const PairGradient<float>& p, const PairScratch& scratch, index_t i)
      : s(scratch),
        out(p.query_grad.row(i)),
        kv(Vectors ? Vectors : int(s.d / W)),
        vv(Vectors ? Vectors : int(s.dv / W)),
        d(p.query.columns),
        key_stride(kv * W),
        value_stride(vv * W),
        bias(p.bias ? p.bias[i] : 0) {
    if (Vectors) {
      LSHKIT_UNROLL
      for (int c = 0; c < kMost; ++c) {
        g[c] = load(p.grad.row(i) + c * W);
        q[c] = load(p.query.row(i) + c * W) * p.query_inverse_norm[i];
        if (ToQuery) dq[c] = load(out + c * W);
      }
    } else {
      pack<float>(1, d, s.d, {p.query.row(i), 0}, p.query_inverse_norm[i], nullptr, s.query);
      pack<float>(1, p.value.columns, s.dv, {p.grad.row(i), 0}, 1, nullptr, s.grad);
      if (ToQuery) pack<float>(1, d, s.d, {out, 0}, 1, nullptr, s.query_grad);
    }
  }
  // g . v + bias and q . k of four keys
  LSHKIT_INLINE Vec4 values(const std::uint8_t* keys) const {
    return dots(keys, g, s.grad, s.value, value_stride, vv) + bias;
  }
  LSHKIT_INLINE Vec4 cosines(const std::uint8_t* keys) const {
    return dots(keys, q, s.query, s.key, key_stride, kv);
  }
  // dq += b k and dk += b q
  LSHKIT_INLINE void add(F b, std::uint8_t key) {
    const index_t at = row_offset(key, key_stride);
    const float* k = s.key + at;
    float* dk = s.key_grad + at;
    LSHKIT_UNROLL
    for (int c = 0; c < kv; ++c) {
      const F query = Vectors ? q[Vectors ? c : 0] : load(s.query + c * W);
      if (ToQuery && Vectors)
        dq[Vectors ? c : 0] += b * load(k + c * W);
      else if (ToQuery)
        store(s.query_grad + c * W, load(s.query_grad + c * W) + b * load(k + c * W));
      if (ToKey) store(dk + c * W, load(dk + c * W) + b * query);
    }
  }
  LSHKIT_INLINE void finish() const {
    if (!ToQuery) return;
    if (Vectors) LSHKIT_UNROLL
    for (int c = 0; c < kMost; ++c) store(out + c * W, dq[c]);
    else std::memcpy(out, s.query_grad, sizeof(float) * d);
  }

 private:
  LSHKIT_INLINE Vec4 dots(const std::uint8_t* keys, const F* row, const float* padded_row,
                          const float* block, index_t stride, int n) const {
    F dot[4] = {};
    LSHKIT_UNROLL
    for (int t = 0; t < 4; ++t) {
      const float* x = block + row_offset(keys[t], stride);
      LSHKIT_UNROLL
      for (int c = 0; c < n; ++c)
        dot[t] += (Vectors ? row[Vectors ? c : 0] : load(padded_row + c * W)) * load(x + c * W);
    }
    return sum_lanes4(dot[0], dot[1], dot[2], dot[3]);
  }
};

// The registers of a row where queries and values have equally many columns and fill them, else 0.
LSHKIT_INLINE int row_vectors(const PairGradient<float>& p) {
  constexpr int W = kLanes<float>;
  const index_t d = p.query.columns, n = d / W;
  const bool filled = d == p.value.columns && d % W == 0;
  return filled && (n == 2 || n == 4 || n == 8) ? int(n) : 0;
}

// visit(colliding) for each query and block of keys that has some for it (see for_each_query), and
// end_of_block() before the block goes.
template <class Code, class Value, class ValueOf, class Visit, class End>
LSHKIT_INLINE void pair_gradient(const PairGradient<float>& p, const PairCodes& codes,
                                 const PairScratch& s, const ValueOf& value_of, const Visit& visit,
                                 const End& end_of_block) {
  const index_t d = p.query.columns;
  clear(p.query_grad);
  for (index_t j0 = 0; j0 < p.key.rows; j0 += kBlock) {
    const index_t n = smaller(kBlock, p.key.rows - j0);
    pack<float>(n, d, s.d, {p.key.row(j0), p.key.stride}, 1, p.key_inverse_norm + j0, s.key);
    pack<float>(n, p.value.columns, s.dv, {p.value.row(j0), p.value.stride}, 1, nullptr, s.value);
    if (p.key_grad.data) std::memset(s.key_grad, 0, sizeof(float) * kBlock * s.d);
    for_each_query<Code, Value>(codes, s.collisions, j0, n, value_of, visit);
    end_of_block();
    for (index_t j = 0; j < n && p.key_grad.data; ++j)
      std::memcpy(p.key_grad.row(j0 + j), s.key_grad + j * s.d, sizeof(float) * d);
  }
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

// The gradient of the pairs that collide in some hash, weighted by the derivative of the collision
// probability at their cosine (YOSO, ICML 2021, appendix 1.4), or by that over the probability that
// such a pair collides at all (Horvitz and Thompson 1952). Quadratic in the length.
#include "collision_probability.hpp"
#include "collisions.hpp"
#include "kernels.hpp"
#include "pair_gradient.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

using Problem = CollidedGradient;

PairCodes codes_of(const Problem& p) {
  return pair_codes(p, p.query_codes, p.key_codes, p.code_bytes, p.n_hashes);
}

// All cosines first, then all weights, a register at a time: one by one they would cost more than
// the rows.
template <int Vectors>
LSHKIT_NOINLINE void visit(const Problem& p, const PairScratch& s, index_t i, Colliding c) {
  constexpr int W = kLanes<float>;
  PairRow<Vectors> row(p, s, i);
  float x[kBlock + W], b[kBlock + W];
  for (int t = 0; t < c.n; t += 4) {
    const Vec4 cosines = row.cosines(c.keys + t), values = row.values(c.keys + t);
    std::memcpy(x + t, &cosines, sizeof cosines);
    std::memcpy(b + t, &values, sizeof values);
  }
  // The keys beyond n repeat the first: their share is zero.
  for (int t = c.n; t < int(round_up(c.n, W)); ++t) x[t] = b[t] = 0;
  for (int t = 0; t < c.n; t += W) {
    Vec<float> probability;
    store(b + t, load(b + t) * (p.weight == Gradient::unbiased
                                    ? unbiased_weight(load(x + t), p.n_bits, float(p.n_hashes))
                                    : weight<float>(load(x + t), p.n_bits, Gradient::expected,
                                                    &probability)));
  }
  for (int t = 0; t < c.n; t += 4) LSHKIT_UNROLL
  for (int u = 0; u < 4; ++u) row.add(broadcast<float>(b[t + u]), c.keys[t + u]);
  row.finish();
}

using Visitor = void (*)(const Problem&, const PairScratch&, index_t, Colliding);
Visitor visitor(int vectors) {
  return vectors == 2 ? visit<2> : vectors == 4 ? visit<4> : vectors == 8 ? visit<8> : visit<0>;
}

template <class Code>
void pairs(const Problem& p) {
  Cut cut{p.scratch};
  const PairCodes codes = codes_of(p);
  const PairScratch s(p, codes, cut);
  const Visitor visit_keys = visitor(row_vectors(p));
  pair_gradient<Code>(p, codes, s, [&](index_t i, Colliding c) { visit_keys(p, s, i, c); });
}

}  // namespace

index_t collided_scratch(const CollidedGradient& p) {
  Cut cut{nullptr};
  PairScratch scratch(p, codes_of(p), cut);
  return cut.used;
}

void collided_gradient(const CollidedGradient& p) {
  bytes_suffice(codes_of(p)) ? pairs<std::uint8_t>(p) : pairs<std::uint16_t>(p);
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

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

// Pairs of several queries, listed: their weights are computed a register at a time, and pairs by
// the hundred hide how long that takes.
struct PairList {
  static constexpr int W = kLanes<float>, kFull = 256, kMost = kFull + kBlock + W;
  int n = 0, queries = 0;
  index_t query[kFull];
  int first[kFull + 1];  // of a query's pairs, whose number is a multiple of four
  std::uint8_t key[kMost];
  float x[kMost], b[kMost];  // cosine; g . v, then the pair's share in the gradient
};

LSHKIT_INLINE void weigh(const Problem& p, PairList& list) {
  constexpr int W = kLanes<float>;
  for (int t = list.n; t < list.n + W; ++t) list.x[t] = list.b[t] = 0;
  if (p.weight == Gradient::unbiased)
    for (int t = 0; t < list.n; t += W)
      store(list.b + t,
            load(list.b + t) * unbiased_weight(load(list.x + t), p.n_bits, float(p.n_hashes)));
  else
    for (int t = 0; t < list.n; t += W)
      store(list.b + t,
            load(list.b + t) * weight<float>(load(list.x + t), p.n_bits, Gradient::exact));
}

template <int Vectors>
LSHKIT_NOINLINE void append(const Problem& p, const PairScratch& s, PairList& list,
                            const Colliding<std::uint8_t>& c) {
  const PairRow<Vectors, false, false> row(p, s, c.query);
  list.query[list.queries] = c.query;
  list.first[list.queries++] = list.n;
  for (int t = 0; t < c.n; t += 4) {
    const Vec4 cosines = row.cosines(c.keys + t), values = row.values(c.keys + t);
    std::memcpy(list.key + list.n + t, c.keys + t, 4);
    std::memcpy(list.x + list.n + t, &cosines, sizeof cosines);
    std::memcpy(list.b + list.n + t, &values, sizeof values);
  }
  const int end = list.n + c.n;
  list.n += int(round_up(c.n, 4));
  for (int t = end; t < list.n; ++t) list.b[t] = 0;  // these repeat the first
}

template <int Vectors, bool ToQuery, bool ToKey>
LSHKIT_NOINLINE void flush(const Problem& p, const PairScratch& s, PairList& list) {
  weigh(p, list);
  list.first[list.queries] = list.n;
  for (int r = 0; r < list.queries; ++r) {
    PairRow<Vectors, ToQuery, ToKey> row(p, s, list.query[r]);
    for (int t = list.first[r]; t < list.first[r + 1]; t += 4) LSHKIT_UNROLL
    for (int u = 0; u < 4; ++u) row.add(broadcast<float>(list.b[t + u]), list.key[t + u]);
    row.finish();
  }
  list.n = list.queries = 0;
}

template <class Code, int Vectors>
void pairs_of(const Problem& p, const PairCodes& codes, const PairScratch& s) {
  PairList list;
  const auto flush_wanted = with_wanted(
      p, [](auto to_query, auto to_key) { return &flush<Vectors, to_query.value, to_key.value>; });
  pair_gradient<Code, std::uint8_t>(
      p, codes, s, [](Code) { return std::uint8_t(1); },  // the count does not matter
      [&](const Colliding<std::uint8_t>& c) {
        append<Vectors>(p, s, list, c);
        if (list.n >= PairList::kFull) flush_wanted(p, s, list);
      },
      [&] { flush_wanted(p, s, list); });
}

template <class Code>
void pairs(const Problem& p) {
  Cut cut{p.scratch};
  const PairCodes codes = codes_of(p);
  const PairScratch s(p, codes, cut);
  with_constant<2, 4, 8>(row_vectors(p),
                         [&](auto vectors) { pairs_of<Code, vectors.value>(p, codes, s); });
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

// The lower bound's gradient pair by pair. Every pair that collides is visited once, with its
// count.
#include "collisions.hpp"
#include "lower_bound_gradient.hpp"
#include "pair_gradient.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

using Problem = LowerBoundGradient;

struct Scratch : PairScratch {
  float* weight;  // of a count
  Scratch(const Problem& p, Cut& cut)
      : PairScratch(p, codes_of(p), cut), weight(cut.take<float>(p.n_hashes + 1)) {}
};

template <int Vectors, bool ToQuery, bool ToKey>
LSHKIT_NOINLINE void visit(const Problem& p, const Scratch& s, const Colliding<float>& c) {
  PairRow<Vectors, ToQuery, ToKey> row(p, s, c.query);
  for (int t = 0; t < c.n; t += 4) {
    const Vec4 sums = row.values(c.keys + t);
    // Weights one by one: a vector load of what has just been stored in parts would wait for it.
    LSHKIT_UNROLL
    for (int u = 0; u < 4; ++u) row.add(broadcast<float>(sums[u]) * c.values[t + u], c.keys[t + u]);
  }
  row.finish();
}

using Visitor = void (*)(const Problem&, const Scratch&, const Colliding<float>&);
Visitor visitor(const Problem& p) {
  return with_wanted(p, [&](auto to_query, auto to_key) {
    return with_constant<2, 4, 8>(row_vectors(p), [=](auto vectors) -> Visitor {
      return visit<vectors.value, to_query.value, to_key.value>;
    });
  });
}

template <class Code>
void pairs(const Problem& p) {
  Cut cut{p.scratch};
  const Scratch s(p, cut);
  for (index_t count = 0; count <= p.n_hashes; ++count) s.weight[count] = p.scale * float(count);
  const Visitor visit_keys = visitor(p);
  pair_gradient<Code, float>(
      p, codes_of(p), s, [&](Code count) { return s.weight[count]; },
      [&](const Colliding<float>& c) { visit_keys(p, s, c); }, [] {});
}

}  // namespace

index_t lower_bound_pairs_scratch(const LowerBoundGradient& p) {
  Cut cut{nullptr};
  Scratch scratch(p, cut);
  return cut.used;
}

void lower_bound_pairs(const LowerBoundGradient& p) {
  bytes_suffice(codes_of(p)) ? pairs<std::uint8_t>(p) : pairs<std::uint16_t>(p);
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

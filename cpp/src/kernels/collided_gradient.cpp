// The gradient of the pairs that collide in some hash, weighted by the derivative of the collision
// probability at their cosine (YOSO, ICML 2021, appendix 1.4), or by that over the probability that
// such a pair collides at all (Horvitz and Thompson 1952). Quadratic in the length.
#include "collision_probability.hpp"
#include "kernels.hpp"
#include "pair_gradient.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

using Problem = CollidedGradient;

void weigh(const Problem& p, PairList& list) {
  constexpr int W = kLanes<float>;
  for (int t = list.n; t < list.n + W; ++t) list.cosine[t] = list.product[t] = 0;
  for (int t = 0; t < list.n; t += W) {
    const Vec<float> cosine = load(list.cosine + t);
    const Vec<float> w = p.weight == Gradient::unbiased
                             ? unbiased_weight(cosine, p.n_bits, float(p.n_hashes))
                             : weight<float>(cosine, p.n_bits, Gradient::exact);
    store(list.product + t, load(list.product + t) * w);
  }
}

template <class Code>
void pairs(const Problem& p) {
  Cut cut{p.scratch};
  const PairCodes codes = codes_of(p);
  PairScratch s(p, codes, true, cut);
  pair_gradient<Code>(
      p, codes, s, [](Code) { return 1.0f; },  // the count does not matter
      [&](PairList& list) { weigh(p, list); });
}

}  // namespace

index_t collided_scratch(const CollidedGradient& p) {
  Cut cut{nullptr};
  PairScratch scratch(p, codes_of(p), true, cut);
  return cut.used;
}

void collided_gradient(const CollidedGradient& p) {
  bytes_suffice(codes_of(p)) ? pairs<std::uint8_t>(p) : pairs<std::uint16_t>(p);
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

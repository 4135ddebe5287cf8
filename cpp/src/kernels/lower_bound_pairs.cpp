// The lower bound's gradient pair by pair. Every pair that collides is visited once, with its
// count.
#include "lower_bound_gradient.hpp"
#include "pair_gradient.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

using Problem = LowerBoundGradient;

struct Scratch : PairScratch {
  float* weight;  // of a count
  Scratch(const Problem& p, Cut& cut)
      : PairScratch(p, codes_of(p), false, cut), weight(cut.take<float>(p.n_hashes + 1)) {}
};

template <class Code>
void pairs(const Problem& p) {
  Cut cut{p.scratch};
  Scratch s(p, cut);
  for (index_t count = 0; count <= p.n_hashes; ++count) s.weight[count] = p.scale * float(count);
  pair_gradient<Code>(
      p, codes_of(p), s, [&](Code count) { return s.weight[count]; }, [](PairList&) {});
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

// The pairs verb by comparison: all queries of the pass meet one block of keys after the other.
#include "collisions.hpp"

#include "kernels.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

template <class Code>
void compare(const CollisionPass& p) {
  Cut cut{p.scratch};
  const CollisionScratch s(p.codes, cut);
  for (index_t j0 = 0; j0 < p.codes.n_keys; j0 += kBlock)
    for_each_query<Code, std::int32_t>(
        p.codes, s, j0, smaller(kBlock, p.codes.n_keys - j0),
        [](Code count) { return std::int32_t(count); },
        [&](const Colliding<std::int32_t>& c) {
          std::int32_t keys[kBlock + 4];
          for (int t = 0; t < c.n; ++t) keys[t] = std::int32_t(j0) + c.keys[t];
          p.visit(p.context, p.codes.first_query + c.query, keys, c.values, c.n);
        });
}

}  // namespace

index_t collisions_scratch(const PairCodes& p) {
  Cut cut{nullptr};
  CollisionScratch scratch(p, cut);
  return cut.used;
}

void collisions(const CollisionPass& p) {
  bytes_suffice(p.codes) ? compare<std::uint8_t>(p) : compare<std::uint16_t>(p);
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

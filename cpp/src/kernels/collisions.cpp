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
  std::uint8_t in_block[kBlock + 4];
  std::int32_t counts[kBlock + 4], keys[kBlock];
  Colliding<std::int32_t> found{in_block, counts};
  for (index_t j0 = 0; j0 < p.codes.n_keys; j0 += kBlock)
    for_each_query<Code>(
        p.codes, s, j0, smaller(kBlock, p.codes.n_keys - j0), found,
        [](Code count) { return std::int32_t(count); },
        [&] {
          for (int t = 0; t < found.n; ++t) keys[t] = std::int32_t(j0) + in_block[t];
          p.visit(p.context, p.codes.first_query + found.query, keys, counts, found.n);
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

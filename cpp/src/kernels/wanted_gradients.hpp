#pragma once
// Which of the gradients of queries and keys a kernel computes.
#include <type_traits>

#include "kernels.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// call(to_query, to_key): whether each of the two is wanted, as constants. At least one is.
template <class Call>
LSHKIT_INLINE auto with_wanted(const PairGradient<float>& p, const Call& call) {
  using Yes = std::true_type;
  using No = std::false_type;
  return !p.key_grad.data    ? call(Yes{}, No{})
         : p.query_grad.data ? call(Yes{}, Yes{})
                             : call(No{}, Yes{});
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

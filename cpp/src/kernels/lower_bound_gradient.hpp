#pragma once
// The ways of lower_bound_gradient.cpp.
#include "kernels.hpp"

namespace lshkit {
namespace LSHKIT_ISA {

index_t lower_bound_lists_scratch(const LowerBoundGradient&);  // bytes
bool lower_bound_lists(const LowerBoundGradient&);             // false: there are too many pairs
bool lower_bound_pairs_pay(const LowerBoundGradient&);         // to compare all pairs, for buckets
index_t lower_bound_pairs_scratch(const LowerBoundGradient&);  // bytes
void lower_bound_pairs(const LowerBoundGradient&);
index_t lower_bound_buckets_scratch(const LowerBoundGradient&);  // bytes
void lower_bound_buckets(const LowerBoundGradient&);

}  // namespace LSHKIT_ISA
}  // namespace lshkit

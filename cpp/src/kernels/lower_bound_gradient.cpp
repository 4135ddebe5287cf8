// Gradient of queries and keys with the lower bound of the derivative (YOSO, ICML 2021, eq. 4).
// Three ways to the same sum: lower_bound_lists where few rows share a bucket, else
// lower_bound_pairs for short sequences and lower_bound_buckets for long ones.
#include "lower_bound_gradient.hpp"

#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// Rows up to which comparing all pairs pays: it needs buckets of a few rows too.
bool few(const LowerBoundGradient& p) {
  constexpr index_t kRows = 1024;
  const index_t most = p.key.rows > p.query.rows ? p.key.rows : p.query.rows;
  return most <= kRows && most <= 4 * p.n_buckets && p.n_hashes <= 65535;  // counts of 16 bits
}

}  // namespace

index_t lower_bound_scratch(const LowerBoundGradient& p) {
  const index_t lists = lower_bound_lists_pay(p) ? lower_bound_lists_scratch(p) : 0;
  return larger(lists, few(p) ? lower_bound_pairs_scratch(p) : lower_bound_buckets_scratch(p));
}

void lower_bound_gradient(const LowerBoundGradient& p) {
  if (lower_bound_lists_pay(p) && lower_bound_lists(p)) return;
  few(p) ? lower_bound_pairs(p) : lower_bound_buckets(p);
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

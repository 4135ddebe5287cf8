// Gradient of queries and keys with the lower bound of the derivative (YOSO, ICML 2021, eq. 4).
// Three ways to the same sum: lower_bound_lists where few rows share a bucket, else
// lower_bound_pairs for short sequences and lower_bound_buckets for long ones.
#include "lower_bound_gradient.hpp"

#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// Whether comparing all pairs takes less time than buckets do: up to so many rows, and so many in a
// bucket. Of causal heads, whose buckets are read in parts, these are more (Zen 3, 8 bits, forward
// and backward: 0.6 of the time at 2,048 to 8,192 rows; not causal 0.8 at 2,048, 1.5 at 4,096).
bool few(const LowerBoundGradient& p) {
  const index_t rows = p.causal ? 8192 : 2048, in_bucket = p.causal ? 32 : 16;
  const index_t most = p.key.rows > p.query.rows ? p.key.rows : p.query.rows;
  return most <= rows && most <= in_bucket * p.n_buckets && p.n_hashes <= 65535;  // 16-bit counts
}

// Whether lists may be tried. Up to 1,024 keys all pairs are compared in little more time, except
// on Intel's CPUs with AVX-512 (Emerald Rapids, 512 to 1,024 rows: lists take 0.6 to 0.9 of the
// time, in clusters up to 1.2 times as long). Not where AVX512-BF16 multiplies: that is AMD's.
bool lists_pay(const LowerBoundGradient& p) {
  const index_t keys = p.key.rows;
  const bool compares_slowly = kLanes<float> == 16 && !lshkit::kernels().bfloat16_bucket &&
                               !p.causal && keys >= 512 && keys <= p.n_buckets;
  return p.query.rows > 0 && (keys > 1024 || compares_slowly) &&
         keys <= 65535 &&  // they have numbers of 16 bits
         keys <= (few(p) ? 2 : 4) * p.n_buckets && p.n_buckets <= 64 * keys;
}

}  // namespace

index_t lower_bound_scratch(const LowerBoundGradient& p) {
  const index_t lists = lists_pay(p) ? lower_bound_lists_scratch(p) : 0;
  return larger(lists, few(p) ? lower_bound_pairs_scratch(p) : lower_bound_buckets_scratch(p));
}

void lower_bound_gradient(const LowerBoundGradient& p) {
  if (lists_pay(p) && lower_bound_lists(p)) return;
  few(p) ? lower_bound_pairs(p) : lower_bound_buckets(p);
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

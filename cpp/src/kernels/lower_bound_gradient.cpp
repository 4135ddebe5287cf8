// Gradient of queries and keys with the lower bound of the derivative (YOSO, ICML 2021, eq. 4).
// Three ways to the same sum: lower_bound_lists where few rows share a bucket, else
// lower_bound_pairs for short sequences and lower_bound_buckets for long ones.
#include "lower_bound_gradient.hpp"

#include "lower_bound_bfloat16.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// Intel's CPUs with AVX-512 compare codes of 16 bits slowly, beside what lists take there. Not
// where AVX512-BF16 multiplies: that is AMD's.
bool compares_slowly(const LowerBoundGradient& p) {
  return kLanes<float> == 16 && !lshkit::kernels().bfloat16_bucket && p.code_bytes == 2;
}

// Whether lists may be tried. Up to 1,024 keys all pairs are compared in little more time; where
// that is slow, lists take 0.4 to 0.9 of the time from 512 on, in clusters up to 1.2 times as long.
bool lists_pay(const LowerBoundGradient& p) {
  const index_t keys = p.key.rows;
  const bool short_pays = compares_slowly(p) && !p.causal && keys <= p.n_buckets;
  return p.query.rows > 0 && keys > (short_pays ? 511 : 1024) &&
         keys <= 65535 &&  // they have numbers of 16 bits
         keys <= (lower_bound_pairs_pay(p) ? 2 : 4) * p.n_buckets && p.n_buckets <= 64 * keys;
}

}  // namespace

// Whether comparing all pairs takes less time than buckets do: up to so many rows, and so many in a
// bucket. Of causal heads, whose buckets are read in parts, these are more, fewer where tiles take
// them whole. Of few hashes they are fewer: listing what collides does not take less time, buckets
// do (4 hashes: 1.5 of the time of buckets at 2,048 rows and at 4,096 causal ones; 8: 1.0).
bool lower_bound_pairs_pay(const LowerBoundGradient& p) {
  const index_t causal_rows = takes_words(p) ? 3700 : compares_slowly(p) ? 4096 : 8192;
  const index_t rows = p.n_hashes < 12 ? 1024 : p.causal ? causal_rows : 2048;
  const index_t in_bucket = p.causal ? 32 : 16;
  const index_t most = p.key.rows > p.query.rows ? p.key.rows : p.query.rows;
  return most <= rows && most <= in_bucket * p.n_buckets && p.n_hashes <= 65535;  // 16-bit counts
}

index_t lower_bound_scratch(const LowerBoundGradient& p) {
  const index_t lists = lists_pay(p) ? lower_bound_lists_scratch(p) : 0;
  return larger(lists, lower_bound_pairs_pay(p) ? lower_bound_pairs_scratch(p)
                                                : lower_bound_buckets_scratch(p));
}

void lower_bound_gradient(const LowerBoundGradient& p) {
  if (lists_pay(p) && lower_bound_lists(p)) return;
  lower_bound_pairs_pay(p) ? lower_bound_pairs(p) : lower_bound_buckets(p);
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

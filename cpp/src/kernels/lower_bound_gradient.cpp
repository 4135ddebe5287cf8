// Gradient of queries and keys with the lower bound of the derivative (YOSO, ICML 2021, eq. 4).
// Three ways to the same sum: lower_bound_lists where few rows share a bucket, else
// lower_bound_pairs for short sequences and lower_bound_buckets for long ones.
#include "lower_bound_gradient.hpp"

#include "lower_bound_bfloat16.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr bool kWide = kLanes<float> == 16;
// AVX-512 compares codes of 16 bits slowly, beside what lists take there.
bool compares_slowly(const LowerBoundGradient& p) { return kWide && p.code_bytes == 2; }

// Keys a bucket up to which lists are faster than the other way. Against buckets both take as long
// at 2.2, causal 3.3 (Zen 4, 11 to 14 bits): AVX-512 halves the time of products, of which a mask
// wastes half. With AVX2 it is 3.1 and more than 4.
index_t most_of_bucket(const LowerBoundGradient& p) {
  if (lower_bound_pairs_pay(p)) return compares_slowly(p) ? 3 : 2;
  return (kWide ? 2 : 3) + (p.causal ? 1 : 0);
}

// Whether lists may be tried. Up to 1,024 keys comparing all pairs takes hardly more time, except
// where that is slow: there lists take 0.6 to 0.9 of the time from 512 on, causal from 768.
bool lists_pay(const LowerBoundGradient& p) {
  const index_t keys = p.key.rows, least = !compares_slowly(p) ? 1025 : p.causal ? 768 : 512;
  return p.query.rows > 0 && keys >= least && keys <= 65535 &&  // they have numbers of 16 bits
         keys <= most_of_bucket(p) * p.n_buckets && p.n_buckets <= 64 * keys;
}

}  // namespace

// Whether comparing all pairs takes less time than buckets do: up to so many rows, and so many in a
// bucket. Of causal heads, whose buckets are read in parts, these are more, fewer where tiles take
// them whole. The limits are for rows that crowd: of those in clusters all pairs take 0.5 to 0.8 of
// the time of buckets at 4,096 and 8,192 causal rows, of uniform codes of 9 to 11 bits 1.2 to 1.5
// (Zen 4). With fewer than 12 hashes they are lower: listing what collides does not take less time,
// buckets do (4 hashes: 1.5 of the time of buckets at 2,048 rows and at 4,096 causal ones; 8: 1.0).
bool lower_bound_pairs_pay(const LowerBoundGradient& p) {
  const index_t causal_rows = takes_words(p) ? 3700 : 8192;
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

#pragma once
// The near window of the sampled estimator on one head: what is added to the raw output, before its
// normalisation, and to the gradients, before they go through that of queries and keys.
#include "attention_head.hpp"
#include "bucket_sum.hpp"

namespace lshkit {

// Queries of a run: the forward shares a long sequence among threads.
constexpr index_t kWindowRun = 768;
inline index_t window_runs(const AttentionOptions& options, index_t n_queries) {
  return options.window > 0 ? (n_queries + kWindowRun - 1) / kWindowRun : 0;
}

inline void fill_window_pairs(WindowPairs& p, const AttentionHead<float>& head,
                              const Norms<float>& norms, const HeadSum<float>& sampled,
                              const AttentionOptions& options, int n_bits) {
  fill_pair_gradient<float>(p, head, norms, {}, nullptr, options.causal, {}, {});
  p.codes = {sampled.query_codes, sampled.key_codes,
             sampled.code_bytes,  sampled.n_hashes,
             sampled.n_queries,   sampled.n_keys,
             norms.query_valid,   norms.key_valid,
             options.causal,      0};
  p.n_bits = n_bits;
  p.window = options.window;
}

// Run `run` of the window, added to sampled.out and, where not null, to the sums of the weights.
inline void add_window(const AttentionHead<float>& head, const Norms<float>& norms,
                       const HeadSum<float>& sampled, const AttentionOptions& options, int n_bits,
                       index_t run, float* sums) {
  WindowSum p;
  fill_window_pairs(p, head, norms, sampled, options, n_bits);
  p.first = run * kWindowRun;
  p.last = std::min(sampled.n_queries, p.first + kWindowRun);
  p.out = sampled.out;
  p.row_sum = sums;
  p.scratch = thread_scratch(kernels().window_scratch(p));
  kernels().window_sum(p);
}

// Adds to the gradients of queries and keys in p, which are in the unit vectors, and of the values.
inline void add_window_gradient(const PairGradient<float>& gradient,
                                const AttentionHead<float>& head, const Norms<float>& norms,
                                const HeadSum<float>& sampled, const AttentionOptions& options,
                                int n_bits, Matrix<float> value_grad) {
  WindowGradient p;
  fill_window_pairs(p, head, norms, sampled, options, n_bits);
  static_cast<PairGradient<float>&>(p) = gradient;
  p.weight = options.gradient;
  p.value_grad = value_grad;
  p.scratch = thread_scratch(kernels().window_scratch(p));
  kernels().window_gradient(p);
}

}  // namespace lshkit

#pragma once
// The near window of the sampled estimator on one head: what is added to the raw output, before its
// normalisation, and to the gradients, before they go through that of queries and keys.
#include "attention_head.hpp"
#include "bucket_sum.hpp"

namespace lshkit {

inline void fill_window_pairs(WindowPairs& p, const Norms<float>& norms,
                              const HeadSum<float>& sampled, const AttentionOptions& options,
                              int n_bits) {
  p.codes = {sampled.query_codes, sampled.key_codes,
             sampled.code_bytes,  sampled.n_hashes,
             sampled.n_queries,   sampled.n_keys,
             norms.query_valid,   norms.key_valid,
             options.causal,      0};
  p.n_bits = n_bits;
  p.window = options.window;
}

// Added to sampled.out and, where not null, to the sums of the weights.
inline void add_window(const AttentionHead<float>& head, const Norms<float>& norms,
                       const HeadSum<float>& sampled, const AttentionOptions& options, int n_bits,
                       float* sums) {
  WindowSum p;
  HeadBackward<float> b{};
  b.head = head;
  fill_pair_gradient<float>(p, b, norms, {}, nullptr, options.causal);
  fill_window_pairs(p, norms, sampled, options, n_bits);
  p.first = 0;
  p.last = sampled.n_queries;
  p.out = sampled.out;
  p.row_sum = sums;
  p.scratch = thread_scratch(kernels().window_scratch(p));
  kernels().window_sum(p);
}

// Adds to the gradients of queries and keys in p, which are in the unit vectors, and of the values.
inline void add_window_gradient(const PairGradient<float>& gradient, const Norms<float>& norms,
                                const HeadSum<float>& sampled, const AttentionOptions& options,
                                int n_bits, Matrix<float> value_grad) {
  WindowGradient p;
  static_cast<PairGradient<float>&>(p) = gradient;
  fill_window_pairs(p, norms, sampled, options, n_bits);
  p.weight = options.gradient;
  p.value_grad = value_grad;
  p.scratch = thread_scratch(kernels().window_scratch(p));
  kernels().window_gradient(p);
}

}  // namespace lshkit

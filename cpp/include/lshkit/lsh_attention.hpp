#pragma once
// Softmax attention estimated from the pairs of queries and keys whose codes collide. With s_ij =
// scale q_i . k_j and the pairs (i, j) that are used, out_i = sum_j w_ij v_j / sum_j w_ij, w_ij =
// exp(s_ij) / P_ij: P_ij is the probability that the pair is used, so that both sums are unbiased
// for those over all pairs (Horvitz and Thompson 1952).
#include "lshkit/attention.hpp"

namespace lshkit {

// P of a pair whose codes agree in one of m hashes with probability p = (1 - angle / 180 degrees)
// ^ n_bits. Pairs with P below 1e-20 are rounding's work and count nothing.
//   horvitz_thompson  1 - (1 - p)^m: pairs that collide in some hash
//   none              1, of the same pairs
//   magicpig          1 - (1 - p)^m - m p (1 - p)^(m - 1): those that collide in two (Chen et al.
//                     2024)
enum class Weighting : int { horvitz_thompson = 0, none = 1, magicpig = 2 };

struct LshAttentionOptions {
  float scale = 1;
  Weighting weighting = Weighting::horvitz_thompson;
  bool causal = false;  // query i sees keys j <= i + offset
  index_t offset = 0;   // position of query 0 among the keys
  index_t window = 0;   // pairs with |i + offset - j| < window are used with probability 1,
  index_t n_sinks = 0;  // as are those of the first keys that the mask lets take part
  int n_bits = 1;
  index_t n_hashes = 1;  // <= 65535
};

// Queries and keys as they were hashed: q_i . k_j needs to be right up to a number for each query.
struct LshAttentionInputs {
  Tensor<const float> query, key, value;
  Mask key_mask;
  Codes query_codes, key_codes;
};

// log_sum_i = log sum_j w_ij, -infinity where query i uses no pair (its output is zero), and how
// many pairs it uses: (batch, heads, n_queries). It is a double so that weights w_ij / sum_j w_ij
// of large scores are not off by a factor. A query with a NaN or infinity has an output of NaN,
// such a key takes no part. Packed sequences are not taken.
void lsh_attention_forward(const AttentionShape& shape, const LshAttentionOptions& options,
                           const LshAttentionInputs& in, Tensor<float> out, double* log_sum,
                           std::int32_t* pairs, int threads);

struct LshAttentionGradients {
  Tensor<const float> out, grad_out;
  const double* log_sum;
  Tensor<float> query, key, value;  // null data: not computed; else every element is written
};
// With the P_ij constant. One task for each head of keys.
void lsh_attention_backward(const AttentionShape& shape, const LshAttentionOptions& options,
                            const LshAttentionInputs& in, const LshAttentionGradients& gradients,
                            int threads);

}  // namespace lshkit

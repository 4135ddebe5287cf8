#pragma once
// YOSO attention as a client of the verbs (Zeng et al., ICML 2021). It contains no hashing: codes
// come from hash(), sums from bucket_sum's kernels.
#include "lshkit/hash.hpp"
#include "lshkit/tensor.hpp"

namespace lshkit {

enum class Normalize : int { none = 0, sum = 1, l2 = 2 };
// Weight of a pair in the gradient of queries and keys, x its cosine, p(x) = (1 -
// acos(x)/pi)^n_bits its collision probability and p'(x) the derivative of p (eq. 3), whose 1 - x^2
// is floored at 1e-6 (float) or 1e-12 (double): x = 1 has no direction to move in.
//   lower_bound  n_bits/2 * p (eq. 4); from the collisions themselves where there are codes
//   exact        p'(x) of all pairs: the expectation's
//   collided     p'(x) of the pairs that collide in some hash (*YOSO, appendix 1.4)
//   unbiased     p'(x) / (1 - (1 - p)^n_hashes) of the pairs that collide in some hash
enum class Gradient : int { lower_bound = 0, exact = 1, collided = 2, unbiased = 3 };

// Codes of the first n_hashes hashes alone, contiguous: those that the gradient of queries and keys
// is taken from, an unbiased estimate with more noise. n_hashes 0: all of them.
struct GradientCodes {
  Codes queries, keys;
  index_t n_hashes = 0;
};

// What the forward left: its output, and what it divided each row of sums by, (batch, heads,
// n_queries). The backward restores the sums from them; with no divisors, and in double, it sums
// again.
struct KeptOutput {
  Input<float> out;
  const float* divisors = nullptr;
};

struct AttentionShape {
  index_t batch = 1, heads = 1, n_queries = 0, n_keys = 0, n_features = 0, n_values = 0;
  // Heads of keys and values, each read by heads / key_heads heads of queries in turn and with hash
  // functions of its own; 0: as many as heads.
  index_t key_heads = 0;
  // Packed sequences, batch 1: sequence s has the rows [starts[s], starts[s + 1]) and sees itself
  // alone. Arrays of sequences + 1 numbers from 0 to the number of rows, or null.
  index_t sequences = 0;
  const index_t *query_starts = nullptr, *key_starts = nullptr;
};
struct AttentionOptions {
  bool causal = false;  // query i sees keys j <= i
  Normalize normalize = Normalize::l2;
  Gradient gradient = Gradient::lower_bound;
  GradientCodes gradient_codes = {};
  KeptOutput kept = {};
  // Products of the sampled lower bound's gradient in bfloat16, sums in float32, where the CPU has
  // such instructions: for inputs that have no more digits.
  bool bfloat16_products = false;
};
template <class T>
struct AttentionInputs {
  Input<T> query, key, value;  // queries and keys need not have unit norm: they are scaled
  Mask key_mask;
};
template <class T>
struct AttentionGradients {
  Input<T> out;                 // gradient of the loss in the output
  Output<T> query, key, value;  // null data: not computed; else every element is written
};

// Sampled estimator (YOSO-m). Writes out and the contiguous codes (batch, heads, rows, n_hashes) of
// queries and of keys, the latter with key_heads heads,
// that the backward takes, and divisors for KeptOutput, unless null or nothing is divided. Rows
// with a NaN or infinity: such a query's output is NaN, such a key takes no part.
void yoso_forward(const AttentionShape& shape, const AttentionOptions& options,
                  const HashFunctions& functions, AttentionInputs<float> in, Output<float> out,
                  void* query_codes, void* key_codes, int threads, float* divisors = nullptr);
void yoso_backward(const AttentionShape& shape, const AttentionOptions& options, int n_bits,
                   index_t n_hashes, AttentionInputs<float> in, Codes query_codes, Codes key_codes,
                   AttentionGradients<float> gradients, int threads);

// Expectation over the hash functions (YOSO-E), blocked: memory is linear in the lengths. T: float
// or double. divisors: for KeptOutput, unless null or nothing is divided.
template <class T>
void expected_forward(const AttentionShape& shape, const AttentionOptions& options, int n_bits,
                      AttentionInputs<T> in, Output<T> out, int threads, T* divisors = nullptr);
template <class T>
void expected_backward(const AttentionShape& shape, const AttentionOptions& options, int n_bits,
                       AttentionInputs<T> in, AttentionGradients<T> gradients, int threads);

}  // namespace lshkit

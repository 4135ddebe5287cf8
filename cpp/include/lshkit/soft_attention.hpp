#pragma once
// Attention with soft codes: the weight of a pair is the mean over the hashes of the product of the
// weights of the query and of the key in the buckets that they share (soft_hash.hpp). A sparse,
// positive feature map of queries and keys: the output is a weighted bucket sum, and its exact
// gradient, given the selected bits, is linear in the lengths too.
#include "lshkit/attention.hpp"
#include "lshkit/soft_hash.hpp"

namespace lshkit {

struct SoftOptions {
  bool causal = false;
  Normalize normalize = Normalize::l2;
  index_t query_probes = 4, key_probes = 4;  // 1 to 2^n_bits; 1: the code itself, with weight 1
  const float* sharpness = nullptr;          // one number, or one a head of keys, stride 1
  index_t sharpness_stride = 0;
};
// What the backward takes from the forward; see SoftCodes.
struct SoftCodesOut {
  void* codes;
  float* margins;
};

// Rows with a NaN or infinity: such a query's output is NaN, such a key takes no part.
// divisors (batch, heads, n_queries) gets what a row of sums was divided by; null for
// Normalize::none.
void soft_attention_forward(const AttentionShape& shape, const SoftOptions& options,
                            const HashFunctions& functions, AttentionInputs<float> in,
                            Output<float> out, float* divisors, SoftCodesOut queries,
                            SoftCodesOut keys, int threads);
// out and divisors are the forward's: the sums are needed again, and to hash, look up and add takes
// a fifth of the time of forward and backward.
// sharpness_grads: null, or (batch or sequences, heads), to be summed over what shares one
// sharpness.
// parameter_grads: null, or for hyperplanes the gradient of every set of them, (1 or key heads,
// n_hashes * n_bits, n_features). It is summed in up to key heads + 63 parts, one set in size each.
void soft_attention_backward(const AttentionShape& shape, const SoftOptions& options,
                             const HashFunctions& functions, AttentionInputs<float> in,
                             Input<float> out, const float* divisors, SoftCodes queries,
                             SoftCodes keys, AttentionGradients<float> gradients,
                             float* sharpness_grads, float* parameter_grads, int threads);

}  // namespace lshkit

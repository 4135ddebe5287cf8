#pragma once
// The kernels of lsh_attention on one head of keys, of one instruction set.
#include "kernels.hpp"
#include "lshkit/lsh_attention.hpp"

namespace lshkit {

// The rows of each bucket of each hash, ascending: (n_hashes, n_buckets + 1) and (n_hashes,
// n_rows). None: collisions are found by comparison.
struct BucketRows {
  const std::int32_t *start = nullptr, *order = nullptr;
  index_t n_buckets = 0, n_rows = 0;
};

struct SoftmaxKeys {
  Matrix<const float> key, value;
  const void* codes;          // (rows, n_hashes)
  const float* inverse_norm;  // 1 / |k_j|, 0 for a row of zeros
  const std::uint8_t* valid;
  index_t last_sink;  // the valid keys before it are sinks
};
// A run of queries of one head.
struct SoftmaxQueries {
  Matrix<const float> query;
  const void* codes;
  const float* inverse_norm;
  const std::uint8_t* valid;
  index_t position;  // of the first query among the keys
};
struct SoftmaxForward {
  LshAttentionOptions options;
  int code_bytes;
  SoftmaxKeys keys;
  SoftmaxQueries queries;
  BucketRows key_buckets;
  Matrix<float> out;
  double* log_sum;
  std::int32_t* pairs;
  void* scratch;  // 64-byte aligned
};
struct SoftmaxQueryGradient : SoftmaxQueries {
  Matrix<const float> grad_out;
  const double* log_sum;
  const float* along;  // along_i = grad_out_i . out_i
  Matrix<float> grad_query;
  BucketRows buckets;
};
// All queries that read these keys, head after head.
struct SoftmaxBackward {
  LshAttentionOptions options;
  int code_bytes;
  SoftmaxKeys keys;
  const SoftmaxQueryGradient* heads;
  index_t n_heads;
  Matrix<float> grad_key, grad_value;
  void* scratch;
};

}  // namespace lshkit

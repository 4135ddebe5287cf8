#pragma once
// Softmax attention of single queries over a long cache, from the few keys that their codes point
// to (reference/code_cache.py, which defines every integer here). A key's code is the signs of
// n_bits projections, its norm and its value's size, in a byte each. A query keeps its projections,
// estimates all scores from the signs, and reads a key with a known probability that grows with the
// estimate and the size.
#include "lshkit/tensor.hpp"

namespace lshkit {

// Codes of kCodeBlock keys lie together: n_bits / 8 rows of their signs' bytes, in which key j of
// the block has byte 2 (j % 32) + j / 32, and then each key's norm and its value's size, side by
// side.
constexpr index_t kCodeBlock = 64;
constexpr index_t block_bytes(index_t n_bits) { return (n_bits / 8 + 2) * kCodeBlock; }

// Borrowed memory of one layer. Sequence b has keys from row starts[b] of its matrices on, and the
// code of the first of them is the first of its codes.
struct CodedKeys {
  index_t batch = 1, key_heads = 1, n_features = 0, n_values = 0, n_bits = 64;
  index_t rows = 0;                      // of key and value that are in use
  const std::int64_t* starts = nullptr;  // (batch)
  Input<float> key, value;               // (batch, key_heads, rows, n_features or n_values)
  std::uint8_t* codes = nullptr;         // (batch, key_heads, n_blocks, block_bytes(n_bits))
  index_t n_blocks = 0;
  const float* planes = nullptr;  // (key_heads, n_features, n_bits)
  const float* centre = nullptr;  // (batch, key_heads, n_features), taken from a key before hashing
  const float* norm = nullptr;    // (batch, key_heads): 64 in a byte of norms
  // Taken from a value before its norm, and what that is relative to.
  const float* value_centre = nullptr;  // (batch, key_heads, n_values)
  const float* value_norm = nullptr;    // (batch, key_heads)
};

// Codes of the keys begin to end of a sequence, counted from its start.
void code_keys(const CodedKeys& keys, index_t sequence, index_t begin, index_t end, int threads);

struct CodeStepOptions {
  float scale = 1;
  index_t n_sinks = 0, window = 1;
  float epsilon = 0.1f, quantile = 1.96f;  // of a standard normal, at 1 - delta / 2
  float min_share = 0.01f, max_share = 0.05f;
  index_t exact_up_to = 1024;  // keys, of which all are read
  std::uint64_t seed = 0;
};

struct CodeStepOutputs {
  Tensor<float> out;                           // (batch, heads, n_queries, n_values)
  float *log_sum = nullptr, *error = nullptr;  // (batch, heads, n_queries)
  std::int32_t* n_read = nullptr;
};

// Query i sees the keys up to row keys.rows - n_queries + i. One without a key gives zeros and a
// log_sum of -infinity, one with a NaN or infinity a NaN row.
void code_step(const CodedKeys& keys, Tensor<const float> query, index_t heads, index_t n_queries,
               const CodeStepOptions& options, const CodeStepOutputs& outputs, int threads);

}  // namespace lshkit

#pragma once
// Sampled attention step by step: the bucket tables of every sequence and key head, which take in
// keys and answer queries at a cost that does not depend on how many keys they hold.
#include "lshkit/attention.hpp"

namespace lshkit {

// float16: sums are rounded to nearest after every addition, whose arithmetic is float32.
enum class TableType : int { float32 = 0, float16 = 1 };

// Borrowed memory. `group` query heads read the tables of one key head: query head h those of key
// head h / group, with that head's hash functions.
struct DecodingTables {
  index_t batch = 1, key_heads = 1, group = 1, n_values = 0;
  TableType type = TableType::float32;
  void* sums = nullptr;     // contiguous (batch, key_heads, n_hashes, n_buckets, n_values)
  float* counts = nullptr;  // contiguous (batch, key_heads, n_hashes, n_buckets): the weights of
                            // the keys in a bucket. Wanted for Normalize::sum alone
};

// Soft codes (soft_hash.hpp) where there is a sharpness, one number or key_heads of them with
// sharpness_stride 1; else hard ones.
struct DecodingProbes {
  index_t queries = 1, keys = 1;
  const float* sharpness = nullptr;
  index_t sharpness_stride = 0;
};

struct DecodingInputs {
  index_t n_queries = 0, n_keys = 0, n_features = 0;
  Tensor<const float> query;       // (batch, key_heads * group, n_queries, n_features)
  Tensor<const float> key, value;  // (batch, key_heads, n_keys, n_features or n_values)
  Mask key_mask;
  // Query i sees what the tables held and the keys j <= i. Otherwise all keys are added first.
  bool causal = false;
};

// Adds the keys to the tables and writes the attention of the queries: with either number 0 it does
// the other half alone. Outputs, masks and rows that are not finite are as in yoso_forward, and the
// same bits come out however the rows are divided among calls.
void decode(const DecodingTables& tables, const HashFunctions& functions,
            const DecodingProbes& probes, Normalize normalize, const DecodingInputs& in,
            Tensor<float> out, int threads);

}  // namespace lshkit

// Attention step by step as the bindings call it.
#include "lshkit/cuda/attention.hpp"
#include "lshkit/cuda/decoding.cuh"
#include "lshkit/cuda/decoding.hpp"
#include "lshkit/cuda/runtime.cuh"

namespace lshkit::cuda {

index_t decode(const Queue& queue, const DecodingTables& tables, const HashFunctions& functions,
               Normalize normalize, const DecodingRows& in, Output<float> out, void* scratch) {
  const index_t heads = tables.key_heads * tables.group;
  const index_t query_rows = tables.batch * heads * in.n_queries;
  const index_t key_rows = tables.batch * tables.key_heads * in.n_keys;
  const int counted = normalize == Normalize::sum;
  Decoding d;
  d.code_bytes = hash_code_bytes(functions.n_bits);
  Cut cut(scratch);
  auto* const query_codes = cut.take<std::uint8_t>(query_rows * functions.n_hashes * d.code_bytes);
  auto* const key_codes = cut.take<std::uint8_t>(key_rows * functions.n_hashes * d.code_bytes);
  if (tables.n_values > kDecodingColumns) {
    d.raw = cut.take<float>(query_rows * (tables.n_values + counted));
    d.raw_valid = cut.take<std::uint8_t>(query_rows);
  }
  if (!scratch) return cut.used();

  const DeviceGuard guard(queue);
  HashFunctions query_functions = functions;
  query_functions.heads_per_set = tables.group;
  if (in.n_keys > 0)
    hash(queue, functions, in.key, tables.batch, tables.key_heads, in.n_keys, in.n_features,
         key_codes);
  if (in.n_queries > 0)
    hash(queue, query_functions, in.query, tables.batch, heads, in.n_queries, in.n_features,
         query_codes);
  d.keys = {Elements(in.key), key_codes, nullptr, in.n_keys, 1};
  d.queries = {Elements(in.query), query_codes, nullptr, in.n_queries, 1};
  d.sums = tables.sums;
  d.half = tables.type == TableType::float16;
  d.counts = tables.counts;
  d.batch = tables.batch;
  d.key_heads = tables.key_heads;
  d.group = tables.group;
  d.n_hashes = functions.n_hashes;
  d.n_buckets = index_t(1) << functions.n_bits;
  d.n_values = tables.n_values;
  d.n_features = in.n_features;
  d.values = Elements(in.value);
  d.key_mask = in.key_mask.data;
  d.mask_stride = in.key_mask.batch_stride;
  d.scale = 1.0f / float(functions.n_hashes);
  d.normalize = normalize;
  d.out = Elements(out);
  d.data = out.data;
  const bool at_once =
      in.causal || in.n_keys == 0 || in.n_queries == 0 || (in.n_keys == 1 && in.n_queries == 1);
  if (at_once) {
    decode(queue, d);
  } else {  // all keys are in the tables before the first query reads
    Decoding part = d;
    part.queries.rows = 0;
    decode(queue, part);
    part = d;
    part.keys.rows = 0;
    decode(queue, part);
  }
  if (d.raw && query_rows > 0) {
    NormalizeRows n;
    n.sums = d.raw;
    n.batch = tables.batch;
    n.heads = heads;
    n.n_rows = in.n_queries;
    n.columns = tables.n_values;
    n.counts = counted;
    n.normalize = normalize;
    n.valid = d.raw_valid;
    n.out = d.out;
    n.data = d.data;
    cuda::normalize(queue, n);
  }
  return cut.used();
}

}  // namespace lshkit::cuda

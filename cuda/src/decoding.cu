// Attention step by step as the bindings call it.
#include "lshkit/cuda/attention.hpp"
#include "lshkit/cuda/decoding.cuh"
#include "lshkit/cuda/decoding.hpp"
#include "lshkit/cuda/runtime.cuh"
#include "lshkit/cuda/soft.hpp"

namespace lshkit::cuda {
namespace {

struct DecodingProblem {
  const Queue& queue;
  const DecodingTables& tables;
  const HashFunctions& functions;
  const DecodingProbes& probes;
  index_t n_features;

  int code_bytes() const { return hash_code_bytes(functions.n_bits); }
  index_t units() const { return tables.batch * tables.key_heads; }
};

// The codes of queries or keys: what hashing takes, and what it leaves.
class HashedSide {
 public:
  HashedSide(Cut& cut, const DecodingProblem& p, index_t rows, index_t group, index_t n_probes)
      : group_(group), rows_(rows), n_probes_(p.probes.sharpness ? n_probes : 1) {
    const index_t codes = p.units() * group * rows * p.functions.n_hashes;
    const bool soft = p.probes.sharpness != nullptr;
    codes_ = cut.take<std::uint8_t>((soft ? codes / group : codes) * p.code_bytes());
    if (!soft || rows == 0) return;
    const index_t selected = codes / group * selected_bits(n_probes);
    margins_ = cut.take<float>(selected);
    probe_codes_ = cut.take<std::uint8_t>(codes * n_probes * p.code_bytes());
    weights_ = cut.take<float>(codes * n_probes);
    scratch_ = cut.take<std::uint8_t>(hash_softly(p, {}, 0, nullptr));
  }

  DecodingSide hash(const DecodingProblem& p, const Input<float>& x) const {
    DecodingSide side;
    side.x = Elements(x);
    side.rows = rows_;
    side.probes = n_probes_;
    side.codes = codes_;
    side.unit_heads = group_;
    side.group_heads = 1;
    if (rows_ == 0) return side;
    if (!p.probes.sharpness) {
      HashFunctions functions = p.functions;
      functions.heads_per_set = group_;
      cuda::hash(p.queue, functions, x, p.tables.batch, p.tables.key_heads * group_, rows_,
                 p.n_features, codes_);
      return side;
    }
    // The first query heads of all key heads, then the second ones, and so on.
    side.codes = probe_codes_;
    side.weights = weights_;
    side.unit_heads = 1;
    side.group_heads = p.units();
    for (index_t g = 0; g < group_; ++g) {
      Input<float> heads = x;
      heads.data = x.row(0, g, 0);
      heads.head_stride = x.head_stride * group_;
      hash_softly(p, heads, g, scratch_);
    }
    return side;
  }

 private:
  index_t hash_softly(const DecodingProblem& p, const Input<float>& x, index_t g,
                      void* scratch) const {
    const index_t first = g * p.units() * rows_ * p.functions.n_hashes * n_probes_;
    return soft_hash(p.queue, p.functions, x, p.tables.batch, p.tables.key_heads, rows_,
                     p.n_features, n_probes_, p.probes.sharpness, p.probes.sharpness_stride,
                     {codes_, margins_}, scratch ? probe_codes_ + first * p.code_bytes() : nullptr,
                     scratch ? weights_ + first : nullptr, scratch);
  }

  index_t group_, rows_, n_probes_;
  std::uint8_t *codes_ = nullptr, *probe_codes_ = nullptr, *scratch_ = nullptr;
  float *margins_ = nullptr, *weights_ = nullptr;
};

}  // namespace

index_t decode(const Queue& queue, const DecodingTables& tables, const HashFunctions& functions,
               const DecodingProbes& probes, Normalize normalize, const DecodingRows& in,
               Output<float> out, void* scratch) {
  const index_t heads = tables.key_heads * tables.group;
  const index_t query_rows = tables.batch * heads * in.n_queries;
  const int counted = normalize == Normalize::sum;
  const DecodingProblem p{queue, tables, functions, probes, in.n_features};
  Decoding d;
  Cut cut(scratch);
  const HashedSide queries(cut, p, in.n_queries, tables.group, probes.queries);
  const HashedSide keys(cut, p, in.n_keys, 1, probes.keys);
  if (tables.n_values > kDecodingColumns) {
    d.raw = cut.take<float>(query_rows * (tables.n_values + counted));
    d.raw_valid = cut.take<std::uint8_t>(query_rows);
  }
  if (!scratch) return cut.used();

  const DeviceGuard guard(queue);
  d.keys = keys.hash(p, in.key);
  d.queries = queries.hash(p, in.query);
  d.code_bytes = p.code_bytes();
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

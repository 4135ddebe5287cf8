#include "lshkit/decoding.hpp"

#include <algorithm>
#include <cstring>

#include "attention_head.hpp"

namespace lshkit {
namespace {

// A unit is one sequence's key head. Units come key head by key head, so that the rows of several
// sequences are hashed in one go: they share its functions.
struct Plan {
  const DecodingTables& tables;
  const HashFunctions& functions;
  Normalize normalize;
  const DecodingInputs& in;
  Tensor<float> out;
  index_t key_rows, query_rows;      // of a unit in a block of positions, at most
  index_t positions, units_at_once;  // of a block
  index_t rows() const { return key_rows + query_rows; }  // of a unit
};

constexpr index_t kBlockRows = 256;                    // of all units of a block
constexpr index_t kBlockBytes = index_t(2) << 20;      // of their scratch, where a row is long
constexpr index_t kBytesPerThread = index_t(1) << 19;  // of table rows: less is done sooner alone

struct BlockScratch {
  float *x, *hash, *inverse, *counts;
  char* codes;
  std::uint8_t* valid;
  DecodingHead* heads;
  std::size_t bytes;

  BlockScratch(Arena arena, const Plan& p) {
    const HashFunctions& f = p.functions;
    const index_t rows = p.units_at_once * p.rows();
    x = arena.take<float>(rows * p.in.n_features);
    hash = arena.take<float>(kHashTile * (2 * f.columns + f.n_hashes + kHashPadding));
    inverse = arena.take<float>(rows);
    counts = arena.take<float>(p.tables.counts ? rows : 0);
    codes = arena.take<char>(rows * f.n_hashes * (f.n_bits <= 8 ? 1 : 2));
    valid = arena.take<std::uint8_t>(rows);
    heads = arena.take<DecodingHead>(p.units_at_once);
    bytes = arena.used();
  }
};

float* gather(float* to, Tensor<const float> x, index_t batch, index_t head, index_t first,
              index_t rows, index_t columns) {
  const float* from = x.matrix(batch, head) + first * x.row_stride;
  for (index_t i = 0; i < rows; ++i, to += columns)
    std::memcpy(to, from + i * x.row_stride, sizeof(float) * columns);
  return to;
}

// The positions [first, last) of the units [first_unit, last_unit), keys and queries alike.
void run_block(const Plan& p, const BlockScratch& s, index_t first_unit, index_t last_unit,
               index_t first, index_t last) {
  const DecodingTables& t = p.tables;
  const HashFunctions& f = p.functions;
  const index_t d = p.in.n_features, n_buckets = index_t(1) << f.n_bits;
  const index_t keys = std::clamp<index_t>(p.in.n_keys - first, 0, last - first);
  const index_t queries = std::clamp<index_t>(p.in.n_queries - first, 0, last - first);
  const index_t rows = keys + t.group * queries;
  const int code_bytes = f.n_bits <= 8 ? 1 : 2;
  const index_t row_codes = f.n_hashes * code_bytes;

  float* x = s.x;
  for (index_t unit = first_unit; unit < last_unit; ++unit) {
    const index_t head = unit / t.batch, b = unit % t.batch;
    x = gather(x, p.in.key, b, head, first, keys, d);
    for (index_t g = 0; g < t.group; ++g)
      x = gather(x, p.in.query, b, head * t.group + g, first, queries, d);
  }

  bool finite = true;
  const auto hash_rows =
      f.family == Family::hadamard ? kernels().hash_hadamard : kernels().hash_hyperplane;
  for (index_t unit = first_unit, end; unit < last_unit; unit = end) {
    const index_t head = unit / t.batch;
    end = std::min(last_unit, (head + 1) * t.batch);
    HashRows h;
    h.parameters = f.parameters + head * f.head_stride;
    h.columns = f.columns;
    h.n_bits = f.n_bits;
    h.n_hashes = f.n_hashes;
    h.x = s.x + (unit - first_unit) * rows * d;
    h.row_stride = h.n_features = d;
    h.rows = (end - unit) * rows;
    h.codes = s.codes + (unit - first_unit) * rows * row_codes;
    h.scratch = s.hash;
    finite &= hash_rows(h);
  }

  for (index_t unit = first_unit; unit < last_unit; ++unit) {
    const index_t index = unit - first_unit, row = index * rows;
    const index_t head = unit / t.batch, b = unit % t.batch, table = b * t.key_heads + head;
    DecodingHead& h = s.heads[index];
    h.half = t.type == TableType::float16;
    h.sums = static_cast<char*>(t.sums) +
             table * f.n_hashes * n_buckets * t.n_values * index_t(h.half ? 2 : sizeof(float));
    h.counts = t.counts ? t.counts + table * f.n_hashes * n_buckets : nullptr;
    h.code_bytes = code_bytes;
    h.n_hashes = f.n_hashes;
    h.n_buckets = n_buckets;
    h.n_values = t.n_values;
    h.keys = {s.codes + row * row_codes, nullptr, 1, keys};
    h.queries = {s.codes + (row + keys) * row_codes, nullptr, 1, queries};
    h.group = t.group;
    h.values = p.in.value.matrix(b, head) + first * p.in.value.row_stride;
    h.value_stride = p.in.value.row_stride;
    h.key_valid = p.in.key_mask.rows(b);
    if (h.key_valid) h.key_valid += first;
    if (!finite) {
      const Matrix<const float> key_rows{s.x + row * d, d, keys, d};
      const Matrix<const float> query_rows{s.x + (row + keys) * d, d, t.group * queries, d};
      kernels().f32.inverse_norms(key_rows, h.key_valid, s.inverse, s.valid + row);
      kernels().f32.inverse_norms(query_rows, nullptr, s.inverse, s.valid + row + keys);
      h.key_valid = s.valid + row;
    }
    h.causal = p.in.causal;
    h.out = p.out.matrix(b, head * t.group) + first * p.out.row_stride;
    h.out_row_stride = p.out.row_stride;
    h.out_head_stride = p.out.head_stride;
    h.out_counts = s.counts + row;
  }
  kernels().decode_heads(s.heads, last_unit - first_unit);

  const float scale = 1.0f / float(f.n_hashes);
  for (index_t unit = first_unit; unit < last_unit && queries > 0; ++unit) {
    const index_t index = unit - first_unit;
    const DecodingHead& h = s.heads[index];
    for (index_t g = 0; g < t.group; ++g) {
      const Matrix<float> out{h.out + g * h.out_head_stride, h.out_row_stride, queries, t.n_values};
      float* counts = h.counts ? h.out_counts + g * queries : nullptr;
      for (index_t i = 0; i < queries; ++i) {
        for (index_t c = 0; c < t.n_values; ++c) out.row(i)[c] *= scale;
        if (counts) counts[i] *= scale;
      }
      normalize_output(p.normalize, out, counts);
      if (!finite) fill_invalid_rows(out, s.valid + index * rows + keys + g * queries);
    }
  }
}

void run(Plan p, int threads) {
  const DecodingTables& t = p.tables;
  const HashFunctions& f = p.functions;
  const index_t units = t.batch * t.key_heads;
  const index_t length = std::max(p.in.n_keys, p.in.n_queries);
  const index_t position_rows = (p.in.n_keys > 0) + t.group * (p.in.n_queries > 0);
  const index_t row_bytes = p.in.n_features * index_t(sizeof(float)) + 2 * f.n_hashes;
  const index_t most_rows = std::clamp<index_t>(kBlockBytes / row_bytes, 1, kBlockRows);
  p.positions = std::clamp<index_t>(most_rows / position_rows, 1, length);
  p.key_rows = p.in.n_keys > 0 ? p.positions : 0;
  p.query_rows = p.in.n_queries > 0 ? t.group * p.positions : 0;

  const index_t touched = units * length * position_rows * f.n_hashes * t.n_values;
  if (touched * index_t(sizeof(float)) < 2 * kBytesPerThread) threads = 1;
  const index_t shares = std::min<index_t>(units, thread_count(threads));
  p.units_at_once = std::clamp<index_t>(most_rows / p.rows(), 1, (units + shares - 1) / shares);
  parallel_for((units + p.units_at_once - 1) / p.units_at_once, threads, [&](index_t task) {
    const std::size_t bytes = BlockScratch(Arena(), p).bytes;
    const BlockScratch s(Arena(thread_scratch(bytes)), p);
    const index_t unit = task * p.units_at_once;
    const index_t last_unit = std::min(units, unit + p.units_at_once);
    for (index_t first = 0; first < length; first += p.positions)
      run_block(p, s, unit, last_unit, first, std::min(length, first + p.positions));
  });
}

}  // namespace

void decode(const DecodingTables& tables, const HashFunctions& functions, Normalize normalize,
            const DecodingInputs& in, Tensor<float> out, int threads) {
  if (tables.batch * tables.key_heads * (in.n_keys + in.n_queries) == 0) return;
  // The keys of all blocks must be in the tables before the first query reads.
  if (in.causal || in.n_keys == 0 || in.n_queries == 0 || std::max(in.n_keys, in.n_queries) == 1)
    return run({tables, functions, normalize, in, out, 0, 0, 0, 0}, threads);
  DecodingInputs keys = in, queries = in;
  keys.n_queries = queries.n_keys = 0;
  queries.key_mask = {};
  run({tables, functions, normalize, keys, out, 0, 0, 0, 0}, threads);
  run({tables, functions, normalize, queries, out, 0, 0, 0, 0}, threads);
}

}  // namespace lshkit

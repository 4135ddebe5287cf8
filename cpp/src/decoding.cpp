#include "lshkit/decoding.hpp"

#include <algorithm>
#include <cstring>

#include "attention_head.hpp"
#include "soft_hash.hpp"

namespace lshkit {
namespace {

// A unit is one sequence's key head. Units come key head by key head, so that the rows of several
// sequences are hashed in one go: they share its functions.
struct Plan {
  const DecodingTables& tables;
  const HashFunctions& functions;
  const DecodingProbes& probes;
  Normalize normalize;
  const DecodingInputs& in;
  Tensor<float> out;
  index_t positions = 0, units_at_once = 0;  // of a block, at most

  bool soft() const { return probes.sharpness != nullptr; }
  int code_bytes() const { return functions.n_bits <= 8 ? 1 : 2; }
  int n_selected() const { return selected_bits(std::max(probes.queries, probes.keys)); }
  index_t n_buckets() const { return index_t(1) << functions.n_bits; }
  index_t key_rows() const { return in.n_keys > 0 ? 1 : 0; }  // of a unit and position
  index_t query_rows() const { return in.n_queries > 0 ? tables.group : 0; }
  index_t position_rows() const { return key_rows() + query_rows(); }
};

constexpr index_t kBlockRows = 1024;                   // of all units of a block
constexpr index_t kBlockBytes = index_t(2) << 20;      // of their scratch, where a row is long
constexpr index_t kBytesPerThread = index_t(1) << 19;  // of table rows: less is done sooner alone

SoftHashRows soft_rows(const Plan& p) {
  SoftHashRows h;
  h.family = p.functions.family;
  h.columns = p.functions.columns;
  h.n_bits = p.functions.n_bits;
  h.n_hashes = p.functions.n_hashes;
  h.n_features = h.row_stride = p.in.n_features;
  h.n_selected = p.n_selected();
  return h;
}

struct BlockScratch {
  float *x, *inverse, *counts, *margins, *few_margins, *key_weights, *query_weights;
  char *hash, *codes, *key_probes, *query_probes;
  std::uint8_t* valid;
  DecodingHead* heads;
  std::size_t bytes;

  BlockScratch(Arena arena, const Plan& p) {
    const HashFunctions& f = p.functions;
    const index_t positions = p.units_at_once * p.positions, rows = positions * p.position_rows();
    x = arena.take<float>(rows * p.in.n_features);
    inverse = arena.take<float>(rows);
    counts = arena.take<float>(p.tables.counts ? rows : 0);
    codes = arena.take<char>(rows * f.n_hashes * p.code_bytes());
    valid = arena.take<std::uint8_t>(rows);
    heads = arena.take<DecodingHead>(p.units_at_once);
    const index_t soft = p.soft() ? f.n_hashes : 0;
    margins = arena.take<float>(soft * rows * p.n_selected());
    few_margins = arena.take<float>(soft * rows * p.n_selected());
    const index_t keys = soft * positions * p.key_rows() * p.probes.keys;
    const index_t queries = soft * positions * p.query_rows() * p.probes.queries;
    key_probes = arena.take<char>(keys * p.code_bytes());
    key_weights = arena.take<float>(keys);
    query_probes = arena.take<char>(queries * p.code_bytes());
    query_weights = arena.take<float>(queries);
    hash = arena.take<char>(soft ? kernels().soft_hash_scratch(soft_rows(p))
                                 : hash_scratch(f.columns, f.n_hashes) * index_t(sizeof(float)));
    bytes = arena.used();
  }
  static index_t row_bytes(const Plan& p) {
    const index_t soft = p.soft() ? p.functions.n_hashes : 0;
    return p.in.n_features * index_t(sizeof(float)) + p.functions.n_hashes * p.code_bytes() +
           soft * (5 * p.n_selected() + 6 * std::max(p.probes.queries, p.probes.keys));
  }
};

// The positions [first, last) of the units [first_unit, last_unit), keys and queries alike: a
// unit's rows are those of its keys, then those of each query head of the group.
class Block {
 public:
  Block(const Plan& plan, const BlockScratch& scratch, index_t first_unit, index_t last_unit,
        index_t first, index_t last)
      : p_(plan),
        t_(plan.tables),
        f_(plan.functions),
        s_(scratch),
        first_unit_(first_unit),
        units_(last_unit - first_unit),
        first_(first),
        keys_(std::clamp<index_t>(plan.in.n_keys - first, 0, last - first)),
        queries_(std::clamp<index_t>(plan.in.n_queries - first, 0, last - first)),
        rows_(keys_ + plan.tables.group * queries_) {}

  void run() {
    gather();
    if (p_.soft()) find_valid();
    hash();
    if (!p_.soft() && !finite_) find_valid();
    for (index_t unit = 0; unit < units_; ++unit) s_.heads[unit] = head_of_unit(unit);
    kernels().decode_heads(s_.heads, units_);
    for (index_t unit = 0; unit < units_ && queries_ > 0; ++unit) finish(unit);
  }

 private:
  index_t head(index_t unit) const { return (first_unit_ + unit) / t_.batch; }
  index_t batch(index_t unit) const { return (first_unit_ + unit) % t_.batch; }
  index_t row_codes() const { return f_.n_hashes * p_.code_bytes(); }
  const std::uint8_t* key_mask(index_t unit) const {
    const std::uint8_t* mask = p_.in.key_mask.rows(batch(unit));
    return mask ? mask + first_ : nullptr;
  }

  void gather() const {
    float* to = s_.x;
    const auto copy = [&](Tensor<const float> x, index_t b, index_t h, index_t rows) {
      const float* from = x.matrix(b, h) + first_ * x.row_stride;
      for (index_t i = 0; i < rows; ++i, to += p_.in.n_features)
        std::memcpy(to, from + i * x.row_stride, sizeof(float) * p_.in.n_features);
    };
    for (index_t unit = 0; unit < units_; ++unit) {
      copy(p_.in.key, batch(unit), head(unit), keys_);
      for (index_t g = 0; g < t_.group; ++g)
        copy(p_.in.query, batch(unit), head(unit) * t_.group + g, queries_);
    }
  }

  void find_valid() const {
    const index_t d = p_.in.n_features;
    for (index_t unit = 0; unit < units_; ++unit) {
      const index_t key = unit * rows_, query = key + keys_;
      kernels().f32.inverse_norms({s_.x + key * d, d, keys_, d}, key_mask(unit), s_.inverse + key,
                                  s_.valid + key);
      kernels().f32.inverse_norms({s_.x + query * d, d, rows_ - keys_, d}, nullptr,
                                  s_.inverse + query, s_.valid + query);
    }
  }

  void hash() {
    SoftHashRows h = soft_rows(p_);
    const auto hard =
        f_.family == Family::hadamard ? kernels().hash_hadamard : kernels().hash_hyperplane;
    for (index_t unit = 0, end; unit < units_; unit = end) {
      end = std::min(units_, (head(unit) + 1) * t_.batch - first_unit_);
      const index_t row = unit * rows_;
      h.parameters = f_.parameters + head(unit) * f_.head_stride;
      h.x = s_.x + row * p_.in.n_features;
      h.rows = (end - unit) * rows_;
      h.codes = s_.codes + row * row_codes();
      h.scratch = reinterpret_cast<float*>(s_.hash);
      if (p_.soft()) {
        h.inverse_norm = s_.inverse + row;
        h.margins = s_.margins + row * f_.n_hashes * h.n_selected;
        kernels().soft_hash(h);
      } else {
        finite_ &= hard(h);
      }
    }
  }

  // Rows of a unit with their codes: hard ones, or what is expanded from soft ones.
  DecodingCodes codes(index_t unit, index_t row, index_t rows, index_t n_probes, char* probes,
                      float* weights, index_t offset) const {
    const index_t m = f_.n_hashes, r = p_.n_selected();
    char* own = s_.codes + row * row_codes();
    if (!p_.soft()) return {own, nullptr, 1, rows};
    probes += offset * m * n_probes * p_.code_bytes();
    weights += offset * m * n_probes;
    const float sharpness = p_.probes.sharpness[head(unit) * p_.probes.sharpness_stride];
    SoftCodes soft{own, p_.code_bytes(), s_.margins + row * m * r};
    // Both sides are hashed at once: the one with fewer probes has margins of bits that none flips.
    const index_t flipped = selected_bits(n_probes);
    if (flipped < r) {
      float* margins = s_.few_margins + row * m * r;
      for (index_t pair = 0; pair < rows * m; ++pair)
        for (index_t k = 0; k < flipped; ++k)
          margins[pair * flipped + k] = soft.margins[pair * r + k];
      soft.margins = margins;
    }
    kernels().expand_probes(probe_rows(soft, rows, m, 0, m, n_probes, sharpness, s_.valid + row),
                            p_.code_bytes(), probes, weights);
    return {probes, weights, n_probes, rows};
  }

  DecodingHead head_of_unit(index_t unit) const {
    const index_t row = unit * rows_, h = head(unit), b = batch(unit);
    const index_t table = (b * t_.key_heads + h) * f_.n_hashes * p_.n_buckets();
    DecodingHead d;
    d.half = t_.type == TableType::float16;
    d.sums = static_cast<char*>(t_.sums) + table * t_.n_values * (d.half ? 2 : 4);
    d.counts = t_.counts ? t_.counts + table : nullptr;
    d.code_bytes = p_.code_bytes();
    d.n_hashes = f_.n_hashes;
    d.n_buckets = p_.n_buckets();
    d.n_values = t_.n_values;
    d.keys = codes(unit, row, keys_, p_.probes.keys, s_.key_probes, s_.key_weights, unit * keys_);
    d.queries = codes(unit, row + keys_, rows_ - keys_, p_.probes.queries, s_.query_probes,
                      s_.query_weights, unit * (rows_ - keys_));
    d.queries.rows = queries_;
    d.group = t_.group;
    d.values = p_.in.value.matrix(b, h) + first_ * p_.in.value.row_stride;
    d.value_stride = p_.in.value.row_stride;
    d.key_valid = p_.soft() || !finite_ ? s_.valid + row : key_mask(unit);
    d.causal = p_.in.causal;
    d.out = p_.out.matrix(b, h * t_.group) + first_ * p_.out.row_stride;
    d.out_row_stride = p_.out.row_stride;
    d.out_head_stride = p_.out.head_stride;
    d.out_counts = s_.counts + row;
    return d;
  }

  void finish(index_t unit) const {
    const DecodingHead& d = s_.heads[unit];
    const float scale = 1.0f / float(f_.n_hashes);
    for (index_t g = 0; g < t_.group; ++g) {
      const Matrix<float> out{d.out + g * d.out_head_stride, d.out_row_stride, queries_,
                              t_.n_values};
      float* counts = d.counts ? d.out_counts + g * queries_ : nullptr;
      for (index_t i = 0; i < queries_; ++i) {
        for (index_t c = 0; c < t_.n_values; ++c) out.row(i)[c] *= scale;
        if (counts) counts[i] *= scale;
      }
      normalize_output(p_.normalize, out, counts);
      if (p_.soft() || !finite_)
        fill_invalid_rows(out, s_.valid + unit * rows_ + keys_ + g * queries_);
    }
  }

  const Plan& p_;
  const DecodingTables& t_;
  const HashFunctions& f_;
  const BlockScratch& s_;
  index_t first_unit_, units_, first_, keys_, queries_, rows_;
  bool finite_ = true;
};

void run(Plan p, int threads) {
  const index_t units = p.tables.batch * p.tables.key_heads;
  const index_t length = std::max(p.in.n_keys, p.in.n_queries), rows = p.position_rows();
  const index_t most_rows =
      std::clamp<index_t>(kBlockBytes / BlockScratch::row_bytes(p), 1, kBlockRows);
  p.positions = std::clamp<index_t>(most_rows / rows, 1, length);
  const index_t touched = (p.key_rows() * p.probes.keys + p.query_rows() * p.probes.queries) *
                          units * length * p.functions.n_hashes * p.tables.n_values;
  if (touched * index_t(sizeof(float)) < 2 * kBytesPerThread) threads = 1;
  const index_t shares = std::min<index_t>(units, thread_count(threads));
  p.units_at_once =
      std::clamp<index_t>(most_rows / (p.positions * rows), 1, (units + shares - 1) / shares);
  parallel_for((units + p.units_at_once - 1) / p.units_at_once, threads, [&](index_t task) {
    const std::size_t bytes = BlockScratch(Arena(), p).bytes;
    const BlockScratch s(Arena(thread_scratch(bytes)), p);
    const index_t unit = task * p.units_at_once;
    const index_t last_unit = std::min(units, unit + p.units_at_once);
    for (index_t first = 0; first < length; first += p.positions)
      Block(p, s, unit, last_unit, first, std::min(length, first + p.positions)).run();
  });
}

}  // namespace

void decode(const DecodingTables& tables, const HashFunctions& functions,
            const DecodingProbes& probes, Normalize normalize, const DecodingInputs& in,
            Tensor<float> out, int threads) {
  if (tables.batch * tables.key_heads * (in.n_keys + in.n_queries) == 0) return;
  // The keys of all blocks must be in the tables before the first query reads.
  if (in.causal || in.n_keys == 0 || in.n_queries == 0 || std::max(in.n_keys, in.n_queries) == 1)
    return run({tables, functions, probes, normalize, in, out}, threads);
  DecodingInputs keys = in, queries = in;
  keys.n_queries = queries.n_keys = 0;
  queries.key_mask = {};
  run({tables, functions, probes, normalize, keys, out}, threads);
  run({tables, functions, probes, normalize, queries, out}, threads);
}

}  // namespace lshkit

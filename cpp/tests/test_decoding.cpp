// Tables that take in keys a few at a time against the causal forward, and what a division into
// calls must not change.
#include <algorithm>

#include "check.hpp"
#include "lshkit/decoding.hpp"
#include "lshkit/hash.hpp"
#include "problem.hpp"

using namespace lshkit;

namespace {

struct Problem {
  index_t batch, key_heads, group, n, d, dv, n_hashes;
  int n_bits;
  Normalize normalize;
  TableType type;
  bool soft;
  std::vector<float> q, k, v, parameters;
  std::vector<std::uint8_t> mask;
  float sharpness = 2;

  index_t heads() const { return key_heads * group; }
  Problem(index_t b, index_t h, index_t g, index_t rows, index_t features, index_t values,
          index_t hashes, int bits, Normalize norm, TableType t, bool soft_codes)
      : batch(b),
        key_heads(h),
        group(g),
        n(rows),
        d(features),
        dv(values),
        n_hashes(hashes),
        n_bits(bits),
        normalize(norm),
        type(t),
        soft(soft_codes),
        q(normal(b * h * g * n * d, 1)),
        k(normal(b * h * n * d, 2)),
        v(normal(b * h * n * dv, 3)),
        parameters(normal(h * hashes * bits * d, 4)),
        mask(b * n, 1) {
    for (index_t i = 0; i < b * n; ++i) mask[i] = i % 5 != 1;
    for (index_t i = 0; i < b * n; ++i)  // what is masked must not be read into anything
      for (index_t head = 0; head < h && !mask[i]; ++head)
        v[((i / n * h + head) * n + i % n) * dv] = NAN;
    k[0] = INFINITY;
    q[(n - 1) * d] = NAN;
  }
  HashFunctions functions() const {
    return {Family::hyperplane, parameters.data(), n_hashes * n_bits * d, d, n_bits, n_hashes};
  }
};

struct Run {
  std::vector<float> sums, counts, out;  // sums: room for either type
};

// In pieces of `piece` positions; causal, or each piece's keys before its queries.
Run run(const Problem& p, index_t piece, bool causal, int threads) {
  const index_t buckets = p.n_hashes << p.n_bits, tables = p.batch * p.key_heads;
  const index_t words = p.type == TableType::float32 ? 1 : 2;
  Run r;
  r.sums.resize((tables * buckets * p.dv + words - 1) / words);
  r.counts.resize(p.normalize == Normalize::sum ? tables * buckets : 0);
  r.out = unwritten<float>(p.batch * p.heads() * p.n * p.dv);
  DecodingTables t;
  t.batch = p.batch;
  t.key_heads = p.key_heads;
  t.group = p.group;
  t.n_values = p.dv;
  t.type = p.type;
  t.sums = r.sums.data();
  t.counts = r.counts.empty() ? nullptr : r.counts.data();
  DecodingProbes probes;
  if (p.soft) probes = {3, 2, &p.sharpness, 0};
  for (index_t first = 0; first < p.n; first += piece) {
    DecodingInputs in;
    in.n_queries = in.n_keys = std::min(piece, p.n - first);
    in.n_features = p.d;
    in.query = {p.q.data() + first * p.d, p.heads() * p.n * p.d, p.n * p.d, p.d};
    in.key = {p.k.data() + first * p.d, p.key_heads * p.n * p.d, p.n * p.d, p.d};
    in.value = {p.v.data() + first * p.dv, p.key_heads * p.n * p.dv, p.n * p.dv, p.dv};
    in.key_mask = {p.mask.data() + first, p.n};
    in.causal = causal;
    decode(t, p.functions(), probes, p.normalize, in,
           {r.out.data() + first * p.dv, p.heads() * p.n * p.dv, p.n * p.dv, p.dv}, threads);
  }
  return r;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), sizeof(float) * a.size()) == 0;
}

}  // namespace

TEST(steps_equal_the_causal_forward) {
  for (const Normalize normalize : {Normalize::none, Normalize::sum, Normalize::l2})
    for (const index_t dv : {1, 31, 32, 64, 128}) {
      const Problem p(2, 3, 1, 19, 13, dv, 5, 6, normalize, TableType::float32, false);
      const Run steps = run(p, 1, true, 1);
      const AttentionShape shape{p.batch, p.key_heads, p.n, p.n, p.d, p.dv};
      AttentionOptions options;
      options.causal = true;
      options.normalize = normalize;
      const Tensor<const float> q{p.q.data(), p.key_heads * p.n * p.d, p.n * p.d, p.d};
      const Tensor<const float> k{p.k.data(), p.key_heads * p.n * p.d, p.n * p.d, p.d};
      const Tensor<const float> v{p.v.data(), p.key_heads * p.n * p.dv, p.n * p.dv, p.dv};
      std::vector<float> out = unwritten<float>(steps.out.size());
      std::vector<std::uint8_t> codes[2];
      for (auto& c : codes) c.resize(p.batch * p.key_heads * p.n * p.n_hashes);
      yoso_forward(shape, options, p.functions(), {q, k, v, {p.mask.data(), p.n}},
                   {out.data(), p.key_heads * p.n * p.dv, p.n * p.dv, p.dv}, codes[0].data(),
                   codes[1].data(), 1);
      int wrong = 0;
      for (std::size_t i = 0; i < out.size(); ++i)
        wrong += !check::close(steps.out[i], out[i], 1e-5, 1e-6);
      CHECK(wrong == 0);
    }
}

TEST(pieces_and_threads_do_not_change_a_bit) {
  for (const TableType type : {TableType::float32, TableType::float16})
    for (const bool soft : {false, true})
      for (const index_t group : {1, 3})
        for (const index_t dv : {7, 64}) {
          const Problem p(2, 2, group, 600, 9, dv, 9, 9, Normalize::sum, type, soft);
          const Run whole = run(p, p.n, true, 1);
          for (const index_t piece : {1, 250}) {
            const Run pieces = run(p, piece, true, 2);
            CHECK(same(pieces.out, whole.out));
            CHECK(same(pieces.sums, whole.sums));
            CHECK(same(pieces.counts, whole.counts));
          }
          const Run together = run(p, p.n, false, 3);  // every query sees every key
          CHECK(same(together.sums, whole.sums));
          const index_t last = (2 * p.n - 1) * p.dv;  // of head 1, which sees them all anyway
          CHECK(std::memcmp(&together.out[last], &whole.out[last], sizeof(float) * p.dv) == 0);
        }
}

LSHKIT_TEST_MAIN

// Softmax attention from colliding pairs against the same sums in double, pair by pair.
#include <numeric>

#include "check.hpp"
#include "lshkit/lsh_attention.hpp"
#include "problem.hpp"

using namespace lshkit;

namespace {

constexpr index_t kHeads = 4, kKeyHeads = 2, kSeqs = 2;

template <class Code>
struct Problem {
  AttentionShape shape;
  LshAttentionOptions options;
  std::vector<float> query, key, value, grad;
  std::vector<Code> query_codes, key_codes;
  std::vector<std::uint8_t> mask;
  bool masked;

  Problem(index_t nq, index_t nk, index_t d, index_t dv, int n_bits, index_t n_hashes,
          bool with_mask)
      : query(normal(kSeqs * kHeads * nq * d, 1)),
        key(normal(kSeqs * kKeyHeads * nk * d, 2)),
        value(normal(kSeqs * kKeyHeads * nk * dv, 3)),
        grad(normal(kSeqs * kHeads * nq * dv, 4)),
        query_codes(random_codes<Code>(kSeqs * kHeads * nq * n_hashes, 1 << n_bits, 5)),
        key_codes(random_codes<Code>(kSeqs * kKeyHeads * nk * n_hashes, 1 << n_bits, 6)),
        masked(with_mask) {
    shape.batch = kSeqs;
    shape.heads = kHeads;
    shape.key_heads = kKeyHeads;
    shape.n_queries = nq;
    shape.n_keys = nk;
    shape.n_features = d;
    shape.n_values = dv;
    options.n_bits = n_bits;
    options.n_hashes = n_hashes;
    options.scale = 0.3f;
    options.window = 3;
    options.n_sinks = 2;
    for (index_t j = 0; j < kSeqs * nk; ++j) mask.push_back(j % 5 != 0);
  }
  template <class T>
  static Tensor<T> tensor(T* data, index_t heads, index_t rows, index_t columns) {
    return {data, heads * rows * columns, rows * columns, columns};
  }
  LshAttentionInputs inputs() const {
    return {tensor(query.data(), kHeads, shape.n_queries, shape.n_features),
            tensor(key.data(), kKeyHeads, shape.n_keys, shape.n_features),
            tensor(value.data(), kKeyHeads, shape.n_keys, shape.n_values),
            masked ? Mask{mask.data(), shape.n_keys} : Mask{},
            {query_codes.data(), sizeof(Code)},
            {key_codes.data(), sizeof(Code)}};
  }

  // exp(s) / pi of a pair that is used, else 0.
  double weight(index_t b, index_t h, index_t i, index_t j) const {
    const index_t d = shape.n_features, m = options.n_hashes, nk = shape.n_keys;
    const index_t row = (b * kHeads + h) * shape.n_queries + i;
    const index_t column = (b * kKeyHeads + h / (kHeads / kKeyHeads)) * nk + j;
    if (masked && !mask[b * nk + j]) return 0;
    const index_t at = i + options.offset;
    if (options.causal && j > at) return 0;
    index_t sinks = 0;
    for (index_t k = 0; k <= j; ++k) sinks += !masked || mask[b * nk + k];
    const bool certain = std::abs(at - j) < options.window || sinks <= options.n_sinks;
    int hits = 0;
    for (index_t t = 0; t < m; ++t) hits += query_codes[row * m + t] == key_codes[column * m + t];
    const bool twice = options.weighting == Weighting::magicpig;
    if (!certain && hits < (twice ? 2 : 1)) return 0;
    double dot = 0, qq = 0, kk = 0;
    for (index_t c = 0; c < d; ++c) {
      const double q = query[row * d + c], k = key[column * d + c];
      dot += q * k;
      qq += q * q;
      kk += k * k;
    }
    double pi = 1;
    if (!certain && options.weighting != Weighting::none) {
      const double p =
          std::pow(1 - std::acos(dot / std::sqrt(qq * kk)) / std::acos(-1.0), options.n_bits);
      pi = 1 - std::pow(1 - p, double(m));
      if (twice) pi -= double(m) * p * std::pow(1 - p, double(m) - 1);
    }
    return std::exp(options.scale * dot) / pi;
  }
};

struct Results {
  std::vector<float> out;
  std::vector<double> log_sum;
  std::vector<float> query, key, value;
  std::vector<std::int32_t> pairs;
};

template <class Code>
Results run(const Problem<Code>& p, int threads) {
  const AttentionShape& s = p.shape;
  Results r{
      unwritten<float>(p.grad.size()),  unwritten<double>(kSeqs * kHeads * s.n_queries),
      unwritten<float>(p.query.size()), unwritten<float>(p.key.size()),
      unwritten<float>(p.value.size()), std::vector<std::int32_t>(kSeqs * kHeads * s.n_queries)};
  const auto out = Problem<Code>::tensor(r.out.data(), kHeads, s.n_queries, s.n_values);
  lsh_attention_forward(s, p.options, p.inputs(), out, r.log_sum.data(), r.pairs.data(), threads);
  lsh_attention_backward(s, p.options, p.inputs(),
                         {{out.data, out.batch_stride, out.head_stride, out.row_stride},
                          Problem<Code>::tensor(p.grad.data(), kHeads, s.n_queries, s.n_values),
                          r.log_sum.data(),
                          Problem<Code>::tensor(r.query.data(), kHeads, s.n_queries, s.n_features),
                          Problem<Code>::tensor(r.key.data(), kKeyHeads, s.n_keys, s.n_features),
                          Problem<Code>::tensor(r.value.data(), kKeyHeads, s.n_keys, s.n_values)},
                         threads);
  return r;
}

template <class Code>
void check_problem(const Problem<Code>& p) {
  const Results r = run(p, 1), two = run(p, 2);
  CHECK(std::memcmp(r.out.data(), two.out.data(), sizeof(float) * r.out.size()) == 0);
  CHECK(std::memcmp(r.key.data(), two.key.data(), sizeof(float) * r.key.size()) == 0);
  const AttentionShape& s = p.shape;
  const index_t d = s.n_features, dv = s.n_values;
  std::vector<double> query(p.query.size()), key(p.key.size()), value(p.value.size());
  for (index_t b = 0; b < kSeqs; ++b)
    for (index_t h = 0; h < kHeads; ++h)
      for (index_t i = 0; i < s.n_queries; ++i) {
        const index_t row = (b * kHeads + h) * s.n_queries + i;
        const index_t first = (b * kKeyHeads + h / (kHeads / kKeyHeads)) * s.n_keys;
        std::vector<double> w(s.n_keys), out(dv);
        double total = 0;
        int pairs = 0;
        for (index_t j = 0; j < s.n_keys; ++j) total += w[j] = p.weight(b, h, i, j);
        for (index_t j = 0; j < s.n_keys; ++j) {
          pairs += w[j] > 0;
          w[j] = total > 0 ? w[j] / total : 0;
          for (index_t c = 0; c < dv; ++c) out[c] += w[j] * p.value[(first + j) * dv + c];
        }
        CHECK(r.pairs[row] == pairs);
        CHECK_CLOSE(r.log_sum[row], std::log(total), 1e-5, 1e-5);
        double along = 0;
        for (index_t c = 0; c < dv; ++c) {
          CHECK_CLOSE(r.out[row * dv + c], out[c], 2e-4, 2e-4);
          along += out[c] * p.grad[row * dv + c];
        }
        for (index_t j = 0; j < s.n_keys; ++j) {
          double slope = -along;
          for (index_t c = 0; c < dv; ++c) {
            slope += p.grad[row * dv + c] * p.value[(first + j) * dv + c];
            value[(first + j) * dv + c] += w[j] * p.grad[row * dv + c];
          }
          for (index_t c = 0; c < d; ++c) {
            query[row * d + c] += p.options.scale * w[j] * slope * p.key[(first + j) * d + c];
            key[(first + j) * d + c] += p.options.scale * w[j] * slope * p.query[row * d + c];
          }
        }
      }
  for (std::size_t c = 0; c < query.size(); ++c) CHECK_CLOSE(r.query[c], query[c], 1e-3, 1e-3);
  for (std::size_t c = 0; c < key.size(); ++c) CHECK_CLOSE(r.key[c], key[c], 1e-3, 1e-3);
  for (std::size_t c = 0; c < value.size(); ++c) CHECK_CLOSE(r.value[c], value[c], 1e-3, 1e-3);
}

}  // namespace

// Widths of whole registers and others, lengths beyond a block of keys.
TEST(sizes) {
  const index_t widths[][2] = {{64, 64}, {16, 16}, {5, 9}, {33, 20}};
  for (const auto& width : widths)
    check_problem(Problem<std::uint8_t>(21, 270, width[0], width[1], 4, 5, true));
}

TEST(weightings) {
  for (const Weighting weighting : {Weighting::none, Weighting::magicpig}) {
    Problem<std::uint8_t> p(40, 50, 8, 8, 3, 7, false);
    p.options.weighting = weighting;
    check_problem(p);
  }
}

TEST(causal_with_an_offset) {
  for (const index_t offset : {-6, 0, 250}) {
    Problem<std::uint8_t> p(30, 280, 12, 16, 4, 6, true);
    p.options.causal = true;
    p.options.offset = offset;
    check_problem(p);
  }
}

// More hashes than one group of tables, more hashes than a byte counts, codes of two bytes.
TEST(many_hashes_and_long_codes) {
  for (const Weighting weighting : {Weighting::horvitz_thompson, Weighting::magicpig}) {
    Problem<std::uint8_t> many(12, 40, 8, 8, 8, 300, true);
    many.options.weighting = weighting;
    check_problem(many);
    Problem<std::uint16_t> wide(12, 300, 8, 8, 10, 70, true);
    wide.options.weighting = weighting;
    check_problem(wide);
  }
}

// A query without a pair gives zeros and has a sum of zero.
TEST(no_pairs) {
  Problem<std::uint8_t> p(9, 11, 8, 8, 8, 1, false);
  p.options.window = p.options.n_sinks = 0;
  for (auto& code : p.query_codes) code = 1;
  for (auto& code : p.key_codes) code = 2;
  const Results r = run(p, 1);
  for (const float x : r.out) CHECK(x == 0);
  for (const float x : r.query) CHECK(x == 0);
  for (const double x : r.log_sum) CHECK(x == -INFINITY);
}

// A query whose pairs all have the weight 0: opposite keys of the same code, which cannot be.
TEST(pairs_of_no_weight) {
  Problem<std::uint8_t> p(9, 11, 8, 8, 8, 1, false);
  p.options.window = p.options.n_sinks = 0;
  for (float& x : p.query) x = 1;
  for (float& x : p.key) x = -1;
  for (auto& code : p.query_codes) code = 1;
  for (auto& code : p.key_codes) code = 1;
  const Results r = run(p, 1);
  for (const float x : r.query) CHECK(x == 0);
  for (const float x : r.key) CHECK(x == 0);
  for (const float x : r.value) CHECK(x == 0);
}

// Scores far beyond what exp() holds.
TEST(large_scores) {
  Problem<std::uint8_t> p(20, 300, 16, 16, 2, 4, false);
  for (float& x : p.query) x *= 40;
  p.options.scale = 2;
  const Results r = run(p, 1);
  for (const float x : r.out) CHECK(std::isfinite(x));
  for (const float x : r.query) CHECK(std::isfinite(x));
}

// Scores of which a unit in the last place is a factor: weights still have the sum 1.
TEST(scores_beyond_the_resolution_of_float) {
  for (const float scale : {1.3e4f, 1.3e7f, 1.3e10f}) {
    Problem<std::uint8_t> p(20, 300, 16, 16, 2, 4, false);
    p.options.scale = scale;
    for (float& x : p.grad) x = 1;
    for (float& x : p.value) x = 1;
    const Results r = run(p, 1);
    for (const float x : r.out) CHECK_CLOSE(x, 1, 1e-5, 0);
    const double sum = std::accumulate(r.value.begin(), r.value.end(), 0.0);
    CHECK_CLOSE(sum, double(p.grad.size()), 1e-5, 0);
  }
}

LSHKIT_TEST_MAIN

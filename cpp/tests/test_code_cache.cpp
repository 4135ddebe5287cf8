// code_keys and code_step within their memory, against softmax, and with the same bits whoever
// computes them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "check.hpp"
#include "lshkit/code_cache.hpp"

using namespace lshkit;

namespace {

struct Random {
  std::uint64_t state = 11;
  float operator()() {  // about normal
    float sum = 0;
    for (int i = 0; i < 6; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      sum += float(state >> 40) / float(1 << 24) - 0.5f;
    }
    return sum * 1.414f;
  }
};

std::vector<float> normal(index_t n, Random& random) {
  std::vector<float> values(n);
  for (float& x : values) x = random();
  return values;
}

// Two sequences, the second with padding, and two query heads for each of two key heads.
struct Case {
  static constexpr index_t kBatch = 2, kKeyHeads = 2, kHeads = 4;
  index_t rows, d, n_values, n_bits, n_queries;
  std::vector<std::int64_t> starts;
  std::vector<float> key, value, query, planes, centre, norm, value_centre, value_norm;
  std::vector<std::uint8_t> codes;
  CodedKeys keys;

  Case(index_t rows, index_t d, index_t n_values, index_t n_bits, index_t n_queries)
      : rows(rows), d(d), n_values(n_values), n_bits(n_bits), n_queries(n_queries) {
    Random random;
    starts = {0, rows / 3};
    key = normal(kBatch * kKeyHeads * rows * d, random);
    value = normal(kBatch * kKeyHeads * rows * n_values, random);
    query = normal(kBatch * kHeads * n_queries * d, random);
    planes = normal(kKeyHeads * d * n_bits, random);
    centre = normal(kBatch * kKeyHeads * d, random);
    for (float& x : centre) x *= 0.1f;
    for (float& x : planes) x /= std::sqrt(float(d));
    norm.assign(kBatch * kKeyHeads, std::sqrt(float(d)));
    value_centre = normal(kBatch * kKeyHeads * n_values, random);
    for (index_t m = 0; m < kBatch * kKeyHeads; ++m)
      value_norm.push_back((1 + 0.2f * m) * std::sqrt(float(n_values)));
    const index_t n_blocks = (rows + kCodeBlock - 1) / kCodeBlock;
    codes.assign(kBatch * kKeyHeads * n_blocks * block_bytes(n_bits), 0);
    keys.batch = kBatch, keys.key_heads = kKeyHeads, keys.n_features = d, keys.n_bits = n_bits;
    keys.rows = rows, keys.starts = starts.data();
    keys.key = Input<float>(key.data(), kKeyHeads * rows * d, rows * d, d);
    keys.value = Input<float>(value.data(), kKeyHeads * rows * n_values, rows * n_values, n_values);
    keys.n_values = n_values, keys.value_centre = value_centre.data(),
    keys.value_norm = value_norm.data();
    keys.codes = codes.data(), keys.n_blocks = n_blocks;
    keys.planes = planes.data(), keys.centre = centre.data(), keys.norm = norm.data();
  }

  void hash(index_t at_once, int threads) {
    for (index_t b = 0; b < kBatch; ++b)
      for (index_t begin = 0, n = rows - starts[b]; begin < n; begin += at_once)
        code_keys(keys, b, begin, std::min(begin + at_once, n), threads);
  }

  struct Result {
    std::vector<float> out, log_sum, error;
    std::vector<std::int32_t> n_read;
  };

  Result step(const CodeStepOptions& options, int threads) const {
    const index_t n = kBatch * kHeads * n_queries;
    Result got{std::vector<float>(n * n_values), std::vector<float>(n), std::vector<float>(n),
               std::vector<std::int32_t>(n)};
    const index_t of_head = n_queries * n_values;
    code_step(keys, {query.data(), kHeads * n_queries * d, n_queries * d, d}, kHeads, n_queries,
              options,
              {{got.out.data(), kHeads * of_head, of_head, n_values},
               got.log_sum.data(),
               got.error.data(),
               got.n_read.data()},
              threads);
    return got;
  }

  // The largest |out - softmax attention| over sqrt(sum_j w_j |v_j|^2) and allowed.
  double largest_error(const Result& got, double scale, double stated) const {
    double largest = 0;
    for (index_t b = 0; b < kBatch; ++b)
      for (index_t h = 0; h < kHeads; ++h)
        for (index_t i = 0; i < n_queries; ++i) {
          const index_t q = (b * kHeads + h) * n_queries + i;
          const index_t of_keys = (b * kKeyHeads + h / 2) * rows;
          std::vector<double> out(n_values);
          double sum = 0, squares = 0;
          for (index_t j = starts[b]; j <= rows - n_queries + i; ++j) {
            double score = 0;
            for (index_t c = 0; c < d; ++c)
              score += double(query[q * d + c]) * key[(of_keys + j) * d + c];
            const double weight = std::exp(scale * score);
            sum += weight;
            for (index_t c = 0; c < n_values; ++c) {
              const double v = value[(of_keys + j) * n_values + c];
              out[c] += weight * v, squares += weight * v * v;
            }
          }
          double off = 0;
          for (index_t c = 0; c < n_values; ++c)
            off += std::pow(got.out[q * n_values + c] - out[c] / sum, 2);
          const double allowed = 1e-5 + stated * got.error[q];
          largest = std::max(largest, std::sqrt(off / (squares / sum)) / allowed);
        }
    return largest;
  }
};

CodeStepOptions options_of(index_t d) {
  CodeStepOptions options;
  options.scale = 1 / std::sqrt(float(d));
  options.n_sinks = 3, options.window = 17, options.max_share = 0.2f, options.seed = 5;
  return options;
}

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace

TEST(few_keys_are_all_read) {
  for (const index_t rows : {1, 2, 63, 64, 65, 500}) {
    Case c(rows, 19, 5, 64, rows < 3 ? 1 : 3);
    c.hash(rows, 1);
    const Case::Result got = c.step(options_of(19), 1);
    CHECK(c.largest_error(got, 1 / std::sqrt(19.0), 0) < 1);
    CHECK(got.n_read.front() == rows - c.n_queries + 1);
  }
}

TEST(samples_have_the_stated_error) {
  for (const index_t n_bits : {64, 192, 256})
    for (const index_t d : {1, 33, 64}) {
      Case c(3001, d, 7, n_bits, 2);
      c.hash(3001, 1);
      const Case::Result got = c.step(options_of(d), 1);
      // At a confidence of 95 % it is two standard errors: no step is off by three times as many.
      CHECK(c.largest_error(got, 1 / std::sqrt(double(d)), 3) < 1);
      for (const std::int32_t n : got.n_read) CHECK(n > 20 && n < 1500);
    }
}

TEST(the_same_bits_in_parts_and_on_two_threads) {
  Case whole(2500, 40, 9, 128, 3), parts(2500, 40, 9, 128, 3);
  whole.hash(2500, 1), parts.hash(37, 2);
  CHECK(same(whole.codes, parts.codes));
  const Case::Result one = whole.step(options_of(40), 1), two = parts.step(options_of(40), 2);
  CHECK(same(one.out, two.out) && same(one.log_sum, two.log_sum));
  CHECK(same(one.error, two.error) && same(one.n_read, two.n_read));
}

TEST(queries_and_keys_that_are_not_finite) {
  Case c(1500, 16, 4, 64, 1);
  c.key[700 * 16] = std::numeric_limits<float>::quiet_NaN();
  c.key[701 * 16 + 3] = std::numeric_limits<float>::infinity();
  c.query[0] = std::numeric_limits<float>::quiet_NaN();
  c.hash(1500, 1);
  const Case::Result got = c.step(options_of(16), 1);
  for (index_t i = 0; i < 4; ++i) CHECK(std::isnan(got.out[i]));
  for (std::size_t i = 4; i < got.out.size(); ++i) CHECK(std::isfinite(got.out[i]));
}

// A projection that is inf - inf where products are rounded before they are added, else inf.
TEST(projections_beyond_float32_say_nothing_of_keys) {
  Case c(1500, 16, 4, 64, 1);
  for (index_t j = 0; j < c.rows; ++j) c.key[16 * j] = c.key[16 * j + 1] = 0;
  c.hash(1500, 1);
  c.query[0] = c.query[1] = 3e38f;
  std::fill_n(c.planes.begin(), 16 * 64, 0.0f);
  const Case::Result without = c.step(options_of(16), 1);
  c.planes[0] = 2, c.planes[64] = -2;
  c.planes[3 * 64 + 9] = 1;
  const Case::Result got = c.step(options_of(16), 1);
  for (index_t i = 0; i < 4; ++i) CHECK(std::isfinite(got.out[i]) && got.out[i] == without.out[i]);
  CHECK(got.n_read[0] == without.n_read[0]);
}

LSHKIT_TEST_MAIN

// Sums over near rows and a sample of the others, against a loop over all rows.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "check.hpp"
#include "lshkit/partition_sums.hpp"
#include "problem.hpp"

using namespace lshkit;

namespace {

template <class Code>
struct Problem {
  index_t n_queries, n_rows, n_features, n_hashes, n_buckets, n_probes;
  std::vector<float> queries, rows, bias;
  std::vector<Code> codes, probes;
  std::vector<std::int32_t> order, start, sample;

  // Codes lie below n_buckets, probes below twice as many: some are beyond the tables.
  Problem(index_t nq, index_t n, index_t d, index_t m, index_t buckets, index_t n_probes_,
          index_t n_sample, bool biased)
      : n_queries(nq),
        n_rows(n),
        n_features(d),
        n_hashes(m),
        n_buckets(buckets),
        n_probes(n_probes_),
        queries(normal(nq * d, 1)),
        rows(normal(n * d, 2)),
        codes(random_codes<Code>(n * m, int(buckets), 3)),
        order(n * m),
        start(m * (buckets + 1)) {
    for (float& x : rows) x *= 0.5f;
    if (biased) bias = normal(n, 4);
    std::mt19937 generator(5);
    std::vector<Code> all(2 * buckets);
    std::iota(all.begin(), all.end(), Code(0));
    for (index_t k = 0; k < nq * m; ++k) {
      std::shuffle(all.begin(), all.end(), generator);
      probes.insert(probes.end(), all.begin(), all.begin() + n_probes);
    }
    sample.resize(n);
    std::iota(sample.begin(), sample.end(), 0);
    std::shuffle(sample.begin(), sample.end(), generator);
    sample.resize(n_sample);
    for (index_t h = 0; h < m; ++h) {
      std::int32_t* at = &order[h * n];
      for (index_t b = 0; b < buckets; ++b) {
        start[h * (buckets + 1) + b] = std::int32_t(at - &order[h * n]);
        for (index_t j = 0; j < n; ++j)
          if (codes[j * m + h] == b) *at++ = std::int32_t(j);
      }
      start[h * (buckets + 1) + buckets] = std::int32_t(n);
    }
  }

  PartitionProblem arguments(index_t min_count) const {
    PartitionProblem p;
    p.queries = queries.data();
    p.n_queries = n_queries;
    p.n_features = n_features;
    p.rows = rows.data();
    p.bias = bias.empty() ? nullptr : bias.data();
    p.lists = {order.data(), start.data(), n_hashes, n_buckets, n_rows};
    p.probes = {probes.data(), sizeof(Code)};
    p.n_probes = n_probes;
    p.min_count = min_count;
    p.sample = sample.data();
    p.n_sample = index_t(sample.size());
    return p;
  }

  PartitionSums expected(index_t i, index_t min_count) const {
    std::vector<double> near, far;
    for (index_t j = 0; j < n_rows; ++j) {
      index_t count = 0;
      for (index_t h = 0; h < n_hashes; ++h) {
        const Code* first = &probes[(i * n_hashes + h) * n_probes];
        count += std::find(first, first + n_probes, codes[j * n_hashes + h]) != first + n_probes;
      }
      double logit = bias.empty() ? 0 : bias[j];
      for (index_t c = 0; c < n_features; ++c)
        logit += double(queries[i * n_features + c]) * rows[j * n_features + c];
      if (count >= min_count)
        near.push_back(logit);
      else if (std::find(sample.begin(), sample.end(), std::int32_t(j)) != sample.end())
        far.push_back(logit);
    }
    PartitionSums sums{-HUGE_VAL, 0, 0, 0, double(near.size()), double(far.size())};
    for (const double x : near) sums.largest = std::max(sums.largest, x);
    for (const double x : far) sums.largest = std::max(sums.largest, x);
    for (const double x : near) sums.near += std::exp(x - sums.largest);
    for (const double x : far) sums.far += std::exp(x - sums.largest);
    for (const double x : far) sums.far_squares += std::exp(2 * (x - sums.largest));
    return sums;
  }
};

template <class Code>
void check_problem(const Problem<Code>& p, index_t min_count) {
  std::vector<PartitionSums> got(p.n_queries), again(p.n_queries);
  partition_sums(p.arguments(min_count), got.data(), 1);
  partition_sums(p.arguments(min_count), again.data(), 3);
  CHECK(std::memcmp(got.data(), again.data(), sizeof(PartitionSums) * got.size()) == 0);
  for (index_t i = 0; i < p.n_queries; ++i) {
    const PartitionSums e = p.expected(i, min_count);
    CHECK_CLOSE(got[i].largest, e.largest, 1e-5, 1e-5);
    CHECK_CLOSE(got[i].near, e.near, 1e-4, 1e-6);
    CHECK_CLOSE(got[i].far, e.far, 1e-4, 1e-6);
    CHECK_CLOSE(got[i].far_squares, e.far_squares, 2e-4, 1e-6);
    CHECK(got[i].near_rows == e.near_rows && got[i].far_rows == e.far_rows);
  }
}

}  // namespace

TEST(sums_equal_a_loop_over_all_rows) {
  for (const bool biased : {false, true})
    for (const index_t min_count : {1, 2, 3}) {
      check_problem(Problem<std::uint8_t>(37, 300, 60, 6, 8, 3, 70, biased), min_count);
      check_problem(Problem<std::uint16_t>(5, 1000, 17, 20, 50, 4, 600, biased), min_count);
    }
}
TEST(one_of_everything) {
  check_problem(Problem<std::uint8_t>(1, 1, 1, 1, 1, 1, 1, true), 1);
  check_problem(Problem<std::uint8_t>(1, 5, 1, 1, 2, 2, 5, true), 1);
}
TEST(no_sample_and_no_near_rows) {
  check_problem(Problem<std::uint8_t>(3, 40, 8, 4, 4, 2, 0, false), 1);
  check_problem(Problem<std::uint8_t>(3, 40, 8, 1, 4, 1, 10, false), 2);
  check_problem(Problem<std::uint8_t>(3, 40, 8, 1, 4, 1, 0, true), 2);  // nothing at all
}
TEST(more_hashes_than_a_byte_counts) {
  check_problem(Problem<std::uint8_t>(2, 50, 4, 300, 16, 8, 20, false), 3);
}

LSHKIT_TEST_MAIN

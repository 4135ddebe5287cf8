// Products and distances of listed pairs against plain loops in double precision.
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "check.hpp"
#include "lshkit/pair_products.hpp"

using namespace lshkit;

namespace {

template <class T, class Index>
void check_pairs(index_t n_features, PairMeasure measure, double tolerance) {
  const index_t n_queries = 9, n_keys = 50, query_stride = n_features + 3,
                key_stride = n_features + 1;
  std::mt19937 rng(7);
  std::normal_distribution<double> normal;
  std::vector<T> queries(n_queries * query_stride), keys(n_keys * key_stride);
  for (T& x : queries) x = T(normal(rng));
  for (T& x : keys) x = T(normal(rng));
  std::vector<std::int64_t> indptr{0};
  std::vector<Index> indices;
  for (index_t i = 0; i < n_queries; ++i) {
    for (index_t k = 0; k < (i == 4 ? 1500 : 7 * (i % 3)); ++k) indices.push_back(rng() % n_keys);
    indptr.push_back(indices.size());
  }
  std::vector<T> out[2];
  for (int threads : {1, 2}) {
    out[threads - 1].assign(indices.size(), T(NAN));
    PairProducts<T> p;
    p.queries = queries.data(), p.query_stride = query_stride;
    p.keys = keys.data(), p.key_stride = key_stride;
    p.n_queries = n_queries, p.n_features = n_features;
    p.indptr = indptr.data(), p.indices = indices.data(), p.index_bytes = sizeof(Index);
    p.measure = measure;
    p.out = out[threads - 1].data();
    pair_products(p, threads);
  }
  CHECK(out[0] == out[1]);
  for (index_t i = 0; i < n_queries; ++i)
    for (index_t k = indptr[i]; k < indptr[i + 1]; ++k) {
      double sum = 0, size = 0;
      for (index_t c = 0; c < n_features; ++c) {
        const double x = queries[i * query_stride + c], y = keys[indices[k] * key_stride + c];
        const double term = measure == PairMeasure::product            ? x * y
                            : measure == PairMeasure::squared_distance ? (x - y) * (x - y)
                                                                       : std::fabs(x - y);
        sum += term;
        size += std::fabs(term);
      }
      CHECK_CLOSE(out[0][k], sum, 0, tolerance * size);
      // A pair's value does not depend on its neighbours.
      for (index_t other = indptr[i]; other < k; ++other)
        if (indices[other] == indices[k]) CHECK(out[0][other] == out[0][k]);
    }
}

}  // namespace

TEST(all_measures_types_and_lengths) {
  for (index_t n_features : {0, 1, 7, 16, 33, 64, 100})
    for (auto measure :
         {PairMeasure::product, PairMeasure::squared_distance, PairMeasure::l1_distance}) {
      check_pairs<float, std::int32_t>(n_features, measure, 2e-6);
      check_pairs<float, std::int64_t>(n_features, measure, 2e-6);
      check_pairs<double, std::int32_t>(n_features, measure, 1e-14);
    }
}

LSHKIT_TEST_MAIN

#include <algorithm>
#include <cmath>
#include <vector>

#include "check.hpp"
#include "lshkit/near_kernel_sums.hpp"

using namespace lshkit;

namespace {

struct Random {
  std::uint64_t state = 7;
  double operator()() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return double(state >> 40) / double(1 << 24);
  }
};

constexpr index_t kRows = 700, kHashes = 70, kBuckets = 40, kFeatures = 19, kQueries = 45;

// Rows with direct tables of random codes: what is near is known from the codes alone.
template <class T>
struct Case {
  std::vector<T> rows, queries;
  std::vector<double> weights;
  std::vector<std::uint8_t> codes, query_codes;
  std::vector<std::int32_t> order, bins;
  NearKernelProblem<T> p;

  explicit Case(DensityKernel kernel) : rows(kRows * kFeatures), queries(kQueries * kFeatures) {
    Random random;
    for (auto* x : {&rows, &queries})
      for (index_t i = 0; i < index_t(x->size()); i += kFeatures) {
        double norm = 0;
        for (index_t c = 0; c < kFeatures; ++c) {
          const double v = random() - 0.5;
          (*x)[i + c] = T(v), norm += v * v;
        }
        for (index_t c = 0; c < kFeatures && kernel == DensityKernel::angular; ++c)
          (*x)[i + c] = T((*x)[i + c] / std::sqrt(norm));
      }
    for (index_t j = 0; j < kRows; ++j) weights.push_back(random());
    // A few buckets are large, many hold some rows, some are empty.
    for (index_t i = 0; i < kRows * kHashes; ++i)
      codes.push_back(std::uint8_t(std::pow(random(), 3) * (kBuckets - 3)));
    for (index_t i = 0; i < kQueries * kHashes; ++i)
      query_codes.push_back(std::uint8_t(random() * (kBuckets + 5)));  // beyond the tables too
    order.resize(kHashes * kRows), bins.resize(kHashes * (kBuckets + 1));
    p.tables.n_rows = kRows, p.tables.n_hashes = kHashes, p.tables.n_bins = kBuckets;
    p.tables.order = order.data(), p.tables.bins = bins.data();
    build_hash_tables(p.tables, {codes.data(), 1}, nullptr, 1);
    p.rows = rows.data(), p.queries = queries.data();
    p.n_queries = kQueries, p.n_features = kFeatures, p.kernel = kernel, p.n_bits = 5;
    p.query_codes = {query_codes.data(), 1};
  }

  double kernel_of(index_t query, index_t row) const {
    double square = 0, absolute = 0, product = 0;
    for (index_t c = 0; c < kFeatures; ++c) {
      const double a = queries[query * kFeatures + c], b = rows[row * kFeatures + c];
      square += (a - b) * (a - b), absolute += std::fabs(a - b), product += a * b;
    }
    if (p.kernel == DensityKernel::gaussian) return std::exp(-square / 2);
    if (p.kernel == DensityKernel::exponential) return std::exp(-std::sqrt(square));
    if (p.kernel == DensityKernel::laplacian) return std::exp(-absolute);
    return std::pow(1 - std::acos(std::min(1.0, product)) / std::acos(-1.0), 5);
  }

  index_t collisions(index_t query, index_t row) const {
    index_t n = 0;
    for (index_t h = 0; h < kHashes; ++h) {
      const int code = query_codes[query * kHashes + h];
      if (codes[row * kHashes + h] != code) continue;
      index_t size = 0;
      for (index_t j = 0; j < kRows; ++j) size += codes[j * kHashes + h] == code;
      n += size <= p.max_bucket_size;
    }
    return n;
  }
};

template <class T>
void compare(DensityKernel kernel, index_t min_count, index_t largest, bool weighted) {
  Case<T> c(kernel);
  c.p.min_count = min_count, c.p.max_bucket_size = largest;
  if (weighted) c.p.weights = c.weights.data();
  const index_t stops[] = {0, 100, 101, kRows + 5};
  c.p.stops = stops, c.p.n_stops = 4;
  std::vector<NearKernelSum> sums(kQueries * 4), again(kQueries * 4);
  near_kernel_sums(c.p, sums.data(), 1);
  near_kernel_sums(c.p, again.data(), 3);
  for (index_t i = 0; i < kQueries; ++i) {
    double total[4] = {}, squares[4] = {}, count[4] = {};
    for (index_t j = 0; j < kRows; ++j) {
      if (i % 9 == 0 && c.collisions(i, j) >= min_count) {
        const index_t k = j < 100 ? 1 : j < 101 ? 2 : 3;
        const double term = (weighted ? c.weights[j] : 1) * c.kernel_of(i, j);
        total[k] += term, squares[k] += term * term, count[k] += 1;
      }
    }
    for (index_t k = 0; k < 4; ++k) {
      const NearKernelSum& s = sums[i * 4 + k];
      CHECK(s.total == again[i * 4 + k].total && s.count == again[i * 4 + k].count);
      if (i % 9) continue;  // counting collisions by loops takes long
      CHECK(s.count == count[k]);
      const double scale = s.count > 0 ? std::exp(s.shift) : 0;
      CHECK_CLOSE(scale * s.total, total[k], 1e-5, 1e-12);
      CHECK_CLOSE(scale * scale * s.squares, squares[k], 1e-5, 1e-12);
    }
  }
}

}  // namespace

TEST(near_rows_are_summed_by_segments) {
  for (int k = 0; k <= int(DensityKernel::angular); ++k) {
    compare<float>(DensityKernel(k), 2 + k % 2, 60, k % 2 == 1);
    compare<double>(DensityKernel(k), 1 + k % 2, 25, k % 2 == 0);
  }
  compare<float>(DensityKernel::gaussian, 5, kRows, false);
  compare<float>(DensityKernel::gaussian, 1, 0, false);  // nothing is near
}

LSHKIT_TEST_MAIN

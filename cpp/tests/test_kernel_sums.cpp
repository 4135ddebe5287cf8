#include <cmath>
#include <limits>
#include <vector>

#include "check.hpp"
#include "lshkit/kernel_sums.hpp"

using namespace lshkit;

namespace {

std::vector<double> numbers(index_t count, unsigned seed) {
  std::vector<double> v(count);
  std::uint64_t state = seed;
  for (double& x : v) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    x = double(state >> 40) / double(1 << 24) * 2 - 1;
  }
  return v;
}

double value(DensityKernel kernel, int n_bits, const double* a, const double* b, index_t d) {
  double square = 0, absolute = 0, product = 0, aa = 0, bb = 0;
  for (index_t c = 0; c < d; ++c) {
    square += (a[c] - b[c]) * (a[c] - b[c]);
    absolute += std::fabs(a[c] - b[c]);
    product += a[c] * b[c];
    aa += a[c] * a[c];
    bb += b[c] * b[c];
  }
  const double r = std::sqrt(square), pi = std::acos(-1.0);
  switch (kernel) {
    case DensityKernel::gaussian:
      return std::exp(-square / 2);
    case DensityKernel::exponential:
      return std::exp(-r);
    case DensityKernel::laplacian:
      return std::exp(-absolute);
    case DensityKernel::angular:
      return std::pow(1 - std::acos(product / std::sqrt(aa * bb)) / pi, n_bits);
    case DensityKernel::tophat:
      return r < 1;
    case DensityKernel::epanechnikov:
      return r < 1 ? 1 - square : 0;
    case DensityKernel::linear:
      return r < 1 ? 1 - r : 0;
    case DensityKernel::cosine:
      return r < 1 ? std::cos(pi * r / 2) : 0;
  }
  return 0;
}

void unit(double* row, index_t d) {
  double norm = 0;
  for (index_t c = 0; c < d; ++c) norm += row[c] * row[c];
  for (index_t c = 0; c < d; ++c) row[c] /= std::sqrt(norm);
}

}  // namespace

// Sizes that end inside panels, tiles and runs of keys.
TEST(every_kernel_equals_plain_loops) {
  const index_t n_queries = 13;
  for (index_t d : {1, 3, 40})
    for (index_t n_keys : {1, 63, 4200})
      for (int k = 0; k <= int(DensityKernel::cosine); ++k) {
        const DensityKernel kernel = DensityKernel(k);
        std::vector<double> queries = numbers(n_queries * d, 1), keys = numbers(n_keys * d, 2);
        const std::vector<double> centre = numbers(d, 3), shape_weights = numbers(n_keys, 4);
        std::vector<double> scale(d), weights(n_keys);
        for (index_t c = 0; c < d; ++c) scale[c] = (1.5 + 0.25 * centre[c]) / std::sqrt(double(d));
        for (index_t j = 0; j < n_keys; ++j) weights[j] = 1.25 + shape_weights[j];
        const bool angular = kernel == DensityKernel::angular;
        std::vector<double> scaled(n_keys * d);
        for (index_t j = 0; j < n_keys; ++j)
          for (index_t c = 0; c < d; ++c)
            scaled[j * d + c] =
                angular ? keys[j * d + c] : (keys[j * d + c] - centre[c]) * scale[c];
        for (index_t i = 0; i < n_queries; ++i) {
          for (index_t c = 0; c < d; ++c)
            if (!angular) queries[i * d + c] = (queries[i * d + c] - centre[c]) * scale[c];
          if (angular) unit(&queries[i * d], d);
        }
        const KernelSumShape shape{n_queries, n_keys, d, kernel, 3};
        const DensityKeys rows{keys.data(),
                               false,
                               Element::float64,
                               angular ? nullptr : centre.data(),
                               angular ? nullptr : scale.data(),
                               weights.data()};
        std::vector<KernelSum> sums(n_queries), again(n_queries);
        kernel_sums<double>(shape, queries.data(), rows, sums.data(), 1);
        kernel_sums<double>(shape, queries.data(), rows, again.data(), 3);
        for (index_t i = 0; i < n_queries; ++i) {
          double total = 0, squares = 0;
          for (index_t j = 0; j < n_keys; ++j) {
            const double term = weights[j] * value(kernel, 3, &queries[i * d], &scaled[j * d], d);
            total += term;
            squares += term * term;
          }
          CHECK_CLOSE(std::exp(sums[i].shift) * sums[i].total, total, 1e-5, 1e-12);
          CHECK_CLOSE(std::exp(2 * sums[i].shift) * sums[i].squares, squares, 1e-5, 1e-12);
          CHECK(sums[i].total == again[i].total && sums[i].shift == again[i].shift);
        }
        // Keys in blocks give the same bits.
        std::vector<double> blocks((n_keys + 63) / 64 * 64 * d, 0.5);
        for (index_t j = 0; j < n_keys; ++j)
          for (index_t c = 0; c < d; ++c) blocks[(j / 64 * d + c) * 64 + j % 64] = keys[j * d + c];
        DensityKeys blocked = rows;
        blocked.rows = blocks.data(), blocked.blocked = true;
        kernel_sums<double>(shape, queries.data(), blocked, again.data(), 2);
        for (index_t i = 0; i < n_queries; ++i)
          CHECK(sums[i].total == again[i].total && sums[i].squares == again[i].squares);
        // A query alone has the bits that it has among others.
        KernelSum alone;
        KernelSumShape one = shape;
        one.n_queries = 1;
        kernel_sums<double>(one, &queries[7 * d], rows, &alone, 1);
        CHECK(alone.total == sums[7].total && alone.squares == sums[7].squares);
      }
}

TEST(nothing_underflows) {
  const float query[2] = {0, 0};
  const float keys[4] = {100, 0, 101, 0};
  const KernelSumShape shape{1, 2, 2, DensityKernel::gaussian, 1};
  KernelSum sum;
  kernel_sums<float>(shape, query, {keys}, &sum, 1);
  CHECK_CLOSE(sum.shift, -5000, 0, 0);
  CHECK_CLOSE(sum.total, 1, 1e-6, 0);
  KernelSumShape none = shape;
  none.n_keys = 0;
  kernel_sums<float>(none, query, {keys}, &sum, 1);
  CHECK(sum.shift == -std::numeric_limits<double>::infinity() && sum.total == 0);
}

LSHKIT_TEST_MAIN

#include <cmath>
#include <limits>
#include <vector>

#include "check.hpp"
#include "lshkit/leave_one_out.hpp"
#include "problem.hpp"

using namespace lshkit;

namespace {

double exponent(DensityKernel kernel, const double* a, const double* b, index_t d) {
  double square = 0, absolute = 0;
  for (index_t c = 0; c < d; ++c) {
    square += (a[c] - b[c]) * (a[c] - b[c]);
    absolute += std::fabs(a[c] - b[c]);
  }
  if (kernel == DensityKernel::laplacian) return absolute;
  return kernel == DensityKernel::gaussian ? square / 2 : std::sqrt(square);
}

template <class T>
struct Found {
  std::vector<double> nearest;
  std::vector<LeftOutSum> sums;

  Found(DensityKernel kernel, index_t d, const std::vector<double>& rows,
        const std::vector<index_t>& own, const std::vector<double>& weights,
        const std::vector<double>& scales, int threads)
      : nearest(own.size()), sums(own.size() * scales.size()) {
    const std::vector<T> keys(rows.begin(), rows.end());
    std::vector<T> queries;
    for (index_t i : own)
      queries.insert(queries.end(), keys.begin() + i * d, keys.begin() + (i + 1) * d);
    LeaveOneOutProblem<T> p;
    p.shape = {index_t(own.size()), index_t(weights.size()), d, index_t(scales.size()), kernel};
    p.queries = queries.data(), p.own = own.data(), p.keys = keys.data();
    p.weights = weights.data(), p.scales = scales.data();
    p.nearest = nearest.data(), p.sums = sums.data();
    leave_one_out(p, threads);
  }
};

const std::vector<double> kScales{0.01, 1, 30, 4000};

template <class T>
void compare(DensityKernel kernel, index_t n, index_t d, double tolerance) {
  const std::vector<double> rows = numbers(n * d, 1);
  std::vector<double> weights = numbers(n, 2);
  for (double& w : weights) w = std::fabs(w) + 0.1;
  std::vector<index_t> own(n);
  for (index_t i = 0; i < n; ++i) own[i] = i;
  const Found<T> found(kernel, d, rows, own, weights, kScales, 1);
  const Found<T> again(kernel, d, rows, own, weights, kScales, 3);
  const Found<T> alone(kernel, d, rows, {n / 2}, weights, kScales, 1);
  for (index_t i = 0; i < n; ++i) {
    double least = std::numeric_limits<double>::infinity();
    for (index_t j = 0; j < n; ++j)
      if (j != i) least = std::fmin(least, exponent(kernel, &rows[i * d], &rows[j * d], d));
    CHECK_CLOSE(found.nearest[i], least, tolerance, tolerance);
    for (std::size_t b = 0; b < kScales.size(); ++b) {
      double total = 0, mean = 0;
      for (index_t j = 0; j < n; ++j) {
        if (j == i) continue;
        const double u = kScales[b] * exponent(kernel, &rows[i * d], &rows[j * d], d);
        const double term = weights[j] * std::exp(kScales[b] * least - u);
        total += term, mean += term * u;
      }
      const LeftOutSum& sum = found.sums[i * kScales.size() + b];
      const double lost = tolerance * (1 + kScales[b]);  // of an exponent
      CHECK_CLOSE(sum.log_sum, std::log(total) - kScales[b] * least, 1e-6, lost);
      CHECK_CLOSE(sum.mean_exponent, mean / total, 1e-5, 4 * lost);
      const LeftOutSum& other = again.sums[i * kScales.size() + b];
      CHECK(sum.log_sum == other.log_sum && sum.mean_exponent == other.mean_exponent);
      if (i == n / 2) CHECK(sum.log_sum == alone.sums[b].log_sum);
    }
  }
}

}  // namespace

// Sizes that end inside panels, tiles and runs of queries.
TEST(every_kernel_equals_plain_loops) {
  for (DensityKernel kernel :
       {DensityKernel::gaussian, DensityKernel::exponential, DensityKernel::laplacian})
    for (index_t d : {1, 5, 33})
      for (index_t n : {2, 65, 200}) {
        compare<double>(kernel, n, d, 1e-7);
        compare<float>(kernel, n, d, kernel == DensityKernel::exponential ? 2e-4 : 1e-5);
      }
}

TEST(a_row_without_others_has_no_density) {
  const Found<float> found(DensityKernel::gaussian, 2, {1, 2}, {0}, {1}, {1}, 1);
  const double infinity = std::numeric_limits<double>::infinity();
  CHECK(found.nearest[0] == infinity && found.sums[0].log_sum == -infinity);
  CHECK(found.sums[0].mean_exponent == 0);
}

TEST(nothing_underflows) {
  const Found<float> found(DensityKernel::gaussian, 1, {0, 1e4, 2e4}, {0}, {1, 1, 1}, {1, 1e40}, 1);
  CHECK_CLOSE(found.sums[0].log_sum, -5e7, 1e-7, 0);
  CHECK_CLOSE(found.sums[1].log_sum, -5e47, 1e-6, 0);
  CHECK_CLOSE(found.sums[1].mean_exponent, 5e47, 1e-6, 0);
}

LSHKIT_TEST_MAIN

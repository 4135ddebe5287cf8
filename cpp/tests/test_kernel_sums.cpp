#include <cmath>
#include <limits>
#include <vector>

#include "check.hpp"
#include "lshkit/kernel_sums.hpp"
#include "problem.hpp"

using namespace lshkit;

namespace {

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
        std::vector<double> given = queries;
        for (index_t i = 0; i < n_queries * d; ++i)
          given[i] = queries[i] / scale[i % d] + centre[i % d];
        // The scale is 1 / width, which rounds: nothing here lies so near the edge.
        std::vector<double> widths(d);
        for (index_t c = 0; c < d; ++c) widths[c] = 1 / scale[c];
        const KernelEdge edge{given.data(), widths.data(), 1};
        std::vector<KernelSum> sums(n_queries), again(n_queries);
        kernel_sums<double>(shape, queries.data(), rows, sums.data(), 1, edge);
        kernel_sums<double>(shape, queries.data(), rows, again.data(), 3, edge);
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
        kernel_sums<double>(shape, queries.data(), blocked, again.data(), 2, edge);
        for (index_t i = 0; i < n_queries; ++i)
          CHECK(sums[i].total == again[i].total && sums[i].squares == again[i].squares);
        // A query alone has the bits that it has among others.
        KernelSum alone;
        KernelSumShape one = shape;
        one.n_queries = 1;
        const KernelEdge of_one{&given[7 * d], widths.data(), 1};
        kernel_sums<double>(one, &queries[7 * d], rows, &alone, 1, of_one);
        CHECK(alone.total == sums[7].total && alone.squares == sums[7].squares);
      }
}

// Vectors that are nearly equal or opposite: rounding the cosine takes their angle away.
template <class T>
void angles_of_nearly_parallel_rows(index_t d, double tolerance) {
  const double pi = std::acos(-1.0);
  const std::vector<double> noise = numbers(2 * d, 5);
  std::vector<double> query(d), away(d);
  double product = 0;
  for (index_t c = 0; c < d; ++c) query[c] = 3 + noise[c];
  unit(query.data(), d);
  for (index_t c = 0; c < d; ++c) product += noise[d + c] * query[c];
  for (index_t c = 0; c < d; ++c) away[c] = noise[d + c] - product * query[c];
  unit(away.data(), d);
  const std::vector<T> rounded_query(query.begin(), query.end());
  for (double angle : {0.0, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.5})
    for (double sign : {1.0, -1.0})
      for (int n_bits : {1, 8, 64}) {
        if (sign < 0 && (angle < 1e-3 || n_bits == 64)) continue;  // float rounds the rows too
        std::vector<double> key(d);
        for (index_t c = 0; c < d; ++c)
          key[c] = 7 * sign * (std::cos(angle) * query[c] + std::sin(angle) * away[c]);
        const KernelSumShape shape{1, 1, d, DensityKernel::angular, n_bits};
        KernelSum sum;
        kernel_sums<T>(shape, rounded_query.data(), {key.data(), false, Element::float64}, &sum, 1);
        const double agreement = sign > 0 ? 1 - angle / pi : angle / pi;
        CHECK_CLOSE(std::log(sum.total), n_bits * std::log(agreement), 0, tolerance);
      }
}

TEST(small_angles_are_those_of_differences) {
  for (index_t d : {2, 65, 1000}) {
    angles_of_nearly_parallel_rows<float>(d, 5e-4);
    angles_of_nearly_parallel_rows<double>(d, 2e-5);  // of float terms, to the 64th power
  }
}

// The number of keys within the edge, by differences.
double within(const double* query, const std::vector<double>& keys, index_t d, const double* widths,
              double edge) {
  double count = 0;
  for (index_t j = 0; j < index_t(keys.size()) / d; ++j) {
    double square = 0;
    for (index_t c = 0; c < d; ++c) {
      volatile double x = (keys[j * d + c] - query[c]) / (widths ? widths[c] : 1), product = x * x;
      square += product;
    }
    count += std::sqrt(square) < edge;
  }
  return count;
}

// Rows of grids, many of which lie at the edge: distances from products would put them anywhere.
template <class T>
void ends_where_differences_say(index_t d, double step, double offset, const double* widths,
                                double edge) {
  const index_t n_queries = 9, n_keys = 500;
  std::vector<double> keys = numbers(n_keys * d, 5), centre(d), scale(d), scaled(n_queries * d);
  for (double& x : keys) x = offset + step * std::floor(2 * x);
  for (index_t c = 0; c < d; ++c) centre[c] = offset + step * 0.3, scale[c] = 1 / edge;
  if (widths)
    for (index_t c = 0; c < d; ++c) scale[c] = 1 / widths[c];
  std::vector<T> queries(n_queries * d);
  for (index_t i = 0; i < n_queries * d; ++i)
    queries[i] = T((keys[i] - centre[i % d]) * scale[i % d]);
  std::vector<KernelSum> sums(n_queries);
  for (int k = int(DensityKernel::tophat); k <= int(DensityKernel::cosine); ++k) {
    const KernelSumShape shape{n_queries, n_keys, d, DensityKernel(k), 1};
    const DensityKeys rows{keys.data(),   false,        Element::float64,
                           centre.data(), scale.data(), nullptr};
    kernel_sums<T>(shape, queries.data(), rows, sums.data(), 2, {keys.data(), widths, edge});
    for (index_t i = 0; i < n_queries; ++i) {
      const double count = within(&keys[i * d], keys, d, widths, edge);
      if (shape.kernel == DensityKernel::tophat) CHECK(sums[i].total == count);
      CHECK((sums[i].total > 0) == (count > 0));
    }
  }
}

TEST(kernels_end_where_differences_say) {
  const double widths[3] = {3, 2, 49};
  for (index_t d : {1, 2, 3, 16})
    for (double edge : {1.0, std::sqrt(2.0), std::sqrt(3.0), 2.0, std::sqrt(8.0)})
      for (double offset : {0.0, 1e6}) {
        ends_where_differences_say<double>(d, 1, offset, nullptr, edge);
        ends_where_differences_say<double>(d, 0.1, offset, nullptr, 0.1 * edge);
        ends_where_differences_say<float>(d, 1, offset, nullptr, edge);
        ends_where_differences_say<float>(d, 0.1, offset, nullptr, 0.1 * edge);
      }
  for (index_t d : {1, 2, 3})
    for (double step : {1.0, 3.0, 49.0}) {
      ends_where_differences_say<double>(d, step, 0, widths, 1);
      ends_where_differences_say<float>(d, step, 0, widths, 1);
    }
  // Scaled keys need no edge.
  const double query[2] = {0, 0}, keys[6] = {1, 0, 0.6, 0.8, 0.6, 0.7};
  KernelSum sum;
  kernel_sums<double>({1, 3, 2, DensityKernel::tophat, 1}, query, {keys, false, Element::float64},
                      &sum, 1);
  CHECK(sum.total == 1);
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

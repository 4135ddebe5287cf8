#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "check.hpp"
#include "lshkit/cells.hpp"

using namespace lshkit;

namespace {

struct Random {
  std::uint64_t state = 7;
  double operator()() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return double(state >> 40) / double(1 << 24);
  }
};

constexpr index_t kRows = 900, kCells = 37, kFeatures = 19, kQueries = 45;

template <class T>
std::vector<T> rows_of(index_t n, bool unit, Random& random) {
  std::vector<T> rows(n * kFeatures);
  for (index_t i = 0; i < n; ++i) {
    double norm = 0;
    for (index_t c = 0; c < kFeatures; ++c) {
      const double v = random() - 0.5;
      rows[i * kFeatures + c] = T(v), norm += v * v;
    }
    for (index_t c = 0; c < kFeatures && unit; ++c) rows[i * kFeatures + c] /= T(std::sqrt(norm));
  }
  return rows;
}

// In blocks, each cell (or all rows, as one) from the start of one.
template <class T>
void put_in_blocks(const T* row, index_t place, std::vector<T>& blocks) {
  T* block = &blocks[place / kKeyBlock * kKeyBlock * kFeatures + place % kKeyBlock];
  for (index_t c = 0; c < kFeatures; ++c) block[c * kKeyBlock] = row[c];
}

template <class T>
double square_of(const T* a, const T* b) {
  double square = 0;
  for (index_t c = 0; c < kFeatures; ++c) square += (double(a[c]) - b[c]) * (double(a[c]) - b[c]);
  return square;
}

// Centres, rows in random cells, and what queries read of them.
template <class T>
struct Case {
  Random random;
  std::vector<T> rows, queries, centres, centre_blocks, blocks;
  std::vector<double> weights, block_weights;
  std::vector<index_t> cell, indptr, first, begin, end;
  std::vector<std::int32_t> order, probes;
  index_t n_probes;
  CellSumProblem<T> p;

  Case(DensityKernel kernel, index_t n_probes) : n_probes(n_probes) {
    const bool unit = kernel == DensityKernel::angular;
    rows = rows_of<T>(kRows, unit, random), queries = rows_of<T>(kQueries, unit, random);
    centres = rows_of<T>(kCells, unit, random);
    centre_blocks.resize(kKeyBlock * kFeatures);
    for (index_t i = 0; i < kCells; ++i) put_in_blocks(&centres[i * kFeatures], i, centre_blocks);
    indptr.assign(kCells + 1, 0);
    for (index_t j = 0; j < kRows; ++j) {  // some cells of many rows, some empty
      cell.push_back(index_t(std::pow(random(), 3) * (kCells - 2)));
      weights.push_back(random());
      ++indptr[cell[j] + 1];
    }
    std::partial_sum(indptr.begin(), indptr.end(), indptr.begin());
    index_t n_blocks = 0;
    for (index_t i = 0; i < kCells; ++i) {
      first.push_back(n_blocks);
      n_blocks += (indptr[i + 1] - indptr[i] + kKeyBlock - 1) / kKeyBlock;
      begin.push_back(0), end.push_back(indptr[i + 1] - indptr[i]);
    }
    blocks.resize(n_blocks * kKeyBlock * kFeatures), block_weights.resize(n_blocks * kKeyBlock);
    for (index_t i = 0; i < kCells; ++i)
      for (index_t j = 0, at = first[i] * kKeyBlock; j < kRows; ++j) {
        if (cell[j] != i) continue;
        put_in_blocks(&rows[j * kFeatures], at, blocks);
        block_weights[at++] = weights[j];
        order.push_back(std::int32_t(j));
      }
    probes.resize(kQueries * n_probes);
    nearest_cells(queries.data(), kQueries, kFeatures, centre_blocks.data(), kCells, probes.data(),
                  n_probes, 2);
    p = {kernel, 5, kQueries, kFeatures, kCells, n_probes, queries.data(), probes.data()};
  }

  double kernel_of(index_t query, index_t row) const {
    const T *a = &queries[query * kFeatures], *b = &rows[row * kFeatures];
    double absolute = 0, product = 0;
    for (index_t c = 0; c < kFeatures; ++c)
      absolute += std::fabs(double(a[c]) - b[c]), product += double(a[c]) * b[c];
    if (p.kernel == DensityKernel::gaussian) return std::exp(-square_of(a, b) / 2);
    if (p.kernel == DensityKernel::exponential) return std::exp(-std::sqrt(square_of(a, b)));
    if (p.kernel == DensityKernel::laplacian) return std::exp(-absolute);
    return std::pow(1 - std::acos(std::min(1.0, product)) / std::acos(-1.0), 5);
  }

  // Total, squares and count of the rows of a query's cells in [low, high).
  std::vector<double> plain(index_t query, index_t low, index_t high, bool weighted) const {
    std::vector<double> sum(3);
    for (index_t j = low; j < high; ++j) {
      const std::int32_t* mine = &probes[query * n_probes];
      if (std::find(mine, mine + n_probes, cell[j]) == mine + n_probes) continue;
      const double term = (weighted ? weights[j] : 1) * kernel_of(query, j);
      sum[0] += term, sum[1] += term * term, sum[2] += 1;
    }
    return sum;
  }
};

template <class T>
void compare(DensityKernel kernel, index_t n_probes, bool weighted) {
  Case<T> c(kernel, n_probes);
  CellRows<T> listed{c.rows.data(), weighted ? c.weights.data() : nullptr, c.order.data(),
                     c.indptr.data()};
  const index_t ranges[][2] = {{0, kRows}, {0, 700}, {130, kRows}, {400, 401}, {50, 50}};
  for (const auto& [low, high] : ranges) {
    for (index_t i = 0; i < kCells; ++i) {
      const auto *from = &c.order[c.indptr[i]], *to = from + (c.indptr[i + 1] - c.indptr[i]);
      c.begin[i] = std::lower_bound(from, to, low) - from;
      c.end[i] = std::lower_bound(from, to, high) - from;
    }
    const CellBlocks<T> cells{c.blocks.data(), c.first.data(), c.begin.data(), c.end.data(),
                              weighted ? c.block_weights.data() : nullptr};
    std::vector<KernelSum> sums(kQueries), again(kQueries);
    std::vector<CountedSum> few(kQueries);
    cell_kernel_sums(c.p, cells, sums.data(), 1);
    cell_kernel_sums(c.p, cells, again.data(), 3);
    listed_kernel_sums(c.p, listed, low, high, few.data(), 2);
    for (index_t i = 0; i < kQueries; ++i) {
      const auto plain = c.plain(i, low, high, weighted);
      CHECK(sums[i].shift == again[i].shift && sums[i].total == again[i].total);
      const double scale = sums[i].total > 0 ? std::exp(sums[i].shift) : 0;
      CHECK_CLOSE(scale * sums[i].total, plain[0], 2e-5, 1e-12);
      CHECK_CLOSE(scale * scale * sums[i].squares, plain[1], 2e-5, 1e-12);
      const double factor = few[i].count > 0 ? std::exp(few[i].shift) : 0;
      CHECK(few[i].count == plain[2]);
      CHECK_CLOSE(factor * few[i].total, plain[0], 2e-5, 1e-12);
      CHECK_CLOSE(factor * factor * few[i].squares, plain[1], 2e-5, 1e-12);
    }
    // A query's sum does not depend on the others.
    CellSumProblem<T> one = c.p;
    one.n_queries = 1, one.queries += 7 * kFeatures, one.probes += 7 * n_probes;
    cell_kernel_sums(one, cells, again.data(), 1);
    CHECK(again[0].shift == sums[7].shift && again[0].total == sums[7].total);
  }
}

template <class T>
void compare_nearest(index_t n_probes) {
  Case<T> c(DensityKernel::gaussian, n_probes);
  for (index_t i = 0; i < kQueries; ++i) {
    std::vector<std::pair<double, index_t>> all;
    for (index_t k = 0; k < kCells; ++k)
      all.emplace_back(square_of(&c.queries[i * kFeatures], &c.centres[k * kFeatures]), k);
    std::sort(all.begin(), all.end());
    for (index_t k = 0; k < n_probes; ++k) CHECK(c.probes[i * n_probes + k] == all[k].second);
  }
  // Of equal centres the first.
  std::fill(c.centre_blocks.begin(), c.centre_blocks.end(), T(0.25));
  nearest_cells(c.queries.data(), kQueries, kFeatures, c.centre_blocks.data(), kCells,
                c.probes.data(), n_probes, 1);
  for (index_t i = 0; i < kQueries * n_probes; ++i) CHECK(c.probes[i] == i % n_probes);
}

}  // namespace

TEST(rows_of_cells_are_summed) {
  for (int k = 0; k <= int(DensityKernel::angular); ++k) {
    compare<float>(DensityKernel(k), 1 + 2 * k, k % 2 == 1);
    compare<double>(DensityKernel(k), 3 + k, k % 2 == 0);
  }
}

TEST(nearest_centres_are_found) {
  for (index_t n_probes : {1, 2, 9, 37}) {
    compare_nearest<float>(n_probes);
    compare_nearest<double>(n_probes);
  }
}

LSHKIT_TEST_MAIN

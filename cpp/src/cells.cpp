#include "lshkit/cells.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/kernel_sums.hpp"
#include "kernels/kernels.hpp"
#include "near_rows.hpp"
#include "parallel.hpp"

namespace lshkit {
namespace {

constexpr index_t kNearestRun = 256;  // queries of a task that looks for centres
constexpr index_t kGroup = 512;       // queries that read a cell together
constexpr index_t kListRun = 32;      // queries of a task that reads rows one by one
constexpr double kNone = -std::numeric_limits<double>::infinity();

// For each cell the places in `probes` where it stands.
struct Readers {
  std::vector<index_t> first;  // (n_cells + 1)
  std::vector<index_t> places;

  Readers(const std::int32_t* probes, index_t count, index_t n_cells)
      : first(n_cells + 1), places(count) {
    for (index_t i = 0; i < count; ++i) ++first[probes[i] + 1];
    for (index_t cell = 0; cell < n_cells; ++cell) first[cell + 1] += first[cell];
    std::vector<index_t> next(first.begin(), first.end() - 1);
    for (index_t i = 0; i < count; ++i) places[next[probes[i]]++] = i;
  }
};

// Log kernels from squared distances; L1 distances for laplacian.
template <class T>
void to_log_kernels(DensityKernel kernel, int n_bits, T* values, index_t n) {
  if (kernel == DensityKernel::gaussian) {
    for (index_t i = 0; i < n; ++i) values[i] *= T(-0.5);
  } else if (kernel == DensityKernel::exponential) {
    for (index_t i = 0; i < n; ++i) values[i] = -std::sqrt(values[i]);
  } else if (kernel == DensityKernel::laplacian) {
    for (index_t i = 0; i < n; ++i) values[i] = -values[i];
  } else {
    // Unit vectors at the distance r have the angle 2 asin(r / 2): exact where rows are close.
    const double pi = std::acos(-1.0);
    for (index_t i = 0; i < n; ++i) {
      const double half = std::min(1.0, std::sqrt(double(values[i])) / 2);
      values[i] = T(n_bits * std::log(std::max(1 - 2 * std::asin(half) / pi, 1e-300)));
    }
  }
}

}  // namespace

template <class T>
void nearest_cells(const T* queries, index_t n_queries, index_t n_features, const T* centre_blocks,
                   index_t n_cells, std::int32_t* probes, index_t n_probes, int threads) {
  parallel_for((n_queries + kNearestRun - 1) / kNearestRun, threads, [&](index_t task) {
    const index_t first = task * kNearestRun;
    NearestPass<T> pass{};
    pass.rows.shape = {std::min(kNearestRun, n_queries - first), n_cells, n_features};
    pass.rows.queries = queries + first * n_features;
    pass.rows.keys.rows = centre_blocks;
    pass.rows.keys.blocked = true;
    pass.rows.keys.element = kElement<T>;
    pass.n_nearest = n_probes;
    pass.nearest = probes + first * n_probes;
    pass.rows.scratch = thread_scratch(kernels().typed<T>().nearest_rows_scratch(pass));
    kernels().typed<T>().nearest_rows(pass);
  });
}

template <class T>
void cell_kernel_sums(const CellSumProblem<T>& p, const CellBlocks<T>& cells, KernelSum* sums,
                      int threads) {
  const double lowest = p.kernel <= DensityKernel::laplacian ? kNone : 0;
  const index_t d = p.n_features;
  const Readers readers(p.probes, p.n_queries * p.n_probes, p.n_cells);
  std::vector<KernelSum> parts(p.n_queries * p.n_probes, KernelSum{lowest, 0, 0});
  parallel_for(p.n_cells, threads, [&](index_t cell) {
    const index_t last = readers.first[cell + 1], begin = cells.begin[cell],
                  block = begin / kKeyBlock;
    for (index_t first = readers.first[cell]; first < last && begin < cells.end[cell];
         first += kGroup) {
      const index_t* places = readers.places.data() + first;
      const index_t count = std::min(kGroup, last - first);
      const auto cut = [&](Arena arena, T*& queries, T*& norms, KernelSum*& out) {
        queries = arena.take<T>(count * d);
        norms = arena.take<T>(count);
        out = arena.take<KernelSum>(count);
        return arena.used();
      };
      T *queries, *norms;
      KernelSum* out;
      cut(Arena(thread_scratch(cut(Arena(), queries, norms, out), Scratch::rows)), queries, norms,
          out);
      for (index_t i = 0; i < count; ++i) {
        const T* query = p.queries + places[i] / p.n_probes * d;
        std::copy_n(query, d, queries + i * d);
        T sum = 0;
        for (index_t c = 0; c < d; ++c) sum += query[c] * query[c];
        norms[i] = sum / 2;
        out[i] = {lowest, 0, 0};
      }
      KernelSumPass<T> pass;
      pass.shape = {count, cells.end[cell] - block * kKeyBlock, d, p.kernel, p.n_bits};
      pass.skip = begin - block * kKeyBlock;
      pass.queries = queries;
      pass.query_norms = norms;
      pass.keys.rows = cells.blocks + (cells.first[cell] + block) * kKeyBlock * d;
      pass.keys.blocked = true;
      pass.keys.element = kElement<T>;
      if (cells.weights)
        pass.keys.weights = cells.weights + (cells.first[cell] + block) * kKeyBlock;
      pass.sums = out;
      pass.scratch = thread_scratch(kernels().typed<T>().kernel_sums_scratch(pass));
      kernels().typed<T>().kernel_sums(pass);
      for (index_t i = 0; i < count; ++i) parts[places[i]] = out[i];
    }
  });
  for (index_t i = 0; i < p.n_queries; ++i) {
    sums[i] = parts[i * p.n_probes];
    for (index_t k = 1; k < p.n_probes; ++k) add(sums[i], parts[i * p.n_probes + k]);
  }
}

template <class T>
void listed_kernel_sums(const CellSumProblem<T>& p, const CellRows<T>& cells, index_t low,
                        index_t high, CountedSum* sums, int threads) {
  const PairMeasure measure = p.kernel == DensityKernel::laplacian ? PairMeasure::l1_distance
                                                                   : PairMeasure::squared_distance;
  parallel_for((p.n_queries + kListRun - 1) / kListRun, threads, [&](index_t task) {
    std::vector<std::int32_t> list;
    std::vector<T> logs;
    for (index_t i = task * kListRun; i < std::min(p.n_queries, (task + 1) * kListRun); ++i) {
      list.clear();
      for (index_t k = 0; k < p.n_probes; ++k) {
        const index_t cell = p.probes[i * p.n_probes + k];
        const std::int32_t* const end = cells.order + cells.indptr[cell + 1];
        const std::int32_t* row = std::lower_bound(cells.order + cells.indptr[cell], end, low);
        for (; row < end && *row < high; ++row) list.push_back(*row);
      }
      const index_t n = index_t(list.size());
      sums[i] = {kNone, 0, 0, double(n)};
      if (n == 0) continue;
      logs.resize(n);
      measure_rows(measure, p.queries + i * p.n_features, cells.rows, p.n_features, list.data(), n,
                   logs.data());
      to_log_kernels(p.kernel, p.n_bits, logs.data(), n);
      const double largest = double(*std::max_element(logs.begin(), logs.end()));
      sums[i].shift = largest;
      for (index_t j = 0; j < n; ++j) {
        const double weight = cells.weights ? cells.weights[list[j]] : 1;
        const double term = weight * std::exp(double(logs[j]) - largest);
        sums[i].total += term;
        sums[i].squares += term * term;
      }
    }
  });
}

#define LSHKIT_INSTANTIATE(T)                                                                      \
  template void nearest_cells(const T*, index_t, index_t, const T*, index_t, std::int32_t*,        \
                              index_t, int);                                                       \
  template void cell_kernel_sums(const CellSumProblem<T>&, const CellBlocks<T>&, KernelSum*, int); \
  template void listed_kernel_sums(const CellSumProblem<T>&, const CellRows<T>&, index_t, index_t, \
                                   CountedSum*, int);
LSHKIT_INSTANTIATE(float)
LSHKIT_INSTANTIATE(double)

}  // namespace lshkit

#include "lshkit/near_kernel_sums.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "bucket_finder.hpp"
#include "near_rows.hpp"
#include "parallel.hpp"

namespace lshkit {
namespace {

constexpr index_t kRun = 32;        // queries of a task
constexpr index_t kAskAtOnce = 64;  // near rows that are asked for when they are found
constexpr double kNone = -std::numeric_limits<double>::infinity();

template <class T>
struct RunScratch {
  std::uint8_t* counts;  // of the buckets in which each row was met, 0 between queries
  std::int32_t* near;    // rows
  T *logs, *part;        // log kernels of the near rows; those of a segment
  std::size_t bytes;

  RunScratch(Arena arena, index_t n_rows)
      : counts(arena.take<std::uint8_t>(n_rows)),
        near(arena.take<std::int32_t>(n_rows + 1)),
        logs(arena.take<T>(n_rows)),
        part(arena.take<T>(n_rows)),
        bytes(arena.used()) {}
};

template <class T>
void ask_for(const T* row, index_t n_features) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (index_t at = 0; at < std::min<index_t>(n_features * sizeof(T), 512); at += 64)
    __builtin_prefetch(bytes + at);
}

// Of the buckets in which each row was met, up to 255.
struct Counts {
  std::uint8_t* bytes;

  int add(std::int32_t row) const {
    const int before = bytes[row];
    bytes[row] = std::uint8_t(before + (before < 255));
    return before + 1;
  }
};

// The rows that are in min_count of the buckets, each once, into s.near; returns their number.
template <class T>
index_t find_near(const NearKernelProblem<T>& p, const std::vector<BucketRows>& buckets,
                  const RunScratch<T>& s) {
  const index_t n = find_near(buckets.data(), buckets.data() + buckets.size(), int(p.min_count),
                              Counts{s.counts}, s.near, [&](std::int32_t row, index_t near) {
                                if (near < kAskAtOnce)
                                  ask_for(p.rows + index_t(row) * p.n_features, p.n_features);
                              });
  for (const BucketRows& b : buckets)
    for (const std::int32_t* row = b.begin; row < b.end; ++row) s.counts[*row] = 0;
  return n;
}

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

void add_up(const float* logs, index_t n, NearKernelSum* sum) {
  const float largest = kernels().largest_of(logs, n, float(kNone));
  const ExponentialSums sums = kernels().exponential_sums(logs, n, largest);
  *sum = {double(largest), sums.sum, sums.squares, double(n)};
}
void add_up(const double* logs, index_t n, NearKernelSum* sum) {
  const double largest = *std::max_element(logs, logs + n);
  *sum = {largest, 0, 0, double(n)};
  for (index_t i = 0; i < n; ++i) {
    const double term = std::exp(logs[i] - largest);
    sum->total += term;
    sum->squares += term * term;
  }
}

// The near rows of indices from low on and below high.
template <class T>
void sum_segment(const NearKernelProblem<T>& p, const RunScratch<T>& s, index_t n_near, index_t low,
                 index_t high, NearKernelSum* sum) {
  index_t n = 0;
  *sum = {kNone, 0, 0, 0};
  if (!p.weights) {
    for (index_t i = 0; i < n_near; ++i) {
      s.part[n] = s.logs[i];
      n += s.near[i] >= low && s.near[i] < high;
    }
    if (n) add_up(s.part, n, sum);
    return;
  }
  for (index_t i = 0; i < n_near; ++i) {
    if (s.near[i] < low || s.near[i] >= high) continue;
    sum->count += 1;
    sum->shift = std::max(sum->shift, double(s.logs[i]));
  }
  for (index_t i = 0; i < n_near && sum->count > 0; ++i) {
    if (s.near[i] < low || s.near[i] >= high) continue;
    const double term = p.weights[s.near[i]] * std::exp(double(s.logs[i]) - sum->shift);
    sum->total += term;
    sum->squares += term * term;
  }
}

template <class T, class Code>
void sums_of_query(const NearKernelProblem<T>& p, index_t query, const Finder<Code>& finder,
                   std::vector<BucketRows>& buckets, const RunScratch<T>& s, NearKernelSum* sums) {
  const HashTables& t = p.tables;
  const Code* codes = static_cast<const Code*>(p.query_codes.data) + query * t.n_hashes;
  buckets.clear();
  for (index_t first = 0; first < t.n_hashes; first += kBlock) {
    const index_t n = std::min(kBlock, t.n_hashes - first);
    std::int32_t h[kBlock];
    Bucket found[kBlock];
    for (index_t k = 0; k < n; ++k) h[k] = std::int32_t(first + k);
    finder.find(codes + first, h, n, found);
    for (index_t k = 0; k < n; ++k) {
      if (found[k].size() == 0 || found[k].size() > p.max_bucket_size) continue;
      const std::int32_t* rows = t.order + found[k].table;
      buckets.push_back({rows + found[k].begin, rows + found[k].end});
    }
  }
  const index_t n_near = find_near(p, buckets, s);
  if (n_near) {
    measure_rows(p.kernel == DensityKernel::laplacian ? PairMeasure::l1_distance
                                                      : PairMeasure::squared_distance,
                 p.queries + query * p.n_features, p.rows, p.n_features, s.near, n_near, s.logs);
    to_log_kernels(p.kernel, p.n_bits, s.logs, n_near);
  }
  for (index_t k = 0; k < p.n_stops; ++k)
    sum_segment(p, s, n_near, k ? p.stops[k - 1] : 0, p.stops[k], sums + k);
}

}  // namespace

template <class T>
void near_kernel_sums(const NearKernelProblem<T>& p, NearKernelSum* sums, int threads) {
  with_code_type(p.tables.code_bytes, [&](auto type) {
    const Finder<decltype(type)> finder{p.tables};
    parallel_for((p.n_queries + kRun - 1) / kRun, threads, [&](index_t task) {
      const RunScratch<T> size(Arena(), p.tables.n_rows);
      const RunScratch<T> s(Arena(thread_scratch(size.bytes)), p.tables.n_rows);
      std::memset(s.counts, 0, p.tables.n_rows);
      std::vector<BucketRows> buckets;
      buckets.reserve(p.tables.n_hashes);
      for (index_t i = task * kRun; i < std::min(p.n_queries, (task + 1) * kRun); ++i)
        sums_of_query(p, i, finder, buckets, s, sums + i * p.n_stops);
    });
  });
}
template void near_kernel_sums(const NearKernelProblem<float>&, NearKernelSum*, int);
template void near_kernel_sums(const NearKernelProblem<double>&, NearKernelSum*, int);

}  // namespace lshkit

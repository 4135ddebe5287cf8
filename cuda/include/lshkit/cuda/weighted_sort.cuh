#pragma once
// The tables of a weighted sum in no order, from sorted probes: see weighted_bucket_sum.cuh.
//
// weighted_sort: a block sorts the probes of one hash of one head by buckets, and writes row and
// weight of each where it belongs. weighted_segment: a warp takes buckets in turn and sums the rows
// of each in its registers.
#include "lshkit/cuda/bucket_sort.cuh"
#include "lshkit/cuda/weighted_bucket_sum.cuh"

namespace lshkit::cuda {

constexpr int kSegmentThreads = 256;
constexpr int kSegmentBuckets = 8;  // of a warp
constexpr int kSegmentBlock = kSegmentThreads / kWarp * kSegmentBuckets;

// Where the sorted probes of a task and hash begin, of a pass's group.
template <class T>
__device__ inline index_t sorted_at(const WeightedPass<T>& a, const WeightedTask<T>& task,
                                    index_t hash) {
  const index_t head = task.head - a.first_head - a.sort_first_head;
  const index_t row = (head * a.sort_hashes + hash) * a.add.side.n_rows + task.add.first;
  return row * a.add.n_probes;
}
template <class T>
__device__ inline std::int32_t* starts_at(const WeightedPass<T>& a, index_t task, index_t hash) {
  const index_t slot = (task - a.sort_first_head * a.sequences) * a.sort_hashes + hash;
  return a.starts + slot * (a.n_buckets + 1);
}

// Tasks [first_task, ...) and hashes from sort_first_hash on: all that the pass's group has.
template <class T>
__global__ void __launch_bounds__(kMostSortWarps* kWarp)
    weighted_sort_kernel(WeightedPass<T> a, int warps) {
  LSHKIT_SHARED_MEMORY(memory);
  const index_t local = block_index() / a.sort_hashes, hash = block_index() % a.sort_hashes;
  const WeightedTask<T> task(a, local);
  const WeightedSide<T>& s = a.add;
  Added<T>* const to = a.sorted + sorted_at(a, task, hash);
  const index_t base = probes_at(s, task.add, task.head, 0, a.sort_first_hash + hash);
  const std::uint32_t probes = std::uint32_t(s.n_probes);
  const auto entry_of = [&](index_t i, std::uint32_t* row) {  // fewer than 2^31
    *row = divided(std::uint32_t(i), probes, a.entry_shift);
    return base + *row * s.row_stride + (std::uint32_t(i) - *row * probes);
  };
  block_sort(
      memory, warps, int(a.n_buckets), task.add.count * s.n_probes,
      starts_at(a, a.first_task + local, hash),
      [&](index_t i) -> unsigned {
        std::uint32_t row;
        const std::uint32_t code = load_code(s.codes, s.code_bytes, entry_of(i, &row));
        return code < a.n_buckets && is_valid(s, task.add, row) ? code : kNoBucket;
      },
      [&](index_t i, int place) {
        std::uint32_t row;
        const index_t entry = entry_of(i, &row);
        to[place] = {s.weights ? s.weights[entry] : T(1), std::uint32_t(task.add.first) + row};
      });
}

// Q: the tables' elements.
template <class T, Element E, Element Q, int C>
__global__ void __launch_bounds__(kSegmentThreads, 1) weighted_segment_kernel(WeightedPass<T> a) {
  constexpr int kBytes = kElementBytes<E>;
  const int lane = lane_index();
  BlockParts block;
  const index_t first_column = block.take(a.slices) * a.slice;
  const index_t first_bucket = block.take(ceil_div(a.n_buckets, kSegmentBlock)) * kSegmentBlock +
                               warp_index() * kSegmentBuckets;
  const index_t hash = block.take(a.hashes), local = block.rest;
  const WeightedTask<T> task(a, local);
  const index_t of_group = a.first_hash + hash - a.sort_first_hash;
  const Added<T>* sorted = a.sorted + sorted_at(a, task, of_group);
  keep_in_register(sorted);
  const std::int32_t* const starts = starts_at(a, a.first_task + local, of_group);
  // A row's vector, by its number in the batch, from this lane's first column on.
  const int width = int(least(a.slice, a.columns() - first_column));
  const char* vectors =
      static_cast<const char*>(a.add.x.data) +
      (vector_at(a.add, task.add, -task.add.first) + first_column + lane) * kBytes;
  std::uint32_t step = std::uint32_t(a.add.x.row * kBytes);
  const T* const extra = a.add.extra ? a.add.extra + task.add.owned - task.add.first : nullptr;
  bool of_vector[C];
  LSHKIT_UNROLL
  for (int k = 0; k < C; ++k)
    of_vector[k] = lane + k * kWarp < least(width, a.n_values - first_column);
  keep_in_register(vectors);
  keep_in_register(step);

  const int count = int(least(kSegmentBuckets, a.n_buckets - first_bucket));
  const int bound = lane <= count ? starts[first_bucket + lane] : 0;
  constexpr int kTableBytes = kElementBytes<Q>;
  char* to = reinterpret_cast<char*>(a.tables) +
             (((local * a.hashes + hash) * a.table_rows + first_bucket) * a.columns() +
              first_column + lane) *
                 kTableBytes;
  std::uint32_t columns = std::uint32_t(a.columns() * kTableBytes);
  std::uint32_t own = std::uint32_t(width - lane);
  keep_in_register(to);
  keep_in_register(columns);
  keep_in_register(own);
  for (int b = 0; b < count; ++b, to += columns) {  // none, where first_bucket is beyond the last
    const int begin = __shfl_sync(kAllLanes, bound, b), end = __shfl_sync(kAllLanes, bound, b + 1);
    T sum[C] = {};
    for (int first = begin; first < end; first += kSegmentBatch) {
      Added<T> added[kSegmentBatch];
      LSHKIT_UNROLL
      for (int u = 0; u < kSegmentBatch; ++u) added[u] = sorted[first + u];
      // Beyond the last: the first again, which is not added.
      T x[kSegmentBatch][C];
      LSHKIT_UNROLL
      for (int u = 0; u < kSegmentBatch; ++u) {
        const std::uint32_t row = first + u < end ? added[u].row : added[0].row;
        const char* const from = vectors + std::uint64_t(row) * step;
        LSHKIT_UNROLL
        for (int k = 0; k < C; ++k)
          x[u][k] = of_vector[k] ? load_element<T>(from + k * kWarp * kBytes, 0, E) : T(0);
      }
      if (a.extra) {
        LSHKIT_UNROLL
        for (int u = 0; u < kSegmentBatch; ++u) {
          const T last = extra ? extra[first + u < end ? added[u].row : added[0].row] : T(1);
          LSHKIT_UNROLL
          for (int k = 0; k < C; ++k) x[u][k] = of_vector[k] ? x[u][k] : last;
        }
      }
      LSHKIT_UNROLL
      for (int u = 0; u < kSegmentBatch; ++u)
        if (first + u < end) {
          LSHKIT_UNROLL
          for (int k = 0; k < C; ++k) sum[k] += added[u].weight * x[u][k];
        }
    }
    LSHKIT_UNROLL
    for (int k = 0; k < C; ++k)
      if (k * kWarp < int(own)) store_element<T>(to, k * kWarp, Q, sum[k]);
  }
}

}  // namespace lshkit::cuda

#pragma once
// Sums of values by bucket that are kept (BucketTable): rows added in their order, no atomics, and
// read.
//
// add: a warp owns a few buckets of one hash and 32 columns, a block of eight the codes that it
// scans: 32 rows a vote. Sums of the buckets that are hit wait in shared memory, and only these are
// read from the table and written back. Bound: the codes, read by every block of a hash (n bytes of
// every n_hashes, which the L2 cache holds), and the values, read once by each hash.
// query: a warp a row and 32 columns. Bound: n_hashes rows of the table for each row, from device
// memory or L2.
#include "lshkit/cuda/elements.cuh"

namespace lshkit::cuda {

constexpr int kKeptThreads = 256, kKeptWarps = kKeptThreads / kWarp;
constexpr int kKeptChunk = 1024;       // codes that a block looks at at once
constexpr int kKeptBuckets = 32;       // of a warp, at most: a bit each
constexpr index_t kKeptBlocks = 1024;  // some for every multiprocessor, where buckets suffice
constexpr int kKeptAhead = 4;          // loads of rows that a warp waits for together

template <class T>
struct TableRows {
  T* table = nullptr;  // (n_hashes, n_buckets, n_values)
  index_t n_hashes = 1, n_buckets = 1, n_values = 0, rows = 0;
  const void* codes = nullptr;  // (rows, n_hashes)
  int code_bytes = 1;
  const T* values = nullptr;  // add: rows, value_stride apart
  index_t value_stride = 0;
  T factor = 1;      // add: the sign, query: the scale
  T* out = nullptr;  // query: (rows, n_values)
  int buckets = 1;   // add: of a warp
};

template <class T>
__global__ void __launch_bounds__(kKeptThreads) table_add_kernel(TableRows<T> a) {
  LSHKIT_SHARED_MEMORY(memory);
  T* const all_sums = reinterpret_cast<T*>(memory);  // (kKeptWarps, buckets, kWarp)
  T* const sums = all_sums + warp_index() * a.buckets * kWarp;
  auto* const codes = reinterpret_cast<std::uint16_t*>(all_sums + kKeptThreads * a.buckets);
  const index_t slices = ceil_div(a.n_values, kWarp);
  const index_t ranges = ceil_div(a.n_buckets, index_t(a.buckets) * kKeptWarps);
  const index_t column = block_index() % slices * kWarp + lane_index();
  const index_t range = block_index() / slices % ranges, hash = block_index() / slices / ranges;
  const index_t first = (range * kKeptWarps + warp_index()) * a.buckets;
  const int lane = lane_index(), count = int(least(a.buckets, a.n_buckets - first));  // or none
  const bool inside = column < a.n_values;
  T* const table = a.table + (hash * a.n_buckets + first) * a.n_values + column;

  unsigned touched = 0;
  for (index_t start = 0; start < a.rows; start += kKeptChunk) {
    const int n = int(least(kKeptChunk, a.rows - start));
    __syncthreads();
    for (int i = thread_index(); i < n; i += kKeptThreads)
      codes[i] = std::uint16_t(load_code(a.codes, a.code_bytes, (start + i) * a.n_hashes + hash));
    __syncthreads();
    for (int t = 0; t < n; t += kWarp) {
      const index_t bucket = t + lane < n ? index_t(codes[t + lane]) - first : -1;
      unsigned hits = __ballot_sync(kAllLanes, bucket >= 0 && bucket < count);
      while (hits) {
        int row[kKeptAhead];
        T value[kKeptAhead];
        LSHKIT_UNROLL
        for (int k = 0; k < kKeptAhead; ++k) {
          row[k] = hits ? t + lowest_bit(hits) : -1;
          hits &= hits - 1;
          value[k] =
              row[k] >= 0 && inside ? a.values[(start + row[k]) * a.value_stride + column] : T(0);
        }
        LSHKIT_UNROLL
        for (int k = 0; k < kKeptAhead; ++k) {
          if (row[k] < 0) continue;
          const int b = int(codes[row[k]] - first);
          T sum = 0;
          if (touched >> b & 1)
            sum = sums[b * kWarp + lane];
          else if (inside)
            sum = table[b * a.n_values];
          touched |= 1u << b;
          sums[b * kWarp + lane] = sum + a.factor * value[k];
        }
      }
    }
  }
  for (int b = 0; b < count; ++b)
    if (inside && (touched >> b & 1)) table[b * a.n_values] = sums[b * kWarp + lane];
}

template <class T>
__global__ void __launch_bounds__(kKeptThreads) table_query_kernel(TableRows<T> a) {
  constexpr int kAhead = 8;
  const index_t slices = ceil_div(a.n_values, kWarp);
  const index_t task = block_index() * kKeptWarps + warp_index();
  const index_t row = task / slices, column = task % slices * kWarp + lane_index();
  if (row >= a.rows) return;  // all of the warp
  const bool inside = column < a.n_values;
  const T* const table = a.table + (inside ? column : 0);
  T sum = 0;
  for (index_t first = 0; first < a.n_hashes; first += kWarp) {
    const int count = int(least(kWarp, a.n_hashes - first));
    int mine = -1;
    if (lane_index() < count)
      mine = int(load_code(a.codes, a.code_bytes, row * a.n_hashes + first + lane_index()));
    for (int h = 0; h < count; h += kAhead) {
      T read[kAhead];
      LSHKIT_UNROLL
      for (int k = 0; k < kAhead; ++k) {  // kWarp is a multiple of kAhead: -1 beyond the last
        const int code = __shfl_sync(kAllLanes, mine, h + k);
        read[k] = inside && code >= 0 && code < a.n_buckets
                      ? table[((first + h + k) * a.n_buckets + code) * a.n_values]
                      : T(0);
      }
      LSHKIT_UNROLL
      for (int k = 0; k < kAhead; ++k) sum += read[k];
    }
  }
  if (inside) a.out[row * a.n_values + column] = a.factor * sum;
}

template <class T>
void table_add(const Queue& queue, TableRows<T> a) {
  const auto blocks = [&] {
    return a.n_hashes * ceil_div(a.n_buckets, index_t(a.buckets) * kKeptWarps) *
           ceil_div(a.n_values, kWarp);
  };
  for (a.buckets = kKeptBuckets; a.buckets > 4 && blocks() < kKeptBlocks;) a.buckets /= 2;
  const std::size_t bytes =
      sizeof(T) * std::size_t(kKeptThreads * a.buckets) + sizeof(std::uint16_t) * kKeptChunk;
  if (a.rows > 0)
    launch(queue, "bucket_table_add", table_add_kernel<T>, blocks(), kKeptThreads, bytes, a);
}
template <class T>
void table_query(const Queue& queue, const TableRows<T>& a) {
  const index_t warps = a.rows * ceil_div(a.n_values, kWarp);
  launch(queue, "bucket_table_query", table_query_kernel<T>, ceil_div(warps, kKeptWarps),
         kKeptThreads, 0, a);
}

}  // namespace lshkit::cuda

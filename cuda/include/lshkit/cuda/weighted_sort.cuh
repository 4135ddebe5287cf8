#pragma once
// The tables of a weighted sum in no order, from sorted probes: see weighted_bucket_sum.cuh.
//
// weighted_sort: a block takes a part of the probes of one hash of one head, sorts it in shared
// memory by ranges of 64 buckets, and writes row, bucket and weight of each. weighted_segment: a
// block takes a range: a tile of its probes at a time, part by part, is sorted by buckets in shared
// memory, each warp sums an equal share of it in its registers, and adds a bucket's sum to where
// the block keeps them. Where a bucket's probes begin in the share of another warp, its sum waits
// until all are there: they are added in the order of the warps.
#include "lshkit/cuda/bucket_sort.cuh"
#include "lshkit/cuda/weighted_bucket_sum.cuh"
#include "lshkit/cuda/words.cuh"

namespace lshkit::cuda {

constexpr int kSortWarps = kSortThreads / kWarp, kSegmentWarps = kSegmentThreads / kWarp;

// Where the probes of a task and hash begin, of a pass's group.
template <class T>
__device__ inline Added<T>* sorted_at(const WeightedPass<T>& a, const WeightedTask<T>& task,
                                      index_t hash) {
  const index_t head = task.head - a.first_head - a.sort_first_head;
  const index_t row = (head * a.sort_hashes + hash) * a.add.side.n_rows + task.add.first;
  return a.sorted + row * a.add.n_probes;
}
// And where the ranges of its parts do. The parts of a sequence are as many as its probes need, and
// begin where no other's are: of the k-th, k after the whole parts before its first row.
template <class T>
__device__ inline std::int32_t* starts_at(const WeightedPass<T>& a, const WeightedTask<T>& task,
                                          index_t local, index_t hash) {
  const index_t head = task.head - a.first_head - a.sort_first_head;
  const index_t before = task.add.first * a.add.n_probes / kSortPart;
  const index_t sequence = (a.first_task + local) % a.sequences;
  return a.starts + ((head * a.sort_hashes + hash) * a.sort_parts() + before + sequence) *
                        (a.sort_ranges() + 1);
}

template <class T>
index_t weighted_sort_bytes(const WeightedPass<T>& a) {
  return sort_bytes(kSortWarps, a.sort_ranges()) + kSortPart * index_t(sizeof(Added<T>));
}
// Tasks [first_task, ...) and hashes from sort_first_hash on: all that the pass's group has. A
// task's parts, in turn, have `blocks` blocks.
template <class T>
__global__ void __launch_bounds__(kSortThreads, 2)
    weighted_sort_kernel(WeightedPass<T> a, index_t blocks) {
  LSHKIT_SHARED_MEMORY(memory);
  constexpr int kEach = int(kSortPart) / kSortThreads;
  const int lane = lane_index(), warp = warp_index(), ranges = int(a.sort_ranges());
  Added<T>* const records = reinterpret_cast<Added<T>*>(memory);
  int* const counters = reinterpret_cast<int*>(records + kSortPart);
  int* const mine = counters + warp * ranges;
  BlockParts block;
  const index_t first_part = block.take(blocks), hash = block.take(a.sort_hashes);
  const index_t local = block.rest;
  const WeightedTask<T> task(a, local);
  const WeightedSide<T>& s = a.add;
  const std::uint32_t count = std::uint32_t(task.add.count * s.n_probes);  // fewer than 2^31
  const index_t base = probes_at(s, task.add, task.head, 0, a.sort_first_hash + hash);
  const std::uint8_t* const valid = s.valid ? s.valid + task.add.batch * s.valid_batch +
                                                  task.add.head * s.valid_head + task.add.first
                                            : nullptr;
  const std::uint32_t probes = std::uint32_t(s.n_probes), n_buckets = std::uint32_t(a.n_buckets);
  for (index_t part = first_part; part * kSortPart < count; part += blocks) {
    const std::uint32_t first = std::uint32_t(part * kSortPart) + warp * kEach * kWarp + lane;
    std::uint32_t code[kEach];
    T weight[kEach];
    LSHKIT_UNROLL
    for (int u = 0; u < kEach; ++u) {
      const std::uint32_t number = first + u * kWarp;
      code[u] = kNoRow;
      weight[u] = 1;
      if (number >= count) continue;
      const std::uint32_t row = divided(number, probes, a.entry_shift);
      const index_t entry = base + row * s.row_stride + (number - row * probes);
      const std::uint32_t own = load_code(s.codes, s.code_bytes, entry);
      if (own < n_buckets && (!valid || valid[row])) code[u] = own;
      if (s.weights) weight[u] = s.weights[entry];
    }
    for (int b = thread_index(); b < kSortWarps * ranges; b += kSortThreads) counters[b] = 0;
    __syncthreads();
    LSHKIT_UNROLL
    for (int u = 0; u < kEach; ++u)
      if (code[u] != kNoRow) atomicAdd(mine + code[u] / kRangeBuckets, 1);
    __syncthreads();
    std::int32_t* const starts = starts_at(a, task, local, hash) + part * (ranges + 1);
    block_places(counters, kSortWarps, ranges, starts);
    LSHKIT_UNROLL
    for (int u = 0; u < kEach; ++u) {
      const bool some = code[u] != kNoRow;
      const int place = next_place(mine, code[u] / kRangeBuckets, a.range_bits, some);
      const std::uint32_t row =
          std::uint32_t(task.add.first) + divided(first + u * kWarp, probes, a.entry_shift);
      if (some) records[place] = {weight[u], row << kRangeBits | code[u] % kRangeBuckets};
    }
    __syncthreads();
    Added<T>* const to = sorted_at(a, task, hash) + part * kSortPart;
    const int placed = starts[ranges];
    for (int i = thread_index(); i < placed; i += kSortThreads) to[i] = records[i];
    __syncthreads();
  }
}

// What a block keeps of its range.
template <class T>
struct SegmentMemory {
  T* sums;               // (kRangeBuckets, slice)
  T* waiting;            // (warps, slice)
  Added<T>* records;     // (kSegmentTile)
  int* counters;         // sort_bytes
  int* starts;           // (kRangeBuckets + 1)
  int* begins;           // (threads + 1): of the runs of so many parts, in the tile
  int* sources;          // (threads): where those are, after the task's first probe
  int* totals;           // (warps), then of the next tile: a part and how much of it has been
  int* waits_for;        // (warps): the bucket of what waits, or -1
  std::uint16_t* order;  // (kSegmentTile)

  __host__ __device__ SegmentMemory(void* memory, index_t slice) {
    sums = static_cast<T*>(memory);
    waiting = sums + kRangeBuckets * slice;
    records = reinterpret_cast<Added<T>*>(waiting + (kSegmentWarps * slice + 3) / 4 * 4);
    counters = reinterpret_cast<int*>(records + kSegmentTile);
    starts = counters + sort_bytes(kSegmentWarps, kRangeBuckets) / sizeof(int);
    begins = starts + kRangeBuckets + 1;
    sources = begins + kSegmentThreads + 1;
    totals = sources + kSegmentThreads;
    waits_for = totals + kSegmentWarps + 2;
    order = reinterpret_cast<std::uint16_t*>(waits_for + kSegmentWarps);
  }
  static std::size_t bytes(index_t slice) {
    const SegmentMemory at(nullptr, slice);
    return reinterpret_cast<std::uintptr_t>(at.order + kSegmentTile);
  }
};

// Records of a range, from part `part` on but for the first `done` of its own: up to a tile of
// them, in their order, and their number. part and done are then those of the next.
template <class T>
__device__ __forceinline__ int load_tile(const SegmentMemory<T>& m, const Added<T>* sorted,
                                         const std::int32_t* starts, index_t step, int parts,
                                         std::uint32_t rows, int* part, int* done) {
  const int lane = lane_index(), warp = warp_index(), thread = thread_index();
  const int own = *part + thread;
  int begin = 0, length = 0;
  if (own < parts) {
    begin = starts[own * step];
    length = starts[own * step + 1] - begin;
    if (thread == 0) begin += *done, length -= *done;
    m.sources[thread] = own * int(kSortPart) + begin;
  }
  int up_to = length;  // this lane
  for (int s = 1; s < kWarp; s *= 2) {
    const int other = __shfl_sync(kAllLanes, up_to, lane - s);
    if (lane >= s) up_to += other;
  }
  if (lane == kWarp - 1) m.totals[warp] = up_to;
  __syncthreads();
  for (int w = 0; w < warp; ++w) up_to += m.totals[w];
  m.begins[thread + 1] = up_to;
  if (thread == 0) m.begins[0] = 0;
  int* const next = m.totals + kSegmentWarps;
  if (up_to > kSegmentTile && up_to - length <= kSegmentTile) {  // one thread, if any
    next[0] = thread;
    next[1] = kSegmentTile - (up_to - length) + (thread == 0 ? *done : 0);
  }
  __syncthreads();
  const int runs = int(least(kSegmentThreads, parts - *part)), all = m.begins[runs];
  const int count = all < kSegmentTile ? all : kSegmentTile;
  for (int r = warp; r < runs; r += kSegmentWarps) {
    const int first = m.begins[r], end = m.begins[r + 1] < count ? m.begins[r + 1] : count;
    for (int i = first + lane; i < end; i += kWarp) {
      Added<T> record = sorted[m.sources[r] + i - first];
      // Of sequences that overlap, which they must not, one may have the other's.
      if (record.row >> kRangeBits >= rows) record.row %= kRangeBuckets;
      m.records[i] = record;
    }
  }
  *part += all > kSegmentTile ? next[0] : runs;
  *done = all > kSegmentTile ? next[1] : 0;
  __syncthreads();
  return count;
}

// Blocks of a multiprocessor: as many as registers allow.
template <class T, Element E, int C>
constexpr int segment_blocks = sizeof(T) > 4                     ? 2
                               : E == Element::bfloat16 && C < 3 ? 4
                                                                 : 3;

// A lane has C columns of a row, or C for each of two rows that a warp reads at once, Columns of
// them by one load.
template <class T, Element E, int C, int Columns>
__global__ void __launch_bounds__(kSegmentThreads, segment_blocks<T, E, C>)
    weighted_segment_kernel(WeightedPass<T> a) {
  LSHKIT_SHARED_MEMORY(memory);
  constexpr int kBytes = kElementBytes<E>;
  constexpr int kRows = kRowsAtOnce<Columns>, kLanes = kWarp / kRows;
  constexpr int kLoads = C * kRows / Columns, kOwn = kLoads * Columns, kStride = kLanes * Columns;
  constexpr int kBatch = kOwn * int(sizeof(T)) > 16 ? kSegmentBatch / 2 : kSegmentBatch;
  const int lane = lane_index(), warp = warp_index();
  const int part_of_warp = lane / kLanes, first_own = lane % kLanes * Columns;
  const SegmentMemory<T> m(memory, a.slice);
  BlockParts block;
  const index_t first_column = block.take(a.slices) * a.slice;
  const index_t range = block.take(a.sort_ranges()), first_bucket = range * kRangeBuckets;
  const index_t hash = block.take(a.hashes), local = block.rest;
  const WeightedTask<T> task(a, local);
  const index_t of_group = a.first_hash + hash - a.sort_first_hash;
  const Added<T>* const sorted = sorted_at(a, task, of_group);
  const std::int32_t* const starts = starts_at(a, task, local, of_group) + range;
  const int parts = int(ceil_div(task.add.count * a.add.n_probes, kSortPart));
  const int width = int(least(a.slice, a.columns() - first_column)), slice = int(a.slice);
  const int buckets = int(least(kRangeBuckets, a.n_buckets - first_bucket));
  // A row's vector, by its number in the batch, from this lane's first column on.
  const char* vectors =
      static_cast<const char*>(a.add.x.data) +
      (vector_at(a.add, task.add, -task.add.first) + first_column + first_own) * kBytes;
  std::uint32_t step = std::uint32_t(a.add.x.row * kBytes);
  const T* const extra = a.add.extra ? a.add.extra + task.add.owned - task.add.first : nullptr;
  bool of_vector[kLoads];
  LSHKIT_UNROLL
  for (int k = 0; k < kLoads; ++k)
    of_vector[k] = first_own + k * kStride < least(width, a.n_values - first_column);
  keep_in_register(vectors);
  keep_in_register(step);

  for (int i = thread_index(); i < buckets * slice; i += kSegmentThreads) m.sums[i] = 0;
  int done = 0;
  for (int part = 0; part < parts;) {
    const int count = load_tile(m, sorted, starts, a.sort_ranges() + 1, parts,
                                std::uint32_t(a.add.side.n_rows), &part, &done);
    if (count == 0) continue;
    block_sort(
        m.counters, kSegmentWarps, kRangeBuckets, kRangeBits, count, m.starts,
        [&](int i) { return m.records[i].row % kRangeBuckets; },
        [&](int i, int place) { m.order[place] = std::uint16_t(i); });
    __syncthreads();
    const int each = (count + kSegmentWarps - 1) / kSegmentWarps;
    const int last = (warp + 1) * each < count ? (warp + 1) * each : count;
    int from = warp * each, bucket = 0;
    if (lane == 0) m.waits_for[warp] = -1;
    __syncwarp();
    for (int b = 0; b < kRangeBuckets; b += kWarp)  // the one that `from` is in
      bucket += __popc(__ballot_sync(kAllLanes, m.starts[b + lane + 1] <= from));
    for (; from < last; ++bucket) {
      const int end = m.starts[bucket + 1] < last ? m.starts[bucket + 1] : last;
      if (end <= from) continue;
      T sum[kOwn] = {};
      for (int first = from; first < end; first += kBatch * kRows) {
        T x[kBatch][kOwn], weight[kBatch];
        LSHKIT_UNROLL
        for (int u = 0; u < kBatch; ++u) {
          // Beyond the last: the first again, which is not added.
          const int at = first + u * kRows + part_of_warp;
          const Added<T> added = m.records[m.order[at < end ? at : from]];
          const std::uint32_t row = added.row >> kRangeBits;
          weight[u] = added.weight;
          const char* const vector = vectors + std::uint64_t(row) * step;
          LSHKIT_UNROLL
          for (int k = 0; k < kLoads; ++k)
            load_columns<E, Columns>(vector + k * kStride * kBytes, of_vector[k],
                                     x[u] + k * Columns);
          if (Columns > 1 || !a.extra) continue;
          const T value = extra ? extra[row] : T(1);
          LSHKIT_UNROLL
          for (int k = 0; k < kOwn; ++k) x[u][k] = of_vector[k] ? x[u][k] : value;
        }
        LSHKIT_UNROLL
        for (int u = 0; u < kBatch; ++u)
          if (first + u * kRows + part_of_warp < end) {
            LSHKIT_UNROLL
            for (int k = 0; k < kOwn; ++k) sum[k] += weight[u] * x[u][k];
          }
      }
      const bool waits = from > m.starts[bucket];
      if (waits && lane == 0) m.waits_for[warp] = bucket;
      T* const to = waits ? m.waiting + warp * slice : m.sums + bucket * slice;
      LSHKIT_UNROLL
      for (int j = 0; j < kOwn;
           j += kRows) {  // each half of the warp: every other column of a lane
        T total = sum[j];
        if constexpr (kRows == 2) {
          const T keep = part_of_warp ? sum[j + 1] : sum[j];
          const T send = part_of_warp ? sum[j] : sum[j + 1];
          total = keep + __shfl_xor_sync(kAllLanes, send, kLanes);
        }
        const int column = first_own + j / Columns * kStride + j % Columns + part_of_warp;
        if (column < width) to[column] = waits ? total : to[column] + total;
      }
      from = end;
    }
    __syncthreads();
    for (int c = thread_index(); c < width; c += kSegmentThreads)
      for (int w = 1; w < kSegmentWarps; ++w)
        if (m.waits_for[w] >= 0) m.sums[m.waits_for[w] * slice + c] += m.waiting[w * slice + c];
    __syncthreads();
  }
  __syncthreads();
  const index_t at = ((local * a.hashes + hash) * a.table_rows + first_bucket) * a.columns();
  for (int b = warp; b < buckets; b += kSegmentWarps)
    for (int c = lane; c < width; c += kWarp) {
      const index_t to = at + b * a.columns() + first_column + c;
      const T sum = m.sums[b * slice + c];
      if (a.short_tables)
        store_element(a.tables, to, Element::bfloat16, sum);
      else
        a.tables[to] = sum;
    }
}

}  // namespace lshkit::cuda

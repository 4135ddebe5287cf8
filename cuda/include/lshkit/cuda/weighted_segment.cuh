#pragma once
// The tables of a weighted sum in no order, from sorted probes: see weighted_bucket_sum.cuh.
//
// A block takes a range of buckets: a tile of its probes at a time, part by part, is sorted by
// buckets in shared memory, and each group of lanes sums an equal share of it in registers and adds
// a bucket's sum to where the block keeps them. Where a bucket's probes begin in the share of
// another group, its sum waits until all are there: they are added in the order of the groups.
#include "lshkit/cuda/weighted_sort.cuh"

namespace lshkit::cuda {

constexpr int kSegmentWarps = kSegmentThreads / kWarp;
constexpr int kSegmentGroups = 2 * kSegmentWarps;  // of lanes that read a row each, at most

// What a block works on: in shared memory, from where it is read again for each tile, as registers
// are few.
template <class T>
struct alignas(16) SegmentTask {
  const Added<T>* sorted;
  const std::int32_t* starts;  // of its range, by parts
  // In order: where the gradients of the weights of the batch's row 0 begin.
  index_t grads;
  // In no order: where the vector of that row and the range's table begin, in elements; the last
  // column by rows of the batch, or null.
  index_t vectors = 0, table = 0;
  const T* extra = nullptr;
};

// What a block keeps of its range. What depends on the slice is last, so that all else lies where
// the compiler knows.
template <class T>
struct SegmentMemory {
  SegmentTask<T>* task;
  Added<T>* records;  // (kSegmentTile), and in order a batch of none
  int* counters;      // (warps, kRangeBuckets)
  int* places;        // (warps, kRangeBuckets): where the next of a warp's goes
  int* starts;        // (kRangeBuckets + 1)
  int* begins;        // (threads + 1): of the runs of so many parts, in the tile
  int* sources;       // (threads): where those are, after the task's first probe
  int* totals;        // (warps), then of the next tile: a part and how much of it has been
  int* waits_for;     // (groups): the bucket of what waits, or -1
  T* waiting;         // (groups, slice)
  T* sums;            // (kRangeBuckets, slice)

  __host__ __device__ SegmentMemory(void* memory, index_t slice) {
    constexpr int kCounters = kSegmentWarps * kRangeBuckets;
    task = static_cast<SegmentTask<T>*>(memory);
    records = reinterpret_cast<Added<T>*>(task + 1);
    counters = reinterpret_cast<int*>(records + kSegmentTile + kOrderedBatch);
    places = counters + kCounters;
    starts = places + kCounters;
    begins = starts + kRangeBuckets + 1;
    sources = begins + kSegmentThreads + 1;
    totals = sources + kSegmentThreads;
    waits_for = totals + kSegmentWarps + 2;
    constexpr int kInts = 2 * kCounters + kRangeBuckets + 2 * kSegmentThreads + kSegmentWarps + 4;
    constexpr int kAligned = (kInts + kSegmentGroups + 3) / 4 * 4;
    waiting = reinterpret_cast<T*>(counters + kAligned);
    sums = waiting + kSegmentGroups * slice;
  }
  static std::size_t bytes(index_t slice) {
    const SegmentMemory at(nullptr, slice);
    return reinterpret_cast<std::uintptr_t>(at.sums + kRangeBuckets * slice);
  }
};

// Records of a range, from part `part` on but for the first `done` of its own: up to a tile of
// them, in their order, and their number. part and done are then those of the next.
template <class T>
__device__ __forceinline__ int load_tile(const SegmentMemory<T>& m, const Added<T>* sorted,
                                         const std::int32_t* starts, int parts,
                                         const WeightedPass<T>& a, int* part, int* done) {
  const int lane = lane_index(), warp = warp_index(), thread = thread_index();
  const int step = int(a.sort_ranges()) + 1;
  const int own = *part + thread;
  int begin = 0, length = 0;
  if (own < parts) {
    constexpr int kMost = int(kSortPart<T>);  // no number is trusted, as sequences may overlap
    begin = int(most(least(starts[own * step], kMost), 0));
    length = int(most(least(starts[own * step + 1], kMost) - begin, 0));
    const int skipped = thread == 0 ? int(least(*done, length)) : 0;
    begin += skipped;
    length -= skipped;
    m.sources[thread] = own * int(kSortPart<T>) + begin;
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
      const std::uint32_t rows =
          std::uint32_t(record.reads() ? a.read.side.n_rows : a.add.side.n_rows);
      if (record.row() >= rows) record = Added<T>::of(T(0), 0, record.reads(), record.bucket());
      if (a.order != Order::all && record.reads()) {
        const std::uint32_t probes = std::uint32_t(a.read.n_probes);
        const bool inside = record.weight > 0 && record.weight < T(probes);
        record.set_number(record.row() * probes + (inside ? std::uint32_t(record.weight) : 0));
      }
      m.records[i] = record;
    }
  }
  *part += all > kSegmentTile ? next[0] : runs;
  *done = all > kSegmentTile ? next[1] : 0;
  __syncthreads();
  return count;
}

// The tile's records in the order of their buckets, in their place; m.starts.
template <class T>
__device__ __forceinline__ void sort_tile(const SegmentMemory<T>& m, int count) {
  constexpr int kEach = (kSegmentTile / kSegmentWarps + kWarp - 1) / kWarp;
  const int lane = lane_index(), warp = warp_index();
  const int steps = (count + kSegmentThreads - 1) / kSegmentThreads, begin = warp * steps * kWarp;
  int* const mine = m.counters + warp * kRangeBuckets;
  for (int b = lane; b < kRangeBuckets; b += kWarp) mine[b] = 0;
  __syncwarp();
  Added<T> own[kEach];
  LSHKIT_UNROLL
  for (int u = 0; u < kEach; ++u) {
    const int at = begin + u * kWarp + lane;
    if (u >= steps || at >= count) continue;
    own[u] = m.records[at];
    atomicAdd(mine + own[u].bucket(), 1);
  }
  __syncthreads();
  // Every warp adds up all counts: a barrier costs more.
  int before = 0;  // of lower buckets
  LSHKIT_UNROLL
  for (int b = lane; b < kRangeBuckets; b += kWarp) {
    int all = 0, lower = 0;  // of all warps and of those before this one
    LSHKIT_UNROLL
    for (int w = 0; w < kSegmentWarps; ++w) {
      const int here = m.counters[w * kRangeBuckets + b];
      lower += w < warp ? here : 0;
      all += here;
    }
    int up_to = all;  // this lane
    LSHKIT_UNROLL
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_sync(kAllLanes, up_to, lane - step);
      if (lane >= step) up_to += other;
    }
    const int start = before + up_to - all;
    m.places[warp * kRangeBuckets + b] = start + lower;
    if (warp == 0) m.starts[b] = start;
    before += __shfl_sync(kAllLanes, up_to, kWarp - 1);
  }
  if (thread_index() == 0) m.starts[kRangeBuckets] = before;
  __syncwarp();
  LSHKIT_UNROLL
  for (int u = 0; u < kEach; ++u) {
    const int first = begin + u * kWarp;
    if (u >= steps || first >= count) continue;  // the same for the whole warp
    const bool some = first + lane < count;
    const int place =
        next_place(m.places + warp * kRangeBuckets, own[u].bucket(), kRangeBits, some);
    if (some) m.records[place] = own[u];
  }
  __syncthreads();
}

// So many records, from an address that their size divides, or 16 bytes.
template <class T, int Count>
__device__ __forceinline__ void load_records(const Added<T>* from, Added<T> (&to)[Count]) {
  constexpr int kEach = Count > 1 && sizeof(T) == 4 ? 2 : 1;
  LSHKIT_UNROLL
  for (int u = 0; u < Count; u += kEach) {
    Words<Added<T>, kEach> records;
    load_words(from + u, records);
    LSHKIT_UNROLL
    for (int k = 0; k < kEach; ++k) to[u + k] = records.word[k];
  }
}

// Blocks of a multiprocessor: as many as registers and shared memory allow.
template <class T, Element E, int C, int Columns>
constexpr int segment_blocks =
    E == Element::bfloat16 && C < 3 ? (Columns > 1 ? (kBeforeHopper ? 3 : 4) : 3)
    : sizeof(T) * C > 16            ? 1
                                    : 2;

// A group of lanes, half a warp where columns are read together, has an equal share of the sorted
// records and C columns a lane, or 2 C, Columns of them by one load.
template <class T, Element E, int C, int Columns>
__global__ void __launch_bounds__(kSegmentThreads, (segment_blocks<T, E, C, Columns>))
    weighted_segment_kernel(WeightedPass<T> a) {
  LSHKIT_SHARED_MEMORY(memory);
  constexpr int kBytes = kElementBytes<E>;
  constexpr int kRows = kRowsAtOnce<Columns>, kLanes = kWarp / kRows;
  constexpr int kLoads = C * kRows / Columns, kOwn = kLoads * Columns, kStride = kLanes * Columns;
  constexpr int kBatch = kOwn * kBytes > 8 ? kSegmentBatch / 2 : kSegmentBatch;
  constexpr int kGroups = kSegmentThreads / kLanes;
  const int group = thread_index() / kLanes, first_own = lane_index() % kLanes * Columns;
  const SegmentMemory<T> m(memory, a.slice);
  BlockParts block;
  const index_t first_column = block.take(a.slices) * a.slice;
  const index_t range = block.take(a.sort_ranges()), first_bucket = range * kRangeBuckets;
  const index_t hash = block.take(a.hashes), local = block.rest;
  const WeightedTask<T> task(a, local);
  const index_t of_group = a.first_hash + hash - a.sort_first_hash;
  // The table's is of a few heads' buckets, which have room in the cache.
  if (thread_index() == 0)
    *m.task = {
        sorted_at(a, task, of_group),
        starts_at(a, task, local, of_group) + range,
        0,
        vector_at(a.add, task.add, -task.add.first) + first_column,
        ((local * a.hashes + hash) * a.table_rows + first_bucket) * a.columns() + first_column,
        a.add.extra ? a.add.extra + task.add.owned - task.add.first : nullptr};
  const int parts = int(ceil_div(task.add.count * a.add.n_probes, kSortPart<T>));
  const int width = int(least(a.slice, a.columns() - first_column)), slice = int(a.slice);
  const int buckets = int(least(kRangeBuckets, a.n_buckets - first_bucket));
  const int of_values = int(least(width, a.n_values - first_column));
  const auto of_vector = [&](int k) { return first_own + k * kStride < of_values; };
  // A lane's columns of a row in shared memory.
  const auto each_load = [&](const auto& body) {
    LSHKIT_UNROLL
    for (int k = 0; k < kLoads; ++k)
      if (first_own + k * kStride < width) body(k, first_own + k * kStride);
  };
  const auto add_to = [&](T* row, const T* sum) {
    each_load([&](int k, int column) {
      T x[Columns];
      load_columns<kElement<T>, Columns>(row + column, true, x);
      LSHKIT_UNROLL
      for (int j = 0; j < Columns; ++j) x[j] += sum[k * Columns + j];
      store_columns<kElement<T>, Columns>(row + column, x);
    });
  };
  const T zeros[Columns] = {};
  for (int b = group; b < kSegmentGroups + kRangeBuckets; b += kGroups)  // what waits, then sums
    each_load([&](int, int column) {
      store_columns<kElement<T>, Columns>(m.waiting + b * slice + column, zeros);
    });
  __syncthreads();
  int part = 0, done = 0;
  while (part < parts) {
    const int count = load_tile(m, m.task->sorted, m.task->starts, parts, a, &part, &done);
    if (count == 0) continue;
    sort_tile(m, count);
    // A row's vector, by its number in the batch, from this lane's first column on. Lanes that have
    // none read the first, so that no load is conditional.
    const char* vectors =
        static_cast<const char*>(a.add.x.data) +
        (m.task->vectors + (Columns == 1 || of_vector(0) ? first_own : 0)) * kBytes;
    const T* const extra = m.task->extra;
    std::uint32_t step = std::uint32_t(a.add.x.row * kBytes);
    keep_in_register(vectors);
    keep_in_register(step);
    // Shares of whole batches, but for the last.
    const int each = (count + kGroups * kBatch - 1) / (kGroups * kBatch) * kBatch;
    const int begin = group * each, end = begin + each < count ? begin + each : count;
    int bucket = begin < end ? m.records[begin].bucket() : -1;
    const bool waits = bucket >= 0 && m.starts[bucket] < begin;
    if (lane_index() % kLanes == 0) m.waits_for[group] = waits ? bucket : -1;
    T* to = waits ? m.waiting + group * slice : m.sums + bucket * slice;
    T sum[kOwn] = {};
    const auto add = [&](auto batch, int first) {
      constexpr int kRows = decltype(batch)::value;
      Added<T> added[kRows];
      load_records(m.records + first, added);
      T x[kRows][kOwn];
      LSHKIT_UNROLL
      for (int u = 0; u < kRows; ++u) {
        const std::uint32_t row = added[u].row();
        const char* const vector = vectors + std::uint64_t(row) * step;
        LSHKIT_UNROLL
        for (int k = 0; k < kLoads; ++k)
          load_columns<E, Columns>(
              vector + (Columns == 1 || of_vector(k) ? k * kStride * kBytes : 0),
              Columns > 1 || of_vector(k), x[u] + k * Columns);
        if (Columns > 1 || !a.extra) continue;
        const T value = extra ? extra[row] : T(1);
        LSHKIT_UNROLL
        for (int k = 0; k < kOwn; ++k) x[u][k] = of_vector(k) ? x[u][k] : value;
      }
      if (added[kRows - 1].bucket() == bucket) {  // all: buckets are in order
        LSHKIT_UNROLL
        for (int u = 0; u < kRows; ++u) LSHKIT_UNROLL
        for (int k = 0; k < kOwn; ++k) sum[k] += added[u].weight * x[u][k];
        return;
      }
      LSHKIT_UNROLL
      for (int u = 0; u < kRows; ++u) {
        const int own = added[u].bucket();
        if (own != bucket) {
          add_to(to, sum);
          bucket = own;
          to = m.sums + bucket * slice;
          LSHKIT_UNROLL
          for (int k = 0; k < kOwn; ++k) sum[k] = 0;
        }
        LSHKIT_UNROLL
        for (int k = 0; k < kOwn; ++k) sum[k] += added[u].weight * x[u][k];
      }
    };
    int first = begin;
    for (; first + kBatch <= end; first += kBatch)
      add(std::integral_constant<int, kBatch>{}, first);
    for (; first < end; ++first) add(std::integral_constant<int, 1>{}, first);
    if (bucket >= 0) add_to(to, sum);
    __syncthreads();
    // The first group whose sum waits for a bucket adds those of all.
    const int waited = m.waits_for[group];
    if (waited >= 0 && waited != m.waits_for[group - 1])
      for (int g = group; g < kGroups && m.waits_for[g] == waited; ++g)
        each_load([&](int, int column) {
          T* const from = m.waiting + g * slice + column;
          T* const own = m.sums + waited * slice + column;
          T x[Columns], y[Columns];
          load_columns<kElement<T>, Columns>(from, true, x);
          load_columns<kElement<T>, Columns>(own, true, y);
          LSHKIT_UNROLL
          for (int j = 0; j < Columns; ++j) y[j] += x[j];
          store_columns<kElement<T>, Columns>(own, y);
          store_columns<kElement<T>, Columns>(from, zeros);
        });
    __syncthreads();
  }
  const index_t table = m.task->table;
  for (int b = group; b < buckets; b += kGroups)
    each_load([&](int, int column) {
      T x[Columns];
      load_columns<kElement<T>, Columns>(m.sums + b * slice + column, true, x);
      const index_t to = table + b * a.columns() + column;
      if (sizeof(T) == 4 && a.short_tables)
        store_columns<Element::bfloat16, Columns>(reinterpret_cast<std::uint16_t*>(a.tables) + to,
                                                  x);
      else
        store_columns<kElement<T>, Columns>(a.tables + to, x);
    });
}

}  // namespace lshkit::cuda

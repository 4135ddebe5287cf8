#pragma once
// Weighted sums in order, from sorted probes: see weighted_bucket_sum.cuh.
//
// As in weighted_segment a block takes a range of 64 buckets, a tile of its probes at a time,
// sorted by buckets in shared memory, of which each group of lanes has an equal share. In the order
// of positions it adds the rows of probes that add to the bucket's sum, in registers; a probe that
// reads gets a copy of the sum as it is then, or its product with the row's own vector, the
// gradient of its weight, or both. Where a bucket goes on in the share of the next group, what this
// one adds to it is summed first: a bucket of many probes is no longer chain than others.
#include "lshkit/cuda/weighted_gather.cuh"
#include "lshkit/cuda/weighted_segment.cuh"

namespace lshkit::cuda {

// Products are whole where a lane has columns of every slice.
template <class T>
__host__ __device__ inline bool has_products(const WeightedPass<T>& a) {
  return a.read.weight_grads && a.slices == 1;
}
template <class T>
__host__ __device__ inline bool has_copies(const WeightedPass<T>& a) {
  return a.read.sum || (a.read.weight_grads && a.slices > 1);
}

// The vectors of a side by the number of a row in the batch, from a lane's first column on.
template <class T, Element E, int Columns>
struct Vectors {
  const WeightedSide<T>& s;
  const index_t first;
  const char* const from;
  const std::uint32_t step;
  const T* const extra;

  __device__ Vectors(const WeightedSide<T>& s, const Span& span, index_t column)
      : s(s),
        first(vector_at(s, span, -span.first) + column),
        from(static_cast<const char*>(s.x.data) + first * kElementBytes<E>),
        step(std::uint32_t(s.x.row * (Columns > 1 ? kElementBytes<E> : 1))),
        extra(s.extra ? s.extra + span.owned - span.first : nullptr) {}
  __device__ void load(std::uint32_t row, int column, bool loads, T* x) const {
    if constexpr (Columns > 1)
      load_columns<E, Columns>(from + std::uint64_t(row) * step + column * kElementBytes<E>, loads,
                               x);
    else
      *x = loads ? load_element<T>(s.x.data, first + index_t(std::uint64_t(row) * step) + column,
                                   s.x.element)
                 : T(0);
  }
  __device__ T last_column(std::uint32_t row) const { return extra ? extra[row] : T(1); }
};

// The rows of some records: a lane's columns of a slice, of which the last may be no column of the
// vectors. Zeros of what reads, unless Products are taken with its own vector. E, R: as below.
template <class T, Element E, Element R, int Loads, int Columns, int Stride>
struct RecordRows {
  Vectors<T, E, Columns> added;
  Vectors<T, R, Columns> own;
  int first_own, of_values, width;
  bool extra;

  template <bool Products, int Batch>
  __device__ __forceinline__ void load(const Added<T> (&record)[Batch],
                                       T (&x)[Batch][Loads * Columns]) const {
    LSHKIT_UNROLL
    for (int u = 0; u < Batch; ++u) {
      const std::uint32_t row = record[u].row();
      const bool reads = record[u].reads();
      LSHKIT_UNROLL
      for (int k = 0; k < Loads; ++k) {
        const bool has = first_own + k * Stride < of_values;
        T* const to = x[u] + k * Columns;
        added.load(row, k * Stride, has && !reads, to);
        if (!Products) continue;
        T of_own[Columns];
        own.load(row, k * Stride, has && reads, of_own);
        LSHKIT_UNROLL
        for (int c = 0; c < Columns; ++c) to[c] = reads ? of_own[c] : to[c];
      }
      if (Columns > 1 || !extra) continue;
      const T last = !reads ? added.last_column(row) : Products ? own.last_column(row) : T(0);
      LSHKIT_UNROLL
      for (int k = 0; k < Loads; ++k)
        if (first_own + k * Stride >= of_values)
          x[u][k] = first_own + k * Stride < width ? last : T(0);
    }
  }
};

// Blocks of a multiprocessor: as many as registers allow.
template <Element E, int C, int Columns, bool Products>
constexpr int ordered_blocks =
    C > 2 || Columns == 1                           ? 1
    : E == Element::bfloat16 && C == 2 && !Products ? (kBeforeHopper ? 2 : 3)
                                                    : 2;

// E: the elements of rows that are added, R: of those that a product is taken with. One column at a
// time, they are whatever they are.
template <class T, Element E, Element R, int C, int Columns, bool Products>
__global__ void __launch_bounds__(kSegmentThreads, (ordered_blocks<E, C, Columns, Products>))
    weighted_ordered_kernel(WeightedPass<T> a) {
  LSHKIT_SHARED_MEMORY(memory);
  constexpr int kRows = kRowsAtOnce<Columns>, kLanes = kWarp / kRows;
  constexpr int kLoads = C * kRows / Columns, kOwn = kLoads * Columns, kStride = kLanes * Columns;
  constexpr bool kShort = E != kElement<T> || R != kElement<T>;
  constexpr int kMost = Products && kShort ? kOrderedBatch : kOrderedBatch / 2;
  constexpr int kBatch = kOwn * int(sizeof(T)) > 16 ? kMost / 2 : kMost;
  constexpr int kGroups = kSegmentThreads / kLanes;
  const int lane = lane_index(), of_row = lane % kLanes, first_own = of_row * Columns;
  const int group = thread_index() / kLanes;
  const SegmentMemory<T> m(memory, a.slice);
  BlockParts block;
  const index_t first_column = block.take(a.slices) * a.slice;
  const index_t range = block.take(a.sort_ranges());
  const index_t hash = block.take(a.hashes), local = block.rest;
  const WeightedTask<T> task(a, local);
  const index_t of_group = a.first_hash + hash - a.sort_first_hash;
  if (thread_index() == 0)
    *m.task = {sorted_at(a, task, of_group), starts_at(a, task, local, of_group) + range,
               probes_at(a.read, task.read, task.head, -task.read.first, a.first_hash + hash)};
  const int parts = int(ceil_div(task.sort_count(a) * a.entries(), kSortPart<T>));
  const int width = int(least(a.slice, a.columns() - first_column)), slice = int(a.slice);
  const int of_values = int(least(width, a.n_values - first_column));
  const bool copies = !Products || has_copies(a);
  const RecordRows<T, E, R, kLoads, Columns, kStride> rows{
      {a.add, task.add, first_column + first_own},
      {a.read, task.read, first_column + first_own},
      first_own,
      of_values,
      width,
      a.extra};
  const std::uint32_t probes = std::uint32_t(a.read.n_probes);
  // Where this lane's first column of the first copy lies. With rows of bfloat16 tables are too.
  const bool short_tables =
      E == Element::bfloat16 || R == Element::bfloat16 || (sizeof(T) == 4 && a.short_tables);
  const int table_bytes = short_tables ? 2 : int(sizeof(T));
  std::uint32_t copy_bytes = std::uint32_t(a.columns() * table_bytes);
  char* tables = reinterpret_cast<char*>(a.tables) +
                 ((a.table_of(local) * a.hashes + hash) * a.table_rows * a.columns() +
                  first_column + first_own) *
                     table_bytes;
  if (!Products) {  // which have no registers left
    keep_in_register(copy_bytes);
    keep_in_register(tables);
  }

  const auto each_load = [&](const auto& body) {  // (number of a lane, column of the slice)
    LSHKIT_UNROLL
    for (int k = 0; k < kLoads; ++k)
      if (first_own + k * kStride < width) body(k * Columns, first_own + k * kStride);
  };
  const auto load_row = [&](const T* row, T* x) {
    LSHKIT_UNROLL
    for (int k = 0; k < kOwn; ++k) x[k] = 0;
    each_load(
        [&](int k, int column) { load_columns<kElement<T>, Columns>(row + column, true, x + k); });
  };
  const auto store_row = [&](T* row, const T* x) {
    each_load([&](int k, int column) { store_columns<kElement<T>, Columns>(row + column, x + k); });
  };
  const T zeros[kOwn] = {};
  for (int b = group; b < kRangeBuckets; b += kGroups) store_row(m.sums + b * slice, zeros);
  // What neither adds nor reads: a batch of them, and behind a tile what makes its batches whole.
  const Added<T> none = Added<T>::of(T(0), 0, true, 0);
  if (thread_index() < kOrderedBatch) m.records[kSegmentTile + thread_index()] = none;
  __syncthreads();
  int part = 0, done = 0;
  while (part < parts) {
    const int count = load_tile(m, m.task->sorted, m.task->starts, parts, a, &part, &done);
    if (count == 0) continue;
    if (thread_index() < (-count & (kOrderedBatch - 1))) m.records[count + thread_index()] = none;
    sort_tile(m, count);
    // Shares of whole batches.
    const int each = (count + kGroups * kBatch - 1) / (kGroups * kBatch) * kBatch;
    const int begin = int(least(group * each, count)), end = int(least(begin + each, count));
    const bool some = begin < end;
    int bucket = some ? m.records[begin].bucket() : 0;
    const int last = some ? m.records[end - 1].bucket() : 0;
    // What a share adds to a bucket that goes on in the next one, for those that follow.
    const bool goes_on = some && m.starts[last + 1] > end;
    Added<T> record[kBatch];
    T x[kBatch][kOwn], sum[kOwn] = {}, of_last[kOwn];
    if (goes_on) {
      const int start = m.starts[last] & -kBatch;
      for (int first = start > begin ? start : begin; first < end; first += kBatch) {
        load_records(m.records + first, record);
        rows.template load<false>(record, x);
        LSHKIT_UNROLL
        for (int u = 0; u < kBatch; ++u)
          if (record[u].bucket() == last && !record[u].reads()) {
            LSHKIT_UNROLL
            for (int k = 0; k < kOwn; ++k) sum[k] += record[u].weight * x[u][k];
          }
      }
      store_row(m.waiting + group * slice, sum);
    }
    __syncthreads();
    // All that buckets had before, read before any of it is replaced.
    load_row(m.sums + bucket * slice, sum);
    load_row(m.sums + last * slice, of_last);
    if (some)
      for (int g = m.starts[bucket] / each; g < group; ++g) {
        T before[kOwn];
        load_row(m.waiting + g * slice, before);
        LSHKIT_UNROLL
        for (int k = 0; k < kOwn; ++k) sum[k] += before[k];
      }
    __syncthreads();
    store_row(m.waiting + group * slice, of_last);  // now its own
    for (int first = begin; first < begin + each; first += kBatch) {
      T product[kBatch];
      load_records(m.records + (first < end ? first : kSegmentTile), record);
      rows.template load<Products>(record, x);
      const auto step = [&](int u) {
        const bool reads = record[u].reads();
        if (Products) {
          product[u] = x[u][0] * sum[0];
          LSHKIT_UNROLL
          for (int k = 1; k < kOwn; ++k) product[u] += x[u][k] * sum[k];
        }
        if (copies && reads && first + u < end) {
          char* const to = tables + std::uint64_t(record[u].number()) * copy_bytes;
          each_load([&](int k, int column) {
            const int at = column - first_own;
            if (short_tables)
              store_columns<Element::bfloat16, Columns>(to + at * 2, sum + k);
            else
              store_columns<kElement<T>, Columns>(to + at * int(sizeof(T)), sum + k);
          });
        }
        if (reads) return;
        LSHKIT_UNROLL
        for (int k = 0; k < kOwn; ++k) sum[k] += record[u].weight * x[u][k];
      };
      // As a rule all are of the bucket that the last one was of, in both halves of the warp.
      const bool same =
          first >= end || (first + kBatch <= end && record[kBatch - 1].bucket() == bucket);
      if (__ballot_sync(kAllLanes, same) == kAllLanes) {
        LSHKIT_UNROLL
        for (int u = 0; u < kBatch; ++u) step(u);
      } else {
        LSHKIT_UNROLL
        for (int u = 0; u < kBatch; ++u) {
          if (first + u < end && record[u].bucket() != bucket) {
            store_row(m.sums + bucket * slice, sum);
            bucket = record[u].bucket();
            load_row(bucket == last ? m.waiting + group * slice : m.sums + bucket * slice, sum);
          }
          step(u);
        }
      }
      if (!Products) continue;
      T whole = transposed_sum<kBatch / 2>(product, lane);
      for (int other = kBatch; other < kLanes; other *= 2)
        whole += __shfl_xor_sync(kAllLanes, whole, other);
      if (of_row < kBatch && first + of_row < end) {
        const Added<T> mine = m.records[first + of_row];
        const std::uint32_t probe = mine.number() - mine.row() * probes;
        if (mine.reads())
          a.read.weight_grads[m.task->grads + mine.row() * a.read.row_stride + probe] =
              whole * a.scale;
      }
    }
    if (some && !goes_on) store_row(m.sums + bucket * slice, sum);
    __syncthreads();
  }
}

}  // namespace lshkit::cuda

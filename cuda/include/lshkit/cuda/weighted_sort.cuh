#pragma once
// The probes of a weighted sum, sorted by ranges of 64 buckets: see weighted_bucket_sum.cuh. A
// block takes a part of those of one hash of one head, sorts it in shared memory, and writes row,
// bucket and weight of each.
#include "lshkit/cuda/bucket_sort.cuh"
#include "lshkit/cuda/weighted_bucket_sum.cuh"
#include "lshkit/cuda/words.cuh"

namespace lshkit::cuda {

constexpr int kSortWarps = kSortThreads / kWarp;

// Where the probes of a task and hash begin, of a pass's group.
template <class T>
__device__ inline Added<T>* sorted_at(const WeightedPass<T>& a, const WeightedTask<T>& task,
                                      index_t hash) {
  const index_t head = task.head - a.first_head - a.sort_first_head;
  const index_t row = (head * a.sort_hashes + hash) * a.sort_rows() + task.sort_first(a);
  return a.sorted + row * a.entries();
}
// And where the ranges of its parts do. The parts of a sequence are as many as its probes need, and
// begin where no other's are: of the k-th, k after the whole parts before its first row.
template <class T>
__device__ inline std::int32_t* starts_at(const WeightedPass<T>& a, const WeightedTask<T>& task,
                                          index_t local, index_t hash) {
  const index_t head = task.head - a.first_head - a.sort_first_head;
  const index_t before = task.sort_first(a) * a.entries() / kSortPart<T>;
  const std::uint32_t sequence =
      a.sequences == 1 ? 0 : std::uint32_t(a.first_task + local) % std::uint32_t(a.sequences);
  return a.starts + ((head * a.sort_hashes + hash) * a.sort_parts() + before + sequence) *
                        (a.sort_ranges() + 1);
}

template <class T>
index_t weighted_sort_bytes(const WeightedPass<T>& a) {
  return sort_bytes(kSortWarps, a.sort_ranges()) + kSortPart<T> * index_t(sizeof(Added<T>));
}

// What is sorted of one side: the probes of a task by one hash.
struct SortedSide {
  const void* codes;
  int code_bytes;
  index_t base, row_stride;
  std::uint32_t count;
  const std::uint8_t* valid;

  template <class T>
  __device__ SortedSide(const WeightedPass<T>& a, const WeightedSide<T>& s, const Span& span,
                        index_t head, index_t hash)
      : codes(s.codes),
        code_bytes(s.code_bytes),
        base(probes_at(s, span, head, 0, a.sort_first_hash + hash)),
        row_stride(s.row_stride),
        count(std::uint32_t(span.count)),
        valid(s.valid ? s.valid + span.batch * s.valid_batch + span.head * s.valid_head + span.first
                      : nullptr) {}
  // One of two, without an address: they stay in registers.
  __device__ SortedSide(bool first, const SortedSide& x, const SortedSide& y)
      : codes(first ? x.codes : y.codes),
        code_bytes(first ? x.code_bytes : y.code_bytes),
        base(first ? x.base : y.base),
        row_stride(first ? x.row_stride : y.row_stride),
        count(first ? x.count : y.count),
        valid(first ? x.valid : y.valid) {}
  __device__ index_t at(std::uint32_t row, std::uint32_t probe) const {
    return base + row * row_stride + probe;
  }
  // No load waits for another, or one at a time would be in flight.
  __device__ std::uint32_t code(std::uint32_t row, std::uint32_t probe) const {
    return row < count ? load_code(codes, code_bytes, at(row, probe)) : kNoRow;
  }
  __device__ bool takes(std::uint32_t row) const { return row < count && valid[row]; }
};

// Tasks [first_task, ...) and hashes from sort_first_hash on: all that the pass's group has. A
// task's parts, in turn, have `blocks` blocks. In order, places in a part are those of positions:
// of each the probes that add, then those that read.
template <class T, bool Ordered>
__global__ void __launch_bounds__(kSortThreads, (sizeof(T) == 4 ? 3 : 2) - Ordered)
    weighted_sort_kernel(WeightedPass<T> a, index_t blocks) {
  LSHKIT_SHARED_MEMORY(memory);
  constexpr int kEach = int(kSortPart<T>) / kSortThreads;
  const int lane = lane_index(), warp = warp_index(), ranges = int(a.sort_ranges());
  Added<T>* const records = reinterpret_cast<Added<T>*>(memory);
  int* const counters = reinterpret_cast<int*>(records + kSortPart<T>);
  int* const mine = counters + warp * ranges;
  BlockParts block;
  const index_t first_part = block.take(blocks), hash = block.take(a.sort_hashes);
  const index_t local = block.rest;
  const WeightedTask<T> task(a, local);
  const std::uint32_t probes = std::uint32_t(a.entries()), adding = std::uint32_t(a.add.n_probes);
  const std::uint32_t positions = std::uint32_t(task.sort_count(a));
  const std::uint32_t count = positions * probes;  // fewer than 2^31
  const std::uint32_t n_buckets = std::uint32_t(a.n_buckets);
  const SortedSide adds(a, a.add, task.add, task.head, hash);
  const SortedSide reads(a, Ordered ? a.read : a.add, Ordered ? task.read : task.add, task.head,
                         hash);
  for (index_t part = first_part; part * kSortPart<T> < count; part += blocks) {
    // In no order a lane's probes are next to each other, 16 bytes of them by a load.
    const std::uint32_t first = std::uint32_t(part * kSortPart<T>) +
                                (Ordered ? warp * kEach * kWarp + lane : thread_index() * kEach);
    const std::uint32_t first_row = divided(first, probes, a.entry_shift);
    const auto each = [&](const auto& body) {  // (number, row, probe, does it read)
      std::uint32_t row = first_row, probe = first - first_row * probes;
      LSHKIT_UNROLL
      for (int u = 0; u < kEach; ++u) {
        if constexpr (Ordered) {
          const std::uint32_t i = first + u * kWarp, position = divided(i, probes, a.entry_shift);
          row = a.order == Order::reversed ? positions - 1 - position : position;
          probe = i - position * probes;
          const bool read = probe >= adding;
          body(u, row, read ? probe - adding : probe, read);
        } else {
          body(u, row, probe, false);
          const bool next = ++probe == probes;
          row += next;
          probe = next ? 0 : probe;
        }
      }
    };
    const auto side = [&](bool read) { return SortedSide(Ordered && read, reads, adds); };
    std::uint32_t code[kEach];
    T weight[kEach];
    const std::uint16_t* const codes =
        static_cast<const std::uint16_t*>(a.add.codes) + adds.base + first;
    const T* const weights = a.add.weights + adds.base + first;
    if (!Ordered && kEach % 8 == 0 && a.side_by_side && (part + 1) * kSortPart<T> <= count &&
        a.add.weights && is_aligned(codes, 16) && is_aligned(weights, 16)) {
      LSHKIT_UNROLL
      for (int u = 0; u < kEach; u += kEach % 8 ? 1 : 8) {
        const Quad eight = load_quad(codes + u);
        load_columns<kElement<T>, 8>(weights + u, true, weight + u);
        LSHKIT_UNROLL
        for (int k = 0; k < 8; ++k) code[u + k] = eight.word[k / 2] >> k % 2 * 16 & 0xffff;
      }
    } else {
      each([&](int u, std::uint32_t row, std::uint32_t probe, bool read) {
        code[u] = side(read).code(row, probe);
        weight[u] = read                                ? T(probe)
                    : row < adds.count && a.add.weights ? a.add.weights[adds.at(row, probe)]
                                                        : T(1);
      });
    }
    if (a.add.valid || (Ordered && a.read.valid)) {
      bool taken[kEach];
      each([&](int u, std::uint32_t row, std::uint32_t, bool read) {
        const SortedSide own = side(read);
        taken[u] = !own.valid || own.takes(row);
      });
      LSHKIT_UNROLL
      for (int u = 0; u < kEach; ++u) code[u] = taken[u] ? code[u] : kNoRow;
    }
    each([&](int u, std::uint32_t row, std::uint32_t probe, bool read) {
      code[u] = row < (read ? reads.count : adds.count) && code[u] < n_buckets ? code[u] : kNoRow;
      // What reads no bucket has no gradient; of all others it is written where they read.
      if (read && code[u] == kNoRow && row < reads.count && a.read.weight_grads)
        a.read.weight_grads[reads.at(row, probe)] = 0;
    });
    for (int b = thread_index(); b < kSortWarps * ranges; b += kSortThreads) counters[b] = 0;
    __syncthreads();
    LSHKIT_UNROLL
    for (int u = 0; u < kEach; ++u)
      if (code[u] != kNoRow) atomicAdd(mine + code[u] / kRangeBuckets, 1);
    __syncthreads();
    std::int32_t* const starts = starts_at(a, task, local, hash) + part * (ranges + 1);
    block_places(counters, kSortWarps, ranges, starts);
    each([&](int u, std::uint32_t row, std::uint32_t, bool read) {
      const bool some = code[u] != kNoRow;
      const int place = next_place(mine, code[u] / kRangeBuckets, a.range_bits, some);
      row += std::uint32_t(read ? task.read.first : task.add.first);
      if (some) records[place] = Added<T>::of(weight[u], row, read, code[u]);
    });
    __syncthreads();
    Added<T>* const to = sorted_at(a, task, hash) + part * kSortPart<T>;
    // Of sequences that overlap, which they must not, one may read the other's.
    const int placed = int(least(starts[ranges], least(kSortPart<T>, count - part * kSortPart<T>)));
    for (int i = thread_index(); i < placed; i += kSortThreads) to[i] = records[i];
    __syncthreads();
  }
}

}  // namespace lshkit::cuda

#pragma once
// The tables of a weighted sum, in shared memory: see weighted_bucket_sum.cuh.
#include "lshkit/cuda/weighted_bucket_sum.cuh"

namespace lshkit::cuda {

template <class T>
index_t weighted_table_bytes(const WeightedPass<T>& a) {
  return a.range * a.slice * index_t(sizeof(T)) + kTableChunk * index_t(sizeof(std::uint32_t)) +
         kTableWarps * index_t(sizeof(int)) +
         kTableWarps * kTableList * index_t(sizeof(std::uint16_t));
}

template <class T, Element E, int C>
__global__ void __launch_bounds__(kTableThreads, 1) weighted_table_kernel(WeightedPass<T> a) {
  LSHKIT_SHARED_MEMORY(memory);
  constexpr int kBytes = kElementBytes<E>;
  const int lane = lane_index(), warp = warp_index();
  BlockParts block;
  const index_t first_column = block.take(a.slices) * a.slice;
  const index_t first_bucket = block.take(a.ranges) * a.range;
  const index_t hash = block.take(a.hashes), local = block.rest;
  const int width = int(least(a.slice, a.columns() - first_column));
  const std::uint32_t buckets = std::uint32_t(least(a.range, a.n_buckets - first_bucket));
  T* const table = reinterpret_cast<T*>(memory);  // (buckets, width)
  std::uint32_t* const queue = reinterpret_cast<std::uint32_t*>(table + a.range * a.slice);
  int* const counts = reinterpret_cast<int*>(queue + kTableChunk);
  std::uint16_t* const list =
      reinterpret_cast<std::uint16_t*>(counts + kTableWarps) + warp * kTableList;

  const WeightedTask<T> task(a, local);
  const bool ordered = a.order != Order::all, reversed = a.order == Order::reversed;
  const std::uint32_t per_row = std::uint32_t(a.entries());
  const std::uint32_t adding = std::uint32_t(a.add.n_probes);
  const index_t positions =
      ordered && task.read.count > task.add.count ? task.read.count : task.add.count;
  const index_t total = positions * per_row;
  T* const tables = a.tables + (a.table_of(local) * a.hashes + hash) * a.table_rows * a.columns();
  const index_t add_base = probes_at(a.add, task.add, task.head, 0, a.first_hash + hash);
  const index_t read_base = probes_at(a.read, task.read, task.head, 0, a.first_hash + hash);

  for (std::uint32_t i = thread_index(); i < buckets * width; i += kTableThreads) table[i] = 0;

  // Of a chunk: where it begins, and what its numbers stand for.
  index_t first_position = 0;
  std::uint32_t first_entry = 0;
  const auto advance = [&] {
    const std::uint32_t x = first_entry + kTableChunk;
    const std::uint32_t step = divided(x, per_row, a.entry_shift);
    first_position += step;
    first_entry = x - step * per_row;
  };
  const auto row_of = [&](std::uint32_t number, std::uint32_t* entry) {
    const std::uint32_t x = first_entry + number;
    const std::uint32_t step = divided(x, per_row, a.entry_shift);
    *entry = x - step * per_row;
    const index_t position = first_position + step;
    return reversed ? positions - 1 - position : position;
  };
  // The bucket of this range that a number is for, with kReads if it reads, or kNoRow.
  const auto bucket_of = [&](index_t chunk, std::uint32_t number) {
    if (chunk * kTableChunk + number >= total) return kNoRow;
    std::uint32_t entry;
    const index_t row = row_of(number, &entry);
    const bool reads = entry >= adding;
    if (row >= (reads ? task.read.count : task.add.count)) return kNoRow;
    const WeightedSide<T>& s = reads ? a.read : a.add;
    const index_t at = (reads ? read_base - adding : add_base) + row * s.row_stride + entry;
    const std::uint32_t bucket = load_code(s.codes, s.code_bytes, at) - std::uint32_t(first_bucket);
    return bucket >= buckets ? kNoRow : reads ? bucket | kReads : bucket;
  };

  // Up to a warp of the list's first entries, in their order.
  const char* const vectors =
      static_cast<const char*>(a.add.x.data) + (first_column + lane) * kBytes;
  bool inside[C], of_vector[C];
  LSHKIT_UNROLL
  for (int k = 0; k < C; ++k) {
    inside[k] = lane + k * kWarp < width;
    of_vector[k] = inside[k] && first_column + lane + k * kWarp < a.n_values;
  }
  const auto process = [&](int count) {
    constexpr int kBatch = table_batch<T, C>();
    std::uint32_t to = 0;
    index_t at = 0;  // of the row's vector in bytes, or of the copy
    T weight = 0, extra = 0;
    bool takes_part = false, reads = false;
    if (lane < count) {
      const std::uint32_t queued = queue[list[lane]];
      to = (queued & ~kReads) / kTableChunk * width;
      reads = queued & kReads;
      std::uint32_t entry;
      const index_t row = row_of(queued & (kTableChunk - 1), &entry);
      if (reads) {
        at = ((task.read.first + row) * a.read.n_probes + (entry - adding)) * a.columns();
      } else {
        takes_part = is_valid(a.add, task.add, row);
        at = vector_at(a.add, task.add, row) * kBytes;
        weight = a.add.weights ? a.add.weights[add_base + row * a.add.row_stride + entry] : T(1);
        if (a.extra) extra = a.add.extra ? a.add.extra[task.add.owned + row] : T(1);
      }
    }
    const unsigned adds = __ballot_sync(kAllLanes, takes_part);
    const unsigned copies = ordered ? __ballot_sync(kAllLanes, reads) : 0;
    for (int first = 0; first < count; first += kBatch) {
      T x[kBatch][C];
      LSHKIT_UNROLL
      for (int u = 0; u < kBatch; ++u) {
        const char* const from = vectors + __shfl_sync(kAllLanes, at, first + u);
        const bool add = adds >> (first + u) & 1;
        LSHKIT_UNROLL
        for (int k = 0; k < C; ++k)
          x[u][k] = add && of_vector[k] ? load_element<T>(from + k * kWarp * kBytes, 0, E) : T(0);
      }
      if (a.extra) {
        LSHKIT_UNROLL
        for (int u = 0; u < kBatch; ++u) {
          const T last = __shfl_sync(kAllLanes, extra, first + u);
          LSHKIT_UNROLL
          for (int k = 0; k < C; ++k) x[u][k] = of_vector[k] ? x[u][k] : last;
        }
      }
      LSHKIT_UNROLL
      for (int u = 0; u < kBatch; ++u) {
        const T w = __shfl_sync(kAllLanes, weight, first + u);
        T* const here = table + __shfl_sync(kAllLanes, to, first + u) + lane;
        if (adds >> (first + u) & 1) {
          LSHKIT_UNROLL
          for (int k = 0; k < C; ++k)
            if (inside[k]) here[k * kWarp] += w * x[u][k];
        }
        if (!ordered) continue;
        T* const copy = tables + __shfl_sync(kAllLanes, at, first + u) + first_column + lane;
        if (!(copies >> (first + u) & 1)) continue;
        LSHKIT_UNROLL
        for (int k = 0; k < C; ++k)
          if (inside[k]) copy[k * kWarp] = here[k * kWarp];
      }
    }
  };

  // Of a lane: the numbers from `begin` on, in their order.
  std::uint32_t own[kTableEach];
  const std::uint32_t begin = std::uint32_t(thread_index()) * kTableEach;
  const auto look = [&](index_t chunk) {
    const index_t first = chunk * kTableChunk + begin;
    if (a.side_by_side && first + kTableEach <= total) {  // codes of 16 bits, nothing to locate
      const std::uint16_t* const codes =
          static_cast<const std::uint16_t*>(a.add.codes) + add_base + first;
      Quad q;
      if (reinterpret_cast<std::uintptr_t>(codes) % sizeof q == 0) {
        q = load_quad(codes);
      } else {
        LSHKIT_UNROLL
        for (int u = 0; u < 4; ++u)
          q.word[u] = codes[2 * u] | std::uint32_t(codes[2 * u + 1]) << 16;
      }
      LSHKIT_UNROLL
      for (int u = 0; u < kTableEach; ++u) {
        const std::uint32_t bucket =
            (q.word[u / 2] >> 16 * (u % 2) & 0xffff) - std::uint32_t(first_bucket);
        own[u] = bucket < buckets ? bucket : kNoRow;
      }
      return;
    }
    LSHKIT_UNROLL
    for (int u = 0; u < kTableEach; ++u) own[u] = bucket_of(chunk, begin + std::uint32_t(u));
  };
  look(0);
  const unsigned below = (1u << lane) - 1;
  for (index_t chunk = 0; chunk * kTableChunk < total; ++chunk) {
    int found = 0;
    LSHKIT_UNROLL
    for (int u = 0; u < kTableEach; ++u) found += own[u] != kNoRow;
    int before = found;  // of this warp, up to this lane
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_sync(kAllLanes, before, lane - step);
      if (lane >= step) before += other;
    }
    if (lane == kWarp - 1) counts[warp] = before;
    __syncthreads();
    const int of_lane = lane < kTableWarps ? counts[lane] : 0;
    int at = warp_sum(lane < warp ? of_lane : 0) + before - found;
    const int queued = warp_sum(of_lane);
    LSHKIT_UNROLL
    for (int u = 0; u < kTableEach; ++u)
      if (own[u] != kNoRow)
        queue[at++] =
            (own[u] & kReads) | ((own[u] & ~kReads) * kTableChunk + (begin + std::uint32_t(u)));
    __syncthreads();
    const index_t this_position = first_position;
    const std::uint32_t this_entry = first_entry;
    advance();
    look(chunk + 1);  // on its way while this one is added
    const index_t next_position = first_position;
    const std::uint32_t next_entry = first_entry;
    first_position = this_position;
    first_entry = this_entry;
    int listed = 0;
    for (int first = 0; first < queued; first += kWarp) {
      const int q = first + lane;
      const bool mine = q < queued && int((queue[q] & ~kReads) / kTableChunk % kTableWarps) == warp;
      const unsigned of_warp = __ballot_sync(kAllLanes, mine);
      if (mine) list[listed + __popc(of_warp & below)] = std::uint16_t(q);
      listed += __popc(of_warp);
      __syncwarp();
      if (listed < kWarp) continue;
      process(kWarp);
      listed -= kWarp;
      const std::uint16_t rest = lane < listed ? list[kWarp + lane] : std::uint16_t(0);
      __syncwarp();
      if (lane < listed) list[lane] = rest;
      __syncwarp();
    }
    if (listed) process(listed);
    first_position = next_position;
    first_entry = next_entry;
    __syncthreads();
  }
  if (ordered) return;
  __syncthreads();
  for (std::uint32_t r = warp; r < buckets; r += kTableWarps) {
    LSHKIT_UNROLL
    for (int k = 0; k < C; ++k)
      if (lane + k * kWarp < width)
        tables[(first_bucket + r) * a.columns() + first_column + lane + k * kWarp] =
            table[r * width + lane + k * kWarp];
  }
}

}  // namespace lshkit::cuda

#pragma once
// Counting sorts by buckets. Each warp of a block counts a range of what is sorted and places it
// after the ranges before: the order is always the same, here that of the rows.
//
// Here of rows, many hashes and heads a launch: a block takes one side of one sequence's head by
// one hash. weighted_sort.cuh sorts probes.
//
// Codes lie token by token, a byte of each 32 to a hash: a first kernel turns them over, so that a
// warp reads 64 bytes and not 32 sectors. The order of up to 65,536 rows is made in shared memory,
// 2 bytes a row: stores of 4 bytes at random places take a sector of the L2 cache each.
#include "lshkit/cuda/elements.cuh"

namespace lshkit::cuda {

constexpr int kTurnThreads = 256, kMostSortWarps = 32, kSortUnroll = 4;
constexpr index_t kSortSharedBytes = 96 * 1024;
constexpr std::uint16_t kNoBucket = 0xffff;

struct SortSide {
  Side side;
  const std::uint8_t* valid = nullptr;
  const void* codes = nullptr;
  std::uint16_t* buckets = nullptr;  // (hashes, units' rows)
  std::int32_t* order = nullptr;     // likewise: positions in the span, bucket by bucket
  std::int32_t* starts = nullptr;    // (hashes, units' sequences, buckets + 1), within a span
};

// Hashes [first_hash, + hashes) of units [first_unit, + units), a unit being one head of queries of
// one batch: packed sequences are one batch.
struct GroupSort {
  SortSide queries, keys;
  index_t query_heads = 1, sequences = 1;  // of a unit
  index_t first_unit = 0, units = 0, first_hash = 0, hashes = 0, n_hashes = 1;
  int code_bytes = 1, bits = 1;   // bits of a code that are sorted by: the lowest
  index_t most_staged = 1 << 16;  // rows whose order has 16 bits; tests have less

  __host__ __device__ index_t buckets() const { return index_t(1) << bits; }
  __host__ __device__ index_t rows(const SortSide& s) const { return units * s.side.n_rows; }
  __host__ __device__ index_t tasks() const { return units * sequences; }
  // The rows of a task of the group, numbered unit by unit.
  __device__ Span span(const SortSide& s, index_t task) const {
    const index_t unit = unsigned(task) / unsigned(sequences), sequence = task - unit * sequences;
    return span_of(s.side, query_heads, first_unit + unit + sequence * query_heads);
  }
  __device__ index_t first_row(const SortSide& s) const { return first_unit * s.side.n_rows; }
};

// A thread turns a row's codes over. `wide`: 16 bytes of them at a time.
LSHKIT_KERNEL void __launch_bounds__(kTurnThreads)
    turn_codes_kernel(GroupSort a, bool of_queries, bool wide) {
  const SortSide& s = of_queries ? a.queries : a.keys;
  const index_t chunks = ceil_div(s.side.n_rows, kTurnThreads), unit = block_index() / chunks;
  const index_t i = block_index() % chunks * kTurnThreads + thread_index();
  if (i >= s.side.n_rows) return;
  const index_t owner = a.first_unit + unit, batch = owner / a.query_heads;
  const index_t head = owner % a.query_heads / s.side.group;
  const index_t flat = (batch * s.side.heads + head) * s.side.n_rows + i;
  const bool valid = s.valid[flat];
  std::uint16_t* const to = s.buckets + unit * s.side.n_rows + i;
  const auto mask = std::uint32_t(a.buckets() - 1);
  const index_t step = a.rows(s), from = flat * a.n_hashes + a.first_hash;
  if (!wide) {
    for (index_t h = 0; h < a.hashes; ++h)
      to[h * step] =
          valid ? std::uint16_t(load_code(s.codes, a.code_bytes, from + h) & mask) : kNoBucket;
    return;
  }
  const auto* bytes = static_cast<const unsigned char*>(s.codes) + from * a.code_bytes;
  const int each = 16 / a.code_bytes;
  for (index_t h = 0; h < a.hashes; h += each) {
    std::uint32_t words[4];
#ifdef __CUDACC__
    const uint4 four = *reinterpret_cast<const uint4*>(bytes + h * a.code_bytes);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
#else
    std::memcpy(words, emulation::aligned(bytes + h * a.code_bytes, 16), 16);
#endif
    LSHKIT_UNROLL
    for (int w = 0; w < 4; ++w)
      for (int part = 0; part < 4 / a.code_bytes; ++part) {
        const index_t hash = h + (w * 4) / a.code_bytes + part;
        const std::uint32_t code =
            words[w] >> (8 * a.code_bytes * part) & (a.code_bytes == 1 ? 0xff : 0xffff) & mask;
        if (hash < a.hashes) to[hash * step] = valid ? std::uint16_t(code) : kNoBucket;
      }
  }
}

// The lanes whose number is this lane's, of so many bits: a vote for each. (match.any, one
// instruction, takes a turn for each of up to 32 different numbers.)
template <int Bits>
__device__ __forceinline__ unsigned lanes_of_equal(unsigned x) {
  unsigned equal = kAllLanes;
  LSHKIT_UNROLL
  for (int bit = 0; bit < Bits; ++bit) {
    const bool set = x >> bit & 1;
    const unsigned vote = __ballot_sync(kAllLanes, set);
    equal &= set ? vote : ~vote;
  }
  return equal;
}
__device__ __forceinline__ unsigned lanes_of_equal(unsigned x, int bits) {
  return bits <= 6   ? lanes_of_equal<6>(x)
         : bits <= 7 ? lanes_of_equal<7>(x)
         : bits <= 8 ? lanes_of_equal<8>(x)
                     : lanes_of_equal<16>(x);
}

// The steps of a stable sort of a block by buckets, below 2^bits. Counters: (warps + 1, buckets),
// zeros at first; each warp counts its own, a range of what is sorted.
__host__ __device__ constexpr index_t sort_bytes(index_t warps, index_t buckets) {
  return (warps + 1) * buckets * index_t(sizeof(int));
}
// From counts to where the next of a warp's goes, of each bucket. starts (buckets + 1): where
// buckets begin, and the end. After a barrier; what a warp then uses is its own.
__device__ __forceinline__ void block_places(int* counters, int warps, int buckets,
                                             std::int32_t* starts) {
  const int lane = lane_index(), warp = warp_index();
  int* const first = counters + warps * buckets;  // (buckets)
  for (int b = thread_index(); b < buckets; b += warps * kWarp) {
    int before = 0;
    for (int w = 0; w < warps; ++w) {
      const int here = counters[w * buckets + b];
      counters[w * buckets + b] = before;
      before += here;
    }
    first[b] = before;
  }
  __syncthreads();
  if (warp == 0) {
    int before = 0;
    for (int b = 0; b < buckets; b += kWarp) {
      const int own = b + lane < buckets ? first[b + lane] : 0;
      int up_to = own;  // this lane
      LSHKIT_UNROLL
      for (int step = 1; step < kWarp; step *= 2) {
        const int other = __shfl_sync(kAllLanes, up_to, lane - step);
        if (lane >= step) up_to += other;
      }
      if (b + lane < buckets) first[b + lane] = starts[b + lane] = before + up_to - own;
      before += __shfl_sync(kAllLanes, up_to, kWarp - 1);
    }
    if (lane == 0) starts[buckets] = before;
  }
  __syncthreads();
  for (int b = lane; b < buckets; b += kWarp) counters[warp * buckets + b] += first[b];
  __syncwarp();
}
// Where a lane's goes, the lower lanes' of its bucket before it, if it is `some`. mine: the warp's.
__device__ __forceinline__ int next_place(int* mine, unsigned bucket, int bits, bool some) {
  const unsigned equal = lanes_of_equal(bucket, bits) & __ballot_sync(kAllLanes, some);
  const int rank = __popc(equal & ((1u << lane_index()) - 1)), start = some ? mine[bucket] : 0;
  __syncwarp();
  if (some && rank == 0) mine[bucket] = start + __popc(equal);
  __syncwarp();
  return start + rank;
}

// All of them, of `count` things: bucket_of(i) is kNoBucket where i is in none, put(i, place) says
// where it goes. No barrier is last.
template <class BucketOf, class Put>
__device__ __forceinline__ void block_sort(int* counters, int warps, int buckets, int bits,
                                           int count, std::int32_t* starts,
                                           const BucketOf& bucket_of, const Put& put) {
  const int lane = lane_index(), warp = warp_index();
  const int each = int(ceil_div(ceil_div(count, warps), kWarp)) * kWarp;
  const int begin = int(least(count, index_t(warp) * each));
  const int end = each < count - begin ? begin + each : count;
  int* const mine = counters + warp * buckets;
  for (int b = thread_index(); b < warps * buckets; b += warps * kWarp) counters[b] = 0;
  __syncthreads();
  const auto all = [&](const auto& take) {  // 32 at a time
    for (int i = begin; i < end; i += kSortUnroll * kWarp) {
      unsigned bucket[kSortUnroll];
      LSHKIT_UNROLL
      for (int u = 0; u < kSortUnroll; ++u) {
        const int at = i + u * kWarp + lane;
        bucket[u] = at < end ? unsigned(bucket_of(at)) : kNoBucket;
      }
      LSHKIT_UNROLL
      for (int u = 0; u < kSortUnroll; ++u)
        if (i + u * kWarp < end) take(i + u * kWarp + lane, bucket[u]);
    }
  };
  all([&](int, unsigned bucket) {
    if (bucket != kNoBucket) atomicAdd(mine + bucket, 1);
  });
  __syncthreads();
  block_places(counters, warps, buckets, starts);
  all([&](int i, unsigned bucket) {
    const bool some = bucket != kNoBucket;
    const int place = next_place(mine, bucket, bits, some);
    if (some) put(i, place);
  });
}
// As many warps as have 256 of the things each and counters in the shared memory of any GPU.
inline int sort_warps(index_t count, index_t buckets) {
  const index_t room = kSortSharedBytes / sort_bytes(0, buckets) - 1;
  return int(least(least(ceil_div(count + 1, 256), kMostSortWarps), room));
}

// Even blocks sort queries, odd ones keys. Staged: shared memory beyond the counters has room for
// the order, whose numbers have 16 bits.
template <bool Staged>
__global__ void __launch_bounds__(kMostSortWarps* kWarp) group_sort_kernel(GroupSort a, int warps) {
  LSHKIT_SHARED_MEMORY(memory);
  const int buckets = int(a.buckets());
  const SortSide& s = block_index() % 2 == 0 ? a.queries : a.keys;
  const index_t task = block_index() / 2 % a.tasks(), slot = block_index() / 2 / a.tasks();
  const Span span = a.span(s, task);
  const index_t at = slot * a.rows(s) + span.owned - a.first_row(s);
  const std::uint16_t* const of_row = s.buckets + at;
  std::int32_t* const order = s.order + at;
  std::int32_t* const starts = s.starts + (slot * a.tasks() + task) * (buckets + 1);
  auto* const staged = reinterpret_cast<std::uint16_t*>(memory + sort_bytes(warps, buckets));
  block_sort(
      reinterpret_cast<int*>(memory), warps, buckets, a.bits, int(span.count), starts,
      [&](int row) { return of_row[row]; },
      [&](int row, int place) {
        if (Staged)
          staged[place] = std::uint16_t(row);
        else
          order[place] = std::int32_t(row);
      });
  if (!Staged) return;
  __syncthreads();
  const int count = starts[buckets];
  for (int i = thread_index(); i < count; i += warps * kWarp) order[i] = staged[i];
}

inline void group_sort(const Queue& queue, const GroupSort& a) {
  for (const bool of_queries : {true, false}) {
    const SortSide& s = of_queries ? a.queries : a.keys;
    const auto sixteen = [](index_t bytes) { return bytes % 16 == 0; };
    const bool wide = sixteen(a.n_hashes * a.code_bytes) && sixteen(a.first_hash * a.code_bytes) &&
                      sixteen(index_t(reinterpret_cast<std::uintptr_t>(s.codes)));
    launch(queue, "turn_codes", turn_codes_kernel, a.units * ceil_div(s.side.n_rows, kTurnThreads),
           kTurnThreads, 0, a, of_queries, wide);
  }
  const index_t longest =
      a.queries.side.n_rows > a.keys.side.n_rows ? a.queries.side.n_rows : a.keys.side.n_rows;
  const int warps = sort_warps(longest, a.buckets());
  const index_t bytes = sort_bytes(warps, a.buckets()), order = 2 * longest;
  const bool staged =
      a.sequences == 1 && longest <= a.most_staged && bytes + order <= shared_limit(queue);
  launch(queue, "group_sort", staged ? group_sort_kernel<true> : group_sort_kernel<false>,
         2 * a.tasks() * a.hashes, warps * kWarp, std::size_t(bytes + (staged ? order : 0)), a,
         warps);
}

}  // namespace lshkit::cuda

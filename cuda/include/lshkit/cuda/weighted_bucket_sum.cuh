#pragma once
// The weighted sum verb in one direction: rows are added to the buckets of their probes, and rows
// of the other side read theirs. Forwards keys add their values and queries read; backwards, for
// the weights of queries the same, and for values and for the weights of keys queries add their
// gradients and keys read.
//
// Two kernels, a few heads at a time so that tables stay in the L2 cache. weighted_table: a block
// has a range of the buckets of one hash of one head in shared memory, all columns of them; it
// looks for these among all probes and keeps them in a queue, and a warp adds those of its own
// buckets in the order of the rows, 8 at a time in flight: no atomics, the same bits at every run.
// In order ("causal", "reversed") the reading probes are in the queue too and take a copy of their
// bucket as it is then. weighted_gather: a warp takes a row, reads the row of the table of each of
// its probes, sums them and takes their products with the row's own vector: the gradients of the
// weights, whole at once.
//
// Bytes, per row, hash and probe of 64 columns in fp32: 512 of shared memory, 128 (bfloat16) or 256
// of L2 to add; 256 of L2 to read, which is the bound: 11 cycles of a multiprocessor if L2 gives it
// 23 bytes a cycle. Three of each for forward and backward. In order the copies are written and
// read besides, 512 bytes that leave L2 where rows are many.
// Instructions of a warp per row, hash and probe (SASS of sm_90): 18 to read, 26 with the products;
// 60 to add, of which 12 to find the bucket's warp (8 ranges of 512 of 4096 buckets).
#include "lshkit/cuda/elements.cuh"

namespace lshkit::cuda {

#ifdef __CUDACC__
constexpr int kTableThreads = 512;
#else
constexpr int kTableThreads = 128;  // fewer fibres, and chunks that small tests fill
#endif
constexpr int kTableWarps = kTableThreads / kWarp;
constexpr int kTableEach = 8;                            // probes of a thread, of a chunk
constexpr int kTableChunk = kTableThreads * kTableEach;  // a power of two, 2^12 at most
// Rows in flight of a warp: as many as registers allow.
template <class T, int C>
__host__ __device__ constexpr int table_batch() {
  return C * int(sizeof(T)) > 8 ? 4 : 8;
}
constexpr int kGatherBatch = 8;
constexpr int kTableList = 2 * kWarp;
constexpr index_t kTableShared = 136 * 1024;  // of buckets, where a block may have so much
// Bytes of tables in global memory, that L2 is to keep. In order copies, which are made once and
// read once, have four times as many, or as many as the sums.
#ifdef __CUDACC__
constexpr index_t kTableCache = 16 << 20;
inline index_t table_cache() { return kTableCache; }
#else
inline index_t emulated_table_cache = 16 << 20;  // a test may have less
inline index_t table_cache() { return emulated_table_cache; }
#endif
constexpr int kGatherThreads = 256, kGatherRows = kGatherThreads / kWarp;
constexpr index_t kGatherBlocks = 4096;  // that a launch has at least, if there are rows for them
constexpr int kLaneColumns = 3;          // of a lane at most
constexpr std::uint32_t kReads = 0x80000000u, kNoRow = 0xffffffffu;

constexpr Order transposed_order(Order order) {
  return order == Order::all ? order : order == Order::causal ? Order::reversed : Order::causal;
}
inline int log2_or_none(index_t x) {
  int bits = 0;
  while ((index_t(1) << bits) < x) ++bits;
  return (index_t(1) << bits) == x ? bits : -1;
}
// x / by, by = 2^shift where shift >= 0.
__device__ inline std::uint32_t divided(std::uint32_t x, std::uint32_t by, int shift) {
  return shift >= 0 ? x >> shift : x / by;
}

// Probes (heads of queries, rows, hashes, probes) in any layout whose probes are side by side, and
// a vector a row.
template <class T>
struct WeightedSide {
  Side side;
  const void* codes = nullptr;
  int code_bytes = 2;
  const T* weights = nullptr;  // null: ones
  index_t n_probes = 1;
  index_t head_stride = 0, row_stride = 0, hash_stride = 0;
  index_t first_head = 0;  // of queries: where the arrays begin
  const std::uint8_t* valid = nullptr;
  index_t valid_batch = 0, valid_head = 0;
  Elements x;
  bool own_x = false;        // of every head of queries, not of every head of this side
  const T* extra = nullptr;  // the last column, by row of every head of queries; null: ones
  // Of the side that reads; null: not wanted.
  T* sum = nullptr;  // (heads of queries, rows, sum_columns)
  index_t sum_columns = 0;
  T* weight_grads = nullptr;  // laid out as the weights
};

// What a launch does: some tasks and hashes.
template <class T>
struct WeightedPass {
  WeightedSide<T> add, read;
  index_t query_heads = 1, sequences = 1;  // of packed sequences, else 1
  index_t first_head = 0, heads = 0;       // of queries, of all sequences of a batch in turn
  index_t n_hashes = 1, n_buckets = 1, n_values = 0;
  bool extra = false;  // one more column
  Order order = Order::all;
  T scale = 1;
  // (tasks, hashes, n_buckets, columns), in order (heads, hashes, rows * n_probes, columns).
  T* tables = nullptr;
  index_t table_bytes = 0;
  // Set by weighted_sum.
  index_t first_task = 0, tasks = 0, first_hash = 0, hashes = 0;
  index_t table_rows = 0, range = 0, ranges = 0, slice = 0, slices = 0, gather_blocks = 0;
  int entry_shift = -1, probe_shift = -1;
  bool side_by_side = false;  // all probes of a hash that are added, codes of 16 bits

  __host__ __device__ index_t columns() const { return n_values + (extra ? 1 : 0); }
  __host__ __device__ index_t table_of(index_t local) const {
    return order == Order::all ? local : std::uint32_t(local) / std::uint32_t(sequences);
  }
  // Probes of a position: those that add, then those that read.
  __host__ __device__ index_t entries() const {
    return add.n_probes + (order == Order::all ? 0 : read.n_probes);
  }
};

// One head of one sequence.
template <class T>
struct WeightedTask {
  index_t head;  // of queries, of all sequences of a batch in turn
  Span add, read;

  __device__ WeightedTask(const WeightedPass<T>& a, index_t local) {
    // Tasks are fewer than 2^31: each has blocks of its own.
    const std::uint32_t index = std::uint32_t(a.first_task + local);
    const std::uint32_t sequences = std::uint32_t(a.sequences), of_head = index / sequences;
    head = a.first_head + of_head;
    const index_t task =
        a.add.side.starts ? (index - of_head * sequences) * a.query_heads + head : head;
    add = span_of(a.add.side, a.query_heads, task);
    read = span_of(a.read.side, a.query_heads, task);
  }
};
// Where the probes of row i of a span begin, of one hash.
template <class T>
__device__ inline index_t probes_at(const WeightedSide<T>& s, const Span& span, index_t head,
                                    index_t i, index_t hash) {
  return (head - s.first_head) * s.head_stride + (span.first + i) * s.row_stride +
         hash * s.hash_stride;
}
template <class T>
__device__ inline bool is_valid(const WeightedSide<T>& s, const Span& span, index_t i) {
  return !s.valid ||
         s.valid[span.batch * s.valid_batch + span.head * s.valid_head + span.first + i];
}
template <class T>
__device__ inline index_t vector_at(const WeightedSide<T>& s, const Span& span, index_t i) {
  return s.own_x ? (span.owned + i) * s.x.row : offset_of(s.x, span, i);
}
// A column of a row's vector, its elements of kind E.
template <class T, Element E>
__device__ inline T vector_column(const WeightedPass<T>& a, const WeightedSide<T>& s,
                                  const Span& span, index_t i, index_t at, index_t column) {
  if (column < a.n_values) return load_element<T>(s.x.data, at + column, E);
  return s.extra ? s.extra[span.owned + i] : T(1);
}

template <class T>
index_t weighted_table_bytes(const WeightedPass<T>& a) {
  return a.range * a.slice * index_t(sizeof(T)) + kTableChunk * index_t(sizeof(std::uint32_t)) +
         kTableWarps * index_t(sizeof(int)) +
         kTableWarps * kTableList * index_t(sizeof(std::uint16_t));
}

template <class T, Element E, int C>
__global__ void __launch_bounds__(kTableThreads, 1) weighted_table_kernel(WeightedPass<T> a) {
  LSHKIT_SHARED_MEMORY(memory);
  constexpr int kBytes = E == Element::float64 ? 8 : E == Element::float32 ? 4 : 2;
  const int lane = lane_index(), warp = warp_index();
  std::uint32_t block = std::uint32_t(block_index());
  const auto part_of = [&](index_t parts) {
    const std::uint32_t rest = block / std::uint32_t(parts),
                        part = block - rest * std::uint32_t(parts);
    block = rest;
    return index_t(part);
  };
  const index_t first_column = part_of(a.slices) * a.slice;
  const index_t first_bucket = part_of(a.ranges) * a.range;
  const index_t hash = part_of(a.hashes), local = block;
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

// Lane i gets the sum over the lanes of p[i].
template <int Half = kWarp / 2, class T>
__device__ __forceinline__ T transposed_sum(T* p, int lane) {
  LSHKIT_UNROLL
  for (int i = 0; i < Half; ++i) {
    const bool upper = lane & Half;
    const T keep = upper ? p[i + Half] : p[i], send = upper ? p[i] : p[i + Half];
    p[i] = keep + __shfl_xor_sync(kAllLanes, send, Half);
  }
  if constexpr (Half > 1)
    return transposed_sum<Half / 2>(p, lane);
  else
    return p[0];
}

template <class T, Element E, int C, bool Sum, bool Dots>
__global__ void __launch_bounds__(kGatherThreads, 1) weighted_gather_kernel(WeightedPass<T> a) {
  const int lane = lane_index();
  const std::uint32_t of_task = std::uint32_t(a.gather_blocks);
  const std::uint32_t block = std::uint32_t(block_index()), local = block / of_task;
  const WeightedTask<T> task(a, local);
  const WeightedSide<T>& s = a.read;
  const index_t columns = a.columns();
  const std::uint32_t row_bytes = std::uint32_t(columns * sizeof(T));
  const std::uint32_t probes = std::uint32_t(s.n_probes);
  const index_t n_entries = a.hashes * s.n_probes;
  const index_t step = a.gather_blocks * kGatherRows;
  const T* const tables = a.tables + a.table_of(local) * a.hashes * a.table_rows * columns;
  for (index_t i = index_t(block - local * of_task) * kGatherRows + warp_index();
       i < task.read.count; i += step) {
    const index_t base = probes_at(s, task.read, task.head, i, a.first_hash);
    const bool valid = is_valid(s, task.read, i);
    const index_t at = Dots ? vector_at(s, task.read, i) : 0;
    for (index_t first_column = 0; first_column < columns; first_column += a.slice) {
      const int width = int(least(a.slice, columns - first_column));
      T own[C], sum[C];
      bool inside[C];
      const char* const lane_tables = reinterpret_cast<const char*>(tables + first_column + lane);
      LSHKIT_UNROLL
      for (int k = 0; k < C; ++k) {
        inside[k] = lane + k * kWarp < width;
        own[k] = sum[k] = 0;
        if (Dots && valid && lane + k * kWarp < width)
          own[k] = vector_column<T, E>(a, s, task.read, i, at, first_column + lane + k * kWarp);
      }
      for (index_t first = 0; first < n_entries; first += kWarp) {
        std::uint32_t row = kNoRow;
        T weight = 0;
        index_t entry = 0;
        const bool has = first + lane < n_entries;
        if (has) {
          const std::uint32_t e = std::uint32_t(first) + lane;  // hashes and probes: below 2^31
          const std::uint32_t hash = divided(e, probes, a.probe_shift), probe = e - hash * probes;
          entry = base + hash * s.hash_stride + probe;
          const std::uint32_t code = load_code(s.codes, s.code_bytes, entry);
          if (valid && code < a.n_buckets) {
            const index_t copy = (task.read.first + i) * s.n_probes + probe;
            row =
                std::uint32_t(hash * a.table_rows + (a.order == Order::all ? index_t(code) : copy));
            if (Sum) weight = s.weights ? s.weights[entry] : T(1);
          }
        }
        T dots[kWarp];
        LSHKIT_UNROLL
        for (int group = 0; group < kWarp; group += kGatherBatch) {
          if (first + group >= n_entries) {
            LSHKIT_UNROLL
            for (int u = 0; u < kGatherBatch; ++u) dots[group + u] = 0;
            continue;
          }
          T x[kGatherBatch][C];
          LSHKIT_UNROLL
          for (int u = 0; u < kGatherBatch; ++u) {
            const std::uint32_t from = __shfl_sync(kAllLanes, row, group + u);
            const char* const bucket = lane_tables + std::uint64_t(from) * row_bytes;
            LSHKIT_UNROLL
            for (int k = 0; k < C; ++k)
              x[u][k] = from != kNoRow && inside[k] ? reinterpret_cast<const T*>(bucket)[k * kWarp]
                                                    : T(0);
          }
          LSHKIT_UNROLL
          for (int u = 0; u < kGatherBatch; ++u) {
            if (Sum) {
              const T w = __shfl_sync(kAllLanes, weight, group + u);
              LSHKIT_UNROLL
              for (int k = 0; k < C; ++k) sum[k] += w * x[u][k];
            }
            if (Dots) {
              dots[group + u] = own[0] * x[u][0];
              LSHKIT_UNROLL
              for (int k = 1; k < C; ++k) dots[group + u] += own[k] * x[u][k];
            }
          }
        }
        if (Dots) {
          const T dot = transposed_sum(dots, lane) * a.scale;
          if (has) {
            T& to = s.weight_grads[entry];
            to = first_column == 0 ? dot : to + dot;
          }
        }
      }
      if (Sum) {
        LSHKIT_UNROLL
        for (int k = 0; k < C; ++k) {
          const index_t column = first_column + lane + k * kWarp;
          if (lane + k * kWarp >= width || column >= s.sum_columns) continue;
          T& to = s.sum[(task.read.owned + i) * s.sum_columns + column];
          to = (a.first_hash == 0 ? 0 : to) + sum[k] * a.scale;
        }
      }
    }
  }
}

// Bytes of tables that one task and hash takes, and those that weighted_sum is given.
template <class T>
index_t weighted_tables_of_one(const WeightedPass<T>& a) {
  const index_t rows = a.order == Order::all ? a.n_buckets : a.read.side.n_rows * a.read.n_probes;
  return rows * a.columns() * index_t(sizeof(T));
}
template <class T>
index_t weighted_table_scratch(const WeightedPass<T>& a) {
  const index_t one = weighted_tables_of_one(a);
  if (a.order == Order::all) {
    const index_t all = a.heads * a.sequences * a.n_hashes * one;
    return least(all, one > table_cache() ? one : table_cache());
  }
  const index_t sums = a.heads * one / a.read.n_probes;
  const index_t wanted = sums > 4 * table_cache() ? sums : 4 * table_cache();
  return least(a.heads * a.n_hashes * one, one > wanted ? one : wanted);
}

// In weighted_bucket_sum.cu, for float and double. table_bytes: weighted_table_scratch, or more.
template <class T>
void weighted_sum(const Queue& queue, WeightedPass<T> a, index_t shared_limit);

}  // namespace lshkit::cuda

#pragma once
// The lower bound's gradient for 16-bit inputs on the tensor cores (YOSO, eq. 4). Within a bucket
// dQ_i = sum_j (g_i . v_j) k_j and dK_j = sum_i (g_i . v_j) q_i, over tiles of 16 rows and 64
// columns. Two forms, by the size of the bucket:
//   pairs, up to 32 queries and 32 keys: S = G V^T, dQ = S K, dK = S^T Q: 24 products (16 x 8 x 16)
//     for every 16 queries and 16 keys, by a warp
//   linear, beyond: M^T = K^T V, dQ = G M, M'^T = Q^T G, dK = V M': 128 for 16 queries and 16 keys,
//     however many rows a bucket has, by a block of four warps (bucket_gradient_block.cuh); causal
//     by a warp, or cut among four where it has more than 512 rows (bucket_gradient_crowded.cuh)
// All of it is linear in the columns of g and v and in those of q and k: where there are more than
// 64, every 64 of both are a gradient of their own. The bias of "sum" is two more columns of g (it
// rounded, and what that left) where v has ones: with 64 columns of values it costs as much as they
// do.
//
// No two buckets of a hash share a row, and what each hash contributes to a row is written once,
// to be summed over the hashes in order: no atomics, the same bits every time.
//
// What is rounded to 16 bits, each once: g, the unit vectors, S or M, and for bfloat16 what a hash
// contributes. All sums are fp32. float16 has a power of two for each head that brings g below 2^8
// and v to 1 at most, so that no S overflows, and another for each bucket that does it for M.
//
// Bound: L2, and where a head's rows (512 bytes a token in all) do not stay there, device memory.
// Of a token and hash 512 bytes are gathered (pairs) or 640 (linear: values twice), 256 are written
// and read again once; float16 writes and reads twice that. Instructions of a warp: a bucket of up
// to 16 + 16 rows takes about 620 as pairs, 24 of them products (sm_90's machine code); 16 queries
// and 16 keys of a linear one 982 (counted by hardware, sm_90a).
#include "lshkit/cuda/bucket_sort.cuh"
#include "lshkit/cuda/matrix.cuh"

namespace lshkit::cuda {

constexpr int kPairRows = 32;  // of a bucket's side, in the form of pairs
constexpr int kPairWarps = 4, kLinearWarps = 4, kStages = 3;
constexpr int kPairWarpBytes = 4 * kPairRows * 128;
constexpr int kMostRun = kWarp;    // buckets that a warp looks at
constexpr int kCrowdedRows = 512;  // a side of more is cut among warps, where it is causal
constexpr int kLinearWarpBytes = (2 * kStages + 4) * kTileBytes;

// What a hash contributes to a row: 64 columns of bfloat16, or of float for float16.
template <Element E>
constexpr int kContributionBytes = E == Element::float16 ? 256 : 128;

struct MatrixSide {
  const std::uint16_t* unit = nullptr;    // (rows of the side's heads, 64)
  const std::uint16_t* factor = nullptr;  // (factor tiles, rows, 64): g of queries or v of keys
  index_t factor_tile = 0;                // numbers in one of them
  const float* scale = nullptr;           // that a head's factors are multiplied by, float16 only
  unsigned char* out = nullptr;           // (hashes, factor tiles, units' rows, 64)
};

struct MatrixGradient {
  GroupSort sort;
  index_t first_slot = 0, slots = 0;  // of the sorted hashes
  index_t first_unit = 0, units = 0;  // of the sorted ones
  index_t factor_tiles = 1;
  int run = 1;         // buckets that a warp or a block takes one after the other, at most 32
  bool small = false;  // the linear form takes those of few rows too, and those that lack a side
  int crowded = kCrowdedRows;
  bool causal = false;
  float scale = 1;
  MatrixSide queries, keys;

  __host__ __device__ index_t runs() const { return ceil_div(sort.buckets(), run); }
  __host__ __device__ index_t items() const {
    return units * sort.sequences * slots * factor_tiles * runs();
  }
};

// The rows of one side of a sequence's head, and those of one bucket of it.
struct MatrixRows {
  const std::uint16_t *unit, *factor;  // of the span's first row
  const std::int32_t* order;           // of the bucket
  const std::int32_t* starts;          // of the run's first bucket
  unsigned char* out;
  int count;
};

// What is the same in all lanes, said so that the compiler knows.
__device__ inline int uniform(int x) { return __shfl_sync(kAllLanes, x, 0); }

struct MatrixItem {
  MatrixRows queries, keys;
  int buckets;  // of the run
  float scale;

  template <Element E>
  __device__ static MatrixItem of(const MatrixGradient& p, index_t item) {
    const GroupSort& s = p.sort;
    using Number = std::uint32_t;  // blocks are fewer; 64 bits take long to divide
    const Number tiles = Number(p.factor_tiles), slots = Number(p.slots);
    const Number runs = (Number(s.buckets()) + Number(p.run) - 1) / Number(p.run);
    const Number rest = Number(item) / runs, hash_tiles = rest / tiles;
    const index_t first = index_t(Number(item) - rest * runs) * p.run;
    const index_t tile = rest - hash_tiles * tiles;
    const index_t local = hash_tiles / slots;  // of the sequences of p's units
    const index_t slot = hash_tiles - Number(local) * slots;
    const index_t task = p.first_unit * s.sequences + local;
    MatrixItem it;
    it.buckets = int(least(p.run, s.buckets() - first));
    it.scale = p.scale;
    const auto rows = [&](const SortSide& sorted, const MatrixSide& m) {
      const Span span = s.span(sorted, task);
      const index_t of_group = span.owned - s.first_row(sorted);
      const index_t n = sorted.side.n_rows, own = of_group - p.first_unit * n;
      const index_t head = span.batch * sorted.side.heads + span.head;
      MatrixRows r;
      r.unit = m.unit + span.flat * kTileColumns;
      r.factor = m.factor + tile * m.factor_tile + span.flat * kTileColumns;
      r.order = sorted.order + (p.first_slot + slot) * s.rows(sorted) + of_group;
      r.starts =
          sorted.starts + ((p.first_slot + slot) * s.tasks() + task) * (s.buckets() + 1) + first;
      r.out = m.out + ((slot * p.factor_tiles + tile) * p.units * n + own) * kContributionBytes<E>;
      r.count = 0;
      if (E == Element::float16) it.scale /= m.scale[head];
      return r;
    };
    it.queries = rows(s.queries, p.queries);
    it.keys = rows(s.keys, p.keys);
    return it;
  }

  // body() for each bucket of the run that takes(queries, keys), of so many rows. All lanes are
  // here.
  template <class Takes, class Body>
  __device__ void for_buckets(const Takes& takes, const Body& body) {
    const int own = int(least(lane_index(), buckets - 1));
    const std::int32_t *const query_order = queries.order, *const key_order = keys.order;
    const auto count = [](const MatrixRows& r, int b) { return r.starts[b + 1] - r.starts[b]; };
    const bool takes_own = takes(count(queries, own), count(keys, own));
    unsigned taken = __ballot_sync(kAllLanes, takes_own && lane_index() < buckets);
    LSHKIT_KEEP_LOOP
    for (; taken; taken &= taken - 1) {
      const int b = lowest_bit(taken);  // whose numbers are in the L1 cache now
      queries.order = query_order + uniform(queries.starts[b]);
      keys.order = key_order + uniform(keys.starts[b]);
      queries.count = uniform(count(queries, b));
      keys.count = uniform(count(keys, b));
      body();
    }
  }

  // The rows of the run's buckets in turn, which lie one after the other: to the first of bucket 0,
  // then bucket by bucket. Where there is no register to spare.
  __device__ void begin_run() {
    queries.order += uniform(queries.starts[0]);
    keys.order += uniform(keys.starts[0]);
  }
  __device__ void take_bucket(int b) {
    queries.order += queries.count;
    keys.order += keys.count;
    queries.count = uniform(queries.starts[b + 1] - queries.starts[b]);
    keys.count = uniform(keys.starts[b + 1] - keys.starts[b]);
  }
};

// Starts to copy rows `first` to first + 15 of a bucket, zeros from `count` on. `positions`: of
// which this lane knows row lane % 16 of the tile, or row `lane` of two tiles; 0 beyond the end.
template <bool Unit, bool Factor>
__device__ inline void copy_tile(const MatrixRows& r, int positions, int first, int from,
                                 const TileLane& lane, SharedAddress unit, SharedAddress factor) {
  LSHKIT_UNROLL
  for (int step = 0; step < 4; ++step) {
    const int row = 4 * step + lane.row;
    const index_t at =
        index_t(__shfl_sync(kAllLanes, positions, from + row)) * kTileColumns + lane.piece * 8;
    const bool inside = first + row < r.count;
    if (Factor) copy_async(factor + lane.move(step), r.factor + at, inside);
    if (Unit) copy_async(unit + lane.move(step), r.unit + at, inside);
  }
}

// Writes 16 rows of sums, `first` to first + 15 of a bucket, 32 columns after 32, through `stage`,
// a tile that the warp has no other use for.
template <Element E>
struct TileWriter {
  static constexpr bool kWide = E == Element::float16;
  const MatrixRows& r;
  const TileLane& lane;
  SharedAddress stage;
  int positions, first, from;  // as of copy_tile
  float scale;

  // The first half of the columns, then the second.
  __device__ void put(const float (&sum)[8][4], int half) const {
    float part[4][4];
    LSHKIT_UNROLL
    for (int n = 0; n < 4; ++n) LSHKIT_UNROLL
    for (int c = 0; c < 4; ++c) part[n][c] = sum[4 * half + n][c];
    put(part, half);
  }
  __device__ void put(const float (&sum)[4][4], int half) const {
    if (kWide || half == 0) __syncwarp();
    const int t = lane_index() % 4, g = lane_index() / 4;
    const int wide = g * 128 + ((t / 2) ^ g) * 16 + t % 2 * 8, narrow = lane.sum ^ (half * 64);
    LSHKIT_UNROLL
    for (int n = 0; n < 4; ++n) {
      const float* const x = sum[n];
      if (kWide) {
        store_shared(stage + (wide ^ (n * 32)), x[0] * scale, x[1] * scale);
        store_shared(stage + 1024 + (wide ^ (n * 32)), x[2] * scale, x[3] * scale);
      } else {
        store_shared(stage + (narrow ^ (n * 16)), pack<E>(x[0] * scale, x[1] * scale));
        store_shared(stage + 1024 + (narrow ^ (n * 16)), pack<E>(x[2] * scale, x[3] * scale));
      }
    }
    if (!kWide && half == 0) return;
    __syncwarp();
    LSHKIT_UNROLL
    for (int step = 0; step < 4; ++step) {
      const int row = 4 * step + lane.row;
      const index_t at = __shfl_sync(kAllLanes, positions, from + row);
      if (first + row < r.count)
        store_streaming(
            r.out + at * kContributionBytes<E> + (kWide ? half * 128 : 0) + lane.piece * 16,
            load_shared(stage + lane.move(step)));
    }
  }
};

// sum += factor of one side . factor of the other, 16 x 16 as two blocks of 8 columns
template <Element E>
__device__ inline void multiply_factors(float (&s)[2][4], const std::uint32_t (&a)[4][4],
                                        SharedAddress other, const TileLane& lane) {
  LSHKIT_UNROLL
  for (int k = 0; k < 4; ++k) {
    std::uint32_t b[4];
    load_fragment<false>(b, other, lane, k);
    multiply<E>(s[0], a[k], b[0], b[2]);
    multiply<E>(s[1], a[k], b[1], b[3]);
  }
}
// sum += weights (16 x 16) unit, columns [32 half, 32 half + 32)
template <Element E>
__device__ inline void multiply_unit(float (&sum)[4][4], const std::uint32_t (&weights)[4],
                                     SharedAddress unit, const TileLane& lane, int half) {
  LSHKIT_UNROLL
  for (int n = 0; n < 2; ++n) {
    std::uint32_t b[4];
    load_fragment<true>(b, unit, lane, 2 * half + n);
    multiply<E>(sum[2 * n], weights, b[0], b[1]);
    multiply<E>(sum[2 * n + 1], weights, b[2], b[3]);
  }
}
// Weights of 16 x 16 pairs as A: sees(row, column) says which count.
template <Element E, class Sees>
__device__ inline void pack_weights(std::uint32_t (&a)[4], const float (&s)[2][4],
                                    const Sees& sees) {
  const int g = lane_index() / 4, t = lane_index() % 4;
  LSHKIT_UNROLL
  for (int i = 0; i < 4; ++i) {  // rows g and g + 8 of the left half, then of the right one
    const float* const x = s[i / 2] + i % 2 * 2;
    const int row = g + i % 2 * 8, column = 2 * t + i / 2 * 8;
    a[i] = pack<E>(sees(row, column) ? x[0] : 0, sees(row, column + 1) ? x[1] : 0);
  }
}

// Rows without a pair: of every `of` groups of four of them the `own`th.
template <Element E>
__device__ inline void store_zeros(const MatrixRows& r, const TileLane& lane, int own = 0,
                                   int of = 1) {
  for (int row = 4 * own + lane.row; row < r.count; row += 4 * of)
    for (int part = 0; part < kContributionBytes<E>; part += 128)
      store_streaming(
          r.out + index_t(r.order[row]) * kContributionBytes<E> + part + lane.piece * 16,
          Words4{{0, 0, 0, 0}});
}

__host__ __device__ constexpr bool few(int queries, int keys) {
  return queries <= kPairRows && keys <= kPairRows;
}
// Whether the linear form takes such a bucket.
__host__ __device__ constexpr bool is_linear(const MatrixGradient& p, int queries, int keys) {
  return p.small ? queries + keys > 0 : queries > 0 && keys > 0 && !few(queries, keys);
}
// By all warps of a block, where it is causal.
__host__ __device__ constexpr bool is_crowded(const MatrixGradient& p, int queries, int keys) {
  return queries > 0 && keys > 0 && (queries > p.crowded || keys > p.crowded);
}

}  // namespace lshkit::cuda

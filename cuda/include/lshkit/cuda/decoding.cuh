#pragma once
// Attention step by step: the tables of one sequence and key head take in keys and answer queries,
// position by position. A block has eight warps; warp w owns the hashes w, w + 8, ... and reads and
// writes their tables alone, a lane always the same columns. So nothing is waited for between a
// position's addition and the next one's reading but the sums of the warps, eight rows at a time.
// Sums over the hashes are in an order that does not depend on how positions are divided among
// calls.
//
// Bound: device memory. A position of a head touches n_hashes rows for its key, read and written,
// and n_hashes for each query: with one query 3 n_hashes d_v numbers (24 KB in float32 at d_v 64,
// 32 hashes), each row contiguous. A step waits for memory about four times in turn: rows for
// validity, codes, rows of the tables, both reads at once, and the output. Many positions at once
// are bound by instructions as much: for four hashes of a warp and d_v 64 some 450 a position of
// which 24 are loads and stores of rows, 1.6 KB (the others find addresses, test for the ends of
// rows and shuffle buckets from lane to lane).
#include "lshkit/cuda/rows.cuh"

namespace lshkit::cuda {

constexpr int kDecodingWarps = 8, kDecodingThreads = kDecodingWarps * kWarp;
constexpr int kDecodingSlots = 8;  // rows of queries whose sums the warps keep
constexpr int kDecodingAhead = 4;  // entries of a warp whose rows are waited for together
static_assert(kDecodingSlots <= kDecodingWarps, "a warp finishes one row");
static_assert(kDecodingSlots * kDecodingAhead == kWarp, "a lane keeps one entry");
constexpr index_t kDecodingColumns = 2 * kWarp;  // of a block, at most: more take many registers

struct DecodingSide {
  Elements x;
  // Heads of (rows, entries): that of query head g of a unit (one sequence's key head) is number
  // unit * unit_heads + g * group_heads.
  const void* codes = nullptr;
  const float* weights = nullptr;  // the same of floats; null: ones
  index_t rows = 0, probes = 1;    // of a hash
  index_t unit_heads = 1, group_heads = 0;
};

struct Decoding {
  DecodingSide keys, queries;
  void* sums = nullptr;     // (batch, key_heads, n_hashes, n_buckets, n_values)
  bool half = false;        // they are float16
  float* counts = nullptr;  // (batch, key_heads, n_hashes, n_buckets), or null
  index_t batch = 1, key_heads = 1, group = 1, n_hashes = 1, n_buckets = 1, n_values = 0;
  index_t n_features = 0;
  int code_bytes = 1;
  Elements values;
  const std::uint8_t* key_mask = nullptr;  // (batch, keys), or null
  index_t mask_stride = 0;
  float scale = 1;
  Normalize normalize = Normalize::none;
  Elements out;
  void* data = nullptr;
  // Where a row has more columns than a block: what normalize() goes on from. Else null.
  float* raw = nullptr;  // (batch, heads, rows, n_values + counted)
  std::uint8_t* raw_valid = nullptr;
  index_t positions = 0;  // of a block

  // n positions of one query head or more of each: heads of a chunk, positions of a tile.
  __device__ int heads_at_once() const { return int(least(group, kDecodingSlots)); }
  __device__ int tile() const {
    return queries.rows ? kDecodingSlots / heads_at_once() : kDecodingSlots;
  }
};

// The norm of the numbers at(c), c < columns, by a warp.
template <class At>
__device__ inline ScaledNorm norm_of_warp(index_t columns, const At& at) {
  const auto square_of = [&](float factor) {
    float square = 0;
    for (index_t c = lane_index(); c < columns; c += kWarp)
      square += at(c) * factor * (at(c) * factor);
    return warp_sum(square);
  };
  const float square = square_of(1), factor = factor_of_square(square);
  return {factor, sqrtf(factor == 1 ? square : square_of(factor))};
}

__device__ inline float load_sum(const float* p) { return *p; }
__device__ inline float load_sum(const std::uint16_t* p) { return from_float16(*p); }
// Returns what has been stored.
__device__ inline float store_sum(float* p, float x) { return *p = x; }
__device__ inline float store_sum(std::uint16_t* p, float x) {
  *p = to_float16(x);
  return from_float16(*p);
}

// Of a row's sums: its columns, then counts, one for each of the entries that go together.
template <int Columns>
constexpr int kDecodingStep = Columns * kWarp + kDecodingAhead;

// Rows of the tables at up to kDecodingAhead entries: a lane's columns.
template <class Sum, int Columns>
struct TableRow {
  Sum* row[kDecodingAhead];
  float x[kDecodingAhead][Columns];

  // The lane first + k has the bucket of entry k, negative where there is none.
  __device__ __forceinline__ void load(Sum* sums, index_t n_values, index_t buckets, int first,
                                       int columns) {
    LSHKIT_UNROLL
    for (int k = 0; k < kDecodingAhead; ++k) {
      const index_t offset = __shfl_sync(kAllLanes, buckets * n_values, first + k);
      row[k] = offset >= 0 ? sums + offset : nullptr;
    }
    LSHKIT_UNROLL
    for (int k = 0; k < kDecodingAhead; ++k) LSHKIT_UNROLL
    for (int c = 0; c < Columns; ++c)
      x[k][c] = row[k] && c < columns ? load_sum(row[k] + c * kWarp) : 0;
  }
};

// The weights of the entries whose rows go together, as the codes come.
__device__ __forceinline__ void entry_weights(const DecodingSide& side, float weights, int first,
                                              float* weight) {
  LSHKIT_UNROLL
  for (int k = 0; k < kDecodingAhead; ++k)
    weight[k] = side.weights ? __shfl_sync(kAllLanes, weights, first + k) : 1;
}

// One row of the output by a warp, from the sums of all warps: those of warp 0 lie at `sums`.
// flat: of all heads of queries in turn.
template <int Columns>
__device__ __forceinline__ void finish_row(const Decoding& d, float* sums, index_t flat,
                                           index_t row, index_t slice, int columns, bool valid) {
  constexpr int kWarpStep = kDecodingSlots * kDecodingStep<Columns>;
  const int lane = lane_index();
  float total[Columns], count = 0;
  LSHKIT_UNROLL
  for (int c = 0; c < Columns; ++c) {
    total[c] = 0;
    for (int w = 0; w < kDecodingWarps; ++w) total[c] += sums[w * kWarpStep + c * kWarp + lane];
    total[c] *= d.scale;
  }
  if (d.normalize == Normalize::sum && slice == 0) {
    for (int w = 0; w < kDecodingWarps; ++w)
      for (int k = 0; k < kDecodingAhead; ++k) count += sums[w * kWarpStep + Columns * kWarp + k];
    count *= d.scale;
  }
  if (d.raw) {
    const index_t at = flat * d.queries.rows + row;
    const int counted = d.normalize == Normalize::sum;
    float* const to = d.raw + at * (d.n_values + counted);
    LSHKIT_UNROLL
    for (int c = 0; c < Columns; ++c)
      if (c < columns) to[(slice * Columns + c) * kWarp + lane] = total[c];
    if (slice > 0 || lane > 0) return;
    if (counted) to[d.n_values] = count;
    d.raw_valid[at] = valid;
    return;
  }
  // As normalize_kernel.
  float factor = 1, scale = 1;
  bool none = false;
  if (d.normalize == Normalize::l2) {
    LSHKIT_UNROLL
    for (int c = 0; c < Columns; ++c) sums[c * kWarp + lane] = total[c];  // read by this lane alone
    const ScaledNorm length = norm_of_warp(d.n_values, [&](index_t c) { return sums[c]; });
    none = length.norm == 0;
    factor = length.factor;
    scale = 1 / length.norm;
  } else if (d.normalize == Normalize::sum) {
    none = vanishes(count);
    scale = 1 / count;
  }
  const index_t heads = d.key_heads * d.group;
  const index_t to = flat / heads * d.out.batch + flat % heads * d.out.head + row * d.out.row;
  LSHKIT_UNROLL
  for (int c = 0; c < Columns; ++c)
    if (c < columns)
      store_element<float>(d.data, to + c * kWarp + lane, d.out.element,
                           !valid ? not_a_number()
                           : none ? 0
                                  : total[c] * factor * scale);
}

template <class Sum, int Columns>
__global__ void __launch_bounds__(kDecodingThreads, 1) decode_kernel(Decoding d) {
  constexpr int kStep = kDecodingStep<Columns>;
  LSHKIT_SHARED_MEMORY(memory);
  float* const partial = reinterpret_cast<float*>(memory);  // (warps, slots, kStep)
  auto* const valid =
      reinterpret_cast<std::uint8_t*>(partial + kDecodingWarps * kDecodingSlots * kStep);
  const int warp = warp_index(), lane = lane_index();
  const index_t slices = ceil_div(d.n_values, index_t(Columns) * kWarp);
  const index_t units = d.batch * d.key_heads;
  const index_t slice = block_index() % slices, unit = block_index() / slices % units;
  const index_t batch = unit / d.key_heads, head = unit % d.key_heads;
  const index_t length = d.keys.rows > d.queries.rows ? d.keys.rows : d.queries.rows;
  const index_t begin = block_index() / slices / units * d.positions;
  const index_t end = least(length, begin + d.positions);
  // The columns first_column + lane + 32 c that there are.
  const index_t first_column = slice * Columns * kWarp + lane;
  const int columns = int(
      least(Columns, first_column < d.n_values ? ceil_div(d.n_values - first_column, kWarp) : 0));
  const index_t table = unit * d.n_hashes * d.n_buckets;
  Sum* const sums = static_cast<Sum*>(d.sums) + table * d.n_values + first_column;
  float* const counts = d.counts && slice == 0 ? d.counts + table : nullptr;
  // Hard codes go four hashes at a time; soft ones hash by hash, four probes at a time, so that a
  // row of a table is read by the warp that has written it.
  const bool soft = d.keys.weights || d.queries.weights;
  const index_t group_step = soft ? kDecodingWarps : kDecodingWarps * kDecodingAhead;
  const int tile = d.tile(), most_heads = d.heads_at_once();

  int parity = 0;
  for (index_t start = begin; start < end; start += tile)
    for (index_t first_head = 0; first_head < d.group; first_head += most_heads) {
      const int keys =
          first_head == 0 ? int(least(tile, d.keys.rows > start ? d.keys.rows - start : 0)) : 0;
      const int queries = int(least(tile, d.queries.rows > start ? d.queries.rows - start : 0));
      const int heads = queries ? int(least(most_heads, d.group - first_head)) : 0;
      const int slots = queries * heads;
      if (keys + slots == 0) continue;  // all of the block
      const auto query_head = [&](int slot) { return head * d.group + first_head + slot % heads; };
      // Of the tile's keys, then of its queries' slots: whether they are finite, a row a warp.
      std::uint8_t* const tile_valid = valid + parity * 2 * kDecodingSlots;
      parity ^= 1;
      for (int of = warp; of < 2 * kDecodingSlots; of += kDecodingWarps) {
        const bool of_key = of < kDecodingSlots;
        const int slot = of - kDecodingSlots;
        if (of_key ? of >= keys : slot >= slots) continue;
        const Elements& x = of_key ? d.keys.x : d.queries.x;
        const index_t row = start + (of_key ? of : slot / heads);
        const index_t from =
            batch * x.batch + (of_key ? head : query_head(slot)) * x.head + row * x.row;
        bool takes_part = !of_key || !d.key_mask || d.key_mask[batch * d.mask_stride + row];
        if (takes_part)
          takes_part = is_finite(norm_of_warp(d.n_features, [&](index_t c) {
                                   return load_element<float>(x.data, from + c, x.element);
                                 }).norm);
        if (lane == 0) tile_valid[of] = takes_part;
      }
      __syncthreads();

      const int of = lane / kDecodingAhead, k_of = lane % kDecodingAhead;
      // Once at least: sums without an entry are zero.
      for (index_t group = warp; group < d.n_hashes || group == warp; group += group_step) {
        // The bucket of this lane's entry, k_of, of a row of codes, and its weight.
        const auto bucket_of = [&](const DecodingSide& side, index_t row, index_t first_probe,
                                   float* weight) {
          const index_t hash = soft ? group : group + k_of * kDecodingWarps;
          const index_t probe = soft ? first_probe + k_of : 0;
          if (hash >= d.n_hashes || probe >= side.probes) return index_t(-1);
          const index_t at = (row * d.n_hashes + hash) * side.probes + probe;
          if (side.weights) *weight = side.weights[at];
          return hash * d.n_buckets + load_code(side.codes, d.code_bytes, at);
        };
        const auto key_row = [&](int t) { return unit * d.keys.rows + start + t; };
        const auto query_row = [&](int slot) {
          const index_t flat =
              unit * d.queries.unit_heads + (first_head + slot % heads) * d.queries.group_heads;
          return flat * d.queries.rows + start + slot / heads;
        };
        // Those of all rows of the tile, a lane each.
        index_t key_bucket = -1, query_bucket = -1;
        float key_weight = 1, query_weight = 1;
        if (of < keys) key_bucket = bucket_of(d.keys, key_row(of), 0, &key_weight);
        if (of < slots) query_bucket = bucket_of(d.queries, query_row(of), 0, &query_weight);

        for (int t = 0; t < tile && t < (keys > queries ? keys : queries); ++t) {
          const bool adds = t < keys && tile_valid[t], together = !soft && t < queries;
          TableRow<Sum, Columns> to{};
          float value[Columns] = {}, weight[kDecodingAhead] = {};
          const auto load_key = [&](index_t buckets, float weights, int first) {
            entry_weights(d.keys, weights, first, weight);
            to.load(sums, d.n_values, buckets, first, columns);
            if (!counts) return;
            // The lane k has to do with the count of entry k.
            const index_t bucket = __shfl_sync(kAllLanes, buckets, first + k_of);
            const float own = __shfl_sync(kAllLanes, weights, first + k_of);
            __syncwarp();  // another lane's entry of a query may have this bucket
            if (of == 0 && bucket >= 0) counts[bucket] += own;
            __syncwarp();
          };
          const auto add = [&] {
            LSHKIT_UNROLL
            for (int k = 0; k < kDecodingAhead; ++k) {
              LSHKIT_UNROLL
              for (int c = 0; c < Columns; ++c)
                if (to.row[k] && c < columns)
                  to.x[k][c] = store_sum(to.row[k] + c * kWarp, to.x[k][c] + weight[k] * value[c]);
            }
          };
          if (adds) {
            const index_t from = batch * d.values.batch + head * d.values.head +
                                 (start + t) * d.values.row + first_column;
            LSHKIT_UNROLL
            for (int c = 0; c < Columns; ++c)
              value[c] = c < columns ? load_element<float>(d.values.data, from + c * kWarp,
                                                           d.values.element)
                                     : 0;
            load_key(key_bucket, key_weight, t * kDecodingAhead);
            if (!together) add();
            for (index_t probe = kDecodingAhead; soft && probe < d.keys.probes;
                 probe += kDecodingAhead) {
              float own = 1;
              const index_t bucket = bucket_of(d.keys, key_row(t), probe, &own);
              load_key(bucket, own, 0);
              add();
            }
          }
          for (int g = 0; t < queries && g < heads; ++g) {
            const int slot = t * heads + g;
            float* const to_sums = partial + (warp * kDecodingSlots + slot) * kStep;
            TableRow<Sum, Columns> from;
            float factor[kDecodingAhead];
            const auto read = [&](index_t buckets, float weights, int first, bool anew) {
              entry_weights(d.queries, weights, first, factor);
              from.load(sums, d.n_values, buckets, first, columns);
              if (adds && together && g == 0) {
                add();
                // What was read before the row was written.
                LSHKIT_UNROLL
                for (int k = 0; k < kDecodingAhead; ++k) {
                  LSHKIT_UNROLL
                  for (int c = 0; c < Columns; ++c)
                    if (from.row[k] == to.row[k]) from.x[k][c] = to.x[k][c];
                }
              }
              LSHKIT_UNROLL
              for (int c = 0; c < Columns; ++c) {
                float sum = anew ? 0 : to_sums[c * kWarp + lane];
                LSHKIT_UNROLL
                for (int k = 0; k < kDecodingAhead; ++k) sum += factor[k] * from.x[k][c];
                to_sums[c * kWarp + lane] = sum;
              }
              if (!counts) return;
              const index_t bucket = __shfl_sync(kAllLanes, buckets, first + k_of);
              const float own = __shfl_sync(kAllLanes, weights, first + k_of);
              if (of > 0) return;
              float& sum = to_sums[Columns * kWarp + lane];
              if (anew) sum = 0;
              if (bucket >= 0) sum += own * counts[bucket];
            };
            read(query_bucket, query_weight, slot * kDecodingAhead, group == warp);
            for (index_t probe = kDecodingAhead; soft && probe < d.queries.probes;
                 probe += kDecodingAhead) {
              float own = 1;
              const index_t bucket = bucket_of(d.queries, query_row(slot), probe, &own);
              read(bucket, own, 0, false);
            }
          }
        }
      }
      __syncthreads();
      // The sum of the warps, and the output.
      if (warp >= slots) continue;
      const index_t row = start + warp / heads,
                    flat = batch * d.key_heads * d.group + query_head(warp);
      finish_row<Columns>(d, partial + warp * kStep, flat, row, slice, columns,
                          tile_valid[kDecodingSlots + warp]);
    }
}

inline void decode(const Queue& queue, Decoding d) {
  const index_t length = d.keys.rows > d.queries.rows ? d.keys.rows : d.queries.rows;
  const index_t heads = least(d.group, kDecodingSlots);
  // Queries alone do not wait for each other.
  d.positions = d.keys.rows ? length : kDecodingSlots / heads;
  const auto run = [&](auto kernel, int columns) {
    const index_t slices = ceil_div(d.n_values, index_t(columns) * kWarp);
    const index_t blocks =
        length ? d.batch * d.key_heads * slices * ceil_div(length, d.positions) : 0;
    const std::size_t bytes = sizeof(float) * kDecodingWarps * kDecodingSlots *
                                  std::size_t(columns * kWarp + kDecodingAhead) +
                              4 * kDecodingSlots;
    launch(queue, "decode", kernel, blocks, kDecodingThreads, bytes, d);
  };
  const bool half = d.half;
  if (d.n_values <= kWarp)
    return half ? run(decode_kernel<std::uint16_t, 1>, 1) : run(decode_kernel<float, 1>, 1);
  half ? run(decode_kernel<std::uint16_t, 2>, 2) : run(decode_kernel<float, 2>, 2);
}

}  // namespace lshkit::cuda

#pragma once
// The sum verb for codes of one byte in the order of the rows: causal, or from the end, which is
// the gradient of the values of a causal sum. Tables and staging as in byte_sum.cuh, of fewer rows
// at a time; a warp that adds four keys also reads what their queries see, and sums it over its
// hashes by shuffles.
//
// Per token and hash of 64 columns: 10 wavefronts of shared memory (4 to add, 2 to query, 2 of
// shuffles and 2 for codes, values and sums), and 35 instructions of the warp that adds, counted in
// the machine code for sm_90: with three such warps, on schedulers of their own, 12 clocks. The
// bound is these.
#include "lshkit/cuda/byte_stage.cuh"

namespace lshkit::cuda {

constexpr int kOrderedChunk = 120;  // rows between two barriers

inline index_t byte_sum_ordered_shared_bytes(int hashes, int warps) {
  const int pairs = warps * (kWarp / hashes);
  return index_t(warps) * kTableBytes + 4 * index_t(kOrderedChunk) * hashes +
         16 * index_t(byte_value_step(kOrderedChunk)) * pairs + 16 * kOrderedChunk * pairs;
}

// Four rows: the codes of keys and queries, and the values.
struct OrderedGroup {
  std::uint32_t key, query;
  Quad two[2];

  __device__ __forceinline__ void load(const std::uint32_t* keys, const std::uint32_t* queries,
                                       const Two* values) {
    key = *keys;
    query = *queries;
    two[0] = load_quad(values);
    two[1] = load_quad(values + 2);
  }
};

// Adds four keys to a lane's cells and returns, in the order of the rows, what their queries see.
// Loads another group meanwhile.
template <bool Reversed>
__device__ __forceinline__ void add_and_read_group(unsigned char* tables, std::uint32_t low,
                                                   const OrderedGroup& group, bool more,
                                                   OrderedGroup& next, const std::uint32_t* keys,
                                                   const std::uint32_t* queries, const Two* values,
                                                   float* seen) {
  std::uint32_t cell[4], asked[4];
  Two old[4], value[4], sum[4], y[4];
  LSHKIT_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int k = Reversed ? 3 - i : i;
    cell[i] = cell_of(group.key, low, k);
    asked[i] = cell_of(group.query, low, k);
    const Quad& two = group.two[k / 2];
    value[i] = {float_of_bits(two.word[k % 2 * 2]), float_of_bits(two.word[k % 2 * 2 + 1])};
  }
  LSHKIT_UNROLL
  for (int i = 0; i < 4; ++i) old[i] = load_two(tables + cell[i]);
  LSHKIT_UNROLL
  for (int i = 0; i < 4; ++i) y[i] = load_two(tables + asked[i]);
  if (more) next.load(keys, queries, values);
  LSHKIT_UNROLL
  for (int i = 0; i < 4; ++i) {
    sum[i] = value[i];
    LSHKIT_UNROLL
    for (int before = 0; before < i; ++before)
      if (cell[before] == cell[i]) {
        sum[i].x += value[before].x;
        sum[i].y += value[before].y;
      }
    LSHKIT_UNROLL
    for (int before = 0; before <= i; ++before)
      if (cell[before] == asked[i]) {
        y[i].x += value[before].x;
        y[i].y += value[before].y;
      }
  }
  LSHKIT_UNROLL
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<Two*>(tables + cell[i]) = {old[i].x + sum[i].x, old[i].y + sum[i].y};
    const int k = Reversed ? 3 - i : i;
    seen[2 * k] = y[i].x;
    seen[2 * k + 1] = y[i].y;
  }
}

// The sums over the lanes of equal lane / Hashes of 2 * Count numbers: a lane gets that of the
// number whose bits, from the last, are those of the lane from Bit on. Steps are templates, as
// those of transform_registers.
template <int Hashes, int Count, int Bit = 1>
__device__ __forceinline__ float sum_over_lanes(float* x) {
  const bool upper = lane_index() & Bit;
  LSHKIT_UNROLL
  for (int i = 0; i < Count; ++i) {
    const float mine = upper ? x[i + Count] : x[i], other = upper ? x[i] : x[i + Count];
    x[i] = mine + __shfl_xor_sync(kAllLanes, other, Bit);
  }
  if constexpr (Count > 1) return sum_over_lanes<Hashes, Count / 2, Bit * 2>(x);
  if constexpr (2 * Bit < Hashes) x[0] += __shfl_xor_sync(kAllLanes, x[0], 2 * Bit);
  return x[0];
}

// A chunk: words (quads, Hashes), values (kOrderedChunk) of the lane's pair, sums to (rows, kPairs)
// pairs, of which `to` is the lane's of the first row. Those of eight rows are summed while the
// tables answer for the next eight: five shuffles that wait for each other take longer than that.
template <int Hashes, bool Reversed>
__device__ __forceinline__ void add_and_read_chunk(unsigned char* tables, std::uint32_t low,
                                                   bool live, const std::uint32_t* keys,
                                                   const std::uint32_t* queries, const Two* values,
                                                   float* to, int row_step) {
  constexpr int kQuads = kOrderedChunk / 4;
  static_assert(kQuads % 2 == 0);
  const int part = lane_index() % Hashes;
  // Of the number that the lane has the sum of: the quad of two, the row of four, the column.
  const int half = part & 1, row = (part & 2) | (part >> 2 & 1), column = part >> 3 & 1;
  to += row * row_step + column;
  const auto at = [](int n) { return Reversed ? kQuads - 1 - n : n; };
  const auto store = [&](int n, float* seen) {
    const float sum = sum_over_lanes<Hashes, 8>(seen);
    if (part < 16) to[4 * at(n + half) * row_step] = sum;
  };
  OrderedGroup a, b;
  a.load(keys + at(0) * Hashes, queries + at(0) * Hashes, values + 4 * at(0));
  float before[16];
  for (int n = 0; n < kQuads; n += 2) {
    float seen[16];
    const int second = at(n + 1), next = at(n + 2);
    add_and_read_group<Reversed>(tables, low, a, true, b, keys + second * Hashes,
                                 queries + second * Hashes, values + 4 * second, seen);
    if (n > 0) store(n - 2, before);
    add_and_read_group<Reversed>(tables, low, b, n + 2 < kQuads, a, keys + next * Hashes,
                                 queries + next * Hashes, values + 4 * next, seen + 8);
    LSHKIT_UNROLL
    for (int i = 0; i < 16; ++i) before[i] = live ? seen[i] : 0.0f;
  }
  store(kQuads - 2, before);
}

// One block: one slice of columns of one head of one sequence.
template <int Hashes, int Warps, bool Reversed>
__global__ void __launch_bounds__(kByteThreads, 1) byte_sum_ordered_kernel(BucketSum<float> a) {
  using Stage = ByteStage<Hashes, Warps, kOrderedChunk>;
  constexpr int kPairs = Stage::kPairs, kColumns = 2 * kPairs, kPairsOfWarp = kWarp / Hashes;
  constexpr int kWordsOfChunk = Stage::kWordsOfChunk, kValuesOfChunk = Stage::kValuesOfChunk;
  constexpr int kSumsOfChunk = kOrderedChunk * kPairs;
  LSHKIT_SHARED_MEMORY(memory);
  std::uint32_t* const keys = reinterpret_cast<std::uint32_t*>(memory + Warps * kTableBytes);
  std::uint32_t* const queries = keys + 2 * kWordsOfChunk;
  Two* const values = reinterpret_cast<Two*>(queries + 2 * kWordsOfChunk);
  Two* const sums = values + 2 * kValuesOfChunk;  // [2] (rows, kPairs)
  const int thread = thread_index(), lane = lane_index();
  const int warp = __shfl_sync(kAllLanes, warp_index(), 0);  // known to be the same in all lanes
  const bool stages = warp >= Warps;
  const int stager = thread - kWarp * Warps;

  const index_t slices = ceil_div(a.columns(), kColumns);
  const index_t task = block_index() / slices;
  const Span query = span_of(a.query, a.query_heads, task);
  const Span key = span_of(a.key, a.query_heads, task);
  const index_t first_column = block_index() % slices * kColumns;
  const index_t query_chunks = ceil_div(query.count, kOrderedChunk);
  const index_t key_chunks = ceil_div(key.count, kOrderedChunk);
  const index_t chunks = Reversed && key_chunks > query_chunks ? key_chunks : query_chunks;
  const auto chunk_at = [&](index_t step) { return Reversed ? chunks - 1 - step : step; };

  for (index_t first_hash = 0; first_hash < a.n_hashes; first_hash += Hashes) {
    const int hashes = int(least(Hashes, a.n_hashes - first_hash));
    const bool first = first_hash == 0, last = first_hash + Hashes >= a.n_hashes;
    const Stage stage{a, key, first_hash, first_column, hashes};
    // Codes of no bucket: keys have a row that nobody reads, queries one that nobody writes.
    const auto stage_chunk = [&](index_t step, int buffer) {
      const index_t from = chunk_at(step) * kOrderedChunk;
      stage.codes(a.key_codes, key, from, stager, keys + buffer * kWordsOfChunk, 254);
      stage.codes(a.query_codes, query, from, stager, queries + buffer * kWordsOfChunk, 255);
      stage.values(from, stager, values + buffer * kValuesOfChunk);
    };
    const auto store_chunk = [&](index_t step) {
      const index_t from = chunk_at(step) * kOrderedChunk;
      for (int item = stager; item < kSumsOfChunk; item += Stage::kStagers) {
        const index_t i = from + item / kPairs, column = first_column + item % kPairs * 2;
        if (i < query.count && column < a.columns())
          store_sums(a, query, i, column, sums[step % 2 * kSumsOfChunk + item], first, last);
      }
    };
    __syncthreads();
    for (int i = thread; i < Warps * kTableBytes / 16; i += kByteThreads)
      store_quad(memory + 16 * i, {{0, 0, 0, 0}});
    if (stages && chunks > 0) stage_chunk(0, 0);
    __syncthreads();
    for (index_t step = 0; step < chunks; ++step) {
      const int buffer = int(step % 2);
      if (stages) {
        if (step + 1 < chunks) stage_chunk(step + 1, 1 - buffer);
        if (step > 0) store_chunk(step - 1);
      } else {
        const int pair = warp * kPairsOfWarp + lane / Hashes;
        add_and_read_chunk<Hashes, Reversed>(
            memory, std::uint32_t(8 * lane + warp * kTableBytes), lane % Hashes < hashes,
            keys + buffer * kWordsOfChunk + lane % Hashes,
            queries + buffer * kWordsOfChunk + lane % Hashes,
            values + buffer * kValuesOfChunk + pair * Stage::kValueStep,
            reinterpret_cast<float*>(sums + buffer * kSumsOfChunk + pair), kColumns);
      }
      __syncthreads();
    }
    if (stages && chunks > 0) store_chunk(chunks - 1);
  }
}

inline bool byte_sum_ordered(const Queue& queue, const BucketSum<float>& a, index_t sequences,
                             index_t shared_limit) {
  if (a.n_buckets == 255) return false;  // rows 254 and 255 are spare where not all are used
  const ByteSumPlan p = plan_byte_sum(a, shared_limit, byte_sum_ordered_shared_bytes);
  if (p.warps == 0) return false;
  with_layout(p, [&](auto hashes, auto warps) {
    const auto kernel = a.order == Order::reversed
                            ? byte_sum_ordered_kernel<hashes.value, warps.value, true>
                            : byte_sum_ordered_kernel<hashes.value, warps.value, false>;
    launch(queue, "bucket_sum", kernel,
           sequences * a.query_heads * ceil_div(a.columns(), p.columns), kByteThreads,
           std::size_t(p.shared_bytes), a);
  });
  return true;
}

}  // namespace lshkit::cuda

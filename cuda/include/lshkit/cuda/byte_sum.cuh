#pragma once
// The sum verb for codes of one byte, keys in any order: the forward of hard codes and, transposed,
// the gradient of the values. bucket_sum.cuh has every other case.
//
// A block has some columns of the tables of up to 32 hashes in shared memory. A table belongs to a
// warp: 256 bytes a bucket, two columns of one hash a lane, so that whatever the codes are the half
// warps of an 8-byte access touch 32 banks. Of the 8 warps up to three add, the rest bring the next
// chunk of codes and values; then all of them query.
//
// The bound is shared memory, one wavefront of 128 bytes a clock and multiprocessor. Per token and
// hash of 64 columns, at 6 columns a block, in wavefronts, and in instructions of a warp counted in
// the machine code for sm_90, of which four go in a clock:
//
//             tables                   codes, values, sums    sum   instructions
//   add       2 read, 2 written        0.25 + 0.5 + 0.9       5.7   12.3 to add, 4 to stage
//   query     2                        0.2 + 0.5              2.7   5.4
//
// The last number of a line stands for global loads and stores as well, a line of 128 bytes each
// taken for a wavefront. Of these 8.4 wavefronts 6 are the 768 bytes of the tables. A warp that
// adds issues 49 instructions for 4 keys, and the next 4 wait until the tables have answered, which
// is about as long as the three warps' 68 wavefronts take. What equal codes of the 4 have in common
// is summed before the answer, so that there is one addition between a load and its store. With 8
// keys at a time no answer is waited for, but their comparisons take 146 instructions for 136
// wavefronts.
//
// Device memory and L2: each of the 11 slices of 64 columns reads all codes (32 bytes a token) and
// a sector or two of its row of values, and writes 24 bytes of its sums: some 150 bytes a token,
// slice and pass, 10 GB at n = 65536 and 96 heads. Blocks: heads * 11, whatever the length: fewer
// than 12 heads leave multiprocessors without work.
#include "lshkit/cuda/byte_stage.cuh"

namespace lshkit::cuda {

constexpr int kByteChunk = 240;  // keys between two barriers
static_assert(kByteChunk % (2 * kByteKeys) == 0 && kByteKeys % 4 == 0);

inline index_t byte_sum_shared_bytes(int hashes, int warps) {
  return index_t(warps) * kTableBytes + 2 * index_t(kByteChunk) * hashes +
         2 * index_t(byte_value_step(kByteChunk)) * 8 * warps * (kWarp / hashes);
}

// Of a group of keys: codes and values.
struct KeyGroup {
  std::uint32_t word[kByteKeys / 4];
  Quad two[kByteKeys / 2];

  template <int Hashes>
  __device__ __forceinline__ void load(const std::uint32_t* words, const Two* values) {
    LSHKIT_UNROLL
    for (int q = 0; q < kByteKeys / 4; ++q) word[q] = words[q * Hashes];
    LSHKIT_UNROLL
    for (int k = 0; k < kByteKeys / 2; ++k) two[k] = load_quad(values + 2 * k);
  }
};

// Adds a group to a lane's cells, in the order of the keys, and loads another one meanwhile. All
// cells are read before any is written: what keys before it in the same cell bring is added to a
// key first.
template <int Hashes>
__device__ __forceinline__ void add_group(unsigned char* tables, std::uint32_t low,
                                          const KeyGroup& group, bool more, KeyGroup& next,
                                          const std::uint32_t* words, const Two* values) {
  constexpr int K = kByteKeys;
  std::uint32_t cell[K];
  Two old[K], value[K], sum[K];
  LSHKIT_UNROLL
  for (int k = 0; k < K; ++k) cell[k] = cell_of(group.word[k / 4], low, k % 4);
  LSHKIT_UNROLL
  for (int k = 0; k < K; ++k) {
    old[k] = load_two(tables + cell[k]);
    const Quad& two = group.two[k / 2];
    value[k] = {float_of_bits(two.word[k % 2 * 2]), float_of_bits(two.word[k % 2 * 2 + 1])};
  }
  if (more) next.load<Hashes>(words, values);
  LSHKIT_UNROLL
  for (int k = 0; k < K; ++k) {
    sum[k] = value[k];
    LSHKIT_UNROLL
    for (int before = 0; before < k; ++before)
      if (cell[before] == cell[k]) {
        sum[k].x += value[before].x;
        sum[k].y += value[before].y;
      }
  }
  LSHKIT_UNROLL
  for (int k = 0; k < K; ++k)
    *reinterpret_cast<Two*>(tables + cell[k]) = {old[k].x + sum[k].x, old[k].y + sum[k].y};
}

// A chunk: words (quads, Hashes) of the codes of four keys, values (kByteChunk) of a pair; both
// are complete, with zeros for keys that are not there.
template <int Hashes>
__device__ __forceinline__ void add_chunk_of_bytes(unsigned char* tables, std::uint32_t low,
                                                   const std::uint32_t* words, const Two* values,
                                                   int count) {
  constexpr int K = kByteKeys, kStep = K / 4 * Hashes;
  KeyGroup a, b;
  a.load<Hashes>(words, values);
  for (int t = 0; t < count; t += 2 * K) {
    add_group<Hashes>(tables, low, a, true, b, words + kStep, values + K);
    words += 2 * kStep;
    values += 2 * K;
    add_group<Hashes>(tables, low, b, t + 2 * K < count, a, words, values);
  }
}

// The codes of a query in the order in which a lane takes them: of each 16 hashes, those of the 16
// lanes of a half warp are in different banks at every step.
template <int Hashes>
struct QueryCodes {
  std::uint32_t word[Hashes / 4];

  __device__ void load(const std::uint8_t* row, int hashes, bool aligned) {
    if (aligned && hashes == Hashes) {
      LSHKIT_UNROLL
      for (int w = 0; w < Hashes / 4; w += 4) {
        const Quad four = load_quad(row + 4 * w);
        LSHKIT_UNROLL
        for (int k = 0; k < 4; ++k) word[w + k] = four.word[k];
      }
    } else {
      LSHKIT_UNROLL
      for (int w = 0; w < Hashes / 4; ++w) word[w] = gather_code_word(row, 4 * w, hashes);
    }
  }
  __device__ void turn(int lane) {
    const std::uint32_t rotation = 0x32103210u >> 4 * (lane & 3) & 0xffff;
    LSHKIT_UNROLL
    for (int w = 0; w < Hashes / 4; w += 4) {
      LSHKIT_UNROLL
      for (int step = 1; step < 4; step *= 2) LSHKIT_UNROLL
      for (int k = 0; k < 4; ++k)
        if (!(k & step)) {
          const std::uint32_t a = word[w + k], b = word[w + k + step];
          word[w + k] = lane >> 2 & step ? b : a;
          word[w + k + step] = lane >> 2 & step ? a : b;
        }
      LSHKIT_UNROLL
      for (int k = 0; k < 4; ++k) word[w + k] = select_bytes(word[w + k], 0, rotation);
    }
  }
};

// One block: one slice of columns of one head of one sequence.
template <int Hashes, int Warps>
__global__ void __launch_bounds__(kByteThreads, 1) byte_sum_kernel(BucketSum<float> a) {
  using Stage = ByteStage<Hashes, Warps, kByteChunk>;
  constexpr int kPairs = Stage::kPairs, kColumns = 2 * kPairs;
  constexpr int kWordsOfChunk = Stage::kWordsOfChunk, kValuesOfChunk = Stage::kValuesOfChunk;
  LSHKIT_SHARED_MEMORY(memory);
  std::uint32_t* const words = reinterpret_cast<std::uint32_t*>(memory + Warps * kTableBytes);
  Two* const values = reinterpret_cast<Two*>(words + 2 * kWordsOfChunk);
  const int thread = thread_index(), lane = lane_index();
  const int warp = __shfl_sync(kAllLanes, warp_index(), 0);  // known to be the same in all lanes

  const index_t slices = ceil_div(a.columns(), kColumns);
  const index_t task = block_index() / slices;
  const Span query = span_of(a.query, a.query_heads, task);
  const Span key = span_of(a.key, a.query_heads, task);
  const index_t first_column = block_index() % slices * kColumns;
  const index_t chunks = ceil_div(key.count, kByteChunk);
  const std::uint8_t* const query_codes = static_cast<const std::uint8_t*>(a.query_codes);
  const bool query_aligned =
      a.n_hashes % 16 == 0 && reinterpret_cast<std::uintptr_t>(query_codes) % 16 == 0;

  for (index_t first_hash = 0; first_hash < a.n_hashes; first_hash += Hashes) {
    const int hashes = int(least(Hashes, a.n_hashes - first_hash));
    const bool first = first_hash == 0, last = first_hash + Hashes >= a.n_hashes;
    const Stage stage{a, key, first_hash, first_column, hashes};
    const auto stage_chunk = [&](index_t chunk, int buffer) {
      stage.codes(a.key_codes, key, chunk * kByteChunk, thread - kWarp * Warps,
                  words + buffer * kWordsOfChunk);
      stage.values(chunk * kByteChunk, thread - kWarp * Warps, values + buffer * kValuesOfChunk);
    };
    __syncthreads();
    for (int i = thread; i < Warps * kTableBytes / 16; i += kByteThreads)
      store_quad(memory + 16 * i, {{0, 0, 0, 0}});
    if (warp >= Warps && chunks > 0) stage_chunk(0, 0);
    __syncthreads();
    for (index_t chunk = 0; chunk < chunks; ++chunk) {
      const int buffer = int(chunk % 2);
      if (warp >= Warps) {
        if (chunk + 1 < chunks) stage_chunk(chunk + 1, 1 - buffer);
      } else if (lane % Hashes < hashes) {  // the tables of no hash stay zero
        add_chunk_of_bytes<Hashes>(
            memory, std::uint32_t(8 * lane + warp * kTableBytes),
            words + buffer * kWordsOfChunk + lane % Hashes,
            values + buffer * kValuesOfChunk +
                (warp * (kWarp / Hashes) + lane / Hashes) * Stage::kValueStep,
            int(least(kByteChunk, key.count - chunk * kByteChunk)));
      }
      __syncthreads();
    }
    // What codes of no bucket have brought, nobody gets.
    const int rest = 64 * int(256 - a.n_buckets);
    for (int i = thread; i < Warps * rest; i += kByteThreads)
      reinterpret_cast<float*>(memory + (i / rest + 1) * kTableBytes)[i % rest - rest] = 0;
    if (rest > 0) __syncthreads();

    // A lane has a query; the chunks' memory is free for its sums.
    std::uint32_t low[16];
    LSHKIT_UNROLL
    for (int k = 0; k < 16; ++k)
      low[k] = std::uint32_t(32 * ((k / 4) ^ (lane >> 2 & 3)) + 8 * ((k + lane) & 3));
    Two* const sums = reinterpret_cast<Two*>(words) + warp * kWarp * kPairs;
    const auto load = [&](QueryCodes<Hashes>& codes, index_t base) {
      const index_t i = least(base + lane, query.count - 1);
      codes.load(query_codes + (query.flat + i) * a.n_hashes + first_hash, hashes, query_aligned);
    };
    QueryCodes<Hashes> codes, next;
    if (warp * kWarp < query.count) load(next, warp * kWarp);
    for (index_t base = warp * kWarp; base < query.count; base += kByteThreads) {
      codes = next;
      if (base + kByteThreads < query.count) load(next, base + kByteThreads);
      codes.turn(lane);
      Two sum[kPairs] = {};
      LSHKIT_UNROLL
      for (int h = 0; h < Hashes; ++h) {
        const std::uint32_t cell = cell_of(codes.word[h / 4], low[h % 16], h % 4);
        LSHKIT_UNROLL
        for (int p = 0; p < kPairs; ++p) {
          const Two bucket = load_two(memory + cell + p / (kWarp / Hashes) * kTableBytes +
                                      8 * (p % (kWarp / Hashes) * Hashes + h / 16 * 16));
          sum[p].x += bucket.x;
          sum[p].y += bucket.y;
        }
      }
      // Neighbouring lanes write what is side by side.
      __syncwarp();
      LSHKIT_UNROLL
      for (int p = 0; p < kPairs; ++p) sums[lane * kPairs + p] = sum[p];
      __syncwarp();
      LSHKIT_UNROLL
      for (int n = 0; n < kPairs; ++n) {
        const int item = n * kWarp + lane;
        const index_t i = base + item / kPairs, column = first_column + item % kPairs * 2;
        if (i >= query.count || column >= a.columns()) continue;
        store_sums(a, query, i, column, sums[item], first, last);
      }
    }
  }
}

inline bool byte_sum(const Queue& queue, const BucketSum<float>& a, index_t sequences,
                     index_t shared_limit) {
  const ByteSumPlan p = plan_byte_sum(a, shared_limit, byte_sum_shared_bytes);
  if (p.warps == 0) return false;
  with_layout(p, [&](auto hashes, auto warps) {
    launch(queue, "bucket_sum", byte_sum_kernel<hashes.value, warps.value>,
           sequences * a.query_heads * ceil_div(a.columns(), p.columns), kByteThreads,
           std::size_t(p.shared_bytes), a);
  });
  return true;
}

}  // namespace lshkit::cuda

#pragma once
// The lower bound's gradient on the tensor cores: what the kernels of buckets read and write, and
// the order they are queued in. Rows are packed once as 16-bit tiles of 64 columns; hashes are
// sorted for many heads at once; then the buckets of as many heads, or hashes of one head, as there
// is room for contributions, and their sums. More than 11 bits of a code: bucket_gradient.cuh.
//
// Scratch, of every row of queries and of every row of keys: 128 bytes for each 64 columns of unit
// vectors and of factors. Besides, at most kSortRoom and kContributionRoom bytes, or what one head
// and one hash take where that is more.
//
// Contributions are written and read once, through device memory. Groups that fit the L2 cache have
// been counted: at 4096 tokens they save 0.5 ms of an H100's backward pass and add some 700
// launches, 1.5 ms.
#include "lshkit/cuda/bucket_gradient_block.cuh"
#include "lshkit/cuda/bucket_gradient_crowded.cuh"
#include "lshkit/cuda/bucket_gradient_pairs.cuh"

namespace lshkit::cuda {

constexpr index_t kSortRoom = index_t(192) << 20;
constexpr index_t kContributionRoom = index_t(576) << 20;
constexpr index_t kMatrixHashes = 32;  // sorted together at most
constexpr int kPackThreads = 256, kPackRows = 128, kScaleThreads = 512, kSlotSumThreads = 256;

// Rows of 16-bit numbers, tile by tile of 64 columns, zeros beyond the last.
struct PackRows {
  Elements x;
  index_t batch = 1, heads = 1, n_rows = 0, columns = 0, tiles = 1;
  const float* inverse = nullptr;       // x times that, by row, or null
  const std::uint8_t* valid = nullptr;  // zeros where not, or null
  bool ones = false;                    // two more columns
  const float* extra = nullptr;         // or of these, by row: rounded, then what that left
  int significand = 8;                  // bits that they are rounded to
  const float* scale = nullptr;         // by head, or null
  std::uint16_t* to = nullptr;          // (tiles, batch, heads, n_rows, 64)

  __device__ float at(index_t batch_of, index_t head, index_t row, index_t flat, index_t c) const {
    if (c < columns)
      return load_element<float>(x.data, batch_of * x.batch + head * x.head + row * x.row + c,
                                 x.element);
    if (c > columns + 1 || !(extra || ones)) return 0;
    if (!extra) return 1;
    const float most = rounded(extra[flat], significand);
    return c == columns ? most : extra[flat] - most;
  }
};

// A thread packs eight columns of a row. Eights: rows allow it to load 16 bytes at a time.
template <Element E, bool Eights>
__global__ void __launch_bounds__(kPackThreads) pack_rows_kernel(PackRows a) {
  // In 32 bits, as the blocks are numbered.
  const unsigned block = unsigned(block_index()), chunks = unsigned(ceil_div(a.n_rows, kPackRows));
  const unsigned chunk = block % chunks, heads = unsigned(a.batch * a.heads);
  const unsigned head = block / chunks % heads, tile = block / chunks / heads;
  const unsigned batch_of = head / unsigned(a.heads), head_of = head - batch_of * unsigned(a.heads);
  const int piece = thread_index() % kPieces;
  const index_t first = index_t(tile) * kTileColumns + 8 * piece;
  const float scale = a.scale ? a.scale[head] : 1;
  std::uint16_t* const to = a.to + index_t(tile) * heads * a.n_rows * kTileColumns;
  LSHKIT_UNROLL
  for (int pass = 0; pass < kPackRows * kPieces / kPackThreads; ++pass) {
    const index_t row =
        index_t(chunk) * kPackRows + pass * (kPackThreads / kPieces) + thread_index() / kPieces;
    if (row >= a.n_rows) return;
    const index_t flat = head * a.n_rows + row;
    Words4 packed{{0, 0, 0, 0}};
    if (!a.valid || a.valid[flat]) {
      const float by = a.inverse ? a.inverse[flat] : scale;
      float x[8];
      if (Eights && first < a.columns) {
        load_eight(a.x.data, batch_of * a.x.batch + head_of * a.x.head + row * a.x.row + first,
                   a.x.element, x);
      } else {
        LSHKIT_UNROLL
        for (int k = 0; k < 8; ++k) x[k] = a.at(batch_of, head_of, row, flat, first + k);
      }
      LSHKIT_UNROLL
      for (int k = 0; k < 4; ++k) packed.w[k] = pack<E>(x[2 * k] * by, x[2 * k + 1] * by);
    }
    store_four(to + flat * kTileColumns + 8 * piece, packed);
  }
}

// A power of two for a head's rows that brings the largest finite number into [most / 2, most), for
// float16. A block a head. Two blocks a multiprocessor: for more the compiler would spill.
LSHKIT_KERNEL void __launch_bounds__(kScaleThreads, 2)
    head_scale_kernel(PackRows a, int most_bits, bool only_down, float* scale) {
  LSHKIT_SHARED_MEMORY(memory);
  float* const of_warp = reinterpret_cast<float*>(memory);
  const index_t head = block_index(), columns = a.columns + (a.extra || a.ones ? 2 : 0);
  const index_t batch_of = head / a.heads, head_of = head - batch_of * a.heads;
  float largest = 0;
  for (index_t c = lane_index(); c < columns; c += kWarp) {
#ifdef __CUDACC__
#pragma unroll 4
#endif
    for (index_t row = warp_index(); row < a.n_rows; row += kScaleThreads / kWarp) {
      const index_t flat = head * a.n_rows + row;
      const bool taken = !a.valid || a.valid[flat];
      const float x = taken ? fabsf(a.at(batch_of, head_of, row, flat, c)) : 0;
      if (is_finite(x) && x > largest) largest = x;
    }
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const float x = __shfl_xor_sync(kAllLanes, largest, step);
    largest = x > largest ? x : largest;
  }
  if (lane_index() == 0) of_warp[warp_index()] = largest;
  __syncthreads();
  if (thread_index() != 0) return;
  for (int w = 1; w < kScaleThreads / kWarp; ++w)
    largest = of_warp[w] > largest ? of_warp[w] : largest;
  const int exponent = int(bits_of_float(largest) >> 23) - 126;  // largest < 2^exponent
  int shift = largest > 0 ? most_bits - exponent : 0;
  if (only_down && shift > 0) shift = 0;
  shift = shift > 100 ? 100 : shift < -100 ? -100 : shift;
  scale[head] = float_of_bits(std::uint32_t(127 + shift) << 23);
}

// out (rows, columns) = or += the contributions of all slots to 64 of its columns, in order. A
// thread has 8 columns of a row.
struct SumContributions {
  const unsigned char* from = nullptr;  // (slots, units' rows, 64)
  index_t slots = 0, n_rows = 0, units = 0, first_unit = 0;
  Side side;
  index_t query_heads = 1, sequences = 1;
  const std::uint8_t* valid = nullptr;  // of the side's own heads: 0 had no contribution
  float* out = nullptr;                 // (all units' rows, columns)
  index_t columns = 0, first_column = 0;
  bool add = false;
};

// Those of queries, then those of keys.
struct SumBothSides {
  SumContributions queries, keys;
};
inline index_t sum_blocks(const SumContributions& a) {
  return ceil_div(a.units * a.n_rows * kPieces, kSlotSumThreads);
}

template <Element E>
__global__ void __launch_bounds__(kSlotSumThreads)
    sum_contributions_kernel(SumBothSides sides, index_t query_blocks) {
  constexpr int kQuads = kContributionBytes<E> / 128;
  const bool of_queries = block_index() < query_blocks;
  const SumContributions& a = of_queries ? sides.queries : sides.keys;
  const index_t block = block_index() - (of_queries ? 0 : query_blocks);
  const index_t at = block * kSlotSumThreads + thread_index(), local = at / kPieces;
  const int piece = int(at % kPieces);
  if (local >= a.units * a.n_rows) return;
  const index_t unit = a.first_unit + local / a.n_rows, row = local % a.n_rows;
  const index_t flat =
      (unit / a.query_heads * a.side.heads + unit % a.query_heads / a.side.group) * a.n_rows + row;
  const index_t first = a.first_column + 8 * piece, step = a.units * a.n_rows;
  float* const out = a.out + (unit * a.n_rows + row) * a.columns + first;
  const bool by_four = a.columns % 4 == 0;  // rows start at multiples of 16 bytes
  const auto inside = [&](int c) { return first + c < a.columns; };
  float sum[8] = {};
  if (a.add)
    for (int c = 0; c < 8; ++c)
      if (inside(c)) sum[c] = out[c];
  const index_t* const starts = a.side.starts;
  if (a.valid[flat] && (!starts || (row >= starts[0] && row < starts[a.sequences]))) {
    const unsigned char* from =
        a.from + local * kContributionBytes<E> + piece * (kContributionBytes<E> / kPieces);
#ifdef __CUDACC__
#pragma unroll 4
#endif
    for (index_t s = 0; s < a.slots; ++s, from += step * kContributionBytes<E>) {
      LSHKIT_UNROLL
      for (int quad = 0; quad < kQuads; ++quad) {
        const Words4 x = load_streaming(from + 16 * quad);
        LSHKIT_UNROLL
        for (int w = 0; w < 4; ++w) {
          if (kQuads == 2) {
            sum[4 * quad + w] += float_of_bits(x.w[w]);
          } else {
            sum[2 * w] += float_of_bits(x.w[w] << 16);
            sum[2 * w + 1] += float_of_bits(x.w[w] & 0xffff0000u);
          }
        }
      }
    }
  }
  LSHKIT_UNROLL
  for (int quad = 0; quad < 2; ++quad) {
    const int c = 4 * quad;
    if (by_four && inside(c + 3))
      store_four(out + c, {{bits_of_float(sum[c]), bits_of_float(sum[c + 1]),
                            bits_of_float(sum[c + 2]), bits_of_float(sum[c + 3])}});
    else
      for (int i = 0; i < 4; ++i)
        if (inside(c + i)) out[c + i] = sum[c + i];
  }
}

// One side of the whole problem.
struct MatrixProblemSide {
  Side side;
  index_t batch = 1;
  const std::uint8_t* valid = nullptr;
  const void* codes = nullptr;
  Elements x;  // queries or keys
  const float* inverse = nullptr;
  Elements factor;            // g, rows of all heads of queries, or v
  float* gradient = nullptr;  // (batch, query heads, n_rows, n_features)

  index_t rows() const { return batch * side.heads * side.n_rows; }  // its own
};

struct MatrixProblem {
  MatrixProblemSide queries, keys;
  index_t query_heads = 1, sequences = 1;  // of a batch, or packed
  index_t n_features = 0, n_values = 0, n_hashes = 1;
  int code_bytes = 1, bits = 1;
  bool biased = false;  // also where scratch is measured and there is no bias yet
  const float* bias = nullptr;
  bool causal = false;
  float scale = 1;
  Element element = Element::bfloat16;
  int crowded = kCrowdedRows;                     // tests have less
  index_t most_staged = GroupSort().most_staged;  // likewise

  // Whether the values lie as they would once they are packed.
  bool packed(const MatrixProblemSide& s) const {
    const Elements& x = s.factor;
    return &s == &keys && !biased && element == Element::bfloat16 && x.element == element &&
           n_values == kTileColumns && x.row == kTileColumns && x.head == s.side.n_rows * x.row &&
           (s.batch == 1 || x.batch == s.side.heads * x.head) && rows_of_eights(x, n_values);
  }

  index_t units() const { return queries.batch * query_heads; }
  index_t unit_tiles() const { return ceil_div(n_features, kTileColumns); }
  index_t factor_tiles() const { return ceil_div(n_values + (biased ? 2 : 0), kTileColumns); }
  index_t contribution_bytes() const { return element == Element::float16 ? 256 : 128; }
  bool empty() const {
    return units() == 0 || n_features == 0 || n_hashes == 0 ||
           (queries.side.n_rows == 0 && keys.side.n_rows == 0);
  }
};

// How many heads and hashes go together.
struct MatrixGroups {
  index_t sort_hashes, sort_units, slots, units;
  explicit MatrixGroups(const MatrixProblem& p) {
    const index_t rows = p.queries.side.n_rows + p.keys.side.n_rows;
    const auto parts = [](index_t of, index_t most) {  // about as many in each
      most = most < 1 ? 1 : least(most, of);
      return ceil_div(of, ceil_div(of, most));
    };
    sort_hashes = parts(p.n_hashes, kMatrixHashes);
    const index_t sorted = 6 * rows + 8 * p.sequences * ((index_t(1) << p.bits) + 1);
    sort_units = parts(p.units(), kSortRoom / (sorted * sort_hashes));
    const index_t tiles = p.factor_tiles() ? p.factor_tiles() : 1;  // none: values of no columns
    const index_t written = (rows ? rows : 1) * p.contribution_bytes() * tiles;
    slots = parts(sort_hashes, kContributionRoom / written);
    units = slots < sort_hashes ? 1 : parts(sort_units, kContributionRoom / (written * slots));
  }
};

struct MatrixScratch {
  struct OfSide {
    std::uint16_t *unit = nullptr, *factor = nullptr, *buckets = nullptr;
    std::int32_t *order = nullptr, *starts = nullptr;
    float* scale = nullptr;
    unsigned char* contributions = nullptr;
  } queries, keys;

  MatrixScratch() = default;
  MatrixScratch(Cut& cut, const MatrixProblem& p) {
    if (p.empty()) return;
    const MatrixGroups n(p);
    const auto take = [&](const MatrixProblemSide& s) {
      OfSide to;
      const index_t sorted = n.sort_hashes * n.sort_units;
      to.unit = cut.take<std::uint16_t>(p.unit_tiles() * s.rows() * kTileColumns);
      to.factor = cut.take<std::uint16_t>(p.factor_tiles() * s.rows() * kTileColumns);
      to.buckets = cut.take<std::uint16_t>(sorted * s.side.n_rows);
      to.order = cut.take<std::int32_t>(sorted * s.side.n_rows);
      to.starts = cut.take<std::int32_t>(sorted * p.sequences * ((index_t(1) << p.bits) + 1));
      to.scale = cut.take<float>(s.batch * s.side.heads);
      to.contributions = cut.take<unsigned char>(n.slots * p.factor_tiles() * n.units *
                                                 s.side.n_rows * p.contribution_bytes());
      return to;
    };
    queries = take(p.queries);
    keys = take(p.keys);
  }
};

template <Element E>
void pack_side(const Queue& queue, const MatrixProblem& p, const MatrixProblemSide& s,
               const MatrixScratch::OfSide& to, bool of_queries) {
  PackRows a;
  a.batch = s.batch;
  a.heads = s.side.heads;
  a.n_rows = s.side.n_rows;
  a.valid = s.valid;
  const auto run = [&] {
    const bool eights = rows_of_eights(a.x, a.columns);
    launch(queue, "pack_rows", eights ? pack_rows_kernel<E, true> : pack_rows_kernel<E, false>,
           a.tiles * a.batch * a.heads * ceil_div(a.n_rows, kPackRows), kPackThreads, 0, a);
  };
  a.x = s.x;
  a.columns = p.n_features;
  a.tiles = p.unit_tiles();
  a.inverse = s.inverse;
  a.to = to.unit;
  run();
  a.x = s.factor;
  a.columns = p.n_values;
  a.tiles = p.factor_tiles();
  a.inverse = nullptr;
  a.to = to.factor;
  a.ones = !of_queries && p.biased;
  a.extra = of_queries ? p.bias : nullptr;
  if (p.packed(s)) return;
  a.significand = significand_bits(E);
  if (E == Element::float16) {
    a.scale = to.scale;
    if (a.n_rows > 0)
      launch(queue, "head_scale", head_scale_kernel, a.batch * a.heads, kScaleThreads,
             sizeof(float) * kScaleThreads / kWarp, a, of_queries ? 8 : 0, !of_queries, to.scale);
  }
  run();
}

template <Element E>
void bucket_gradient(const Queue& queue, const MatrixProblem& p, const MatrixScratch& scratch) {
  if (p.empty()) return;
  pack_side<E>(queue, p, p.queries, scratch.queries, true);
  pack_side<E>(queue, p, p.keys, scratch.keys, false);
  const MatrixGroups most(p);
  MatrixGradient g;
  GroupSort& s = g.sort;
  const auto sort_side = [](const MatrixProblemSide& of, const MatrixScratch::OfSide& to) {
    return SortSide{of.side, of.valid, of.codes, to.buckets, to.order, to.starts};
  };
  s.queries = sort_side(p.queries, scratch.queries);
  s.keys = sort_side(p.keys, scratch.keys);
  s.query_heads = p.query_heads;
  s.sequences = p.sequences;
  s.n_hashes = p.n_hashes;
  s.code_bytes = p.code_bytes;
  s.bits = p.bits;
  s.most_staged = p.most_staged;
  g.factor_tiles = p.factor_tiles();
  g.causal = p.causal;
  g.crowded = p.crowded;
  g.scale = p.scale;
  const index_t longest =
      p.queries.side.n_rows > p.keys.side.n_rows ? p.queries.side.n_rows : p.keys.side.n_rows;
  // Of packed sequences by their mean length.
  const bool mostly_linear = longest > kPairRows * s.buckets() * p.sequences;
  g.small = mostly_linear && !p.causal;

  prefer_shared_memory(bucket_pairs_kernel<E>);
  prefer_shared_memory(bucket_linear_causal_kernel<E>);
  prefer_shared_memory(bucket_linear_kernel<E>);
  prefer_shared_memory(bucket_crowded_kernel<E>);
  const auto buckets = [&] {
    if (!g.small) {
      g.run = mostly_linear ? kWarp - 1 : 8;
      launch(queue, "bucket_pairs", bucket_pairs_kernel<E>, ceil_div(g.items(), kPairWarps),
             kPairWarps * kWarp, kPairWarps * kPairWarpBytes, g);
      if (longest <= kPairRows) return;
    }
    if (!p.causal) {
      g.run = mostly_linear ? 1 : kMostRun;
      launch(queue, "bucket_linear", bucket_linear_kernel<E>, g.items(), kBlockWarps * kWarp,
             kBlockBytes, g);
      return;
    }
    g.run = mostly_linear ? 1 : 2 * longest > kPairRows * s.buckets() * p.sequences ? 4 : 16;
    launch(queue, "bucket_linear", bucket_linear_causal_kernel<E>,
           ceil_div(g.items(), kLinearWarps), kLinearWarps * kWarp, kLinearWarps * kLinearWarpBytes,
           g);
    if (longest <= g.crowded) return;
    g.run = kCrowdedRun;
    launch(queue, "bucket_crowded", bucket_crowded_kernel<E>, g.items(), kLinearWarps * kWarp,
           kLinearWarps * kLinearWarpBytes, g);
  };
  const auto sum_of = [&](const MatrixProblemSide& side, const MatrixSide& from, index_t tile,
                          bool add) {
    SumContributions a;
    a.from = from.out;
    a.slots = g.slots * g.factor_tiles;
    a.n_rows = side.side.n_rows;
    a.units = g.units;
    a.first_unit = s.first_unit + g.first_unit;
    a.side = side.side;
    a.query_heads = p.query_heads;
    a.sequences = p.sequences;
    a.valid = side.valid;
    a.out = side.gradient;
    a.columns = p.n_features;
    a.first_column = tile * kTileColumns;
    a.add = add;
    return a;
  };
  const auto matrix_side = [&](const MatrixProblemSide& of, const MatrixScratch::OfSide& to,
                               index_t tile) {
    const index_t numbers = of.rows() * kTileColumns;
    const auto* const factor =
        p.packed(of) ? static_cast<const std::uint16_t*>(of.factor.data) : to.factor;
    return MatrixSide{to.unit + tile * numbers, factor, numbers, to.scale, to.contributions};
  };

  for (s.first_hash = 0; s.first_hash < p.n_hashes; s.first_hash += most.sort_hashes) {
    s.hashes = least(most.sort_hashes, p.n_hashes - s.first_hash);
    for (s.first_unit = 0; s.first_unit < p.units(); s.first_unit += most.sort_units) {
      s.units = least(most.sort_units, p.units() - s.first_unit);
      group_sort(queue, s);
      for (g.first_unit = 0; g.first_unit < s.units; g.first_unit += most.units) {
        g.units = least(most.units, s.units - g.first_unit);
        for (g.first_slot = 0; g.first_slot < s.hashes; g.first_slot += most.slots) {
          g.slots = least(most.slots, s.hashes - g.first_slot);
          for (index_t tile = 0; tile < p.unit_tiles(); ++tile) {
            g.queries = matrix_side(p.queries, scratch.queries, tile);
            g.keys = matrix_side(p.keys, scratch.keys, tile);
            buckets();
            const bool add = s.first_hash + g.first_slot > 0;
            const SumBothSides sums{sum_of(p.queries, g.queries, tile, add),
                                    sum_of(p.keys, g.keys, tile, add)};
            const index_t query_blocks = sum_blocks(sums.queries);
            launch(queue, "sum_contributions", sum_contributions_kernel<E>,
                   query_blocks + sum_blocks(sums.keys), kSlotSumThreads, 0, sums, query_blocks);
          }
        }
      }
    }
  }
}

// Gradients are written in full.
inline void bucket_gradient(const Queue& queue, const MatrixProblem& p,
                            const MatrixScratch& scratch) {
  if (p.element == Element::bfloat16)
    bucket_gradient<Element::bfloat16>(queue, p, scratch);
  else
    bucket_gradient<Element::float16>(queue, p, scratch);
}

}  // namespace lshkit::cuda

// The pairs of a bucket of the lower bound's gradient by tiles: its products S of output gradients
// and values, then S K and the transposed S times Q. Rows are gathered into tiles as they lie, and
// what is summed over changes between the products: S and the values are transposed on the way.
#if !defined(LSHKIT_ISA_AVX512_BF16) || defined(LSHKIT_ISA_AMX)
#include <limits>

#include "kernels/bfloat16/tiles.hpp"
#include "kernels/kernels.hpp"
#include "kernels/lower_bound_bfloat16.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int W = kLanes<float>;

// Words [16 k, 16 k + 16) of a row of `size`, zeros behind its end. No row: zeros.
LSHKIT_INLINE void copy_words(const Word* row, index_t size, index_t k, Word* to) {
  const index_t count = row ? smaller(kTile, size - k * kTile) : 0;
  if (count == kTile) {
    std::memcpy(to, row + k * kTile, sizeof(Word) * kTile);
    return;
  }
  std::memset(to, 0, sizeof(Word) * kTile);
  if (count > 0) std::memcpy(to, row + k * kTile, sizeof(Word) * count);
}
// Tiles of A of the rows of a side, or the tiles of B that these are transposed.
template <bool Transposed>
LSHKIT_NOINLINE void gather(const Word* rows, const std::int32_t* order, index_t n, index_t size,
                            Word* to) {
  const index_t depth = tiles_of(size);
  alignas(64) Word rows_of_a[kTileSize];
  for (index_t t = 0; t < n; t += kTile)
    for (index_t k = 0; k < depth; ++k, to += kTileSize) {
      Word* tile = Transposed ? rows_of_a : to;
      for (index_t r = 0; r < kTile; ++r)
        copy_words(t + r < n ? rows + order[t + r] * size : nullptr, size, k, tile + r * kTile);
      if (Transposed) transpose_tile(tile, to);
    }
}
// Tiles of B, summed over the rows of a side, of d columns.
LSHKIT_NOINLINE void gather_pairs(const Word* rows, const std::int32_t* order, index_t n, index_t d,
                                  Word* to) {
  const index_t depth = depth_of(n);
  const auto half_row = [&](index_t r) {
    return r < n ? reinterpret_cast<const Half*>(rows + order[r] * (d / 2)) : nullptr;
  };
  for (index_t r = 0; r < depth * 2 * kTile; r += 2) {
    const Half *even = half_row(r), *odd = half_row(r + 1);
    Word* row = to + r / (2 * kTile) * kTileSize + r % (2 * kTile) / 2 * kTile;
    for (index_t c = 0; c < d; c += W) {
      const Words words =
          pair_up(even ? load_half(even + c) : Halves{}, odd ? load_half(odd + c) : Halves{});
      std::memcpy(row + c / kTile * depth * kTileSize + c % kTile, &words, sizeof(words));
    }
  }
}

// A B in blocks of up to 2 x 2 tiles, each used while it is in the L1 cache: use(i, j, rows,
// columns, block), in tiles; a block's tile (r, s) is its number 2 r + s.
template <class Fetch, class Use>
LSHKIT_INLINE void each_block(index_t rows, index_t columns, index_t depth, const Word* a,
                              const Word* b, const Fetch& fetch, const Use& use) {
  alignas(64) float block[4 * kTileSize];
  for (index_t i = 0; i < rows; i += 2)
    for (index_t j = 0; j < columns; j += 2) {
      fetch();
      const Terms terms{1, {a + i * depth * kTileSize}, {b + j * depth * kTileSize}};
      const bool two_rows = i + 1 < rows, two_columns = j + 1 < columns;
      const auto product = two_rows      ? two_columns ? multiply_tiles<2, 2> : multiply_tiles<2, 1>
                           : two_columns ? multiply_tiles<1, 2>
                                         : multiply_tiles<1, 1>;
      product(depth, terms, block, 2 * kTileSize, false);
      use(i, j, 1 + two_rows, 1 + two_columns, block);
    }
}

// A block of S, scaled, to tiles of A: those of S, summed over columns, and those of S transposed,
// one for each column of tiles, `stride` words from one to the next.
struct Weights {
  const Bfloat16Side &queries, &keys;
  bool causal, transposed_wanted;
  float scale;
  index_t depth, stride;

  // The places in their sequences of a block's queries and keys; behind the last none sees any.
  struct Places {
    std::int32_t query[2 * kTile], key[2 * kTile];
  };
  static LSHKIT_INLINE void take_places(const Bfloat16Side& side, index_t first, std::int32_t none,
                                        std::int32_t* to) {
    for (index_t r = 0; r < 2 * kTile; ++r)
      to[r] = first + r < side.n ? side.rows[first + r] : none;
  }
  LSHKIT_INLINE Halves at(const float* block, const Places& places, index_t row,
                          index_t column) const {
    const index_t tile = row / kTile * 2 + column / kTile;
    Vec<float> x = load(block + tile * kTileSize + row % kTile * kTile + column % kTile);
    // Selected, not multiplied by zero: what is hidden may be a NaN.
    if (causal) x = load(places.key + column) <= places.query[row] ? x : Vec<float>{};
    return to_bfloat16(x * scale);
  }
  // The block at tile i of queries and j of keys.
  LSHKIT_NOINLINE void take(const float* block, index_t i, index_t j, index_t rows, index_t columns,
                            Word* to, Word* transposed) const {
    alignas(64) Word pairs[2][kTileSize];  // of rows: words of B
    Places places;
    if (causal) {
      take_places(queries, i * kTile, -1, places.query);
      take_places(keys, j * kTile, std::numeric_limits<std::int32_t>::max(), places.key);
    }
    for (index_t r = 0; r < 2 * kTile; r += 2)
      for (index_t c = 0; c < 2 * kTile; c += W) {
        const bool there = r < rows * kTile && c < columns * kTile;
        const Halves even = there ? at(block, places, r, c) : Halves{};
        const Halves odd = there ? at(block, places, r + 1, c) : Halves{};
        if (r < rows * kTile) {
          store_half(row_of_a(to, depth, r, c), even);
          store_half(row_of_a(to, depth, r + 1, c), odd);
        }
        const Words words = pair_up(even, odd);
        std::memcpy(pairs[c / kTile] + r / 2 * kTile + c % kTile, &words, sizeof(words));
      }
    for (index_t s = 0; transposed_wanted && s < columns; ++s)
      transpose_tile(pairs[s], transposed + s * stride);
  }
};

// gradient's rows += a block's of the product
LSHKIT_NOINLINE void scatter(const float* block, index_t columns, const std::int32_t* order,
                             index_t n, index_t first_column, Matrix<float> gradient) {
  for (index_t r = 0; r < n; ++r) {
    float* row = gradient.row(order[r]) + first_column;
    const float* from = block + r / kTile * 2 * kTileSize + r % kTile * kTile;
    for (index_t c = 0; c < columns * kTile; c += W) {
      const float* x = from + c / kTile * kTileSize + c % kTile;
      store(row + c, load(row + c) + load(x));
    }
  }
}

}  // namespace

void hold_tiles(bool hold) { hold ? take_tiles() : tilerelease(); }

void bfloat16_pairs(const LowerBoundGradient& p, const Bfloat16Rows& w, const Bfloat16Side& queries,
                    const Bfloat16Side& keys) {
  const index_t nq = queries.n, nk = keys.n, tq = tiles_of(nq), tk = tiles_of(nk);
  const index_t size = w.dv / 2, depth = tiles_of(size), td = w.d / kTile;
  const index_t over_queries = depth_of(nq), over_keys = depth_of(nk);
  Cut cut{w.tiles};
  Word* weights = cut.take<Word>(tq * over_keys * kTileSize);
  Word* transposed = cut.take<Word>(tk * over_queries * kTileSize);
  Word* a = cut.take<Word>(larger(tq * depth, larger(over_keys, over_queries) * td) * kTileSize);
  Word* b = cut.take<Word>(tk * depth * kTileSize);
  const index_t pairs_of_tq = (tq + 1) / 2, pairs_of_tk = (tk + 1) / 2;
  const index_t blocks = pairs_of_tq * pairs_of_tk + (pairs_of_tq + pairs_of_tk) * ((td + 1) / 2);
  const index_t rows_ahead = rows_left(*w.ahead) / blocks + 1;
  const auto fetch = [&] { fetch_rows(*w.ahead, rows_ahead); };
  gather<false>(queries.a, queries.rows, nq, size, a);
  gather<true>(keys.a, keys.rows, nk, size, b);
  const Weights of_pairs{
      queries, keys, p.causal, bool(p.key_grad.data), p.scale, over_keys, over_queries * kTileSize};
  each_block(tq, tk, depth, a, b, fetch,
             [&](index_t i, index_t j, index_t rows, index_t columns, const float* block) {
               of_pairs.take(block, i, j, rows, columns,
                             weights + (i * over_keys + j / 2) * kTileSize,
                             transposed + (j * over_queries + i / 2) * kTileSize);
             });
  const auto add = [&](const Word* of, const Bfloat16Side& from, const Bfloat16Side& to,
                       Matrix<float> gradient) {
    gather_pairs(from.b, from.rows, from.n, w.d, a);
    each_block(tiles_of(to.n), td, depth_of(from.n), of, a, fetch,
               [&](index_t i, index_t j, index_t rows, index_t columns, const float* block) {
                 scatter(block, columns, to.rows + i * kTile,
                         smaller(rows * kTile, to.n - i * kTile), j * kTile, gradient);
               });
  };
  if (p.query_grad.data) add(weights, keys, queries, p.query_grad);
  if (p.key_grad.data) add(transposed, queries, keys, p.key_grad);
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit
#endif

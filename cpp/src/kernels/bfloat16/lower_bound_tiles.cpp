// The pairs of a bucket of the lower bound's gradient by tiles: its products S of output gradients
// and values, then S K and the transposed S times Q. Rows are gathered into tiles as they lie, and
// what is summed over changes between the products: S and the values are transposed on the way.
#if !defined(LSHKIT_ISA_AVX512_BF16) || defined(LSHKIT_ISA_AMX)
#include "kernels/bfloat16/tiles.hpp"
#include "kernels/kernels.hpp"
#include "kernels/lower_bound_bfloat16.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int W = kLanes<float>;

// A row r, zeros from row n on, of words [16 k, 16 k + 16) of `size`.
LSHKIT_INLINE void gather_row(const Word* rows, const std::int32_t* order, index_t n, index_t size,
                              index_t r, index_t k, Word* to) {
  const index_t count = r < n ? smaller(kTile, size - k * kTile) : 0;
  std::memset(to, 0, sizeof(Word) * kTile);
  if (count == kTile)
    std::memcpy(to, rows + order[r] * size + k * kTile, sizeof(Word) * kTile);
  else if (count > 0)
    std::memcpy(to, rows + order[r] * size + k * kTile, sizeof(Word) * count);
}
// Tiles of A of the rows of a side, or the tiles of B that these are transposed.
template <bool Transposed>
LSHKIT_NOINLINE void gather(const Word* rows, const std::int32_t* order, index_t n, index_t size,
                            Word* to) {
  const index_t depth = tiles_of(size);
  alignas(64) Word rows_of_a[kTileSize];
  for (index_t t = 0; t < tiles_of(n); ++t)
    for (index_t k = 0; k < depth; ++k, to += kTileSize) {
      Word* tile = Transposed ? rows_of_a : to;
      for (index_t r = 0; r < kTile; ++r)
        gather_row(rows, order, n, size, t * kTile + r, k, tile + r * kTile);
      if (Transposed) transpose_tile(tile, to);
    }
}
// Tiles of B, summed over the rows of a side, of d columns.
LSHKIT_NOINLINE void gather_pairs(const Word* rows, const std::int32_t* order, index_t n, index_t d,
                                  Word* to) {
  const index_t depth = depth_of(n);
  const auto lanes = [&](index_t r, index_t c) {
    return r < n ? load_half(reinterpret_cast<const Half*>(rows + order[r] * (d / 2)) + c)
                 : Halves{};
  };
  for (index_t r = 0; r < depth * 2 * kTile; r += 2)
    for (index_t c = 0; c < d; c += W) {
      const Words words = pair_up(lanes(r, c), lanes(r + 1, c));
      Word* tile = to + (c / kTile * depth + r / (2 * kTile)) * kTileSize;
      std::memcpy(tile + r % (2 * kTile) / 2 * kTile + c % kTile, &words, sizeof(words));
    }
}

// S in C tiles, rows by columns of them.
struct Pairs {
  const float* tiles;
  index_t rows, columns;
  float scale;

  LSHKIT_INLINE Halves at(index_t tile_row, index_t tile_column, index_t r, index_t c) const {
    if (tile_row >= rows || tile_column >= columns) return Halves{};
    return to_bfloat16(
        load(tiles + (tile_row * columns + tile_column) * kTileSize + r * kTile + c) * scale);
  }
  // Tiles of A of S, summed over columns.
  LSHKIT_NOINLINE void as_a(Word* to) const {
    const index_t depth = (columns + 1) / 2;
    for (index_t i = 0; i < rows; ++i)
      for (index_t j = 0; j < 2 * depth; ++j)
        for (index_t r = 0; r < kTile; ++r)
          for (index_t c = 0; c < kTile; c += W)
            store_half(row_of_a(to, depth, i * kTile + r, j * kTile + c), at(i, j, r, c));
  }
  // Of the transposed S, summed over rows.
  LSHKIT_NOINLINE void transposed_as_a(Word* to) const {
    const index_t depth = (rows + 1) / 2;
    alignas(64) Word of_b[kTileSize];
    for (index_t j = 0; j < columns; ++j)
      for (index_t k = 0; k < depth; ++k, to += kTileSize) {
        for (index_t r = 0; r < kTile; ++r)
          for (index_t c = 0; c < kTile; c += W) {
            const index_t i = 2 * k + r / (kTile / 2), row = 2 * r % kTile;
            const Words words = pair_up(at(i, j, row, c), at(i, j, row + 1, c));
            std::memcpy(of_b + r * kTile + c, &words, sizeof(words));
          }
        transpose_tile(of_b, to);
      }
  }
};

// gradient's rows += C tiles
LSHKIT_NOINLINE void scatter(const float* tiles, const std::int32_t* order, index_t n,
                             Matrix<float> gradient) {
  const index_t columns = gradient.columns / kTile;
  for (index_t r = 0; r < n; ++r)
    for (index_t j = 0; j < columns; ++j) {
      const float* from = tiles + (r / kTile * columns + j) * kTileSize + r % kTile * kTile;
      float* to = gradient.row(order[r]) + j * kTile;
      for (index_t c = 0; c < kTile; c += W) store(to + c, load(to + c) + load(from + c));
    }
}

}  // namespace

void bfloat16_pairs(const LowerBoundGradient& p, const Bfloat16Rows& w, const Bfloat16Side& queries,
                    const Bfloat16Side& keys) {
  const index_t nq = queries.n, nk = keys.n, tq = tiles_of(nq), tk = tiles_of(nk);
  const index_t depth = tiles_of(w.dv / 2), td = w.d / kTile;
  const index_t over_queries = depth_of(nq), over_keys = depth_of(nk);
  Cut cut{w.tiles};
  Word* a = cut.take<Word>(tq * depth * kTileSize);
  Word* b = cut.take<Word>(tk * depth * kTileSize);
  const Pairs s{cut.take<float>(tq * tk * kTileSize), tq, tk, p.scale};
  const TileUse use;
  gather<false>(queries.a, queries.rows, nq, w.dv / 2, a);
  gather<true>(keys.a, keys.rows, nk, w.dv / 2, b);
  multiply(tq, tk, depth, a, b, const_cast<float*>(s.tiles), false);
  // Of one gradient after the other, in the same memory.
  Word* weights = cut.take<Word>(larger(tq * over_keys, tk * over_queries) * kTileSize);
  Word* rows = cut.take<Word>(larger(over_keys, over_queries) * td * kTileSize);
  float* sums = cut.take<float>(larger(tq, tk) * td * kTileSize);
  if (p.query_grad.data) {
    s.as_a(weights);
    gather_pairs(keys.b, keys.rows, nk, w.d, rows);
    multiply(tq, td, over_keys, weights, rows, sums, false);
    scatter(sums, queries.rows, nq, p.query_grad);
  }
  if (p.key_grad.data) {
    s.transposed_as_a(weights);
    gather_pairs(queries.b, queries.rows, nq, w.d, rows);
    multiply(tk, td, over_queries, weights, rows, sums, false);
    scatter(sums, keys.rows, nk, p.key_grad);
  }
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit
#endif

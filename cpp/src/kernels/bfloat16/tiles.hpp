#pragma once
// Products of bfloat16 with sums in float32, a tile at a time: 16 rows of 64 bytes. Three
// instruction sets compile the same kernels on these operations: AMX, whose tiles are registers;
// AVX512-BF16, which keeps a tile of sums in 16 registers; and the twin of AMX in plain C++, which
// runs anywhere and holds the program of tile operations to what the manual says of them.
#if defined(LSHKIT_ISA_AVX512_BF16) && !defined(LSHKIT_ISA_AMX)
#define LSHKIT_TILES_IN_VECTORS
#else
#include "kernels/bfloat16/tile_instructions.hpp"
#endif
#include "kernels/short_floats.hpp"
#include "kernels/simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// Two bfloat16, neighbours in the dimension that is summed over, the first in the lower half.
using Word = std::uint32_t;
constexpr index_t kTile = 16;                 // rows of a tile, and words or floats of a row
constexpr index_t kTileSize = kTile * kTile;  // words or floats

LSHKIT_INLINE Halves to_bfloat16(Vec<float> x) {
#if defined(LSHKIT_ISA_AVX512_BF16)
  return Halves((__m256i)_mm512_cvtneps_pbh(x));
#else
  return Bfloat16::narrow(x);
#endif
}

// ---- the operations ----
// While a TileUse lives, or from take_tiles to tilerelease, the thread has tiles 0 to 7 (the twin:
// in one file). C is a tile of floats (16 rows, 16 columns), A of words (16 rows, depth 16), B of
// words (depth 16, 16 columns).
#if defined(LSHKIT_TILES_IN_VECTORS)
constexpr int kAside = 1;

struct TileUse {
  TileUse() {}
};
struct Tiles {  // tile 0 has the sums; factors stay where they lie
  __m512 sum[kTile];
  const Word *a, *b;

  template <int C>
  LSHKIT_INLINE void zero() {
    LSHKIT_UNROLL
    for (int r = 0; r < kTile; ++r) sum[r] = __m512{};
  }
  template <int T>
  LSHKIT_INLINE void load(const void* from) {
    if constexpr (T == 4) {
      a = static_cast<const Word*>(from);
    } else if constexpr (T == 6) {
      b = static_cast<const Word*>(from);
    } else {
      LSHKIT_UNROLL
      for (int r = 0; r < kTile; ++r) sum[r] = load_row(from, r);
    }
  }
  static LSHKIT_INLINE __m512 load_row(const void* from, index_t r) {
    return _mm512_loadu_ps(static_cast<const float*>(from) + r * kTile);
  }
  template <int C>
  LSHKIT_INLINE void store(float* to) {
    LSHKIT_UNROLL
    for (int r = 0; r < kTile; ++r) _mm512_storeu_ps(to + r * kTile, sum[r]);
  }
  template <int C, int A, int B>
  LSHKIT_INLINE void multiply_add() {
    for (int k = 0; k < kTile; ++k) {
      const auto row = (__m512bh)_mm512_loadu_si512(b + k * kTile);
      LSHKIT_UNROLL
      for (int r = 0; r < kTile; ++r)
        sum[r] = _mm512_dpbf16_ps(sum[r], (__m512bh)_mm512_set1_epi32(int(a[r * kTile + k])), row);
    }
  }
};
#else
constexpr int kAside = 2;  // tiles of sums in a row and in a column: 2 x 2, of 2 + 2 factors

inline void take_tiles() {
  struct {
    std::uint8_t palette = 1, reserved[15] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } const shapes;
  ldtilecfg(&shapes);
}
struct TileUse {
  TileUse() { take_tiles(); }
  ~TileUse() { tilerelease(); }
};
struct Tiles {
  template <int C>
  LSHKIT_INLINE void zero() {
    tilezero<C>();
  }
  template <int T>
  LSHKIT_INLINE void load(const void* from) {
    tileloadd<T>(from, kTile * sizeof(Word));
  }
  template <int C>
  LSHKIT_INLINE void store(float* to) {
    tilestored<C>(to, kTile * sizeof(float));
  }
  template <int C, int A, int B>  // C += A B
  LSHKIT_INLINE void multiply_add() {
    tdpbf16ps<C, A, B>();
  }
};
#endif

// ---- products ----
// Matrices lie tile by tile: A (rows, depth) tiles, B (columns, depth) tiles, C (rows, columns)
// tiles. Factors of several terms, whose products are summed.
struct Terms {
  int count;
  const Word *a[3], *b[3];

  LSHKIT_INLINE Terms from(index_t tiles_of_a, index_t tiles_of_b) const {
    Terms t = *this;
    for (int i = 0; i < count; ++i) {
      t.a[i] += tiles_of_a * kTileSize;
      t.b[i] += tiles_of_b * kTileSize;
    }
    return t;
  }
};
// c (+)= a b for Rows x Columns tiles of C, `stride` floats from one row of them to the next.
template <int Rows, int Columns>
LSHKIT_NOINLINE void multiply_tiles(index_t depth, const Terms& terms, float* c, index_t stride,
                                    bool add) {
  constexpr bool kSecondRow = Rows == 2, kSecondColumn = Columns == 2;
  Tiles t;
  if (add) {
    t.load<0>(c);
    if constexpr (kSecondColumn) t.load<1>(c + kTileSize);
    if constexpr (kSecondRow) t.load<2>(c + stride);
    if constexpr (kSecondRow && kSecondColumn) t.load<3>(c + stride + kTileSize);
  } else {
    t.zero<0>();
    if constexpr (kSecondColumn) t.zero<1>();
    if constexpr (kSecondRow) t.zero<2>();
    if constexpr (kSecondRow && kSecondColumn) t.zero<3>();
  }
  for (int i = 0; i < terms.count; ++i) {
    const Word *a = terms.a[i], *b = terms.b[i];
    for (index_t k = 0; k < depth; ++k, a += kTileSize, b += kTileSize) {
      t.load<4>(a);
      t.load<6>(b);
      t.multiply_add<0, 4, 6>();
      if constexpr (kSecondColumn) {
        t.load<7>(b + depth * kTileSize);
        t.multiply_add<1, 4, 7>();
      }
      if constexpr (kSecondRow) {
        t.load<5>(a + depth * kTileSize);
        t.multiply_add<2, 5, 6>();
      }
      if constexpr (kSecondRow && kSecondColumn) t.multiply_add<3, 5, 7>();
    }
  }
  t.store<0>(c);
  if constexpr (kSecondColumn) t.store<1>(c + kTileSize);
  if constexpr (kSecondRow) t.store<2>(c + stride);
  if constexpr (kSecondRow && kSecondColumn) t.store<3>(c + stride + kTileSize);
}
template <int Rows>
LSHKIT_INLINE void multiply_row(index_t columns, index_t depth, const Terms& terms, float* c,
                                bool add) {
  index_t j = 0;
  for (; j + kAside <= columns; j += kAside)
    multiply_tiles<Rows, kAside>(depth, terms.from(0, j * depth), c + j * kTileSize,
                                 columns * kTileSize, add);
  if (j < columns)
    multiply_tiles<Rows, 1>(depth, terms.from(0, j * depth), c + j * kTileSize, columns * kTileSize,
                            add);
}
// C (+)= the sum of the terms' A B; sizes in tiles.
LSHKIT_INLINE void multiply(index_t rows, index_t columns, index_t depth, const Terms& terms,
                            float* c, bool add) {
  index_t i = 0;
  for (; i + kAside <= rows; i += kAside)
    multiply_row<kAside>(columns, depth, terms.from(i * depth, 0), c + i * columns * kTileSize,
                         add);
  if (i < rows)
    multiply_row<1>(columns, depth, terms.from(i * depth, 0), c + i * columns * kTileSize, add);
}
LSHKIT_INLINE void multiply(index_t rows, index_t columns, index_t depth, const Word* a,
                            const Word* b, float* c, bool add) {
  multiply(rows, columns, depth, Terms{1, {a}, {b}}, c, add);
}

// ---- factors ----
LSHKIT_INLINE index_t tiles_of(index_t n) { return (n + kTile - 1) / kTile; }  // rows or columns
LSHKIT_INLINE index_t depth_of(index_t n) { return (n + 2 * kTile - 1) / (2 * kTile); }  // numbers

// A word tile with rows and columns exchanged: from the form of A to that of B and back.
LSHKIT_INLINE void transpose_tile(const Word* from, Word* to) {
  constexpr int W = kLanes<float>;
  for (int r = 0; r < kTile; r += W)
    for (int c = 0; c < kTile; c += W) {
      Vec<float> v[W];
      LSHKIT_UNROLL
      for (int i = 0; i < W; ++i) std::memcpy(&v[i], from + (r + i) * kTile + c, sizeof(v[i]));
      transpose<float>(v);
      LSHKIT_UNROLL
      for (int i = 0; i < W; ++i) std::memcpy(to + (c + i) * kTile + r, &v[i], sizeof(v[i]));
    }
}
LSHKIT_INLINE void transpose_tiles(Word* tiles, index_t count) {
  alignas(64) Word copy[kTileSize];
  for (index_t t = 0; t < count; ++t) {
    std::memcpy(copy, tiles + t * kTileSize, sizeof(copy));
    transpose_tile(copy, tiles + t * kTileSize);
  }
}
// Halves of a row r of A at column c, a multiple of the lanes.
LSHKIT_INLINE Half* row_of_a(Word* a, index_t depth, index_t r, index_t c) {
  Word* tile = a + (r / kTile * depth + c / (2 * kTile)) * kTileSize;
  return reinterpret_cast<Half*>(tile + r % kTile * kTile) + c % (2 * kTile);
}
// The words of rows r and r + 1 (r even) from lane values of both.
LSHKIT_INLINE Words pair_up(Halves even, Halves odd) {
  return to_words(even) | to_words(odd) << 16;
}

// The lanes of factor * x from column c on, zeros behind the last; x, which may be null, is not
// looked at where the factor is 0. rest: null, or gets what the rounding left, rounded.
LSHKIT_INLINE Halves scaled_lanes(const float* x, float factor, index_t c, index_t columns,
                                  Halves* rest) {
  const int count = int(smaller(columns - c, kLanes<float>));
  Vec<float> v = {};
  if (factor != 0) v = load_first(x + c, count) * factor;
  const Halves rounded = to_bfloat16(v);
  if (rest) *rest = to_bfloat16(v - Bfloat16::widen(rounded));
  return rounded;
}
// Of bfloat16.
LSHKIT_INLINE Halves scaled_lanes(const Half* x, float factor, index_t c, index_t columns,
                                  Halves*) {
  if (factor == 0) return Halves{};
  const Halves lanes = load_first_half(x + c, int(smaller(columns - c, kLanes<float>)));
  return factor == 1 ? lanes : to_bfloat16(Bfloat16::widen(lanes) * factor);
}
// A of factor_r * x(r), summed over columns; zeros up to whole tiles of both. Row: float or Half.
template <class Row>
LSHKIT_NOINLINE void pack_rows(index_t rows, index_t columns, const Row* const* x,
                               const float* factor, Word* a, Word* rest = nullptr) {
  constexpr int W = kLanes<float>;
  const index_t depth = depth_of(columns);
  for (index_t r = 0; r < tiles_of(rows) * kTile; ++r) {
    if constexpr (sizeof(Row) == sizeof(Half))
      if (r < rows && factor[r] == 1 && columns % (2 * kTile) == 0) {  // whole rows of tiles
        for (index_t c = 0; c < columns; c += 2 * kTile)
          std::memcpy(row_of_a(a, depth, r, c), x[r] + c, 2 * kTile * sizeof(Half));
        continue;
      }
    for (index_t c = 0; c < depth * 2 * kTile; c += W) {
      Halves left = {}, lanes = {};
      if (r < rows && c < columns)
        lanes = scaled_lanes(x[r], factor[r], c, columns, rest ? &left : nullptr);
      store_half(row_of_a(a, depth, r, c), lanes);
      if (rest) store_half(row_of_a(rest, depth, r, c), left);
    }
  }
}
// B of factor_r * x(r), summed over rows; zeros up to whole tiles of both.
template <class Row>
LSHKIT_NOINLINE void pack_pairs(index_t rows, index_t columns, const Row* const* x,
                                const float* factor, Word* b) {
  constexpr int W = kLanes<float>;
  const index_t depth = depth_of(rows);
  const auto pair = [&](index_t r, const auto& lanes) {
    for (index_t c = 0; c < tiles_of(columns) * kTile; c += W) {
      const Words words = pair_up(lanes(r, c), lanes(r + 1, c));
      std::memcpy(b + c / kTile * depth * kTileSize + r / 2 * kTile + c % kTile, &words,
                  sizeof(words));
    }
  };
  for (index_t r = 0; r < depth * 2 * kTile; r += 2) {
    if constexpr (sizeof(Row) == sizeof(Half))
      if (r + 1 < rows && factor[r] == 1 && factor[r + 1] == 1 && columns % kTile == 0) {
        pair(r, [&](index_t row, index_t c) { return load_half(x[row] + c); });
        continue;
      }
    pair(r, [&](index_t row, index_t c) {
      if (row >= rows || c >= columns) return Halves{};
      return scaled_lanes(x[row], factor[row], c, columns, nullptr);
    });
  }
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

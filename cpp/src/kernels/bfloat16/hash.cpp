// Codes by tiles: signs of products of rows and normals.
//
// hash_tiles: the codes of hash_hyperplane, for less. Rows and normals are split in two parts of
// bfloat16, x = high + low + at most 2^-16 of x. Three products of parts give a projection to
// within `uncertainty` |x| |normal|, which most projections exceed: their signs are then those of
// float32's sums. The others, 3 in 10,000 of normal rows of 64 features, are summed in float32,
// term by term as hash_hyperplane sums them.
//
// fast_hash_tiles: the rotations of FastHadamard written out, a normal for each bit: at 64 columns
// and 32 hashes a product of 64 x 256 a row, which tiles do in less time than vectors do the
// transforms. Rows are bfloat16, of a multiple of 32 features. Normals are rounded to bfloat16,
// which turns them by 1.7e-3: one bit in 1,900 differs from the full precision's. It is the same
// function of a row wherever the row stands.
#if !defined(LSHKIT_ISA_AVX512_BF16) || defined(LSHKIT_ISA_AMX)
#include "lshkit/hash.hpp"

#include <cmath>

#include "kernels/bfloat16/tiles.hpp"
#include "kernels/hadamard.hpp"
#include "kernels/kernels.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// ---- products ----
// The sums of two tiles of rows on tile t of the planes, in tiles C and C + 1.
template <int C>
LSHKIT_INLINE void multiply_planes(const Terms& terms, index_t depth, index_t t) {
  Tiles tiles;
  tiles.zero<C>();
  tiles.zero<C + 1>();
  for (int i = 0; i < terms.count; ++i) {
    const Word *a = terms.a[i], *b = terms.b[i] + t * depth * kTileSize;
    for (index_t k = 0; k < depth; ++k, a += kTileSize, b += kTileSize) {
      tiles.load<6>(b);
      tiles.load<4>(a);
      tiles.multiply_add<C, 4, 6>();
      tiles.load<5>(a + depth * kTileSize);
      tiles.multiply_add<C + 1, 5, 6>();
    }
  }
}
template <int C, class Read>
LSHKIT_INLINE bool read_sums(index_t t, float* sums, const Read& read) {
  Tiles tiles;
  tiles.store<C>(sums);
  tiles.store<C + 1>(sums + kTileSize);
  return read(t, sums);
}
// read(t, sums of kTileRows rows on tile t of the planes) for each, until one is false. The next
// tile is multiplied while one is read. sums: of two tiles of planes.
template <class Read>
LSHKIT_NOINLINE bool for_each_tile(const Terms& terms, index_t depth, index_t tiles, float* sums,
                                   const Read& read) {
  multiply_planes<0>(terms, depth, 0);
  for (index_t t = 0; t < tiles; t += 2) {
    if (t + 1 < tiles) multiply_planes<2>(terms, depth, t + 1);
    if (!read_sums<0>(t, sums, read)) return false;
    if (t + 2 < tiles) multiply_planes<0>(terms, depth, t + 2);
    if (t + 1 < tiles && !read_sums<2>(t + 1, sums + kTileRows * kTile, read)) return false;
  }
  return true;
}
static_assert(kTileRows == 2 * kTile);

// Rows for these, as two parts of bfloat16 or one: zeros up to kTileRows of them.
struct PackedRows {
  Word *high, *low;
  float* sums;

  explicit PackedRows(const HashTiles& h) {
    const index_t size = kTileRows * kTile * depth_of(h.n_features);
    high = reinterpret_cast<Word*>(h.scratch);
    low = high + size;
    sums = h.scratch + 2 * size;
  }
};

// ---- hyperplanes ----
// Within these neither the parts of bfloat16, whose subnormal numbers tiles take for zeros, nor
// float32's sums lose more than a hundredth of the bound, and hash_hyperplane does not scale a row.
constexpr float kSmallRow = 0x1p-100f, kLargeRow = 0x1p100f;  // squared norms
constexpr float kSmallPlane = 0x1p-40f, kLargePlane = 0x1p40f;

// At most so much of |x| |normal| lies between what tiles sum and the sum of hash_hyperplane:
// what no product has, the roundings of a tile's 16 products, of the two sums and of the tiles in
// turn, and the d roundings of float32, each of 2^-24.
float uncertainty(const HashTiles& h) {
  const index_t products = h.bfloat16 ? 2 : 3, left = h.bfloat16 ? 1 : 3;
  const index_t roundings = 17 + products * depth_of(h.n_features) + h.n_features;
  return 1.02f * (float(left) * 0x1p-16f + float(roundings) * 0x1p-24f);
}

// B tiles of the normals, for each bit of the codes' bytes: zeros for those beyond n_bits.
struct Planes {
  index_t bits, tiles, depth;  // of a code; of 16 normals; of 32 features
  Word *high, *low;
  float* norm;

  explicit Planes(const HashTiles& h)
      : bits(8 * hash_code_bytes(h.n_bits)),
        tiles(tiles_of(bits * h.n_hashes)),
        depth(depth_of(h.n_features)),
        high(reinterpret_cast<Word*>(h.planes)),
        low(high + tiles * depth * kTileSize),
        norm(h.planes + 2 * tiles * depth * kTileSize) {}
};

float squared_norm(const float* x, index_t n) {
  F sum = {};
  for (index_t c = 0; c < n; c += W) {
    const F v = load_first(x + c, int(smaller(n - c, W)));
    sum += v * v;
  }
  return sum_lanes(sum);
}

// Of 16 sums, bit i of the sum at i: which are positive.
LSHKIT_INLINE unsigned positive(const float* sums) {
#if defined(LSHKIT_ISA_AVX512)
  return _mm512_cmp_ps_mask(_mm512_loadu_ps(sums), __m512{}, _CMP_GT_OQ);
#else
  unsigned bits = 0;
  for (int i = 0; i < kTile; ++i) bits |= unsigned(sums[i] > 0) << i;
  return bits;
#endif
}
// Where such bits go: two bytes of the codes of a row for each tile of planes, the last of which
// may have one.
struct CodeBytes {
  std::uint8_t* codes;
  index_t of_row;

  explicit CodeBytes(const HashTiles& h)
      : codes(static_cast<std::uint8_t*>(h.codes)),
        of_row(h.n_hashes * hash_code_bytes(h.n_bits)) {}
  LSHKIT_INLINE bool two_bytes(index_t tile) const { return 2 * tile + 1 < of_row; }
  LSHKIT_INLINE void write(index_t row, index_t tile, unsigned bits) const {
    std::uint8_t* const to = codes + row * of_row + 2 * tile;
    const auto word = std::uint16_t(bits);
    if (two_bytes(tile))
      std::memcpy(to, &word, sizeof(word));
    else
      *to = std::uint8_t(word);
  }
  // Of kTileRows rows and their sums.
  LSHKIT_INLINE void write_words(index_t row, index_t tile, const float* sums) const {
    constexpr index_t kAtOnce = 8;
    const index_t step = of_row;
    std::uint8_t* to = codes + row * step + 2 * tile;
    for (index_t r = 0; r < kTileRows; r += kAtOnce, to += kAtOnce * step, sums += kAtOnce * kTile)
      LSHKIT_UNROLL
    for (index_t i = 0; i < kAtOnce; ++i) {
      const auto word = std::uint16_t(positive(sums + i * kTile));
      std::memcpy(to + i * step, &word, sizeof(word));
    }
  }
};

// Which of 16 sums are positive, and which are too near zero to tell.
struct Signs {
  unsigned positive, uncertain;
};
struct SignsOf {
#if defined(LSHKIT_ISA_AVX512)
  __m512 norm;
  explicit SignsOf(const float* norms) : norm(_mm512_loadu_ps(norms)) {}
  LSHKIT_INLINE Signs operator()(const float* sums, float within) const {
    const __m512 s = _mm512_loadu_ps(sums);
    return {positive(sums), _mm512_cmp_ps_mask(_mm512_abs_ps(s), norm * within, _CMP_LT_OQ)};
  }
#else
  const float* norm;
  explicit SignsOf(const float* norms) : norm(norms) {}
  Signs operator()(const float* sums, float within) const {
    Signs s{positive(sums), 0};
    for (int i = 0; i < kTile; ++i)
      s.uncertain |= unsigned(std::fabs(sums[i]) < norm[i] * within) << i;
    return s;
  }
#endif
};

// Bits that float32 decides: a few at a time, so that no addition waits for the one before.
struct Uncertain {
  static constexpr int kAtOnce = 4;
  const HashTiles& h;
  index_t bits;  // of a code
  index_t found = 0;
  int n = 0;
  const float *x[kAtOnce], *normal[kAtOnce];
  std::uint8_t* byte[kAtOnce];
  int bit[kAtOnce];

  Uncertain(const HashTiles& rows, index_t bits_of_code) : h(rows), bits(bits_of_code) {}
  LSHKIT_NOINLINE void add(index_t row, index_t plane) {
    x[n] = h.x + row * h.row_stride;
    normal[n] = h.parameters + (plane / bits * h.n_bits + plane % bits) * h.n_features;
    byte[n] = static_cast<std::uint8_t*>(h.codes) + (row * bits * h.n_hashes + plane) / 8;
    bit[n] = int(plane % 8);
    ++found;
    if (++n == kAtOnce) decide();
  }
  void decide() {
    if (n == 0) return;
    for (int i = n; i < kAtOnce; ++i) x[i] = x[0], normal[i] = normal[0];
    F sum = {};  // of vectors, as in hash_hyperplane: then products are fused in both or in none
    for (index_t k = 0; k < h.n_features; ++k) {
      F a = {}, b = {};
      LSHKIT_UNROLL
      for (int i = 0; i < kAtOnce; ++i) a[i] = normal[i][k], b[i] = x[i][k];
      sum += a * b;
    }
    for (int i = 0; i < n; ++i)
      *byte[i] = std::uint8_t((*byte[i] & ~(1 << bit[i])) | int(sum[i] > 0) << bit[i]);
    n = 0;
  }
};

}  // namespace

bool pack_planes(const HashTiles& h) {
  const Planes p(h);
  const index_t d = h.n_features;
  for (index_t t = 0; t < p.tiles; ++t) {
    const float* normal[kTile];
    float factor[kTile];
    for (index_t r = 0; r < kTile; ++r) {
      const index_t plane = t * kTile + r, hash = plane / p.bits, bit = plane % p.bits;
      const bool used = hash < h.n_hashes && bit < h.n_bits;
      normal[r] = h.parameters + (used ? hash * h.n_bits + bit : 0) * d;
      factor[r] = used;
      const float square = used ? squared_norm(normal[r], d) : 0;
      if (used && !(square > kSmallPlane && square < kLargePlane)) return false;
      p.norm[plane] = std::sqrt(square);
    }
    const index_t at = t * p.depth * kTileSize;
    pack_rows(kTile, d, normal, factor, p.high + at, p.low + at);
    for (Word* part : {p.high + at, p.low + at}) transpose_tiles(part, p.depth);
  }
  return true;
}

bool hash_tiles(const HashTiles& h) {
  const Planes p(h);
  const PackedRows rows(h);
  const float* x[kTileRows] = {};
  float factor[kTileRows] = {}, within[kTileRows];
  const float bound = uncertainty(h);
  for (index_t r = 0; r < h.rows; ++r) {
    x[r] = h.x + r * h.row_stride;
    factor[r] = 1;
    const float square = squared_norm(x[r], h.n_features);
    if (!(square > kSmallRow && square < kLargeRow)) return false;
    within[r] = bound * std::sqrt(square);
  }
  pack_rows(kTileRows, h.n_features, x, factor, rows.high, h.bfloat16 ? nullptr : rows.low);

  const TileUse use;
  const Terms terms{h.bfloat16 ? 2 : 3, {rows.high, rows.high, rows.low}, {p.high, p.low, p.high}};
  Uncertain uncertain(h, p.bits);
  const CodeBytes codes(h);
  const bool told = for_each_tile(terms, p.depth, p.tiles, rows.sums,
                                  [&](index_t t, const float* sums) LSHKIT_ALWAYS_INLINE {
                                    const SignsOf signs(p.norm + t * kTile);
                                    for (index_t r = 0; r < h.rows; ++r, sums += kTile) {
                                      const Signs s = signs(sums, within[r]);
                                      codes.write(r, t, s.positive);
                                      for (unsigned left = s.uncertain; left; left &= left - 1)
                                        uncertain.add(r, t * kTile + __builtin_ctz(left));
                                    }
                                    // Where many are uncertain, such as all of rows that are
                                    // orthogonal to the normals.
                                    return uncertain.found <= h.n_bits * h.n_hashes;
                                  });
  if (!told) return false;
  uncertain.decide();
  return true;
}

// ---- rotations ----
namespace {

// Magnitudes are compared as the bits of bfloat16 without their signs.
using Bits = std::int16_t;
constexpr Bits kMagnitude = 0x7fff, kInfinityBits = 255 << 7;
constexpr Bits kSmallBits = (127 - 60) << 7, kLargeBits = (127 + 60) << 7;

LSHKIT_INLINE Vec<Bits> larger_lanes(Vec<Bits> a, Vec<Bits> b) { return a > b ? a : b; }
LSHKIT_INLINE bool any_above(Vec<Bits> v, Bits limit) {
#if defined(LSHKIT_ISA_AVX512)
  return _mm512_cmpgt_epi16_mask((__m512i)v, _mm512_set1_epi16(limit)) != 0;
#else
  for (int i = 0; i < kLanes<Bits>; ++i)
    if (v[i] > limit) return true;
  return false;
#endif
}

// Rows [first, first + count) as tiles. False where one is not of a usual size, or rows are no
// whole block.
bool copy_rows(const HashTiles& h, index_t first, index_t count, Word* to) {
  if (count < kTileRows) return false;
  const index_t depth = depth_of(h.n_features);
  Vec<Bits> largest = {};
  for (index_t r = 0; r < count; ++r) {
    const auto* const x = reinterpret_cast<const Bits*>(h.short_x + (first + r) * h.row_stride);
    Vec<Bits> of_row = {};
    for (index_t c = 0; c < h.n_features; c += kLanes<Bits>) {
      const Vec<Bits> v = load(x + c);
      std::memcpy(row_of_a(to, depth, r, c), &v, sizeof(v));
      of_row = larger_lanes(of_row, v & kMagnitude);
    }
    if (!any_above(of_row, kSmallBits)) return false;
    largest = larger_lanes(largest, of_row);
  }
  return !any_above(largest, kLargeBits);
}
// The same for any rows, brought to sizes that products hold by powers of two. False where one is
// not finite.
bool pack_block(const HashTiles& h, index_t first, index_t count, Word* to) {
  const Half* x[kTileRows] = {};
  float factor[kTileRows] = {};
  bool finite = true;
  for (index_t r = 0; r < count; ++r) {
    x[r] = h.short_x + (first + r) * h.row_stride;
    Vec<Bits> largest = {};
    for (index_t c = 0; c < h.n_features; c += kLanes<Bits>)
      largest = larger_lanes(largest, load(reinterpret_cast<const Bits*>(x[r]) + c) & kMagnitude);
    const bool large = any_above(largest, kLargeBits);
    factor[r] = large ? 0x1p-100f : any_above(largest, kSmallBits) ? 1 : 0x1p100f;
    if (large && any_above(largest, kInfinityBits - 1)) finite = false;
  }
  pack_rows(kTileRows, h.n_features, x, factor, to);
  return finite;
}

}  // namespace

void pack_rotations(const HashTiles& h) {
  const Planes p(h);
  const index_t columns = h.columns;
  std::memset(p.high, 0, sizeof(Word) * p.tiles * p.depth * kTileSize);
  Cut cut{h.scratch};
  float* const z = cut.take<float>(columns * W);
  Rotations<0> rotations(cut, columns, h.n_hashes, h.n_bits);
  rotations.set_bits(h.parameters, 0, h.n_bits);
  // W unit vectors at a time, in lanes: a projection of them has as many elements of its normal.
  for (index_t first = 0; first < h.n_features; first += W) {
    std::memset(z, 0, sizeof(float) * columns * W);
    for (index_t i = first; i < smaller(first + W, h.n_features); ++i) z[i * W + i - first] = 1;
    rotations.set_tile(z, h.parameters);
    for (index_t group = 0; group * columns < h.n_hashes; ++group)
      for (int bit = 0; bit < h.n_bits; ++bit)
        rotations.rotate(group, bit, [&](index_t row, F v) LSHKIT_ALWAYS_INLINE {
          const index_t plane = (group * columns + row) * p.bits + bit;
          store_half(row_of_a(p.high, p.depth, plane, first), to_bfloat16(v));
        });
  }
  transpose_tiles(p.high, p.tiles * p.depth);
}

bool fast_hash_tiles(const HashTiles& h) {
  const Planes p(h);
  const PackedRows rows(h);
  const Terms terms{1, {rows.high}, {p.high}};
  const CodeBytes codes(h);
  const index_t next_rows = (kTileRows + p.tiles - 1) / p.tiles;  // to prefetch at a tile
  const TileUse use;
  bool finite = true;
  for (index_t first = 0; first < h.rows; first += kTileRows) {
    const index_t count = smaller(kTileRows, h.rows - first);
    if (!copy_rows(h, first, count, rows.high) && !pack_block(h, first, count, rows.high))
      finite = false;
    for_each_tile(terms, p.depth, p.tiles, rows.sums,
                  [&](index_t t, const float* sums) LSHKIT_ALWAYS_INLINE {
                    const index_t next = first + kTileRows + t * next_rows;
                    for (index_t r = next; r < smaller(next + next_rows, h.rows); ++r)
                      prefetch_row(h.short_x + r * h.row_stride, 2 * h.n_features);
                    if (count == kTileRows && codes.two_bytes(t))
                      codes.write_words(first, t, sums);
                    else
                      for (index_t r = 0; r < count; ++r)
                        codes.write(first + r, t, positive(sums + r * kTile));
                    return true;
                  });
  }
  return finite;
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit
#endif

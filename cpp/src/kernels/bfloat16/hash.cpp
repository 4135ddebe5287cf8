// Codes of hyperplanes by tiles: the codes of hash_hyperplane, for less.
//
// Rows and normals are split in two parts of bfloat16, x = high + low + at most 2^-16 of x. Three
// products of parts give a projection to within `uncertainty` |x| |normal|, which most projections
// exceed: their signs are then those of float32's sums. The others, 3 in 10,000 of normal rows of
// 64 features, are summed in float32, term by term as hash_hyperplane sums them.
#if !defined(LSHKIT_ISA_AVX512_BF16) || defined(LSHKIT_ISA_AMX)
#include "lshkit/hash.hpp"

#include <cmath>

#include "kernels/bfloat16/tiles.hpp"
#include "kernels/kernels.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int W = kLanes<float>;
using F = Vec<float>;

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

// Of 16 sums, bit i of the sum at i: which are positive, and which are too near zero to tell.
struct Signs {
  unsigned positive, uncertain;
};
struct SignsOf {
#if defined(LSHKIT_ISA_AVX512)
  __m512 norm;
  explicit SignsOf(const float* norms) : norm(_mm512_loadu_ps(norms)) {}
  LSHKIT_INLINE Signs operator()(const float* sums, float within) const {
    const __m512 s = _mm512_loadu_ps(sums);
    return {_mm512_cmp_ps_mask(s, __m512{}, _CMP_GT_OQ),
            _mm512_cmp_ps_mask(_mm512_abs_ps(s), norm * within, _CMP_LT_OQ)};
  }
#else
  const float* norm;
  explicit SignsOf(const float* norms) : norm(norms) {}
  Signs operator()(const float* sums, float within) const {
    Signs s{};
    for (int i = 0; i < kTile; ++i) {
      s.positive |= unsigned(sums[i] > 0) << i;
      s.uncertain |= unsigned(std::fabs(sums[i]) < norm[i] * within) << i;
    }
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
    alignas(64) Word tile[kTileSize];
    for (Word* part : {p.high + at, p.low + at})
      for (index_t k = 0; k < p.depth; ++k) {
        std::memcpy(tile, part + k * kTileSize, sizeof(tile));
        transpose_tile(tile, part + k * kTileSize);
      }
  }
  return true;
}

bool hash_tiles(const HashTiles& h) {
  const Planes p(h);
  const index_t d = h.n_features, row_tiles = tiles_of(h.rows);
  Word* const high = reinterpret_cast<Word*>(h.scratch);
  Word* const low = high + row_tiles * p.depth * kTileSize;
  float* const sums = h.scratch + 2 * row_tiles * p.depth * kTileSize;
  const float* x[kTileRows];
  float factor[kTileRows], within[kTileRows];
  const float bound = uncertainty(h);
  for (index_t r = 0; r < h.rows; ++r) {
    x[r] = h.x + r * h.row_stride;
    factor[r] = 1;
    const float square = squared_norm(x[r], d);
    if (!(square > kSmallRow && square < kLargeRow)) return false;
    within[r] = bound * std::sqrt(square);
  }
  pack_rows(h.rows, d, x, factor, high, h.bfloat16 ? nullptr : low);

  const TileUse use;
  const Terms terms{h.bfloat16 ? 2 : 3, {high, high, low}, {p.high, p.low, p.high}};
  const index_t code_bytes = p.bits / 8 * h.n_hashes;  // of a row
  Uncertain uncertain(h, p.bits);
  for (index_t t = 0; t < p.tiles; t += kAside) {
    const index_t columns = smaller(kAside, p.tiles - t);
    multiply(row_tiles, columns, p.depth, terms.from(0, t * p.depth), sums, false);
    for (index_t j = 0; j < columns; ++j) {
      const index_t plane = (t + j) * kTile;
      const SignsOf signs(p.norm + plane);
      const bool two_bytes = plane / 8 + 1 < code_bytes;
      std::uint8_t* to = static_cast<std::uint8_t*>(h.codes) + plane / 8;
      for (index_t first = 0; first < h.rows; first += kTile) {
        const float* of_row = sums + (first / kTile * columns + j) * kTileSize;
        const index_t last = smaller(first + kTile, h.rows);
        for (index_t r = first; r < last; ++r, of_row += kTile, to += code_bytes) {
          const Signs s = signs(of_row, within[r]);
          const auto word = std::uint16_t(s.positive);
          if (two_bytes)
            std::memcpy(to, &word, sizeof(word));
          else
            *to = std::uint8_t(word);
          for (unsigned left = s.uncertain; left; left &= left - 1)
            uncertain.add(r, plane + __builtin_ctz(left));
        }
      }
    }
    // Where many are uncertain, such as all of rows that are orthogonal to the normals.
    if (uncertain.found > h.n_bits * h.n_hashes) return false;
  }
  uncertain.decide();
  return true;
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit
#endif

// Soft codes, tokens in lanes: a tile's projections stay in L1, and the bits of the smallest |z|
// are kept by minimum and maximum of margins as integers, which hold the bits' numbers too: no
// index has to follow a comparison.
#include "hadamard.hpp"
#include "margins.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

static_assert(sizeof(float) == sizeof(std::int32_t), "keys are floats");

// The codes and margins of a tile for a run of hashes, before they are moved to rows.
struct Selection {
  std::int32_t *codes, *margins;  // (hashes, W), (hashes, n_selected, W)

  Selection(Cut& cut, index_t hashes, int n_selected)
      : codes(cut.take<std::int32_t>(round_up(hashes, 4 * W) * W)),
        margins(cut.take<std::int32_t>(round_up(hashes * n_selected, 4 * W) * W)) {}

  void store(const SoftHashRows& h, index_t first, index_t hashes, index_t token,
             index_t count) const {
    const index_t m = h.n_hashes, r = h.n_selected, pair = token * m + first;
    if (h.n_bits <= 8)
      store_rows(codes, hashes, static_cast<std::uint8_t*>(h.codes) + pair, m, count);
    else
      store_rows(codes, hashes, static_cast<std::uint16_t*>(h.codes) + pair, m, count);
    store_rows(margins, hashes * r, reinterpret_cast<Word*>(h.margins + pair * r), m * r, count);
  }

 private:
  typedef std::int32_t __attribute__((may_alias)) Word;
};

LSHKIT_INLINE I minimum(I a, I b) { return a < b ? a : b; }
LSHKIT_INLINE I maximum(I a, I b) { return a < b ? b : a; }

constexpr std::int32_t kPowers[16] = {1,   2,   4,    8,    16,   32,   64,    128,
                                      256, 512, 1024, 2048, 4096, 8192, 16384, 32768};

// Of the hashes 0 .. hashes - 1, whose projection b is at hash * hash_stride + b * bit_stride.
// Selected >= 0: known at compile time.
template <int Selected>
void select(const float* projections, index_t hash_stride, index_t bit_stride, index_t hashes,
            int n_bits, int n_selected, const Selection& to) {
  constexpr int kMost = Selected >= 0 ? Selected : 16;
  const int r = Selected >= 0 ? Selected : n_selected;
  const I none = broadcast<std::int32_t>(0x7fffffff);
  for (index_t i = 0; i < hashes; ++i) {
    I code = {}, margin[kMost + 1];
    LSHKIT_UNROLL
    for (int k = 0; k < r; ++k) margin[k] = none;
    const float* z = projections + i * hash_stride * W;
    LSHKIT_NO_UNROLL
    for (int b = 0; b < n_bits; ++b, z += bit_stride * W) {
      const F v = load(z);
      const I set = code | broadcast(kPowers[b]);
      code = v > F{} ? set : code;
      if (r == 0) continue;
      I own;
      std::memcpy(&own, &v, sizeof(own));
      own = (own & (0x7fffffff & ~kBitOfWord)) | broadcast(kNumbers[b]);
      LSHKIT_UNROLL
      for (int k = 0; k < r; ++k) {
        const I smallest = minimum(margin[k], own);
        own = maximum(margin[k], own);
        margin[k] = smallest;
      }
    }
    store(to.codes + i * W, code);
    LSHKIT_UNROLL
    for (int k = 0; k < r; ++k) store(to.margins + (i * r + k) * W, margin[k]);
  }
}

LSHKIT_INLINE void select_any(const float* projections, index_t hash_stride, index_t bit_stride,
                              index_t hashes, int n_bits, int n_selected, const Selection& to) {
  switch (n_selected) {
    case 0:
      return select<0>(projections, hash_stride, bit_stride, hashes, n_bits, 0, to);
    case 1:
      return select<1>(projections, hash_stride, bit_stride, hashes, n_bits, 1, to);
    case 2:
      return select<2>(projections, hash_stride, bit_stride, hashes, n_bits, 2, to);
    case 3:
      return select<3>(projections, hash_stride, bit_stride, hashes, n_bits, 3, to);
    default:
      return select<-1>(projections, hash_stride, bit_stride, hashes, n_bits, n_selected, to);
  }
}

// The inverse norms of a tile of which some rows are zero or far from 1 in size: those are scaled
// in x, which has all rows, and measured again.
inline F norms_of_scaled(float* x, index_t size, F inverse) {
  scale_tile(x, size);
  F squares = {};
  for (index_t i = 0; i < size; ++i) squares += load(x + i * W) * load(x + i * W);
  LSHKIT_UNROLL
  for (int t = 0; t < W; ++t)
    if (!(inverse[t] > 0x1p-50f && inverse[t] < 0x1p50f))
      inverse[t] = squares[t] == 0 ? 0 : 1 / __builtin_sqrtf(squares[t]);
  return inverse;
}

// The tile's unit vectors times scale, zeros up to `columns`.
LSHKIT_INLINE void load_unit_tile(const SoftHashRows& h, index_t token, index_t count,
                                  index_t columns, float scale, float* x) {
  float inverse[W];
  for (int t = 0; t < W; ++t) inverse[t] = h.inverse_norm[token + (t < count ? t : count - 1)];
  F norm = load(inverse);
  const bool scaled = any_lane(~((norm > 0x1p-50f) & (norm < 0x1p50f)));
  const F factor = norm * scale;
  for (index_t first = 0; first < h.n_features; first += W) {
    F r[W];
    load_tile(h, token, count, first, r);
    LSHKIT_UNROLL
    for (int i = 0; i < W; ++i) store(x + (first + i) * W, scaled ? r[i] : r[i] * factor);
  }
  const index_t size = round_up(h.n_features, W);
  if (scaled) {
    norm = norms_of_scaled(x, size, norm);
    for (index_t i = 0; i < size; ++i) store(x + i * W, load(x + i * W) * norm * scale);
  }
  for (index_t i = size; i < columns; ++i) store(x + i * W, F{});
}

template <int Columns>
struct HadamardTile {
  float* z;            // (columns, W)
  float* projections;  // (n_bits, hashes, W)
  Selection selection;
  Rotations<Columns> rotations;
  index_t bytes;

  HadamardTile(Cut cut, const SoftHashRows& h) : HadamardTile(&cut, h) { bytes = cut.used; }

 private:
  HadamardTile(Cut* cut, const SoftHashRows& h)
      : z(cut->take<float>(h.columns * W)),
        projections(cut->take<float>(h.n_bits * smaller(h.columns, h.n_hashes) * W)),
        selection(*cut, smaller(h.columns, h.n_hashes), h.n_selected),
        rotations(*cut, h.columns, h.n_hashes, h.n_bits) {}
};

template <int Columns>
void soft_hadamard(const SoftHashRows& h) {
  const index_t columns = Columns ? Columns : h.columns;
  HadamardTile<Columns> tile(Cut{h.scratch}, h);
  float* z = tile.z;
  tile.rotations.set_bits(h.parameters, 0, h.n_bits);
  for (index_t token = 0; token < h.rows; token += W) {
    const index_t count = smaller(W, h.rows - token);
    // Scaled to unit variance here, where 1 / D is exact: three transforms of length D^(1/2).
    load_unit_tile(h, token, count, columns, 1.0f / float(columns), z);
    for (int t = 0; t < W; ++t)
      prefetch_row(h.x + smaller(token + W + t, h.rows - 1) * h.row_stride, 4 * h.n_features);
    tile.rotations.set_tile(z, h.parameters);
    for (index_t group = 0; group * columns < h.n_hashes; ++group) {
      const index_t used = tile.rotations.used(group);
      for (int b = 0; b < h.n_bits; ++b) {
        float* to = tile.projections + b * used * W;
        tile.rotations.rotate(
            group, b, [=](index_t row, F v) LSHKIT_ALWAYS_INLINE { store(to + row * W, v); });
      }
      select_any(tile.projections, 1, used, used, h.n_bits, h.n_selected, tile.selection);
      tile.selection.store(h, group * columns, used, token, count);
    }
  }
}

constexpr int kTiles = 2, kPlanes = kRegisters >= 32 ? 8 : 4;
constexpr index_t kRun = 16;  // hashes whose projections are kept

struct HyperplaneTiles {
  index_t x_size, projections_size;
  float *x, *projections;  // of kTiles tiles: (d rounded up, W) and (kRun * n_bits, W)
  Selection selection;
  index_t bytes;

  HyperplaneTiles(Cut cut, const SoftHashRows& h) : HyperplaneTiles(&cut, h) { bytes = cut.used; }

 private:
  HyperplaneTiles(Cut* cut, const SoftHashRows& h)
      : x_size(round_up(h.n_features, W) * W),
        projections_size(kRun * h.n_bits * W),
        x(cut->take<float>(kTiles * x_size)),
        projections(cut->take<float>(kTiles * projections_size)),
        selection(*cut, kRun, h.n_selected) {}
};

void soft_hyperplane(const SoftHashRows& h) {
  const index_t d = h.n_features;
  const HyperplaneTiles tiles(Cut{h.scratch}, h);
  for (index_t token = 0; token < h.rows; token += kTiles * W) {
    const index_t count = smaller(kTiles * W, h.rows - token);
    for (int tile = 0; tile < kTiles; ++tile) {
      const index_t start = smaller(tile * W, count - 1);
      load_unit_tile(h, token + start, smaller(W, count - start), d, 1.0f,
                     tiles.x + tile * tiles.x_size);
    }
    for (index_t first = 0; first < h.n_hashes; first += kRun) {
      const index_t hashes = smaller(kRun, h.n_hashes - first), n_planes = hashes * h.n_bits;
      for (index_t plane = 0; plane < n_planes; plane += kPlanes) {
        const float* normal[kPlanes];
        for (int p = 0; p < kPlanes; ++p)
          normal[p] = h.parameters + (first * h.n_bits + smaller(plane + p, n_planes - 1)) * d;
        F sum[kPlanes][kTiles] = {};
        for (index_t k = 0; k < d; ++k) {
          F v[kTiles];
          LSHKIT_UNROLL
          for (int t = 0; t < kTiles; ++t) v[t] = load(tiles.x + t * tiles.x_size + k * W);
          LSHKIT_UNROLL
          for (int p = 0; p < kPlanes; ++p) LSHKIT_UNROLL
          for (int t = 0; t < kTiles; ++t) sum[p][t] += normal[p][k] * v[t];
        }
        LSHKIT_UNROLL
        for (int p = 0; p < kPlanes; ++p) {
          if (plane + p >= n_planes) break;
          LSHKIT_UNROLL
          for (int t = 0; t < kTiles; ++t)
            store(tiles.projections + t * tiles.projections_size + (plane + p) * W, sum[p][t]);
        }
      }
      for (int tile = 0; tile < kTiles && tile * W < count; ++tile) {
        select_any(tiles.projections + tile * tiles.projections_size, h.n_bits, 1, hashes, h.n_bits,
                   h.n_selected, tiles.selection);
        tiles.selection.store(h, first, hashes, token + tile * W, smaller(W, count - tile * W));
      }
    }
  }
}

}  // namespace

index_t soft_hash_scratch(const SoftHashRows& h) {
  return h.family == Family::hadamard ? HadamardTile<0>(Cut{nullptr}, h).bytes
                                      : HyperplaneTiles(Cut{nullptr}, h).bytes;
}

void soft_hash(const SoftHashRows& h) {
  if (h.family == Family::hyperplane) return soft_hyperplane(h);
  return h.columns == 64 ? soft_hadamard<64>(h) : soft_hadamard<0>(h);
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

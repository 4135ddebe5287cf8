// Angular hashing, tokens in lanes: a tile of W tokens is transposed once, every projection of the
// tile is then a vector of W numbers, and a code's bits are gathered by compare and or.
//
// FastHadamard, D = 64, n_bits 8, n_hashes 32: two transforms for the shared first stage and, as 32
// rows are used, half of one for each of 8 rotations: about 2,200 vector additions a tile. Nothing
// leaves the L1 cache but the tokens and their codes.
#include "hadamard.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

LSHKIT_INLINE index_t padded_hashes(index_t n_hashes) { return round_up(n_hashes, 4 * W); }

void store_tile(const HashRows& h, const std::int32_t* bits, index_t token, index_t count) {
  const index_t m = h.n_hashes;
  if (h.n_bits <= 8)
    store_rows(bits, m, static_cast<std::uint8_t*>(h.codes) + token * m, m, count);
  else if (h.n_bits <= 16)
    store_rows(bits, m, static_cast<std::uint16_t*>(h.codes) + token * m, m, count);
  else
    store_rows(bits, m, static_cast<std::uint32_t*>(h.codes) + token * m, m, count);
}

// Columns > 0: known at compile time, so that the passes unroll.
template <int Columns>
bool hadamard(const HashRows& h) {
  const index_t columns = Columns ? Columns : h.columns;
  Cut cut{h.scratch};
  float* z = cut.take<float>(columns * W);  // the tile after the shared first stage
  std::int32_t* bits = cut.take<std::int32_t>(padded_hashes(h.n_hashes) * W);
  Rotations<Columns> rotations(cut, columns, h.n_hashes, h.n_bits);
  rotations.set_bits(h.parameters, h.first_bit, h.bits());
  std::memset(bits + h.n_hashes * W, 0,
              sizeof(*bits) * (padded_hashes(h.n_hashes) - h.n_hashes) * W);
  bool finite = true;

  for (index_t token = 0; token < h.rows; token += W) {
    const index_t count = smaller(W, h.rows - token);
    Squares squares;
    for (index_t first = 0; first < h.n_features; first += W) {
      F r[W];
      load_tile(h, token, count, first, r);
      LSHKIT_UNROLL
      for (int i = 0; i < W; ++i) {
        store(z + (first + i) * W, r[i]);
        squares.add(i, r[i]);
      }
    }
    if (!squares.well_scaled() && !scale_tile(z, round_up(h.n_features, W))) finite = false;
    for (index_t i = round_up(h.n_features, W); i < columns; ++i) store(z + i * W, F{});
    for (int t = 0; t < W; ++t)
      prefetch_row(h.x + smaller(token + W + t, h.rows - 1) * h.row_stride, 4 * h.n_features);

    rotations.set_tile(z, h.parameters);
    for (index_t group = 0; group * columns < h.n_hashes; ++group)
      for (int b = 0; b < h.n_bits; ++b) {
        const I one = broadcast(std::int32_t(1u << b));
        std::int32_t* codes = bits + group * columns * W;
        rotations.rotate(group, b, [=](index_t row, F v) LSHKIT_ALWAYS_INLINE {
          std::int32_t* code = codes + row * W;
          const I set = (v > F{}) & one;
          store(code, b == 0 ? set : load(code) | set);
        });
      }
    store_tile(h, bits, token, count);
  }
  return finite;
}

}  // namespace

bool hash_hadamard(const HashRows& h) { return h.columns == 64 ? hadamard<64>(h) : hadamard<0>(h); }

// Projections of Tiles * W tokens on kPlanes normals at a time; the tile stays in L1, the normals
// stream from L2 once a tile.
bool hash_hyperplane(const HashRows& h) {
  constexpr int kTiles = 2, kPlanes = kRegisters >= 32 ? 8 : 4;
  const index_t d = h.n_features, n_planes = h.n_hashes * h.n_bits, skipped = h.bits() - h.n_bits;
  float* x = h.scratch;  // (kTiles, d rounded up, W)
  const index_t tile_size = round_up(d, W) * W;
  std::int32_t* bits = reinterpret_cast<std::int32_t*>(x + kTiles * tile_size);
  const index_t bits_size = padded_hashes(h.n_hashes) * W;
  bool finite = true;

  for (index_t token = 0; token < h.rows; token += kTiles * W) {
    const index_t count = smaller(kTiles * W, h.rows - token);
    for (int tile = 0; tile < kTiles; ++tile) {
      const index_t start = smaller(tile * W, count - 1), valid = smaller(W, count - start);
      float* const to = x + tile * tile_size;
      Squares squares;
      for (index_t first = 0; first < d; first += W) {
        F r[W];
        load_tile(h, token + start, valid, first, r);
        LSHKIT_UNROLL
        for (int i = 0; i < W; ++i) {
          store(to + (first + i) * W, r[i]);
          squares.add(i, r[i]);
        }
      }
      if (!squares.well_scaled() && !scale_tile(to, round_up(d, W))) finite = false;
    }
    std::memset(bits, 0, sizeof(std::int32_t) * kTiles * bits_size);
    for (index_t plane = 0; plane < n_planes; plane += kPlanes) {
      const float* normal[kPlanes];
      for (int p = 0; p < kPlanes; ++p) {
        const index_t last = smaller(plane + p, n_planes - 1);
        normal[p] = h.parameters + (last + last / h.n_bits * skipped + h.first_bit) * d;
      }
      F sum[kPlanes][kTiles] = {};
      for (index_t k = 0; k < d; ++k) {
        F v[kTiles];
        LSHKIT_UNROLL
        for (int t = 0; t < kTiles; ++t) v[t] = load(x + t * tile_size + k * W);
        LSHKIT_UNROLL
        for (int p = 0; p < kPlanes; ++p) LSHKIT_UNROLL
        for (int t = 0; t < kTiles; ++t) sum[p][t] += normal[p][k] * v[t];
      }
      LSHKIT_UNROLL
      for (int p = 0; p < kPlanes; ++p) {
        if (plane + p >= n_planes) break;
        const index_t hash = (plane + p) / h.n_bits;
        const I one = broadcast(std::int32_t(1u << ((plane + p) % h.n_bits)));
        LSHKIT_UNROLL
        for (int t = 0; t < kTiles; ++t) {
          std::int32_t* code = bits + t * bits_size + hash * W;
          store(code, load(code) | ((sum[p][t] > F{}) & one));
        }
      }
    }
    for (int tile = 0; tile < kTiles && tile * W < count; ++tile)
      store_tile(h, bits + tile * bits_size, token + tile * W, smaller(W, count - tile * W));
  }
  return finite;
}

}  // namespace LSHKIT_ISA

}  // namespace lshkit

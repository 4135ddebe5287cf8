// Angular hashing, tokens in lanes: a tile of W tokens is transposed once, every projection of the
// tile is then a vector of W numbers, and a code's bits are gathered by compare and or.
//
// FastHadamard, D = 64, n_bits 8, n_hashes 32: a transform for the shared first stage and one for
// each of 8 rotations, of which only the rows that are used are finished: about 2,700 vector
// additions a tile. Nothing leaves the L1 cache but the tokens and their codes.
#include "kernels.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int W = kLanes<float>;
using F = Vec<float>;
using I = Int<float>;

// r[i] = the tile's values of feature first + i, lane = token; tokens past `count` repeat the last.
LSHKIT_INLINE void load_tile(const HashRows& h, index_t token, index_t count, index_t first, F* r) {
  const index_t width = h.n_features - first;
  LSHKIT_UNROLL
  for (int t = 0; t < W; ++t) {
    const float* row = h.x + (token + (t < count ? t : count - 1)) * h.row_stride + first;
    r[t] = width >= W ? load(row) : load_first(row, int(width));
  }
  transpose<float>(r);
}

LSHKIT_INLINE bool all_finite(F v) {
  const I bad = (v - v) != F{};  // NaN for NaN and infinities, and NaN differs from everything
  std::int32_t any = 0;
  LSHKIT_UNROLL
  for (int i = 0; i < W; ++i) any |= bad[i];
  return any == 0;
}

// (hash, lane) to (token, hash): as many codes as fit share a lane, so that one transpose moves
// them all. bits has rows of zeros up to a multiple of W * kPacked hashes.
template <class Code>
void store_codes(const std::int32_t* bits, index_t n_hashes, Code* codes, index_t count) {
  constexpr int kPacked = sizeof(std::int32_t) / sizeof(Code), kHashes = W * kPacked;
  for (index_t first = 0; first < n_hashes; first += kHashes) {
    I r[W];
    LSHKIT_UNROLL
    for (int i = 0; i < W; ++i) {
      r[i] = load(bits + (first + i * kPacked) * W);
      LSHKIT_UNROLL
      for (int k = 1; k < kPacked; ++k)
        r[i] |= load(bits + (first + i * kPacked + k) * W) << (8 * int(sizeof(Code)) * k);
    }
    transpose<std::int32_t>(r);
    const index_t width = smaller(kHashes, n_hashes - first);
    if (width == kHashes / 2) {  // 32 hashes of 8 bits, in registers of 64 bytes
      LSHKIT_UNROLL
      for (int t = 0; t < W; ++t)
        if (t < count) std::memcpy(codes + t * n_hashes + first, &r[t], kVectorBytes / 2);
    } else {
      for (int t = 0; t < W && t < count; ++t)
        std::memcpy(codes + t * n_hashes + first, &r[t], sizeof(Code) * width);
    }
  }
}

LSHKIT_INLINE index_t padded_hashes(index_t n_hashes) { return round_up(n_hashes, 4 * W); }

void store_tile(const HashRows& h, const std::int32_t* bits, index_t token, index_t count) {
  if (h.n_bits <= 8)
    store_codes(bits, h.n_hashes, static_cast<std::uint8_t*>(h.codes) + token * h.n_hashes, count);
  else
    store_codes(bits, h.n_hashes, static_cast<std::uint16_t*>(h.codes) + token * h.n_hashes, count);
}

// ---- Walsh-Hadamard transform ----

// The transform of R registers, of which the first Out outputs are computed.
template <int R, int Out = R>
LSHKIT_INLINE void butterfly(F* v) {
  LSHKIT_UNROLL
  for (int half = R / 2; half >= Out; half /= 2) LSHKIT_UNROLL
  for (int i = 0; i < half; ++i) v[i] += v[i + half];
  constexpr int n = Out < R ? Out : R;
  LSHKIT_UNROLL
  for (int half = n / 2; half >= 1; half /= 2) LSHKIT_UNROLL
  for (int i = 0; i < n; ++i)
    if (!(i & half)) {
      const F a = v[i], b = v[i + half];
      v[i] = a + b;
      v[i + half] = a - b;
    }
}

// One radix-R pass at a stride, of signs[i] * from[i] where there are signs.
template <int R, bool Signs>
LSHKIT_INLINE void pass(const float* from, float* to, index_t columns, index_t stride,
                        const float* signs) {
  for (index_t base = 0; base < columns; base += R * stride)
    for (index_t i = base; i < base + stride; ++i) {
      F v[R];
      LSHKIT_UNROLL
      for (int k = 0; k < R; ++k) {
        v[k] = load(from + (i + k * stride) * W);
        if (Signs) v[k] *= signs[i + k * stride];
      }
      butterfly<R>(v);
      LSHKIT_UNROLL
      for (int k = 0; k < R; ++k) store(to + (i + k * stride) * W, v[k]);
    }
}

// The radix at a stride: 8, and what is left of `columns` at the last.
LSHKIT_INLINE int radix(index_t columns, index_t stride) {
  return int(smaller(8, columns / stride));
}

// The last pass of a rotation: projections of `used` hashes become bit `bit` of their codes.
template <int R, int Out>
LSHKIT_INLINE void sign_pass(const float* from, index_t stride, index_t used, std::int32_t bit,
                             std::int32_t* bits, bool first_bit) {
  const I one = broadcast<std::int32_t>(bit);
  for (index_t i = 0; i < stride; ++i) {
    F v[R];
    LSHKIT_UNROLL
    for (int k = 0; k < R; ++k) v[k] = load(from + (i + k * stride) * W);
    butterfly<R, Out>(v);
    LSHKIT_UNROLL
    for (int k = 0; k < Out; ++k) {
      std::int32_t* code = bits + (i + k * stride) * W;
      if (i + k * stride >= used) continue;
      const I set = (v[k] > F{}) & one;
      store(code, first_bit ? set : load(code) | set);
    }
  }
}

template <int R>
LSHKIT_INLINE void sign_pass_any(const float* from, index_t stride, index_t used, std::int32_t bit,
                                 std::int32_t* bits, bool first_bit) {
  if (used <= stride) return sign_pass<R, 1>(from, stride, used, bit, bits, first_bit);
  if (R > 2 && used <= 2 * stride) return sign_pass<R, 2>(from, stride, used, bit, bits, first_bit);
  if (R > 4 && used <= 4 * stride)
    return sign_pass<R, (R > 4 ? 4 : R)>(from, stride, used, bit, bits, first_bit);
  return sign_pass<R, R>(from, stride, used, bit, bits, first_bit);
}

// Rotates the planes (x_i, x_{i + D/2}); parameters: D/2 cosines, then D/2 sines.
LSHKIT_INLINE void rotate_planes(float* x, index_t columns, const float* parameters) {
  const index_t half = columns / 2;
  for (index_t i = 0; i < half; ++i) {
    const float c = parameters[i], s = parameters[half + i];
    const F a = load(x + i * W), b = load(x + (half + i) * W);
    store(x + i * W, c * a - s * b);
    store(x + (half + i) * W, s * a + c * b);
  }
}

LSHKIT_INLINE void transform(float* x, index_t columns, index_t top) {
  for (index_t stride = 1; stride < top; stride *= 8)
    pass<8, false>(x, x, columns, stride, nullptr);
  switch (radix(columns, top)) {
    case 8:
      return pass<8, false>(x, x, columns, top, nullptr);
    case 4:
      return pass<4, false>(x, x, columns, top, nullptr);
    default:
      return pass<2, false>(x, x, columns, top, nullptr);
  }
}

// Columns > 0: known at compile time, so that the passes unroll.
template <int Columns>
bool hadamard(const HashRows& h) {
  const index_t columns = Columns ? Columns : h.columns;
  float* z = h.scratch;           // (columns, W): the tile after the shared first stage
  float* work = z + columns * W;  // (columns, W)
  std::int32_t* bits = reinterpret_cast<std::int32_t*>(work + columns * W);  // (n_hashes, W)
  index_t top = 8;                                                           // the largest stride
  while (top * 8 < columns) top *= 8;
  std::memset(bits + h.n_hashes * W, 0,
              sizeof(*bits) * (padded_hashes(h.n_hashes) - h.n_hashes) * W);
  bool finite = true;

  for (index_t token = 0; token < h.rows; token += W) {
    const index_t count = smaller(W, h.rows - token);
    for (index_t first = 0; first < h.n_features; first += W) {
      F r[W];
      load_tile(h, token, count, first, r);
      LSHKIT_UNROLL
      for (int i = 0; i < W; ++i) store(z + (first + i) * W, r[i]);
    }
    for (index_t i = round_up(h.n_features, W); i < columns; ++i) store(z + i * W, F{});
    for (int t = 0; t < W; ++t)
      prefetch_row(h.x + smaller(token + W + t, h.rows - 1) * h.row_stride, 4 * h.n_features);

    rotate_planes(z, columns, h.parameters);
    transform(z, columns, top);
    finite = finite && all_finite(load(z));  // row 0 of H sums them all
    rotate_planes(z, columns, h.parameters + columns);
    transform(z, columns, top);
    rotate_planes(z, columns, h.parameters + 2 * columns);

    for (index_t group = 0; group * columns < h.n_hashes; ++group) {
      const index_t used = smaller(columns, h.n_hashes - group * columns);
      for (int b = 0; b < h.n_bits; ++b) {
        const float* signs = h.parameters + (3 + group * h.n_bits + b) * columns;
        pass<8, true>(z, work, columns, 1, signs);
        for (index_t stride = 8; stride < top; stride *= 8)
          pass<8, false>(work, work, columns, stride, nullptr);
        std::int32_t* codes = bits + group * columns * W;
        switch (radix(columns, top)) {
          case 8:
            sign_pass_any<8>(work, top, used, 1 << b, codes, b == 0);
            break;
          case 4:
            sign_pass_any<4>(work, top, used, 1 << b, codes, b == 0);
            break;
          default:
            sign_pass_any<2>(work, top, used, 1 << b, codes, b == 0);
        }
      }
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
  const index_t d = h.n_features, n_planes = h.n_hashes * h.n_bits;
  float* x = h.scratch;  // (kTiles, d rounded up, W)
  const index_t tile_size = round_up(d, W) * W;
  std::int32_t* bits = reinterpret_cast<std::int32_t*>(x + kTiles * tile_size);
  const index_t bits_size = padded_hashes(h.n_hashes) * W;
  bool finite = true;

  for (index_t token = 0; token < h.rows; token += kTiles * W) {
    const index_t count = smaller(kTiles * W, h.rows - token);
    for (int tile = 0; tile < kTiles; ++tile) {
      const index_t start = smaller(tile * W, count - 1), valid = smaller(W, count - start);
      F check = {};
      for (index_t first = 0; first < d; first += W) {
        F r[W];
        load_tile(h, token + start, valid, first, r);
        LSHKIT_UNROLL
        for (int i = 0; i < W; ++i) {
          store(x + tile * tile_size + (first + i) * W, r[i]);
          check += r[i] - r[i];
        }
      }
      finite = finite && all_finite(check);
    }
    std::memset(bits, 0, sizeof(std::int32_t) * kTiles * bits_size);
    for (index_t plane = 0; plane < n_planes; plane += kPlanes) {
      const float* normal[kPlanes];
      for (int p = 0; p < kPlanes; ++p)
        normal[p] = h.parameters + smaller(plane + p, n_planes - 1) * d;
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
        const I one = broadcast<std::int32_t>(1 << ((plane + p) % h.n_bits));
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

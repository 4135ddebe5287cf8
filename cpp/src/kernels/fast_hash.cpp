// FastHadamard codes with 16-bit rotations, two tiles of W tokens at a time. The shared first stage
// z = G2 H G1 H G0 x is float32, as in hash.cpp; then each token's z is scaled to 16 bits, and the
// rotations H P S z run on twice the lanes.
//
// An element q of z stands for q + 1/2: to change its sign is then to change its bits, which is one
// operation with the signs read from memory. 32 rows at a time: what H has above row 32 is
// a matter of signs too, and sums over equal columns leave a transform of 32 elements, which
// AVX-512 keeps in registers. The halves cancel in all of these rows but the first. The scale
// leaves no sum of half of z's elements beyond 16 bits, and the last step of the transform compares
// two of these instead of adding them. Rounding z moves a projection by 3e-4 of its standard
// deviation at 64 columns.
#include "hadamard.hpp"
#include "short_floats.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int L = kLanes<std::int16_t>;
using S = Vec<std::int16_t>;

LSHKIT_INLINE F absolute(F v) { return (F)((I)v & 0x7fffffff); }

// As load_tile, of the next 2 W features of rows of 16 bits: two in a lane are transposed together.
template <class Format>
LSHKIT_INLINE void load_short_tile(const HashRows& h, index_t token, index_t count, index_t first,
                                   F* r) {
  const index_t width = smaller(2 * W, h.n_features - first);
  Vec<std::int32_t> pair[W];
  LSHKIT_UNROLL
  for (int t = 0; t < W; ++t) {
    const Half* row = h.short_x + (token + (t < count ? t : count - 1)) * h.row_stride + first;
    pair[t] = Vec<std::int32_t>{};
    if (width == 2 * W)
      std::memcpy(&pair[t], row, kVectorBytes);
    else
      std::memcpy(&pair[t], row, sizeof(Half) * width);
  }
  transpose<std::int32_t>(pair);
  LSHKIT_UNROLL
  for (int i = 0; i < W; ++i) {
    r[2 * i] = Format::lower(Words(pair[i]));
    r[2 * i + 1] = Format::upper(Words(pair[i]));
  }
}

// A plane rotation, then the transform at strides 8 and up, of R = columns / 8 elements each.
template <int R>
LSHKIT_INLINE void rotate_and_transform(float* z, const float* angles) {
  for (int i = 0; i < 8; ++i) {
    F v[R];
    LSHKIT_UNROLL
    for (int k = 0; k < R; ++k) v[k] = load(z + (i + 8 * k) * W);
    LSHKIT_UNROLL
    for (int k = 0; k < R / 2; ++k)
      rotate_plane(v[k], v[k + R / 2], angles[i + 8 * k], angles[4 * R + i + 8 * k]);
    butterfly<R>(v);
    LSHKIT_UNROLL
    for (int k = 0; k < R; ++k) store(z + (i + 8 * k) * W, v[k]);
  }
}

// The first stage of a tile; sums: of |z| / 1024 over every eighth element. False where a row is
// not finite.
template <int R>
LSHKIT_NOINLINE bool first_stage(const HashRows& h, index_t token, index_t count, float* z,
                                 F* sums) {
  Squares squares;
  const index_t step = h.short_x ? 2 * W : W;
  for (index_t first = 0; first < h.n_features; first += step) {
    F r[2 * W];
    if (h.element == Element::bfloat16)
      load_short_tile<Bfloat16>(h, token, count, first, r);
    else if (h.short_x)
      load_short_tile<Float16>(h, token, count, first, r);
    else
      load_tile(h, token, count, first, r);
    for (int i = 0; i < step; i += W) LSHKIT_UNROLL
    for (int k = 0; k < W; ++k) {
      store(z + (first + i + k) * W, r[i + k]);
      squares.add(k, r[i + k]);
    }
  }
  const bool finite = squares.well_scaled() || scale_tile(z, round_up(h.n_features, W));
  for (index_t i = round_up(h.n_features, W); i < 8 * R; ++i) store(z + i * W, F{});
  rotate_and_transform<R>(z, h.parameters);
  for (int a = 0; a < R; ++a) {
    F v[8];
    LSHKIT_UNROLL
    for (int k = 0; k < 8; ++k) v[k] = load(z + (8 * a + k) * W);
    butterfly<8>(v);
    LSHKIT_UNROLL
    for (int k = 0; k < 8; ++k) store(z + (8 * a + k) * W, v[k]);
  }
  rotate_and_transform<R>(z, h.parameters + 8 * R);
  const float* angles = h.parameters + 16 * R;
  for (int a = 0; a < R / 2; ++a) {
    F v[8], w[8];
    LSHKIT_UNROLL
    for (int k = 0; k < 8; ++k) {
      v[k] = load(z + (8 * a + k) * W);
      w[k] = load(z + (8 * a + k + 4 * R) * W);
    }
    butterfly<8>(v);
    butterfly<8>(w);
    LSHKIT_UNROLL
    for (int k = 0; k < 8; ++k) {
      rotate_plane(v[k], w[k], angles[8 * a + k], angles[4 * R + 8 * a + k]);
      store(z + (8 * a + k) * W, v[k]);
      store(z + (8 * a + k + 4 * R) * W, w[k]);
      sums[k] += (absolute(v[k]) + absolute(w[k])) * (1.0f / 1024);
    }
  }
  return finite;
}

// Of these, the largest sum that a bit has over its even or its odd elements.
LSHKIT_INLINE F largest_half(const F* sums, int n_bits) {
  F largest = {};
  for (int bit = 0; bit < smaller(n_bits, 7); ++bit)
    for (int odd = 0; odd < 2; ++odd) {
      F half = {};
      for (int i = odd; i < 8; i += 2) half += sums[kEightColumns[bit][i]];
      largest = half > largest ? half : largest;
    }
  return largest;
}

// Bit `bit` of the codes of C rows of H P S z. signs: of P S, and of what these rows have above row
// C of H. Codes of a byte share a lane of 16 bits: two rows, of hashes one after the other.
template <int R, int C, int CodeBytes>
LSHKIT_INLINE void sign_rows(const std::int16_t* z, const std::int32_t* signs, int bit,
                             std::int16_t* codes) {
  constexpr int kPairs = C / 2, kWords = CodeBytes == 1 ? 1 : 2;
  S sums[2][kPairs];  // over the even and the odd elements
  const std::int16_t* of_eight[8];
  LSHKIT_UNROLL
  for (int i = 0; i < 8; ++i) of_eight[i] = z + kEightColumns[bit][i] * L;
  LSHKIT_UNROLL
  for (int odd = 0; odd < 2; ++odd) {
    LSHKIT_UNROLL
    for (int j = 0; j < kPairs; ++j) {
      const int first = 2 * j + odd;
      sums[odd][j] = load(of_eight[first % 8] + first / 8 * 8 * L) ^ (S)broadcast(signs[first]);
      LSHKIT_UNROLL
      for (int i = first + C; i < 8 * R; i += C)
        sums[odd][j] += load(of_eight[i % 8] + i / 8 * 8 * L) ^ (S)broadcast(signs[i]);
    }
    butterfly<kPairs>(sums[odd]);
  }
  const S one = broadcast(std::int16_t(1 << bit));
  const S next = CodeBytes == 1 ? one << 8 : one;
  // The halves that the elements stand for and do not have add up in the first row alone.
  const S halves = broadcast(std::int16_t(4 * R));
  LSHKIT_UNROLL
  for (int j = 0; j < kPairs; ++j) {
    const S even = sums[0][j], odd = sums[1][j];
    const S sum = ((j == 0 ? even + halves : even) > -odd) & one, difference = (even > odd) & next;
    std::int16_t* word = codes + j * kWords * L;
    if (CodeBytes == 1) {
      store(word, load(word) | sum | difference);
    } else {
      store(word, load(word) | sum);
      store(word + L, load(word + L) | difference);
    }
  }
}

// As store_codes of hash.cpp; a lane of words holds one or two codes of a token of each tile.
template <class Code>
void store_codes(const HashRows& h, const std::int16_t* words, S valid, index_t token,
                 index_t count) {
  constexpr int kHashes = W * 4 / sizeof(Code);
  Code* codes = static_cast<Code*>(h.codes) + token * h.n_hashes;
  for (index_t first = 0; first < h.n_hashes; first += kHashes, words += 2 * W * L) {
    const index_t width = smaller(kHashes, h.n_hashes - first);
    I r[2][W];
    LSHKIT_UNROLL
    for (int i = 0; i < W; ++i) {
      r[0][i] = r[1][i] = I{};
      if (i * 4 >= width * index_t(sizeof(Code))) continue;
      const I p = (I)(load(words + 2 * i * L) & valid),
              q = (I)(load(words + (2 * i + 1) * L) & valid);
      r[0][i] = (p & 0xffff) | q << 16;
      r[1][i] = (I)((Vec<std::uint32_t>)p >> 16) | (q & ~0xffff);
    }
    LSHKIT_UNROLL
    for (int tile = 0; tile < 2; ++tile) {
      transpose<std::int32_t>(r[tile]);
      const index_t start = tile * W;
      for (int t = 0; t < W && start + t < count; ++t) {
        Code* to = codes + (start + t) * h.n_hashes + first;
        if (width == kHashes / 2)
          std::memcpy(to, &r[tile][t], kVectorBytes / 2);
        else
          std::memcpy(to, &r[tile][t], sizeof(Code) * width);
      }
    }
  }
}

template <int R, int C, int CodeBytes>  // R = columns / 8, C rows of codes at a time
bool hadamard(const HashRows& h) {
  constexpr int D = 8 * R;
  const index_t chunks = (h.n_hashes + C - 1) / C, n_signs = chunks * h.n_bits * D;
  const index_t n_words = round_up(chunks * C * CodeBytes / 2, 2 * W);
  Cut cut{h.scratch};
  float* z = cut.take<float>(2 * D * W);  // (tiles, D, W)
  std::int16_t* rounded = cut.take<std::int16_t>(D * L);
  std::int16_t* words = cut.take<std::int16_t>(n_words * L);
  std::int32_t* signs = cut.take<std::int32_t>(n_signs);  // (chunks, n_bits, D): 0 or -1
  for (index_t chunk = 0; chunk < chunks; ++chunk)
    for (int bit = 0; bit < h.n_bits; ++bit) {
      const index_t rotation = chunk * C / D * h.n_bits + bit, block = chunk % (D / C);
      const float* from = h.parameters + (3 + rotation) * D;
      std::int32_t* to = signs + (chunk * h.n_bits + bit) * D;
      for (index_t i = 0; i < D; ++i) {
        const bool negative = from[kEightColumns.column(i, bit)] < 0;
        to[i] = negative != (__builtin_popcountll(block & (i / C)) % 2) ? -1 : 0;
      }
    }
  bool finite = true;

  for (index_t token = 0; token < h.rows; token += 2 * W) {
    const index_t count = smaller(2 * W, h.rows - token);
    F scale[2];
    for (int tile = 0; tile < 2; ++tile) {
      const index_t start = smaller(tile * W, count - 1);
      F sums[8] = {};
      if (!first_stage<R>(h, token + start, smaller(W, count - start), z + tile * D * W, sums))
        finite = false;
      // A row of zeros stays one.
      const F largest = largest_half(sums, h.n_bits), least = broadcast(1e-36f);
      scale[tile] = float(32767 - D) / 1024 / (largest > least ? largest : least);
    }
    for (int t = 0; t < 2 * W; ++t) {
      const index_t next = smaller(token + 2 * W + t, h.rows - 1) * h.row_stride;
      if (h.short_x)
        prefetch_row(h.short_x + next, 2 * h.n_features);
      else
        prefetch_row(h.x + next, 4 * h.n_features);
    }

    // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the lowest bits.
    const F shift = broadcast(12582912.0f);
    I any[2] = {};
    for (int i = 0; i < D; ++i) {
      I q[2];
      LSHKIT_UNROLL
      for (int tile = 0; tile < 2; ++tile) {
        const F v = load(z + (tile * D + i) * W);
        any[tile] |= (I)v;
        q[tile] = (I)((v * scale[tile] - 0.5f) + shift);
      }
      store(rounded + i * L, (S)((q[0] & 0xffff) | q[1] << 16));
    }
    // Zeros are rounded to 1/2 like all else, but a row of them has the code 0.
    const I zero[2] = {(any[0] & 0x7fffffff) == I{}, (any[1] & 0x7fffffff) == I{}};
    const S valid = (S) ~((zero[0] & 0xffff) | zero[1] << 16);

    std::memset(words, 0, sizeof(*words) * n_words * L);
    for (index_t chunk = 0; chunk < chunks; ++chunk)
      for (int bit = 0; bit < h.n_bits; ++bit)
        sign_rows<R, C, CodeBytes>(rounded, signs + (chunk * h.n_bits + bit) * D, bit,
                                   words + chunk * C * CodeBytes / 2 * L);
    CodeBytes == 1 ? store_codes<std::uint8_t>(h, words, valid, token, count)
                   : store_codes<std::uint16_t>(h, words, valid, token, count);
  }
  return finite;
}

template <int R>
bool hadamard_codes(const HashRows& h) {
  if (h.n_hashes <= 16) return h.n_bits <= 8 ? hadamard<R, 16, 1>(h) : hadamard<R, 16, 2>(h);
  return h.n_bits <= 8 ? hadamard<R, 32, 1>(h) : hadamard<R, 32, 2>(h);
}

}  // namespace

bool fast_hash_hadamard(const HashRows& h) {
  return h.columns == 64 ? hadamard_codes<8>(h) : hadamard_codes<16>(h);
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

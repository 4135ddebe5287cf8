// The weights of all 2^n_bits buckets, in the order of the buckets and with rows in lanes: products
// of a probability for each bit, doubled bit by bit, and the way back by folding in halves.
#include "exponential.hpp"
#include "kernels.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

typedef Vec<float> F;
constexpr int W = kLanes<float>, kMostBits = 12;
constexpr index_t kUpper = index_t(1) << (kMostBits - 4);  // groups of 16 buckets

typedef Vec<std::int32_t> I;
constexpr index_t kColumns = 64;  // margins of a row that are turned into lanes at once

template <class T, class From>
LSHKIT_INLINE Vec<T> load_some(const From* p, index_t count) {
  typedef From Lanes __attribute__((vector_size(sizeof(From) * W)));
  Lanes lanes = {};
  if (count >= W)
    std::memcpy(&lanes, p, sizeof(lanes));
  else
    std::memcpy(&lanes, p, sizeof(From) * count);
  return __builtin_convertvector(lanes, Vec<T>);
}

// to[c] = column c of a tile of rows, zero beyond them.
template <class T, class From>
void load_columns(const From* rows, index_t stride, index_t count, index_t columns, Vec<T>* to) {
  for (index_t c = 0; c < columns; c += W) {
    LSHKIT_UNROLL
    for (int i = 0; i < W; ++i)
      to[c + i] = i < count ? load_some<T>(rows + i * stride + c, columns - c) : Vec<T>{};
    transpose<T>(to + c);
  }
}

// What a tile of rows has for some of the hashes.
struct Tile {
  F margins[kColumns + W];
  I bits[kColumns + W], codes[kColumns + W];
  F one;  // 0 for rows that take no part
  index_t row, count;

  template <class Code>
  Tile(const ProbeRows& p, const Code* all_codes, index_t first_row, index_t hash, index_t hashes,
       int n_bits)
      : row(first_row), count(smaller(W, p.rows - first_row)) {
    const index_t pair = row * p.n_hashes + p.first_hash + hash, stride = p.n_hashes * n_bits;
    load_columns<float>(p.margins + pair * n_bits, stride, count, hashes * n_bits, margins);
    load_columns<std::int32_t>(p.bits + pair * n_bits, stride, count, hashes * n_bits, bits);
    load_columns<std::int32_t>(all_codes + pair, p.n_hashes, count, hashes, codes);
    float lanes[W] = {};
    for (index_t i = 0; i < count; ++i) lanes[i] = !p.valid || p.valid[row + i];
    one = load(lanes);
  }
  // x with the other sign where bit b of the own code is clear.
  LSHKIT_INLINE F with_sign(F x, index_t hash, I b) const {
    return (codes[hash] >> b & 1) == 0 ? -x : x;
  }
};
// Hashes a tile.
LSHKIT_INLINE index_t tile_hashes(int n_bits) { return kColumns / n_bits; }

// Probabilities of the bits of a tile, of one hash.
struct BitTile {
  F z[16];               // projections, as far as bits and margins tell them
  F set[16], clear[16];  // probabilities of bit b
  F one;

  LSHKIT_INLINE BitTile(const Tile& tile, index_t hash, float sharpness, int n_bits)
      : one(tile.one) {
    const auto takes_part = one > F{};
    const F* margins = tile.margins + hash * n_bits;
    const I* bits = tile.bits + hash * n_bits;
    for (int b = 0; b < n_bits; ++b) {
      F x = {};
      for (int k = 0; k < n_bits; ++k) x = bits[k] == b ? margins[k] : x;
      z[b] = takes_part ? tile.with_sign(x, hash, I{} + b) : F{};
    }
    probabilities(sharpness, n_bits);
  }
  LSHKIT_INLINE void probabilities(float sharpness, int n_bits) {
    const F twice = broadcast(2 * sharpness);
    for (int b = 0; b < n_bits; ++b) {
      const auto negative = z[b] < F{};
      const F e = exp_minus((negative ? -z[b] : z[b]) * twice);
      const F stays = 1.0f / (1.0f + e), flips = e * stays;
      set[b] = negative ? flips : stays;
      clear[b] = negative ? stays : flips;
    }
  }
  // to[c] = first * the product of the probabilities of the bits [begin, end) of c.
  template <int Begin, int End>
  LSHKIT_INLINE void products(F first, F* to) const {
    to[0] = first;
    LSHKIT_UNROLL
    for (int b = Begin; b < End; ++b) {
      const int half = 1 << (b - Begin);
      LSHKIT_UNROLL
      for (int c = 0; c < half; ++c) {
        to[half + c] = to[c] * set[b];
        to[c] *= clear[b];
      }
    }
  }
  void upper_products(int n_bits, F* to) const {
    to[0] = one;
    for (int b = 4; b < n_bits; ++b) {
      const index_t half = index_t(1) << (b - 4);
      for (index_t c = 0; c < half; ++c) {
        to[half + c] = to[c] * set[b];
        to[c] *= clear[b];
      }
    }
  }
};

// From the sums of weight * gradient by the bits [begin, end) of a bucket, which are overwritten,
// to the gradient of 2 sharpness z.
LSHKIT_INLINE void fold_bits(const BitTile& tile, int begin, int end, F* sums, F* to) {
  for (int b = end - 1; b >= begin; --b) {
    const index_t half = index_t(1) << (b - begin);
    F low = {}, high = {};
    for (index_t c = 0; c < half; ++c) {
      low += sums[c];
      high += sums[half + c];
      sums[c] += sums[half + c];
    }
    to[b] = tile.clear[b] * high - tile.set[b] * low;
  }
}

// Low: of the bits whose products stay in registers.
template <int Low>
void weigh(const BitTile& tile, int n_bits, float* to, index_t stride) {
  F low[1 << Low];
  if (Low < 4 || n_bits == 4) {
    tile.products<0, Low>(tile.one, low);
    LSHKIT_UNROLL
    for (int c = 0; c < (1 << Low); ++c) store(to + c * stride, low[c]);
    return;
  }
  F upper[kUpper];
  tile.upper_products(n_bits, upper);
  tile.products<0, Low>(broadcast(1.0f), low);
  for (index_t u = 0; u < index_t(1) << (n_bits - Low); ++u, to += stride << Low) {
    LSHKIT_UNROLL
    for (int c = 0; c < (1 << Low); ++c) store(to + c * stride, low[c] * upper[u]);
  }
}

template <int Low>
void unweigh(const BitTile& tile, int n_bits, const float* weights, const float* grads,
             index_t stride, F* to) {
  F low[1 << Low] = {}, upper[kUpper];
  const index_t groups = index_t(1) << (n_bits - Low);
  for (index_t u = 0; u < groups; ++u) {
    F sum = {};
    LSHKIT_UNROLL
    for (int c = 0; c < (1 << Low); ++c) {
      const index_t at = ((u << Low) + c) * stride;
      const F product = load(weights + at) * load(grads + at);
      low[c] += product;
      sum += product;
    }
    upper[u] = sum;
  }
  fold_bits(tile, 0, Low, low, to);
  fold_bits(tile, Low, n_bits, upper, to);
}

// body(tile, hash within it, hash within the group) for all rows and hashes.
template <class Code, class Body>
LSHKIT_INLINE void each_hash(const ProbeRows& p, const Code* codes, int n_bits, const Body& body) {
  for (index_t row = 0; row < p.rows; row += W)
    for (index_t first = 0; first < p.group; first += tile_hashes(n_bits)) {
      const index_t hashes = smaller(tile_hashes(n_bits), p.group - first);
      const Tile tile(p, codes, row, first, hashes, n_bits);
      body(tile, first, hashes);
    }
}

template <class Code>
void expand(const ProbeRows& p, const Code* codes, int n_bits, float* weights, index_t stride) {
  each_hash(p, codes, n_bits, [&](const Tile& tile, index_t first, index_t hashes) {
    for (index_t h = 0; h < hashes; ++h) {
      const BitTile bits(tile, h, p.sharpness, n_bits);
      float* to = weights + ((first + h) << n_bits) * stride + tile.row;
      switch (n_bits) {
        case 1:
          weigh<1>(bits, n_bits, to, stride);
          break;
        case 2:
          weigh<2>(bits, n_bits, to, stride);
          break;
        case 3:
          weigh<3>(bits, n_bits, to, stride);
          break;
        default:
          weigh<4>(bits, n_bits, to, stride);
      }
    }
  });
}

template <class Code>
double reduce(const ProbeRows& p, const Code* codes, int n_bits, const float* weights,
              const float* grads, index_t stride, float* margin_grads, index_t margin_stride) {
  const F twice = broadcast(2 * p.sharpness);
  double total = 0;
  each_hash(p, codes, n_bits, [&](const Tile& tile, index_t first, index_t hashes) {
    F out[kColumns + W];
    for (index_t h = 0; h < hashes; ++h) {
      const BitTile bits(tile, h, p.sharpness, n_bits);
      const index_t at = ((first + h) << n_bits) * stride + tile.row;
      F grad[16];
      switch (n_bits) {
        case 1:
          unweigh<1>(bits, n_bits, weights + at, grads + at, stride, grad);
          break;
        case 2:
          unweigh<2>(bits, n_bits, weights + at, grads + at, stride, grad);
          break;
        case 3:
          unweigh<3>(bits, n_bits, weights + at, grads + at, stride, grad);
          break;
        default:
          unweigh<4>(bits, n_bits, weights + at, grads + at, stride, grad);
      }
      const auto takes_part = tile.one > F{};
      F sum = {};
      for (int b = 0; b < n_bits; ++b) {
        grad[b] = takes_part ? grad[b] : F{};
        sum += grad[b] * bits.z[b];
      }
      total += double(sum_lanes(sum));
      for (int k = 0; k < n_bits; ++k) {
        const I number = tile.bits[h * n_bits + k];
        F x = {};
        for (int b = 0; b < n_bits; ++b) x = number == b ? grad[b] : x;
        out[h * n_bits + k] = tile.with_sign(x, h, number) * twice;
      }
    }
    const index_t columns = hashes * n_bits;
    float* to = margin_grads + tile.row * margin_stride + first * n_bits;
    for (index_t c = 0; c < columns; c += W) {
      for (index_t i = columns; i < c + W; ++i) out[i] = F{};
      transpose<float>(out + c);
      for (index_t i = 0; i < tile.count; ++i)
        store_first(to + i * margin_stride + c, out[c + i], int(smaller(W, columns - c)));
    }
  });
  return 2 * total;
}

}  // namespace

void dense_probes(const ProbeRows& p, float* weights, index_t stride) {
  if (p.code_bytes == 1)
    expand(p, static_cast<const std::uint8_t*>(p.codes), p.n_selected, weights, stride);
  else
    expand(p, static_cast<const std::uint16_t*>(p.codes), p.n_selected, weights, stride);
}

double dense_probes_gradient(const ProbeRows& p, const float* weights, const float* weight_grads,
                             index_t stride, float* margin_grads, index_t margin_grad_stride) {
  if (p.code_bytes == 1)
    return reduce(p, static_cast<const std::uint8_t*>(p.codes), p.n_selected, weights, weight_grads,
                  stride, margin_grads, margin_grad_stride);
  return reduce(p, static_cast<const std::uint16_t*>(p.codes), p.n_selected, weights, weight_grads,
                stride, margin_grads, margin_grad_stride);
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

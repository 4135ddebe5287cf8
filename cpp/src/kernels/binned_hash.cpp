// Codes of bins, tokens in lanes and in double precision: float would lose the bins of rows that
// are far from the origin.
//
// floor costs one addition: 1.5 * 2^52 + v rounds v to the nearest integer and leaves it, modulo
// 2^32 and in two's complement, in the low half of the lane, where the 32-bit multiplication takes
// it from. floor(v) = round(v - 1/2), but for v an integer, which is then one bin's or the other's.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int W = kLanes<double>;
using D = Vec<double>;
typedef std::uint64_t U __attribute__((vector_size(kVectorBytes)));

// Of the low halves of the lanes.
LSHKIT_INLINE U product(U a, U b) {
#if defined(LSHKIT_ISA_AVX512)
  return (U)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(LSHKIT_ISA_AVX2)
  return (U)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (U)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffff) * (b & 0xffffffff);
#endif
}

LSHKIT_INLINE U hashed(D v, std::uint32_t multiplier) {
  return product((U)(v + 6755399441055744.0), (U)broadcast(multiplier));
}

LSHKIT_INLINE U mix(U h) {
  h = (h ^ (h >> 33)) * 0xff51afd7ed558ccdull;
  h = (h ^ (h >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return h ^ (h >> 33);
}

LSHKIT_INLINE D load_row(const double* row, index_t left) {
  return left >= W ? load(row) : load_first(row, int(left));
}
LSHKIT_INLINE D load_row(const float* row, index_t left) {
  typedef float Half __attribute__((vector_size(kVectorBytes / 2)));
  Half half = {};
  if (left >= W)
    std::memcpy(&half, row, sizeof(Half));  // of a known size: one load
  else
    std::memcpy(&half, row, sizeof(float) * left);
  return __builtin_convertvector(half, D);
}

// to[feature][lane] of `count` rows, of which the last is repeated. False where one is not finite.
template <int Tiles, class T>
LSHKIT_INLINE bool load_tiles(const BinnedRows<T>& h, index_t token, index_t count, double* to) {
  const index_t d = h.functions.n_features;
  D zeros[2] =
      {};  // NaN where a number is not finite; two, so that they do not wait for each other
  for (int tile = 0; tile < Tiles; ++tile)
    for (index_t first = 0; first < d; first += W) {
      D r[W];
      LSHKIT_UNROLL
      for (int t = 0; t < W; ++t) {
        const index_t row = token + smaller(tile * W + t, count - 1);
        r[t] = load_row(h.x + row * h.row_stride + first, d - first);
        zeros[t % 2] += r[t] * 0.0;
      }
      transpose<double>(r);
      LSHKIT_UNROLL
      for (int i = 0; i < W; ++i) store(to + (first + i) * Tiles * W + tile * W, r[i]);
    }
  return sum_lanes(zeros[0] + zeros[1]) == 0;
}

// Whole tiles without a loop, whose end would be mispredicted for each hash.
template <class Code, int Rows>
LSHKIT_INLINE void store_column(const std::uint64_t* lanes, index_t count, void* codes,
                                index_t first, index_t stride) {
  Code* to = static_cast<Code*>(codes) + first;
  if (count == Rows) {
    LSHKIT_UNROLL
    for (int t = 0; t < Rows; ++t) to[t * stride] = Code(lanes[t]);
  } else {
    for (index_t t = 0; t < count; ++t) to[t * stride] = Code(lanes[t]);
  }
}

// The code of hash j of `count` rows. Folded: there is a fold, which costs the others nothing.
template <bool Folded, int Tiles, class T>
LSHKIT_INLINE void store_codes(const BinnedRows<T>& h, index_t token, index_t count, index_t j,
                               const U* sums) {
  const BinnedFunctions& f = h.functions;
  std::uint64_t lanes[Tiles * W];
  LSHKIT_UNROLL
  for (int t = 0; t < Tiles; ++t) {
    U code = mix(sums[t]) >> 32;
    if (Folded) code = (code * f.fold[j] + f.fold[f.n_hashes + j]) >> (64 - f.fold_bits);
    std::memcpy(lanes + t * W, &code, sizeof(U));
  }
  const index_t first = token * f.n_hashes + j;
  if (!Folded)
    store_column<std::uint32_t, Tiles * W>(lanes, count, h.codes, first, f.n_hashes);
  else if (f.code_bytes() == 1)
    store_column<std::uint8_t, Tiles * W>(lanes, count, h.codes, first, f.n_hashes);
  else
    store_column<std::uint16_t, Tiles * W>(lanes, count, h.codes, first, f.n_hashes);
}

template <bool Folded, int Tiles, class T>
bool bins_of_features(const BinnedRows<T>& h, index_t token, index_t count) {
  const BinnedFunctions& f = h.functions;
  double* x = static_cast<double*>(h.scratch);
  const bool finite = load_tiles<Tiles>(h, token, count, x);
  for (index_t j = 0; j < f.n_hashes; ++j) {
    const index_t row = j * f.n_features;
    U sums[Tiles] = {};
    for (index_t i = 0; i < f.n_features; ++i) {
      const double factor = f.factors[row + i], shift = f.shifts[row + i] - 0.5;
      LSHKIT_UNROLL
      for (int t = 0; t < Tiles; ++t)
        sums[t] += hashed(load(x + (i * Tiles + t) * W) * factor + shift, f.multipliers[row + i]);
    }
    store_codes<Folded, Tiles>(h, token, count, j, sums);
  }
  return finite;
}

template <bool Folded, int Tiles, class T>
bool bins_of_projections(const BinnedRows<T>& h, index_t token, index_t count) {
  constexpr int kGroup = kRegisters >= 32 ? 8 : 4;
  const BinnedFunctions& f = h.functions;
  const index_t d = f.n_features, n_projections = f.n_hashes * f.n_bits;
  double* x = static_cast<double*>(h.scratch);
  const bool finite = load_tiles<Tiles>(h, token, count, x);
  U sums[Tiles] = {};  // of the hash that is being made
  index_t made = 0;    // its bits so far
  for (index_t first = 0, hash = 0; first < n_projections; first += kGroup) {
    const double* factors[kGroup];
    for (int p = 0; p < kGroup; ++p)
      factors[p] = f.factors + smaller(first + p, n_projections - 1) * d;
    D v[kGroup][Tiles] = {};
    for (index_t i = 0; i < d; ++i) {
      D features[Tiles];
      LSHKIT_UNROLL
      for (int t = 0; t < Tiles; ++t) features[t] = load(x + (i * Tiles + t) * W);
      LSHKIT_UNROLL
      for (int p = 0; p < kGroup; ++p) LSHKIT_UNROLL
      for (int t = 0; t < Tiles; ++t) v[p][t] += factors[p][i] * features[t];
    }
    LSHKIT_UNROLL
    for (int p = 0; p < kGroup; ++p) {
      if (first + p >= n_projections) break;
      const double shift = f.shifts[first + p] - 0.5;
      LSHKIT_UNROLL
      for (int t = 0; t < Tiles; ++t) sums[t] += hashed(v[p][t] + shift, f.multipliers[first + p]);
      if (++made < f.n_bits) continue;
      store_codes<Folded, Tiles>(h, token, count, hash++, sums);
      made = 0;
      LSHKIT_UNROLL
      for (int t = 0; t < Tiles; ++t) sums[t] = U{};
    }
  }
  return finite;
}

template <bool Folded, class T>
bool hash_rows(const BinnedRows<T>& h) {
  const bool features = h.functions.n_bits == 0;
  const int tiles = features ? 4 : 2;
  static_assert(4 * W <= kBinnedTile);
  bool finite = true;
  for (index_t token = 0; token < h.rows;) {
    const index_t left = h.rows - token, count = smaller(left, tiles * W);
    if (count > W)
      finite &= features ? bins_of_features<Folded, 4>(h, token, count)
                         : bins_of_projections<Folded, 2>(h, token, count);
    else
      finite &= features ? bins_of_features<Folded, 1>(h, token, count)
                         : bins_of_projections<Folded, 1>(h, token, count);
    token += count;
  }
  return finite;
}

}  // namespace

#define LSHKIT_DEFINE(T)                                                         \
  bool binned_hash(const BinnedRows<T>& rows) {                                  \
    return rows.functions.fold ? hash_rows<true>(rows) : hash_rows<false>(rows); \
  }
LSHKIT_DEFINE(float)
LSHKIT_DEFINE(double)
#undef LSHKIT_DEFINE

}  // namespace LSHKIT_ISA
}  // namespace lshkit

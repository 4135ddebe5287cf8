// The weighted sum verb in 16-bit integers: half the bytes of weighted_bucket_sum.cpp's table rows,
// and half the stores, which bound it. A product with a weight is one instruction, which rounds it
// to an integer. The table wraps around; whether an addition left 16 bits is looked at in each. A
// row's products with table rows are exact. Halves are rounded up: weights are odd, of 15 bits, or
// a weight of 1/2 or 1/4 would have many of them, a bias.
//
// Measured at 4 probes, 4096 buckets and 64 columns (Zen 4), whole forward passes, nanoseconds a
// row and hash at 4096 rows: 37, in float32 48. With AVX-512 alone: AVX2 looks for overflows in
// four operations in the place of two, and float32 takes as long. And in plain C++ for the twin of
// AMX, so that every machine can test it.
#if defined(LSHKIT_ISA_AVX512) || defined(LSHKIT_ISA_AMX_TWIN)
#if defined(LSHKIT_ISA_AVX512)
#include <immintrin.h>
#endif

#include "kernels.hpp"
#include "simd.hpp"
#include "used_rows.hpp"
#include "weighted_bucket_sum.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int W = kLanes<float>;
using F = Vec<float>;
using I = Vec<std::int32_t>;
using U = Vec<std::uint32_t>;
using S = Vec<std::int16_t>;
typedef std::uint16_t U16 __attribute__((vector_size(kVectorBytes)));

// Of 16-bit lanes: round(a b / 2^15); a + b, at most 2^15 - 1 and at least -2^15; and the sums of
// two neighbouring products as 32-bit lanes.
#if defined(LSHKIT_ISA_AVX512)
LSHKIT_INLINE S high_product(S a, S b) { return S(_mm512_mulhrs_epi16(__m512i(a), __m512i(b))); }
LSHKIT_INLINE S add_within(S a, S b) { return S(_mm512_adds_epi16(__m512i(a), __m512i(b))); }
LSHKIT_INLINE I pair_product(S a, S b) { return I(_mm512_madd_epi16(__m512i(a), __m512i(b))); }
#else
LSHKIT_INLINE S high_product(S a, S b) {
  for (int i = 0; i < 2 * W; ++i) a[i] = std::int16_t((a[i] * b[i] + (1 << 14)) >> 15);
  return a;
}
LSHKIT_INLINE S add_within(S a, S b) {
  constexpr int least = -(1 << 15), most = -least - 1;
  for (int i = 0; i < 2 * W; ++i) {
    const int sum = a[i] + b[i];
    a[i] = std::int16_t(sum < least ? least : sum > most ? most : sum);
  }
  return a;
}
LSHKIT_INLINE I pair_product(S a, S b) {
  I sums;
  for (int i = 0; i < W; ++i) sums[i] = a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  return sums;
}
#endif

#define LSHKIT_UNROLL_PROBES _Pragma("GCC unroll 4")
constexpr index_t kAhead = 12;                     // rows to prefetch ahead
constexpr int kLine = kSliceBytes / kVectorBytes;  // registers a slice, 2 W columns each
constexpr float kOne = 32768;                      // a weight of 1, but for its last bit
constexpr float kLargestFactor = 8191;  // 14 bits: two registers of products stay within 32 bits
constexpr float kSmallFactor = 0x1p-100f;

// Cleared: all of the table is used, and there are no masks.
template <int Slices, int Probes, bool Full, bool Cleared = false>
struct Run {
  static constexpr int kRegisterCount = Slices * kLine, kStride = Slices * kFastColumns;
  static constexpr int kSummed = Probes ? Probes : 1;  // as in weighted_bucket_sum.cpp
  // Two registers of products stay within 32 bits; short ones are more.
  using Dot = std::conditional_t<kRegisterCount <= 2, I, F>;
  const FastWeightedPass p;

  static LSHKIT_INLINE Dot dot_part(S a, S b) {
    return __builtin_convertvector(pair_product(a, b), Dot);
  }

  LSHKIT_INLINE static int count(const FastWeightedRows& rows) {
    return Probes ? Probes : rows.n_probes;
  }
  LSHKIT_INLINE static void prefetch_row(const std::int16_t* row) {
    LSHKIT_UNROLL
    for (int i = 0; i < Slices; ++i) prefetch(row + i * kFastColumns);
  }
  LSHKIT_INLINE static void load_row(const std::int16_t* x, S* v) {
    LSHKIT_UNROLL
    for (int i = 0; i < kRegisterCount; ++i) v[i] = load(x + 2 * i * W);
  }

  // False if a sum left 16 bits at some time.
  bool add_all() const {
    const int probes = count(p.add);
    U overflow = {};  // in the sign bits
    for (index_t j = 0; j < p.add.count; ++j) {
      if (p.add.valid && !p.add.valid[j]) continue;
      const std::int16_t* x = p.add.rows + j * p.add.stride;
      if (j + kAhead < p.add.count) prefetch_row(x + kAhead * p.add.stride);
      S v[kRegisterCount];
      load_row(x, v);
      const std::uint16_t* slot = p.add.slots + j * probes;
      const std::uint32_t* weight = p.add.weights + j * probes;
      LSHKIT_UNROLL_PROBES
      for (int a = 0; a < probes; ++a) {
        std::int16_t* to = p.table + index_t(slot[a]) * kStride;
        const RowMask used = Cleared || !p.used ? kAllUsed : use_row(p.used + slot[a]);
        const S w = S(broadcast(weight[a]));
        LSHKIT_UNROLL
        for (int i = 0; i < kRegisterCount; ++i) {
          const S before = Cleared ? load(to + 2 * i * W) : load_used(to + 2 * i * W, used);
          const S x = high_product(v[i], w);
          const S after = S(U16(before) + U16(x));
          overflow |= U((before ^ after) & (x ^ after));
          store(to + 2 * i * W, after);
        }
      }
    }
    if (p.used)
      clear_unused(p.used, p.table_rows, [&](index_t row) {
        LSHKIT_UNROLL
        for (int i = 0; i < kRegisterCount; ++i) store(p.table + row * kStride + 2 * i * W, S{});
      });
    std::uint32_t any = 0;
    for (int i = 0; i < W; ++i) any |= overflow[i];
    return !(any & 0x80008000u);
  }
  LSHKIT_INLINE void write(float* out, int column, I sum) const {
    F y = rounded(__builtin_convertvector(sum, F) * load(p.sum_scale + column));
    if (Full) {
      if (p.accumulate_sum) y += load(out + column);
      store(out + column, y);
    } else {
      if (p.accumulate_sum) y += load_first(out + column, p.width - column);
      store_first(out + column, y, p.width - column);
    }
  }
  LSHKIT_NOINLINE static void reduce_dots(const F* partial, bool accumulate, float* to, int count) {
    F sums = sum_each<W / kSummed, float, kSummed>(partial);
    if (accumulate) sums += load_first(to, count);
    store_first(to, sums, count);
  }

  template <bool Sum, bool Dots>
  LSHKIT_INLINE void read_all() const {
    const int probes = count(p.read);
    F partial[W / kSummed] = {};  // of W dot products, of one row after the other
    int waiting = 0;
    float* dots = p.dots;
    for (index_t i = 0; i < p.read.count; ++i) {
      const std::uint16_t* slot = p.read.slots + i * probes;
      const std::uint32_t* weight = p.read.weights + i * probes;
      S x[kRegisterCount], sum[kRegisterCount] = {};
      F scale;
      if (Dots) {
        const std::int16_t* row = p.read.rows + i * p.read.stride;
        if (i + kAhead < p.read.count) prefetch_row(row + kAhead * p.read.stride);
        load_row(row, x);
        scale = broadcast(p.dot_scale[i]);
      }
      F own[kSummed];
      float* out = Sum ? p.sum + i * p.sum_stride : nullptr;
      if (Sum && i + kAhead < p.read.count) {
        LSHKIT_UNROLL
        for (int k = 0; k < 2 * Slices; ++k)
          __builtin_prefetch(out + kAhead * p.sum_stride + k * (kFastColumns / 2), 1);
      }
      LSHKIT_UNROLL_PROBES
      for (int a = 0; a < probes; ++a) {
        S v[kRegisterCount];
        load_row(p.table + index_t(slot[a]) * kStride, v);
        if (Sum) {
          const S w = S(broadcast(weight[a]));
          LSHKIT_UNROLL
          for (int k = 0; k < kRegisterCount; ++k)
            sum[k] = add_within(sum[k], high_product(v[k], w));
        }
        if (Dots) {
          Dot dot = dot_part(v[0], x[0]);
          LSHKIT_UNROLL
          for (int k = 1; k < kRegisterCount; ++k) dot += dot_part(v[k], x[k]);
          own[a % kSummed] = __builtin_convertvector(dot, F) * scale;
          if (a % kSummed == kSummed - 1) {
            partial[waiting++] = sum_each<kSummed, float>(own);
            if (waiting == W / kSummed) {
              reduce_dots(partial, p.accumulate_dots, dots, W);
              dots += W;
              waiting = 0;
            }
          }
        }
      }
      if (Sum) {
        LSHKIT_UNROLL
        for (int k = 0; k < kRegisterCount; ++k) {
          write(out, 2 * k * W, I(U(sum[k]) << 16) >> 16);
          write(out, (2 * k + 1) * W, I(sum[k]) >> 16);
        }
      }
    }
    if (Dots && waiting) reduce_dots(partial, p.accumulate_dots, dots, waiting * kSummed);
  }
};

template <int Slices, int Probes, bool Full>
LSHKIT_INLINE void read(const FastWeightedPass& p) {
  const Run<Slices, Probes, Full> run{p};
  if (!p.dots) return run.template read_all<true, false>();
  if (!p.sum) return run.template read_all<false, true>();
  run.template read_all<true, true>();
}
template <int Slices>
void read(const FastWeightedPass& p) {
  const bool full = p.width == Slices * kFastColumns;
  if (full && p.read.n_probes == 4) return read<Slices, 4, true>(p);
  if (full && p.read.n_probes == 2) return read<Slices, 2, true>(p);
  read<Slices, 0, false>(p);
}
template <int Slices>
bool add(const FastWeightedPass& p) {
  if (kMasksRows && p.add.n_probes == 4 && !p.used) return Run<Slices, 4, true, true>{p}.add_all();
  if (p.add.n_probes == 4) return Run<Slices, 4, true>{p}.add_all();
  if (p.add.n_probes == 2) return Run<Slices, 2, true>{p}.add_all();
  return Run<Slices, 0, true>{p}.add_all();
}

// To the nearest integer: adding 1.5 * 2^23 leaves it in the lowest bits.
LSHKIT_INLINE U nearest(F v) { return U(v + broadcast(12582912.0f)); }

}  // namespace

bool fast_weighted_add(const FastWeightedPass& p) { return p.slices == 1 ? add<1>(p) : add<2>(p); }
void fast_weighted_read(const FastWeightedPass& p) { p.slices == 1 ? read<1>(p) : read<2>(p); }

void fast_weights(const float* weights, index_t count, std::uint32_t* out) {
  const F most = broadcast(kOne / 2 - 1);
  for (index_t k = 0; k < count; k += W) {
    const int left = int(smaller(W, count - k));
    const F w = load_first(weights + k, left), half = w * (kOne / 2) - 0.5f;
    const U odd = (nearest(half < most ? half : most) & 0x7fff) << 1 | 1;
    const U bits = w > F{} ? odd : U{};
    store_first(out + k, bits | (bits << 16), left);
  }
}

bool fast_factors(Matrix<const float> rows, const float* scale, std::int16_t* out,
                  index_t out_stride, float* to_factor) {
  for (index_t i = 0; i < rows.rows; ++i) {
    const float* row = rows.row(i);
    const auto scaled = [&](index_t column) {
      return load_first(row + column, int(smaller(W, rows.columns - column))) *
             load(scale + column);
    };
    I most = {};  // numbers without their signs are in the order of their bits, NaN beyond
    for (index_t column = 0; column < out_stride; column += W) {
      const I bits = I(scaled(column)) & 0x7fffffff;
      most = bits > most ? bits : most;
    }
    std::int32_t bits = 0;
    for (int k = 0; k < W; ++k) bits = most[k] > bits ? most[k] : bits;
    float largest;
    std::memcpy(&largest, &bits, sizeof(bits));
    if (bits != 0 && !(largest > kSmallFactor && largest < 1 / kSmallFactor)) return false;
    const float factor = bits == 0 ? 0 : kLargestFactor / largest;
    to_factor[i] = largest / kLargestFactor;
    for (index_t column = 0; column < out_stride; column += 2 * W) {
      const U lower = nearest(scaled(column) * factor) & 0xffff;
      const U upper = nearest(scaled(column + W) * factor) << 16;
      const U both = lower | upper;
      std::memcpy(out + i * out_stride + column, &both, kVectorBytes);
    }
  }
  return true;
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit
#endif

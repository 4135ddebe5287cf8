// The sum verb in 16-bit integers: half the bytes of bucket_sum.cpp's table rows, so half their
// traffic. One or two slices of 32 columns and a group of hashes, token by token.
//
// Each 32-bit lane of a row holds two columns. The table wraps around, so an addition is one
// addition; that none of them left 16 bits is checked at every one, in two operations that hide
// behind the loads and stores. Reading keeps two 32-bit sums a lane, of the whole lanes and of
// their upper halves; the lower halves are the difference. For this they are stored plus 2^15: as
// unsigned numbers, which carry into the upper half in a known way.
#include "kernels.hpp"
#include "order.hpp"
#include "short_floats.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int W = kLanes<float>;
using F = Vec<float>;
using I = Vec<std::int32_t>;
using U = Vec<std::uint32_t>;
typedef std::uint16_t U16 __attribute__((vector_size(kVectorBytes)));

constexpr index_t kAhead = 12;                     // rows to prefetch ahead
constexpr index_t kFarAhead = 64;                  // and from beyond the L2 cache
constexpr int kLine = kSliceBytes / kVectorBytes;  // registers a slice; each has 2 W columns
constexpr int kLaneCount = kSliceBytes / 4;        // 32-bit lanes a slice
constexpr std::uint32_t kLowerHalf = 0xffff, kBias = 0x8000;  // of the lower halves

// Full: the slices have all their columns. Group: the number of hashes where that is known, or 0.
template <class Code, int Slices, bool Full, int Group>
struct FastPass {
  static constexpr int kRegisterCount = Slices * kLine, kStride = Slices * kLaneCount;
  const FastSumPass p;

  LSHKIT_INLINE std::uint32_t* row(int hash, Code code) const {
    return p.table + (hash * p.table_rows + code) * kStride;
  }
  LSHKIT_INLINE const Code* codes(const void* of, index_t i) const {
    return static_cast<const Code*>(of) + i * p.code_stride;
  }
  // Returns sign bits where a sum left 16 bits.
  LSHKIT_INLINE U add(index_t key) const {
    U overflow = {};
    if (p.key_mask && !p.key_mask[key]) return overflow;
    const std::int16_t* value = p.values + key * p.value_stride;
    const Code* code = codes(p.key_codes, key);
    if (key + 2 * kAhead < p.n_keys) prefetch(code + 2 * kAhead * p.code_stride);
    U16 line[kRegisterCount], flipped[kRegisterCount];
    LSHKIT_UNROLL
    for (int i = 0; i < kRegisterCount; ++i) {
      std::memcpy(&line[i], value + i * 2 * W, kVectorBytes);
      flipped[i] = (U16)((U)line[i] ^ kBias);
    }
    const int n = Group ? Group : p.group;
    LSHKIT_UNROLL_HASHES
    for (int h = 0; h < n; ++h) {
      std::uint32_t* bucket = row(h, code[h]);
      LSHKIT_UNROLL
      for (int i = 0; i < kRegisterCount; ++i) {
        const U16 before = (U16)load(bucket + i * W), after = before + line[i];
        // The sign, which the lower halves store flipped, differs from that of both terms.
        overflow |= (U)((before ^ after) & (flipped[i] ^ after));
        store(bucket + i * W, (U)after);
      }
    }
    return overflow;
  }
  LSHKIT_INLINE void read(index_t query) const {
    float* out = p.out + query * p.out_stride;
    const Code* code = codes(p.query_codes, query);
    if (query + 2 * kAhead < p.n_queries) {
      LSHKIT_UNROLL
      for (int i = 0; i < 2 * Slices; ++i)
        __builtin_prefetch(out + kAhead * p.out_stride + i * (kSliceBytes / 4), 1);
      prefetch(code + 2 * kAhead * p.code_stride);
    }
    U whole[kRegisterCount] = {};
    I upper[kRegisterCount] = {};
    const int n = Group ? Group : p.group;
    LSHKIT_UNROLL_HASHES
    for (int h = 0; h < n; ++h) {
      const std::uint32_t* bucket = row(h, code[h]);
      LSHKIT_UNROLL
      for (int i = 0; i < kRegisterCount; ++i) {
        const U lanes = load(bucket + i * W);
        whole[i] += lanes;
        upper[i] += (I)lanes >> 16;
      }
    }
    LSHKIT_UNROLL
    for (int i = 0; i < kRegisterCount; ++i) {
      const U lower = whole[i] - ((U)upper[i] << 16) - std::uint32_t(n) * kBias;
      write(out, 2 * i * W, (I)lower);
      write(out, (2 * i + 1) * W, upper[i]);
    }
  }
  LSHKIT_INLINE void write(float* out, int column, I sum) const {
    F y = rounded(__builtin_convertvector(sum, F) * load(p.scale + column));
    if (Full) {
      if (p.accumulate) y += load(out + column);
      store(out + column, y);
    } else {
      if (p.accumulate) y += load_first(out + column, p.width - column);
      store_first(out + column, y, p.width - column);
    }
  }
  static bool fits(U overflow) {
    std::uint32_t any = 0;
    for (int i = 0; i < W; ++i) any |= overflow[i];
    return !(any & 0x80008000u);
  }
  bool run() const {
    U overflow = {};
    const index_t size = p.group * p.table_rows * kStride;
    const U zero = broadcast<std::uint32_t>(kBias);
    for (index_t i = 0; i < size; i += W) store(p.table + i, zero);
    for (index_t j = 0; j < p.n_keys; ++j) overflow |= add(j);
    for (index_t i = 0; i < p.n_queries; ++i) read(i);
    return fits(overflow);
  }
};

template <class Code, int Slices>
bool run(const FastSumPass& p) {
  if (p.width != Slices * kFastColumns) return FastPass<Code, Slices, false, 0>{p}.run();
  // Without a loop over hashes 12 bits take less time, but not 8 bits.
  if constexpr (sizeof(Code) == 2)
    if (p.group == 2) return FastPass<Code, Slices, true, 2>{p}.run();
  return FastPass<Code, Slices, true, 0>{p}.run();
}
template <class Code>
bool run(const FastSumPass& p) {
  return p.slices == 1 ? run<Code, 1>(p) : run<Code, 2>(p);
}

// lanes(row, column). Format: of numbers of 16 bits, or void for floats.
template <class Format>
struct Lanes {
  const FloatRows& rows;

  using Number = std::conditional_t<std::is_void_v<Format>, float, Half>;
  LSHKIT_INLINE const Number* row(index_t i) const {
    return static_cast<const Number*>(rows.data) + i * rows.stride;
  }
  LSHKIT_INLINE F operator()(index_t i, index_t column) const {
    if constexpr (std::is_void_v<Format>)
      return first_lanes(row(i) + column, rows.columns - column);
    else
      return first_lanes<Format>(row(i) + column, rows.columns - column);
  }
  LSHKIT_INLINE void prefetch(index_t i) const {
    prefetch_row(row(i), index_t(sizeof(Number)) * rows.columns);
  }
};
template <class Call>
LSHKIT_INLINE void with_lanes(const FloatRows& rows, const Call& call) {
  if (rows.element == Element::bfloat16)
    call(Lanes<Bfloat16>{rows});
  else if (rows.element == Element::float16)
    call(Lanes<Float16>{rows});
  else
    call(Lanes<void>{rows});
}

template <int Vectors, class Rows>
LSHKIT_INLINE void column_sums(const Rows& lanes, index_t rows, const std::uint8_t* mask,
                               const float* weights, FastColumnSums* sums) {
  F largest[Vectors] = {}, sum[Vectors] = {}, magnitude_sum[Vectors] = {}, square_sum[Vectors] = {},
    weighted[Vectors] = {}, weight_sum[Vectors] = {};
  for (index_t j = 0; j < rows; ++j) {
    if (mask && !mask[j]) continue;
    const F weight = broadcast(weights[j]);
    lanes.prefetch(smaller(j + kFarAhead, rows - 1));
    LSHKIT_UNROLL
    for (int i = 0; i < Vectors; ++i) {
      const F v = lanes(j, i * W);
      const F size = (F)((I)v & 0x7fffffff);
      weighted[i] += weight * size;
      weight_sum[i] += size > F{} ? weight : F{};
      largest[i] = size > largest[i] ? size : largest[i];
      sum[i] += v;
      magnitude_sum[i] += size;
      square_sum[i] += v * v;
    }
  }
  LSHKIT_UNROLL
  for (int i = 0; i < Vectors; ++i) {
    store(sums->largest + i * W, largest[i]);
    store(sums->sum + i * W, sum[i]);
    store(sums->magnitude_sum + i * W, magnitude_sum[i]);
    store(sums->square_sum + i * W, square_sum[i]);
    store(sums->weighted_magnitude_sum + i * W, weighted[i]);
    store(sums->weight_sum + i * W, weight_sum[i]);
  }
}

}  // namespace

bool fast_bucket_sum(const FastSumPass& p) {
  return p.code_bytes == 1 ? run<std::uint8_t>(p) : run<std::uint16_t>(p);
}

void fast_values(const FloatRows& values, const float* scale, std::int16_t* out,
                 index_t out_stride) {
  // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the lowest bits.
  const F shift = broadcast(12582912.0f);
  with_lanes(values, [&](const auto& lanes) {
    const auto rounded = [&](index_t row, index_t column) LSHKIT_ALWAYS_INLINE {
      return (U)(lanes(row, column) * load(scale + column) + shift);
    };
    for (index_t j = 0; j < values.rows; ++j)
      for (index_t column = 0; column < out_stride; column += 2 * W) {
        const U lower = rounded(j, column), upper = rounded(j, column + W);
        const U both = (lower & kLowerHalf) | (upper << 16);
        std::memcpy(out + j * out_stride + column, &both, kVectorBytes);
      }
  });
}

void fast_column_sums(const FloatRows& values, const std::uint8_t* mask, const float* weights,
                      FastColumnSums* sums) {
  constexpr int kVectors = kFastColumns / W;
  with_lanes(values, [&](const auto& lanes) {
    if (values.columns <= kFastColumns)
      column_sums<kVectors>(lanes, values.rows, mask, weights, sums);
    else
      column_sums<2 * kVectors>(lanes, values.rows, mask, weights, sums);
  });
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

// A step of a decoder over a cache of codes, for one query.
//
// Estimates stream through the codes (18 bytes a key at 128 bits): 4 bits at a time look up a table
// of 16 bytes in a register, as FAISS's fast scan does for product quantisation (Andre et al.
// 2015). Selection adds a stored exponential variate to each estimate and compares. Rows of the
// selected keys lie anywhere in memory and are asked for a chunk ahead.

#include "code_cache.hpp"

#include <algorithm>
#include <cmath>

#include "exponential.hpp"
#include "kernels.hpp"
#include "short_floats.hpp"
#include "simd.hpp"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

using F = Vec<float>;
constexpr int W = kLanes<float>;
using Bytes = std::uint8_t __attribute__((vector_size(kVectorBytes)));
using Shorts = std::uint16_t __attribute__((vector_size(kVectorBytes)));
constexpr index_t kHalf = kCodeBlock / 2;
constexpr int kBlockVectors = int(kCodeBlock) / kVectorBytes;
constexpr int kShorts = kVectorBytes / 2;

// ---- what the vector extension has no name for ----
struct Table {  // of 16 bytes, for each 16 lanes
#if defined(LSHKIT_ISA_AVX512)
  __m512i entries;
  LSHKIT_INLINE explicit Table(const std::uint8_t* p)
      : entries(_mm512_maskz_broadcast_i32x4(
            0xffff, _mm_load_si128(reinterpret_cast<const __m128i*>(p)))) {}
  LSHKIT_INLINE Bytes of(Bytes i) const {
    return Bytes(_mm512_maskz_shuffle_epi8(~__mmask64(0), entries, __m512i(i)));
  }
#elif defined(LSHKIT_ISA_AVX2)
  __m256i entries;
  LSHKIT_INLINE explicit Table(const std::uint8_t* p)
      : entries(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(p)))) {}
  LSHKIT_INLINE Bytes of(Bytes i) const { return Bytes(_mm256_shuffle_epi8(entries, __m256i(i))); }
#elif defined(__x86_64__)
  __m128i entries;
  LSHKIT_INLINE explicit Table(const std::uint8_t* p)
      : entries(_mm_load_si128(reinterpret_cast<const __m128i*>(p))) {}
  LSHKIT_INLINE Bytes of(Bytes i) const { return Bytes(_mm_shuffle_epi8(entries, __m128i(i))); }
#elif defined(__aarch64__)
  uint8x16_t entries;
  LSHKIT_INLINE explicit Table(const std::uint8_t* p) : entries(vld1q_u8(p)) {}
  LSHKIT_INLINE Bytes of(Bytes i) const { return Bytes(vqtbl1q_u8(entries, uint8x16_t(i))); }
#else
  const std::uint8_t* entries;
  LSHKIT_INLINE explicit Table(const std::uint8_t* p) : entries(p) {}
  LSHKIT_INLINE Bytes of(Bytes i) const {
    Bytes out = {};
    for (int lane = 0; lane < kVectorBytes; ++lane) out[lane] = entries[i[lane]];
    return out;
  }
#endif
};

using SignedShorts = Vec<std::int16_t>;
// The high 16 bits of the products.
LSHKIT_INLINE SignedShorts high_product(SignedShorts a, SignedShorts b) {
#if defined(LSHKIT_ISA_AVX512)
  return SignedShorts(_mm512_maskz_mulhi_epi16(~__mmask32(0), __m512i(a), __m512i(b)));
#elif defined(LSHKIT_ISA_AVX2)
  return SignedShorts(_mm256_mulhi_epi16(__m256i(a), __m256i(b)));
#elif defined(__x86_64__)
  return SignedShorts(_mm_mulhi_epi16(__m128i(a), __m128i(b)));
#else
  using Wide = std::int32_t __attribute__((vector_size(2 * kVectorBytes)));
  const Wide product = __builtin_convertvector(a, Wide) * __builtin_convertvector(b, Wide);
  return __builtin_convertvector(product >> 16, SignedShorts);
#endif
}
LSHKIT_INLINE Shorts high_product(Shorts a, Shorts b) {
#if defined(LSHKIT_ISA_AVX512)
  return Shorts(_mm512_maskz_mulhi_epu16(~__mmask32(0), __m512i(a), __m512i(b)));
#elif defined(LSHKIT_ISA_AVX2)
  return Shorts(_mm256_mulhi_epu16(__m256i(a), __m256i(b)));
#elif defined(__x86_64__)
  return Shorts(_mm_mulhi_epu16(__m128i(a), __m128i(b)));
#else
  using Wide = std::uint32_t __attribute__((vector_size(2 * kVectorBytes)));
  const Wide product = __builtin_convertvector(a, Wide) * __builtin_convertvector(b, Wide);
  return __builtin_convertvector(product >> 16, Shorts);
#endif
}
// A bit for each lane of a comparison's result.
LSHKIT_INLINE std::uint32_t lane_bits(SignedShorts mask) {
#if defined(LSHKIT_ISA_AVX512)
  return _mm512_movepi16_mask(__m512i(mask));
#elif defined(LSHKIT_ISA_AVX2)
  const __m128i low = _mm256_castsi256_si128(__m256i(mask));
  const __m128i high = _mm256_extracti128_si256(__m256i(mask), 1);
  return std::uint32_t(_mm_movemask_epi8(_mm_packs_epi16(low, high)));
#elif defined(__x86_64__)
  return std::uint32_t(_mm_movemask_epi8(_mm_packs_epi16(__m128i(mask), _mm_setzero_si128())));
#else
  std::uint32_t bits = 0;
  for (int lane = 0; lane < kShorts; ++lane) bits |= std::uint32_t(mask[lane] & 1) << lane;
  return bits;
#endif
}
// first + the numbers of the bits that are set. Whole registers are written; returns the new end.
LSHKIT_INLINE std::int32_t* write_positions(std::int32_t* to, std::uint32_t bits,
                                            std::int32_t first) {
#if defined(LSHKIT_ISA_AVX512)
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i at = __m512i(Vec<std::int32_t>(lanes) + first);
  for (int half = 0; half < 2; ++half, bits >>= 16) {
    const __m512i some = half ? __m512i(Vec<std::int32_t>(at) + 16) : at;
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(__mmask16(bits), some));
    to += __builtin_popcount(bits & 0xffff);
  }
#else
  for (; bits; bits &= bits - 1) *to++ = first + __builtin_ctz(bits);
#endif
  return to;
}
template <class V>
LSHKIT_INLINE V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// ---- rows of float32, bfloat16 or float16 ----
struct Whole {
  using Stored = float;
  LSHKIT_INLINE static F load(const float* p) { return LSHKIT_ISA::load(p); }
};
template <class Format>
struct Short {
  using Stored = Half;
  LSHKIT_INLINE static F load(const Half* p) { return Format::widen(load_half(p)); }
};
// Columns `at` to at + W - 1 of a row of `columns`, zero behind its end.
template <class Kind>
LSHKIT_INLINE F load_columns(const typename Kind::Stored* row, index_t at, index_t columns) {
  if (at + W <= columns) return Kind::load(row + at);
  typename Kind::Stored lanes[W] = {};
  if (at < columns) std::memcpy(lanes, row + at, sizeof(lanes[0]) * (columns - at));
  return Kind::load(lanes);
}
template <class Body>
LSHKIT_INLINE void with_kind(Element element, const Body& body) {
  if (element == Element::float32)
    body(Whole{});
  else if (element == Element::bfloat16)
    body(Short<Bfloat16>{});
  else
    body(Short<Float16>{});
}

// ---- projections: registers of kTile bits over all features ----
constexpr int kTile = 64;
LSHKIT_INLINE void project(const float* x, index_t n_features, const float* planes, index_t n_bits,
                           float* out) {
  for (index_t bit = 0; bit < n_bits; bit += kTile) {
    F sum[kTile / W] = {};
    for (index_t i = 0; i < n_features; ++i) {
      const F xi = broadcast(x[i]);
      LSHKIT_UNROLL
      for (int t = 0; t < kTile / W; ++t) sum[t] += xi * load(planes + i * n_bits + bit + t * W);
    }
    LSHKIT_UNROLL
    for (int t = 0; t < kTile / W; ++t) store(out + bit + t * W, sum[t]);
  }
}

bool all_finite(const float* x, index_t n) {
  for (index_t i = 0; i < n; ++i)
    if (!std::isfinite(x[i])) return false;
  return true;
}

template <class Kind>
void code_rows_of(const CodeRows& p) {
  constexpr index_t kMaxBits = 256;
  float z[kMaxBits];
  const index_t bytes = p.n_bits / 8;
  const F inverse = broadcast(1 / p.value_norm);
  float* x = p.centred;
  for (index_t row = 0; row < p.rows; ++row) {
    const auto* key = static_cast<const typename Kind::Stored*>(p.key) + row * p.key_stride;
    F squares = {};
    for (index_t i = 0; i < p.n_features; i += W) {
      const F centred =
          load_columns<Kind>(key, i, p.n_features) - load_columns<Whole>(p.centre, i, p.n_features);
      store(x + i, centred);
      squares += centred * centred;
    }
    project(x, p.n_features, p.planes, p.n_bits, z);
    const index_t at = p.first + row, lane = at % kCodeBlock;
    std::uint8_t* block = p.codes + at / kCodeBlock * block_bytes(p.n_bits);
    std::uint8_t* code = block + 2 * (lane % kHalf) + lane / kHalf;
    std::uint8_t* norm_and_size = block + bytes * kCodeBlock + 2 * lane;
    for (index_t b = 0; b < bytes; ++b) {
      unsigned byte = 0;
      LSHKIT_UNROLL
      for (int i = 0; i < 8; ++i) byte |= unsigned(z[8 * b + i] > 0) << i;
      code[b * kCodeBlock] = std::uint8_t(byte);
    }
    const auto* value = static_cast<const typename Kind::Stored*>(p.value) + row * p.value_stride;
    F value_squares = {};
    for (index_t i = 0; i < p.n_values; i += W) {
      const F centred = load_columns<Kind>(value, i, p.n_values) -
                        load_columns<Whole>(p.value_centre, i, p.n_values);
      value_squares += (centred * inverse) * (centred * inverse);
    }
    const float norm = std::sqrt(sum_lanes(squares)) * (64 / p.norm) + 0.5f;
    // log u of u^2 = 1 + these squares, in 1/32 nat.
    const double size = 16 * std::log1p(double(sum_lanes(value_squares))) + 0.5;
    if (norm < 255 && size < 255)
      norm_and_size[0] = std::uint8_t(norm), norm_and_size[1] = std::uint8_t(size);
    else  // A key that is not finite is ignored, and its value, which may be anything.
      norm_and_size[0] = norm_and_size[1] = norm < 255 || all_finite(x, p.n_features) ? 255 : 0;
  }
}

// ---- rows that were selected ----
constexpr index_t kChunk = 64;
constexpr int kRowVectors = 4;  // of a value, and as many of its variance, that stay in registers

template <class Kind>
struct Reader {
  using Stored = typename Kind::Stored;
  const CodeRead& p;

  const Stored* key(index_t i) const {
    return static_cast<const Stored*>(p.key) + p.rows[i] * p.key_stride;
  }
  const Stored* value(index_t i) const {
    return static_cast<const Stored*>(p.value) + p.rows[i] * p.value_stride;
  }
  LSHKIT_INLINE F partial_product(index_t i) const {
    const Stored* row = key(i);
    F sum = {};
    for (index_t c = 0; c < p.n_features; c += W)
      sum += load(p.query + c) * load_columns<Kind>(row, c, p.n_features);
    return sum;
  }
  void scores(index_t begin, index_t count, float* score) const {
    index_t i = 0;
    for (; i + 4 <= count; i += 4) {
      const Vec4 four = sum_lanes4(partial_product(begin + i), partial_product(begin + i + 1),
                                   partial_product(begin + i + 2), partial_product(begin + i + 3));
      std::memcpy(score + i, &four, sizeof(four));
    }
    for (; i < count; ++i) {
      const F sum = partial_product(begin + i), zero = {};
      score[i] = sum_lanes4(sum, zero, zero, zero)[0];
    }
  }
  // Adds w v and u v of a chunk, and returns the sums of w |v|^2 and u |v|^2 in two registers.
  LSHKIT_INLINE void add_values(index_t begin, index_t count, const float* w, const float* u,
                                F& w_squares, F& u_squares) const {
    for (index_t c = 0; c < p.n_values; c += kRowVectors * W) {
      F sum[kRowVectors] = {}, variance[kRowVectors] = {};
      const bool inside = c + kRowVectors * W <= p.n_values;
      for (index_t i = 0; i < count; ++i) {
        if (!(w[i] > 0)) continue;  // of a key that is ignored: its value may be anything
        const Stored* row = value(begin + i);
        const F wi = broadcast(w[i]), ui = broadcast(u[i]);
        LSHKIT_UNROLL
        for (int t = 0; t < kRowVectors; ++t) {
          const F v =
              inside ? Kind::load(row + c + t * W) : load_columns<Kind>(row, c + t * W, p.n_values);
          const F square = v * v;
          sum[t] += wi * v;
          variance[t] += ui * v;
          w_squares += wi * square;
          u_squares += ui * square;
        }
      }
      for (int t = 0; t < kRowVectors && c + t * W < p.n_values; ++t) {
        float* numerator = p.sums->numerator + c + t * W;
        float* values = p.sums->variance_values + c + t * W;
        store(numerator, load(numerator) + sum[t]);
        store(values, load(values) + variance[t]);
      }
    }
  }
  // The same two sums of a chunk whose squares are near float's limits, or beyond.
  LSHKIT_NOINLINE void add_squares(index_t begin, index_t count, const float* w,
                                   const float* u) const {
    for (index_t i = 0; i < count; ++i) {
      if (!(w[i] > 0)) continue;
      double square = 0;
      for (index_t c = 0; c < p.n_values; c += W) {
        float lanes[W];
        store(lanes, load_columns<Kind>(value(begin + i), c, p.n_values));
        for (const float v : lanes) square += double(v) * v;
      }
      p.sums->squares += w[i] * square, p.sums->variance_squares += u[i] * square;
    }
  }
  void rescale(float largest) const {
    CodeSums& s = *p.sums;
    const float factor =
        s.largest == -INFINITY ? 0 : exp_minus(broadcast(std::max(largest - s.largest, 0.0f)))[0];
    const float square = factor * factor;
    s.largest = largest;
    s.denominator *= factor, s.squares *= factor;
    s.variance *= square, s.variance_squares *= square;
    for (index_t c = 0; c < p.n_values; c += W) {
      store(s.numerator + c, load(s.numerator + c) * factor);
      store(s.variance_values + c, load(s.variance_values + c) * square);
    }
  }
  void operator()() const {
    const index_t key_bytes = p.n_features * sizeof(Stored),
                  value_bytes = p.n_values * sizeof(Stored);
    const auto ask = [&](index_t from, index_t to) {
      for (index_t i = from; i < std::min(to, p.count); ++i)
        prefetch_row(key(i), key_bytes), prefetch_row(value(i), value_bytes);
    };
    ask(0, kChunk);
    F w_sum = {}, u_sum = {};
    const auto keep = [&] {
      p.sums->denominator += sum_lanes(w_sum), p.sums->variance += sum_lanes(u_sum);
      w_sum = u_sum = F{};
    };
    for (index_t begin = 0; begin < p.count; begin += kChunk) {
      const index_t count = std::min(kChunk, p.count - begin);
      ask(begin + kChunk, begin + 2 * kChunk);
      alignas(64) float score[kChunk], w[kChunk], u[kChunk];
      scores(begin, count, score);
      if (p.scores) std::copy_n(score, count, p.scores + begin);
      float largest = p.sums->largest;
      for (index_t i = 0; i < count; ++i) {
        if (!std::isfinite(score[i])) score[i] = -INFINITY;  // a key that is not finite is ignored
        largest = score[i] > largest ? score[i] : largest;
      }
      if (largest == -INFINITY) continue;
      if (largest > p.sums->largest) keep(), rescale(largest);
      for (index_t i = count; i < kChunk; ++i) score[i] = largest;
      for (index_t i = 0; i < kChunk; i += W) {
        F probability = broadcast(1.0f);
        if (p.probability) probability = load_first(p.probability + begin + i, int(count - i));
        const F exponent = broadcast(largest) - load(score + i);
        F weight = exp_minus(exponent) / probability;
        weight = exponent < broadcast(INFINITY) ? weight : F{};
        store(w + i, weight);
        store(u + i, weight * weight * (1.0f - probability));
      }
      for (index_t i = count; i < kChunk; ++i) w[i] = u[i] = 0;
      for (index_t i = 0; i < kChunk; i += W) w_sum += load(w + i), u_sum += load(u + i);
      F w_squares = {}, u_squares = {};
      add_values(begin, count, w, u, w_squares, u_squares);
      const float squares = sum_lanes(w_squares);
      if (squares > 0x1p-80f && squares < 0x1p80f)
        p.sums->squares += squares, p.sums->variance_squares += sum_lanes(u_squares);
      else
        add_squares(begin, count, w, u);
    }
    keep();
  }
};

}  // namespace

void code_rows(const CodeRows& p) {
  with_kind(p.element, [&](auto kind) { code_rows_of<decltype(kind)>(p); });
}

void code_projections(const float* x, index_t n_features, const float* planes, index_t n_bits,
                      float* out) {
  project(x, n_features, planes, n_bits, out);
}

void code_estimates(const CodeScan& p) {
  const index_t rows = p.n_bits / 8, size_of_block = block_bytes(p.n_bits);
  const SignedShorts zero = broadcast(std::int16_t(p.zero));
  const SignedShorts factor = broadcast(std::int16_t(p.factor));
  const Shorts half_variance = Shorts(broadcast(std::int16_t(p.half_variance)));
  const Shorts size_factor = Shorts(broadcast(std::int16_t(p.size_factor)));
  const SignedShorts most = broadcast(std::int16_t(kMostEstimate >> p.shift));
  for (index_t block = 0; block < p.n_blocks; ++block) {
    const std::uint8_t* codes = p.codes + block * size_of_block;
    prefetch_row(codes + 8 * size_of_block, size_of_block);
    // Byte 2 i is of key i, byte 2 i + 1 of key i + 32.
    Shorts low[kBlockVectors] = {}, high[kBlockVectors] = {};
    for (index_t row = 0; row < rows; row += 2) {
      const Table tables[4] = {Table(p.table + row * 32), Table(p.table + row * 32 + 16),
                               Table(p.table + row * 32 + 32), Table(p.table + row * 32 + 48)};
      LSHKIT_UNROLL
      for (int v = 0; v < kBlockVectors; ++v) {
        const auto a = load_as<Bytes>(codes + row * kCodeBlock + v * kVectorBytes);
        const auto b = load_as<Bytes>(codes + (row + 1) * kCodeBlock + v * kVectorBytes);
        const Bytes a_high = Bytes(Shorts(a) >> 4) & 15, b_high = Bytes(Shorts(b) >> 4) & 15;
        // Of four entries up to 63: no byte overflows.
        const Shorts sum = Shorts(tables[0].of(a & 15) + tables[1].of(a_high) +
                                  tables[2].of(b & 15) + tables[3].of(b_high));
        low[v] += sum & 255;
        high[v] += sum >> 8;
      }
    }
    std::int16_t* out = p.estimates + block * kCodeBlock;
    LSHKIT_UNROLL
    for (int v = 0; v < kBlockVectors; ++v) {
      const auto estimate = [&](Shorts sum, const std::uint8_t* norms_and_sizes) {
        const auto both = load_as<Shorts>(norms_and_sizes + v * kVectorBytes);
        const Shorts norm = both & 255;
        const SignedShorts centred = (SignedShorts(sum) - zero) << 4;
        SignedShorts mean = high_product(high_product(centred, SignedShorts(norm << 7)), factor);
        mean = mean > most ? most : mean;
        mean = (mean < -most ? -most : mean) << p.shift;
        const SignedShorts sure = broadcast(kSureEstimate);
        const SignedShorts sum_of = mean + SignedShorts(high_product(norm * norm, half_variance)) +
                                    SignedShorts(high_product(both & 0xff00, size_factor));
        return SignedShorts(norm) == 255 ? sure : sum_of;
      };
      store(out + v * kShorts, estimate(low[v], codes + rows * kCodeBlock));
      store(out + kHalf + v * kShorts, estimate(high[v], codes + (rows + 1) * kCodeBlock));
    }
  }
}

index_t code_select(const CodeSelect& p) {
  const SignedShorts threshold = broadcast(std::int16_t(p.threshold));
  const SignedShorts floor = broadcast(std::int16_t(p.floor));
  std::int32_t* to = p.rows;
  for (index_t j = p.first; j < p.last; j += kShorts) {
    const SignedShorts noise = load(p.noise + j), sum = load(p.estimates + j) + noise;
    std::uint32_t bits =
        lane_bits(SignedShorts(sum >= threshold)) | lane_bits(SignedShorts(noise >= floor));
    if (p.last - j < kShorts) bits &= (1u << (p.last - j)) - 1;
    if (bits) to = write_positions(to, bits, std::int32_t(j) + p.offset);
  }
  return to - p.rows;
}

void code_read(const CodeRead& p) {
  with_kind(p.element, [&](auto kind) { Reader<decltype(kind)>{p}(); });
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

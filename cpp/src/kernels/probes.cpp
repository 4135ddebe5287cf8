// From a row's margins to the weights of its probes, and back. The exponentials of a row are taken
// a register at a time; a pair of row and hash is then a few products.
#if defined(LSHKIT_ISA_AVX512)
#include <immintrin.h>
#endif

#include "exponential.hpp"
#include "kernels.hpp"
#include "margins.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

typedef float Four __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32)));

// ceil(log2 Probes)
template <int Probes>
constexpr int kSelected = Probes <= 1   ? 0
                          : Probes <= 2 ? 1
                          : Probes <= 4 ? 2
                          : Probes <= 8 ? 3
                                        : 4;
constexpr index_t kAhead = 48;  // rows to prefetch ahead
constexpr index_t kRun = 1024;  // margins whose exponentials are kept, a multiple of every register

// The own code with the bits of a = 0 .. 3 flipped.
template <class Code>
LSHKIT_INLINE void flip4(Code own, const int* bits, Code* out) {
  constexpr int width = 8 * int(sizeof(Code));
  constexpr std::uint64_t odd = (std::uint64_t(1) << width) | (std::uint64_t(1) << 3 * width);
  constexpr std::uint64_t upper = (std::uint64_t(1) << 2 * width) | (std::uint64_t(1) << 3 * width);
  constexpr std::uint64_t all = odd | (odd >> width);
  const std::uint64_t probes = (own * all) ^ (odd << bits[0]) ^ (upper << bits[1]);
  std::memcpy(out, &probes, 4 * sizeof(Code));
}
LSHKIT_INLINE Four load2(const float* p) {  // and zeros; in one register all the way
  typedef double Two __attribute__((vector_size(16)));
  double both;
  std::memcpy(&both, p, sizeof(both));
  return reinterpret_cast<Four>(Two{both, 0});
}
// Four weights, of which the first is w.
LSHKIT_INLINE Four weigh4(float w, const float* e) {
  const Four low = {1, e[0], 1, e[0]}, high = {1, 1, e[1], e[1]};
  return low * high * w;
}

// The n_probes t of one pair, e the exponentials of its margins and complement = 1 / (1 + e), the
// probability that a bit is not flipped; of three probes, which flip one bit at most, that none is.
// T > 0: known at compile time.
template <int T, class Code>
LSHKIT_INLINE void probes_of(const Code own, const float* margins, int last_bit, const float* e,
                             const float* complement, index_t t, int n_selected, Code* codes,
                             float* weights) {
  if (T) t = T, n_selected = kSelected<T>;
  int bits[16];
  for (int k = 0; k < n_selected; ++k) bits[k] = int(smaller(bit_of(margins[k]), last_bit));
  if (t < 4) {
    codes[0] = own;
    if (t > 1) codes[1] = Code(own ^ (1 << bits[0]));
    if (t > 2) codes[2] = Code(own ^ (1 << bits[1]));
    const float first = t > 1 ? e[0] : 0, second = t > 2 ? e[1] : 0;
    const float inverse = t > 1 ? complement[0] : 1;
    weights[0] = inverse;
    if (t > 1) weights[1] = first * inverse;
    if (t > 2) weights[2] = second * inverse;
    return;
  }
  if (t == 4) {  // rounded as expand_registers does it
    const Four stays = load2(complement), flips = stays * load2(e);
    const Four both = __builtin_shufflevector(stays, flips, 0, 4, 1, 5);
    const Four w = __builtin_shufflevector(both, both, 0, 1, 0, 1) *
                   __builtin_shufflevector(both, both, 2, 2, 3, 3);
    flip4(own, bits, codes);
    std::memcpy(weights, &w, sizeof(w));
    return;
  }
  const bool all = (t & (t - 1)) == 0;  // their weights are products of sigmoids
  float own_weight = 1;
  for (int k = 0; k < n_selected && all; ++k) own_weight *= complement[k];
  const Four w = weigh4(own_weight, e);
  flip4(own, bits, codes);
  std::memcpy(weights, &w, sizeof(w));
  for (int k = 2; k < n_selected; ++k) {
    const index_t half = index_t(1) << k, count = smaller(half, t - half);
    const Code flip = Code(1 << bits[k]);
    const std::uint64_t flips = flip * (sizeof(Code) == 1 ? 0x01010101u : 0x0001000100010001u);
    index_t a = 0;
    for (; a + 4 <= count; a += 4) {
      std::uint64_t four = 0;
      std::memcpy(&four, codes + a, 4 * sizeof(Code));
      four ^= flips;
      std::memcpy(codes + half + a, &four, 4 * sizeof(Code));
      Four v;
      std::memcpy(&v, weights + a, sizeof(v));
      v *= e[k];
      std::memcpy(weights + half + a, &v, sizeof(v));
    }
    for (; a < count; ++a) {
      codes[half + a] = Code(codes[a] ^ flip);
      weights[half + a] = weights[a] * e[k];
    }
  }
  if (all) return;
  float sum = 0;
  for (index_t a = 0; a < t; ++a) sum += weights[a];
  for (index_t a = 0; a < t; ++a) weights[a] /= sum;
}

template <class T, int Lanes>
struct Narrow {
  typedef T type __attribute__((vector_size(sizeof(T) * Lanes)));
};
template <class To, int Lanes, class From>
LSHKIT_INLINE typename Narrow<To, Lanes>::type load_as(const From* p) {
  typename Narrow<From, Lanes>::type v;
  std::memcpy(&v, p, sizeof(v));
  return __builtin_convertvector(v, typename Narrow<To, Lanes>::type);
}
// Lane i has stays or flips of a selected bit (of two; Bit < 0: the only one), for the pairs from
// First on with their probes side by side.
template <int First, int Bit, std::size_t... I>
LSHKIT_INLINE Vec<float> factors(Vec<float> stays, Vec<float> flips, std::index_sequence<I...>) {
  constexpr int n = kLanes<float>, r = Bit < 0 ? 1 : 2, t = 2 * r, bit = Bit < 0 ? 0 : Bit;
  return __builtin_shufflevector(stays, flips,
                                 (r * (First + int(I) / t) + bit + (int(I) >> bit & 1 ? n : 0))...);
}

template <std::size_t... I>
LSHKIT_INLINE Vec<float> swap_pairs(Vec<float> v, std::index_sequence<I...>) {
  return __builtin_shufflevector(v, v, int(I ^ 1)...);
}

// Lanes of a and b in turn.
template <class V, std::size_t... I>
LSHKIT_INLINE auto alternate(V a, V b, std::index_sequence<I...>) {
  constexpr int n = sizeof...(I) / 2;
  return __builtin_shufflevector(a, b, ((I & 1) * n + I / 2)...);
}

// The four codes of each pair. words: its two margins, with the numbers of their bits.
template <class Numbers, class Words>
LSHKIT_INLINE auto codes_of_four(Numbers own, Words words, Numbers last) {
  constexpr auto lanes = std::make_index_sequence<2 * sizeof(Numbers) / sizeof(own[0])>{};
  const auto within = [=](Numbers bits) LSHKIT_ALWAYS_INLINE { return bits < last ? bits : last; };
  const Numbers bits = within(__builtin_convertvector(words & kBitOfMargin, Numbers));
  const Numbers others = within(__builtin_convertvector(words >> 32 & kBitOfMargin, Numbers));
  const Numbers first = (own | own << 16) ^ (0x10000u << bits);
  return alternate(first, first ^ (0x10001u << others), lanes);
}
// Of half of the pairs, those from First on, in four lanes each; of three probes the last is
// unused.
template <int Probes, int First, std::size_t... I>
LSHKIT_INLINE Vec<float> weights_of(Vec<float> stays, Vec<float> flips,
                                    std::index_sequence<I...> lanes) {
  constexpr int n = kLanes<float>;
  if constexpr (Probes == 4)
    return factors<First, 0>(stays, flips, lanes) * factors<First, 1>(stays, flips, lanes);
  else
    return __builtin_shufflevector(
        stays, flips, (2 * (First + int(I) / 4) + (I % 4 ? n + int(I % 4 == 2) : 0))...);
}
template <std::size_t... I>
LSHKIT_INLINE Vec<float> even_lanes(Vec<float> v, std::index_sequence<I...>) {
  return __builtin_shufflevector(v, v, int(I / 2 * 2)...);
}

// As many pairs of 2 or 4 probes as fill registers: returns how many.
template <int Probes, class Own>
LSHKIT_INLINE index_t expand_registers(const Own* own, const float* margins, int last_bit,
                                       const float* e, const float* complement, index_t count,
                                       std::uint16_t* codes, float* weights) {
  constexpr int n = kLanes<float>, pairs = Probes == 2 ? n : n / 2;
  constexpr auto lanes = std::make_index_sequence<n>{};
  typedef typename Narrow<std::uint32_t, pairs>::type Numbers;
  const Numbers last = std::uint32_t(last_bit) - Numbers{};
  index_t h = 0;
  for (; h + pairs <= count; h += pairs, codes += pairs * Probes, weights += pairs * Probes) {
    if constexpr (Probes == 2) {
      const auto code = load_as<std::uint32_t, pairs>(own + h);
      Numbers words;
      std::memcpy(&words, margins + h, sizeof(words));
      const Numbers bits = words & kBitOfMargin;
      const auto flipped = code ^ (1u << (bits < last ? bits : last));
      const auto both = code | (flipped << 16);
      std::memcpy(codes, &both, sizeof(both));
      const Vec<float> stays = load(complement + h), flips = stays * load(e + h);
      store(weights, factors<0, -1>(stays, flips, lanes));
      store(weights + n, factors<n / 2, -1>(stays, flips, lanes));
    } else {
      typename Narrow<std::uint64_t, pairs>::type words;
      std::memcpy(&words, margins + 2 * h, sizeof(words));
      const auto four = codes_of_four(load_as<std::uint32_t, pairs>(own + h), words, last);
      std::memcpy(codes, &four, sizeof(four));
      const Vec<float> stays = load(complement + 2 * h), flips = stays * load(e + 2 * h);
      store(weights, weights_of<4, 0>(stays, flips, lanes));
      store(weights + n, weights_of<4, n / 4>(stays, flips, lanes));
    }
  }
  return h;
}

// body(h, count, at, stride) for the hashes [first, first + count) of a run, as many at a time as
// lie together: the probes of row i and hash h are at + i * stride.
template <class Body>
LSHKIT_INLINE void each_part(const ProbeRows& p, index_t t, index_t first, index_t count,
                             const Body& body) {
  for (index_t h = first; h < first + count;) {
    const index_t begin = h / p.part * p.part, end = smaller(begin + p.part, p.group);
    const index_t here = smaller(first + count, end) - h;
    const index_t stride = p.part < p.group ? (end - begin) * t : p.probe_stride;
    body(h, here, begin * p.rows * t + (h - begin) * t, stride);
    h += here;
  }
}

// One row after the other: how far its codes, exponentials and probes are from the next one's.
struct RowSteps {
  index_t own, powers, probes;
};
template <int Probes, class Own, class Code>
LSHKIT_NOINLINE void write_rows(index_t rows, index_t count, index_t t, index_t r, RowSteps step,
                                const Own* own, const float* margins, int last_bit, const float* e,
                                const float* complement, Code* codes, float* weights) {
  if (Probes) t = Probes, r = kSelected<Probes>;
  const auto next = [&]() LSHKIT_ALWAYS_INLINE {
    own += step.own;
    margins += step.own * r;
    e += step.powers;
    complement += step.powers;
    codes += step.probes;
    weights += step.probes;
  };
  if (count == 1) {  // a loop in a loop would take longer than the probes
    for (index_t i = 0; i < rows; ++i, next())
      probes_of<Probes>(Code(*own), margins, last_bit, e, complement, t, int(r), codes, weights);
    return;
  }
  for (index_t i = 0; i < rows; ++i, next()) {
    index_t h = 0;
    if constexpr ((Probes == 2 || Probes == 4) && sizeof(Code) == 2 && kVectorBytes >= 32)
      h = expand_registers<Probes>(own, margins, last_bit, e, complement, count, codes, weights);
    for (; h < count; ++h)
      probes_of<Probes>(Code(own[h]), margins + h * r, last_bit, e + h * r, complement + h * r, t,
                        int(r), codes + h * t, weights + h * t);
  }
}

#if defined(LSHKIT_ISA_AVX512)
// Quarter q of register r to quarter r of register q.
LSHKIT_INLINE void transpose_quarters(Vec<float> (&r)[4]) {
  const Vec<float> a = _mm512_shuffle_f32x4(r[0], r[1], 0x44);
  const Vec<float> b = _mm512_shuffle_f32x4(r[0], r[1], 0xee);
  const Vec<float> c = _mm512_shuffle_f32x4(r[2], r[3], 0x44);
  const Vec<float> d = _mm512_shuffle_f32x4(r[2], r[3], 0xee);
  r[0] = _mm512_shuffle_f32x4(a, c, 0x88);
  r[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
  r[2] = _mm512_shuffle_f32x4(b, d, 0x88);
  r[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
}

// Probes that are made, and reduced, of four rows and eight hashes at a time, each hash a part of
// its own.
template <int Probes>
constexpr bool kFourRows = Probes == 3 || Probes == 4;
LSHKIT_INLINE bool hashes_fill_registers(const ProbeRows& p) {
  return p.part == 1 && p.group % (kLanes<float> / 2) == 0;
}

// Three or four probes of each of four rows, in four lanes of a register, one row after the other
// in memory. Of three, the fourth lane is read as 0 and not written.
template <int Probes>
LSHKIT_INLINE Vec<float> load_rows_of(const float* p) {
  if constexpr (Probes == 4) return load(p);
  const __m512i from = _mm512_setr_epi32(0, 1, 2, 0, 3, 4, 5, 0, 6, 7, 8, 0, 9, 10, 11, 0);
  return _mm512_maskz_permutexvar_ps(0x7777, from, _mm512_maskz_loadu_ps(0xfff, p));
}
template <int Probes>
LSHKIT_INLINE void store_rows_of(float* p, Vec<float> v) {
  if constexpr (Probes == 4) return store(p, v);
  const __m512i from = _mm512_setr_epi32(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 0, 0, 0, 0);
  _mm512_mask_storeu_ps(p, 0xfff, _mm512_permutexvar_ps(from, v));
}
template <int Probes>
LSHKIT_INLINE void store_rows_of(std::uint16_t* p, __m256i v) {
  if constexpr (Probes == 4) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
  const __m256i from = _mm256_setr_epi16(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 0, 0, 0, 0);
  _mm256_mask_storeu_epi16(p, 0xfff, _mm256_permutexvar_epi16(from, v));
}

// What a row has side by side, by hash, is moved to where it lies by row. Returns how many rows.
template <int Probes, class Own>
LSHKIT_NOINLINE index_t expand_four_rows(const ProbeRows& p, const Own* own, std::uint16_t* codes,
                                         float* weights) {
  constexpr int n = kLanes<float>, hashes = n / 2, rows = 4;
  constexpr auto lanes = std::make_index_sequence<n>{};
  typedef typename Narrow<std::uint32_t, hashes>::type Numbers;
  typedef typename Narrow<std::uint64_t, hashes>::type Codes;  // a hash's four in a lane
  const Vec<float> twice = broadcast(2 * p.sharpness);
  const Numbers last = std::uint32_t(p.last_bit) - Numbers{};
  const float* margins = p.margins + p.first_hash * 2;
  own += p.first_hash;
  index_t row = 0;
  for (; row + rows <= p.rows; row += rows, codes += Probes * rows, weights += Probes * rows) {
    for (index_t h = 0; h < p.group; h += hashes) {
      Codes code[rows];
      Vec<float> low[rows], high[rows];  // weights of the lower and of the upper half of the hashes
      LSHKIT_UNROLL
      for (int r = 0; r < rows; ++r) {
        const index_t pair = (row + r) * p.n_hashes + h;
        if (row + r + kAhead < p.rows) {
          prefetch(margins + 2 * (pair + kAhead * p.n_hashes));
          prefetch(own + pair + kAhead * p.n_hashes);
        }
        const Vec<float> margin = load(margins + 2 * pair);
        Codes words;
        std::memcpy(&words, &margin, sizeof(words));
        const auto four = codes_of_four(load_as<std::uint32_t, hashes>(own + pair), words, last);
        std::memcpy(&code[r], &four, sizeof(four));
        const Vec<float> power = exp_minus(without_bits(margin) * twice);
        Vec<float> sum = 1.0f + power;
        if (Probes == 3) sum += swap_pairs(power, lanes);
        Vec<float> stays = 1.0f / sum;
        if (Probes == 3) stays = even_lanes(stays, lanes);
        const Vec<float> flips = stays * power;
        low[r] = weights_of<Probes, 0>(stays, flips, lanes);
        high[r] = weights_of<Probes, n / 4>(stays, flips, lanes);
      }
      // Of rows 0 and 1, then 2 and 3: even hashes, then odd ones.
      Codes part[rows], by_hash[rows];
      LSHKIT_UNROLL
      for (int r = 0; r < rows; r += 2) {
        part[r] = __builtin_shufflevector(code[r], code[r + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        part[r + 1] = __builtin_shufflevector(code[r], code[r + 1], 1, 9, 3, 11, 5, 13, 7, 15);
      }
      // Hashes 0 and 2, 1 and 3, 4 and 6, 5 and 7.
      LSHKIT_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        by_hash[odd] = __builtin_shufflevector(part[odd], part[2 + odd], 0, 1, 8, 9, 2, 3, 10, 11);
        by_hash[2 + odd] =
            __builtin_shufflevector(part[odd], part[2 + odd], 4, 5, 12, 13, 6, 7, 14, 15);
      }
      LSHKIT_UNROLL
      for (int i = 0; i < rows; ++i) {
        const index_t hash = h + i % 2 + i / 2 * 4;
        const __m512i both = (__m512i)by_hash[i];
        store_rows_of<Probes>(codes + hash * p.rows * Probes, _mm512_castsi512_si256(both));
        store_rows_of<Probes>(codes + (hash + 2) * p.rows * Probes,
                              _mm512_extracti64x4_epi64(both, 1));
      }
      const auto store_weights = [&](Vec<float>(&of)[rows], index_t first) LSHKIT_ALWAYS_INLINE {
        transpose_quarters(of);
        LSHKIT_UNROLL
        for (int i = 0; i < rows; ++i)
          store_rows_of<Probes>(weights + (first + i) * p.rows * Probes, of[i]);
      };
      store_weights(low, h);
      store_weights(high, h + hashes / 2);
    }
  }
  return row;
}
#endif

// The exponentials of a tile of rows are taken first, a register of a row's at a time; then its
// probes are written, part by part.
template <int Probes, class Own, class Code>
void expand(const ProbeRows& p, const Own* all_own, Code* probe_codes, float* weights) {
  const index_t t = Probes ? Probes : p.n_probes, r = Probes ? kSelected<Probes> : p.n_selected;
  const index_t hashes = r ? smaller(p.group, kRun / r) : p.group;
  const index_t tile = r ? kRun / (hashes * r) : p.rows;
  float e[kRun + kLanes<float>], complement[kRun + kLanes<float>];
  const Vec<float> twice = broadcast(2 * p.sharpness);
  index_t begin = 0;
#if defined(LSHKIT_ISA_AVX512)
  if constexpr (kFourRows<Probes> && sizeof(Code) == 2)
    if (hashes_fill_registers(p) && !p.valid)  // where tables ask, masks are theirs
      begin = expand_four_rows<Probes>(p, all_own, probe_codes, weights);
#endif
  for (index_t row = begin; row < p.rows; row += tile)
    for (index_t first = 0; first < p.group; first += hashes) {
      const index_t rows = smaller(tile, p.rows - row), count = smaller(hashes, p.group - first);
      const index_t n = count * r, pair = row * p.n_hashes + p.first_hash + first;
      for (index_t i = 0; i < rows; ++i) {
        const float* margins = p.margins + (pair + i * p.n_hashes) * r;
        if (const index_t ahead = i + kAhead; row + ahead < p.rows) {
          prefetch_row(margins + kAhead * p.n_hashes * r, 4 * n);
          prefetch_row(all_own + pair + ahead * p.n_hashes, 1);
        }
        for (index_t c = 0; c < n; c += kLanes<float>) {
          const Vec<float> margin = load_first(margins + c, int(smaller(kLanes<float>, n - c)));
          const Vec<float> power = exp_minus(without_bits(margin) * twice);
          store(e + i * n + c, power);
          Vec<float> sum = 1.0f + power;
          if (Probes == 3) sum += swap_pairs(power, std::make_index_sequence<kLanes<float>>{});
          store(complement + i * n + c, 1.0f / sum);
        }
      }
      each_part(p, t, first, count, [&](index_t hash, index_t here, index_t at, index_t stride) {
        const index_t own = pair + hash - first, from = (hash - first) * r, to = at + row * stride;
        write_rows<Probes>(rows, here, t, r, {p.n_hashes, n, stride}, all_own + own,
                           p.margins + own * r, p.last_bit, e + from, complement + from,
                           probe_codes + to, weights + to);
        for (index_t i = 0; p.valid && i < rows; ++i)
          if (!p.valid[row + i])
            std::memset(weights + to + i * stride, 0, sizeof(float) * here * t);
      });
    }
}

template <class Own, class Code>
void expand_any(const ProbeRows& p, const Own* own, Code* probe_codes, float* weights) {
  with_constant<1, 2, 3, 4, 8, 16>(
      p.n_probes, [&](auto probes) { expand<probes.value>(p, own, probe_codes, weights); });
}

LSHKIT_INLINE Four load4(const float* p) {
  Four v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
LSHKIT_INLINE Four add_pairs(Four v) { return v + __builtin_shufflevector(v, v, 1, 0, 3, 2); }
LSHKIT_INLINE Four add_halves(Four v) { return v + __builtin_shufflevector(v, v, 2, 3, 0, 1); }

// With logits -sum of u_k over the flipped k, u = 2 sharpness margin: d loss / d u_k is the sum
// over the probes with k flipped of w_a (s - g_a), s = sum of w g. to[k]: of one pair.
template <int T>
LSHKIT_INLINE void logit_gradient(const float* w, const float* g, index_t t, int n_selected,
                                  float* to) {
  if (T) t = T;
  if (t == 2) {
    to[0] = w[0] * w[1] * (g[0] - g[1]);
    return;
  }
  if (t == 3) {  // as four of which the last has no weight
    const float four_w[4] = {w[0], w[1], w[2], 0}, four_g[4] = {g[0], g[1], g[2], 0};
    return logit_gradient<4>(four_w, four_g, 4, 2, to);
  }
  if (t % 4) {
    float s = 0;
    for (index_t a = 0; a < t; ++a) s += w[a] * g[a];
    for (int k = 0; k < n_selected; ++k) {
      const index_t half = index_t(1) << k;
      float sum = 0;
      for (index_t base = half; base < t; base += 2 * half)
        for (index_t a = base; a < smaller(base + half, t); ++a) sum += w[a] * (s - g[a]);
      to[k] = sum;
    }
    return;
  }
  Four s = load4(w) * load4(g);
  for (index_t a = 4; a < t; a += 4) s += load4(w + a) * load4(g + a);
  s = add_halves(add_pairs(s));
  Four all = load4(w) * (s - load4(g));
  for (index_t a = 4; a < t; a += 4) all += load4(w + a) * (s - load4(g + a));
  const Four two =
      __builtin_shufflevector(all, all, 1, 2, 1, 2) + __builtin_shufflevector(all, all, 3, 3, 3, 3);
  std::memcpy(to, &two, 2 * sizeof(float));
  for (int k = 2; k < n_selected; ++k) {
    const index_t half = index_t(1) << k;
    Four sum = {};
    for (index_t base = half; base < t; base += 2 * half)
      for (index_t a = base; a < smaller(base + half, t); a += 4)
        sum += load4(w + a) * (s - load4(g + a));
    to[k] = add_halves(add_pairs(sum))[0];
  }
}
// The same of pairs of four probes side by side: the first two of four lanes are the pair's.
template <std::size_t... I>
LSHKIT_INLINE Vec<float> logit_gradients_of_four(Vec<float> weight, Vec<float> grad,
                                                 std::index_sequence<I...>) {
  Vec<float> s = weight * grad;
  s += __builtin_shufflevector(s, s, int(I ^ 1)...);
  s += __builtin_shufflevector(s, s, int(I ^ 2)...);
  const Vec<float> all = weight * (s - grad);
  return __builtin_shufflevector(all, all, int(I / 4 * 4 + 1 + I % 2)...) +
         __builtin_shufflevector(all, all, int(I / 4 * 4 + 3)...);
}
LSHKIT_INLINE Vec<float> logit_gradients_of_four(Vec<float> weight, Vec<float> grad) {
  return logit_gradients_of_four(weight, grad, std::make_index_sequence<kLanes<float>>{});
}
// As many as fill registers: returns how many. The results are out_step from one pair to the next.
LSHKIT_INLINE index_t four_logit_gradients(index_t pairs, const float* w, const float* g,
                                           float* out, index_t out_step) {
  constexpr int n = kLanes<float>, at_once = n / 4;
  index_t i = 0;
  for (; i + at_once <= pairs; i += at_once, out += at_once * out_step) {
    float results[n];
    store(results, logit_gradients_of_four(load(w + 4 * i), load(g + 4 * i)));
    LSHKIT_UNROLL
    for (int k = 0; k < at_once; ++k)
      std::memcpy(out + k * out_step, results + 4 * k, 2 * sizeof(float));
  }
  return i;
}
template <int Probes>
LSHKIT_NOINLINE void logit_gradients(index_t rows, index_t count, index_t t, index_t r,
                                     index_t probe_stride, index_t out_stride, const float* w,
                                     const float* g, float* out) {
  if (Probes) t = Probes, r = kSelected<Probes>;
  if constexpr (Probes == 4) {
    if (count == 1 && probe_stride == t) {
      const index_t done = four_logit_gradients(rows, w, g, out, out_stride);
      rows -= done;
      w += done * t;
      g += done * t;
      out += done * out_stride;
    }
  }
  for (index_t i = 0; i < rows; ++i, w += probe_stride, g += probe_stride, out += out_stride)
    for (index_t h = 0; h < count; ++h)
      logit_gradient<Probes>(w + h * t, g + h * t, t, int(r), out + h * r);
}

#if defined(LSHKIT_ISA_AVX512)
// The way back of expand_four_rows; adds to the gradient of the sharpness.
template <int Probes>
LSHKIT_NOINLINE index_t reduce_four_rows(const ProbeRows& p, const float* weights,
                                         const float* weight_grads, float* margin_grads,
                                         index_t margin_grad_stride, double& total) {
  constexpr int n = kLanes<float>, hashes = n / 2, rows = 4;
  const Vec<float> twice = broadcast(2 * p.sharpness);
  const float* margins = p.margins + p.first_hash * 2;
  index_t row = 0;
  for (; row + rows <= p.rows;
       row += rows, weights += Probes * rows, weight_grads += Probes * rows) {
    Vec<float> sums[rows] = {};
    for (index_t h = 0; h < p.group; h += hashes) {
      Vec<float> pairs[hashes], by_row[rows];
      LSHKIT_UNROLL
      for (int k = 0; k < hashes; ++k) {
        const index_t at = (h + k) * p.rows * Probes;
        pairs[k] = logit_gradients_of_four(load_rows_of<Probes>(weights + at),
                                           load_rows_of<Probes>(weight_grads + at));
      }
      LSHKIT_UNROLL
      for (int k = 0; k < rows; ++k)  // two numbers of two hashes side by side
        by_row[k] = Vec<float>(
            _mm512_unpacklo_pd(_mm512_castps_pd(pairs[2 * k]), _mm512_castps_pd(pairs[2 * k + 1])));
      transpose_quarters(by_row);
      LSHKIT_UNROLL
      for (int r = 0; r < rows; ++r) {
        const index_t i = row + r;
        const float* of_row = margins + (i * p.n_hashes + h) * 2;
        float* to = margin_grads + i * margin_grad_stride + h * 2;
        if (i + kAhead < p.rows) prefetch(of_row + kAhead * p.n_hashes * 2);
        if (p.valid && !p.valid[i]) {
          store(to, Vec<float>{});
          continue;
        }
        const Vec<float> margin = load(of_row);
        sums[r] += by_row[r] * without_bits(margin);
        store(to, with_bits_of(margin, by_row[r] * twice));
      }
    }
    for (int r = 0; r < rows; ++r) total += double(sum_lanes(sums[r]));
  }
  return row;
}
#endif

template <int Probes>
double reduce(const ProbeRows& p, const float* weights, const float* weight_grads,
              float* margin_grads, index_t margin_grad_stride) {
  const index_t t = Probes ? Probes : p.n_probes, r = Probes ? kSelected<Probes> : p.n_selected;
  const index_t n = p.group * r, tile = larger(kRun / n, 1);
  const Vec<float> twice = broadcast(2 * p.sharpness);
  double total = 0;
  index_t begin = 0;
#if defined(LSHKIT_ISA_AVX512)
  if constexpr (kFourRows<Probes>)
    if (hashes_fill_registers(p))
      begin = reduce_four_rows<Probes>(p, weights, weight_grads, margin_grads, margin_grad_stride,
                                       total);
#endif
  for (index_t first = begin; first < p.rows; first += tile) {
    const index_t last = smaller(first + tile, p.rows);
    each_part(p, t, 0, p.group, [&](index_t hash, index_t here, index_t at, index_t stride) {
      at += first * stride;
      logit_gradients<Probes>(last - first, here, t, r, stride, margin_grad_stride, weights + at,
                              weight_grads + at,
                              margin_grads + first * margin_grad_stride + hash * r);
    });
    for (index_t i = first; i < last; ++i) {
      float* out = margin_grads + i * margin_grad_stride;
      if (p.valid && !p.valid[i]) {
        std::memset(out, 0, sizeof(float) * n);
        continue;
      }
      const float* margins = p.margins + (i * p.n_hashes + p.first_hash) * r;
      if (i + kAhead < p.rows) prefetch(margins + kAhead * p.n_hashes * r);
      Vec<float> sum = {};
      index_t c = 0;
      for (; c + kLanes<float> <= n; c += kLanes<float>) {
        const Vec<float> v = load(out + c), margin = load(margins + c);
        sum += v * without_bits(margin);
        store(out + c, with_bits_of(margin, v * twice));
      }
      if (const int left = int(n - c); left > 0) {
        const Vec<float> v = load_first(out + c, left), margin = load_first(margins + c, left);
        sum += v * without_bits(margin);
        store_first(out + c, with_bits_of(margin, v * twice), left);
      }
      total += double(sum_lanes(sum));
    }
  }
  return 2 * total;
}

}  // namespace

void expand_probes(const ProbeRows& p, int probe_code_bytes, void* probe_codes, float* weights) {
  const auto* bytes = static_cast<const std::uint8_t*>(p.codes);
  const auto* words = static_cast<const std::uint16_t*>(p.codes);
  if (probe_code_bytes == 1)
    expand_any(p, bytes, static_cast<std::uint8_t*>(probe_codes), weights);
  else if (p.code_bytes == 1)
    expand_any(p, bytes, static_cast<std::uint16_t*>(probe_codes), weights);
  else
    expand_any(p, words, static_cast<std::uint16_t*>(probe_codes), weights);
}

double reduce_probes(const ProbeRows& p, const float* weights, const float* weight_grads,
                     float* margin_grads, index_t margin_grad_stride) {
  if (p.n_probes == 1) return 0;
  return with_constant<2, 3, 4, 8, 16>(p.n_probes, [&](auto probes) {
    return reduce<probes.value>(p, weights, weight_grads, margin_grads, margin_grad_stride);
  });
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

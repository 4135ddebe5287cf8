// From a row's margins to the codes and weights of its probes. The exponentials of a row are taken
// a register at a time; a pair of row and hash is then a few products.
#include "probes.hpp"

#include "exponential.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

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
  const Numbers second = first ^ (0x10001u << others);
  return alternate(first, second, lanes);
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
// What a row has side by side, by hash, is moved to where it lies by row, Part hashes side by side.
// Returns how many rows.
template <int Probes, int Part, class Own>
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
  for (; row + rows <= p.rows;
       row += rows, codes += Part * Probes * rows, weights += Part * Probes * rows) {
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
      if constexpr (Part == 2) {
        // A quarter of a register are the codes of two hashes, or the weights of one.
        Vec<float> by_part[rows];
        std::memcpy(by_part, code, sizeof(code));
        transpose_quarters(by_part);
        LSHKIT_UNROLL
        for (int i = 0; i < rows; ++i) {
          const index_t at = (h + 2 * i) * p.rows * Probes;
          const __m512i both = _mm512_castps_si512(by_part[i]);
          store_rows_of<Probes>(codes + at, _mm512_castsi512_si256(both));
          store_rows_of<Probes>(codes + at + 4 * Probes, _mm512_extracti64x4_epi64(both, 1));
        }
        const auto store_weights = [&](Vec<float>(&of)[rows], index_t first) LSHKIT_ALWAYS_INLINE {
          LSHKIT_UNROLL
          for (int r = 0; r < rows; r += 2) {
            float* to = weights + first * p.rows * Probes + r * 2 * Probes;
            store_rows_of<Probes>(to, _mm512_shuffle_f32x4(of[r], of[r + 1], 0x44));
            store_rows_of<Probes>(to + 2 * p.rows * Probes,
                                  _mm512_shuffle_f32x4(of[r], of[r + 1], 0xee));
          }
        };
        store_weights(low, h);
        store_weights(high, h + hashes / 2);
        continue;
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
      begin = p.part == 1 ? expand_four_rows<Probes, 1>(p, all_own, probe_codes, weights)
                          : expand_four_rows<Probes, 2>(p, all_own, probe_codes, weights);
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

}  // namespace

bool makes_four_rows() {
#if defined(LSHKIT_ISA_AVX512)
  return true;
#else
  return false;
#endif
}

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

}  // namespace LSHKIT_ISA
}  // namespace lshkit

// From a row's margins to the weights of its probes, and back. The exponentials of a row are taken
// a register at a time; a pair of row and hash is then a few products.
#include "exponential.hpp"
#include "kernels.hpp"
#include "simd.hpp"

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
constexpr index_t kRun = 1024;  // margins whose exponentials are kept, a multiple of every register

// The own code with the bits of a = 0 .. 3 flipped.
template <class Code>
LSHKIT_INLINE void flip4(Code own, const std::uint8_t* bits, Code* out) {
  constexpr int width = 8 * int(sizeof(Code));
  constexpr std::uint64_t odd = (std::uint64_t(1) << width) | (std::uint64_t(1) << 3 * width);
  constexpr std::uint64_t upper = (std::uint64_t(1) << 2 * width) | (std::uint64_t(1) << 3 * width);
  constexpr std::uint64_t all = odd | (odd >> width);
  const std::uint64_t probes = (own * all) ^ (odd << bits[0]) ^ (upper << bits[1]);
  std::memcpy(out, &probes, 4 * sizeof(Code));
}
// Four weights, of which the first is w.
LSHKIT_INLINE Four weigh4(float w, const float* e) {
  const Four low = {1, e[0], 1, e[0]}, high = {1, 1, e[1], e[1]};
  return low * high * w;
}

// The n_probes t of one pair, e its exponentials and complement = 1 / (1 + e), the probability that
// a bit is not flipped; of three probes, which flip one bit at most, that none is. T > 0: known at
// compile time.
template <int T, class Code>
LSHKIT_INLINE void probes_of(const Code own, const std::uint8_t* bits, const float* e,
                             const float* complement, index_t t, int n_selected, Code* codes,
                             float* weights) {
  if (T) t = T;
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
    const float flip[2] = {complement[0] * e[0], complement[1] * e[1]};
    const Four low = {complement[0], flip[0], complement[0], flip[0]};
    const Four high = {complement[1], complement[1], flip[1], flip[1]}, w = low * high;
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

// As many pairs of 2 or 4 probes as fill registers: returns how many.
template <int Probes, class Own>
LSHKIT_INLINE index_t expand_registers(const Own* own, const std::uint8_t* bits, const float* e,
                                       const float* complement, index_t count, std::uint16_t* codes,
                                       float* weights) {
  constexpr int n = kLanes<float>, pairs = Probes == 2 ? n : n / 2;
  constexpr auto lanes = std::make_index_sequence<n>{};
  index_t h = 0;
  for (; h + pairs <= count; h += pairs, codes += pairs * Probes, weights += pairs * Probes) {
    if constexpr (Probes == 2) {
      const auto code = load_as<std::uint32_t, pairs>(own + h);
      const auto flipped = code ^ (1u << load_as<std::uint32_t, pairs>(bits + h));
      const auto both = code | (flipped << 16);
      std::memcpy(codes, &both, sizeof(both));
      const Vec<float> stays = load(complement + h), flips = stays * load(e + h);
      store(weights, factors<0, -1>(stays, flips, lanes));
      store(weights + n, factors<n / 2, -1>(stays, flips, lanes));
    } else {
      std::uint16_t two_bits[pairs];
      std::memcpy(two_bits, bits + 2 * h, sizeof(two_bits));
      const auto numbers = load_as<std::uint32_t, pairs>(two_bits);
      const auto code = load_as<std::uint32_t, pairs>(own + h);
      const auto first = (code | code << 16) ^ (0x10000u << (numbers & 255u));
      const auto second = first ^ (0x10001u << (numbers >> 8));
      const auto four = alternate(first, second, std::make_index_sequence<2 * pairs>{});
      std::memcpy(codes, &four, sizeof(four));
      const Vec<float> stays = load(complement + 2 * h), flips = stays * load(e + 2 * h);
      store(weights, factors<0, 0>(stays, flips, lanes) * factors<0, 1>(stays, flips, lanes));
      store(weights + n,
            factors<n / 4, 0>(stays, flips, lanes) * factors<n / 4, 1>(stays, flips, lanes));
    }
  }
  return h;
}

template <int Probes, class Own, class Code>
void expand(const ProbeRows& p, const Own* all_own, Code* probe_codes, float* weights) {
  const index_t t = Probes ? Probes : p.n_probes, r = Probes ? kSelected<Probes> : p.n_selected;
  const index_t step = r ? kRun / r : p.group;
  float e[kRun], complement[kRun];
  const Vec<float> twice = broadcast(2 * p.sharpness);
  for (index_t i = 0; i < p.rows; ++i)
    for (index_t first = 0; first < p.group; first += step) {
      const index_t pair = i * p.n_hashes + p.first_hash + first;
      const index_t count = smaller(step, p.group - first), n = count * r;
      const float* margins = p.margins + pair * r;
      const Own* own = all_own + pair;
      const std::uint8_t* bits = p.bits + pair * r;
      for (index_t c = 0; c < n; c += kLanes<float>) {
        const Vec<float> u = load_first(margins + c, int(smaller(kLanes<float>, n - c))) * twice;
        const Vec<float> power = exp_minus(u);
        store(e + c, power);
        Vec<float> sum = 1.0f + power;
        if (Probes == 3) sum += swap_pairs(power, std::make_index_sequence<kLanes<float>>{});
        store(complement + c, 1.0f / sum);
      }
      Code* codes_out = probe_codes + i * p.probe_stride + first * t;
      float* out = weights + i * p.probe_stride + first * t;
      index_t h = 0;
      if constexpr ((Probes == 2 || Probes == 4) && sizeof(Code) == 2 && kVectorBytes >= 32)
        h = expand_registers<Probes>(own, bits, e, complement, count, codes_out, out);
      for (; h < count; ++h)
        probes_of<Probes>(Code(own[h]), bits + h * r, e + h * r, complement + h * r, t, int(r),
                          codes_out + h * t, out + h * t);
      if (p.valid && !p.valid[i]) std::memset(out, 0, sizeof(float) * count * t);
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
  Four s = {};
  for (index_t a = 0; a < t; a += 4) s += load4(w + a) * load4(g + a);
  s = add_halves(add_pairs(s));
  Four all = {};
  for (index_t a = 0; a < t; a += 4) all += load4(w + a) * (s - load4(g + a));
  to[0] = all[1] + all[3];
  to[1] = all[2] + all[3];
  for (int k = 2; k < n_selected; ++k) {
    const index_t half = index_t(1) << k;
    Four sum = {};
    for (index_t base = half; base < t; base += 2 * half)
      for (index_t a = base; a < smaller(base + half, t); a += 4)
        sum += load4(w + a) * (s - load4(g + a));
    to[k] = add_halves(add_pairs(sum))[0];
  }
}

template <int Probes>
double reduce(const ProbeRows& p, const float* weights, const float* weight_grads,
              float* margin_grads, index_t margin_grad_stride) {
  const index_t t = Probes ? Probes : p.n_probes, r = Probes ? kSelected<Probes> : p.n_selected;
  const Vec<float> twice = broadcast(2 * p.sharpness);
  double total = 0;
  for (index_t i = 0; i < p.rows; ++i) {
    float* out = margin_grads + i * margin_grad_stride;
    const index_t n = p.group * r;
    if (p.valid && !p.valid[i]) {
      std::memset(out, 0, sizeof(float) * n);
      continue;
    }
    const float* margins = p.margins + (i * p.n_hashes + p.first_hash) * r;
    const float* w = weights + i * p.probe_stride;
    const float* g = weight_grads + i * p.probe_stride;
    for (index_t h = 0; h < p.group; ++h)
      logit_gradient<Probes>(w + h * t, g + h * t, t, int(r), out + h * r);
    Vec<float> sum = {};
    index_t c = 0;
    for (; c + kLanes<float> <= n; c += kLanes<float>) {
      const Vec<float> v = load(out + c);
      sum += v * load(margins + c);
      store(out + c, v * twice);
    }
    float rest = 0;
    for (; c < n; ++c) {
      rest += out[c] * margins[c];
      out[c] *= 2 * p.sharpness;
    }
    total += double(sum_lanes(sum) + rest);
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

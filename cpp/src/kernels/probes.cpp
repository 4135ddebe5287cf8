// From a row's margins to the weights of its probes, and back. The exponentials of a row are taken
// a register at a time; a pair of row and hash is then a few products.
#include "kernels.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

typedef float Four __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32)));
typedef std::uint32_t Unsigned __attribute__((vector_size(kVectorBytes)));

// exp(-u) for u >= 0, within 2 units in the last place; NaN stays, below 2^-125 it is 2^-125.
LSHKIT_INLINE Vec<float> exp_minus(Vec<float> u) {
  const Vec<float> largest = broadcast(86.6f), magic = broadcast(12582912.0f);  // 1.5 * 2^23
  u = u > largest ? largest : u;
  const Vec<float> shifted = u * 1.44269504f + magic;  // its low bits are u / log 2, rounded
  const Vec<float> n = shifted - magic;
  // Two parts of log 2, so that n times the first is exact.
  const Vec<float> x = (n * 0.693359375f - u) - n * 2.12194440e-4f;
  Vec<float> p = x * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * x + 8.3334519073e-3f;
  p = p * x + 4.1665795894e-2f;
  p = p * x + 1.6666665459e-1f;
  p = p * x + 5.0000001201e-1f;
  p = p * x * x + x + 1.0f;
  Unsigned bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (127u - (bits & 255u)) << 23;
  Vec<float> power;
  std::memcpy(&power, &bits, sizeof(power));
  return p * power;
}

constexpr index_t kRun = 1024;  // margins whose exponentials are kept, a multiple of every register

template <class Code>
struct Probes {
  const Code* codes;
  const std::uint8_t* bits;
  const float* exponentials;  // exp(-2 sharpness margin)
};

// One pair's codes: `pattern` has a one in every code, and flips[k] in those that bit k flips.
template <class Code>
LSHKIT_INLINE void flip2(Code own, const std::uint8_t* bits, Code* out) {
  out[0] = own;
  out[1] = Code(own ^ (1 << bits[0]));
}
template <class Code>
LSHKIT_INLINE void flip4(Code own, const std::uint8_t* bits, Code* out) {
  constexpr int width = 8 * int(sizeof(Code));
  const std::uint64_t odd = (std::uint64_t(1) << width) | (std::uint64_t(1) << 3 * width);
  const std::uint64_t upper = (std::uint64_t(1) << 2 * width) | (std::uint64_t(1) << 3 * width);
  const std::uint64_t all = odd | (odd >> width);
  const std::uint64_t probes = own * all ^ odd << bits[0] ^ upper << bits[1];
  std::memcpy(out, &probes, 4 * sizeof(Code));
}

template <class Code>
LSHKIT_INLINE void probes_of(const Code own, const std::uint8_t* bits, const float* e, index_t t,
                             int n_selected, Code* codes, float* weights) {
  switch (t) {
    case 1:
      codes[0] = own;
      weights[0] = 1;
      return;
    case 2: {
      const float inverse = 1 / (1 + e[0]);
      flip2(own, bits, codes);
      weights[0] = inverse;
      weights[1] = e[0] * inverse;
      return;
    }
    case 4: {
      const float inverse = 1 / ((1 + e[0]) * (1 + e[1]));
      const Four low = {1, e[0], 1, e[0]}, high = {1, 1, e[1], e[1]};
      const Four w = low * high * inverse;
      flip4(own, bits, codes);
      std::memcpy(weights, &w, sizeof(w));
      return;
    }
    case 8: {
      const float inverse = 1 / ((1 + e[0]) * (1 + e[1]) * (1 + e[2]));
      const Four low = {1, e[0], 1, e[0]}, high = {1, 1, e[1], e[1]};
      const Four w = low * high * inverse, upper = w * e[2];
      flip4(own, bits, codes);
      flip4(Code(own ^ (1 << bits[2])), bits, codes + 4);
      std::memcpy(weights, &w, sizeof(w));
      std::memcpy(weights + 4, &upper, sizeof(upper));
      return;
    }
  }
  codes[0] = own;
  weights[0] = 1;
  for (int k = 0; k < n_selected; ++k) {
    const index_t half = index_t(1) << k, count = smaller(half, t - half);
    for (index_t a = 0; a < count; ++a) {
      codes[half + a] = Code(codes[a] ^ (1 << bits[k]));
      weights[half + a] = weights[a] * e[k];
    }
  }
  float sum = 0;
  for (index_t a = 0; a < t; ++a) sum += weights[a];
  const float inverse = 1 / sum;
  for (index_t a = 0; a < t; ++a) weights[a] *= inverse;
}

template <class Code, int Probes>
void expand(const ProbeRows& p, Code* probe_codes, float* weights) {
  const index_t t = Probes ? Probes : p.n_probes, r = p.n_selected;
  const index_t step = r ? kRun / r : p.group;
  float e[kRun];
  const Vec<float> twice = broadcast(2 * p.sharpness);
  for (index_t i = 0; i < p.rows; ++i)
    for (index_t first = 0; first < p.group; first += step) {
      const index_t pair = i * p.n_hashes + p.first_hash + first;
      const index_t count = smaller(step, p.group - first), n = count * r;
      const float* margins = p.margins + pair * r;
      const Code* own = static_cast<const Code*>(p.codes) + pair;
      const std::uint8_t* bits = p.bits + pair * r;
      index_t c = 0;
      for (; c + kLanes<float> <= n; c += kLanes<float>)
        store(e + c, exp_minus(load(margins + c) * twice));
      if (c < n) store(e + c, exp_minus(load_first(margins + c, int(n - c)) * twice));
      Code* codes_out = probe_codes + i * p.probe_stride + first * t;
      float* out = weights + i * p.probe_stride + first * t;
      for (index_t h = 0; h < count; ++h)
        probes_of<Code>(own[h], bits + h * r, e + h * r, t, int(r), codes_out + h * t, out + h * t);
      if (p.valid && !p.valid[i]) std::memset(out, 0, sizeof(float) * count * t);
    }
}

template <class Code>
void expand_any(const ProbeRows& p, Code* probe_codes, float* weights) {
  switch (p.n_probes) {
    case 1:
      return expand<Code, 1>(p, probe_codes, weights);
    case 2:
      return expand<Code, 2>(p, probe_codes, weights);
    case 4:
      return expand<Code, 4>(p, probe_codes, weights);
    case 8:
      return expand<Code, 8>(p, probe_codes, weights);
    default:
      return expand<Code, 0>(p, probe_codes, weights);
  }
}

// With logits -sum of u_k over the flipped k, u = 2 sharpness margin: d loss / d u_k is the sum
// over the probes with k flipped of w_a (s - g_a), s = sum of w g. to[k]: of one pair.
LSHKIT_INLINE void logit_gradient(const float* w, const float* g, index_t t, int n_selected,
                                  float* to) {
  switch (t) {
    case 2: {
      to[0] = w[0] * w[1] * (g[0] - g[1]);
      return;
    }
    case 4: {
      Four weight, grad;
      std::memcpy(&weight, w, sizeof(weight));
      std::memcpy(&grad, g, sizeof(grad));
      Four s = weight * grad;
      s += __builtin_shufflevector(s, s, 1, 0, 3, 2);
      s += __builtin_shufflevector(s, s, 2, 3, 0, 1);
      const Four part = weight * (s - grad);
      to[0] = part[1] + part[3];
      to[1] = part[2] + part[3];
      return;
    }
  }
  float s = 0;
  for (index_t a = 0; a < t; ++a) s += w[a] * g[a];
  for (int k = 0; k < n_selected; ++k) {
    const index_t half = index_t(1) << k;
    float sum = 0;
    for (index_t base = half; base < t; base += 2 * half)
      for (index_t a = base; a < smaller(base + half, t); ++a) sum += w[a] * (s - g[a]);
    to[k] = sum;
  }
}

template <int Probes>
double reduce(const ProbeRows& p, const float* weights, const float* weight_grads,
              float* margin_grads, index_t margin_grad_stride) {
  const index_t t = Probes ? Probes : p.n_probes, r = p.n_selected;
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
      logit_gradient(w + h * t, g + h * t, t, int(r), out + h * r);
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
  if (p.code_bytes == 1 && probe_code_bytes == 1)
    expand_any(p, static_cast<std::uint8_t*>(probe_codes), weights);
  else
    expand_any(p, static_cast<std::uint16_t*>(probe_codes), weights);
}

double reduce_probes(const ProbeRows& p, const float* weights, const float* weight_grads,
                     float* margin_grads, index_t margin_grad_stride) {
  if (p.n_probes == 1) return 0;
  switch (p.n_probes) {
    case 2:
      return reduce<2>(p, weights, weight_grads, margin_grads, margin_grad_stride);
    case 4:
      return reduce<4>(p, weights, weight_grads, margin_grads, margin_grad_stride);
    case 8:
      return reduce<8>(p, weights, weight_grads, margin_grads, margin_grad_stride);
    default:
      return reduce<0>(p, weights, weight_grads, margin_grads, margin_grad_stride);
  }
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

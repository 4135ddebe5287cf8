// From the gradients of the weights of a row's probes to those of its margins and of the sharpness.
#include "probes.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

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
template <int Probes, int Part>
LSHKIT_NOINLINE index_t reduce_four_rows(const ProbeRows& p, const float* weights,
                                         const float* weight_grads, float* margin_grads,
                                         index_t margin_grad_stride, double& total) {
  constexpr int n = kLanes<float>, hashes = n / 2, rows = 4;
  const Vec<float> twice = broadcast(2 * p.sharpness);
  const float* margins = p.margins + p.first_hash * 2;
  index_t row = 0;
  for (; row + rows <= p.rows;
       row += rows, weights += Part * Probes * rows, weight_grads += Part * Probes * rows) {
    Vec<float> sums[rows] = {};
    for (index_t h = 0; h < p.group; h += hashes) {
      Vec<float> pairs[hashes], by_row[rows];
      LSHKIT_UNROLL
      for (int k = 0; k < hashes; ++k) {
        const index_t at = (h + k / Part * Part) * p.rows * Probes + k % Part * 4 * Probes;
        pairs[k] = logit_gradients_of_four(load_rows_of<Probes>(weights + at),
                                           load_rows_of<Probes>(weight_grads + at));
      }
      LSHKIT_UNROLL
      for (int k = 0; k < hashes && Part == 2; k += 2) {  // rows 0 and 1, 2 and 3, of both hashes
        const Vec<float> a = pairs[k], b = pairs[k + 1];
        pairs[k] = _mm512_shuffle_f32x4(a, b, 0x88);
        pairs[k + 1] = _mm512_shuffle_f32x4(a, b, 0xdd);
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
      begin = (p.part == 1 ? reduce_four_rows<Probes, 1>
                           : reduce_four_rows<Probes, 2>)(p, weights, weight_grads, margin_grads,
                                                          margin_grad_stride, total);
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

double reduce_probes(const ProbeRows& p, const float* weights, const float* weight_grads,
                     float* margin_grads, index_t margin_grad_stride) {
  if (p.n_probes == 1) return 0;
  return with_constant<2, 3, 4, 8, 16>(p.n_probes, [&](auto probes) {
    return reduce<probes.value>(p, weights, weight_grads, margin_grads, margin_grad_stride);
  });
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

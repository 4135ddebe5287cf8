#pragma once
// The collision probability p(x) = (1 - acos(x) / pi)^n_bits of a pair with cosine x, and a pair's
// weight in the gradient of queries and keys, a register of pairs at a time.
#if defined(LSHKIT_ISA_AVX512) || defined(LSHKIT_ISA_AVX2)
#include <immintrin.h>
#endif

#include "kernels.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr double kPi = 3.14159265358979323846;

LSHKIT_INLINE Vec<float> select(Int<float> mask, Vec<float> a, Vec<float> b) {
  return Vec<float>((mask & Int<float>(a)) | (~mask & Int<float>(b)));
}
LSHKIT_INLINE Vec<double> select(Int<double> mask, Vec<double> a, Vec<double> b) {
  return Vec<double>((mask & Int<double>(a)) | (~mask & Int<double>(b)));
}
#if defined(LSHKIT_ISA_AVX512)
LSHKIT_INLINE Vec<float> root(Vec<float> x) { return _mm512_maskz_sqrt_ps(0xffff, x); }
LSHKIT_INLINE Vec<double> root(Vec<double> x) { return _mm512_maskz_sqrt_pd(0xff, x); }
#elif defined(LSHKIT_ISA_AVX2)
LSHKIT_INLINE Vec<float> root(Vec<float> x) { return _mm256_sqrt_ps(x); }
LSHKIT_INLINE Vec<double> root(Vec<double> x) { return _mm256_sqrt_pd(x); }
#else
LSHKIT_INLINE Vec<float> root(Vec<float> x) {
  for (int i = 0; i < kLanes<float>; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}
LSHKIT_INLINE Vec<double> root(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = __builtin_sqrt(x[i]);
  return x;
}
#endif
// acos for 0 <= a <= 1, complement = 1 - a. float: Abramowitz and Stegun 4.4.46, error below 3e-8.
LSHKIT_INLINE Vec<float> arccos(Vec<float> a, Vec<float> complement) {
  Vec<float> p = broadcast<float>(-0.0012624911f);
  p = p * a + 0.0066700901f;
  p = p * a - 0.0170881256f;
  p = p * a + 0.0308918810f;
  p = p * a - 0.0501743046f;
  p = p * a + 0.0889789874f;
  p = p * a - 0.2145988016f;
  p = p * a + 1.5707963050f;
  return p * root(complement);
}
LSHKIT_INLINE Vec<float> arccos(Vec<float> a) { return arccos(a, 1.0f - a); }
LSHKIT_INLINE Vec<double> arccos(Vec<double> a) {
  for (int i = 0; i < kLanes<double>; ++i) a[i] = __builtin_acos(a[i]);
  return a;
}

template <class T>
LSHKIT_INLINE Vec<T> clamp(Vec<T> x) {
  const Vec<T> one = broadcast<T>(1);
  x = select(x > one, one, x);
  return select(x < -one, -one, x);
}
// The distance to x = 1 below which the derivative stops growing: 1 - x^2 is rounding noise there.
template <class T>
constexpr T kFloor = sizeof(T) == 4 ? T(1e-6) : T(1e-12);

// From here on a cosine counts as 1, on either side: vectors as equal or opposite.
template <class T>
constexpr T kNearOne = 1 - 4 * (sizeof(T) == 4 ? T(1.1920929e-7) : T(2.220446049250313e-16));

// ---- for what is rounded to bfloat16 afterwards ----
// 1 / sqrt(x) where x >= least > 0, else 0; to 2^-14 of it.
#if defined(LSHKIT_ISA_AVX512)
LSHKIT_INLINE Vec<float> rough_inverse_root(Vec<float> x, Vec<float> least) {
  return _mm512_maskz_rsqrt14_ps(_mm512_cmp_ps_mask(x, least, _CMP_GE_OQ), x);
}
#else
LSHKIT_INLINE Vec<float> rough_inverse_root(Vec<float> x, Vec<float> least) {
  return select(x >= least, 1 / root(x), Vec<float>{});
}
#endif
// acos(a) / pi for 0 <= a <= 1, complement = 1 - a, which counts as 0 where it is less than
// `least`: sqrt(1 - a) times a minimax polynomial, of relative error 6e-6.
LSHKIT_INLINE Vec<float> rough_arccos_over_pi(Vec<float> a, Vec<float> complement,
                                              Vec<float> least) {
  Vec<float> p = broadcast<float>(0.002734858077f);
  p = p * a - 0.011345660314f;
  p = p * a + 0.026927925646f;
  p = p * a - 0.068153589964f;
  p = p * a + 0.499997168779f;
  return p * (complement * rough_inverse_root(complement, least));
}

// ---- of several registers, whose chains of operations overlap ----

// The probability 1 - acos(x) / pi that one bit agrees: 1/2 +- (1/2 - acos(|x|) / pi). Of x, which
// may be rounded to beyond 1, the magnitudes are left, at most 1 (Rough: or about 1). Near -1,
// where the probability is small, its error is 2^-25 in float32: absolute, not of it.
template <class T, bool Rough, std::size_t N>
LSHKIT_INLINE void agreements(Vec<T> (&x)[N], Vec<T> (&bit)[N]) {
  const Vec<T> one = broadcast<T>(1), half = broadcast<T>(0.5), near_one = broadcast(kNearOne<T>);
  LSHKIT_UNROLL
  for (std::size_t i = 0; i < N; ++i) {
    const Int<T> sign = Int<T>(x[i]) & Int<T>(broadcast<T>(-0.0));
    Vec<T> a = Vec<T>(Int<T>(x[i]) ^ sign), from_half;
    if constexpr (Rough) {
      from_half = half - rough_arccos_over_pi(a, one - a, one - near_one);
    } else {
      a = a > near_one ? one : a;
      from_half = half - arccos(a) * T(1 / kPi);
    }
    bit[i] = half + Vec<T>(Int<T>(from_half) ^ sign);
    x[i] = a;
  }
}
template <class T, std::size_t N>
LSHKIT_INLINE void multiply_each(Vec<T> (&x)[N], const Vec<T> (&y)[N]) {
  LSHKIT_UNROLL
  for (std::size_t i = 0; i < N; ++i) x[i] *= y[i];
}
// base^n by squaring; base has other numbers then.
template <class T, std::size_t N>
LSHKIT_INLINE void powers(Vec<T> (&base)[N], int n, Vec<T> (&result)[N]) {
  LSHKIT_UNROLL
  for (std::size_t i = 0; i < N; ++i) result[i] = broadcast<T>(1);
  if (n == 0) return;
  for (; n % 2 == 0; n /= 2) multiply_each<T>(base, base);
  LSHKIT_UNROLL
  for (std::size_t i = 0; i < N; ++i) result[i] = base[i];
  while ((n /= 2) > 0) {
    multiply_each<T>(base, base);
    if (n % 2) multiply_each<T>(result, base);
  }
}
// p of cosines, which become their magnitudes. Rough: to the digits of a bfloat16.
template <class T, bool Rough = false, std::size_t N>
LSHKIT_INLINE void probabilities(Vec<T> (&x)[N], int n_bits, Vec<T> (&p)[N]) {
  Vec<T> bit[N];
  agreements<T, Rough>(x, bit);
  powers<T>(bit, n_bits, p);
}
// The gradient's weights too.
template <class T, bool Rough = false, std::size_t N>
LSHKIT_INLINE void weights(Vec<T> (&x)[N], int n_bits, Gradient kind, Vec<T> (&p)[N],
                           Vec<T> (&w)[N]) {
  Vec<T> base[N];
  agreements<T, Rough>(x, p);
  LSHKIT_UNROLL
  for (std::size_t i = 0; i < N; ++i) base[i] = p[i];
  powers<T>(base, n_bits - 1, w);
  const Vec<T> floor = broadcast<T>(kFloor<T>);
  LSHKIT_UNROLL
  for (std::size_t i = 0; i < N; ++i) {
    p[i] *= w[i];
    if (kind == Gradient::lower_bound) {
      w[i] = p[i] * T(n_bits * 0.5);
    } else {
      const Vec<T> square = 1 - x[i] * x[i], some = square < floor ? floor : square;
      if constexpr (Rough)
        w[i] *= float(n_bits / kPi) * rough_inverse_root(some, floor);
      else
        w[i] = w[i] * T(n_bits / kPi) / root(some);
    }
  }
}

// ---- of one ----

template <class T>
LSHKIT_INLINE Vec<T> agreement(Vec<T> x) {
  Vec<T> cosine[1] = {x}, bit[1];
  agreements<T, false>(cosine, bit);
  return bit[0];
}
template <class T>
LSHKIT_INLINE Vec<T> power(Vec<T> base, int n) {
  Vec<T> factor[1] = {base}, result[1];
  powers<T>(factor, n, result);
  return result[0];
}
template <class T>
LSHKIT_INLINE Vec<T> probability(Vec<T> x, int n_bits) {
  return power<T>(agreement<T>(x), n_bits);
}
template <class T>
LSHKIT_INLINE Vec<T> weight(Vec<T> x, int n_bits, Gradient kind) {
  Vec<T> cosine[1] = {x}, p[1], w[1];
  weights<T>(cosine, n_bits, kind, p, w);
  return w[0];
}

// log(1 - p) and e^t - 1 for 0 <= p <= 1 and t <= 0, to a few units of the last place of the result
// (polynomials: Cephes, S. L. Moshier). p = 1 counts as 1 - 1e-30.
LSHKIT_INLINE Vec<float> log1p_minus(Vec<float> p) {
  const Vec<float> smallest = broadcast<float>(1e-30f);
  Vec<float> u = 1 - p;
  const Vec<float> rounded = (1 - u) - p;  // what u lacks, exactly
  u = select(u < smallest, smallest, u);
  const Int<float> bits = Int<float>(u), exponent = (bits - 0x3f3504f3) >> 23;
  const Vec<float> e = __builtin_convertvector(exponent, Vec<float>);
  const Vec<float> x = Vec<float>(bits - (exponent << 23)) - 1, square = x * x;
  Vec<float> y = broadcast<float>(7.0376836292e-2f);
  y = y * x - 1.1514610310e-1f;
  y = y * x + 1.1676998740e-1f;
  y = y * x - 1.2420140846e-1f;
  y = y * x + 1.4249322787e-1f;
  y = y * x - 1.6668057665e-1f;
  y = y * x + 2.0000714765e-1f;
  y = y * x - 2.4999993993e-1f;
  y = y * x + 3.3333331174e-1f;
  y = y * x * square - 2.12194440e-4f * e - 0.5f * square + rounded / u;
  return x + y + 0.693359375f * e;
}
LSHKIT_INLINE Vec<float> expm1(Vec<float> t) {
  const Vec<float> lowest = broadcast<float>(-80.0f);
  t = select(t < lowest, lowest, t);
  const Int<float> n = __builtin_convertvector(t * 1.44269504f - 0.5f, Int<float>);
  const Vec<float> whole = __builtin_convertvector(n, Vec<float>);
  const Vec<float> r = t - 0.693359375f * whole + 2.12194440e-4f * whole;
  Vec<float> y = broadcast<float>(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r;
  const Vec<float> scale = Vec<float>((n + 127) << 23);
  return scale * y + (scale - 1);
}
// p'(x) / (1 - (1 - p)^n_hashes), the weight of a pair that has collided in one of n_hashes hashes,
// as (p' / p) (p / (1 - (1 - p)^n_hashes)): p may be too small for a float, its ratios are not.
// Where no bit can agree there is no such pair, and the weight is 0.
LSHKIT_INLINE Vec<float> unbiased_weight(Vec<float> x, int n_bits, float n_hashes) {
  x = clamp<float>(x);
  const Vec<float> bit = agreement<float>(x), p = power<float>(bit, n_bits);
  const Vec<float> square = 1 - x * x, floor = broadcast<float>(kFloor<float>);
  const Vec<float> sine = root(select(square < floor, floor, square));
  const Vec<float> seen = p / -expm1(n_hashes * log1p_minus(p));
  const Vec<float> share = select(p < 1e-30f, broadcast<float>(1 / n_hashes), seen);
  const Vec<float> w = share * float(n_bits / kPi) / (sine * bit);
  return select(bit > 0.0f, w, Vec<float>{});
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

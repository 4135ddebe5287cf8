// Row by row: norms, the normalisation of the output and the gradients through both.
#include "kernels.hpp"
#include "short_floats.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

template <class T>
LSHKIT_INLINE T dot(const T* a, const T* b, index_t n) {
  Vec<T> s0 = {}, s1 = {};
  index_t i = 0;
  for (; i + 2 * kLanes<T> <= n; i += 2 * kLanes<T>) {
    s0 += load(a + i) * load(b + i);
    s1 += load(a + i + kLanes<T>) * load(b + i + kLanes<T>);
  }
  for (; i < n; i += kLanes<T>) s0 += load_first(a + i, int(n - i)) * load_first(b + i, int(n - i));
  return sum_lanes(s0 + s1);
}

// The squared norms of four rows, each summed in the same order wherever it stands.
template <class T, class Row>
LSHKIT_INLINE void squares_of(const Row* const (&row)[4], index_t n, T (&square)[4]) {
  Vec<T> sum[4] = {};
  for (index_t i = 0; i < n; i += kLanes<T>) LSHKIT_UNROLL
  for (int k = 0; k < 4; ++k) {
    const Vec<T> x = first_lanes(row[k] + i, n - i);
    sum[k] += x * x;
  }
  if constexpr (sizeof(T) == sizeof(float)) {
    const Vec4 all = sum_lanes4(sum[0], sum[1], sum[2], sum[3]);
    std::memcpy(square, &all, sizeof(square));
  } else {
    for (int k = 0; k < 4; ++k) square[k] = sum_lanes(sum[k]);
  }
}

LSHKIT_INLINE float root(float x) { return __builtin_sqrtf(x); }
LSHKIT_INLINE double root(double x) { return __builtin_sqrt(x); }

// x[i] = a * x[i] + b * y[i]
template <class T>
LSHKIT_INLINE void combine(T a, T* x, T b, const T* y, index_t n) {
  for (index_t i = 0; i < n; ++i) x[i] = a * x[i] + b * y[i];
}
template <class T>
LSHKIT_INLINE void scale(T a, T* x, index_t n) {
  for (index_t i = 0; i < n; ++i) x[i] *= a;
}
template <class T>
LSHKIT_INLINE void clear(T* x, index_t n) {
  for (index_t i = 0; i < n; ++i) x[i] = 0;
}

// The norm of a row times `factor`, a power of two: 1, or what brings the square of a norm that
// may leave T's range, subnormal numbers too, back into it.
template <class T>
struct ScaledNorm {
  T factor, norm;

  T of_row() const { return norm / factor; }
};
template <class T>
constexpr T kLeastSquare = sizeof(T) == 4 ? T(1e-30) : T(1e-280);
template <class T>
LSHKIT_INLINE bool leaves_range(T square) {
  return square <= kLeastSquare<T> || square >= 1 / kLeastSquare<T> || square != square;
}
template <class T, class Row>
LSHKIT_INLINE ScaledNorm<T> scaled_norm(const Row* x, index_t n, T square) {
  constexpr T kFactor = sizeof(T) == 4 ? T(0x1p100) : T(0x1p600);
  if (!(square <= kLeastSquare<T> || square >= 1 / kLeastSquare<T>)) return {1, root(square)};
  const T factor = square <= kLeastSquare<T> ? kFactor : 1 / kFactor;
  T sum = 0;
  for (index_t i = 0; i < n; ++i) {
    const T scaled = first_lanes(x + i, 1)[0] * factor;
    sum += scaled * scaled;
  }
  return {factor, root(sum)};
}

// take(i, squared norm, its root) for each row: four at once, whose sums of lanes and roots are
// computed together.
template <class T, class Row, class Take>
LSHKIT_INLINE void by_fours(Matrix<const Row> x, const Take& take) {
  constexpr int kRows = 4;
  for (index_t i = 0; i < x.rows; i += kRows) {
    const int count = int(smaller(kRows, x.rows - i));
    const Row* row[kRows];
    for (int k = 0; k < kRows; ++k) row[k] = x.row(i + (k < count ? k : 0));
    T square[kRows], norm[kRows];
    squares_of<T>(row, x.columns, square);
    for (int k = 0; k < kRows; ++k) norm[k] = root(square[k]);
    for (int k = 0; k < count; ++k) take(i + k, square[k], norm[k]);
  }
}

template <class T>
void set_inverse_norm(const ScaledNorm<T>& length, T* inverse, std::uint8_t* valid) {
  const T reciprocal = length.factor / length.norm;
  *valid = length.norm - length.norm == 0;  // of a finite row finite
  *inverse = 0;
  if (!*valid)
    *inverse = T(__builtin_nan(""));
  else if (reciprocal - reciprocal == 0)  // zero and subnormal lengths have none
    *inverse = reciprocal;
}

template <class T, class Row>
void inverse_norms_of(Matrix<const Row> x, const std::uint8_t* mask, T* inverse,
                      std::uint8_t* valid) {
  by_fours<T>(x, [&](index_t i, T square, T norm) {
    if (mask && !mask[i]) {
      inverse[i] = 0;
      valid[i] = 0;
    } else if (leaves_range(square)) {
      set_inverse_norm(scaled_norm(x.row(i), x.columns, square), inverse + i, valid + i);
    } else {
      inverse[i] = 1 / norm;
      valid[i] = 1;
    }
  });
}

// The row as a unit vector, zeros where it is zero: its norm.
template <class T>
LSHKIT_INLINE ScaledNorm<T> to_unit(T* row, index_t n, T square) {
  const ScaledNorm<T> length = scaled_norm(row, n, square);
  if (length.norm == 0) {
    clear(row, n);
    return length;
  }
  if (length.factor != 1) scale(length.factor, row, n);
  scale(1 / length.norm, row, n);
  return length;
}

template <class T>
void l2(Matrix<T> y, T* norms) {
  by_fours<T>(Matrix<const T>{y.data, y.stride, y.rows, y.columns},
              [&](index_t i, T square, T norm) {
                if (leaves_range(square))
                  norm = to_unit(y.row(i), y.columns, square).of_row();
                else
                  scale(1 / norm, y.row(i), y.columns);
                if (norms) norms[i] = norm;
              });
}

// A sum of weights that is zero, or so small that its reciprocal is infinite.
template <class T>
LSHKIT_INLINE bool vanishes(T sum) {
  return sum < (sizeof(T) == 4 ? T(1.2e-38) : T(2.3e-308));
}

template <class T>
void by_sum(Matrix<T> y, const T* sums) {
  for (index_t i = 0; i < y.rows; ++i)
    if (vanishes(sums[i]))
      clear(y.row(i), y.columns);
    else
      scale(1 / sums[i], y.row(i), y.columns);
}

// The reciprocal of a norm, or of a sum of weights, in a gradient. Sums of many such gradients must
// not overflow, so that it counts as 2^-100 (float) or 2^-1000 (double) where it is smaller.
template <class T>
LSHKIT_INLINE T within_sums(T reciprocal) {
  constexpr T kLargest = sizeof(T) == 4 ? T(0x1p100) : T(0x1p1000);
  return reciprocal > kLargest ? kLargest : reciprocal;
}

// d(y / |y|): (g - (g . u) u) / |y|
template <class T>
void l2_backward(Matrix<const T> grad, Matrix<T> y) {
  for (index_t i = 0; i < y.rows; ++i) {
    T* row = y.row(i);
    const ScaledNorm<T> length = to_unit(row, y.columns, dot(row, row, y.columns));
    if (length.norm == 0) continue;
    const T inverse = within_sums(1 / length.norm * length.factor);
    const T along = dot(grad.row(i), static_cast<const T*>(row), y.columns);
    combine(-along * inverse, row, inverse, grad.row(i), y.columns);
  }
}

// y = raw / sum: the gradient of raw is g / sum, that of sum is -(g . y) / sum, and sum is raw with
// every value one.
template <class T>
void sum_backward(Matrix<const T> grad, Matrix<T> y, const T* sums, T* bias) {
  for (index_t i = 0; i < y.rows; ++i) {
    T* row = y.row(i);
    bias[i] = 0;
    if (vanishes(sums[i])) {
      clear(row, y.columns);
      continue;
    }
    const T reciprocal = 1 / sums[i], inverse = within_sums(reciprocal);
    bias[i] = -dot(grad.row(i), static_cast<const T*>(row), y.columns) * reciprocal * inverse;
    combine(T(0), row, inverse, grad.row(i), y.columns);
  }
}

template <class T>
void unit_backward(Matrix<const T> x, const T* inverse, Matrix<T> grad) {
  for (index_t i = 0; i < grad.rows; ++i) {
    T* g = grad.row(i);
    const T* row = x.row(i);
    const T scale = inverse[i];
    if (scale == 0) {
      clear(g, grad.columns);
      continue;
    }
    T along = 0;
    if (scale > T(1e-6) && scale < T(1e6))
      along = dot(static_cast<const T*>(g), row, grad.columns) * scale;
    else  // products with rows of such lengths may leave the range of T
      for (index_t c = 0; c < grad.columns; ++c) along += g[c] * (row[c] * scale);
    for (index_t c = 0; c < grad.columns; ++c) g[c] = scale * (g[c] - along * (row[c] * scale));
  }
}

}  // namespace

#define LSHKIT_DEFINE(T)                                                                   \
  void inverse_norms(Matrix<const T> x, const std::uint8_t* mask, T* inverse,              \
                     std::uint8_t* valid) {                                                \
    inverse_norms_of(x, mask, inverse, valid);                                             \
  }                                                                                        \
  void normalize_l2(Matrix<T> y, T* norms) { l2(y, norms); }                               \
  void normalize_sum(Matrix<T> y, const T* sums) { by_sum(y, sums); }                      \
  void normalize_l2_backward(Matrix<const T> grad, Matrix<T> y) { l2_backward(grad, y); }  \
  void normalize_sum_backward(Matrix<const T> grad, Matrix<T> y, const T* sums, T* bias) { \
    sum_backward(grad, y, sums, bias);                                                     \
  }                                                                                        \
  void unit_norm_backward(Matrix<const T> x, const T* inverse, Matrix<T> grad) {           \
    unit_backward(x, inverse, grad);                                                       \
  }
LSHKIT_DEFINE(float)
LSHKIT_DEFINE(double)
#undef LSHKIT_DEFINE
void bfloat16_inverse_norms(Matrix<const Half> x, const std::uint8_t* mask, float* inverse,
                            std::uint8_t* valid) {
  inverse_norms_of(x, mask, inverse, valid);
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

// Kernel sums, a panel of keys at a time: the panel is packed so that keys lie in lanes, a tile of
// queries times the panel is accumulated in registers (products for L2 and angles, absolute
// differences for L1), and the tile goes through the kernel and into the sums at once. The bound is
// that of the matrix product: one multiply-add a pair and feature; the exponential adds some 15
// instructions a register of pairs.
//
// Where a kernel ends is not for a rounded product to say: of pairs near the end the rows as given
// are subtracted (see `margin`). Nor is a small angle: unit vectors that are nearly equal or
// opposite are subtracted (see `NearlyParallel`).
#include "kernel_sums.hpp"

#include "collision_probability.hpp"
#include "exponential.hpp"
#include "kernel_panel.hpp"
#include "kernels.hpp"
#include "matmul.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// A register of floats from one of floats or two of doubles.
LSHKIT_INLINE Vec<float> to_floats(const Vec<float>* v) { return v[0]; }
template <class V, std::size_t... I>
LSHKIT_INLINE Vec<float> join(V a, V b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, int(I)...);
}
LSHKIT_INLINE Vec<float> to_floats(const Vec<double>* v) {
  typedef float Half __attribute__((vector_size(kVectorBytes / 2)));
  return join(__builtin_convertvector(v[0], Half), __builtin_convertvector(v[1], Half),
              std::make_index_sequence<kLanes<float>>{});
}
template <class T>
constexpr int kPerFloats = sizeof(T) / sizeof(float);  // registers of T to one of floats

template <class T>
LSHKIT_INLINE bool any_below(Vec<T> v, T bound) {
  return lanes_below<T>(v, bound) != 0;
}

// The error of half a squared distance from products, relative to half the sum of the squared
// norms. Of it 12 (of float 4) come from the scaled rows, 2 d + 3 from the products, and 2 d + 12
// from subtracting the rows as given: what is farther from the edge is there on the same side.
template <class T>
constexpr double kRoundoff = sizeof(T) == 4 ? 0x1p-24 : 0x1p-53;
template <class T>
LSHKIT_INLINE T error_of_products(index_t d) {
  return T(4 * double(d + 8) * kRoundoff<T>);
}
// The error that a term may have from it, of the kernels that are continuous at their end.
constexpr double kRelative = 1e-6;

LSHKIT_INLINE Vec<float> at_least_zero(Vec<float> v) { return select(v > 0.0f, v, Vec<float>{}); }
LSHKIT_INLINE Vec<double> at_least_zero(Vec<double> v) { return select(v > 0.0, v, Vec<double>{}); }
// a < b ? a : b, in an instruction where GCC makes four of it.
#if defined(LSHKIT_ISA_AVX512)
LSHKIT_INLINE Vec<float> least_of(Vec<float> a, Vec<float> b) {
  return _mm512_maskz_min_ps(0xffff, a, b);
}
LSHKIT_INLINE Vec<double> least_of(Vec<double> a, Vec<double> b) {
  return _mm512_maskz_min_pd(0xff, a, b);
}
#elif defined(LSHKIT_ISA_AVX2)
LSHKIT_INLINE Vec<float> least_of(Vec<float> a, Vec<float> b) { return _mm256_min_ps(a, b); }
LSHKIT_INLINE Vec<double> least_of(Vec<double> a, Vec<double> b) { return _mm256_min_pd(a, b); }
#else
LSHKIT_INLINE Vec<float> least_of(Vec<float> a, Vec<float> b) { return select(a < b, a, b); }
LSHKIT_INLINE Vec<double> least_of(Vec<double> a, Vec<double> b) { return select(a < b, a, b); }
#endif

// The angular kernel: 1 - |cosine| below which its error, of the product, changes a log kernel by
// more than kLog. The error is that of cosines of up to 4,000 features, also of equal ones.
template <class T>
struct NearlyParallel {
  static constexpr double kLog = sizeof(T) == 4 ? 2e-4 : 1e-7;
  T equal, opposite, either;  // for nearly equal and nearly opposite vectors; the larger

  explicit NearlyParallel(const KernelSumShape& shape) {
    const double error = (5 + double(shape.n_features) / 256) * kRoundoff<T>;
    const double change = shape.n_bits * error / kLog, angle = change / kPi;
    const double least = 4 * error;
    equal = T(least > angle * angle / 2 ? least : angle * angle / 2);
    opposite = T(least > change / 2 ? least : change / 2);
    either = equal > opposite ? equal : opposite;
  }
};

template <class T>
struct Row {  // one query against the panel
  const KernelSumPass<T>& p;
  const Panel<T>& panel;
  index_t query;
  static constexpr int n = kLanes<T>, m = kLanes<float>, kVectors = kTileColumns;

  // Half the sum of the squared norms, and half the squared distance.
  LSHKIT_INLINE Vec<T> norms(int i) const {
    return p.query_norms[query] + load(panel.norms + i * n);
  }
  LSHKIT_INLINE Vec<T> half_square(const T* tile, int i) const {
    return at_least_zero(norms(i) - load(tile + i * n));
  }

  // The lanes of both at once, which takes less than one after the other.
  LSHKIT_INLINE void add(Vec<float> total, Vec<float> squares) const {
    const Vec4 both = sum_lanes4(total, squares, Vec<float>{}, Vec<float>{});
    p.sums[query].total += both[0];
    p.sums[query].squares += both[1];
  }

  // Kernels exp(-u): the shift follows the smallest u.
  LSHKIT_INLINE void add_exponentials(const T* tile) const {
    const DensityKernel kernel = p.shape.kernel;
    Vec<T> u[kVectors];
    LSHKIT_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      if (kernel == DensityKernel::laplacian)
        u[i] = load(tile + i * n) + load(panel.norms + i * n);
      else
        u[i] = half_square(tile, i);
      if (kernel == DensityKernel::exponential) u[i] = root(u[i] + u[i]);
    }
    Vec<T> least = u[0];
    LSHKIT_UNROLL
    for (int i = 1; i < kVectors; ++i) least = least_of(u[i], least);
    KernelSum& sum = p.sums[query];
    T shift = T(-sum.shift);
    if (any_below<T>(least, shift)) {
      T smallest = least[0];
      for (int i = 1; i < n; ++i) smallest = least[i] < smallest ? least[i] : smallest;
      // By the same exponential as the terms: double steps of it beyond its range are 0.
      const double change = double(shift) - double(smallest);
      const double factor = sum.total > 0 ? __builtin_exp(-change) : 0;
      sum.total *= factor;
      sum.squares *= factor * factor;
      shift = smallest;
      sum.shift = -double(smallest);
    }
    Vec<float> total{}, squares{};
    LSHKIT_UNROLL
    for (int i = 0; i < kVectors; i += kPerFloats<T>) {
      Vec<T> above[kPerFloats<T>];
      LSHKIT_UNROLL
      for (int k = 0; k < kPerFloats<T>; ++k) above[k] = u[i + k] - shift;
      const Vec<float> weight = load(panel.weights + i / kPerFloats<T> * m);
      const Vec<float> term = exp_minus(to_floats(above)) * weight;
      total += term;
      squares += term * term;
    }
    add(total, squares);
  }

  // sin(y) for y from 0 to pi / 2, relative to its size.
  LSHKIT_INLINE static Vec<float> sine(Vec<float> y) {
    const Vec<float> z = y * y;
    Vec<float> s = z * 1.6059043836821613e-10f - 2.5052108385441720e-8f;
    s = s * z + 2.7557319223985893e-6f;
    s = s * z - 1.9841269841269841e-4f;
    s = s * z + 8.3333333333333332e-3f;
    s = s * z - 1.6666666666666666e-1f;
    return y + y * z * s;
  }

  // The compact kernels, by half the squared distance. 1 - r^2 is taken before it is rounded to
  // float, and 1 - r as (1 - r^2) / (1 + r), so that nothing cancels at the edge.
  LSHKIT_INLINE Vec<float> value(const Vec<T>* half) const {
    const DensityKernel kernel = p.shape.kernel;
    Vec<T> square[kPerFloats<T>], left[kPerFloats<T>];
    for (int k = 0; k < kPerFloats<T>; ++k)
      square[k] = half[k] + half[k], left[k] = T(1) - square[k];
    const Vec<float> inside = at_least_zero(to_floats(left));
    if (kernel == DensityKernel::tophat)
      return select(inside > 0.0f, broadcast(1.0f), Vec<float>{});
    if (kernel == DensityKernel::epanechnikov) return inside;
    const Vec<float> away = inside / (root(to_floats(square)) + 1.0f);
    return kernel == DensityKernel::linear ? away : sine(away * float(kPi / 2));
  }

  // Below 0 where the error of half the squared distance is too much: for tophat where it reaches
  // the edge, for the others where it exceeds kRelative of the value, which is 0 at the edge. (The
  // linear kernel has a tip too: of r near 0, the error is the root of that of r^2.)
  LSHKIT_INLINE static Vec<T> from_edge(Vec<T> half) {
    return Vec<T>(Int<T>(half - T(0.5)) & ~Int<T>(broadcast<T>(T(-0.0))));
  }
  LSHKIT_INLINE Vec<T> margin(Vec<T> half, int i, T error) const {
    Vec<T> away = from_edge(half);
    if (p.shape.kernel == DensityKernel::linear) away = least_of(half, away);
    return away - norms(i) * error;
  }

  // The value for key j by its difference from the query as both were given: that of scikit-learn.
  template <class From>
  LSHKIT_INLINE double value_of_difference(index_t j) const {
    const index_t d = p.shape.n_features, key = panel.first + j,
                  stride = p.keys.blocked ? kKeyBlock : 1;
    const From* row = static_cast<const From*>(p.keys.rows);
    row += p.keys.blocked ? key / kKeyBlock * kKeyBlock * d + key % kKeyBlock : key * d;
    const double* q = p.edge.queries + query * d;
    const double edge = p.edge.edge;
    double square = 0;
    for (index_t c = 0; c < d; ++c) {
      double x = double(row[c * stride]) - q[c];
      if (p.edge.widths) x /= p.edge.widths[c];
      square += rounded(x * x);
    }
    const double distance = __builtin_sqrt(square);
    if (!(distance < edge)) return 0;
    if (p.shape.kernel == DensityKernel::tophat) return 1;
    if (p.shape.kernel == DensityKernel::epanechnikov)
      return 1 - distance * distance / (edge * edge);
    if (p.shape.kernel == DensityKernel::linear) return 1 - distance / edge;
    return __builtin_cos(kPi / 2 * distance / edge);
  }

  // panel.near_edge anew for the keys whose margins are below 0.
  LSHKIT_NOINLINE void decide_by_differences(const T* tile, T error) const {
    const bool floats = p.keys.element == Element::float32;
    for (int i = 0; i < kVectors; ++i) {
      unsigned lanes = lanes_below<T>(margin(half_square(tile, i), i, error), 0);
      for (; lanes; lanes &= lanes - 1) {
        const index_t j = i * n + __builtin_ctz(lanes);
        if (panel.weights[j] > 0)
          panel.near_edge[j] =
              float(floats ? value_of_difference<float>(j) : value_of_difference<double>(j));
      }
    }
  }

  // Compact kernels, which are sums of their values: shift 0. Returns whether all keys are beyond
  // the edge, which ends it where it may.
  LSHKIT_INLINE bool add_compact(const T* tile, T error, bool may_end) const {
    constexpr int floats = kVectors / kPerFloats<T>;
    const T most = (p.query_norms[query] + panel.largest_norm) * error;  // of any key
    Vec<T> half[kVectors], least, nearest;
    LSHKIT_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      half[i] = half_square(tile, i);
      least = i == 0 ? half[i] : least_of(half[i], least);
      const Vec<T> away = from_edge(half[i]);
      nearest = i == 0 ? away : least_of(away, nearest);
    }
    const bool beyond = !any_below<T>(least, T(0.5) + most);
    if (may_end && beyond) return true;
    Vec<float> v[floats];
    LSHKIT_UNROLL
    for (int i = 0; i < floats; ++i) v[i] = value(half + i * kPerFloats<T>);
    const bool tip = p.shape.kernel == DensityKernel::linear;
    if (any_below<T>(tip ? least_of(least, nearest) : nearest, most)) {
      for (int i = 0; i < floats; ++i) store(panel.near_edge + i * m, v[i]);
      decide_by_differences(tile, error);
      for (int i = 0; i < floats; ++i) v[i] = load(panel.near_edge + i * m);
    }
    Vec<float> total{}, squares{};
    LSHKIT_UNROLL
    for (int i = 0; i < floats; ++i) {
      const Vec<float> term = v[i] * load(panel.weights + i * m);
      total += term;
      squares += term * term;
    }
    add(total, squares);
    return beyond;
  }

  // The complements of a register of cosines x, those that are below the bounds as half the squared
  // distances of the unit keys from the query, or from its opposite.
  LSHKIT_NOINLINE Vec<T> complement_by_difference(int i, Vec<T> x, Vec<T> complement,
                                                  NearlyParallel<T> near) const {
    const Vec<T> bound = select(x < T(0), broadcast(near.opposite), broadcast(near.equal));
    if (!any_below<T>(complement - bound, 0)) return complement;
    const Vec<T> sign = select(x < T(0), broadcast(T(-1)), broadcast(T(1)));
    const index_t d = p.shape.n_features;
    const T* q = p.queries + query * d;
    const T* key = panel.values + i * n;
    Vec<T> part[4] = {};  // features one after another would each wait for the one before
    index_t c = 0;
    for (; c + 4 <= d; c += 4) LSHKIT_UNROLL
    for (int k = 0; k < 4; ++k) {
      const Vec<T> difference = q[c + k] * sign - load(key + (c + k) * panel.stride);
      part[k] += difference * difference;
    }
    for (; c < d; ++c) {
      const Vec<T> difference = q[c] * sign - load(key + c * panel.stride);
      part[0] += difference * difference;
    }
    const Vec<T> sum = (part[0] + part[1]) + (part[2] + part[3]);
    return select(complement < bound, sum * T(0.5), complement);
  }

  // The angle of unit vectors over pi, from their product; nothing cancels at either end, as the
  // distance of the product from 1 is taken before it is rounded to float.
  LSHKIT_INLINE void angles(const T* tile, int i, NearlyParallel<T> near,
                            Vec<float>* agreement) const {
    Vec<T> positive[kPerFloats<T>], complement[kPerFloats<T>], sign[kPerFloats<T>];
    LSHKIT_UNROLL
    for (int k = 0; k < kPerFloats<T>; ++k) {
      const Vec<T> x = clamp<T>(load(tile + (i + k) * n));
      positive[k] = select(x < T(0), -x, x);
      complement[k] = T(1) - positive[k];
      sign[k] = x;
      if (any_below<T>(complement[k], near.either))
        complement[k] = complement_by_difference(i + k, x, complement[k], near);
    }
    const Vec<float> t = arccos(to_floats(positive), to_floats(complement)) * float(1 / kPi);
    *agreement = select(to_floats(sign) < 0.0f, t, 1.0f - t);
  }

  // The angular kernel: shift 0.
  LSHKIT_INLINE void add_angular(const T* tile, NearlyParallel<T> near) const {
    Vec<float> total{}, squares{};
    for (int i = 0; i < kVectors; i += kPerFloats<T>) {
      Vec<float> agreement;
      angles(tile, i, near, &agreement);
      const Vec<float> weight = load(panel.weights + i / kPerFloats<T> * m);
      const Vec<float> term = power<float>(agreement, p.shape.n_bits) * weight;
      total += term;
      squares += term * term;
    }
    add(total, squares);
  }
};

template <class T>
void run(const KernelSumPass<T>& p) {
  Panel<T> panel(p.scratch, p.shape.n_features);
  const DensityKernel kernel = p.shape.kernel;
  T error = error_of_products<T>(p.shape.n_features);
  if (kernel != DensityKernel::tophat) error *= T(1 / kRelative);
  const NearlyParallel<T> near(p.shape);
  index_t beyond = p.shape.n_queries;  // that had no key of the panel before within the edge
  for (index_t first = 0; first < p.shape.n_keys; first += kPanel<T>) {
    const bool may_end =
        2 * beyond >= p.shape.n_queries;  // else the branch costs more than it saves
    beyond = 0;
    pack_panel(p, first, smaller(kPanel<T>, p.shape.n_keys - first), panel);
    for (index_t query = 0, last; query < p.shape.n_queries; query = last) {
      const index_t count = queries_at_once(p.shape.n_queries - query);
      last = smaller(query + count, p.shape.n_queries);
      if (kernel == DensityKernel::laplacian)
        multiply_some<T, false>(p, query, count, panel);
      else
        multiply_some<T, true>(p, query, count, panel);
      for (index_t q = query; q < last; ++q) {
        const Row<T> row{p, panel, q};
        const T* tile = panel.tile + (q - query) * kPanel<T>;
        if (kernel <= DensityKernel::laplacian)
          row.add_exponentials(tile);
        else if (kernel == DensityKernel::angular)
          row.add_angular(tile, near);
        else
          beyond += row.add_compact(tile, error, may_end);
      }
    }
  }
}

}  // namespace

#define LSHKIT_DEFINE(T)                                   \
  index_t kernel_sums_scratch(const KernelSumPass<T>& p) { \
    return Panel<T>(nullptr, p.shape.n_features).bytes;    \
  }                                                        \
  void kernel_sums(const KernelSumPass<T>& p) { run(p); }
LSHKIT_DEFINE(float)
LSHKIT_DEFINE(double)
#undef LSHKIT_DEFINE

}  // namespace LSHKIT_ISA
}  // namespace lshkit

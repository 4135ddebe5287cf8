// Kernel sums, a panel of keys at a time: the panel is packed so that keys lie in lanes, a tile of
// queries times the panel is accumulated in registers (products for L2 and angles, absolute
// differences for L1), and the tile goes through the kernel and into the sums at once. The bound is
// that of the matrix product: one multiply-add a pair and feature; the exponential adds some 15
// instructions a register of pairs.
#include "kernel_sums.hpp"

#include "collision_probability.hpp"
#include "exponential.hpp"
#include "kernels.hpp"
#include "matmul.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

template <class T>
constexpr int kPanel = kTileColumns * kLanes<T>;  // keys
constexpr int kQueries = kTileRows<kTileColumns>;
static_assert(kKeyBlock % kPanel<float> == 0 && kKeyBlock % kPanel<double> == 0);

template <class T>
struct Panel {
  T *converted, *values, *norms;  // (kPanel, n_features), (n_features, kPanel), (kPanel)
  float* weights;                 // (kPanel), 0 past the last key
  T* tile;                        // (kQueries, kPanel)
  float* terms;                   // (kPanel)
  index_t bytes;

  Panel(void* memory, index_t n_features) {
    Cut cut{memory};
    converted = cut.take<T>(kPanel<T> * n_features + kLanes<T>);
    values = cut.take<T>(kPanel<T> * n_features);
    norms = cut.take<T>(kPanel<T>);
    weights = cut.take<float>(kPanel<T>);
    tile = cut.take<T>(kQueries * kPanel<T>);
    terms = cut.take<float>(kPanel<T>);
    bytes = cut.used;
  }
};

template <class T, class From>
LSHKIT_NOINLINE void convert(const KernelSumPass<T>& p, index_t first, index_t count, T* to) {
  const index_t d = p.shape.n_features;
  const From* rows = static_cast<const From*>(p.keys.rows) + first * d;
  for (index_t j = 0; j < count; ++j) {
    const From* row = rows + j * d;
    T* out = to + j * d;
    if (p.keys.centre)
      for (index_t c = 0; c < d; ++c)
        out[c] = T((double(row[c]) - p.keys.centre[c]) * p.keys.inverse_scale[c]);
    else
      for (index_t c = 0; c < d; ++c) out[c] = T(row[c]);
  }
}

// The same of keys in blocks, which have their panels side by side.
template <class T, class From>
LSHKIT_NOINLINE void convert_block(const KernelSumPass<T>& p, index_t first, T* to) {
  const index_t d = p.shape.n_features;
  const From* block = static_cast<const From*>(p.keys.rows) + first / kKeyBlock * kKeyBlock * d;
  const From* column = block + first % kKeyBlock;
  for (index_t c = 0; c < d; ++c, column += kKeyBlock, to += kPanel<T>) {
    if (p.keys.centre) {
      const double centre = p.keys.centre[c], scale = p.keys.inverse_scale[c];
      for (int j = 0; j < kPanel<T>; ++j) to[j] = T((double(column[j]) - centre) * scale);
    } else {
      for (int j = 0; j < kPanel<T>; ++j) to[j] = T(column[j]);
    }
  }
}

// The keys [first, first + count) with keys in lanes; unit vectors for the angular kernel.
template <class T>
LSHKIT_NOINLINE void pack_panel(const KernelSumPass<T>& p, index_t first, index_t count,
                                const Panel<T>& panel) {
  const index_t d = p.shape.n_features;
  constexpr int n = kLanes<T>;
  const bool as_they_are = !p.keys.centre && p.keys.element == kElement<T>;
  const bool floats = p.keys.element == Element::float32;
  if (p.keys.blocked) {
    (floats ? convert_block<T, float> : convert_block<T, double>)(p, first, panel.values);
  } else {
    const T* rows = panel.converted;
    if (as_they_are)
      rows = static_cast<const T*>(p.keys.rows) + first * d;
    else
      (floats ? convert<T, float> : convert<T, double>)(p, first, count, panel.converted);
    pack_transposed<T>(count, d, kPanel<T>, {rows, d}, T(1), nullptr, panel.values);
  }
  const bool angular = p.shape.kernel == DensityKernel::angular;
  const bool products = !angular && p.shape.kernel != DensityKernel::laplacian;
  for (int i = 0; i < kPanel<T>; i += n) {
    Vec<T> sum{};
    if (products || angular)
      for (index_t c = 0; c < d; ++c) {
        const Vec<T> v = load(panel.values + c * kPanel<T> + i);
        sum += v * v;
      }
    if (angular) {
      const Vec<T> norm = root(sum);
      const Vec<T> inverse = select(norm > T(0), T(1) / norm, Vec<T>{});
      for (index_t c = 0; c < d; ++c) {
        T* v = panel.values + c * kPanel<T> + i;
        store(v, load(v) * inverse);
      }
    }
    store(panel.norms + i, products ? sum * T(0.5) : Vec<T>{});
  }
  for (index_t j = 0; j < kPanel<T>; ++j) {
    panel.weights[j] = j >= count ? 0 : p.keys.weights ? float(p.keys.weights[first + j]) : 1;
    if (j >= count) panel.norms[j] = T(1e30);  // far from everything
  }
}

// tile(q, j) = sum over the features of the product, or of the absolute difference, of query first
// + q and key j. Queries past the last repeat it.
template <class T, bool Products, int Queries>
LSHKIT_NOINLINE void multiply(const KernelSumPass<T>& p, index_t first, const Panel<T>& panel) {
  constexpr int n = kLanes<T>;
  const index_t d = p.shape.n_features;
  const T* row[Queries];
  LSHKIT_UNROLL
  for (int q = 0; q < Queries; ++q)
    row[q] = p.queries + smaller(first + q, p.shape.n_queries - 1) * d;
  Vec<T> sum[Queries][kTileColumns] = {};
  for (index_t c = 0; c < d; ++c) {
    Vec<T> v[kTileColumns];
    LSHKIT_UNROLL
    for (int i = 0; i < kTileColumns; ++i) v[i] = load(panel.values + c * kPanel<T> + i * n);
    LSHKIT_UNROLL
    for (int q = 0; q < Queries; ++q) {
      const T x = row[q][c];
      LSHKIT_UNROLL
      for (int i = 0; i < kTileColumns; ++i) {
        if constexpr (Products) {
          sum[q][i] += x * v[i];
        } else {
          const Vec<T> difference = v[i] - x;
          sum[q][i] += select(difference < T(0), -difference, difference);
        }
      }
    }
  }
  LSHKIT_UNROLL
  for (int q = 0; q < Queries; ++q) LSHKIT_UNROLL
  for (int i = 0; i < kTileColumns; ++i) store(panel.tile + q * kPanel<T> + i * n, sum[q][i]);
}

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
#if defined(LSHKIT_ISA_AVX512)
  if constexpr (sizeof(T) == 4)
    return _mm512_cmp_ps_mask(v, broadcast<T>(bound), _CMP_LT_OQ) != 0;
  else
    return _mm512_cmp_pd_mask(v, broadcast<T>(bound), _CMP_LT_OQ) != 0;
#else
  bool any = false;
  for (int i = 0; i < kLanes<T>; ++i) any |= v[i] < bound;
  return any;
#endif
}
LSHKIT_INLINE Vec<float> at_least_zero(Vec<float> v) { return select(v > 0.0f, v, Vec<float>{}); }
LSHKIT_INLINE Vec<double> at_least_zero(Vec<double> v) { return select(v > 0.0, v, Vec<double>{}); }

template <class T>
struct Row {  // one query against the panel
  const KernelSumPass<T>& p;
  const Panel<T>& panel;
  index_t query;
  static constexpr int n = kLanes<T>, m = kLanes<float>, kVectors = kTileColumns;

  // Half the squared distance.
  LSHKIT_INLINE Vec<T> half_square(const T* tile, int i) const {
    return at_least_zero(p.query_norms[query] + load(panel.norms + i * n) - load(tile + i * n));
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
    for (int i = 1; i < kVectors; ++i) least = select(u[i] < least, u[i], least);
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
    sum.total += sum_lanes(total);
    sum.squares += sum_lanes(squares);
  }

  // sin(y) for y from 0 to pi / 2, relative to its size.
  LSHKIT_INLINE static Vec<T> sine(Vec<T> y) {
    const Vec<T> z = y * y;
    Vec<T> s = z * T(1.6059043836821613e-10) - T(2.5052108385441720e-8);
    s = s * z + T(2.7557319223985893e-6);
    s = s * z - T(1.9841269841269841e-4);
    s = s * z + T(8.3333333333333332e-3);
    s = s * z - T(1.6666666666666666e-1);
    return y + y * z * s;
  }

  LSHKIT_INLINE Vec<T> value(const T* tile, int i) const {
    const Vec<T> half = half_square(tile, i), zero{}, one = broadcast<T>(1);
    const Vec<T> square = half + half, distance = root(square);
    Vec<T> v = one;
    if (p.shape.kernel == DensityKernel::epanechnikov) v = one - square;
    if (p.shape.kernel == DensityKernel::linear) v = one - distance;
    if (p.shape.kernel == DensityKernel::cosine)
      v = sine(at_least_zero(one - distance) * T(kPi / 2));
    return select(distance < one, v, zero);
  }

  // The angle of unit vectors over pi, from their product; nothing cancels at either end, as the
  // distance of the product from 1 is taken before it is rounded to float.
  LSHKIT_INLINE void angles(const T* tile, int i, Vec<float>* agreement) const {
    Vec<T> positive[kPerFloats<T>], complement[kPerFloats<T>], sign[kPerFloats<T>];
    LSHKIT_UNROLL
    for (int k = 0; k < kPerFloats<T>; ++k) {
      const Vec<T> x = clamp<T>(load(tile + (i + k) * n));
      positive[k] = select(x < T(0), -x, x);
      complement[k] = T(1) - positive[k];
      sign[k] = x;
    }
    const Vec<float> t = arccos(to_floats(positive), to_floats(complement)) * float(1 / kPi);
    *agreement = select(to_floats(sign) < 0.0f, t, 1.0f - t);
  }

  // Kernels that are sums of their values: shift 0.
  LSHKIT_INLINE void add_values(const T* tile) const {
    KernelSum& sum = p.sums[query];
    Vec<float> total{}, squares{};
    const bool angular = p.shape.kernel == DensityKernel::angular;
    for (int i = 0; i < kVectors; i += kPerFloats<T>) {
      const Vec<float> weight = load(panel.weights + i / kPerFloats<T> * m);
      Vec<float> v;
      if (angular) {
        Vec<float> agreement;
        angles(tile, i, &agreement);
        v = power<float>(agreement, p.shape.n_bits);
      } else {
        Vec<T> values[kPerFloats<T>];
        for (int k = 0; k < kPerFloats<T>; ++k) values[k] = value(tile, i + k);
        v = to_floats(values);
      }
      const Vec<float> term = v * weight;
      total += term;
      squares += term * term;
    }
    sum.total += sum_lanes(total);
    sum.squares += sum_lanes(squares);
  }
};

template <class T>
void run(const KernelSumPass<T>& p) {
  const Panel<T> panel(p.scratch, p.shape.n_features);
  const DensityKernel kernel = p.shape.kernel;
  for (index_t first = 0; first < p.shape.n_keys; first += kPanel<T>) {
    pack_panel(p, first, smaller(kPanel<T>, p.shape.n_keys - first), panel);
    for (index_t query = 0; query < p.shape.n_queries; query += kQueries) {
      const bool alone = query + 1 == p.shape.n_queries;
      if (kernel == DensityKernel::laplacian)
        (alone ? multiply<T, false, 1> : multiply<T, false, kQueries>)(p, query, panel);
      else
        (alone ? multiply<T, true, 1> : multiply<T, true, kQueries>)(p, query, panel);
      const index_t last = smaller(query + kQueries, p.shape.n_queries);
      for (index_t q = query; q < last; ++q) {
        const Row<T> row{p, panel, q};
        const T* tile = panel.tile + (q - query) * kPanel<T>;
        if (kernel <= DensityKernel::laplacian)
          row.add_exponentials(tile);
        else
          row.add_values(tile);
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

#pragma once
// A panel of keys for kernel sums: converted, scaled and packed so that keys lie in lanes; and its
// products with queries.
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "collision_probability.hpp"
#include "kernel_sums.hpp"
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
  T *converted, *packed, *norms;  // (kPanel, n_features), (n_features, kPanel), (kPanel)
  const T* values;                // (n_features, stride): packed, or a block of keys as it lies
  index_t stride;
  float* weights;     // (kPanel), 0 where no key counts
  T* tile;            // (kQueries, kPanel)
  float* near_edge;   // (kPanel), the kernel, where some are near its end
  T largest_norm;     // of the keys that count
  index_t first = 0;  // key
  index_t bytes;

  Panel(void* memory, index_t n_features) {
    Cut cut{memory};
    converted = cut.take<T>(kPanel<T> * n_features + kLanes<T>);
    packed = cut.take<T>(kPanel<T> * n_features);
    norms = cut.take<T>(kPanel<T>);
    weights = cut.take<float>(kPanel<T>);
    tile = cut.take<T>(kQueries * kPanel<T>);
    near_edge = cut.take<float>(kPanel<T>);
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

// How many features are added up before their sum goes to that of the others: small terms beside a
// large one are rounded alike, and a sum of d in a row would be off by d such roundings.
LSHKIT_INLINE index_t features_at_once(const KernelSumShape& shape) {
  index_t some = shape.kernel == DensityKernel::laplacian ? 32 : 64;
  while (some * some < shape.n_features) some *= 2;
  return some;
}

// The keys [first, first + count) with keys in lanes; unit vectors for the angular kernel.
template <class T>
LSHKIT_NOINLINE void pack_panel(const KernelSumPass<T>& p, index_t first, index_t count,
                                Panel<T>& panel) {
  const index_t d = p.shape.n_features;
  constexpr int n = kLanes<T>;
  const bool as_they_are = !p.keys.centre && p.keys.element == kElement<T>;
  const bool floats = p.keys.element == Element::float32;
  const bool angular = p.shape.kernel == DensityKernel::angular;
  panel.first = first;
  panel.values = panel.packed;
  panel.stride = kPanel<T>;
  if (p.keys.blocked && as_they_are && !angular) {
    const index_t block = first / kKeyBlock * kKeyBlock;
    panel.values = static_cast<const T*>(p.keys.rows) + block * d + (first - block);
    panel.stride = kKeyBlock;
  } else if (p.keys.blocked) {
    (floats ? convert_block<T, float> : convert_block<T, double>)(p, first, panel.packed);
  } else {
    const T* rows = panel.converted;
    if (as_they_are)
      rows = static_cast<const T*>(p.keys.rows) + first * d;
    else
      (floats ? convert<T, float> : convert<T, double>)(p, first, count, panel.converted);
    pack_transposed<T>(count, d, kPanel<T>, {rows, d}, T(1), nullptr, panel.packed);
  }
  const bool products = !angular && p.shape.kernel != DensityKernel::laplacian;
  Vec<T> square[kTileColumns] = {};
  const index_t some = features_at_once(p.shape);
  if (products || angular)
    for (index_t begin = 0; begin < d; begin += some) {
      Vec<T> part[kTileColumns] = {};
      for (index_t c = begin; c < smaller(begin + some, d); ++c)  // as the keys lie in memory
        LSHKIT_UNROLL
      for (int i = 0; i < kTileColumns; ++i) {
        const Vec<T> v = load(panel.values + c * panel.stride + i * n);
        part[i] += v * v;
      }
      for (int i = 0; i < kTileColumns; ++i) square[i] += part[i];
    }
  if (angular)
    for (int i = 0; i < kTileColumns; ++i) {
      const Vec<T> norm = root(square[i]);
      const Vec<T> inverse = select(norm > T(0), T(1) / norm, Vec<T>{});
      for (index_t c = 0; c < d; ++c) {
        T* v = panel.packed + c * kPanel<T> + i * n;
        store(v, load(v) * inverse);
      }
    }
  for (int i = 0; i < kTileColumns; ++i)
    store(panel.norms + i * n, products ? square[i] * T(0.5) : Vec<T>{});
  panel.largest_norm = 0;
  for (index_t j = 0; j < kPanel<T>; ++j) {
    const bool counts = j < count && first + j >= p.skip;
    panel.weights[j] = !counts ? 0 : p.keys.weights ? float(p.keys.weights[first + j]) : 1;
    if (!counts)
      panel.norms[j] = T(sizeof(T) == 8 ? 1e305 : 1e30);  // farther than any row of this type
    else if (panel.norms[j] > panel.largest_norm)
      panel.largest_norm = panel.norms[j];
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
  const index_t some = features_at_once(p.shape);
  for (index_t begin = 0; begin < d; begin += some) {
    Vec<T> sum[Queries][kTileColumns] = {};
    for (index_t c = begin; c < smaller(begin + some, d); ++c) {
      Vec<T> v[kTileColumns];
      LSHKIT_UNROLL
      for (int i = 0; i < kTileColumns; ++i) v[i] = load(panel.values + c * panel.stride + i * n);
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
    for (int i = 0; i < kTileColumns; ++i) {
      T* to = panel.tile + q * kPanel<T> + i * n;
      store(to, begin ? load(to) + sum[q][i] : sum[q][i]);
    }
  }
}

// The queries of a tile that are multiplied at once: a few alone take less than a whole tile.
LSHKIT_INLINE index_t queries_at_once(index_t left) { return left > 2 ? kQueries : 1; }

template <class T, bool Products>
LSHKIT_INLINE void multiply_some(const KernelSumPass<T>& p, index_t first, index_t count,
                                 const Panel<T>& panel) {
  (count == 1 ? multiply<T, Products, 1> : multiply<T, Products, kQueries>)(p, first, panel);
}

// Bit i: whether lane i is below the bound.
template <class T>
LSHKIT_INLINE unsigned lanes_below(Vec<T> v, T bound) {
#if defined(LSHKIT_ISA_AVX512)
  if constexpr (sizeof(T) == 4)
    return _mm512_cmp_ps_mask(v, broadcast<T>(bound), _CMP_LT_OQ);
  else
    return _mm512_cmp_pd_mask(v, broadcast<T>(bound), _CMP_LT_OQ);
#elif defined(LSHKIT_ISA_AVX2)
  if constexpr (sizeof(T) == 4)
    return unsigned(_mm256_movemask_ps(_mm256_cmp_ps(v, broadcast<T>(bound), _CMP_LT_OQ)));
  else
    return unsigned(_mm256_movemask_pd(_mm256_cmp_pd(v, broadcast<T>(bound), _CMP_LT_OQ)));
#elif defined(__x86_64__)
  if constexpr (sizeof(T) == 4)
    return unsigned(_mm_movemask_ps(_mm_cmplt_ps(v, broadcast<T>(bound))));
  else
    return unsigned(_mm_movemask_pd(_mm_cmplt_pd(v, broadcast<T>(bound))));
#else
  unsigned lanes = 0;
  for (int i = 0; i < kLanes<T>; ++i) lanes |= unsigned(v[i] < bound) << i;
  return lanes;
#endif
}
}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

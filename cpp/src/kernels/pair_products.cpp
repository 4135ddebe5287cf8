// One query against listed keys. What it waits for is the keys' way from memory: they are asked for
// kAhead pairs before they are used, the next queries' keys too.
#include "kernels.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr index_t kAhead = 16;     // pairs
constexpr index_t kMostLines = 8;  // of a row; the hardware fetches what follows
constexpr int kTogether = 4;       // pairs whose lanes are added up at once

// Rounded products: a pair's value must not depend on where the compiler fuses them with the sum.
template <PairMeasure Measure, class T>
LSHKIT_INLINE void accumulate(Vec<T>* sum, Vec<T> a, Vec<T> b) {
  if constexpr (Measure == PairMeasure::product) {
    *sum += rounded(a * b);
  } else {
    const Vec<T> d = a - b;
    if constexpr (Measure == PairMeasure::squared_distance)
      *sum += rounded(d * d);
    else
      *sum += d < 0 ? -d : d;
  }
}

LSHKIT_INLINE void store_sums(const Vec<float>* sums, int count, float* out) {
  const Vec4 s = sum_lanes4(sums[0], sums[1], sums[2], sums[3]);
  for (int k = 0; k < count; ++k) out[k] = s[k];
}
LSHKIT_INLINE void store_sums(const Vec<double>* sums, int count, double* out) {
  for (int k = 0; k < count; ++k) out[k] = sum_lanes(sums[k]);
}

template <PairMeasure Measure, class T, class Index>
LSHKIT_INLINE void run(const PairProducts<T>& p, index_t query, index_t begin, index_t end) {
  const Index* indices = static_cast<const Index*>(p.indices);
  const T* q = p.queries + query * p.query_stride;
  const index_t n = p.n_features, whole = n - n % kLanes<T>;
  const index_t row_bytes = smaller(n * index_t(sizeof(T)), 64 * kMostLines);
  const index_t total = p.indptr[p.n_queries];
  const Vec<T> q_tail = load_first(q + whole, int(n - whole));
  for (index_t k = begin; k < end; k += kTogether) {
    const int count = int(smaller(kTogether, end - k));
    for (int i = 0; i < count; ++i)
      if (k + i + kAhead < total)
        prefetch_row(p.keys + index_t(indices[k + i + kAhead]) * p.key_stride, row_bytes);
    const T* key[kTogether];
    for (int i = 0; i < kTogether; ++i)
      key[i] = p.keys + index_t(indices[k + (i < count ? i : 0)]) * p.key_stride;
    Vec<T> sums[kTogether] = {};
    for (index_t c = 0; c < whole; c += kLanes<T>) {
      const Vec<T> x = load(q + c);
      LSHKIT_UNROLL
      for (int i = 0; i < kTogether; ++i) accumulate<Measure, T>(&sums[i], x, load(key[i] + c));
    }
    if (whole < n) {
      LSHKIT_UNROLL
      for (int i = 0; i < kTogether; ++i)
        accumulate<Measure, T>(&sums[i], q_tail, load_first(key[i] + whole, int(n - whole)));
    }
    store_sums(sums, count, p.out + k);
  }
}

template <PairMeasure Measure, class T>
void by_index(const PairProducts<T>& p, index_t query, index_t begin, index_t end) {
  if (p.index_bytes == 4)
    run<Measure, T, std::int32_t>(p, query, begin, end);
  else
    run<Measure, T, std::int64_t>(p, query, begin, end);
}

template <class T>
void by_measure(const PairProducts<T>& p, index_t query, index_t begin, index_t end) {
  if (p.measure == PairMeasure::product)
    by_index<PairMeasure::product>(p, query, begin, end);
  else if (p.measure == PairMeasure::squared_distance)
    by_index<PairMeasure::squared_distance>(p, query, begin, end);
  else
    by_index<PairMeasure::l1_distance>(p, query, begin, end);
}

}  // namespace

void pair_products(const PairProducts<float>& p, index_t query, index_t begin, index_t end) {
  by_measure(p, query, begin, end);
}
void pair_products(const PairProducts<double>& p, index_t query, index_t begin, index_t end) {
  by_measure(p, query, begin, end);
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

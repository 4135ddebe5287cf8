// The sum verb with weights by pairs, for tables that would be nearly empty: a pair of probes in
// one bucket costs a visit to the key's row, and the tables, which would be larger than the rows
// and have to be cleared, are not there.
#include "weighted_pairs.hpp"

#include "kernels.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// Registers of a row's columns that are worked on together.
constexpr int kVectors = kVectorBytes >= 64 ? 4 : 8;

// body(row, probe) for the probes of the rows that take part, from the last row on.
template <class T, int Probes, class Body>
LSHKIT_INLINE void each_probe(const PairProbes<T>& p, const Body& body) {
  const int t = Probes ? Probes : p.n_probes;
  for (index_t j = p.rows - 1; j >= 0; --j) {
    if (p.valid && !p.valid[j]) continue;
    _Pragma("GCC unroll 4") for (int b = 0; b < t; ++b) body(j, j * t + b);
  }
}

// The keys' probes of a hash by bucket, in each in the order of rows. One hash at a time: what is
// visited at random fits an L1 cache of 32 KB for 12 bits and some 700 rows.
template <class T, int Probes>
LSHKIT_NOINLINE void sort_keys(const WeightedPairs<T>& p, int hash) {
  const index_t keys = p.key.rows * p.key.n_probes, size = round_up(p.n_buckets + 1, 4);
  const std::uint16_t* codes = p.key.codes + hash * keys;
  const T* weights = p.key.weights + hash * keys;
  std::uint16_t* __restrict begins = p.begins;
  std::uint32_t* __restrict sorted_keys = p.sorted_keys;
  T* __restrict sorted_weights = p.sorted_weights;
  std::memset(begins, 0, sizeof(*begins) * size);
  each_probe<T, Probes>(p.key,
                        [&](index_t, index_t k) LSHKIT_ALWAYS_INLINE { ++begins[codes[k]]; });
  // From counts to ends, four at a time.
  constexpr std::uint64_t ones = 0x0001000100010001u;
  std::uint64_t before = 0;
  for (index_t c = 0; c < size; c += 4) {
    std::uint64_t four;
    std::memcpy(&four, begins + c, sizeof(four));
    four *= ones;
    const std::uint64_t sums = four + before * ones;
    std::memcpy(begins + c, &sums, sizeof(sums));
    before += four >> 48;
  }
  each_probe<T, Probes>(p.key, [&](index_t row, index_t k) LSHKIT_ALWAYS_INLINE {
    const index_t at = --begins[codes[k]];
    sorted_keys[at] = std::uint32_t(k << 16 | row);
    sorted_weights[at] = weights[k];
  });
}

// The pairs of a query's probe with all keys of a full bucket. By itself, so that its registers are
// not missing where most probes are.
template <class T>
LSHKIT_NOINLINE void find_all(const WeightedPairs<T>& p, index_t begin, index_t n, index_t probe,
                              index_t to) {
  for (index_t a = 0; a < n; ++a) {
    p.found_keys[to + a] = p.sorted_keys[begin + a];
    p.found_weights[to + a] = p.query.weights[probe] * p.sorted_weights[begin + a];
    if (p.found_probes) p.found_probes[to + a] = std::uint32_t(probe);
  }
}

// How many pairs there are with those of this hash, for which it may stop beyond `most`. Pointers
// are kept in registers: what is written could be p's members.
template <class T, int Probes, bool Own>
LSHKIT_NOINLINE index_t find_of_hash(const WeightedPairs<T>& p, int hash, index_t count) {
  const int own = Probes ? Probes : p.query.n_probes;
  const index_t first = hash * p.query.rows, most = p.most;
  const std::uint16_t *codes = p.query.codes + first * own, *begins = p.begins;
  const T *weights = p.query.weights + first * own, *sorted_weights = p.sorted_weights;
  const std::uint32_t* sorted_keys = p.sorted_keys;
  std::uint32_t *keys = p.found_keys, *probes = p.found_probes;
  std::uint32_t* found_begins = p.found_begins + hash * p.begins_stride;
  T* products = p.found_weights;
  for (index_t i = 0; i < p.query.rows; ++i) {
    found_begins[i] = std::uint32_t(count);
    _Pragma("GCC unroll 4") for (int a = 0; a < own; ++a) {
      const index_t k = i * own + a;
      std::uint32_t ends;  // of the bucket before this one, and of this one
      std::memcpy(&ends, begins + codes[k], sizeof(ends));
      const std::uint32_t begin = ends & 0xffff, n = (ends >> 16) - begin;
      const T weight = weights[k];
      // None, one or two are the rule: a branch would be taken at random.
      std::memcpy(keys + count, sorted_keys + begin, 2 * sizeof(*keys));
      products[count] = weight * sorted_weights[begin];
      products[count + 1] = weight * sorted_weights[begin + 1];
      if (Own) probes[count] = probes[count + 1] = std::uint32_t(first * own + k);
      count += n;
      if (__builtin_expect(n > 2, 0)) {
        if (count > most) return count;
        find_all(p, begin, n, first * own + k, count - n);
      }
    }
    if (count > most) return count;
  }
  found_begins[p.query.rows] = std::uint32_t(count);
  return count;
}

// False: there are more than `most`.
template <class T, int Probes, bool Own>
bool find(const WeightedPairs<T>& p) {
  index_t count = 0;
  for (int h = 0; h < p.n_hashes && count <= p.most; ++h) {
    sort_keys<T, Probes>(p, h);
    count = find_of_hash<T, Probes, Own>(p, h, count);
  }
  return count <= p.most;
}

// Brings the pairs of query i together: how many they are.
template <class T, bool Probes>
LSHKIT_INLINE index_t gather(const WeightedPairs<T>& p, index_t i) {
  constexpr int kUsual = 8;  // of a hash, without a branch
  typedef std::uint32_t Eight __attribute__((vector_size(4 * kUsual)));
  const std::uint32_t keys_of_hash = std::uint32_t(p.key.rows * p.key.n_probes);
  index_t count = 0;
  for (int h = 0; h < p.n_hashes; ++h) {
    const std::uint32_t* begins = p.found_begins + h * p.begins_stride + i;
    index_t from = begins[0], to = count;
    const index_t end = begins[1];
    count += end - from;
    do {
      Eight keys;
      std::memcpy(&keys, p.found_keys + from, sizeof(keys));
      const Eight rows = keys & 0xffff, probes = (keys >> 16) + std::uint32_t(h) * keys_of_hash;
      std::memcpy(p.rows + to, &rows, sizeof(rows));
      std::memcpy(p.weights + to, p.found_weights + from, kUsual * sizeof(T));
      if (Probes) {
        std::memcpy(p.key_probes + to, &probes, sizeof(probes));
        std::memcpy(p.query_probes + to, p.found_probes + from, sizeof(Eight));
      }
      from += kUsual;
      to += kUsual;
    } while (from < end);
  }
  return count;
}

// Columns [first, first + width) of a row.
template <class T, bool Full>
struct Columns {
  static constexpr int n = kLanes<T>;
  index_t first;
  int width;

  LSHKIT_INLINE void load_row(const T* row, Vec<T>* v) const {
    LSHKIT_UNROLL
    for (int i = 0; i < kVectors; ++i)
      v[i] = Full ? load(row + first + i * n) : load_first(row + first + i * n, width - i * n);
  }
  LSHKIT_INLINE void store_row(T* row, const Vec<T>* v) const {
    LSHKIT_UNROLL
    for (int i = 0; i < kVectors; ++i)
      Full ? store(row + first + i * n, v[i])
           : store_first(row + first + i * n, v[i], width - i * n);
  }
};

// run(Columns) for all columns of a row.
template <class T, class Run>
LSHKIT_INLINE void each_columns(index_t columns, const Run& run) {
  constexpr int width = kVectors * kLanes<T>;
  index_t first = 0;
  for (; first + width <= columns; first += width) run(Columns<T, true>{first, width});
  if (first < columns) run(Columns<T, false>{first, int(columns - first)});
}

template <class T>
void sum_pairs(const WeightedPairSum<T>& p) {
  for (index_t i = 0; i < p.query.rows; ++i) {
    const index_t count = gather<T, false>(p, i);
    if (p.weight_sums) {
      T sum = 0;
      for (index_t k = 0; k < count; ++k) sum += p.weights[k];
      p.weight_sums[i] += p.scale * sum;
    }
    each_columns<T>(p.values.columns, [&](auto columns) LSHKIT_ALWAYS_INLINE {
      Vec<T> sum[kVectors] = {}, v[kVectors];
      for (index_t k = 0; k < count; ++k) {
        columns.load_row(p.values.row(p.rows[k]), v);
        const Vec<T> weight = broadcast(p.weights[k]);
        LSHKIT_UNROLL
        for (int c = 0; c < kVectors; ++c) sum[c] += weight * v[c];
      }
      LSHKIT_UNROLL
      for (int c = 0; c < kVectors; ++c) sum[c] = rounded(sum[c] * p.scale);
      if (p.accumulate) {
        columns.load_row(p.sum.row(i), v);
        LSHKIT_UNROLL
        for (int c = 0; c < kVectors; ++c) sum[c] += v[c];
      }
      columns.store_row(p.sum.row(i), sum);
    });
  }
}

// The products of the gradient's columns with those of all rows found.
template <class T, class C>
LSHKIT_INLINE void dots_of(const WeightedPairGradient<T>& p, const C& columns, const Vec<T>* grad,
                           index_t count) {
  constexpr int n = kLanes<T>;
  for (index_t k = 0; k < count; k += n) {
    Vec<T> partial[n];
    LSHKIT_UNROLL
    for (int r = 0; r < n; ++r) {
      Vec<T> v[kVectors];
      columns.load_row(p.values.row(p.rows[smaller(k + r, count - 1)]), v);
      partial[r] = v[0] * grad[0];
      LSHKIT_UNROLL
      for (int c = 1; c < kVectors; ++c) partial[r] += v[c] * grad[c];
    }
    Vec<T> sums = sum_each<n, T>(partial);
    if (columns.first > 0) sums += load(p.dots + k);
    store(p.dots + k, sums);
  }
}

template <class T>
void pairs_backward(const WeightedPairGradient<T>& p) {
  const bool dots = p.query_weight_grads || p.key_weight_grads;
  for (index_t i = 0; i < p.query.rows; ++i) {
    if (p.query.valid && !p.query.valid[i]) continue;
    const index_t count = gather<T, true>(p, i);
    each_columns<T>(p.values.columns, [&](auto columns) LSHKIT_ALWAYS_INLINE {
      if (count == 0) return;
      Vec<T> grad[kVectors];
      columns.load_row(p.grad.row(i), grad);
      if (dots) dots_of(p, columns, grad, count);
      for (index_t k = 0; p.value_grad.data && k < count; ++k) {
        T* to = p.value_grad.row(p.rows[k]);
        const Vec<T> weight = broadcast(p.scale * p.weights[k]);
        Vec<T> v[kVectors];
        columns.load_row(to, v);
        LSHKIT_UNROLL
        for (int c = 0; c < kVectors; ++c) v[c] += weight * grad[c];
        columns.store_row(to, v);
      }
    });
    if (!dots) continue;
    const T bias = p.bias ? p.bias[i] : 0;
    for (index_t k = 0; k < count; ++k) {
      const index_t own = p.query_probes[k], key = p.key_probes[k];
      const T dot = p.scale * (p.dots[k] + bias);
      if (p.query_weight_grads) p.query_weight_grads[own] += dot * p.key.weights[key];
      if (p.key_weight_grads) p.key_weight_grads[key] += dot * p.query.weights[own];
    }
  }
}

}  // namespace

#define LSHKIT_DEFINE(T)                                                         \
  bool find_pairs(const WeightedPairs<T>& p) {                                   \
    const bool four = p.query.n_probes == 4 && p.key.n_probes == 4;              \
    if (p.found_probes) return four ? find<T, 4, true>(p) : find<T, 0, true>(p); \
    return four ? find<T, 4, false>(p) : find<T, 0, false>(p);                   \
  }                                                                              \
  void weighted_pair_sum(const WeightedPairSum<T>& p) { sum_pairs(p); }          \
  void weighted_pair_gradient(const WeightedPairGradient<T>& p) { pairs_backward(p); }
LSHKIT_DEFINE(float)
LSHKIT_DEFINE(double)
#undef LSHKIT_DEFINE

}  // namespace LSHKIT_ISA
}  // namespace lshkit

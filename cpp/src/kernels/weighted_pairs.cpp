// The sum verb with weights by pairs, for tables that would be nearly empty: a pair of probes in
// one bucket costs a visit to the key's row, and the tables, which would be larger than the rows
// and have to be cleared, are not there.
#include "weighted_pairs.hpp"

#include "kernels.hpp"
#include "row_columns.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// The keys' probes of a hash by bucket. One hash at a time: what is visited at random fits an L1
// cache of 32 KB for 12 bits and some 1,000 rows. Linking moves no probe and takes half of the time
// of sorting; a bucket has two at most as a rule.
template <class T, int Probes>
struct KeyLinks {
  index_t rows, t, n_buckets;
  const std::uint16_t* codes;
  const std::uint8_t* valid;
  std::uint16_t* __restrict first, * __restrict next;

  LSHKIT_INLINE KeyLinks(const WeightedPairs<T>& p, int hash)
      : rows(p.key.rows),
        t(Probes ? Probes : p.key.n_probes),
        n_buckets(p.n_buckets),
        codes(p.key.codes + hash * rows * t),
        valid(p.key.valid),
        first(p.first),
        next(p.next) {}
  LSHKIT_INLINE void clear() const {
    const std::uint16_t none = std::uint16_t(rows * t);
    for (index_t c = 0; c < n_buckets; ++c) first[c] = none;
    next[none] = none;
  }
  // A row's probes, at the front of their buckets.
  LSHKIT_INLINE void link(index_t j) const {
    if (valid && !valid[j]) return;
    _Pragma("GCC unroll 4") for (index_t b = 1; b <= t; ++b) {
      const index_t key = j * t + t - b;
      std::uint16_t& bucket = first[codes[key]];
      next[key] = bucket;
      bucket = std::uint16_t(key);
    }
  }
  LSHKIT_NOINLINE static void link_all(const WeightedPairs<T>& p, int hash) {
    const KeyLinks links(p, hash);
    links.clear();
    for (index_t j = links.rows - 1; j >= 0; --j) links.link(j);
  }
};

// Finds the pairs of this hash for the first `rows` queries, and stops at one that has too many:
// how many were before it. `total` counts the pairs of hash after hash.
// Pointers are kept in registers: what is written could be p's members.
template <class T, int Probes, bool Own, bool Causal>
LSHKIT_NOINLINE index_t find_of_hash(const WeightedPairs<T>& p, int hash, index_t rows,
                                     index_t& total) {
  const KeyLinks<T, Probes> links(p, hash);
  Causal ? links.clear() : links.link_all(p, hash);
  const index_t t = Probes ? Probes : p.query.n_probes, more_of_query = p.most_of_query;
  const std::uint16_t* codes = p.query.codes + hash * p.query.rows * t;
  const std::uint16_t *first = links.first, *next = links.next;
  const T* weights = p.query.weights + hash * p.query.rows * t;
  const std::uint32_t none = std::uint32_t(p.key.rows * p.key.n_probes);
  const T* key_weights = p.key.weights + hash * index_t(none);
  const std::uint32_t own = std::uint32_t(hash) << kHashBit;
  std::uint32_t* begins = p.begins + hash * p.begins_stride;
  const PairList<T> found = p.found;
  index_t count = total, most = Causal ? count + p.most : p.most, i = 0;
  for (; i < rows; ++i) {
    begins[i] = std::uint32_t(count);
    if (Causal) {
      most += more_of_query;
      if (i < links.rows) links.link(i);
    }
    _Pragma("GCC unroll 4") for (index_t a = 0; a < t; ++a) {
      // None, one or two are the rule: a branch would be taken at random.
      const index_t probe = i * t + a;
      const std::uint32_t key = first[codes[probe]], second = next[key];
      const T weight = weights[probe];
      found.keys[count] = std::uint16_t(key);
      found.keys[count + 1] = std::uint16_t(second);
      found.weights[count] = weight * key_weights[key];
      found.weights[count + 1] = weight * key_weights[second];
      if (Own) found.probes[count] = found.probes[count + 1] = own | std::uint32_t(probe);
      count += index_t(key < none) + index_t(second < none);  // none is larger than all
      for (std::uint32_t more = next[second]; __builtin_expect(more != none && count <= most, 0);
           more = next[more]) {
        found.keys[count] = std::uint16_t(more);
        found.weights[count] = weight * key_weights[more];
        if (Own) found.probes[count] = own | std::uint32_t(probe);
        ++count;
      }
    }
    if (count > most) break;
  }
  if (i < rows) count = begins[i];
  begins[i] = std::uint32_t(count);
  total = count;
  return i;
}

template <class T, int Probes, bool Own, bool Causal>
index_t find(const WeightedPairs<T>& p) {
  index_t rows = p.query.rows, count = 0;
  for (int h = 0; h < p.n_hashes && rows > 0; ++h) {
    const index_t done = find_of_hash<T, Probes, Own, Causal>(p, h, rows, count);
    if (!Causal && done < rows) return 0;
    rows = done;
  }
  return rows;
}
template <class T, int Probes>
index_t find(const WeightedPairs<T>& p) {
  const bool own = p.found.probes;
  if (p.causal) return own ? find<T, Probes, true, true>(p) : find<T, Probes, false, true>(p);
  return own ? find<T, Probes, true, false>(p) : find<T, Probes, false, false>(p);
}

constexpr int kUsual = 8;  // pairs of a query and hash that are moved without a branch
template <class T>
LSHKIT_INLINE void move_usual(T* to, const T* from) {
  typedef T __attribute__((vector_size(kUsual * sizeof(T)))) Usual;
  Usual pairs;
  std::memcpy(&pairs, from, sizeof(pairs));
  std::memcpy(to, &pairs, sizeof(pairs));
}

// Brings the pairs of query i together: how many they are.
template <class T, bool Own>
LSHKIT_INLINE index_t gather(const WeightedPairs<T>& p, index_t i) {
  const PairList<T> from = p.found, to = p.pairs;
  const std::uint32_t* begins = p.begins + i;
  index_t count = 0;
  for (int h = 0; h < p.n_hashes; ++h, begins += p.begins_stride) {
    const index_t n = begins[1] - begins[0];
    for (index_t k = 0; k == 0 || k < n; k += kUsual) {
      const index_t at = begins[0] + k;
      move_usual(to.keys + count + k, from.keys + at);
      move_usual(to.weights + count + k, from.weights + at);
      if (Own) move_usual(to.probes + count + k, from.probes + at);
    }
    count += n;
  }
  return count;
}

// The rows of keys' probes by their numbers.
template <class T>
struct RowsOfProbes {
  T* data;
  index_t stride;
  std::uint64_t inverse;  // of n_probes, in units of 2^-32: exact for numbers of 16 bits

  RowsOfProbes(Matrix<T> rows, int n_probes)
      : data(rows.data),
        stride(rows.stride),
        inverse((std::uint64_t(1) << 32) / std::uint64_t(n_probes) + 1) {}
  LSHKIT_INLINE T* row(std::uint16_t number) const {
    return data + index_t(number * inverse >> 32) * stride;
  }
};

template <class T>
void sum_pairs(const WeightedPairSum<T>& p) {
  const RowsOfProbes<const T> values(p.values, p.key.n_probes);
  const PairList<T> pairs = p.pairs;
  for (index_t i = 0; i < p.query.rows; ++i) {
    const index_t count = gather<T, false>(p, i);
    if (p.weight_sums) {
      T sum = 0;
      for (index_t k = 0; k < count; ++k) sum += pairs.weights[k];
      p.weight_sums[i] += p.scale * sum;
    }
    each_columns<T>(p.values.columns, [&](auto columns) LSHKIT_ALWAYS_INLINE {
      Vec<T> sum[columns.vectors] = {}, v[columns.vectors];
      for (index_t k = 0; k < count; ++k) {
        columns.load_row(values.row(pairs.keys[k]), v);
        const Vec<T> weight = broadcast(pairs.weights[k]);
        LSHKIT_UNROLL
        for (int c = 0; c < columns.vectors; ++c) sum[c] += weight * v[c];
      }
      LSHKIT_UNROLL
      for (int c = 0; c < columns.vectors; ++c) sum[c] = rounded(sum[c] * p.scale);
      if (p.accumulate) {
        columns.load_row(p.sum.row(i), v);
        LSHKIT_UNROLL
        for (int c = 0; c < columns.vectors; ++c) sum[c] += v[c];
      }
      columns.store_row(p.sum.row(i), sum);
    });
  }
}

// The products of the gradient's columns with those of all rows found.
template <class T, class C>
LSHKIT_INLINE void dots_of(RowsOfProbes<const T> values, const PairList<T>& pairs, index_t count,
                           const C& columns, const Vec<T>* grad, T* dots) {
  constexpr int n = kLanes<T>;
  for (index_t k = 0; k < count; k += n) {
    Vec<T> partial[n];
    LSHKIT_UNROLL
    for (int r = 0; r < n; ++r) {
      Vec<T> v[C::vectors];
      columns.load_row(values.row(pairs.keys[smaller(k + r, count - 1)]), v);
      partial[r] = v[0] * grad[0];
      LSHKIT_UNROLL
      for (int c = 1; c < columns.vectors; ++c) partial[r] += v[c] * grad[c];
    }
    Vec<T> sums = sum_each<n, T>(partial);
    if (columns.first > 0) sums += load(dots + k);
    store(dots + k, sums);
  }
}

template <class T>
void pairs_backward(const WeightedPairGradient<T>& p) {
  const RowsOfProbes<const T> values(p.values, p.key.n_probes);
  const RowsOfProbes<T> value_grads(p.value_grad, p.key.n_probes);
  const index_t of_query = p.query.rows * p.query.n_probes, of_key = p.key.rows * p.key.n_probes;
  T *query_grads = p.query_weight_grads, *key_grads = p.key_weight_grads, *dots = p.dots;
  const T *query_weights = p.query.weights, *key_weights = p.key.weights, scale = p.scale;
  const PairList<T> pairs = p.pairs;
  for (index_t i = 0; i < p.query.rows; ++i) {
    if (p.query.valid && !p.query.valid[i]) continue;
    const index_t count = gather<T, true>(p, i);
    if (count == 0) continue;
    each_columns<T>(p.values.columns, [&](auto columns) LSHKIT_ALWAYS_INLINE {
      Vec<T> grad[columns.vectors];
      columns.load_row(p.grad.row(i), grad);
      if (query_grads || key_grads) dots_of(values, pairs, count, columns, grad, dots);
      for (index_t k = 0; p.value_grad.data && k < count; ++k) {
        T* to = value_grads.row(pairs.keys[k]);
        const Vec<T> weight = broadcast(scale * pairs.weights[k]);
        Vec<T> v[columns.vectors];
        columns.load_row(to, v);
        LSHKIT_UNROLL
        for (int c = 0; c < columns.vectors; ++c) v[c] += weight * grad[c];
        columns.store_row(to, v);
      }
    });
    if (!query_grads && !key_grads) continue;
    const T bias = p.bias ? p.bias[i] : 0;
    for (index_t k = 0; k < count; ++k) {
      const index_t hash = pairs.probes[k] >> kHashBit;
      const index_t own = hash * of_query + (pairs.probes[k] & ((1u << kHashBit) - 1));
      const index_t key = hash * of_key + pairs.keys[k];
      const T dot = scale * (dots[k] + bias);
      if (query_grads) query_grads[own] += dot * key_weights[key];
      if (key_grads) key_grads[key] += dot * query_weights[own];
    }
  }
}

}  // namespace

#define LSHKIT_DEFINE(T)                                                \
  index_t find_pairs(const WeightedPairs<T>& p) {                       \
    const bool four = p.query.n_probes == 4 && p.key.n_probes == 4;     \
    return four ? find<T, 4>(p) : find<T, 0>(p);                        \
  }                                                                     \
  void weighted_pair_sum(const WeightedPairSum<T>& p) { sum_pairs(p); } \
  void weighted_pair_gradient(const WeightedPairGradient<T>& p) { pairs_backward(p); }
LSHKIT_DEFINE(float)
LSHKIT_DEFINE(double)
#undef LSHKIT_DEFINE

}  // namespace LSHKIT_ISA
}  // namespace lshkit

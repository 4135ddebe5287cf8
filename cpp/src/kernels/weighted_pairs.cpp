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

// Rows are chained from the last on, so that a chain is in their order. Returns how many pairs the
// queries will find at most.
template <class T>
index_t chain(const WeightedPairs<T>& p) {
  const int t = p.key.n_probes;
  const index_t keys = p.key.rows * t, queries = p.query.rows * p.query.n_probes;
  index_t pairs = 0;
  std::memset(p.chains, 0, sizeof(*p.chains) * p.n_hashes * p.n_buckets);
  for (int h = 0; h < p.n_hashes; ++h) {
    std::uint16_t* chains = p.chains + h * p.n_buckets;
    ChainedProbe<T>* chained = p.chained + h * (keys + 1);
    const std::uint16_t* code = p.key.codes + h * keys;
    const T* weight = p.key.weights + h * keys;
    std::memset(p.counts, 0, sizeof(*p.counts) * p.n_buckets);
    chained[0] = {0, 0, 0};
    for (index_t j = p.key.rows - 1; j >= 0; --j) {
      if (p.key.valid && !p.key.valid[j]) continue;
      for (index_t k = j * t; k < (j + 1) * t; ++k) {
        std::uint16_t& first = chains[code[k]];
        chained[k + 1] = {weight[k], std::uint16_t(j), first};
        first = std::uint16_t(k + 1);
        ++p.counts[code[k]];
      }
    }
    code = p.query.codes + h * queries;
    for (index_t k = 0; k < queries; ++k) pairs += p.counts[code[k]];
  }
  return pairs;
}

// found(whether it is one, the key's probe among those of its hash, h, the query's probe, its
// weight) of each pair of query i; must not branch.
template <class T, int Probes, class Found>
LSHKIT_INLINE void each_pair(const WeightedPairs<T>& p, index_t i, const Found& found) {
  const int own = Probes ? Probes : p.query.n_probes;
  const index_t keys = p.key.rows * p.key.n_probes;
  for (int h = 0; h < p.n_hashes; ++h) {
    const std::uint16_t* chains = p.chains + h * p.n_buckets;
    const ChainedProbe<T>* chained = p.chained + h * (keys + 1);
    const index_t first = (h * p.query.rows + i) * own;
    _Pragma("GCC unroll 4") for (int a = 0; a < own; ++a) {
      const T weight = p.query.weights[first + a];
      std::uint32_t k = chains[p.query.codes[first + a]];
      // One or two are the rule: a branch would be taken at random.
      LSHKIT_UNROLL
      for (int n = 0; n < 2; ++n) {
        const ChainedProbe<T>& key = chained[k];
        found(k > 0, key, h * keys + index_t(k) - 1, first + a, weight);
        k = key.next;
      }
      for (; k > 0; k = chained[k].next)
        found(true, chained[k], h * keys + index_t(k) - 1, first + a, weight);
    }
  }
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

template <class T, int Probes>
void sum_pairs(const WeightedPairSum<T>& p) {
  for (index_t i = 0; i < p.query.rows; ++i) {
    std::uint32_t* rows = p.found_rows;
    T* weights = p.found_weights;
    each_pair<T, Probes>(p, i,
                         [&](bool is, const ChainedProbe<T>& key, index_t, index_t, T weight)
                             LSHKIT_ALWAYS_INLINE {
                               *rows = key.row;
                               *weights = weight * key.weight;
                               rows += is;
                               weights += is;
                             });
    const index_t count = rows - p.found_rows;
    if (p.weight_sums) {
      T sum = 0;
      for (index_t k = 0; k < count; ++k) sum += p.found_weights[k];
      p.weight_sums[i] += p.scale * sum;
    }
    each_columns<T>(p.values.columns, [&](auto columns) LSHKIT_ALWAYS_INLINE {
      Vec<T> sum[kVectors] = {}, v[kVectors];
      for (index_t k = 0; k < count; ++k) {
        columns.load_row(p.values.row(p.found_rows[k]), v);
        const Vec<T> weight = broadcast(p.found_weights[k]);
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
      columns.load_row(p.values.row(p.found_rows[smaller(k + r, count - 1)]), v);
      partial[r] = v[0] * grad[0];
      LSHKIT_UNROLL
      for (int c = 1; c < kVectors; ++c) partial[r] += v[c] * grad[c];
    }
    Vec<T> sums = sum_each<n, T>(partial);
    if (columns.first > 0) sums += load(p.found_dots + k);
    store(p.found_dots + k, sums);
  }
}

template <class T, int Probes>
void pairs_backward(const WeightedPairGradient<T>& p) {
  const bool dots = p.query_weight_grads || p.key_weight_grads;
  for (index_t i = 0; i < p.query.rows; ++i) {
    index_t count = 0;
    if (!p.query.valid || p.query.valid[i])
      each_pair<T, Probes>(p, i,
                           [&](bool is, const ChainedProbe<T>& key, index_t at, index_t probe,
                               T weight) LSHKIT_ALWAYS_INLINE {
                             p.found_rows[count] = key.row;
                             p.found_keys[count] = std::uint32_t(at);
                             p.found_queries[count] = std::uint32_t(probe);
                             p.found_weights[count] = p.scale * weight * key.weight;
                             count += is;
                           });
    each_columns<T>(p.values.columns, [&](auto columns) LSHKIT_ALWAYS_INLINE {
      if (count == 0) return;
      Vec<T> grad[kVectors];
      columns.load_row(p.grad.row(i), grad);
      if (dots) dots_of(p, columns, grad, count);
      for (index_t k = 0; p.value_grad.data && k < count; ++k) {
        T* to = p.value_grad.row(p.found_rows[k]);
        const Vec<T> weight = broadcast(p.found_weights[k]);
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
      const index_t at = p.found_queries[k];
      const T dot = p.scale * (p.found_dots[k] + bias);
      if (p.query_weight_grads) p.query_weight_grads[at] += dot * p.key.weights[p.found_keys[k]];
      if (p.key_weight_grads) p.key_weight_grads[p.found_keys[k]] += dot * p.query.weights[at];
    }
  }
}

}  // namespace

#define LSHKIT_DEFINE(T)                                               \
  index_t chain_probes(const WeightedPairs<T>& p) { return chain(p); } \
  void weighted_pair_sum(const WeightedPairSum<T>& p) {                \
    const bool four = p.query.n_probes == 4 && p.key.n_probes == 4;    \
    four ? sum_pairs<T, 4>(p) : sum_pairs<T, 0>(p);                    \
  }                                                                    \
  void weighted_pair_gradient(const WeightedPairGradient<T>& p) {      \
    const bool four = p.query.n_probes == 4 && p.key.n_probes == 4;    \
    four ? pairs_backward<T, 4>(p) : pairs_backward<T, 0>(p);          \
  }
LSHKIT_DEFINE(float)
LSHKIT_DEFINE(double)
#undef LSHKIT_DEFINE

}  // namespace LSHKIT_ISA
}  // namespace lshkit

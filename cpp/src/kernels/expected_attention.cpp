// Attention with the collision probability itself, p(x) = (1 - acos(x) / pi)^n_bits (YOSO-E), and
// its gradients, blocked so that no n x n matrix is formed: a chunk of keys is packed once and
// meets the queries chunk by chunk. Bound: flops, 4 d a pair forward and 10 d backward.
#include "collision_probability.hpp"
#include "kernels.hpp"
#include "matmul.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr index_t kKeys = 128, kQueries = 48;  // rows of a chunk
constexpr int kAtOnce = 2;                     // registers of pairs
// From one row of transposed keys to the next: an odd number of cache lines. A column of rows that
// are 8 lines apart would share an eighth of L1's sets.
template <class T>
constexpr index_t kSkew = 64 / sizeof(T);
template <class T>
index_t skewed(index_t columns) {
  return columns + (columns / kSkew<T> % 2 ? 0 : kSkew<T>);
}

template <class T>
struct Scratch {
  T *key_t, *key, *value_t, *value;  // a chunk of keys: transposed, unit rows, values likewise
  T *query, *x, *s;                  // a chunk of queries (unit rows), and its pairs
  std::int32_t* keys;                // the chunk's rows
  index_t d, dv;
  Scratch(index_t n_features, index_t n_values, Cut& cut)
      : d(round_up(n_features, kLanes<T>)), dv(round_up(n_values, kLanes<T>)) {
    key_t = cut.take<T>(d * (kKeys + kSkew<T>));
    key = cut.take<T>(kKeys * d);
    value_t = cut.take<T>(dv * (kKeys + kSkew<T>));
    value = cut.take<T>(kKeys * dv);
    query = cut.take<T>(kQueries * d);
    x = cut.take<T>(kQueries * kKeys);
    s = cut.take<T>(kQueries * kKeys);
    keys = cut.take<std::int32_t>(kKeys);
  }
};

// Calls chunk(n) with the next n <= kKeys keys that take part listed in s.keys.
template <class T, class Body>
LSHKIT_INLINE void for_key_chunks(const Scratch<T>& s, index_t n_keys, const std::uint8_t* valid,
                                  const Body& body) {
  for (index_t next = 0; next < n_keys;) {
    index_t n = 0;
    for (; next < n_keys && n < kKeys; ++next)
      if (valid[next]) s.keys[n++] = std::int32_t(next);
    if (n > 0) body(n);
  }
}

template <class T>
bool finite(Matrix<const T> m, const std::int32_t* order, index_t first, index_t n) {
  Vec<T> check = {};
  for (index_t r = 0; r < n; ++r) {
    const T* row = m.row(order ? order[r] : first + r);
    for (index_t c = 0; c < m.columns; c += kLanes<T>) {
      const Vec<T> x = load_first(row + c, int(m.columns - c));
      check += x - x;
    }
  }
  return sum_lanes(check) == 0;
}

// Runs block(i, nq, nk, straddles) over the chunks of queries, where nk keys from the front of the
// chunk's are seen by the last of the nq queries from i on; straddles: and not all by the first.
// Zero weights hide the rest, which a NaN would survive: if there is one, queries go one by one.
template <class T, class Block, class Finite>
LSHKIT_INLINE void for_query_chunks(const Scratch<T>& s, index_t nk, bool causal,
                                    index_t first_query, index_t n_queries,
                                    const Finite& all_finite, const Block& block) {
  for (index_t i = causal ? larger(0, s.keys[0] - first_query) : 0; i < n_queries; i += kQueries) {
    const index_t nq = smaller(kQueries, n_queries - i);
    if (!causal || s.keys[nk - 1] <= first_query + i)
      block(i, nq, nk, false);
    else if (all_finite(i, nq))
      block(i, nq, nk, true);
    else
      for (index_t r = i, seen = 0; r < i + nq; ++r) {
        while (seen < nk && s.keys[seen] <= first_query + r) ++seen;
        if (seen > 0) block(r, 1, seen, false);
      }
  }
}

// Columns of row r that a causal query must not see become zero.
template <class T>
LSHKIT_INLINE void hide_future(T* pairs, index_t padded, const std::int32_t* keys, index_t nk,
                               index_t first_query, index_t nq) {
  for (index_t r = 0, seen = 0; r < nq; ++r) {
    while (seen < nk && keys[seen] <= first_query + r) ++seen;
    for (index_t c = seen; c < padded; ++c) pairs[r * padded + c] = 0;
  }
}

template <class T>
void sum(const ExpectedSum<T>& p) {
  Cut cut{p.scratch};
  const Scratch<T> s(p.query.columns, p.value.columns, cut);
  const index_t d = p.query.columns, dv = p.value.columns;
  clear(p.out);
  if (p.row_sum) std::memset(p.row_sum, 0, sizeof(T) * p.out.rows);
  for_key_chunks(s, p.key.rows, p.key_valid, [&](index_t n_keys) {
    const index_t padded = round_up(n_keys, kAtOnce * kLanes<T>), stride = skewed<T>(padded);
    pack_transposed<T>(n_keys, d, stride, {p.key.data, p.key.stride, s.keys}, 1, p.key_inverse_norm,
                       s.key_t);
    pack<T>(n_keys, dv, s.dv, {p.value.data, p.value.stride, s.keys}, 1, nullptr, s.value);
    const bool finite_values = !p.causal || finite(p.value, s.keys, 0, n_keys);
    const auto block = [&](index_t i, index_t nq, index_t nk, bool straddles) {
      matmul<T>(nq, padded, d, {p.query.row(i), p.query.stride}, 1, s.key_t, stride, {s.x, padded},
                false);
      for (index_t r = 0; r < nq; ++r)
        for (index_t c = 0; c < padded; c += kAtOnce * kLanes<T>) {
          T* pairs = s.x + r * padded + c;
          Vec<T> x[kAtOnce], weight[kAtOnce];
          LSHKIT_UNROLL
          for (int k = 0; k < kAtOnce; ++k)
            x[k] = load(pairs + k * kLanes<T>) * p.query_inverse_norm[i + r];
          probabilities<T>(x, p.n_bits, weight);
          LSHKIT_UNROLL
          for (int k = 0; k < kAtOnce; ++k) store(pairs + k * kLanes<T>, weight[k]);
        }
      if (straddles) hide_future(s.x, padded, s.keys, nk, p.first_query + i, nq);
      if (p.row_sum)
        for (index_t r = 0; r < nq; ++r)
          for (index_t c = 0; c < nk; ++c) p.row_sum[i + r] += s.x[r * padded + c];
      matmul<T>(nq, dv, nk, {s.x, padded}, 1, s.value, s.dv, {p.out.row(i), p.out.stride}, true);
    };
    for_query_chunks(
        s, n_keys, p.causal, p.first_query, p.query.rows,
        [&](index_t, index_t) { return finite_values; }, block);
  });
}

template <class T>
void gradient(const ExpectedGradient<T>& p) {
  Cut cut{p.scratch};
  const Scratch<T> s(p.query.columns, p.value.columns, cut);
  const index_t d = p.query.columns, dv = p.value.columns;
  clear(p.query_grad);
  clear(p.key_grad);
  clear(p.value_grad);
  const bool of_pairs = p.query_grad.data || p.key_grad.data;
  for_key_chunks(s, p.key.rows, p.key_valid, [&](index_t n_keys) {
    const index_t padded = round_up(n_keys, kAtOnce * kLanes<T>), stride = skewed<T>(padded);
    const Rows<const T> keys{p.key.data, p.key.stride, s.keys};
    pack_transposed<T>(n_keys, d, stride, keys, 1, p.key_inverse_norm, s.key_t);
    pack<T>(n_keys, d, s.d, keys, 1, p.key_inverse_norm, s.key);
    pack_transposed<T>(n_keys, dv, stride, {p.value.data, p.value.stride, s.keys}, 1, nullptr,
                       s.value_t);
    const auto block = [&](index_t i, index_t nq, index_t nk, bool straddles) {
      const Rows<const T> queries{p.query.row(i), p.query.stride};
      const Rows<const T> grads{p.grad.row(i), p.grad.stride};
      // x: cosines, then probabilities; s: g . v, then the gradient's weight of each pair
      matmul<T>(nq, padded, d, queries, 1, s.key_t, stride, {s.x, padded}, false);
      if (of_pairs) matmul<T>(nq, padded, dv, grads, 1, s.value_t, stride, {s.s, padded}, false);
      for (index_t r = 0; r < nq; ++r) {
        const T bias = p.bias ? p.bias[i + r] : 0;
        const bool valid = p.query_valid[i + r];
        for (index_t c = 0; c < padded; c += kAtOnce * kLanes<T>) {
          T *pairs = s.x + r * padded + c, *dots = s.s + r * padded + c;
          Vec<T> x[kAtOnce], probability[kAtOnce], weight[kAtOnce];
          LSHKIT_UNROLL
          for (int k = 0; k < kAtOnce; ++k)
            x[k] = load(pairs + k * kLanes<T>) * p.query_inverse_norm[i + r];
          weights<T>(x, p.n_bits, p.weight, probability, weight);
          LSHKIT_UNROLL
          for (int k = 0; k < kAtOnce; ++k) {
            T* dot = dots + k * kLanes<T>;
            if (of_pairs) store(dot, valid ? weight[k] * (load(dot) + bias) : Vec<T>{});
            store(pairs + k * kLanes<T>, valid ? probability[k] : Vec<T>{});
          }
        }
      }
      if (straddles) {
        hide_future(s.x, padded, s.keys, nk, i, nq);
        if (of_pairs) hide_future(s.s, padded, s.keys, nk, i, nq);
      }
      // What takes no part becomes zeros: zero weights do not stop a NaN.
      const auto pack_valid = [&](index_t columns, index_t width, const Rows<const T>& rows,
                                  const T* inverse_norm, T* to) {
        pack<T>(nq, columns, width, rows, 1, inverse_norm, to);
        for (index_t r = 0; r < nq; ++r)
          if (!p.query_valid[i + r]) std::memset(to + r * width, 0, sizeof(T) * width);
      };
      if (p.query_grad.data)
        matmul<T>(nq, d, nk, {s.s, padded}, 1, s.key, s.d,
                  {p.query_grad.row(i), p.query_grad.stride}, true);
      if (p.key_grad.data) {
        pack_valid(d, s.d, queries, p.query_inverse_norm + i, s.query);
        matmul<T>(nk, d, nq, {s.s, 1}, padded, s.query, s.d,
                  {p.key_grad.data, p.key_grad.stride, s.keys}, true);
      }
      if (p.value_grad.data) {
        pack_valid(dv, s.dv, grads, nullptr, s.value);
        matmul<T>(nk, dv, nq, {s.x, 1}, padded, s.value, s.dv,
                  {p.value_grad.data, p.value_grad.stride, s.keys}, true);
      }
    };
    const bool finite_values = !p.causal || finite(p.value, s.keys, 0, n_keys);
    for_query_chunks(
        s, n_keys, p.causal, 0, p.query.rows,
        [&](index_t i, index_t nq) { return finite_values && finite(p.grad, nullptr, i, nq); },
        block);
  });
}

}  // namespace

#define LSHKIT_DEFINE(T)                                                   \
  index_t expected_scratch(Matrix<const T> query, Matrix<const T> value) { \
    Cut cut{nullptr};                                                      \
    Scratch<T> scratch(query.columns, value.columns, cut);                 \
    return cut.used;                                                       \
  }                                                                        \
  void expected_sum(const ExpectedSum<T>& p) { sum(p); }                   \
  void expected_gradient(const ExpectedGradient<T>& p) { gradient(p); }
LSHKIT_DEFINE(float)
LSHKIT_DEFINE(double)
#undef LSHKIT_DEFINE

}  // namespace LSHKIT_ISA
}  // namespace lshkit

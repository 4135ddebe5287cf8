// Step-by-step attention on the tables of one key head after the other.
//
// A step reads and writes one row of every hash's table, and reads another: 3 * n_values elements a
// hash, from tables of some megabytes that lie in the L3 cache or in memory. What bounds it is
// their latency, so every row is asked for long before its turn.
#include "kernels.hpp"
#include "short_floats.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

using F = Vec<float>;
constexpr int W = kLanes<float>;
constexpr index_t kGroup = 4;  // hashes that a row stays in registers for: their tables fit L2
constexpr index_t kAhead = 8;  // positions of which a head's rows are fetched before it begins

// ---- rows of sums: float, or the bits of float16 ----
LSHKIT_INLINE F load_row(const float* p) { return load(p); }
LSHKIT_INLINE void store_row(float* p, F v) { store(p, v); }
LSHKIT_INLINE F load_row(const Half* p) { return Float16::widen(load_half(p)); }
LSHKIT_INLINE void store_row(Half* p, F v) { store_half(p, Float16::narrow(v)); }

// The last elements of a row, fewer than a register.
template <class T>
LSHKIT_INLINE F load_rest(const T* p, index_t count) {
  T lanes[W] = {};
  std::memcpy(lanes, p, sizeof(T) * count);
  return load_row(lanes);
}
template <class T>
LSHKIT_INLINE void store_rest(T* p, F v, index_t count) {
  T lanes[W];
  store_row(lanes, v);
  std::memcpy(p, lanes, sizeof(T) * count);
}

// A row in registers where its length is known, else in memory that stays in L1.
template <int Values>
struct Row {
  static constexpr int kVectors = Values / W;
  F v[kVectors];

  template <class T>
  LSHKIT_INLINE Row(const T* p, index_t) {
    LSHKIT_UNROLL
    for (int i = 0; i < kVectors; ++i) v[i] = load_row(p + i * W);
  }
  template <class T>
  LSHKIT_INLINE void add_to(T* p, float weight, index_t) const {
    LSHKIT_UNROLL
    for (int i = 0; i < kVectors; ++i) store_row(p + i * W, load_row(p + i * W) + weight * v[i]);
  }
  template <class T>
  LSHKIT_INLINE void add(const T* p, float weight, index_t) {
    LSHKIT_UNROLL
    for (int i = 0; i < kVectors; ++i) v[i] += weight * load_row(p + i * W);
  }
  LSHKIT_INLINE void write(float* p, index_t) const {
    LSHKIT_UNROLL
    for (int i = 0; i < kVectors; ++i) store_row(p + i * W, v[i]);
  }
};
template <>
struct Row<0> {
  float* p;

  LSHKIT_INLINE Row(const float* data, index_t) : p(const_cast<float*>(data)) {}
  template <class T, class U>
  LSHKIT_INLINE static void add(T* to, const U* from, float weight, index_t n) {
    index_t c = 0;
    for (; c + W <= n; c += W) store_row(to + c, load_row(to + c) + weight * load_row(from + c));
    if (c < n)
      store_rest(to + c, load_rest(to + c, n - c) + weight * load_rest(from + c, n - c), n - c);
  }
  template <class T>
  LSHKIT_INLINE void add_to(T* to, float weight, index_t n) const {
    add(to, p, weight, n);
  }
  template <class T>
  LSHKIT_INLINE void add(const T* from, float weight, index_t n) {
    add(p, from, weight, n);
  }
  LSHKIT_INLINE void write(float*, index_t) const {}
};

// Values > 0: n_values known at compile time.
template <class T, class Code, int Values>
struct Head {
  const DecodingHead& d;
  const index_t n_values = Values ? Values : d.n_values;

  LSHKIT_INLINE T* sums(index_t row) const { return static_cast<T*>(d.sums) + row * n_values; }

  // The buckets of a row in the hashes [first, last), each with its weight.
  template <class Visit>
  LSHKIT_INLINE void each(const DecodingCodes& c, index_t row, index_t first, index_t last,
                          const Visit& visit) const {
    const index_t start = row * d.n_hashes * c.n_probes;
    const Code* codes = static_cast<const Code*>(c.codes) + start;
    if (!c.weights) {
      for (index_t h = first; h < last; ++h) visit(h * d.n_buckets + codes[h], 1.0f);
      return;
    }
    const float* weights = c.weights + start;
    for (index_t h = first; h < last; ++h)
      for (index_t a = h * c.n_probes; a < (h + 1) * c.n_probes; ++a)
        visit(h * d.n_buckets + codes[a], weights[a]);
  }

  LSHKIT_INLINE void add(index_t row, index_t first, index_t last) const {
    if (d.key_valid && !d.key_valid[row]) return;
    const Row<Values> value(d.values + row * d.value_stride, n_values);
    each(d.keys, row, first, last, [&](index_t bucket, float weight) {
      value.add_to(sums(bucket), weight, n_values);
      if (d.counts) d.counts[bucket] += weight;
    });
  }

  LSHKIT_INLINE void read(index_t head, index_t row, index_t first, index_t last) const {
    const index_t index = head * d.queries.rows + row;
    float* out = d.out + head * d.out_head_stride + row * d.out_row_stride;
    if (first == 0) std::memset(out, 0, sizeof(float) * n_values);
    Row<Values> sum(out, n_values);
    float count = first == 0 || !d.counts ? 0 : d.out_counts[index];
    each(d.queries, index, first, last, [&](index_t bucket, float weight) {
      sum.add(static_cast<const T*>(sums(bucket)), weight, n_values);
      if (d.counts) count += weight * d.counts[bucket];
    });
    sum.write(out, n_values);
    if (d.counts) d.out_counts[index] = count;
  }

  LSHKIT_INLINE void fetch(const DecodingCodes& c, index_t row, index_t first, index_t last) const {
    each(c, row, first, last, [&](index_t bucket, float) {
      prefetch_row(sums(bucket), sizeof(T) * n_values);
      if (d.counts) prefetch(d.counts + bucket);
    });
  }
  // What the head touches first in the hashes' tables; later rows mostly share these.
  LSHKIT_INLINE void fetch_first(index_t first, index_t last) const {
    for (index_t i = 0; i < smaller(kAhead, d.keys.rows); ++i) fetch(d.keys, i, first, last);
    for (index_t head = 0; head < d.group; ++head)
      for (index_t i = 0; i < smaller(kAhead, d.queries.rows); ++i)
        fetch(d.queries, head * d.queries.rows + i, first, last);
  }

  // Key i is added before any head's query i reads.
  LSHKIT_NOINLINE void rows(index_t n_keys, index_t n_queries, index_t first, index_t last) const {
    for (index_t i = 0; i < larger(n_keys, n_queries); ++i) {
      if (i < n_keys) add(i, first, last);
      for (index_t head = 0; head < d.group && i < n_queries; ++head) read(head, i, first, last);
    }
  }
  LSHKIT_INLINE void run(index_t first, index_t last) const {
    if (d.causal) return rows(d.keys.rows, d.queries.rows, first, last);
    rows(d.keys.rows, 0, first, last);
    rows(0, d.queries.rows, first, last);
  }
};

template <class T, class Code, int Values>
void run(const DecodingHead* heads, index_t count) {
  const index_t m = heads[0].n_hashes;
  Head<T, Code, Values>{heads[0]}.fetch_first(0, m);
  for (index_t i = 0; i < count; ++i) {
    const Head<T, Code, Values> head{heads[i]}, next{heads[i + 1 < count ? i + 1 : i]};
    for (index_t first = 0; first < m; first += kGroup) {
      const index_t last = smaller(first + kGroup, m);
      if (i + 1 < count) next.fetch_first(first, last);
      head.run(first, last);
    }
  }
}

template <class T, class Code>
void run_values(const DecodingHead* heads, index_t count) {
  with_constant<32, 64, 128>(heads[0].n_values,
                             [&](auto n) { run<T, Code, n.value>(heads, count); });
}

template <class T>
void run_codes(const DecodingHead* heads, index_t count) {
  heads[0].code_bytes == 1 ? run_values<T, std::uint8_t>(heads, count)
                           : run_values<T, std::uint16_t>(heads, count);
}

}  // namespace

void decode_heads(const DecodingHead* heads, index_t count) {
  if (count == 0) return;
  heads[0].half ? run_codes<Half>(heads, count) : run_codes<float>(heads, count);
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

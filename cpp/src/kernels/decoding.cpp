// Step-by-step attention on the tables of one key head after the other.
//
// A step reads and writes one row of every hash's table, and reads another: 3 * n_values elements a
// hash, from tables of some megabytes that lie in the L3 cache or in memory. What bounds it is
// their latency, so every row is asked for long before its turn.
#include "kernels.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

using F = Vec<float>;
constexpr int W = kLanes<float>;
constexpr index_t kAhead = 8;  // positions, where a head has many

// ---- rows of sums: float, or half precision as its bits ----
using Half = std::uint16_t;

LSHKIT_INLINE F load_row(const float* p) { return load(p); }
LSHKIT_INLINE void store_row(float* p, F v) { store(p, v); }

#if defined(LSHKIT_ISA_AVX512)
LSHKIT_INLINE F load_row(const Half* p) {
  return (F)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
LSHKIT_INLINE void store_row(Half* p, F v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(LSHKIT_ISA_AVX2)
LSHKIT_INLINE F load_row(const Half* p) {
  return (F)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
LSHKIT_INLINE void store_row(Half* p, F v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
#else
using I = Int<float>;
LSHKIT_INLINE I select(I mask, I a, I b) { return (mask & a) | (~mask & b); }

// Multiplication by 2^112 moves the exponent, of subnormal numbers too.
LSHKIT_INLINE F load_row(const Half* p) {
  I bits;
  for (int i = 0; i < W; ++i) bits[i] = p[i];
  const F magnitude = (F)((bits & 0x7fff) << 13) * 0x1p112f;
  const I not_finite = (magnitude >= F{} + 65536.0f) & 0x7f800000;
  return (F)((I)magnitude | not_finite | ((bits & 0x8000) << 16));
}
// Round to nearest, ties to even: below 2^-14 by the addition of a number whose last place is half
// precision's smallest, above it by a carry out of the bits that go.
LSHKIT_INLINE void store_row(Half* p, F v) {
  const I given = (I)v, magnitude = given & 0x7fffffff;
  constexpr std::int32_t kMagic = 126 << 23;  // 0.5
  const I small = (I)((F)magnitude + (F)(I{} + kMagic)) - kMagic;
  const I normal = (magnitude + ((15 - 127) * (1 << 23) + 0xfff) + ((magnitude >> 13) & 1)) >> 13;
  const I not_finite = select(magnitude > 0x7f800000, I{} + 0x7e00, I{} + 0x7c00);
  I bits = select(magnitude < (113 << 23), small, normal);
  bits = select(magnitude >= (143 << 23), not_finite, bits);
  bits |= (given >> 16) & 0x8000;
  for (int i = 0; i < W; ++i) p[i] = Half(bits[i]);
}
#endif

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

// to += weight * from
template <class T, class U>
LSHKIT_INLINE void add_row(T* to, const U* from, float weight, index_t n) {
  index_t c = 0;
  for (; c + W <= n; c += W) store_row(to + c, load_row(to + c) + weight * load_row(from + c));
  if (c < n)
    store_rest(to + c, load_rest(to + c, n - c) + weight * load_rest(from + c, n - c), n - c);
}

// Values > 0: n_values known at compile time.
template <class T, class Code, int Values>
struct Head {
  const DecodingHead& d;
  const index_t n_values = Values ? Values : d.n_values;

  LSHKIT_INLINE T* sums(index_t row) const { return static_cast<T*>(d.sums) + row * n_values; }
  LSHKIT_INLINE static index_t first_probe(const DecodingCodes& c, index_t row, index_t n_hashes,
                                           index_t hash) {
    return (row * n_hashes + hash) * c.n_probes;
  }

  LSHKIT_INLINE void add(index_t hash, index_t row) const {
    if (d.key_valid && !d.key_valid[row]) return;
    const index_t first = first_probe(d.keys, row, d.n_hashes, hash);
    for (index_t a = first; a < first + d.keys.n_probes; ++a) {
      const index_t bucket = hash * d.n_buckets + static_cast<const Code*>(d.keys.codes)[a];
      const float weight = d.keys.weights ? d.keys.weights[a] : 1.0f;
      add_row(sums(bucket), d.values + row * d.value_stride, weight, n_values);
      if (d.counts) d.counts[bucket] += weight;
    }
  }

  LSHKIT_INLINE void read(index_t hash, index_t head, index_t row) const {
    const index_t index = head * d.queries.rows + row;
    const index_t first = first_probe(d.queries, index, d.n_hashes, hash);
    float* out = d.out + head * d.out_head_stride + row * d.out_row_stride;
    for (index_t a = first; a < first + d.queries.n_probes; ++a) {
      const index_t bucket = hash * d.n_buckets + static_cast<const Code*>(d.queries.codes)[a];
      const float weight = d.queries.weights ? d.queries.weights[a] : 1.0f;
      add_row(out, static_cast<const T*>(sums(bucket)), weight, n_values);
      if (d.counts) d.out_counts[index] += weight * d.counts[bucket];
    }
  }

  LSHKIT_INLINE void fetch(const DecodingCodes& c, index_t hash, index_t row) const {
    const index_t first = first_probe(c, row, d.n_hashes, hash);
    for (index_t a = first; a < first + c.n_probes; ++a) {
      const index_t bucket = hash * d.n_buckets + static_cast<const Code*>(c.codes)[a];
      prefetch_row(sums(bucket), sizeof(T) * n_values);
      if (d.counts) prefetch(d.counts + bucket);
    }
  }
  LSHKIT_INLINE void fetch_position(index_t hash, index_t row) const {
    if (row < d.keys.rows) fetch(d.keys, hash, row);
    if (row < d.queries.rows)
      for (index_t head = 0; head < d.group; ++head)
        fetch(d.queries, hash, head * d.queries.rows + row);
  }
  // What the head will touch first in a hash's table.
  LSHKIT_INLINE void fetch_first(index_t hash) const {
    const index_t rows = smaller(kAhead, larger(d.keys.rows, d.queries.rows));
    for (index_t row = 0; row < rows; ++row) fetch_position(hash, row);
  }

  LSHKIT_INLINE void run_hash(index_t hash) const {
    const bool many = larger(d.keys.rows, d.queries.rows) > kAhead;
    if (d.causal) {
      for (index_t i = 0; i < d.queries.rows; ++i) {
        if (many) fetch_position(hash, i + kAhead);
        add(hash, i);
        for (index_t head = 0; head < d.group; ++head) read(hash, head, i);
      }
      return;
    }
    for (index_t j = 0; j < d.keys.rows; ++j) {
      if (many && j + kAhead < d.keys.rows) fetch(d.keys, hash, j + kAhead);
      add(hash, j);
    }
    for (index_t head = 0; head < d.group; ++head)
      for (index_t i = 0; i < d.queries.rows; ++i) {
        if (many && i + kAhead < d.queries.rows)
          fetch(d.queries, hash, head * d.queries.rows + i + kAhead);
        read(hash, head, i);
      }
  }

  void clear() const {
    for (index_t head = 0; head < d.group; ++head)
      for (index_t i = 0; i < d.queries.rows; ++i)
        std::memset(d.out + head * d.out_head_stride + i * d.out_row_stride, 0,
                    sizeof(float) * n_values);
    if (d.counts && d.queries.rows)
      std::memset(d.out_counts, 0, sizeof(float) * d.group * d.queries.rows);
  }
};

template <class T, class Code, int Values>
void run(const DecodingHead* heads, index_t count) {
  for (index_t hash = 0; hash < heads[0].n_hashes; ++hash)
    Head<T, Code, Values>{heads[0]}.fetch_first(hash);
  for (index_t i = 0; i < count; ++i) {
    const Head<T, Code, Values> head{heads[i]}, next{heads[i + 1 < count ? i + 1 : i]};
    head.clear();
    for (index_t hash = 0; hash < head.d.n_hashes; ++hash) {
      if (i + 1 < count) next.fetch_first(hash);
      head.run_hash(hash);
    }
  }
}

template <class T, class Code>
void run_values(const DecodingHead* heads, index_t count) {
  heads[0].n_values == 64 ? run<T, Code, 64>(heads, count) : run<T, Code, 0>(heads, count);
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

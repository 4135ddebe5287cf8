// The sum verb on one or two slices of 64 bytes of value columns and a group of hashes, token by
// token: the value's columns stay in registers while it is added to one table row of each hash, and
// a query's sum stays in registers while it reads one row of each.
//
// The bound is the traffic of the table rows, 192 bytes a token, hash and slice (add: load and
// store; read: load), against the L2 cache, which holds the group's tables: 768 bytes a token and
// hash for 64 float columns.
#include "kernels.hpp"
#include "order.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr index_t kAhead =
    12;  // rows to prefetch ahead: the stride of a slice defeats the hardware

// One table row in registers: a cache line a slice.
template <class T, int Slices>
struct Line {
  static constexpr int kBytes = Slices * kSliceBytes, kColumns = kBytes / sizeof(T);
  static constexpr int kVectors = kBytes / kVectorBytes;
  Vec<T> v[kVectors];

  LSHKIT_INLINE static Line zero() {
    Line line;
    LSHKIT_UNROLL
    for (int i = 0; i < kVectors; ++i) line.v[i] = Vec<T>{};
    return line;
  }
  template <bool Full>
  LSHKIT_INLINE static Line read(const T* p, int width) {
    Line line;
    LSHKIT_UNROLL
    for (int i = 0; i < kVectors; ++i)
      line.v[i] =
          Full ? load(p + i * kLanes<T>) : load_first(p + i * kLanes<T>, width - i * kLanes<T>);
    return line;
  }
  template <bool Full>
  LSHKIT_INLINE void write(T* p, int width) const {
    LSHKIT_UNROLL
    for (int i = 0; i < kVectors; ++i)
      if (Full)
        store(p + i * kLanes<T>, v[i]);
      else
        store_first(p + i * kLanes<T>, v[i], width - i * kLanes<T>);
  }
  LSHKIT_INLINE void add(const Line& other) {
    LSHKIT_UNROLL
    for (int i = 0; i < kVectors; ++i) v[i] += other.v[i];
  }
};

// Whether rows begin within a cache line, so that a slice lies on one more.
template <class T>
bool within_line(const T* data, index_t stride) {
  return (reinterpret_cast<std::uintptr_t>(data) | std::uintptr_t(stride) * sizeof(T)) %
         kSliceBytes;
}

// Full: the slice has all its columns. Group: the number of hashes where that is known, or 0.
// Split: rows may begin within a cache line.
template <class T, class Code, int Slices, bool Full, int Group, bool Split>
struct Pass {
  using Row = Line<T, Slices>;
  const BucketSumPass<T> p;
  LSHKIT_INLINE T* row(int hash, Code code) const {
    return p.table + (hash * p.table_rows + code) * Row::kColumns;
  }
  LSHKIT_INLINE void add(index_t key) const {
    if (p.key_mask && !p.key_mask[key]) return;
    const T* value = p.values + key * p.value_stride;
    const Code* code = static_cast<const Code*>(p.key_codes) + key * p.code_stride;
    if (key + 2 * kAhead < p.n_keys) {
      LSHKIT_UNROLL
      for (int i = 0; i < Slices; ++i)
        prefetch(value + kAhead * p.value_stride + i * (kSliceBytes / int(sizeof(T))));
      if (Split) prefetch(value + kAhead * p.value_stride + Row::kColumns - 1);
      prefetch(code + 2 * kAhead * p.code_stride);
    }
    const Row line = Row::template read<Full>(value, p.width);
    const auto add_to = [&](int h) LSHKIT_ALWAYS_INLINE {
      Row bucket = Row::template read<true>(row(h, code[h]), 0);
      bucket.add(line);
      bucket.template write<true>(row(h, code[h]), 0);
    };
    if constexpr (Group) {
      LSHKIT_UNROLL
      for (int h = 0; h < Group; ++h) add_to(h);
    } else {
      LSHKIT_UNROLL_HASHES
      for (int h = 0; h < p.group; ++h) add_to(h);
    }
  }
  LSHKIT_INLINE void read(index_t query) const {
    T* out = p.out + query * p.out_stride;
    const Code* code = static_cast<const Code*>(p.query_codes) + query * p.code_stride;
    if (query + 2 * kAhead < p.n_queries) {
      LSHKIT_UNROLL
      for (int i = 0; i < Slices; ++i)
        __builtin_prefetch(out + kAhead * p.out_stride + i * (kSliceBytes / int(sizeof(T))), 1);
      if (Split) __builtin_prefetch(out + kAhead * p.out_stride + Row::kColumns - 1, 1);
      prefetch(code + 2 * kAhead * p.code_stride);
    }
    Row even = Row::zero(), odd = Row::zero();
    const int n = Group ? Group : p.group;
    LSHKIT_UNROLL_HASHES
    for (int h = 0; h + 1 < n; h += 2) {
      even.add(Row::template read<true>(row(h, code[h]), 0));
      odd.add(Row::template read<true>(row(h + 1, code[h + 1]), 0));
    }
    if (n % 2) even.add(Row::template read<true>(row(n - 1, code[n - 1]), 0));
    even.add(odd);
    LSHKIT_UNROLL
    for (int i = 0; i < Row::kVectors; ++i) even.v[i] = rounded(even.v[i] * p.scale);
    if (p.accumulate) even.add(Row::template read<Full>(out, p.width));
    even.template write<Full>(out, p.width);
  }
  void run() const {
    std::memset(p.table, 0, std::size_t(p.group) * p.table_rows * Row::kBytes);
    // Nobody reads the keys behind the last query.
    const index_t n_keys = p.order == Order::causal ? smaller(p.n_keys, p.n_queries) : p.n_keys;
    in_order(
        p.order, n_keys, p.n_queries, [&](index_t j) LSHKIT_ALWAYS_INLINE { add(j); },
        [&](index_t i) LSHKIT_ALWAYS_INLINE { read(i); }, p.first_query);
  }
};

template <class T, class Code, int Slices>
void run(const BucketSumPass<T>& p) {
  if (p.width != Line<T, Slices>::kColumns) return Pass<T, Code, Slices, false, 0, true>{p}.run();
  // Of the groups that long and short tables make on most machines: without a loop over hashes, 12
  // bits take 0.7 of the time, 8 bits 0.9.
  constexpr int usual = sizeof(Code) == 1 ? 16 : 2;
  if constexpr (sizeof(T) == sizeof(float)) {
    const bool split = within_line(p.values, p.value_stride) || within_line(p.out, p.out_stride);
    if (p.group == usual && split) return Pass<T, Code, Slices, true, usual, true>{p}.run();
    if (p.group == usual) return Pass<T, Code, Slices, true, usual, false>{p}.run();
  }
  Pass<T, Code, Slices, true, 0, true>{p}.run();
}

template <class T, class Code>
void run_slices(const BucketSumPass<T>& p) {
  p.slices == 1 ? run<T, Code, 1>(p) : run<T, Code, 2>(p);
}

template <class T>
void run_codes(const BucketSumPass<T>& p) {
  p.code_bytes == 1 ? run_slices<T, std::uint8_t>(p) : run_slices<T, std::uint16_t>(p);
}

template <class T, class Code>
void add_rows(const BucketTableRows<T>& t, index_t hash, const T* values, index_t value_stride,
              T sign) {
  const Code* codes = static_cast<const Code*>(t.codes) + hash;
  T* table = t.table + hash * t.n_buckets * t.n_values;
  for (index_t i = 0; i < t.rows; ++i) {
    T* row = table + codes[i * t.n_hashes] * t.n_values;
    const T* value = values + i * value_stride;
    for (index_t c = 0; c < t.n_values; ++c) row[c] += sign * value[c];
  }
}

template <class T, class Code>
void query_rows(const BucketTableRows<T>& t, T scale, T* out) {
  const Code* codes = static_cast<const Code*>(t.codes);
  for (index_t i = 0; i < t.rows; ++i) {
    T* sum = out + i * t.n_values;
    for (index_t c = 0; c < t.n_values; ++c) sum[c] = 0;
    for (index_t h = 0; h < t.n_hashes; ++h) {
      const T* row = t.table + (h * t.n_buckets + codes[i * t.n_hashes + h]) * t.n_values;
      for (index_t c = 0; c < t.n_values; ++c) sum[c] += row[c];
    }
    for (index_t c = 0; c < t.n_values; ++c) sum[c] *= scale;
  }
}

}  // namespace

void bucket_sum(const BucketSumPass<float>& p) { run_codes(p); }
void bucket_sum(const BucketSumPass<double>& p) { run_codes(p); }

#define LSHKIT_DEFINE(T)                                                                     \
  void table_add(const BucketTableRows<T>& t, index_t hash, const T* values, index_t stride, \
                 T sign) {                                                                   \
    t.code_bytes == 1 ? add_rows<T, std::uint8_t>(t, hash, values, stride, sign)             \
                      : add_rows<T, std::uint16_t>(t, hash, values, stride, sign);           \
  }                                                                                          \
  void table_query(const BucketTableRows<T>& t, T scale, T* out) {                           \
    t.code_bytes == 1 ? query_rows<T, std::uint8_t>(t, scale, out)                           \
                      : query_rows<T, std::uint16_t>(t, scale, out);                         \
  }
LSHKIT_DEFINE(float)
LSHKIT_DEFINE(double)
#undef LSHKIT_DEFINE

}  // namespace LSHKIT_ISA
}  // namespace lshkit

#include "bucket_sum.hpp"

#include <algorithm>
#include <cstring>

#include "bucket_slots.hpp"
#include "lshkit/runtime.hpp"
#include "parallel.hpp"

namespace lshkit {
namespace {

// How a head is cut, from the sizes alone: results do not depend on who computes which slices.
struct Cut {
  bool compact;        // slots in the place of codes
  index_t table_rows;  // at most
  index_t group;       // hashes whose tables are in use together
  int at_once;  // slices of a pass, one or two: two read the codes and the loop once for both
  bool packed;  // slices of the values and of the output are copied into contiguous arrays

  template <class T>
  explicit Cut(const HeadSum<T>& s) {
    compact = BucketSlots::pay(s.n_keys, s.n_buckets);
    table_rows = compact ? s.n_keys + 1 : s.n_buckets;
    // Half of the L2 cache for tables, the other half for the rows that stream through it. Alone, a
    // hash would have the rows of all keys and queries pass for a single table.
    const CacheSizes& cache = cache_sizes();
    const index_t l2 = cache.l2 / 2, slice = table_rows * kSliceBytes;
    const index_t most = std::min<index_t>(kMaxGroup, s.n_hashes);
    at_once = 2;
    group = std::clamp<index_t>(l2 / (2 * slice), 1, most);
    if (group == 1 && most > 1) {
      at_once = 2 * slice <= l2 ? 1 : 2;
      group = at_once == 1 || 4 * slice <= cache.l3 / 4 ? 2 : 1;
    }
    const index_t rows = std::max(s.n_queries, s.n_keys);
    packed =
        s.n_hashes / group >= kPackedPasses && rows * s.values.columns * index_t(sizeof(T)) >= l2;
  }

 private:
  // Passes over a slice that are worth a copy of it. In their place, slices of long arrays use a
  // part of the sets of the caches.
  static constexpr index_t kPackedPasses = 8;
};

// Codes of the hashes of a group lie side by side, (groups, rows, group): at a stride of all hashes
// each would take a cache line of its own from the L2 cache.
template <int Group, class Code>
void arrange(const Code* codes, index_t rows, index_t n_hashes, index_t group, Code* to) {
  constexpr index_t kRows = 64;  // whose codes stay in the L1 cache
  for (index_t first = 0; first < rows; first += kRows) {
    const index_t last = std::min(first + kRows, rows);
    for (index_t hash = 0; hash < n_hashes; hash += group) {
      const index_t width = Group ? Group : std::min(group, n_hashes - hash);
      Code* out = to + hash * rows + first * width;
      for (index_t i = first; i < last; ++i, out += width)
        std::memcpy(out, codes + i * n_hashes + hash, sizeof(Code) * width);
    }
  }
}
template <class Code>
void arrange(const void* codes, index_t rows, index_t n_hashes, index_t group, void* to) {
  const auto run = n_hashes % group ? arrange<0, Code>
                   : group == 2     ? arrange<2, Code>
                   : group == 4     ? arrange<4, Code>
                                    : arrange<0, Code>;
  run(static_cast<const Code*>(codes), rows, n_hashes, group, static_cast<Code*>(to));
}

// The codes of a head as its passes read them.
struct PassCodes {
  const void *query, *key;  // of the first hash
  int bytes;
  bool arranged;  // else as they were given
  index_t n_queries, n_keys, n_hashes, group;
  index_t* table_rows;  // of each group

  // With slots in the place of codes where `compact`; memory: see PassMemory.
  template <class T>
  PassCodes(const HeadSum<T>& s, const Cut& cut, BucketSlots& slots, void* queries, void* keys,
            index_t* rows)
      : query(s.query_codes),
        key(s.key_codes),
        bytes(cut.compact ? 2 : s.code_bytes),
        arranged(queries != nullptr),
        n_queries(s.n_queries),
        n_keys(s.n_keys),
        n_hashes(s.n_hashes),
        group(cut.group),
        table_rows(rows) {
    std::fill_n(table_rows, group_count(s, cut), cut.table_rows);
    if (!arranged) return;
    query = queries;
    key = keys;
    if (cut.compact) {
      s.code_bytes == 1 ? assign<std::uint8_t>(s, slots) : assign<std::uint16_t>(s, slots);
      return;
    }
    const auto to_groups = bytes == 1 ? arrange<std::uint8_t> : arrange<std::uint16_t>;
    to_groups(s.query_codes, n_queries, n_hashes, group, queries);
    to_groups(s.key_codes, n_keys, n_hashes, group, keys);
  }
  template <class T>
  static index_t group_count(const HeadSum<T>& s, const Cut& cut) {
    return (s.n_hashes + cut.group - 1) / cut.group;
  }
  // Half a cache line of codes a row does not need it.
  template <class T>
  static bool arrange_pays(const HeadSum<T>& s, const Cut& cut) {
    return cut.compact || (cut.group < s.n_hashes && cut.group * s.code_bytes < 16);
  }

  template <class T>
  void select(index_t hash, BucketSumPass<T>& pass) const {
    pass.group = int(std::min(group, n_hashes - hash));
    const index_t stride = arranged ? pass.group : n_hashes;
    const auto at = [&](const void* codes, index_t rows) {
      return static_cast<const char*>(codes) + hash * (arranged ? rows : 1) * bytes;
    };
    pass.query_codes = at(query, n_queries);
    pass.key_codes = at(key, n_keys);
    pass.query_code_stride = pass.key_code_stride = stride;
    pass.code_bytes = bytes;
    pass.table_rows = table_rows[hash / group];
  }

 private:
  template <class Code, class T>
  void assign(const HeadSum<T>& s, BucketSlots& slots) {
    slots.start(s.n_buckets);
    auto* to_query = static_cast<std::uint16_t*>(const_cast<void*>(query));
    auto* to_key = static_cast<std::uint16_t*>(const_cast<void*>(key));
    for (index_t hash = 0; hash < n_hashes; hash += group) {
      const index_t width = std::min(group, n_hashes - hash);
      index_t most = 0;
      for (index_t h = 0; h < width; ++h) {
        const Code* keys = static_cast<const Code*>(s.key_codes) + hash + h;
        const Code* queries = static_cast<const Code*>(s.query_codes) + hash + h;
        for (index_t j = 0; j < n_keys; ++j)
          to_key[hash * n_keys + j * width + h] = slots.add(keys[j * n_hashes]);
        for (index_t i = 0; i < n_queries; ++i)
          to_query[hash * n_queries + i * width + h] = slots.of(queries[i * n_hashes]);
        most = std::max(most, slots.table_rows());
        slots.clear();
      }
      table_rows[hash / group] = most;
    }
  }
};

template <class T>
struct PassMemory {
  T *table, *values, *out;
  BucketSlots slots;
  void *query_codes = nullptr, *key_codes = nullptr;
  index_t* table_rows;
  std::size_t bytes;

  PassMemory(Arena arena, const HeadSum<T>& s, const Cut& cut, int at_once) {
    const index_t columns = at_once * kSliceBytes / index_t(sizeof(T));
    table = arena.take<T>(cut.group * cut.table_rows * columns);
    values = arena.take<T>(cut.packed ? s.n_keys * columns : 0);
    out = arena.take<T>(cut.packed ? s.n_queries * columns : 0);
    table_rows = arena.take<index_t>(PassCodes::group_count(s, cut));
    if (PassCodes::arrange_pays(s, cut)) {
      const index_t code_bytes = cut.compact ? 2 : s.code_bytes;
      query_codes = arena.take<char>(s.n_queries * s.n_hashes * code_bytes);
      key_codes = arena.take<char>(s.n_keys * s.n_hashes * code_bytes);
    }
    if (cut.compact) slots = BucketSlots(arena, s.n_keys, s.n_buckets);
    bytes = arena.used();
  }
};

template <class To, class From>
void copy_rows(Matrix<From> from, Matrix<To> to) {
  for (index_t i = 0; i < from.rows; ++i)
    std::memcpy(to.row(i), from.row(i), sizeof(To) * from.columns);
}

}  // namespace

template <class T>
void sum_slices(const HeadSum<T>& s, index_t first, index_t last) {
  constexpr index_t columns = kSliceBytes / sizeof(T);
  const Cut cut(s);
  const int at_once = int(std::min<index_t>(cut.at_once, last - first));
  if (at_once == 0) return;
  const PassMemory<T> size(Arena(), s, cut, at_once);
  PassMemory<T> memory(Arena(thread_scratch(size.bytes)), s, cut, at_once);
  const PassCodes codes(s, cut, memory.slots, memory.query_codes, memory.key_codes,
                        memory.table_rows);
  BucketSumPass<T> pass;
  pass.n_queries = s.n_queries;
  pass.n_keys = s.n_keys;
  pass.key_mask = s.key_mask;
  pass.order = s.order;
  pass.scale = s.scale;
  pass.table = memory.table;
  for (index_t slice = first; slice < last; slice += at_once) {
    pass.slices = int(std::min<index_t>(at_once, last - slice));
    const index_t column = slice * columns;
    const index_t width = std::min(pass.slices * columns, s.values.columns - column);
    Matrix<const T> values{s.values.data + column, s.values.stride, s.n_keys, width};
    Matrix<T> out{s.out.data + column, s.out.stride, s.n_queries, width};
    if (cut.packed) {
      copy_rows(values, Matrix<T>{memory.values, width, s.n_keys, width});
      values = {memory.values, width, s.n_keys, width};
      out = {memory.out, width, s.n_queries, width};
    }
    pass.values = values.data;
    pass.value_stride = values.stride;
    pass.width = int(width);
    pass.out = out.data;
    pass.out_stride = out.stride;
    for (index_t hash = 0; hash < s.n_hashes; hash += cut.group) {
      codes.select(hash, pass);
      pass.accumulate = hash > 0;
      kernels().typed<T>().bucket_sum(pass);
    }
    if (cut.packed)
      copy_rows(out, Matrix<T>{s.out.data + column, s.out.stride, s.n_queries, width});
  }
}

template <class T>
void bucket_sum(const BucketSumShape& shape, Codes query_codes, Codes key_codes,
                Tensor<const T> values, Mask key_mask, Order order, T scale, Tensor<T> out,
                int threads) {
  const index_t heads = shape.batch * shape.heads, slices = slice_count<T>(shape.n_values);
  // Whole heads while there are enough of them: their codes stay in cache from slice to slice.
  const index_t parts = heads >= 2 * thread_count(threads) ? 1 : slices;
  parallel_for(heads * parts, threads, [&](index_t task) {
    const index_t head = task / parts, part = task % parts;
    const index_t batch = head / shape.heads, h = head % shape.heads;
    HeadSum<T> s;
    s.n_queries = shape.n_queries;
    s.n_keys = shape.n_keys;
    s.n_hashes = shape.n_hashes;
    s.n_buckets = shape.n_buckets;
    s.query_codes = query_codes.matrix(head, shape.n_queries, shape.n_hashes);
    s.key_codes = key_codes.matrix(head, shape.n_keys, shape.n_hashes);
    s.code_bytes = query_codes.bytes;
    s.values = {values.matrix(batch, h), values.row_stride, shape.n_keys, shape.n_values};
    s.key_mask = key_mask.rows(batch);
    s.order = order;
    s.scale = scale;
    s.out = {out.matrix(batch, h), out.row_stride, shape.n_queries, shape.n_values};
    sum_slices(s, parts == 1 ? 0 : part, parts == 1 ? slices : part + 1);
  });
}

#define LSHKIT_INSTANTIATE(T)                                                                    \
  template void sum_slices(const HeadSum<T>&, index_t, index_t);                                 \
  template void bucket_sum(const BucketSumShape&, Codes, Codes, Tensor<const T>, Mask, Order, T, \
                           Tensor<T>, int);
LSHKIT_INSTANTIATE(float)
LSHKIT_INSTANTIATE(double)

}  // namespace lshkit

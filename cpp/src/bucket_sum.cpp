#include "bucket_sum.hpp"

#include <algorithm>

#include "bucket_slots.hpp"
#include "parallel.hpp"

namespace lshkit {
namespace {

// The tables of a pass a slice wide: they should stay in the L2 cache beside the rows that stream
// through it, at twice the width too.
constexpr index_t kTableBytes = index_t(256) << 10;

// The codes of a group of hashes as slots, (rows, group).
struct SlotCodes {
  BucketSlots slots;
  std::uint16_t *query, *key;

  SlotCodes(Arena& arena, index_t n_queries, index_t n_keys, index_t n_buckets, index_t group)
      : slots(arena, n_keys, n_buckets),
        query(arena.take<std::uint16_t>(n_queries * group)),
        key(arena.take<std::uint16_t>(n_keys * group)) {}

  // Of the hashes [first, first + group); returns the rows of the largest table.
  template <class T, class Code>
  index_t assign(const HeadSum<T>& s, index_t first, index_t group) {
    const Code* query_codes = static_cast<const Code*>(s.query_codes) + first;
    const Code* key_codes = static_cast<const Code*>(s.key_codes) + first;
    index_t most = 0;
    for (index_t h = 0; h < group; ++h) {
      for (index_t j = 0; j < s.n_keys; ++j)
        key[j * group + h] = slots.add(key_codes[j * s.n_hashes + h]);
      for (index_t i = 0; i < s.n_queries; ++i)
        query[i * group + h] = slots.of(query_codes[i * s.n_hashes + h]);
      most = std::max(most, slots.table_rows());
      slots.clear();
    }
    return most;
  }
};

template <class T>
struct PassScratch {
  T* table;
  SlotCodes codes;
  std::size_t bytes;

  PassScratch(Arena arena, const HeadSum<T>& s, index_t group, index_t table_rows, int slices,
              bool compact)
      : table(arena.take<T>(group * table_rows * slices * kSliceBytes / sizeof(T))),
        codes(arena, compact ? s.n_queries : 0, compact ? s.n_keys : 0, compact ? s.n_buckets : 0,
              group),
        bytes(arena.used()) {}
};

}  // namespace

template <class T>
void sum_slices(const HeadSum<T>& s, index_t first, index_t last) {
  constexpr index_t columns = kSliceBytes / sizeof(T);
  const bool compact = BucketSlots::pay(s.n_keys, s.n_buckets);
  index_t table_rows = compact ? s.n_keys + 1 : s.n_buckets;
  const index_t group_size = std::clamp<index_t>(kTableBytes / (table_rows * kSliceBytes), 1,
                                                 std::min<index_t>(kMaxGroup, s.n_hashes));
  // Two slices at once read the codes and the loop once for both.
  const int at_once = last - first > 1 && table_rows * kSliceBytes <= kTableBytes ? 2 : 1;
  const PassScratch<T> size(Arena(), s, group_size, table_rows, at_once, compact);
  PassScratch<T> scratch(Arena(thread_scratch(size.bytes)), s, group_size, table_rows, at_once,
                         compact);
  SlotCodes& codes = scratch.codes;
  if (compact) codes.slots.start(s.n_buckets);

  for (index_t hash = 0; hash < s.n_hashes; hash += group_size) {
    const index_t group = std::min(group_size, s.n_hashes - hash);
    BucketSumPass<T> pass;
    if (compact) {
      table_rows = s.code_bytes == 1 ? codes.template assign<T, std::uint8_t>(s, hash, group)
                                     : codes.template assign<T, std::uint16_t>(s, hash, group);
      pass.query_codes = codes.query;
      pass.key_codes = codes.key;
      pass.query_code_stride = pass.key_code_stride = group;
      pass.code_bytes = 2;
    } else {
      pass.query_codes = static_cast<const char*>(s.query_codes) + hash * s.code_bytes;
      pass.key_codes = static_cast<const char*>(s.key_codes) + hash * s.code_bytes;
      pass.query_code_stride = pass.key_code_stride = s.n_hashes;
      pass.code_bytes = s.code_bytes;
    }
    pass.group = int(group);
    pass.n_queries = s.n_queries;
    pass.n_keys = s.n_keys;
    pass.table_rows = table_rows;
    pass.value_stride = s.values.stride;
    pass.key_mask = s.key_mask;
    pass.order = s.order;
    pass.scale = s.scale;
    pass.out_stride = s.out.stride;
    pass.accumulate = hash > 0;
    pass.table = scratch.table;
    for (index_t slice = first; slice < last; slice += pass.slices) {
      pass.slices = int(std::min<index_t>(at_once, last - slice));
      pass.values = s.values.data + slice * columns;
      pass.width = int(std::min(pass.slices * columns, s.values.columns - slice * columns));
      pass.out = s.out.data + slice * columns;
      kernels().typed<T>().bucket_sum(pass);
    }
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

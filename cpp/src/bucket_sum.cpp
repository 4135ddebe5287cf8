#include "bucket_sum.hpp"

#include <algorithm>
#include <cstring>

#include "parallel.hpp"
#include "sum_passes.hpp"

namespace lshkit {
namespace {

template <class T>
struct PassMemory {
  PassCodes codes;
  T *table, *values, *out;
  std::size_t bytes;

  PassMemory(Arena arena, const HeadSum<T>& s, const SumCut& cut, int at_once)
      : codes(arena, s, cut) {
    const index_t columns = at_once * kSliceBytes / index_t(sizeof(T));
    table = arena.take<T>(cut.group * cut.table_rows * columns);
    values = arena.take<T>(cut.packed ? s.n_keys * columns : 0);
    out = arena.take<T>(cut.packed ? s.n_queries * columns : 0);
    bytes = arena.used();
  }
};

template <class To, class From>
void copy_rows(Matrix<From> from, Matrix<To> to, index_t first = 0) {
  for (index_t i = first; i < from.rows; ++i)
    std::memcpy(to.row(i), from.row(i), sizeof(To) * from.columns);
}

}  // namespace

template <class T>
void sum_by_tables(const HeadSum<T>& s, index_t first, index_t last) {
  constexpr index_t columns = kSliceBytes / sizeof(T);
  const SumCut cut(s, s.values.columns * index_t(sizeof(T)));
  const int at_once = int(std::min<index_t>(cut.at_once, last - first));
  if (at_once == 0) return;
  const PassMemory<T> size(Arena(), s, cut, at_once);
  PassMemory<T> memory(Arena(thread_scratch(size.bytes)), s, cut, at_once);
  memory.codes.arrange();
  BucketSumPass<T> pass;
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
      memory.codes.select(hash, pass);
      kernels().typed<T>().bucket_sum(pass);
    }
    if (cut.packed)
      copy_rows(out, Matrix<T>{s.out.data + column, s.out.stride, s.n_queries, width},
                s.first_query);
  }
}

template <class T>
void sum_slices(const HeadSum<T>& head, index_t first, index_t last) {
  HeadSum<T> s = head;
  s.first_query = sum_by_pairs(head, first, last);
  if (s.first_query < s.n_queries) sum_by_tables(s, first, last);
}

template <class T>
void bucket_sum(const BucketSumShape& shape, Codes query_codes, Codes key_codes,
                Tensor<const T> values, Mask key_mask, Order order, T scale, Tensor<T> out,
                int threads) {
  const index_t heads = shape.batch * shape.heads;
  const HeadParts parts(heads, slice_count<T>(shape.n_values), threads);
  parallel_for(heads * parts.count, threads, [&](index_t task) {
    const index_t head = task / parts.count, part = task % parts.count;
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
    sum_slices(s, parts.first(part), parts.first(part + 1));
  });
}

#define LSHKIT_INSTANTIATE(T)                                                                    \
  template void sum_by_tables(const HeadSum<T>&, index_t, index_t);                              \
  template void sum_slices(const HeadSum<T>&, index_t, index_t);                                 \
  template void bucket_sum(const BucketSumShape&, Codes, Codes, Tensor<const T>, Mask, Order, T, \
                           Tensor<T>, int);
LSHKIT_INSTANTIATE(float)
LSHKIT_INSTANTIATE(double)

}  // namespace lshkit

// Kept tables as the bindings call them.
#include "lshkit/cuda/bucket_table.cuh"
#include "lshkit/cuda/bucket_table.hpp"
#include "lshkit/cuda/runtime.cuh"

namespace lshkit::cuda {
namespace {

template <class T>
TableRows<T> table_rows(T* table, index_t n_hashes, index_t n_buckets, index_t n_values,
                        Codes codes, index_t rows, T factor) {
  TableRows<T> a;
  a.table = table;
  a.n_hashes = n_hashes;
  a.n_buckets = n_buckets;
  a.n_values = n_values;
  a.codes = codes.data;
  a.code_bytes = codes.bytes;
  a.rows = rows;
  a.factor = factor;
  return a;
}

}  // namespace

template <class T>
void bucket_table_add(const Queue& queue, T* table, index_t n_hashes, index_t n_buckets,
                      index_t n_values, Codes codes, const T* values, index_t value_stride,
                      index_t rows, T sign) {
  const DeviceGuard guard(queue);
  TableRows<T> a = table_rows(table, n_hashes, n_buckets, n_values, codes, rows, sign);
  a.values = values;
  a.value_stride = value_stride;
  table_add(queue, a);
}
template <class T>
void bucket_table_query(const Queue& queue, const T* table, index_t n_hashes, index_t n_buckets,
                        index_t n_values, Codes codes, index_t rows, T scale, T* out) {
  const DeviceGuard guard(queue);
  TableRows<T> a =
      table_rows(const_cast<T*>(table), n_hashes, n_buckets, n_values, codes, rows, scale);
  a.out = out;
  table_query(queue, a);
}

#define LSHKIT_INSTANTIATE(T)                                                                  \
  template void bucket_table_add(const Queue&, T*, index_t, index_t, index_t, Codes, const T*, \
                                 index_t, index_t, T);                                         \
  template void bucket_table_query(const Queue&, const T*, index_t, index_t, index_t, Codes,   \
                                   index_t, T, T*);
LSHKIT_INSTANTIATE(float)
LSHKIT_INSTANTIATE(double)
#undef LSHKIT_INSTANTIATE

}  // namespace lshkit::cuda

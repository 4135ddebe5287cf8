#include <algorithm>

#include "kernels/kernels.hpp"
#include "lshkit/bucket_sum.hpp"
#include "parallel.hpp"

namespace lshkit {

template <class T>
void bucket_table_add(T* table, index_t n_hashes, index_t n_buckets, index_t n_values, Codes codes,
                      const T* values, index_t value_stride, index_t rows, T sign, int threads) {
  // A hash's table belongs to one task: rows are added in their order whatever the threads.
  parallel_for(n_hashes, threads, [&](index_t hash) {
    kernels().typed<T>().table_add(
        {table, n_hashes, n_buckets, n_values, codes.data, codes.bytes, rows}, hash, values,
        value_stride, sign);
  });
}

template <class T>
void bucket_table_query(const T* table, index_t n_hashes, index_t n_buckets, index_t n_values,
                        Codes codes, index_t rows, T scale, T* out, int threads) {
  constexpr index_t kRows = 256;
  parallel_for((rows + kRows - 1) / kRows, threads, [&](index_t task) {
    const index_t first = task * kRows;
    kernels().typed<T>().table_query(
        {const_cast<T*>(table), n_hashes, n_buckets, n_values,
         static_cast<const char*>(codes.data) + first * n_hashes * codes.bytes, codes.bytes,
         std::min(kRows, rows - first)},
        scale, out + first * n_values);
  });
}

#define LSHKIT_INSTANTIATE(T)                                                                      \
  template void bucket_table_add(T*, index_t, index_t, index_t, Codes, const T*, index_t, index_t, \
                                 T, int);                                                          \
  template void bucket_table_query(const T*, index_t, index_t, index_t, Codes, index_t, T, T*, int);
LSHKIT_INSTANTIATE(float)
LSHKIT_INSTANTIATE(double)

}  // namespace lshkit

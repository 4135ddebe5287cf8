#pragma once
// lshkit/bucket_sum.hpp's kept tables on a GPU: all pointers are of the device, work is queued on
// the stream. Rows are added in their order, as on the CPU: to the last bit the same sums. A code
// beyond the buckets is in none of them.
#include "lshkit/bucket_sum.hpp"
#include "lshkit/cuda/queue.hpp"

namespace lshkit::cuda {

template <class T>
void bucket_table_add(const Queue& queue, T* table, index_t n_hashes, index_t n_buckets,
                      index_t n_values, Codes codes, const T* values, index_t value_stride,
                      index_t rows, T sign);
template <class T>
void bucket_table_query(const Queue& queue, const T* table, index_t n_hashes, index_t n_buckets,
                        index_t n_values, Codes codes, index_t rows, T scale, T* out);

}  // namespace lshkit::cuda

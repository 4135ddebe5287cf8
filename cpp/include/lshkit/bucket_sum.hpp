#pragma once
// The sum verb: out[i] = scale * sum over hashes h and keys j with key_code[j,h] == query_code[i,h]
// of values[j]. Each hash adds every value to a table row and each query reads one row (YOSO, ICML
// 2021, section 3.2): the work is linear in the number of rows. Where few keys share a bucket, the
// CPU adds the values of a query's pairs instead.
#include "lshkit/tensor.hpp"

namespace lshkit {

// Of the sums' gradient: what a key gave to a query, the query's gradient gives to the key.
constexpr Order transposed_order(Order order) {
  return order == Order::all ? order : order == Order::causal ? Order::reversed : Order::causal;
}

struct BucketSumShape {
  index_t batch = 1, heads = 1, n_queries = 0, n_keys = 0, n_hashes = 0, n_values = 0;
  index_t n_buckets = 0;  // every code is below it
};

// T: float or double. out is (batch, heads, n_queries, n_values), every element is written.
template <class T>
void bucket_sum(const BucketSumShape& shape, Codes query_codes, Codes key_codes,
                Tensor<const T> values, Mask key_mask, Order order, T scale, Tensor<T> out,
                int threads);

// A table is a contiguous (n_hashes, n_buckets, n_values) array that the caller keeps.
// table[h, codes[i,h]] += sign * values[i]; values has `rows` rows of stride value_stride.
template <class T>
void bucket_table_add(T* table, index_t n_hashes, index_t n_buckets, index_t n_values, Codes codes,
                      const T* values, index_t value_stride, index_t rows, T sign, int threads);
// out[i] = scale * sum over h of table[h, codes[i,h]]; out is contiguous (rows, n_values).
template <class T>
void bucket_table_query(const T* table, index_t n_hashes, index_t n_buckets, index_t n_values,
                        Codes codes, index_t rows, T scale, T* out, int threads);

}  // namespace lshkit

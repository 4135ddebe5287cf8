#pragma once
// The sum verb on one head, for the clients that go head by head.
#include "kernels/kernels.hpp"
#include "lshkit/bucket_sum.hpp"
#include "rows.hpp"

namespace lshkit {

struct SumRows {
  index_t n_queries, n_keys, n_hashes, n_buckets;
  const void *query_codes, *key_codes;  // (rows, n_hashes)
  int code_bytes;
  const std::uint8_t* key_mask;
  Order order;
  index_t first_query = 0;  // the sums of those before are there; causal only
};
template <class T>
struct HeadSum : SumRows {
  Matrix<const T> values;
  T scale;
  Matrix<T> out;
  // Where `values` has no data: the rows of a tensor, which become values for whom needs them, in
  // `memory` if they are of 16 bits.
  Input<T> source{};
  RowPosition source_at{};
  T* memory = nullptr;

  void need_values() {
    if (!values.data && source.data)
      values = rows_as<T>(source, source_at, n_keys, values.columns, memory);
  }
};

// Passes over a slice of columns that are worth a contiguous copy of it. In its place, slices of
// long arrays use a part of the sets of the caches.
inline constexpr index_t kPackedPasses = 8;

// The columns are cut into slices that can be computed apart.
template <class T>
index_t slice_count(index_t n_values) {
  constexpr index_t columns = kSliceBytes / sizeof(T);
  return (n_values + columns - 1) / columns;
}
// Slices [first, last). Uses thread_scratch.
template <class T>
void sum_slices(const HeadSum<T>& sum, index_t first, index_t last);
// Its two ways, of `values`. By pairs of a query and a key in one bucket, where these are few (0
// where they do not pay by the sizes): of how many queries, and if not causal of all or none. That
// does not depend on the slices, and if causal not on later rows. By tables: from sum.first_query
// on.
template <class T>
bool pairs_pay(const HeadSum<T>& sum);
template <class T>
index_t sum_by_pairs(const HeadSum<T>& sum, index_t first, index_t last);
template <class T>
void sum_by_tables(const HeadSum<T>& sum, index_t first, index_t last);

}  // namespace lshkit

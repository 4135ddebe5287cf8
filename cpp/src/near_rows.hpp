#pragma once
// The rows that share some number of buckets with a query, and their products with it.
#include <algorithm>

#include "kernels/kernels.hpp"

namespace lshkit {

// The rows of one bucket.
struct RowRange {
  const std::int32_t *begin, *end;
  index_t size() const { return end - begin; }
};

inline void prefetch_rows(RowRange bucket) {
  constexpr index_t kLine = 64 / sizeof(std::int32_t), kMost = 32 * kLine;  // the rest streams in
  const std::int32_t* end = bucket.begin + std::min(bucket.size(), kMost);
  for (const std::int32_t* row = bucket.begin; row < end; row += kLine) __builtin_prefetch(row);
}

// The rows that are in min_count of the buckets, each once, into near, which has room for one more;
// returns their number. counts.add(row) counts a row and returns its count with this one.
// Everything by value: a store of a count might change whatever is not in a register.
template <class Counts>
index_t find_near(const RowRange* bucket, const RowRange* end, const int min_count, Counts counts,
                  std::int32_t* const near) {
  constexpr index_t kBucketsAhead = 6;
  index_t n = 0;
  for (; bucket < end; ++bucket) {
    if (bucket + kBucketsAhead < end) prefetch_rows(bucket[kBucketsAhead]);
    const std::int32_t* const last = bucket->end;
    for (const std::int32_t* row = bucket->begin; row < last; ++row) {
      near[n] = *row;
      n += counts.add(*row) == min_count;
    }
  }
  return n;
}

// Of one query with the n listed rows of (rows, n_features).
template <class T>
void measure_rows(PairMeasure measure, const T* query, const T* rows, index_t n_features,
                  const std::int32_t* list, index_t n, T* out) {
  const std::int64_t indptr[] = {0, n};
  PairProducts<T> pairs;
  pairs.queries = query;
  pairs.keys = rows;
  pairs.query_stride = pairs.key_stride = pairs.n_features = n_features;
  pairs.n_queries = 1;
  pairs.indptr = indptr;
  pairs.indices = list;
  pairs.measure = measure;
  pairs.out = out;
  kernels().typed<T>().pair_products(pairs, 0, 0, n);
}

}  // namespace lshkit

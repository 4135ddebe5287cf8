// The sum verb without tables, for buckets with few keys: a query adds up the values of the keys
// that share its buckets. Tables would be larger than the values, and mostly zeros.
#include "keys_by_bucket.hpp"
#include "row_columns.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// scale * the sum of the rows found, added to what is there or in its place.
template <class T>
LSHKIT_INLINE void sum_rows(Matrix<const T> values, const std::uint16_t* found, index_t count,
                            Vec<T> scale, bool accumulate, T* out) {
  each_columns<T, kVectors / 2>(values.columns, [&](auto columns) LSHKIT_ALWAYS_INLINE {
    Vec<T> sum[columns.vectors] = {}, v[columns.vectors];
    for (index_t k = 0; k < count; ++k) {
      columns.load_row(values.row(found[k]), v);
      LSHKIT_UNROLL
      for (int c = 0; c < columns.vectors; ++c) sum[c] += v[c];
    }
    LSHKIT_UNROLL
    for (int c = 0; c < columns.vectors; ++c) sum[c] = rounded(sum[c] * scale);
    if (accumulate) {
      columns.load_row(out, v);
      LSHKIT_UNROLL
      for (int c = 0; c < columns.vectors; ++c) sum[c] += v[c];
    }
    columns.store_row(out, sum);
  });
}

template <class T>
index_t sum_pairs(const PairSumPass<T>& p) {
  const Matrix<const T> values = p.values;
  const Matrix<T> out = p.out;
  const Vec<T> scale = broadcast(p.scale);
  const bool accumulate = p.accumulate;
  return search_pairs(
      p, [&](index_t query, const std::uint16_t* found, index_t count) LSHKIT_ALWAYS_INLINE {
        sum_rows(values, found, count, scale, accumulate, out.row(query));
      });
}

}  // namespace

#define LSHKIT_DEFINE(T) \
  index_t pair_sum(const PairSumPass<T>& p) { return sum_pairs(p); }
LSHKIT_DEFINE(float)
LSHKIT_DEFINE(double)
#undef LSHKIT_DEFINE

}  // namespace LSHKIT_ISA
}  // namespace lshkit

// The arithmetic of partition_sums.hpp: products of a run of queries with the sample, and sums of
// exponentials.
#include "exponential.hpp"
#include "kernels.hpp"
#include "matmul.hpp"

namespace lshkit {
namespace LSHKIT_ISA {

void pack_listed(Matrix<const float> rows, const std::int32_t* list, index_t count, float* to) {
  for (index_t p = 0; p < count; p += kListPanel)
    pack_transposed<float>(smaller(kListPanel, count - p), rows.columns, kListPanel,
                           {rows.data, rows.stride, list + p}, 1, nullptr, to + p * rows.columns);
}

void packed_products(Matrix<const float> queries, const float* packed, index_t count, float* out,
                     index_t out_stride) {
  for (index_t p = 0; p < count; p += kListPanel)
    matmul<float>(queries.rows, smaller(kListPanel, count - p), queries.columns,
                  {queries.data, queries.stride}, 1, packed + p * queries.columns, kListPanel,
                  {out + p, out_stride}, false);
}

float largest_of(const float* x, index_t count, float largest) {
  constexpr int n = kLanes<float>;
  Vec<float> most = broadcast(largest);
  index_t i = 0;
  for (; i + n <= count; i += n) {
    const Vec<float> v = load(x + i);
    most = v > most ? v : most;
  }
  for (int lane = 0; lane < n; ++lane) largest = most[lane] > largest ? most[lane] : largest;
  for (; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

ExponentialSums exponential_sums(const float* x, index_t count, float largest) {
  constexpr int n = kLanes<float>;
  constexpr index_t kBlock = 64 * n;  // summed in float before it goes to double
  ExponentialSums sums = {0, 0};
  for (index_t first = 0; first < count; first += kBlock) {
    const index_t end = smaller(first + kBlock, count);
    Vec<float> sum = {}, squares = {};
    index_t i = first;
    for (; i + n <= end; i += n) {
      const Vec<float> e = exp_minus(largest - load(x + i));
      sum += e;
      squares += e * e;
    }
    if (i < end) {  // what lies beyond the end must not count
      const int rest = int(end - i);
      const Vec<float> all = exp_minus(largest - load_first(x + i, rest));
      float lanes[n];
      store(lanes, all);
      const Vec<float> e = load_first(lanes, rest);
      sum += e;
      squares += e * e;
    }
    sums.sum += double(sum_lanes(sum));
    sums.squares += double(sum_lanes(squares));
  }
  return sums;
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

#include "lshkit/pair_products.hpp"

#include <algorithm>

#include "kernels/kernels.hpp"
#include "parallel.hpp"

namespace lshkit {

template <class T>
void pair_products(const PairProducts<T>& pairs, int threads) {
  const index_t total = pairs.indptr[pairs.n_queries];
  // Tasks of equal size, since one query may have most of the pairs.
  const index_t size = std::max<index_t>(64, 65536 / std::max<index_t>(pairs.n_features, 1));
  parallel_for((total + size - 1) / size, threads, [&](index_t task) {
    const index_t first = task * size, last = std::min(total, first + size);
    const std::int64_t* row =
        std::upper_bound(pairs.indptr, pairs.indptr + pairs.n_queries + 1, first) - 1;
    for (index_t begin = first; begin < last; ++row) {
      const index_t end = std::min<index_t>(row[1], last);
      if (begin < end) kernels().typed<T>().pair_products(pairs, row - pairs.indptr, begin, end);
      begin = end;
    }
  });
}
template void pair_products(const PairProducts<float>&, int);
template void pair_products(const PairProducts<double>&, int);

}  // namespace lshkit

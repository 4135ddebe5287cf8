#include "lshkit/binned_hash.hpp"

#include <atomic>

#include "kernels/kernels.hpp"
#include "parallel.hpp"

namespace lshkit {

template <class T>
bool binned_hash(const BinnedFunctions& functions, const T* x, index_t row_stride, index_t rows,
                 void* codes, int threads) {
  constexpr index_t kRows = 256;  // a task's
  std::atomic<bool> finite{true};
  parallel_for((rows + kRows - 1) / kRows, threads, [&](index_t task) {
    const index_t first = task * kRows;
    BinnedRows<T> r;
    r.functions = functions;
    r.x = x + first * row_stride;
    r.row_stride = row_stride;
    r.rows = rows - first < kRows ? rows - first : kRows;
    r.codes = static_cast<char*>(codes) + first * functions.n_hashes * functions.code_bytes();
    r.scratch = thread_scratch(sizeof(double) * kBinnedTile *
                               std::size_t(functions.n_features + kBinnedPadding));
    if (!kernels().typed<T>().binned_hash(r)) finite = false;
  });
  return finite;
}

template bool binned_hash(const BinnedFunctions&, const float*, index_t, index_t, void*, int);
template bool binned_hash(const BinnedFunctions&, const double*, index_t, index_t, void*, int);

}  // namespace lshkit

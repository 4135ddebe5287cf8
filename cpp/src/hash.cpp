#include "lshkit/hash.hpp"

#include <atomic>

#include "kernels/kernels.hpp"
#include "parallel.hpp"

namespace lshkit {

bool hash(const HashFunctions& functions, Tensor<const float> x, index_t batch, index_t heads,
          index_t rows, index_t n_features, void* codes, int threads, Precision precision) {
  if (batch * heads * rows == 0) return true;
  const index_t columns = functions.columns, n_hashes = functions.n_hashes;
  const bool hadamard = functions.family == Family::hadamard;
  const bool fast = hadamard && precision == Precision::fast && columns <= kMaxFastColumns;
  const auto kernel = fast       ? kernels().fast_hash_hadamard
                      : hadamard ? kernels().hash_hadamard
                                 : kernels().hash_hyperplane;
  // Long enough to amortise a task, short enough to share one long sequence among threads.
  constexpr index_t kRows = 512;
  const index_t tasks_per_head = (rows + kRows - 1) / kRows;
  const int code_bytes = functions.n_bits <= 8 ? 1 : 2;
  index_t scratch = kHashTile * (2 * columns + n_hashes + kHashPadding);
  if (fast)  // with the signs for 16 rows of codes at a time or more
    scratch =
        kHashTile * (4 * columns + n_hashes) + (n_hashes + 15) / 16 * functions.n_bits * columns;
  std::atomic<bool> finite{true};
  parallel_for(batch * heads * tasks_per_head, threads, [&](index_t task) {
    const index_t head = task / tasks_per_head, first = task % tasks_per_head * kRows;
    HashRows h;
    h.parameters = functions.parameters + (head % heads) * functions.head_stride;
    h.columns = columns;
    h.n_bits = functions.n_bits;
    h.n_hashes = n_hashes;
    h.x = x.matrix(head / heads, head % heads) + first * x.row_stride;
    h.row_stride = x.row_stride;
    h.rows = rows - first < kRows ? rows - first : kRows;
    h.n_features = n_features;
    h.codes = static_cast<char*>(codes) + (head * rows + first) * n_hashes * code_bytes;
    h.scratch = static_cast<float*>(thread_scratch(sizeof(float) * scratch));
    if (!kernel(h)) finite = false;
  });
  return finite;
}

}  // namespace lshkit

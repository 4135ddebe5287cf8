#include "lshkit/hash.hpp"

#include <atomic>

#include "kernels/kernels.hpp"
#include "parallel.hpp"
#include "rows.hpp"

namespace lshkit {

bool hash(const HashFunctions& functions, Input<float> x, index_t batch, index_t heads,
          index_t rows, index_t n_features, void* codes, int threads) {
  if (batch * heads * rows == 0) return true;
  const auto kernel =
      functions.family == Family::hadamard ? kernels().hash_hadamard : kernels().hash_hyperplane;
  const index_t columns = functions.columns, n_hashes = functions.n_hashes;
  // Long enough to amortise a task, short enough to share one long sequence among threads.
  constexpr index_t kRows = 512;
  const index_t tasks_per_head = (rows + kRows - 1) / kRows;
  const int code_bytes = functions.n_bits <= 8 ? 1 : 2;
  const index_t scratch = kHashTile * (2 * columns + n_hashes + kHashPadding);
  const index_t converted = x.converted() ? kRows * n_features : 0;
  std::atomic<bool> finite{true};
  parallel_for(batch * heads * tasks_per_head, threads, [&](index_t task) {
    const index_t head = task / tasks_per_head, first = task % tasks_per_head * kRows;
    HashRows h;
    h.parameters =
        functions.parameters + (head % heads) / functions.heads_per_set * functions.head_stride;
    h.columns = columns;
    h.n_bits = functions.n_bits;
    h.n_hashes = n_hashes;
    Arena arena(thread_scratch(sizeof(float) * (scratch + converted) + 64));
    h.scratch = arena.take<float>(scratch);
    h.rows = rows - first < kRows ? rows - first : kRows;
    const Matrix<const float> m = rows_as<float>(x, {head / heads, head % heads, first}, h.rows,
                                                 n_features, arena.take<float>(converted));
    h.x = m.data;
    h.row_stride = m.stride;
    h.n_features = n_features;
    h.codes = static_cast<char*>(codes) + (head * rows + first) * n_hashes * code_bytes;
    if (!kernel(h)) finite = false;
  });
  return finite;
}

}  // namespace lshkit

#include "lshkit/hash.hpp"

#include <atomic>

#include "kernels/kernels.hpp"
#include "parallel.hpp"
#include "rows.hpp"

namespace lshkit {
namespace {

std::uint32_t code_at(const void* codes, int bytes, index_t i) {
  if (bytes == 1) return static_cast<const std::uint8_t*>(codes)[i];
  if (bytes == 2) return static_cast<const std::uint16_t*>(codes)[i];
  return static_cast<const std::uint32_t*>(codes)[i];
}

}  // namespace

bool hash(const HashFunctions& functions, Input<float> x, index_t batch, index_t heads,
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
  const int code_bytes = hash_code_bytes(functions.n_bits);
  const bool two_words = code_bytes == 8;
  index_t scratch = kHashTile * (2 * columns + n_hashes + kHashPadding);
  if (fast)  // with the signs for 16 rows of codes at a time or more
    scratch =
        kHashTile * (4 * columns + n_hashes) + (n_hashes + 15) / 16 * functions.n_bits * columns;
  const index_t converted = x.converted() ? kRows * n_features : 0;
  const index_t words = two_words ? kRows * n_hashes : 0;
  std::atomic<bool> finite{true};
  parallel_for(batch * heads * tasks_per_head, threads, [&](index_t task) {
    const index_t head = task / tasks_per_head, first = task % tasks_per_head * kRows;
    HashRows h;
    h.parameters =
        functions.parameters + (head % heads) / functions.heads_per_set * functions.head_stride;
    h.columns = columns;
    h.n_bits = functions.n_bits;
    h.n_hashes = n_hashes;
    Arena arena(thread_scratch(sizeof(float) * (scratch + converted + 2 * words) + 256));
    h.scratch = arena.take<float>(scratch);
    h.rows = rows - first < kRows ? rows - first : kRows;
    const Matrix<const float> m = rows_as<float>(x, {head / heads, head % heads, first}, h.rows,
                                                 n_features, arena.take<float>(converted));
    h.x = m.data;
    h.row_stride = m.stride;
    h.n_features = n_features;
    h.codes = static_cast<char*>(codes) + (head * rows + first) * n_hashes * code_bytes;
    if (two_words) {
      std::uint32_t* const low = arena.take<std::uint32_t>(words);
      std::uint32_t* const high = arena.take<std::uint32_t>(words);
      std::uint64_t* const codes_of_rows = static_cast<std::uint64_t*>(h.codes);
      h.all_bits = functions.n_bits;
      h.codes = low;
      h.n_bits = 32;
      if (!kernel(h)) finite = false;
      h.codes = high;
      h.first_bit = 32;
      h.n_bits = functions.n_bits - 32;
      kernel(h);
      const int high_bytes = hash_code_bytes(h.n_bits);
      for (index_t i = 0; i < h.rows * n_hashes; ++i)
        codes_of_rows[i] = low[i] | std::uint64_t(code_at(high, high_bytes, i)) << 32;
    } else if (!kernel(h)) {
      finite = false;
    }
  });
  return finite;
}

}  // namespace lshkit

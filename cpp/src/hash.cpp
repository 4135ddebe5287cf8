#include "lshkit/hash.hpp"

#include <algorithm>
#include <atomic>

#include "kernels/kernels.hpp"
#include "packed_planes.hpp"
#include "parallel.hpp"
#include "rows.hpp"

namespace lshkit {
namespace {

std::uint32_t code_at(const void* codes, int bytes, index_t i) {
  if (bytes == 1) return static_cast<const std::uint8_t*>(codes)[i];
  if (bytes == 2) return static_cast<const std::uint16_t*>(codes)[i];
  return static_cast<const std::uint32_t*>(codes)[i];
}

bool is_fast(const HashFunctions& f, Precision precision) {
  return f.family == Family::hadamard && precision == Precision::fast &&
         f.columns <= kMaxFastColumns;
}

// Whether the rotations of fast hashing are multiplied out for tiles: where a row has 16 tiles of
// bits at most, most of them in use, and fills tiles itself as it lies. Not by how many rows there
// are: these codes are others.
bool by_products(const HashFunctions& f, index_t n_features, Element element) {
  return element == Element::bfloat16 && kernels().fast_hash_tiles &&
         hash_code_bytes(f.n_bits) * f.n_hashes <= 32 && f.n_bits > 4 && n_features % 32 == 0;
}

}  // namespace

PackedPlanes::PackedPlanes(const HashFunctions& f, index_t heads, index_t rows_of_all,
                           index_t n_features, Element element, Precision precision, int threads) {
  const index_t sets = f.head_stride ? heads / f.heads_per_set : 1;
  // Packing hyperplanes takes as long as hashing some 50 rows; a code's bits are those of whole
  // bytes.
  constexpr index_t kFewRows = 128;
  const bool fast = is_fast(f, precision);
  const bool pays = fast ? by_products(f, n_features, element)
                         : kernels().hash_tiles && f.family == Family::hyperplane &&
                               n_features <= kMaxTileFeatures && f.n_bits > 2 &&
                               rows_of_all >= kFewRows * sets;
  if (!pays) return;
  const index_t code_bytes = hash_code_bytes(f.n_bits);
  lines_ = (fast ? fast_hash_tiles_planes(code_bytes, f.n_hashes, n_features)
                 : hash_tiles_planes(code_bytes, f.n_hashes, n_features)) /
           16;
  memory_.reset(new Line[sets * lines_]);
  std::atomic<bool> usable{true};
  parallel_for(sets, threads, [&](index_t set) {
    HashTiles h;
    h.parameters = f.parameters + set * f.head_stride;
    h.columns = f.columns;
    h.n_bits = f.n_bits;
    h.n_hashes = f.n_hashes;
    h.n_features = n_features;
    h.planes = of_set(set);
    if (fast) {
      h.scratch =
          static_cast<float*>(thread_scratch(sizeof(float) * pack_rotations_scratch(f.columns)));
      kernels().pack_rotations(h);
    } else if (!kernels().pack_planes(h)) {
      usable = false;
    }
  });
  if (!usable) memory_.reset();
}

bool hash(const HashFunctions& functions, Input<float> x, index_t batch, index_t heads,
          index_t rows, index_t n_features, void* codes, int threads, Precision precision) {
  if (batch * heads * rows == 0) return true;
  const PackedPlanes planes(functions, heads, batch * heads * rows, n_features, x.element,
                            precision, threads);
  return hash(functions, planes, x, batch, heads, rows, n_features, codes, threads, precision);
}

bool hash(const HashFunctions& functions, const PackedPlanes& planes, Input<float> x, index_t batch,
          index_t heads, index_t rows, index_t n_features, void* codes, int threads,
          Precision precision) {
  const index_t columns = functions.columns, n_hashes = functions.n_hashes;
  const bool hadamard = functions.family == Family::hadamard;
  const bool fast = is_fast(functions, precision);
  const auto kernel = fast       ? kernels().fast_hash_hadamard
                      : hadamard ? kernels().hash_hadamard
                                 : kernels().hash_hyperplane;
  // Long enough to amortise a task, short enough to share one long sequence among threads.
  constexpr index_t kRows = 512;
  const index_t tasks_per_head = (rows + kRows - 1) / kRows;
  const int code_bytes = hash_code_bytes(functions.n_bits);
  const bool two_words = code_bytes == 8;
  index_t scratch = hash_scratch(columns, n_hashes);
  if (fast)  // with the signs for 16 rows of codes at a time or more
    scratch =
        kHashTile * (4 * columns + n_hashes) + (n_hashes + 15) / 16 * functions.n_bits * columns;
  if (planes) scratch = std::max(scratch, hash_tiles_scratch(n_features));
  const bool as_it_lies = fast && x.converted();
  const index_t converted = x.converted() && !as_it_lies ? kRows * n_features : 0;
  const index_t words = two_words ? kRows * n_hashes : 0;
  std::atomic<bool> finite{true};
  parallel_for(batch * heads * tasks_per_head, threads, [&](index_t task) {
    const index_t head = task / tasks_per_head, first = task % tasks_per_head * kRows;
    const index_t set = functions.head_stride ? head % heads / functions.heads_per_set : 0;
    HashTiles h;
    h.parameters = functions.parameters + set * functions.head_stride;
    h.columns = columns;
    h.n_bits = functions.n_bits;
    h.n_hashes = n_hashes;
    Arena arena(thread_scratch(sizeof(float) * (scratch + converted + 2 * words) + 256));
    h.scratch = arena.take<float>(scratch);
    h.rows = rows - first < kRows ? rows - first : kRows;
    h.n_features = n_features;
    const RowPosition at{head / heads, head % heads, first};
    Matrix<const float> m{nullptr, x.row_stride, h.rows, n_features};
    if (as_it_lies) {
      h.short_x = static_cast<const std::uint16_t*>(x.row(at.batch, at.head, at.row));
      h.element = x.element;
    } else {
      m = rows_as<float>(x, at, h.rows, n_features, arena.take<float>(converted));
    }
    h.x = m.data;
    h.row_stride = m.stride;
    h.codes = static_cast<char*>(codes) + (head * rows + first) * n_hashes * code_bytes;
    std::uint32_t* const low = arena.take<std::uint32_t>(words);
    std::uint32_t* const high = arena.take<std::uint32_t>(words);
    const auto hash_rows = [&](HashRows r) {
      if (!two_words) return kernel(r);
      std::uint64_t* const codes_of_rows = static_cast<std::uint64_t*>(r.codes);
      r.all_bits = functions.n_bits;
      r.codes = low;
      r.n_bits = 32;
      const bool all_finite = kernel(r);
      r.codes = high;
      r.first_bit = 32;
      r.n_bits = functions.n_bits - 32;
      kernel(r);
      const int high_bytes = hash_code_bytes(r.n_bits);
      for (index_t i = 0; i < r.rows * n_hashes; ++i)
        codes_of_rows[i] = low[i] | std::uint64_t(code_at(high, high_bytes, i)) << 32;
      return all_finite;
    };
    if (!planes) {
      if (!hash_rows(h)) finite = false;
      return;
    }
    h.bfloat16 = x.element == Element::bfloat16;
    h.planes = planes.of_set(set);
    if (fast) {
      if (!kernels().fast_hash_tiles(h)) finite = false;
      return;
    }
    for (index_t done = 0; done < m.rows; done += kTileRows) {
      HashTiles block = h;
      block.x = m.row(done);
      block.rows = std::min(kTileRows, m.rows - done);
      block.codes = static_cast<char*>(h.codes) + done * n_hashes * code_bytes;
      if (!kernels().hash_tiles(block) && !hash_rows(block)) finite = false;
    }
  });
  return finite;
}

}  // namespace lshkit

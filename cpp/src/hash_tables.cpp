#include "hash_tables.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "lshkit/runtime.hpp"
#include "parallel.hpp"

namespace lshkit {
namespace {

// Columns [first, first + count) of the codes (rows, n_hashes), each as an array of its own.
template <class Code>
void transpose(const Code* codes, index_t rows, index_t n_hashes, index_t first, index_t count,
               Code* columns, int threads) {
  constexpr index_t kRows = 2048, kTile = 64;
  parallel_for((rows + kRows - 1) / kRows, threads, [&](index_t task) {
    const index_t end = std::min(rows, (task + 1) * kRows);
    for (index_t tile = task * kRows; tile < end; tile += kTile) {
      const index_t tile_end = std::min(end, tile + kTile);
      for (index_t h = 0; h < count; ++h)
        for (index_t j = tile; j < tile_end; ++j)
          columns[h * rows + j] = codes[j * n_hashes + first + h];
    }
  });
}

// Sorts the rows of one table by bin, in two passes over the bin's high and low bits: each pass
// writes to few enough places at a time that they stay in the nearest cache.
template <class Code>
struct Sorter {
  const HashTables& tables;
  int bits, low_bits;  // of a bin's number
  index_t n_high;
  std::int32_t *rows, *high, *low;  // scratch
  Code *codes, *sorted;
  std::size_t bytes;

  Sorter(const HashTables& t, Arena arena)
      : tables(t),
        bits(bit_length(t.n_bins - 1)),
        low_bits(t.compact() || bits > 9 ? bits - std::min(11, bits / 2) : 0),
        n_high(index_t(1) << (bits - low_bits)),
        rows(arena.take<std::int32_t>(low_bits ? t.n_rows : 0)),
        high(arena.take<std::int32_t>(n_high + 1)),
        low(arena.take<std::int32_t>((index_t(1) << low_bits) + 1)),
        codes(arena.take<Code>(low_bits ? t.n_rows : 0)),
        sorted(arena.take<Code>(t.compact() ? t.n_rows : 0)),
        bytes(arena.used()) {}

  index_t bin(Code code) const {
    return tables.compact() ? index_t(compact_bin(code, bits)) : index_t(code);
  }

  // place(at, j): row j goes to a place.
  template <class Place>
  void by_high_bits(const Code* column, const Place& place) const {
    std::memset(high, 0, sizeof(std::int32_t) * (n_high + 1));
    for (index_t j = 0; j < tables.n_rows; ++j) ++high[(bin(column[j]) >> low_bits) + 1];
    for (index_t b = 0; b < n_high; ++b) high[b + 1] += high[b];
    for (index_t j = 0; j < tables.n_rows; ++j)
      place(high[bin(column[j]) >> low_bits]++, std::int32_t(j));
    // Placing a row moved its bin's start on to the next one's.
    for (index_t b = n_high; b > 0; --b) high[b] = high[b - 1];
    high[0] = 0;
  }

  // The rows [begin, end) of equal high bits. starts: of the bins with these high bits.
  void by_low_bits(index_t begin, index_t end, std::int32_t* order, std::int32_t* starts,
                   index_t n_starts) const {
    const index_t n_low = index_t(1) << low_bits, mask = n_low - 1;
    std::memset(low, 0, sizeof(std::int32_t) * (n_low + 1));
    for (index_t k = begin; k < end; ++k) ++low[(bin(codes[k]) & mask) + 1];
    low[0] = std::int32_t(begin);
    for (index_t b = 0; b < n_low; ++b) low[b + 1] += low[b];
    std::copy_n(low, n_starts, starts);
    for (index_t k = begin; k < end; ++k) {
      const std::int32_t at = low[bin(codes[k]) & mask]++;
      order[at] = rows[k];
      if (tables.compact()) sorted[at] = codes[k];
    }
  }

  void sort(const Code* column, index_t h) const {
    std::int32_t* order = tables.order + h * tables.n_rows;
    std::int32_t* bins = tables.bins + h * (tables.n_bins + 1);
    if (low_bits == 0) {
      by_high_bits(column, [&](std::int32_t at, std::int32_t j) { order[at] = j; });
      std::copy_n(high, tables.n_bins + 1, bins);
      return;
    }
    by_high_bits(column, [&](std::int32_t at, std::int32_t j) {
      rows[at] = j;
      codes[at] = column[j];
    });
    for (index_t b = 0; b < n_high; ++b) {
      const index_t first = b << low_bits;
      if (first >= tables.n_bins) break;
      const index_t n = std::min(index_t(1) << low_bits, tables.n_bins - first);
      by_low_bits(high[b], high[b + 1], order, bins + first, n);
    }
    bins[tables.n_bins] = std::int32_t(tables.n_rows);
  }

  // Sorts the places [begin, end) of a bin by code, stably.
  void sort_bin(std::int32_t* order, index_t begin, index_t end) const {
    if (std::all_of(sorted + begin, sorted + end, [&](Code c) { return c == sorted[begin]; }))
      return;
    if (end - begin <= 32) {
      for (index_t k = begin + 1; k < end; ++k) {
        const Code code = sorted[k];
        const std::int32_t row = order[k];
        index_t at = k;
        for (; at > begin && sorted[at - 1] > code; --at) {
          sorted[at] = sorted[at - 1];
          order[at] = order[at - 1];
        }
        sorted[at] = code;
        order[at] = row;
      }
      return;
    }
    std::vector<std::pair<Code, std::int32_t>> pairs(end - begin);  // rows are ascending: no ties
    for (index_t k = begin; k < end; ++k) pairs[k - begin] = {sorted[k], order[k]};
    std::sort(pairs.begin(), pairs.end());
    for (index_t k = begin; k < end; ++k) std::tie(sorted[k], order[k]) = pairs[k - begin];
  }

  // Lists the buckets of each bin; returns how many the table has.
  index_t list_buckets(index_t h) const {
    std::int32_t* order = tables.order + h * tables.n_rows;
    std::int32_t* bins = tables.bins + h * (tables.n_bins + 1);
    Code* bucket_codes = static_cast<Code*>(tables.bucket_codes) + h * (tables.n_rows + 1);
    std::int32_t* starts = tables.bucket_starts + h * (tables.n_rows + 1);
    index_t n = 0;
    for (index_t b = 0; b < tables.n_bins; ++b) {
      const index_t begin = bins[b], end = bins[b + 1];
      bins[b] = std::int32_t(n);
      if (end - begin > 1) sort_bin(order, begin, end);
      for (index_t k = begin; k < end; ++k)
        if (k == begin || sorted[k] != sorted[k - 1]) {
          bucket_codes[n] = sorted[k];
          starts[n++] = std::int32_t(k);
        }
    }
    bins[tables.n_bins] = std::int32_t(n);
    bucket_codes[n] = 0;
    starts[n] = std::int32_t(tables.n_rows);
    return n;
  }
};

// Sums over each bucket, started afresh at the places where buckets start.
void sum_weights(const HashTables& t, index_t h, const std::int32_t* starts, index_t n_starts) {
  const std::int32_t* order = t.order + h * t.n_rows;
  double* sums = t.weight_sums + h * t.n_rows;
  for (index_t b = 0; b < n_starts; ++b) {
    double sum = 0;
    for (index_t k = starts[b]; k < starts[b + 1]; ++k) sums[k] = sum += t.weights[order[k]];
  }
}

template <class Code>
void build(const HashTables& t, const Code* codes, index_t* n_buckets, int threads) {
  // Whole cache lines of codes are transposed at a time, and there is a table for each thread.
  const index_t line = 64 / index_t(sizeof(Code));
  const index_t wanted = std::max<index_t>(line, thread_count(threads));
  const index_t group = std::min(t.n_hashes, (wanted + line - 1) / line * line);
  const std::unique_ptr<Code[]> columns(new Code[group * t.n_rows]);
  prefer_large_pages(columns.get(), sizeof(Code) * group * t.n_rows);
  for (index_t first = 0; first < t.n_hashes; first += group) {
    const index_t count = std::min(group, t.n_hashes - first);
    transpose(codes, t.n_rows, t.n_hashes, first, count, columns.get(), threads);
    parallel_for(count, threads, [&](index_t g) {
      const index_t h = first + g;
      const Sorter<Code> sorter(t, Arena(thread_scratch(Sorter<Code>(t, Arena()).bytes)));
      sorter.sort(columns.get() + g * t.n_rows, h);
      const std::int32_t* starts = t.bins + h * (t.n_bins + 1);
      index_t n_starts = t.n_bins;
      if (t.compact()) {
        n_buckets[h] = n_starts = sorter.list_buckets(h);
        starts = t.bucket_starts + h * (t.n_rows + 1);
      }
      if (t.weights) sum_weights(t, h, starts, n_starts);
    });
  }
}

}  // namespace

void build_hash_tables(const HashTables& tables, Codes codes, index_t* n_buckets, int threads) {
  // A few rows are sorted before other threads have woken up.
  if (tables.n_rows * tables.n_hashes < 1 << 15) threads = 1;
  with_code_type(tables.code_bytes, [&](auto code) {
    build(tables, static_cast<const decltype(code)*>(codes.data), n_buckets, threads);
  });
}

}  // namespace lshkit

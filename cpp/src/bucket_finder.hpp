#pragma once
// Where the buckets of codes lie in hash tables.
#include "hash_tables.hpp"

namespace lshkit {
namespace {

// Look-ups go through memory in stages: what a stage of kBlock of them reads was asked for in the
// stage before, so that they wait for memory together and not in turn.
constexpr index_t kBlock = 64;

struct Bucket {
  index_t table;                    // offset of its table in order
  std::int32_t begin = 0, end = 0;  // places in the table
  index_t size() const { return end - begin; }
};

template <class Code>
struct Finder {
  const HashTables& t;
  const int bits = bit_length(t.n_bins - 1);

  // bin[k] is where in bins the look-up starts, -1 if the code is beyond the tables.
  void ask(Code code, index_t h, index_t* bin) const {
    if (!t.compact() && std::uint64_t(code) >= std::uint64_t(t.n_bins)) {
      *bin = -1;
      return;
    }
    *bin = h * (t.n_bins + 1) + (t.compact() ? index_t(compact_bin(code, bits)) : index_t(code));
    __builtin_prefetch(t.bins + *bin);
  }

  // The buckets of n <= kBlock codes in the tables h.
  void find(const Code* codes, const std::int32_t* h, index_t n, Bucket* buckets) const {
    index_t bin[kBlock];
    for (index_t k = 0; k < n; ++k) ask(codes[k], h[k], &bin[k]);
    if (t.compact()) {
      find_compact(codes, h, n, bin, buckets);
      return;
    }
    for (index_t k = 0; k < n; ++k) {
      buckets[k].table = h[k] * t.n_rows;
      buckets[k].begin = bin[k] < 0 ? 0 : t.bins[bin[k]];
      buckets[k].end = bin[k] < 0 ? 0 : t.bins[bin[k] + 1];
    }
  }

  void find_compact(const Code* codes, const std::int32_t* h, index_t n, const index_t* bin,
                    Bucket* buckets) const {
    const Code* bucket_codes = static_cast<const Code*>(t.bucket_codes);
    index_t first[kBlock], last[kBlock];
    for (index_t k = 0; k < n; ++k) {
      first[k] = t.first_bucket[h[k]] + t.bins[bin[k]];
      last[k] = t.first_bucket[h[k]] + t.bins[bin[k] + 1];
      __builtin_prefetch(bucket_codes + first[k]);
      __builtin_prefetch(t.bucket_starts + first[k]);
    }
    for (index_t k = 0; k < n; ++k) {
      index_t b = first[k];
      while (b < last[k] && bucket_codes[b] != codes[k]) ++b;
      buckets[k].table = h[k] * t.n_rows;
      buckets[k].begin = b < last[k] ? t.bucket_starts[b] : 0;
      buckets[k].end = b < last[k] ? t.bucket_starts[b + 1] : 0;
    }
  }
};

}  // namespace
}  // namespace lshkit

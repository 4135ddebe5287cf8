#pragma once
// Rows by bucket, hash by hash: a counting sort of the codes of queries and of keys.
#include "kernels.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr index_t kGroup = 8;  // hashes whose codes are brought together

// The rows of one hash that take part, by bucket.
struct Buckets {
  std::int32_t *query_order, *key_order, *query_start, *key_start;
  index_t count;

  index_t queries(index_t b) const { return query_start[b + 1] - query_start[b]; }
  index_t keys(index_t b) const { return key_start[b + 1] - key_start[b]; }
  // The first bucket from b on that has both; count: none.
  index_t pairs_from(index_t b) const {
    while (b < count && (queries(b) == 0 || keys(b) == 0)) ++b;
    return b;
  }
};

struct BucketSort {
  std::uint16_t *query_codes, *key_codes;  // (kGroup, rows): a group of hashes, each contiguous
  Buckets buckets;                         // of one hash: (rows) and (n_buckets + 1)
  std::uint16_t *number, *code_of;         // renumber's, (n_buckets) and (keys), or null

  BucketSort(const LowerBoundGradient& p, Cut& cut) {
    query_codes = cut.take<std::uint16_t>(kGroup * p.query.rows);
    key_codes = cut.take<std::uint16_t>(kGroup * p.key.rows);
    const bool sparse = p.key.rows < p.n_buckets / 2;
    const index_t most_buckets = sparse ? p.key.rows + 1 : p.n_buckets;
    buckets.query_order = cut.take<std::int32_t>(p.query.rows);
    buckets.key_order = cut.take<std::int32_t>(p.key.rows);
    buckets.query_start = cut.take<std::int32_t>(most_buckets + 1);
    buckets.key_start = cut.take<std::int32_t>(most_buckets + 1);
    number = sparse ? cut.take<std::uint16_t>(p.n_buckets) : nullptr;
    code_of = sparse ? cut.take<std::uint16_t>(p.key.rows) : nullptr;
  }
};

// to[h][i] = codes[i][first + h], for the n hashes from `first`.
template <class Code>
void bring_together(const void* codes, index_t rows, index_t n_hashes, index_t first, index_t n,
                    std::uint16_t* to) {
  const Code* from = static_cast<const Code*>(codes) + first;
  for (index_t i = 0; i < rows; ++i)
    for (index_t h = 0; h < n; ++h) to[h * rows + i] = from[i * n_hashes + h];
}

// Where most buckets must be empty: numbers the keys' codes from 0 in order of appearance, so that
// no empty bucket is looked at. Queries whose code no key has get the number after the last.
// Returns how many numbers the keys have. s.number is zero before and after.
index_t renumber(const BucketSort& s, std::uint16_t* query_codes, index_t n_queries,
                 std::uint16_t* key_codes, index_t n_keys) {
  index_t used = 0;
  for (index_t j = 0; j < n_keys; ++j) {
    std::uint16_t& number = s.number[key_codes[j]];
    if (number == 0) {
      s.code_of[used] = key_codes[j];
      number = std::uint16_t(++used);
    }
    key_codes[j] = std::uint16_t(number - 1);
  }
  for (index_t i = 0; i < n_queries; ++i) {
    const std::uint16_t number = s.number[query_codes[i]];
    query_codes[i] = std::uint16_t(number ? number - 1 : used);
  }
  for (index_t u = 0; u < used; ++u) s.number[s.code_of[u]] = 0;
  return used;
}

// Rows that take part, by bucket, in ascending order within each.
void counting_sort(const std::uint16_t* codes, index_t rows, const std::uint8_t* valid,
                   index_t n_buckets, std::int32_t* order, std::int32_t* start) {
  std::memset(start, 0, sizeof(*start) * (n_buckets + 1));
  for (index_t i = 0; i < rows; ++i) start[codes[i] + 1] += valid[i] != 0;
  for (index_t b = 0; b < n_buckets; ++b) start[b + 1] += start[b];
  for (index_t i = 0; i < rows; ++i)
    if (valid[i]) order[start[codes[i]]++] = std::int32_t(i);
  for (index_t b = n_buckets; b > 0; --b) start[b] = start[b - 1];
  start[0] = 0;
}

// Brings the rows of hash h's buckets together; hashes are asked for in turn.
void sort_hash(const LowerBoundGradient& p, const BucketSort& s, index_t h, Buckets& to) {
  if (h % kGroup == 0) {
    const index_t n = smaller(kGroup, p.n_hashes - h);
    const auto gather =
        p.code_bytes == 1 ? bring_together<std::uint8_t> : bring_together<std::uint16_t>;
    gather(p.query_codes, p.query.rows, p.n_hashes, h, n, s.query_codes);
    gather(p.key_codes, p.key.rows, p.n_hashes, h, n, s.key_codes);
  }
  std::uint16_t* query_codes = s.query_codes + h % kGroup * p.query.rows;
  std::uint16_t* key_codes = s.key_codes + h % kGroup * p.key.rows;
  index_t sorted = to.count = p.n_buckets;
  if (s.number) {
    to.count = renumber(s, query_codes, p.query.rows, key_codes, p.key.rows);
    sorted = to.count + 1;
  }
  counting_sort(query_codes, p.query.rows, p.query_valid, sorted, to.query_order, to.query_start);
  counting_sort(key_codes, p.key.rows, p.key_valid, sorted, to.key_order, to.key_start);
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

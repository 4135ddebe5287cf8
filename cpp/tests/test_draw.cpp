// Hash tables, draws and unions against what they mean, with all widths of codes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "check.hpp"
#include "lshkit/hash_tables.hpp"

using namespace lshkit;

namespace {

// Tables with their memory, laid out as Python lays it out.
template <class Code>
struct Owned {
  index_t n_rows, n_hashes;
  std::vector<Code> codes, bucket_codes;
  std::vector<std::int32_t> order, bins, bucket_starts;
  std::vector<index_t> first_bucket, n_buckets;
  std::vector<double> weights, sums;
  HashTables t;

  // n_codes: codes are below it; 0 builds compact tables.
  Owned(std::vector<Code> c, index_t n, index_t m, index_t n_codes, bool weighted, int threads)
      : n_rows(n), n_hashes(m), codes(std::move(c)), order(n * m, -7), n_buckets(m) {
    t.n_rows = n, t.n_hashes = m, t.code_bytes = sizeof(Code), t.order = order.data();
    int bits = 1;
    while (index_t(1) << bits < n) ++bits;
    t.n_bins = n_codes ? n_codes : index_t(1) << bits;
    bins.assign(m * (t.n_bins + 1), -7);
    t.bins = bins.data();
    if (!n_codes) {
      bucket_codes.resize(m * (n + 1));
      bucket_starts.resize(m * (n + 1));
      for (index_t h = 0; h < m; ++h) first_bucket.push_back(h * (n + 1));
      t.bucket_codes = bucket_codes.data(), t.bucket_starts = bucket_starts.data();
      t.first_bucket = first_bucket.data();
    }
    if (weighted) {
      for (index_t j = 0; j < n; ++j) weights.push_back(0.25 * (j % 4));
      sums.assign(n * m, -7);
      t.weights = weights.data(), t.weight_sums = sums.data();
    }
    build_hash_tables(t, {codes.data(), int(sizeof(Code))}, n_buckets.data(), threads);
  }

  std::vector<std::int32_t> bucket(index_t h, Code code) const {
    std::vector<std::int32_t> rows;
    for (index_t j = 0; j < n_rows; ++j)
      if (codes[j * n_hashes + h] == code) rows.push_back(std::int32_t(j));
    return rows;
  }
};

template <class Code>
std::vector<Code> random_codes(index_t count, std::uint64_t range, Code factor, int seed) {
  std::mt19937_64 rng(seed);
  std::vector<Code> codes(count);
  for (Code& code : codes) code = Code(Code(rng() % range) * factor);
  return codes;
}

template <class Code>
void check_union(const Owned<Code>& tables, const std::vector<Code>& queries, index_t n_queries,
                 index_t max_size) {
  const index_t n = tables.n_rows, m = tables.n_hashes;
  std::vector<std::int64_t> indptr(n_queries + 1), sizes(n_queries * m);
  bucket_sizes(tables.t, {queries.data(), int(sizeof(Code))}, n_queries, sizes.data(), 1);
  const BucketUnion found(tables.t, {queries.data(), int(sizeof(Code))}, n_queries, max_size,
                          indptr.data(), 2);
  std::vector<std::int32_t> indices(found.size()), counts(found.size());
  found.copy(indices.data(), counts.data(), 2);
  index_t at = 0;
  for (index_t i = 0; i < n_queries; ++i) {
    CHECK(indptr[i] == at);
    for (index_t j = 0; j < n; ++j) {
      int count = 0;
      for (index_t h = 0; h < m; ++h)
        count += sizes[i * m + h] <= max_size && tables.codes[j * m + h] == queries[i * m + h];
      if (!count) continue;
      CHECK(at < found.size() && indices[at] == j && counts[at] == count);
      ++at;
    }
  }
  CHECK(at == found.size());
}

template <class Code>
void check_tables(index_t n, index_t m, std::uint64_t range, Code factor, bool compact,
                  bool weighted) {
  const index_t n_queries = 37, n_samples = 11;
  const index_t n_codes = compact ? 0 : index_t(range);
  const auto codes = random_codes<Code>(n * m, range, factor, 1);
  const auto queries = random_codes<Code>(n_queries * m, range + 3, factor, 2);
  const Owned<Code> one(codes, n, m, n_codes, weighted, 1);
  const Owned<Code> two(codes, n, m, n_codes, weighted, 2);
  CHECK(one.order == two.order && one.bins == two.bins && one.sums == two.sums);
  CHECK(one.bucket_codes == two.bucket_codes && one.bucket_starts == two.bucket_starts);
  const Codes view{queries.data(), int(sizeof(Code))};

  std::vector<std::int64_t> sizes(n_queries * m);
  bucket_sizes(one.t, view, n_queries, sizes.data(), 2);
  std::vector<double> sums(n_queries * m);
  if (weighted) bucket_weights(one.t, view, n_queries, sums.data(), 2);

  for (bool rotate : {true, false}) {
    std::vector<std::int64_t> rows[2];
    std::vector<double> probabilities[2];
    std::vector<std::int32_t> tables[2];
    for (int threads : {1, 2}) {
      auto &r = rows[threads - 1], &unused = r;
      (void)unused;
      r.assign(n_queries * n_samples, -7);
      probabilities[threads - 1].assign(n_queries * n_samples, -7);
      tables[threads - 1].assign(n_queries * n_samples, -7);
      const Draws out{n_samples,
                      rotate,
                      5,
                      r.data(),
                      probabilities[threads - 1].data(),
                      tables[threads - 1].data()};
      draw(one.t, view, n_queries, out, threads);
    }
    CHECK(rows[0] == rows[1] && probabilities[0] == probabilities[1] && tables[0] == tables[1]);
    for (index_t k = 0; k < n_queries * n_samples; ++k) {
      const index_t query = k / n_samples, table = tables[0][k];
      CHECK(table >= 0 && table < m);
      if (!rotate) CHECK(table == k % n_samples % m);
      const auto bucket = one.bucket(table, queries[query * m + table]);
      CHECK(sizes[query * m + table] == index_t(bucket.size()));
      double total = 0;
      for (std::int32_t j : bucket) total += weighted ? one.weights[j] : 1;
      if (weighted) CHECK(sums[query * m + table] == total);
      const index_t row = rows[0][k];
      if (total == 0) {
        CHECK(row == -1 && probabilities[0][k] == 0);
      } else {
        CHECK(std::binary_search(bucket.begin(), bucket.end(), row));
        CHECK(probabilities[0][k] == (weighted ? one.weights[row] : 1) / total);
        CHECK(probabilities[0][k] > 0);
      }
    }
  }

  for (index_t max_size : {n, n / 4}) check_union(one, queries, n_queries, max_size);
}

}  // namespace

TEST(all_widths_and_layouts) {
  for (bool weighted : {false, true}) {
    check_tables<std::uint8_t>(300, 5, 40, 1, false, weighted);
    check_tables<std::uint8_t>(300, 5, 40, 1, true, weighted);
    check_tables<std::uint16_t>(1000, 70, 1500, 1, false, weighted);
    check_tables<std::uint16_t>(1000, 3, 90, 700, true, weighted);
    check_tables<std::uint32_t>(500, 4, 200, 0x9E3779B1u, true, weighted);
    check_tables<std::uint64_t>(2000, 9, 900, 0x9E3779B97F4A7C15u, true, weighted);
    check_tables<std::uint64_t>(2000, 2, 3000, 1, false, weighted);
  }
}

// A sort of rows by few codes: unions by counters, bins of many rows.
TEST(large_buckets) {
  check_tables<std::uint8_t>(700, 6, 2, 1, false, true);
  check_tables<std::uint64_t>(700, 6, 2, 1, true, true);
  check_tables<std::uint32_t>(700, 6, 1, 1, true, false);
}

TEST(small) {
  for (index_t n : {1, 2, 3}) {
    check_tables<std::uint16_t>(n, 1, 2, 1, false, true);
    check_tables<std::uint32_t>(n, 2, 2, 1u << 31, true, false);
  }
  check_tables<std::uint8_t>(0, 3, 2, 1, false, true);
  check_tables<std::uint64_t>(0, 3, 2, 1, true, true);
}

// Codes that share a bin and are not equal, more than an insertion sort takes.
TEST(codes_of_one_bin) {
  std::vector<std::uint64_t> codes;
  const auto bin = [](std::uint64_t code) {
    code *= 0x9E3779B97F4A7C15u;
    return ((code ^ (code >> 32)) * 0xD6E8FEB86659FD93u) >> 57;
  };
  for (std::uint64_t code = 0; codes.size() < 120; ++code)
    if (bin(code) == 3) codes.insert(codes.end(), 1 + code % 3, code);
  codes.resize(120);
  std::reverse(codes.begin(), codes.end());
  const Owned<std::uint64_t> tables(codes, 120, 1, 0, false, 1);
  const std::vector<std::uint64_t> queries(codes.rbegin(), codes.rend());
  std::vector<std::int64_t> sizes(120);
  bucket_sizes(tables.t, {queries.data(), 8}, 120, sizes.data(), 1);
  for (index_t i = 0; i < 120; ++i) CHECK(sizes[i] == index_t(tables.bucket(0, queries[i]).size()));
}

LSHKIT_TEST_MAIN

#include "code_buckets.hpp"

#include <cstring>

#include "parallel.hpp"

namespace lshkit {

CodeBuckets::CodeBuckets(Codes codes, index_t rows, index_t n_hashes,
                         const std::uint8_t* takes_part, index_t buckets, int threads)
    : n_buckets(buckets),
      n_rows(rows),
      start(n_hashes * (n_buckets + 1)),
      order(n_hashes * n_rows) {
  parallel_for(n_hashes, threads, [&](index_t h) {
    std::int32_t* first = &start[h * (n_buckets + 1)];
    const auto code = [&](index_t i) { return code_of(codes, i * n_hashes + h); };
    for (index_t i = 0; i < n_rows; ++i)
      if (!takes_part || takes_part[i]) ++first[code(i) + 1];
    for (index_t b = 0; b < n_buckets; ++b) first[b + 1] += first[b];
    // Placing a row moves its bucket's start on to the next one's: one bucket further in the end.
    for (index_t i = 0; i < n_rows; ++i)
      if (!takes_part || takes_part[i]) order[h * n_rows + first[code(i)]++] = std::int32_t(i);
    for (index_t b = n_buckets; b > 0; --b) first[b] = first[b - 1];
    first[0] = 0;
  });
}

double bucket_pairs(Codes queries, index_t n_queries, Codes keys, index_t n_keys, index_t n_hashes,
                    index_t n_buckets, int threads) {
  std::vector<double> pairs(n_hashes);
  parallel_for(n_hashes, threads, [&](index_t h) {
    std::vector<std::int32_t> count(n_buckets);
    for (index_t j = 0; j < n_keys; ++j) ++count[code_of(keys, j * n_hashes + h)];
    for (index_t i = 0; i < n_queries; ++i) pairs[h] += count[code_of(queries, i * n_hashes + h)];
  });
  double sum = 0;
  for (const double n : pairs) sum += n;
  return sum;
}

}  // namespace lshkit

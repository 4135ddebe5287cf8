#pragma once
// Rows by bucket: a counting sort of the codes of every hash.
#include <cstdint>
#include <vector>

#include "lshkit/tensor.hpp"

namespace lshkit {

inline index_t code_of(Codes codes, index_t at) {
  return codes.bytes == 1 ? static_cast<const std::uint8_t*>(codes.data)[at]
                          : static_cast<const std::uint16_t*>(codes.data)[at];
}

// The rows of each bucket of each hash, ascending.
struct CodeBuckets {
  index_t n_buckets, n_rows;
  std::vector<std::int32_t> start, order;  // (n_hashes, n_buckets + 1) and (n_hashes, n_rows)

  // takes_part: null, or (n_rows): 0 for a row that is in no bucket.
  CodeBuckets(Codes codes, index_t rows, index_t n_hashes, const std::uint8_t* takes_part,
              index_t buckets, int threads);
};

// Pairs of a query and a key in one bucket, summed over the hashes.
double bucket_pairs(Codes queries, index_t n_queries, Codes keys, index_t n_keys, index_t n_hashes,
                    index_t n_buckets, int threads);

}  // namespace lshkit

#pragma once
// The rows of a data set by their buckets, one table a hash, and the draw verb on them: members of
// a query's bucket with the exact probability of the draw.
#include <vector>

#include "lshkit/tensor.hpp"

namespace lshkit {

// Codes here are of 1, 2, 4 or 8 bytes. A table is found through bins. Direct tables, for codes
// from 0 to n_bins - 1, have a bin for each code. The others (compact) have 2^k bins >= n_rows,
// into which codes are hashed, and list each bin's occupied buckets.
struct HashTables {
  index_t n_rows = 0;    // below 2^31
  index_t n_hashes = 0;  // 1 to 65535
  index_t n_bins = 0;
  int code_bytes = 1;
  // (n_hashes, n_rows): rows by bucket, ascending in each.
  std::int32_t* order = nullptr;
  // (n_hashes, n_bins + 1): the place in order of a bin's first row; if compact, the number of its
  // first bucket.
  std::int32_t* bins = nullptr;
  // Compact tables only. Table h has its buckets' codes and the places of their first rows at
  // first_bucket[h] and on, and n_rows as one more place.
  void* bucket_codes = nullptr;
  std::int32_t* bucket_starts = nullptr;
  const index_t* first_bucket = nullptr;  // (n_hashes)
  // Weighted draws only: weights (n_rows), and (n_hashes, n_rows) sums over the rows of a bucket up
  // to each place.
  const double* weights = nullptr;
  double* weight_sums = nullptr;

  bool compact() const { return bucket_codes != nullptr; }
};

// Fills order, bins, bucket_codes, bucket_starts and weight_sums. Compact tables must have room for
// n_rows + 1 buckets a hash, and n_buckets (n_hashes) receives how many there are; else null.
// Time O(n_rows n_hashes): a radix sort in two passes, whose scratch is some 64 bytes a row and
// thread.
void build_hash_tables(const HashTables& tables, Codes codes, index_t* n_buckets, int threads);

// sizes (n_queries, n_hashes), or sums of weights.
void bucket_sizes(const HashTables& tables, Codes query_codes, index_t n_queries,
                  std::int64_t* sizes, int threads);
void bucket_weights(const HashTables& tables, Codes query_codes, index_t n_queries, double* sums,
                    int threads);

// Arrays (n_queries, n_samples). Sample t of query i comes from table (offset + t) % n_hashes, the
// offset uniform for each query where `rotate` says so, else 0. Row j of a bucket is drawn with
// probability 1 / size or weight_j / sum; where there is nothing to draw it is row -1 with
// probability 0. The random numbers depend on seed, query and sample alone.
struct Draws {
  index_t n_samples = 0;
  bool rotate = true;
  std::uint64_t seed = 0;
  std::int64_t* indices = nullptr;
  double* probabilities = nullptr;
  std::int32_t* tables = nullptr;
};
void draw(const HashTables& tables, Codes query_codes, index_t n_queries, const Draws& out,
          int threads);

// Every row that shares a bucket with a query, once and ascending, and in how many tables it does.
class BucketUnion {
 public:
  // Buckets of more than max_size rows are left out. indptr (n_queries + 1) is written.
  BucketUnion(const HashTables& tables, Codes query_codes, index_t n_queries, index_t max_size,
              std::int64_t* indptr, int threads);
  index_t size() const { return size_; }
  void copy(std::int32_t* indices, std::int32_t* counts, int threads) const;

 private:
  struct Part {  // of a run of queries
    std::vector<std::int32_t> rows, counts;
  };
  std::vector<Part> parts_;
  index_t size_ = 0;
};

}  // namespace lshkit

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "bucket_finder.hpp"
#include "counter_random.hpp"
#include "parallel.hpp"

namespace lshkit {
namespace {

// visit(pair, buckets, n) for the pairs [pair, pair + n) of a query and a hash in turn, n <=
// kBlock.
template <class Visit>
void for_each_bucket(const HashTables& t, Codes query_codes, index_t n_queries, int threads,
                     const Visit& visit) {
  constexpr index_t kPairs = 64 * kBlock;
  const index_t pairs = n_queries * t.n_hashes;
  with_code_type(t.code_bytes, [&](auto type) {
    using Code = decltype(type);
    const Code* codes = static_cast<const Code*>(query_codes.data);
    const Finder<Code> finder{t};
    parallel_for((pairs + kPairs - 1) / kPairs, threads, [&](index_t task) {
      const index_t end = std::min(pairs, (task + 1) * kPairs);
      index_t table = task * kPairs % t.n_hashes;
      for (index_t first = task * kPairs; first < end; first += kBlock) {
        const index_t n = std::min(kBlock, end - first);
        std::int32_t h[kBlock];
        for (index_t k = 0; k < n; ++k, table = table + 1 == t.n_hashes ? 0 : table + 1)
          h[k] = std::int32_t(table);
        Bucket buckets[kBlock];
        finder.find(codes + first, h, n, buckets);
        visit(first, buckets, n);
      }
    });
  });
}

// Where n <= kBlock uniform draws fall: places in order, or -1 in an empty bucket.
void draw_places(const HashTables& t, const Bucket* buckets, const std::uint64_t* words, index_t n,
                 index_t* places) {
  for (index_t k = 0; k < n; ++k) {
    const Bucket& b = buckets[k];
    const index_t at = b.table + b.begin + index_t(below(words[k], std::uint64_t(b.size())));
    places[k] = b.size() ? at : -1;
    __builtin_prefetch(t.order + (b.size() ? at : 0));
  }
}

// The same in proportion to the weights: the first place whose sum exceeds a uniform point.
void draw_weighted_places(const HashTables& t, const Bucket* buckets, const std::uint64_t* words,
                          index_t n, double* totals, index_t* places) {
  for (index_t k = 0; k < n; ++k)
    __builtin_prefetch(t.weight_sums + buckets[k].table + std::max(buckets[k].end - 1, 0));
  double points[kBlock];
  index_t sizes[kBlock], longest = 0;
  for (index_t k = 0; k < n; ++k) {
    const Bucket& b = buckets[k];
    sizes[k] = b.size();
    places[k] = b.table + b.begin;
    totals[k] = b.size() ? t.weight_sums[b.table + b.end - 1] : 0;
    // Below the total also where the product was rounded up to it.
    points[k] = std::min(unit_interval(words[k]) * totals[k], std::nextafter(totals[k], 0.0));
    longest = std::max(longest, sizes[k]);
  }
  // All searches take a step each in turn.
  for (index_t left = longest; left > 1; left -= left / 2)
    for (index_t k = 0; k < n; ++k) {
      if (sizes[k] <= 1) continue;
      const index_t half = sizes[k] / 2;
      const index_t right = t.weight_sums[places[k] + half - 1] <= points[k];
      places[k] += right * half;
      sizes[k] -= half;
      __builtin_prefetch(t.weight_sums + places[k] + sizes[k] / 2);
    }
  for (index_t k = 0; k < n; ++k) {
    if (!(totals[k] > 0)) places[k] = -1;
    __builtin_prefetch(t.order + std::max<index_t>(places[k], 0));
  }
}

template <class Code>
struct Drawer {
  const HashTables& t;
  const Code* codes;
  const Draws& out;
  const Finder<Code> finder{t};

  // Draws [first, first + n), n <= kBlock, counted over all queries' samples.
  void draw(index_t first, index_t n) const {
    std::int32_t h[kBlock];
    std::uint64_t words[kBlock];
    Code code[kBlock];
    index_t query = first / out.n_samples, sample = first % out.n_samples;
    for (index_t k = 0; k < n;) {
      const RandomStream random(out.seed, std::uint64_t(query));
      const index_t offset = out.rotate ? index_t(below(random.word(0), t.n_hashes)) : 0;
      index_t table = (offset + sample) % t.n_hashes;
      for (; k < n && sample < out.n_samples; ++k, ++sample) {
        h[k] = std::int32_t(table);
        words[k] = random.word(std::uint64_t(sample) + 1);
        code[k] = codes[query * t.n_hashes + table];
        if (++table == t.n_hashes) table = 0;
      }
      ++query, sample = 0;
    }
    Bucket buckets[kBlock];
    finder.find(code, h, n, buckets);
    index_t places[kBlock];
    double totals[kBlock];
    if (t.weights)
      draw_weighted_places(t, buckets, words, n, totals, places);
    else
      draw_places(t, buckets, words, n, places);
    for (index_t k = 0; k < n; ++k) {
      const index_t row = places[k] < 0 ? -1 : t.order[places[k]];
      if (t.weights) __builtin_prefetch(t.weights + std::max<index_t>(row, 0));
      out.indices[first + k] = row;
      out.tables[first + k] = h[k];
    }
    for (index_t k = 0; k < n; ++k) {
      const index_t row = out.indices[first + k];
      out.probabilities[first + k] = row < 0     ? 0
                                     : t.weights ? t.weights[row] / totals[k]
                                                 : 1 / double(buckets[k].size());
    }
  }
};

// ---- union ----
// A query's rows from ascending lists, gathered into one: each row once, with how many lists had
// it.
struct Merge {
  index_t n_rows;
  std::vector<std::int32_t> rows, spare, places;

  // LSD radix sort, by as few digits of up to 11 bits as there must be.
  void sort_rows() {
    const int bits = bit_length(std::uint64_t(n_rows - 1)), digits = (bits + 10) / 11;
    const int digit_bits = (bits + digits - 1) / digits;
    const std::uint32_t mask = (1u << digit_bits) - 1;
    spare.resize(rows.size());
    places.resize(mask + 1);
    for (int digit = 0; digit < digits; ++digit) {
      const int shift = digit * digit_bits;
      std::fill(places.begin(), places.end(), 0);
      for (std::int32_t row : rows) ++places[std::uint32_t(row) >> shift & mask];
      std::int32_t sum = 0;
      for (std::int32_t& place : places) sum += std::exchange(place, sum);
      for (std::int32_t row : rows) spare[places[std::uint32_t(row) >> shift & mask]++] = row;
      rows.swap(spare);
    }
  }

  // Returns how many rows are distinct.
  index_t append_sorted(std::vector<std::int32_t>* to, std::vector<std::int32_t>* counts) {
    if (rows.empty()) return 0;
    if (rows.size() < 256)
      std::sort(rows.begin(), rows.end());
    else
      sort_rows();
    const std::size_t before = to->size(), most = before + rows.size();
    to->resize(most), counts->resize(most);
    std::int32_t *row = to->data() + before, *count = counts->data() + before;
    *row = rows[0], *count = 0;
    for (std::int32_t next : rows) {
      const bool fresh = next != *row;
      row += fresh, count += fresh;
      *row = next;
      *count = fresh ? 1 : *count + 1;
    }
    const std::size_t n = row + 1 - to->data();
    to->resize(n), counts->resize(n);
    return index_t(n - before);
  }
};

template <class Code>
struct UnionPass {
  const HashTables& t;
  const index_t max_size;
  const Finder<Code> finder{t};
  std::vector<Bucket> buckets = std::vector<Bucket>(t.n_hashes);
  Merge merge{t.n_rows, {}, {}, {}};

  // Appends a query's rows and counts; returns their number.
  index_t append(const Code* codes, std::vector<std::int32_t>* rows,
                 std::vector<std::int32_t>* counts) {
    index_t total = 0;
    for (index_t first = 0; first < t.n_hashes; first += kBlock) {
      const index_t n = std::min(kBlock, t.n_hashes - first);
      std::int32_t h[kBlock];
      for (index_t k = 0; k < n; ++k) h[k] = std::int32_t(first + k);
      finder.find(codes + first, h, n, &buckets[first]);
      for (index_t k = 0; k < n; ++k) {
        Bucket& b = buckets[first + k];
        if (b.size() > max_size) b.end = b.begin;
        total += b.size();
        if (b.size()) __builtin_prefetch(t.order + b.table + b.begin);
      }
    }
    merge.rows.clear();
    if (total > t.n_rows / 2) return append_dense(rows, counts);
    for (const Bucket& b : buckets)
      merge.rows.insert(merge.rows.end(), t.order + b.table + b.begin, t.order + b.table + b.end);
    return merge.append_sorted(rows, counts);
  }
  // By a counter for each row of the tables, where the buckets hold as many.
  index_t append_dense(std::vector<std::int32_t>* rows, std::vector<std::int32_t>* counts) {
    merge.rows.resize(t.n_rows, 0);
    for (const Bucket& b : buckets)
      for (index_t k = b.begin; k < b.end; ++k) ++merge.rows[t.order[b.table + k]];
    const std::size_t before = rows->size();
    for (index_t j = 0; j < t.n_rows; ++j)
      if (merge.rows[j]) {
        rows->push_back(std::int32_t(j));
        counts->push_back(merge.rows[j]);
      }
    return index_t(rows->size() - before);
  }
};

}  // namespace

void bucket_sizes(const HashTables& t, Codes query_codes, index_t n_queries, std::int64_t* sizes,
                  int threads) {
  const auto visit = [&](index_t first, const Bucket* buckets, index_t n) {
    for (index_t k = 0; k < n; ++k) sizes[first + k] = buckets[k].size();
  };
  for_each_bucket(t, query_codes, n_queries, threads, visit);
}

void bucket_weights(const HashTables& t, Codes query_codes, index_t n_queries, double* sums,
                    int threads) {
  const auto visit = [&](index_t first, const Bucket* buckets, index_t n) {
    for (index_t k = 0; k < n; ++k)
      sums[first + k] =
          buckets[k].size() ? t.weight_sums[buckets[k].table + buckets[k].end - 1] : 0;
  };
  for_each_bucket(t, query_codes, n_queries, threads, visit);
}

void draw(const HashTables& t, Codes query_codes, index_t n_queries, const Draws& out,
          int threads) {
  constexpr index_t kDraws = 64 * kBlock;
  const index_t draws = n_queries * out.n_samples;
  with_code_type(t.code_bytes, [&](auto type) {
    using Code = decltype(type);
    const Drawer<Code> drawer{t, static_cast<const Code*>(query_codes.data), out};
    parallel_for((draws + kDraws - 1) / kDraws, threads, [&](index_t task) {
      const index_t end = std::min(draws, (task + 1) * kDraws);
      for (index_t first = task * kDraws; first < end; first += kBlock)
        drawer.draw(first, std::min(kBlock, end - first));
    });
  });
}

BucketUnion::BucketUnion(const HashTables& t, Codes query_codes, index_t n_queries,
                         index_t max_size, std::int64_t* indptr, int threads) {
  constexpr index_t kQueries = 32;
  parts_.resize((n_queries + kQueries - 1) / kQueries);
  with_code_type(t.code_bytes, [&](auto type) {
    using Code = decltype(type);
    parallel_for(index_t(parts_.size()), threads, [&](index_t task) {
      UnionPass<Code> pass{t, max_size};
      for (index_t i = task * kQueries; i < std::min(n_queries, (task + 1) * kQueries); ++i) {
        const Code* codes = static_cast<const Code*>(query_codes.data) + i * t.n_hashes;
        indptr[i + 1] = pass.append(codes, &parts_[task].rows, &parts_[task].counts);
      }
    });
  });
  indptr[0] = 0;
  for (index_t i = 0; i < n_queries; ++i) indptr[i + 1] += indptr[i];
  size_ = indptr[n_queries];
}

void BucketUnion::copy(std::int32_t* indices, std::int32_t* counts, int threads) const {
  std::vector<index_t> first(parts_.size() + 1);
  for (std::size_t p = 0; p < parts_.size(); ++p) first[p + 1] = first[p] + parts_[p].rows.size();
  parallel_for(index_t(parts_.size()), threads, [&](index_t p) {
    std::copy(parts_[p].rows.begin(), parts_[p].rows.end(), indices + first[p]);
    std::copy(parts_[p].counts.begin(), parts_[p].counts.end(), counts + first[p]);
  });
}

}  // namespace lshkit

#include "lshkit/partition_sums.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "code_buckets.hpp"
#include "near_rows.hpp"
#include "parallel.hpp"

namespace lshkit {
namespace {

constexpr index_t kRun = 32;  // queries that share a pass over the sample

// In how many of a query's buckets each row is, up to 3: two bits a row, so that the counts of a
// million rows stay in the L2 cache.
class Counts {
 public:
  Counts(std::uint8_t* bytes, index_t n_rows) : bytes_(bytes), size_(size(n_rows)) {}
  static index_t size(index_t n_rows) { return (n_rows + 3) / 4; }
  void clear() { std::memset(bytes_, 0, size_); }
  int of(std::int32_t row) const { return bytes_[row >> 2] >> shift(row) & 3; }
  // The count with this one.
  int add(std::int32_t row) {
    std::uint8_t& byte = bytes_[row >> 2];
    const int before = byte >> shift(row) & 3;
    byte = std::uint8_t(byte + (int(before < 3) << shift(row)));
    return before + 1;
  }

 private:
  static int shift(std::int32_t row) { return (row & 3) * 2; }
  std::uint8_t* bytes_;
  index_t size_;
};

struct RunScratch {
  std::uint8_t* counts;
  std::int32_t* near;  // rows
  float* logits;       // of the near rows
  float* far;          // (kRun, n_sample)
  float* kept;         // of a query's sample, the rows that are not near
  std::size_t bytes;

  RunScratch(Arena arena, const PartitionProblem& p)
      : counts(arena.take<std::uint8_t>(Counts::size(p.lists.n_rows))),
        near(arena.take<std::int32_t>(p.lists.n_rows + 1)),
        logits(arena.take<float>(p.lists.n_rows)),
        far(arena.take<float>(kRun * p.n_sample)),
        kept(arena.take<float>(p.n_sample)),
        bytes(arena.used()) {}
};

// The buckets of one query that have rows. Codes that no row has may lie beyond the tables.
void find_buckets(const PartitionProblem& p, index_t query, std::vector<RowRange>& buckets) {
  const BucketLists& lists = p.lists;
  const index_t first = query * lists.n_hashes * p.n_probes;
  const auto bucket_of = [&](index_t h, index_t t) -> const std::int32_t* {
    const index_t code = code_of(p.probes, first + h * p.n_probes + t);
    return code < lists.n_buckets ? lists.start + h * (lists.n_buckets + 1) + code : nullptr;
  };
  for (index_t h = 0; h < lists.n_hashes; ++h)
    for (index_t t = 0; t < p.n_probes; ++t) __builtin_prefetch(bucket_of(h, t));
  buckets.clear();
  for (index_t h = 0; h < lists.n_hashes; ++h)
    for (index_t t = 0; t < p.n_probes; ++t) {
      const std::int32_t* start = bucket_of(h, t);
      if (!start || start[0] == start[1]) continue;
      const std::int32_t* order = lists.order + h * lists.n_rows;
      buckets.push_back({order + start[0], order + start[1]});
    }
}

PartitionSums sums_of_query(const PartitionProblem& p, index_t query, float* far,
                            const std::vector<RowRange>& buckets, const RunScratch& s,
                            Counts& counts) {
  const index_t n_near =
      find_near(buckets.data(), buckets.data() + buckets.size(), int(p.min_count), counts, s.near);
  measure_rows(PairMeasure::product, p.queries + query * p.n_features, p.rows, p.n_features, s.near,
               n_near, s.logits);
  if (p.bias)
    for (index_t i = 0; i < n_near; ++i) s.logits[i] += p.bias[s.near[i]];
  index_t n_far = 0;
  for (index_t i = 0; i < p.n_sample; ++i) {
    s.kept[n_far] = far[i];
    n_far += counts.of(p.sample[i]) < p.min_count;
  }
  counts.clear();
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const float largest =
      kernels().largest_of(s.kept, n_far, kernels().largest_of(s.logits, n_near, kNone));
  if (n_near + n_far == 0) return {double(kNone), 0, 0, 0, 0, 0};
  const ExponentialSums near = kernels().exponential_sums(s.logits, n_near, largest);
  const ExponentialSums rest = kernels().exponential_sums(s.kept, n_far, largest);
  return {double(largest), near.sum, rest.sum, rest.squares, double(n_near), double(n_far)};
}

void sums(const PartitionProblem& p, const std::vector<float>& packed,
          const std::vector<float>& sample_bias, PartitionSums* out, int threads) {
  parallel_for((p.n_queries + kRun - 1) / kRun, threads, [&](index_t task) {
    const RunScratch size(Arena(), p);
    const RunScratch s(Arena(thread_scratch(size.bytes)), p);
    Counts counts(s.counts, p.lists.n_rows);
    counts.clear();
    const index_t first = task * kRun, run = std::min(kRun, p.n_queries - first);
    kernels().packed_products({p.queries + first * p.n_features, p.n_features, run, p.n_features},
                              packed.data(), p.n_sample, s.far, p.n_sample);
    std::vector<RowRange> buckets;
    for (index_t i = 0; i < run; ++i) {
      float* far = s.far + i * p.n_sample;
      for (index_t k = 0; k < index_t(sample_bias.size()); ++k) far[k] += sample_bias[k];
      find_buckets(p, first + i, buckets);
      out[first + i] = sums_of_query(p, first + i, far, buckets, s, counts);
    }
  });
}

}  // namespace

void partition_sums(const PartitionProblem& p, PartitionSums* out, int threads) {
  const Matrix<const float> rows{p.rows, p.n_features, p.lists.n_rows, p.n_features};
  const index_t panels = (p.n_sample + kListPanel - 1) / kListPanel;
  std::vector<float> packed(panels * kListPanel * p.n_features), bias;
  parallel_for(panels, threads, [&](index_t panel) {
    const index_t first = panel * kListPanel;
    kernels().pack_listed(rows, p.sample + first, std::min(kListPanel, p.n_sample - first),
                          packed.data() + first * p.n_features);
  });
  for (index_t i = 0; p.bias && i < p.n_sample; ++i) bias.push_back(p.bias[p.sample[i]]);
  sums(p, packed, bias, out, threads);
}

}  // namespace lshkit

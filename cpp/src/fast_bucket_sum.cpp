#include "fast_bucket_sum.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "bucket_slots.hpp"
#include "lshkit/runtime.hpp"
#include "parallel.hpp"

namespace lshkit {
namespace {

// The tables of a pass two slices wide, beside the rows that stream through the L2 cache.
index_t table_bytes() { return cache_sizes().l2 / 4; }
// Rounding moves a value by at most half a step: at most this many mean magnitudes of its column
// (not root mean squares, which one large value among small ones would raise). The errors of
// different keys are as good as independent, so a sum's, relative to the sum's own root mean
// square, is 1/sqrt(3) of it.
constexpr float kLargestError = 2e-3f;
constexpr float kWiden = 4;  // the step after an overflow
// Below, the sum of squares is too close to what float32 cannot hold.
constexpr float kLeastSquareSum = 1e-24f;

index_t row_bytes(const HeadSum<float>& s) { return s.n_buckets * kSliceBytes; }

// Keys in the fullest bucket of the first hash.
template <class Code>
index_t fullest_bucket(const HeadSum<float>& s, std::int32_t* in_bucket) {
  const Code* codes = static_cast<const Code*>(s.key_codes);
  std::memset(in_bucket, 0, sizeof(std::int32_t) * s.n_buckets);
  std::int32_t most = 0;
  for (index_t j = 0; j < s.n_keys; ++j)
    if (!s.key_mask || s.key_mask[j]) most = std::max(most, ++in_bucket[codes[j * s.n_hashes]]);
  return most;
}

// For one slice or two at once.
struct FastScratch {
  std::uint32_t* table;
  std::int16_t* values;
  float *to_integer, *to_output;  // of each column
  std::int32_t* in_bucket;
  std::size_t bytes;

  FastScratch(Arena arena, const HeadSum<float>& s, index_t group, index_t slices)
      : table(arena.take<std::uint32_t>(group * slices * row_bytes(s) / 4)),
        values(arena.take<std::int16_t>(s.n_keys * slices * kFastColumns)),
        to_integer(arena.take<float>(slices * kFastColumns)),
        to_output(arena.take<float>(slices * kFastColumns)),
        in_bucket(arena.take<std::int32_t>(s.n_buckets)),
        bytes(arena.used()) {}
};

class FastSum {
 public:
  FastSum(const HeadSum<float>& sum, index_t slices)
      : s_(sum),
        // The same for one slice as for two: every group's sum is rounded to float32.
        group_(std::clamp<index_t>(table_bytes() / (2 * row_bytes(s_)), 1,
                                   std::min<index_t>(kMaxGroup, s_.n_hashes))),
        at_once_(slices > 1 && 2 * row_bytes(s_) <= table_bytes() ? 2 : 1),
        scratch_(Arena(thread_scratch(FastScratch(Arena(), s_, group_, at_once_).bytes)), s_,
                 group_, at_once_) {
    valid_keys_ = s_.n_keys;
    if (s_.key_mask) valid_keys_ -= std::count(s_.key_mask, s_.key_mask + s_.n_keys, 0);
    fullest_ = s_.code_bytes == 1 ? fullest_bucket<std::uint8_t>(s_, scratch_.in_bucket)
                                  : fullest_bucket<std::uint16_t>(s_, scratch_.in_bucket);
  }
  index_t at_once() const { return at_once_; }

  // False where 16 bits do not do: the output may be anything. `widening` multiplies the steps.
  bool run(index_t slice, index_t count, float widening) {
    for (index_t i = 0; i < count; ++i)
      if (!choose_steps(slice + i, widening, scratch_.to_integer + i * kFastColumns)) {
        too_coarse_ = true;
        return false;
      }
    return sum(slice, count);
  }
  // The same for one slice, with wider steps while a bucket overflows.
  bool run_alone(index_t slice) {
    too_coarse_ = false;
    for (float widening = 1; !too_coarse_; widening *= kWiden)
      if (run(slice, 1, widening)) return true;
    return false;
  }

 private:
  Matrix<const float> values(index_t slice, index_t count) const {
    const index_t first = slice * kFastColumns;
    return {s_.values.data + first, s_.values.stride, s_.n_keys,
            std::min(count * kFastColumns, s_.values.columns - first)};
  }
  bool choose_steps(index_t slice, float widening, float* to_integer) const {
    const Matrix<const float> v = values(slice, 1);
    FastColumnSums sums;
    kernels().fast_column_sums(v, s_.key_mask, &sums);
    const float keys = float(fullest_), count = float(valid_keys_);
    for (index_t c = 0; c < kFastColumns; ++c) {
      to_integer[c] = 0;
      if (c >= v.columns || valid_keys_ == 0) continue;
      const float largest = sums.largest[c], square_sum = sums.square_sum[c];
      if (largest == 0 && square_sum == 0) continue;
      if (!std::isfinite(square_sum) || square_sum < kLeastSquareSum) return false;
      // What to expect of the sum of a bucket: means, five standard deviations, one more key.
      const float mean = std::fabs(sums.sum[c]) / count, rms = std::sqrt(square_sum / count);
      const float bound = 1.5f * keys * mean + 5 * std::sqrt(keys) * rms + largest;
      to_integer[c] = 32767 / (widening * bound);
      const float magnitude = sums.magnitude_sum[c] / count;
      if (!(0.5f <= kLargestError * magnitude * to_integer[c])) return false;
    }
    return true;
  }
  // False if a bucket left 16 bits.
  bool sum(index_t slice, index_t count) const {
    for (index_t c = 0; c < count * kFastColumns; ++c)
      scratch_.to_output[c] = scratch_.to_integer[c] > 0 ? s_.scale / scratch_.to_integer[c] : 0;
    const Matrix<const float> v = values(slice, count);
    kernels().fast_values(v, scratch_.to_integer, scratch_.values, count * kFastColumns);
    FastSumPass pass;
    pass.code_stride = s_.n_hashes;
    pass.code_bytes = s_.code_bytes;
    pass.n_queries = s_.n_queries;
    pass.n_keys = s_.n_keys;
    pass.table_rows = s_.n_buckets;
    pass.values = scratch_.values;
    pass.value_stride = count * kFastColumns;
    pass.slices = int(count);
    pass.width = int(v.columns);
    pass.key_mask = s_.key_mask;
    pass.causal = s_.order == Order::causal;
    pass.scale = scratch_.to_output;
    pass.out = s_.out.data + slice * kFastColumns;
    pass.out_stride = s_.out.stride;
    pass.table = scratch_.table;
    for (index_t hash = 0; hash < s_.n_hashes; hash += group_) {
      pass.query_codes = static_cast<const char*>(s_.query_codes) + hash * s_.code_bytes;
      pass.key_codes = static_cast<const char*>(s_.key_codes) + hash * s_.code_bytes;
      pass.group = int(std::min(group_, s_.n_hashes - hash));
      pass.accumulate = hash > 0;
      if (!kernels().fast_bucket_sum(pass)) return false;
    }
    return true;
  }

  const HeadSum<float>& s_;
  index_t group_, at_once_, valid_keys_, fullest_;
  FastScratch scratch_;
  bool too_coarse_ = false;
};

}  // namespace

void fast_sum_slices(const HeadSum<float>& s, index_t first, index_t last) {
  std::vector<index_t> full;
  // With most buckets empty, or tables larger than the cache, halving them gains nothing.
  if (BucketSlots::pay(s.n_keys, s.n_buckets) || 2 * row_bytes(s) > table_bytes()) {
    for (index_t slice = first; slice < last; ++slice) full.push_back(slice);
  } else {
    FastSum sum(s, last - first);
    for (index_t slice = first; slice < last; slice += sum.at_once()) {
      const index_t count = std::min(sum.at_once(), last - slice);
      if (sum.run(slice, count, 1)) continue;
      for (index_t i = slice; i < slice + count; ++i)
        if (!sum.run_alone(i)) full.push_back(i);
    }
  }
  constexpr index_t kSlices = kFastColumns / (kSliceBytes / sizeof(float));  // of sum_slices
  for (const index_t slice : full)
    sum_slices(s, kSlices * slice,
               std::min(kSlices * (slice + 1), slice_count<float>(s.values.columns)));
}

}  // namespace lshkit

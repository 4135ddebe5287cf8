#include "fast_bucket_sum.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "fast_steps.hpp"
#include "parallel.hpp"
#include "sum_passes.hpp"

namespace lshkit {
namespace {

// In mean magnitudes of a column. The errors of different keys are as good as independent, so a
// sum's, relative to the sum's own root mean square, is 1/sqrt(3) of it.
constexpr float kLargestError = 2e-3f;
constexpr float kWiden = 4;  // the step after an overflow
// Fewer keys are summed in float32: packed sequences of a few rows are rounded once, and what 16
// bits would gain is little beside the rest of such a call.
constexpr index_t kLeastKeys = 64;

// What the first hash says: the keys in its fullest bucket, and the queries that read each key's.
// counts: of queries and of keys, of each bucket.
template <class Code>
FastAdded added_by(const HeadSum<float>& s, std::int32_t* counts, float* readers) {
  const Code* query_codes = static_cast<const Code*>(s.query_codes);
  const Code* key_codes = static_cast<const Code*>(s.key_codes);
  std::memset(counts, 0, 2 * sizeof(std::int32_t) * s.n_buckets);
  for (index_t i = 0; i < s.n_queries; ++i) ++counts[query_codes[i * s.n_hashes]];
  FastAdded added{s.key_mask, 0, 0, 0};
  added.readers = readers;
  std::int32_t most = 0;
  for (index_t j = 0; j < s.n_keys; ++j) {
    if (s.key_mask && !s.key_mask[j]) continue;
    const index_t bucket = key_codes[j * s.n_hashes];
    readers[j] = float(counts[bucket]);
    most = std::max(most, ++counts[s.n_buckets + bucket]);
    ++added.count;
  }
  added.weight = added.square = float(most);
  return added;
}

// For one slice or two at once.
struct FastMemory {
  PassCodes codes;
  std::uint32_t* table;
  std::int16_t* values;
  float *out, *to_integer, *to_output;  // the latter of each column
  std::int32_t* counts;
  float* readers;
  std::size_t bytes;

  FastMemory(Arena arena, const HeadSum<float>& s, const SumCut& cut, index_t slices)
      : codes(arena, s, cut) {
    const index_t columns = slices * kFastColumns;
    table = arena.take<std::uint32_t>(cut.group * cut.table_rows * columns / 2);
    values = arena.take<std::int16_t>(s.n_keys * columns);
    out = arena.take<float>(cut.packed ? s.n_queries * columns : 0);
    to_integer = arena.take<float>(columns);
    to_output = arena.take<float>(columns);
    counts = arena.take<std::int32_t>(2 * s.n_buckets);
    readers = arena.take<float>(s.n_keys);
    bytes = arena.used();
  }
};

class FastSum {
 public:
  FastSum(const HeadSum<float>& sum, index_t slices)
      : s_(sum),
        cut_(s_, s_.values.columns * index_t(sizeof(float))),
        at_once_(std::min<index_t>(slices, cut_.at_once)),
        memory_(Arena(thread_scratch(FastMemory(Arena(), s_, cut_, at_once_).bytes)), s_, cut_,
                at_once_) {
    added_ = s_.code_bytes == 1 ? added_by<std::uint8_t>(s_, memory_.counts, memory_.readers)
                                : added_by<std::uint16_t>(s_, memory_.counts, memory_.readers);
    memory_.codes.arrange();
  }
  index_t at_once() const { return at_once_; }

  // False where 16 bits do not do: the output may be anything. `widening` multiplies the steps.
  bool run(index_t slice, index_t count, float widening) {
    too_coarse_ = !choose_steps(values(slice, count), count, added_, kLargestError, widening,
                                memory_.to_integer);
    return !too_coarse_ && sum(slice, count);
  }
  // The same for one slice, with wider steps while a bucket overflows.
  bool run_alone(index_t slice) {
    for (float widening = 1;; widening *= kWiden) {
      if (run(slice, 1, widening)) return true;
      if (too_coarse_) return false;
    }
  }

 private:
  FloatRows values(index_t slice, index_t count) const {
    FloatRows all = s_.values;
    if (!s_.values.data && s_.source.data) {
      const RowPosition at = s_.source_at;
      all = {s_.source.row(at.batch, at.head, at.row), s_.source.row_stride, s_.n_keys,
             s_.values.columns, s_.source.element};
    }
    return all.slice(slice * kFastColumns, count * kFastColumns);
  }
  // False if a bucket left 16 bits.
  bool sum(index_t slice, index_t count) const {
    for (index_t c = 0; c < count * kFastColumns; ++c)
      memory_.to_output[c] = memory_.to_integer[c] > 0 ? s_.scale / memory_.to_integer[c] : 0;
    const FloatRows v = values(slice, count);
    kernels().fast_values(v, memory_.to_integer, memory_.values, count * kFastColumns);
    const Matrix<float> out{s_.out.data + slice * kFastColumns, s_.out.stride, s_.n_queries,
                            v.columns};
    const Matrix<float> sums =
        cut_.packed ? Matrix<float>{memory_.out, v.columns, s_.n_queries, v.columns} : out;
    FastSumPass pass;
    pass.values = memory_.values;
    pass.value_stride = count * kFastColumns;
    pass.slices = int(count);
    pass.width = int(v.columns);
    pass.scale = memory_.to_output;
    pass.out = sums.data;
    pass.out_stride = sums.stride;
    pass.table = memory_.table;
    for (index_t hash = 0; hash < s_.n_hashes; hash += cut_.group) {
      memory_.codes.select(hash, pass);
      if (!kernels().fast_bucket_sum(pass)) return false;
    }
    for (index_t i = 0; cut_.packed && i < s_.n_queries; ++i)
      std::memcpy(out.row(i), sums.row(i), sizeof(float) * v.columns);
    return true;
  }

  const HeadSum<float>& s_;
  SumCut cut_;
  index_t at_once_;
  FastAdded added_;
  FastMemory memory_;
  bool too_coarse_ = false;
};

}  // namespace

void fast_sum_slices(const HeadSum<float>& head, index_t first, index_t last) {
  constexpr index_t kSlices = kFastColumns / (kSliceBytes / sizeof(float));  // of sum_by_tables
  const auto end = [&](index_t slice) {
    return std::min(kSlices * slice, slice_count<float>(head.values.columns));
  };
  HeadSum<float> s = head;
  if (pairs_pay(s)) s.need_values();
  s.first_query = sum_by_pairs(s, kSlices * first, end(last));
  if (s.first_query == s.n_queries) return;
  std::vector<index_t> full;
  // The steps of 16 bits follow from all keys, of which a query of another order sees some alone.
  if (s.n_keys < kLeastKeys || s.order != Order::all) {
    for (index_t slice = first; slice < last; ++slice) full.push_back(slice);
  } else if (first < last) {
    FastSum sum(s, last - first);
    for (index_t slice = first; slice < last; slice += sum.at_once()) {
      const index_t count = std::min(sum.at_once(), last - slice);
      if (sum.run(slice, count, 1)) continue;
      for (index_t i = slice; i < slice + count; ++i)
        if (!sum.run_alone(i)) full.push_back(i);
    }
  }
  if (!full.empty()) s.need_values();
  for (const index_t slice : full) sum_by_tables(s, kSlices * slice, end(slice + 1));
}

}  // namespace lshkit

#pragma once
// Arrays of hash tables as Python keeps them.
#include <memory>
#include <vector>

#include "checks.hpp"
#include "lshkit/hash_tables.hpp"

namespace lshkit {
namespace {

// The arrays of HashTables. Python keeps them together: order, bins, bucket_codes, bucket_starts,
// first_bucket (the last three None if direct), weights, weight_sums (None if not weighted).
class TableViews {
 public:
  TableViews(const py::tuple& arrays, ElementType code, bool building) {
    if (arrays.size() != 7) throw py::value_error("tables: 7 arrays are wanted");
    const TensorView& order = add("order", arrays[0]);
    const TensorView& bins = add("bins", arrays[1]);
    order.require_type({kInt32}).require_dims(2, "(n_hashes, n_rows)").require_contiguous();
    check_rows("order", order.shape(1));
    t_.n_hashes = check_range("n_hashes", order.shape(0), 1, 65535);
    t_.n_rows = order.shape(1);
    bins.require_type({kInt32}).require_shape({t_.n_hashes, TensorView::kAny});
    bins.require_contiguous();
    t_.n_bins = check_range("n_bins", bins.shape(1) - 1, 1, index_t{1} << 32);
    if (building) order.require_output(), bins.require_output();
    t_.code_bytes = code.bits / 8;
    t_.order = order.data<std::int32_t>();
    t_.bins = bins.data<std::int32_t>();
    if (!arrays[2].is_none()) {
      const TensorView& codes = add("bucket_codes", arrays[2]);
      const TensorView& starts = add("bucket_starts", arrays[3]);
      const TensorView& first = add("first_bucket", arrays[4]);
      codes.require_type({code}).require_dims(1, "(buckets)").require_contiguous();
      starts.require_type({kInt32}).require_shape({codes.shape(0)}).require_contiguous();
      first.require_type({kInt64}).require_shape({t_.n_hashes}).require_contiguous();
      if (t_.n_bins < 2 || (t_.n_bins & (t_.n_bins - 1)) != 0)
        bins.wrong_value("a power of two >= 2 of bins is wanted, was " + std::to_string(t_.n_bins));
      if (building && codes.shape(0) != t_.n_hashes * (t_.n_rows + 1))
        codes.wrong_value("room for n_hashes * (n_rows + 1) buckets is wanted");
      t_.bucket_codes = codes.data<void>();
      t_.bucket_starts = starts.data<std::int32_t>();
      t_.first_bucket = first.data<const index_t>();
    }
    if (!arrays[5].is_none()) {
      const TensorView& weights = add("weights", arrays[5]);
      const TensorView& sums = add("weight_sums", arrays[6]);
      weights.require_type({kFloat64}).require_shape({t_.n_rows}).require_contiguous();
      sums.require_type({kFloat64}).require_shape({t_.n_hashes, t_.n_rows}).require_contiguous();
      if (building) sums.require_output();
      t_.weights = weights.data<const double>();
      t_.weight_sums = sums.data<double>();
    }
  }
  const HashTables& tables() const { return t_; }

 private:
  const TensorView& add(const char* name, py::handle object) {
    return *views_.emplace_back(std::make_unique<TensorView>(name, object));
  }
  std::vector<std::unique_ptr<TensorView>> views_;
  HashTables t_;
};

inline const TensorView& check_any_codes(const TensorView& codes, const HashTables& t) {
  codes.require_shape({TensorView::kAny, t.n_hashes}).require_contiguous();
  return codes;
}
inline ElementType code_type_of(const TensorView& codes) {
  codes.require_type({kUint8, kUint16, kUint32, kUint64});
  return codes.type();
}
inline Codes view_of(const TensorView& codes) {
  return {codes.data<const void>(), codes.type().bits / 8};
}

}  // namespace
}  // namespace lshkit

// lshkit._C: codes of bins.
#include "lshkit/binned_hash.hpp"

#include <optional>

#include "bindings.hpp"
#include "checks.hpp"

namespace lshkit {
namespace {

bool hash_bins(const TensorView& x, const BinnedFunctions& functions, const TensorView& codes,
               int threads) {
  const int bytes = functions.code_bytes();
  codes.require_type({bytes == 4 ? kUint32 : bytes == 2 ? kUint16 : kUint8});
  codes.require_shape({x.shape(0), functions.n_hashes});
  codes.require_contiguous().require_output();
  if (codes.size() == 0) return true;
  WithoutGil without_gil;
  bool finite = true;
  dispatch(x.type(), [&](auto zero) {
    using T = decltype(zero);
    finite = binned_hash(functions, x.data<const T>(), x.stride(0), x.shape(0), codes.data<void>(),
                         threads);
  });
  return finite;
}

const TensorView& check_rows_of(const TensorView& x) {
  return x.require_type({kFloat32, kFloat64})
      .require_dims(2, "(rows, n_features)")
      .require_contiguous_rows();
}

bool euclidean_hash(py::handle x_object, py::handle directions_object, py::handle shifts_object,
                    py::handle multipliers_object, py::handle codes_object, int threads) {
  const TensorView x("x", x_object), directions("directions", directions_object);
  const TensorView shifts("shifts", shifts_object), multipliers("multipliers", multipliers_object);
  const TensorView codes("codes", codes_object);
  check_rows_of(x);
  directions.require_type({kFloat64}).require_dims(3, "(n_hashes, n_bits, n_features)");
  directions.require_shape({TensorView::kAny, TensorView::kAny, x.shape(1)}).require_contiguous();
  const index_t n_hashes = directions.shape(0), n_bits = directions.shape(1);
  check_range("n_bits", n_bits, 1, index_t{1} << 16);
  shifts.require_type({kFloat64}).require_shape({n_hashes, n_bits}).require_contiguous();
  multipliers.require_type({kUint32}).require_shape({n_hashes, n_bits}).require_contiguous();
  const BinnedFunctions functions{directions.data<const double>(),
                                  shifts.data<const double>(),
                                  multipliers.data<const std::uint32_t>(),
                                  x.shape(1),
                                  n_hashes,
                                  n_bits};
  return hash_bins(x, functions, codes, threads);
}

bool random_binning_hash(py::handle x_object, py::handle scales_object, py::handle shifts_object,
                         py::handle multipliers_object, py::handle codes_object, int threads,
                         py::handle fold_object, int fold_bits) {
  const TensorView x("x", x_object), scales("scales", scales_object);
  const TensorView shifts("shifts", shifts_object), multipliers("multipliers", multipliers_object);
  const TensorView codes("codes", codes_object);
  check_rows_of(x);
  scales.require_type({kFloat64}).require_dims(2, "(n_hashes, n_features)");
  scales.require_shape({TensorView::kAny, x.shape(1)}).require_contiguous();
  const index_t n_hashes = scales.shape(0);
  shifts.require_type({kFloat64}).require_shape({n_hashes, x.shape(1)}).require_contiguous();
  multipliers.require_type({kUint32}).require_shape({n_hashes, x.shape(1)}).require_contiguous();
  BinnedFunctions functions{scales.data<const double>(),
                            shifts.data<const double>(),
                            multipliers.data<const std::uint32_t>(),
                            x.shape(1),
                            n_hashes,
                            0};
  std::optional<TensorView> fold;
  if (read_array(fold, "fold", fold_object, kUint64, {2, n_hashes})) {
    functions.fold = fold->data<const std::uint64_t>();
    functions.fold_bits = int(check_range("fold_bits", fold_bits, 1, 16));
  }
  return hash_bins(x, functions, codes, threads);
}

}  // namespace

void bind_binned_hash(py::module_& module) {
  using namespace pybind11::literals;
  module.def("euclidean_hash", &euclidean_hash, "x"_a, "directions"_a, "shifts"_a, "multipliers"_a,
             "codes"_a, "threads"_a = 0);
  module.def("random_binning_hash", &random_binning_hash, "x"_a, "scales"_a, "shifts"_a,
             "multipliers"_a, "codes"_a, "threads"_a = 0, "fold"_a = py::none(), "fold_bits"_a = 0);
}

}  // namespace lshkit

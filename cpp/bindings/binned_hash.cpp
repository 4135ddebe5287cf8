// lshkit._C: codes of bins.
#include "lshkit/binned_hash.hpp"

#include "bindings.hpp"
#include "checks.hpp"

namespace lshkit {
namespace {

void hash_bins(const TensorView& x, const BinnedFunctions& functions, const TensorView& codes,
               int threads) {
  codes.require_type({kUint32}).require_shape({x.shape(0), functions.n_hashes});
  codes.require_contiguous().require_output();
  if (codes.size() == 0) return;
  WithoutGil without_gil;
  dispatch(x.type(), [&](auto zero) {
    using T = decltype(zero);
    binned_hash(functions, x.data<const T>(), x.stride(0), x.shape(0), codes.data<std::uint32_t>(),
                threads);
  });
}

const TensorView& check_rows_of(const TensorView& x) {
  return x.require_type({kFloat32, kFloat64})
      .require_dims(2, "(rows, n_features)")
      .require_contiguous_rows();
}

void euclidean_hash(py::handle x_object, py::handle directions_object, py::handle shifts_object,
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
  hash_bins(x, functions, codes, threads);
}

void random_binning_hash(py::handle x_object, py::handle scales_object, py::handle shifts_object,
                         py::handle multipliers_object, py::handle codes_object, int threads) {
  const TensorView x("x", x_object), scales("scales", scales_object);
  const TensorView shifts("shifts", shifts_object), multipliers("multipliers", multipliers_object);
  const TensorView codes("codes", codes_object);
  check_rows_of(x);
  scales.require_type({kFloat64}).require_dims(2, "(n_hashes, n_features)");
  scales.require_shape({TensorView::kAny, x.shape(1)}).require_contiguous();
  const index_t n_hashes = scales.shape(0);
  shifts.require_type({kFloat64}).require_shape({n_hashes, x.shape(1)}).require_contiguous();
  multipliers.require_type({kUint32}).require_shape({n_hashes, x.shape(1)}).require_contiguous();
  const BinnedFunctions functions{scales.data<const double>(),
                                  shifts.data<const double>(),
                                  multipliers.data<const std::uint32_t>(),
                                  x.shape(1),
                                  n_hashes,
                                  0};
  hash_bins(x, functions, codes, threads);
}

}  // namespace

void bind_binned_hash(py::module_& module) {
  using namespace pybind11::literals;
  module.def("euclidean_hash", &euclidean_hash, "x"_a, "directions"_a, "shifts"_a, "multipliers"_a,
             "codes"_a, "threads"_a = 0);
  module.def("random_binning_hash", &random_binning_hash, "x"_a, "scales"_a, "shifts"_a,
             "multipliers"_a, "codes"_a, "threads"_a = 0);
}

}  // namespace lshkit

#pragma once
// Which steps of 16-bit integers hold the sums of a table's buckets.
#include <algorithm>
#include <cmath>

#include "kernels/kernels.hpp"

namespace lshkit {

// Rows that are added to tables, and the fullest bucket that they are expected to have: its sum of
// weights, and of their squares. Of weighted sums, which are rounded as they are added and read: a
// sum has noise * step^2 of variance from this, and signal times the mean square of a column.
struct FastAdded {
  const std::uint8_t* valid;
  index_t count;  // of valid rows
  float weight, square;
  float noise = 0, signal = 0;
  float most_spread = INFINITY;  // the largest value of a column, in mean magnitudes
  // In proportion to a row's share of what is read: how many rows read its bucket, or (weighted)
  // the squares of their weights times those of its own.
  const float* readers = nullptr;
};

// to_integer = 1 / step of the columns of so many slices, one or two; 0 for columns of zeros, and
// behind the last one. `widening` multiplies the steps. Rounding moves a value by at most half a
// step: false if that is more than largest_error mean magnitudes of its column (not root mean
// squares, which one large value among small ones would raise), if a sum's noise is more than that
// part of its signal, if values are spread too far, or if a column has one that is not finite. The
// mean over all rows or over what is read (but for zeros), whichever is less: a gradient through
// normalised rows is small where many rows collide.
inline bool choose_steps(const FloatRows& values, index_t slices, const FastAdded& added,
                         float largest_error, float widening, float* to_integer) {
  // Below, the sum of squares is too close to what float32 cannot hold.
  constexpr float kLeastSquareSum = 1e-24f;
  FastColumnSums sums;
  kernels().fast_column_sums(values, added.valid, added.readers, &sums);
  const float count = float(added.count);
  std::fill_n(to_integer, slices * kFastColumns, 0.0f);
  for (index_t c = 0; c < values.columns && added.count > 0; ++c) {
    const float largest = sums.largest[c], square_sum = sums.square_sum[c];
    if (largest == 0 && square_sum == 0) continue;
    if (!std::isfinite(square_sum) || square_sum < kLeastSquareSum) return false;
    // What to expect of the sum of a bucket: means, five standard deviations, one more row.
    const float mean = std::fabs(sums.sum[c]) / count, rms = std::sqrt(square_sum / count);
    const float spread = std::sqrt(std::max(rms * rms - mean * mean, 1e-4f * rms * rms));
    const float bound = 1.5f * added.weight * mean + 5 * std::sqrt(added.square) * spread + largest;
    to_integer[c] = 32767 / (widening * bound);
    float magnitude = sums.magnitude_sum[c] / count, met = rms;
    if (sums.weight_sum[c] > 0) {
      const float read = sums.weighted_magnitude_sum[c] / sums.weight_sum[c];
      met *= std::min(1.0f, read / magnitude);
      magnitude = std::min(magnitude, read);
    }
    if (!(0.5f <= largest_error * magnitude * to_integer[c])) return false;
    const float signal = largest_error * met * to_integer[c];
    if (!(added.noise <= signal * signal * added.signal || added.noise == 0)) return false;
    if (!(largest <= added.most_spread * magnitude)) return false;
  }
  return true;
}

}  // namespace lshkit

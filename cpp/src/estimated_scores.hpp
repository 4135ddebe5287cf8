#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "counter_random.hpp"
#include "kernels/code_cache.hpp"

// What estimated scores of keys tell: see reference/code_cache.py.
namespace lshkit {

inline constexpr int kUnit = 64;              // estimates are integers, in 1/64 nat
inline constexpr index_t kNoise = 1 << 14;    // entries of the table of exponential variates
inline constexpr index_t kSegment = 1 << 12;  // keys that read the table from the same place
inline constexpr double kSharpness = 0.75;    // the probability grows as exp(0.75 estimate)
inline constexpr index_t kCounted = 4096;     // most keys that are counted to find the threshold
inline constexpr int kBin = 16;               // units of a bin of that count
inline constexpr double kFarthest = 3.5;  // deviations of an estimate's error, that are expected

// One exponential variate of each 1 / kNoise of the distribution, in random order, and the share of
// them that is t or more.
struct Noise {
  std::vector<std::int16_t> table;  // the first ones again behind the last
  std::vector<float> survival;

  Noise() : table(kNoise + kSegment + kSelectPadding) {
    const RandomStream random(0, 0);
    std::vector<std::pair<std::uint64_t, index_t>> order(kNoise);
    for (index_t i = 0; i < kNoise; ++i) order[i] = {random.word(i), i};
    std::sort(order.begin(), order.end());
    for (index_t i = 0; i < kNoise; ++i)
      table[order[i].second] =
          std::int16_t(std::floor(-kUnit * std::log((i + 0.5) / kNoise) + 0.5));
    survival.assign(*std::max_element(table.begin(), table.begin() + kNoise) + 1, 0);
    for (index_t i = 0; i < kNoise; ++i) ++survival[table[i]];
    for (std::size_t t = survival.size() - 1; t-- > 0;) survival[t] += survival[t + 1];
    for (float& share : survival) share /= float(kNoise);
    for (std::size_t i = kNoise; i < table.size(); ++i) table[i] = table[i - kNoise];
  }
  // Of a key whose estimate is `gap` below the threshold.
  float probability(int gap, int floor) const {
    const int at = std::min(gap, floor), last = int(survival.size()) - 1;
    return survival[std::clamp(at, 0, last)];
  }
};
inline const Noise& noise() {
  static const Noise tables;
  return tables;
}

// What the estimates of some of the keys tell of all that are not read anyway: their counts by bins
// and the squared weights that are expected (reference: Estimated).
class Estimated {
 public:
  // codes: of all keys, with their norms in bytes. sharp: units in a nat. variance: of the error at
  // a norm of 1, of which estimates have `part` in them. offset: what all scores have besides.
  Estimated(const std::int16_t* estimates, const std::uint8_t* codes, index_t n_bits, index_t first,
            index_t last, double sharp, double variance, double part, double offset)
      : estimates_(estimates),
        codes_(codes),
        row_(n_bits / 8),
        sharp_(sharp),
        variance_(variance),
        part_(part) {
    const index_t n = last - first;
    const index_t stride = (n + kCounted - 1) / kCounted | 1;  // odd: tokens may alternate
    constexpr int kBins = 65536 / kBin, kSquares = 40;  // bits of squared norms; above, the count
    std::int64_t sums[kBins] = {};
    const auto bin = [](std::int16_t e) { return unsigned(int(e) + 32768) / kBin; };
    for (std::size_t j = first; j < std::size_t(last); j += stride)
      sums[bin(estimates[j])] += (std::int64_t(1) << kSquares) + square_of_norm(j);
    sums[bin(kSureEstimate)] = 0;  // no other estimate is there
    int low = 0, high = kBins - 1;
    while (low < kBins - 1 && !sums[low]) ++low;
    while (high > low && !sums[high]) --high;
    least_ = low * kBin + kBin / 2 - 32768;
    each_ = double(n) / double((n + stride - 1) / stride);
    bins_.resize(high - low + 1);
    for (int b = low; b <= high; ++b) {
      Bin& to = bins_[b - low];
      to.count = double(sums[b] >> kSquares);
      to.variance = variance * double(sums[b] & ((std::int64_t(1) << kSquares) - 1)) /
                    std::max(to.count, 1.0);
      to.score = at(b - low) / sharp - part * to.variance;
    }
    expect_squares(offset);
  }

  // Expected squares by the line through the exact scores of some keys, drawn uniformly, over their
  // estimates, and by its errors, which grow with the norm, where they are more: keys of a group
  // share most of their estimates' errors, which no variance of estimates shows.
  void measure(const std::int32_t* rows, const float* scores, index_t count) {
    double n = 0, weights = 0, x = 0, y = 0, xx = 0, xy = 0, yy = 0;
    const auto each = [&](auto add) {
      for (index_t i = 0; i < count; ++i) {
        const int estimate = estimates_[rows[i]];
        if (estimate >= kSureEstimate || !std::isfinite(scores[i])) continue;
        const double square = double(square_of_norm(rows[i]));
        add(estimate / sharp_ - part_ * variance_ * square, double(scores[i]),
            1 / std::max(square, 1.0));
      }
    };
    each([&](double estimate, double score, double weight) {
      n += 1, weights += weight, x += weight * estimate, y += weight * score;
    });
    if (n < 3 || !(variance_ > 0)) return;
    x /= weights, y /= weights;
    each([&](double estimate, double score, double weight) {
      xx += weight * (estimate - x) * (estimate - x);
      xy += weight * (estimate - x) * (score - y);
      yy += weight * (score - y) * (score - y);
    });
    const double slope = xx > 0 ? std::max(xy / xx, 0.0) : 0;
    const double error = std::max(yy - 2 * slope * xy + slope * slope * xx, 0.0) / (n - 2);
    for (Bin& b : bins_)
      b.log = std::max(b.log, 2 * (y + slope * (b.score - x)) +
                                  log_square_of_error(std::sqrt(error * b.variance / variance_)));
  }

  // At which about `wanted` keys are read, beside those that are at any threshold.
  int threshold(double wanted, int floor) const {
    int least = least_ - kBin, most = at(count() - 1) + kBin + int(noise().survival.size());
    while (most - least > 1) {
      const int middle = least + (most - least) / 2;
      (keys(middle, floor) > wanted ? least : most) = middle;
    }
    return most;
  }
  // How much lower a threshold and a floor may be so that at most so many keys are read.
  int most_shift(double allowed, int threshold, int floor) const {
    int least = 0, most = std::max(threshold - least_ + kBin, 1);  // then all are
    if (keys(threshold - most, std::max(floor - most, 0)) <= allowed) return most;
    while (most - least > 1) {
      const int middle = least + (most - least) / 2;
      const bool within = keys(threshold - middle, std::max(floor - middle, 0)) <= allowed;
      (within ? least : most) = middle;
    }
    return least;
  }

  // The expected sum of w^2 (1 - p) / p over all keys, in exp(2 largest).
  double variance(int threshold, int floor, double largest) const {
    double sum = 0;
    for (int b = 0; b < count(); ++b) {
      if (!(bins_[b].count > 0)) continue;
      const double p = noise().probability(threshold - at(b), floor);
      sum += bins_[b].count * std::exp(std::min(bins_[b].log - 2 * largest, 600.0)) * (1 - p) / p;
    }
    return sum * each_;
  }

 private:
  struct Bin {
    double count, score, variance;  // of what was counted, on average
    double log = -INFINITY;         // of E w^2
  };
  // So many are read.
  double keys(int threshold, int floor) const {
    double sum = 0;
    for (int b = 0; b < count(); ++b)
      if (bins_[b].count > 0)
        sum += bins_[b].count * double(noise().probability(threshold - at(b), floor));
    return sum * each_;
  }
  std::int64_t square_of_norm(std::size_t key) const {
    const std::size_t block = key / kCodeBlock, lane = key % kCodeBlock;
    const std::int64_t norm =
        codes_[(block * (row_ + 1) + row_) * kCodeBlock + 2 * (lane % 32) + lane / 32];
    return norm * norm;
  }
  int count() const { return int(bins_.size()); }
  int at(int b) const { return least_ + b * kBin; }

  void expect_squares(double offset) {
    double n = 0, mean = 0, square = 0, variance = 0;
    for (const Bin& b : bins_)
      n += b.count, mean += b.count * b.score, variance += b.count * b.variance;
    if (!(n > 0)) return;
    mean /= n, variance /= n;
    for (const Bin& b : bins_) square += b.count * (b.score - mean) * (b.score - mean);
    expect_squares(offset, mean, square / n, variance);
    // Where keys are in groups, those that matter may be of one whose scores vary more.
    for (const Tail& tail : kTails) {
      const double high = score_at(tail.high * n), low = score_at(tail.low * n);
      const double deviation = (high - low) / (tail.high_normal - tail.low_normal);
      expect_squares(offset, low - tail.low_normal * deviation, deviation * deviation, variance);
    }
  }
  // Of scores around a mean, if estimates vary so much, and their errors so much on average.
  void expect_squares(double offset, double mean, double square, double error) {
    const double shrink = std::max(0.0, 1 - error / std::max(square, 1e-300));
    for (Bin& b : bins_) {
      const double expected = mean + shrink * (b.score - mean);
      b.log = std::max(
          b.log, 2 * (offset + expected) + log_square_of_error(std::sqrt(shrink * b.variance)));
    }
  }
  // log E exp(2 e) of a normal error e that is at most kFarthest deviations, as of few keys none is
  // more: 2 s^2 + log P(a standard normal is more than x = 2 s - kFarthest).
  static double log_square_of_error(double deviation) {
    const double x = 2 * deviation - kFarthest;
    if (x < 10) return 2 * deviation * deviation + std::log(0.5 * std::erfc(x * std::sqrt(0.5)));
    const double square = 1 / (x * x);  // 2 s^2 and -x^2 / 2, the leading term, cancel in part
    return kFarthest * (2 * deviation - kFarthest / 2) - std::log(x) - 0.91893853320467274 +
           std::log1p((3 * square - 1) * square);
  }
  // That of the key behind so many others.
  double score_at(double rank) const {
    double above = 0;
    for (int b = count() - 1; b > 0; --b) {
      above += bins_[b].count;
      if (above >= rank) return bins_[b].score;
    }
    return bins_[0].score;
  }

  // Quantiles of scores, as the share of keys that are above, and of a standard normal.
  struct Tail {
    double high, high_normal, low, low_normal;
  };
  static constexpr Tail kTails[] = {
      {0.01, 2.3263478740408408, 0.1, 1.2815515655446004},
      {0.003, 2.7477813854449926, 0.03, 1.8807936081512509},
  };

  const std::int16_t* estimates_;
  const std::uint8_t* codes_;
  std::size_t row_;                 // bytes of a key's signs
  double sharp_, variance_, part_;  // see above
  int least_;                       // the middle of the first bin
  double each_;                     // keys, that one stands for
  std::vector<Bin> bins_;
};

}  // namespace lshkit

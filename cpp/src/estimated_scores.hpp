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
inline constexpr double kSharpness = 0.75;    // the probability: as (exp(estimate) size)^0.75
inline constexpr int kSizeUnit = 32;          // a value's size u is log u in 1/32 nat, in a byte
inline constexpr index_t kCounted = 4096;     // most keys that are counted to find the threshold
inline constexpr int kBin = 16;               // units of a bin of that count
inline constexpr double kFarthest = 3.5;  // deviations of an estimate's error, that are expected

// One exponential variate of each 1 / kNoise of the distribution, in random order, and the share of
// them that is t or more.
struct Noise {
  std::vector<std::int16_t> table;  // the first ones again behind the last
  std::vector<float> survival;
  std::vector<double> against;  // (1 - p) / p of the same

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
    for (const float p : survival) against.push_back((1.0 - p) / p);
    for (std::size_t i = kNoise; i < table.size(); ++i) table[i] = table[i - kNoise];
  }
  // Of a key whose estimate is `gap` below the threshold.
  float probability(int gap, int floor) const { return survival[index(gap, floor)]; }
  double odds_against(int gap, int floor) const { return against[index(gap, floor)]; }

 private:
  int index(int gap, int floor) const {
    return std::clamp(std::min(gap, floor), 0, int(survival.size()) - 1);
  }
};
inline const Noise& noise() {
  static const Noise tables;
  return tables;
}

// What a size's byte adds to estimates, times 256.
inline int size_factor(double sharp) { return int(256 / kSizeUnit * sharp + 0.5); }
inline constexpr int kMostHalf = 15000;  // of the variance, at a norm of 256
static_assert(kMostEstimate + (254 * 254 * kMostHalf >> 16) +
                      (254 * int(256 / kSizeUnit * kSharpness * kUnit) >> 8) <
                  kSureEstimate,
              "an estimate is below that of keys that are read always");

// Sums over keys, two in a word, which takes three quarters of the time of four words: a key adds 1
// and its squared norm, and of its value u^-2 in 255ths and its size's byte.
struct Counted {
  std::uint64_t keys = 0, values = 0;

  static std::uint64_t key(unsigned norm) { return (std::uint64_t(1) << 32) + norm * norm; }
  static std::uint32_t high(std::uint64_t sum) { return std::uint32_t(sum >> 32); }
  static std::uint32_t low(std::uint64_t sum) { return std::uint32_t(sum); }
};
struct CountedValues {
  std::uint64_t of[256];
  CountedValues() {
    for (std::uint64_t size = 0; size < 256; ++size)
      of[size] = (std::uint64_t(255 * std::exp(-2.0 / kSizeUnit * size) + 0.5) << 32) + size;
  }
};
inline const CountedValues& counted_values() {
  static const CountedValues values;
  return values;
}

// log E exp(2 e) of a normal error e that is at most kFarthest deviations, as of few keys none is
// more: 2 s^2 + log P(a standard normal is more than x = 2 s - kFarthest).
inline double log_square_of_error(double deviation) {
  const double x = 2 * deviation - kFarthest;
  if (x < 10) return 2 * deviation * deviation + std::log(0.5 * std::erfc(x * std::sqrt(0.5)));
  const double square = 1 / (x * x);  // 2 s^2 and -x^2 / 2, the leading term, cancel in part
  return kFarthest * (2 * deviation - kFarthest / 2) - std::log(x) - 0.91893853320467274 +
         std::log1p((3 * square - 1) * square);
}

// What the estimates of some of the keys tell of all that are not read anyway: their counts by bins
// and the squares that are expected of weights times their values' sizes (reference: Estimated).
class Estimated {
 public:
  // codes: of all keys, with norms and sizes in bytes. sharp: units in a nat. variance: of the
  // error at a norm of 1, of which estimates have `part` in them. offset: what all scores have
  // besides.
  Estimated(const std::int16_t* estimates, const std::uint8_t* codes, index_t n_bits, index_t first,
            index_t last, double sharp, double variance, double part, double offset)
      : estimates_(estimates),
        norms_and_sizes_(codes + n_bits / 8 * kCodeBlock),
        block_bytes_(block_bytes(n_bits)),
        sharp_(sharp),
        variance_(variance),
        part_(part) {
    const index_t n = last - first;
    const index_t stride = (n + kCounted - 1) / kCounted | 1;  // odd: tokens may alternate
    struct Key {
      std::int16_t estimate;
      std::uint8_t norm, size;
    } keys[kCounted];
    int counted = 0, least = kSureEstimate, most = -kSureEstimate;
    for (index_t j = first; j < last; j += stride) {
      if (estimates[j] == kSureEstimate) continue;
      const std::uint8_t* bytes = norm_and_size(j);
      keys[counted++] = {estimates[j], bytes[0], bytes[1]};
      least = std::min(least, int(estimates[j]));
      most = std::max(most, int(estimates[j]));
    }
    // By estimates, which have sizes in them, and by those of the scores alone.
    const int factor = size_factor(sharp);
    const int low = floor_of_bin(least), low_score = floor_of_bin(least - (255 * factor >> 8));
    std::vector<Counted> sums(std::max(most - low, 0) / kBin + 1);
    std::vector<Counted> of_scores(std::max(most - low_score, 0) / kBin + 1);
    const std::uint64_t* of_value = counted_values().of;
    for (int i = 0; i < counted; ++i) {
      const int estimate = keys[i].estimate, of_score = estimate - (keys[i].size * factor >> 8);
      const std::uint64_t key = Counted::key(keys[i].norm);
      Counted& sum = sums[unsigned(estimate - low) / kBin];
      sum.keys += key, sum.values += of_value[keys[i].size];
      of_scores[unsigned(of_score - low_score) / kBin].keys += key;
    }
    each_ = double(n) / double((n + stride - 1) / stride);
    bins_ = bins_of(sums, low);
    for (Bin& b : bins_) b.score -= b.log_size;
    expect_squares(bins_of(of_scores, low_score), offset);
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
        const std::uint8_t* bytes = norm_and_size(rows[i]);
        const double square = double(bytes[0]) * bytes[0], size = bytes[1] / double(kSizeUnit);
        add(estimate / sharp_ - part_ * variance_ * square - size, double(scores[i]),
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
    for (Bin& b : bins_) b.raise(y + slope * (b.score - x), error * b.variance / variance_);
  }

  // At which about `wanted` keys are read, beside those that are at any threshold.
  int threshold(double wanted, int floor) const {
    int least = bins_.front().at - kBin,
        most = bins_.back().at + kBin + int(noise().survival.size());
    while (most - least > 1) {
      const int middle = least + (most - least) / 2;
      (keys(middle, floor) > wanted ? least : most) = middle;
    }
    return most;
  }
  // How much lower a threshold and a floor may be so that at most so many keys are read.
  int most_shift(double allowed, int threshold, int floor) const {
    int least = 0, most = std::max(threshold - bins_.front().at + kBin, 1);  // then all are
    if (keys(threshold - most, std::max(floor - most, 0)) <= allowed) return most;
    while (most - least > 1) {
      const int middle = least + (most - least) / 2;
      const bool within = keys(threshold - middle, std::max(floor - middle, 0)) <= allowed;
      (within ? least : most) = middle;
    }
    return least;
  }

  // Before `variance`: the expected w^2 (|v - c|^2 + |out - c|^2) of each bin's keys, in
  // exp(2 largest). unit, out: the squares of what sizes are relative to and of |out - c|, c the
  // values' centre.
  void expect(double largest, double unit, double out) {
    for (Bin& b : bins_)
      b.expected = b.count * std::exp(std::min(b.log - 2 * largest, 500.0)) *
                   (unit * (1 - b.small) + out * b.small);
  }
  // The expected sum of w^2 (|v - c|^2 + |out - c|^2) (1 - p) / p over all keys.
  double variance(int threshold, int floor) const {
    double sum = 0;
    for (const Bin& b : bins_) sum += b.expected * noise().odds_against(threshold - b.at, floor);
    return sum * each_;
  }

 private:
  struct Bin {
    int at;  // its middle
    double count;
    // Of what was counted, on average: the score, the variance of its error, log u and u^-2.
    double score = 0, variance = 0, log_size = 0, small = 0;
    double log = -INFINITY;  // of E (w u)^2
    double expected = 0;     // see expect()

    // If scores are expected there, with errors of a variance.
    void raise(double expected_score, double errors) {
      const double twice = 2 * (expected_score + log_size);
      if (twice + 2 * errors > log)  // at most so much
        log = std::max(log, twice + log_square_of_error(std::sqrt(errors)));
    }
  };
  // So many are read.
  double keys(int threshold, int floor) const {
    double sum = 0;
    for (const Bin& b : bins_) sum += b.count * noise().probability(threshold - b.at, floor);
    return sum * each_;
  }
  const std::uint8_t* norm_and_size(std::size_t key) const {
    return norms_and_sizes_ + key / kCodeBlock * block_bytes_ + 2 * (key % kCodeBlock);
  }
  static int floor_of_bin(int estimate) { return estimate & -kBin; }

  // Those that have keys, or the last one. The scores are as if the sizes were 1.
  std::vector<Bin> bins_of(const std::vector<Counted>& sums, int low) const {
    std::vector<Bin> bins;
    bins.reserve(sums.size());
    for (std::size_t b = 0; b < sums.size(); ++b) {
      if (!sums[b].keys && b + 1 < sums.size()) continue;
      Bin to{low + int(b) * kBin + kBin / 2, double(Counted::high(sums[b].keys))};
      const double share = 1 / std::max(to.count, 1.0);
      to.variance = variance_ * share * Counted::low(sums[b].keys);
      to.log_size = share / kSizeUnit * Counted::low(sums[b].values);
      to.small = Counted::high(sums[b].values) / (255 * std::max(to.count, 1.0));  // 1 exactly
      to.score = to.at / sharp_ - part_ * to.variance;
      bins.push_back(to);
    }
    return bins;
  }

  // From all scores, whatever the sizes.
  void expect_squares(const std::vector<Bin>& scores, double offset) {
    double n = 0, mean = 0, square = 0, variance = 0;
    for (const Bin& b : scores)
      n += b.count, mean += b.count * b.score, variance += b.count * b.variance;
    if (!(n > 0)) return;
    mean /= n, variance /= n;
    for (const Bin& b : scores) square += b.count * (b.score - mean) * (b.score - mean);
    expect_squares(offset, mean, square / n, variance);
    // Where keys are in groups, those that matter may be of one whose scores vary more.
    for (const Tail& tail : kTails) {
      // The score behind so many others.
      const auto score_at = [&](double rank) {
        double above = 0;
        for (std::size_t b = scores.size() - 1; b > 0; --b) {
          above += scores[b].count;
          if (above >= rank) return scores[b].score;
        }
        return scores[0].score;
      };
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
      b.raise(offset + expected, shrink * b.variance);
    }
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
  const std::uint8_t* norms_and_sizes_;  // of the first block
  std::size_t block_bytes_;
  double sharp_, variance_, part_;  // see above
  double each_;                     // keys, that one stands for
  std::vector<Bin> bins_;           // that have keys, in order
};

}  // namespace lshkit

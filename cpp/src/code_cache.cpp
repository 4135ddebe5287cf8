#include "lshkit/code_cache.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "counter_random.hpp"
#include "estimated_scores.hpp"
#include "kernels/code_cache.hpp"
#include "kernels/kernels.hpp"
#include "parallel.hpp"

namespace lshkit {
namespace {

// As in reference/code_cache.py.
constexpr double kFloor = 0.1;      // share of the pilot that is uniform
constexpr double kLeastPilot = 64;  // keys
constexpr index_t kMeasured = 64;   // keys whose scores tell how far to trust estimates
constexpr float kLeastNorm = 1e-30f;
constexpr double kLeastError = 0.01;  // stated of a sample, in epsilon
// Epsilons: what is expected of a sample of the size that the pilot asks for is about one.
constexpr double kEnough = 1.02;
constexpr double kMostExpected = 2;  // error: about as far as two means of values can be apart

// A query's table of entries for every 4 bits.
struct QueryTable {
  std::uint8_t* entries;  // (n_bits / 4, 16)
  int zero = 0, factor = 0, shift = 0, half_variance = 0;
  double sharp = kSharpness * kUnit;  // units of estimates in a nat of the score
  double variance = 0;                // of a score's error, at a norm of 1 in the byte

  // Of that variance, in estimates: a half, or as much as fits.
  double part() const { return variance > 0 ? half_variance / (sharp * 65536 * variance) : 0; }

  QueryTable(std::uint8_t* memory, const float* z, index_t n_bits, index_t n_features, float scale,
             float norm)
      : entries(memory) {
    const index_t groups = n_bits / 4;
    double widest = 0, total = 0;
    const auto top = [z](index_t g) {
      double sum = 0;
      for (int i = 0; i < 4; ++i) sum += std::abs(double(z[4 * g + i]));
      return sum;
    };
    for (index_t g = 0; g < groups; ++g) widest = std::max(widest, top(g)), total += top(g);
    const double step = 2 * widest / 63;
    if (!(step > 0) || !std::isfinite(total)) {  // std::max passes over NaN, sums do not
      std::memset(entries, 0, groups * 16);
      return;
    }
    for (index_t g = 0; g < groups; ++g) {
      const double own = top(g);
      for (int pattern = 0; pattern < 16; ++pattern) {
        double sum = 0;
        for (int i = 0; i < 4; ++i)
          sum += (pattern >> i & 1) ? z[4 * g + i] : -double(z[4 * g + i]);
        entries[g * 16 + pattern] = std::uint8_t(std::floor((sum + own) / step + 0.5));
      }
    }
    zero = int(std::floor(total / step + 0.5));
    constexpr double kPi = 3.14159265358979323846;
    double squares = 0;
    for (index_t i = 0; i < n_bits; ++i) squares += double(z[i]) * z[i];
    const double each = double(scale) * norm / 64;
    // Fewer units where estimates would end: at the score of a key of twice the usual norm, along
    // the query.
    const double along = 64 * each * std::sqrt(squares * n_features / n_bits);
    sharp = std::min(sharp, kMostEstimate / (2 * along));
    double fixed = sharp * each * std::sqrt(kPi * n_features / 2) / n_bits * step * 32 * 65536;
    for (; fixed > 32767; ++shift) fixed /= 2;  // of peaked scores
    factor = int(fixed + 0.5);
    variance = each * each * (squares * n_features / n_bits) * (kPi / 2 - 1) / n_bits;
    half_variance = int(std::min(sharp * 0.5 * variance * 65536 + 0.5, double(kMostHalf)));
  }
};

index_t whole_registers(index_t count) {
  return (count + kRegisterFloats - 1) / kRegisterFloats * kRegisterFloats;
}

struct StepScratch {
  float *query, *projections, *probability, *numerator, *variance_values, *exact;
  std::uint8_t* table;
  std::int16_t* estimates;
  std::int32_t *pilot, *rows;
  std::size_t bytes;

  StepScratch(Arena arena, index_t n, index_t n_features, index_t n_values, index_t n_bits) {
    query = arena.take<float>(whole_registers(n_features));
    projections = arena.take<float>(n_bits);
    numerator = arena.take<float>(whole_registers(n_values));
    variance_values = arena.take<float>(whole_registers(n_values));
    exact = arena.take<float>(whole_registers(n_values));
    table = arena.take<std::uint8_t>(n_bits * 4);
    estimates =
        arena.take<std::int16_t>((n + kCodeBlock - 1) / kCodeBlock * kCodeBlock + kSelectPadding);
    pilot = arena.take<std::int32_t>(n + 2 * kRegisterFloats);
    rows = arena.take<std::int32_t>(n + 2 * kRegisterFloats);
    probability = arena.take<float>(n);
    bytes = arena.used();
  }
};

// One query and what it sees of one head.
struct Step {
  const CodeStepOptions& o;
  const StepScratch& s;
  index_t n;  // keys seen
  index_t head, n_values;
  const float* value_centre;
  double value_square;  // of what sizes are relative to
  CodeRead read;
  CodeSums sums{};
  index_t n_read = 0;

  void clear() {
    sums = {-INFINITY, 0, 0, 0, 0, s.numerator, s.variance_values};
    std::fill_n(s.numerator, whole_registers(n_values), 0.0f);
    std::fill_n(s.variance_values, whole_registers(n_values), 0.0f);
    read.sums = &sums;
  }
  void add(const std::int32_t* rows, index_t count, const float* probability) {
    read.rows = rows, read.count = count, read.probability = probability;
    kernels().code_read(read);
  }
  // The first and the last keys.
  void add_exact(index_t first, index_t last) {
    std::iota(s.rows, s.rows + first, 0);
    std::iota(s.rows + first, s.rows + first + (n - last), std::int32_t(last));
    add(s.rows, first + n - last, nullptr);
  }
  index_t select(int phase, index_t first, index_t last, int threshold, int floor,
                 std::int32_t* rows) const {
    const RandomStream random(o.seed, (std::uint64_t(n) << 20) + 2 * head + phase);
    index_t count = 0;
    CodeSelect select;
    select.threshold = std::clamp(threshold, -32000, 32000);
    select.floor = std::min(floor, 32767);
    for (index_t segment = first / kSegment; segment * kSegment < last; ++segment) {
      const index_t base = segment * kSegment;
      const index_t start = index_t((random.word(segment) + base) % kNoise);
      select.estimates = s.estimates + base;
      select.noise = noise().table.data() + start;
      select.first = std::max(first - base, index_t(0));
      select.last = std::min(last - base, kSegment);
      select.offset = std::int32_t(base);
      select.rows = rows + count;
      count += kernels().code_select(select);
    }
    return count;
  }
  void probabilities(const std::int32_t* rows, index_t count, int threshold, int floor) const {
    const Noise& tables = noise();
    for (index_t i = 0; i < count; ++i)
      s.probability[i] = tables.probability(threshold - s.estimates[rows[i]], floor);
  }
  // How far to trust estimates, by the scores of keys drawn one from each of so many equal parts.
  void measure(Estimated& estimated, index_t first, index_t last) const {
    std::int32_t rows[kMeasured];
    float scores[kMeasured];
    const index_t count = std::min(kMeasured, last - first);
    const double part = double(last - first) / count;
    const RandomStream random(o.seed, (std::uint64_t(n) << 20) + (1 << 19) + head);
    for (index_t i = 0; i < count; ++i) {
      const index_t at = first + index_t((i + unit_interval(random.word(i))) * part);
      rows[i] = std::int32_t(std::min(at, last - 1));
    }
    CodeSums unused{-INFINITY, 0, 0, 0, 0, nullptr, nullptr};
    CodeRead keys = read;
    keys.rows = rows, keys.count = count, keys.scores = scores;
    keys.n_values = 0, keys.probability = nullptr, keys.sums = &unused;
    kernels().code_read(keys);
    estimated.measure(rows, scores, count);
  }
  // Without those of the pilot; both lists are in order.
  index_t without_pilot(std::int32_t* rows, index_t count, index_t pilots) const {
    index_t kept = 0, p = 0;
    for (index_t i = 0; i < count; ++i) {
      while (p < pilots && s.pilot[p] < rows[i]) ++p;
      if (p == pilots || s.pilot[p] != rows[i]) rows[kept++] = rows[i];
    }
    return kept;
  }
  // The error by the sample, that of an expected variance of 1, and |out - centre|^2 of values.
  struct Error {
    double sample, expected, from_centre;
    // variance: what sum_j w_j^2 |v_j - out|^2 (1 - p_j) / p_j may be by the estimates, which
    // counts where it is more: where few keys matter and none of those that were missed does, the
    // sample alone shows too little.
    double stated(double variance) const {
      return std::max(sample, std::min(expected * std::sqrt(variance), kMostExpected));
    }
  };
  Error error() const {
    double along = 0, square = 0, from_centre = 0;
    if (!(sums.denominator > 0)) return {INFINITY, 0, 0};  // nothing that was read says anything
    const double inverse = 1.0 / sums.denominator;
    for (index_t c = 0; c < n_values; ++c) {
      const double out = sums.numerator[c] * inverse, centred = out - value_centre[c];
      along += out * sums.variance_values[c], square += out * out;
      from_centre += centred * centred;
    }
    const double variance =
        std::max(sums.variance_squares - 2 * along + sums.variance * square, 0.0);
    const double unit = o.quantile / std::sqrt(std::max(sums.denominator * sums.squares, 1e-300));
    return {unit * std::sqrt(variance), unit, from_centre};
  }
  // How much lower the second sample's threshold is, for an error of epsilon, if that many keys may
  // be read.
  int shift(const Error& pilot, const Estimated& estimated, double wanted, int threshold,
            int floor) const {
    const double allowed = std::max(double(o.max_share) * n - n_read, wanted);
    const auto variance = [&](int lower) {
      return estimated.variance(threshold - lower, std::max(floor - lower, 0));
    };
    const double ratio = std::min(pilot.stated(variance(0)) / o.epsilon, 1e30);  // NaN: a value is
    const double times = ratio > 1 ? ratio * ratio : 1;
    int shift = int(kUnit * std::log(times) + 0.5);
    const auto enough = [&](int lower) {
      return !(pilot.expected * std::sqrt(variance(lower)) > kEnough * o.epsilon);
    };
    // A probability times `times` at most reads no more than that.
    if (times * wanted <= allowed && enough(shift)) return shift;
    int most = estimated.most_shift(allowed, threshold, floor);
    if (shift >= most) return most;
    if (enough(shift)) return shift;
    while (most - shift > 1) {
      const int middle = shift + (most - shift) / 2;
      (enough(middle) ? most : shift) = middle;
    }
    return most;
  }

  // Returns the stated error.
  double run(const std::uint8_t* codes, index_t n_bits, index_t n_features, const float* centre,
             float norm) {
    clear();
    const index_t first = std::min(o.n_sinks, n), last = std::max(n - o.window, first);
    if (n <= o.exact_up_to || last == first) {
      add_exact(n, n);
      n_read = n;
      return 0;
    }
    const QueryTable table(s.table, s.projections, n_bits, n_features, o.scale, norm);
    CodeScan scan{codes,
                  (last + kCodeBlock - 1) / kCodeBlock,
                  n_bits,
                  s.table,
                  table.zero,
                  table.factor,
                  table.shift,
                  table.half_variance,
                  size_factor(table.sharp),
                  s.estimates};
    kernels().code_estimates(scan);
    const double wanted = std::max(0.5 * double(o.min_share) * n, kLeastPilot);
    const int rarest = int(noise().survival.size()) - 1;
    const double uniform = (last - first) / (kFloor * wanted);
    const int floor = std::clamp(int(kUnit * std::log(uniform) + 0.5), 0, rarest);
    double offset = 0;
    for (index_t i = 0; i < n_features; ++i) offset += double(read.query[i]) * centre[i];
    Estimated estimated(s.estimates, codes, n_bits, first, last, table.sharp, table.variance,
                        table.part(), offset);
    const int threshold = estimated.threshold(wanted, floor);
    const index_t pilots = select(0, first, last, threshold, floor, s.pilot);
    add_exact(first, last);
    n_read = first + n - last + pilots;
    // Kept for below.
    const CodeSums exact = sums;
    std::copy_n(s.numerator, whole_registers(n_values), s.exact);
    probabilities(s.pilot, pilots, threshold, floor);
    add(s.pilot, pilots, s.probability);
    measure(estimated, first, last);
    const Error pilot = error();
    estimated.expect(sums.largest, value_square, pilot.from_centre);
    const int lower = shift(pilot, estimated, wanted, threshold, floor);
    // The pilot's keys, known now, count with probability 1.
    clear();
    sums = exact;
    std::copy_n(s.exact, whole_registers(n_values), s.numerator);
    add(s.pilot, pilots, nullptr);
    const int low = std::max(floor - lower, 0);
    index_t count = select(1, first, last, threshold - lower, low, s.rows);
    count = without_pilot(s.rows, count, pilots);
    probabilities(s.rows, count, threshold - lower, low);
    add(s.rows, count, s.probability);
    n_read += count;
    const Error last_error = error();
    estimated.expect(sums.largest, value_square, last_error.from_centre);
    return std::max(last_error.stated(estimated.variance(threshold - lower, low)),
                    kLeastError * o.epsilon);
  }
};

const void* matrix_at(const Input<float>& x, index_t batch, index_t head, index_t row) {
  return x.row(batch, head, row);
}

}  // namespace

void code_keys(const CodedKeys& keys, index_t sequence, index_t begin, index_t end, int threads) {
  constexpr index_t kRows = 512;  // of a task, from a multiple on
  const index_t first_task = begin / kRows, tasks = (end + kRows - 1) / kRows - first_task;
  if (begin >= end) return;
  parallel_for(keys.key_heads * tasks, threads, [&](index_t task) {
    const index_t head = task / tasks, from = (first_task + task % tasks) * kRows;
    const index_t first = std::max(begin, from), last = std::min(end, from + kRows);
    const index_t matrix = sequence * keys.key_heads + head;
    CodeRows rows;
    rows.key = matrix_at(keys.key, sequence, head, keys.starts[sequence] + first);
    rows.element = keys.key.element;
    rows.value = matrix_at(keys.value, sequence, head, keys.starts[sequence] + first);
    rows.key_stride = keys.key.row_stride;
    rows.value_stride = keys.value.row_stride;
    rows.rows = last - first;
    rows.n_features = keys.n_features;
    rows.n_values = keys.n_values;
    rows.n_bits = keys.n_bits;
    rows.planes = keys.planes + head * keys.n_features * keys.n_bits;
    rows.centre = keys.centre + matrix * keys.n_features;
    rows.norm = std::max(keys.norm[matrix], kLeastNorm);
    rows.value_centre = keys.value_centre + matrix * keys.n_values;
    rows.value_norm = std::max(keys.value_norm[matrix], kLeastNorm);
    rows.codes = keys.codes + matrix * keys.n_blocks * block_bytes(keys.n_bits);
    rows.first = first;
    Arena size;
    size.take<float>(keys.n_features);
    rows.centred = static_cast<float*>(thread_scratch(size.used()));
    kernels().code_rows(rows);
  });
}

void code_step(const CodedKeys& keys, Tensor<const float> query, index_t heads, index_t n_queries,
               const CodeStepOptions& options, const CodeStepOutputs& outputs, int threads) {
  const index_t group = heads / keys.key_heads, d = keys.n_features, n_values = keys.n_values;
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  parallel_for(keys.batch * heads * n_queries, threads, [&](index_t task) {
    const index_t batch = task / (heads * n_queries), head = task / n_queries % heads;
    const index_t row = task % n_queries, key_head = head / group, start = keys.starts[batch];
    const index_t n = keys.rows - n_queries + row + 1 - start;
    float* out = outputs.out.matrix(batch, head) + row * outputs.out.row_stride;
    const float* q = query.matrix(batch, head) + row * query.row_stride;
    outputs.error[task] = 0, outputs.n_read[task] = 0, outputs.log_sum[task] = -INFINITY;
    if (n <= 0) {
      std::fill_n(out, n_values, 0.0f);
      return;
    }
    for (index_t i = 0; i < d; ++i)
      if (!std::isfinite(q[i])) {
        std::fill_n(out, n_values, kNaN);
        outputs.error[task] = outputs.log_sum[task] = kNaN;
        return;
      }
    const std::size_t bytes = StepScratch(Arena(), n, d, n_values, keys.n_bits).bytes;
    const StepScratch scratch(Arena(thread_scratch(bytes)), n, d, n_values, keys.n_bits);
    std::fill_n(scratch.query, whole_registers(d), 0.0f);
    for (index_t i = 0; i < d; ++i) scratch.query[i] = q[i] * options.scale;
    const index_t matrix = batch * keys.key_heads + key_head;
    const float* value_centre = keys.value_centre + matrix * n_values;
    const double value_norm = keys.value_norm[matrix];
    Step step{options, scratch, n, head, n_values, value_centre, value_norm * value_norm, {}};
    step.read.query = scratch.query;
    step.read.key = matrix_at(keys.key, batch, key_head, start);
    step.read.value = matrix_at(keys.value, batch, key_head, start);
    step.read.element = keys.value.element;
    step.read.key_stride = keys.key.row_stride;
    step.read.value_stride = keys.value.row_stride;
    step.read.n_features = d;
    step.read.n_values = n_values;
    if (n > options.exact_up_to)
      kernels().code_projections(q, d, keys.planes + key_head * d * keys.n_bits, keys.n_bits,
                                 scratch.projections);
    outputs.error[task] =
        float(step.run(keys.codes + matrix * keys.n_blocks * block_bytes(keys.n_bits), keys.n_bits,
                       d, keys.centre + matrix * d, keys.norm[matrix]));
    outputs.n_read[task] = std::int32_t(step.n_read);
    outputs.log_sum[task] = step.sums.largest + std::log(step.sums.denominator);
    const float inverse = step.sums.denominator > 0 ? 1 / step.sums.denominator : 0;
    for (index_t c = 0; c < n_values; ++c) out[c] = scratch.numerator[c] * inverse;
  });
}

}  // namespace lshkit

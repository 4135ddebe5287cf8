#include "fast_weighted_sum.hpp"

#include <algorithm>
#include <vector>

#include "fast_bucket_sum.hpp"
#include "fast_steps.hpp"
#include "head_passes.hpp"

namespace lshkit {
namespace {

constexpr float kLargestError = 1.5e-3f;
constexpr float kWiden = 2;  // the step after an overflow
// Of weights of 15 bits, the smallest are rounded by as much as they are large: what is added with
// them may not be far larger than the rest.
constexpr float kMostSpread = 32;
// A query's sum is to be so many times its error. A normalisation would show it where all weights
// of a query's pairs are small.
constexpr float kLeastSum = 10;
// Fewer rows, packed sequences of a few, are summed in float32: see fast_bucket_sum.cpp.
constexpr index_t kLeastRows = 64;

using Passes = HeadPasses<float, std::int16_t>;

// Rows of a side that are not masked out.
index_t taking_part(const WeightedSide<float>& side) {
  return side.valid ? std::count_if(side.valid, side.valid + side.rows, [](int v) { return v; })
                    : side.rows;
}

// What the first hash that is not done says of a side's weights.
struct SideWeights {
  FastAdded added;
  float squares;                   // of a row's weights, in the mean
  std::vector<float> square_sums;  // of the weights of each bucket
  std::vector<float> readers;      // see added_of
};
SideWeights weights_of(const WeightedHead<float>& s, const Expanded<float>& probes) {
  const WeightedSide<float>& side = *probes.side;
  const index_t t = side.n_probes;
  SideWeights w{{side.valid, 0, 0, 0}, 0, {}, {}};
  w.added.count = taking_part(side);
  w.square_sums.resize(s.n_buckets);
  std::vector<float> sums(s.n_buckets);
  double squares = 0;
  for (index_t j = 0; j < side.rows; ++j) {
    if (side.valid && !side.valid[j]) continue;
    for (index_t k = j * t; k < (j + 1) * t; ++k) {
      const float square = probes.weights[k] * probes.weights[k];
      sums[probes.slots[k]] += probes.weights[k];
      w.square_sums[probes.slots[k]] += square;
      squares += square;
    }
  }
  w.added.weight = *std::max_element(sums.begin(), sums.end());
  w.added.square = *std::max_element(w.square_sums.begin(), w.square_sums.end());
  w.added.most_spread = kMostSpread;
  w.squares = float(squares / double(std::max<index_t>(w.added.count, 1)));
  return w;
}
// The rows of `from`, whose probes of that hash these are, read with those of `to`. Each product
// that is added or read is rounded, by 1 / 12 of the square of a step.
FastAdded added_of(const WeightedHead<float>& s, SideWeights& from, const Expanded<float>& probes,
                   const SideWeights& to, index_t read_probes) {
  FastAdded added = from.added;
  const index_t t = probes.side->n_probes;
  const float in_bucket = float(added.count) / float(s.n_buckets);
  added.noise = (float(read_probes) + to.squares * in_bucket * float(t)) / 12;
  added.signal = in_bucket * from.squares * to.squares;
  from.readers.assign(probes.side->rows, 0);
  for (index_t j = 0; j < probes.side->rows; ++j) {
    if (added.valid && !added.valid[j]) continue;
    float readers = 0;
    for (index_t k = j * t; k < (j + 1) * t; ++k)
      readers += probes.weights[k] * probes.weights[k] * to.square_sums[probes.slots[k]];
    from.readers[j] = readers;
  }
  added.readers = from.readers.data();
  return added;
}

// The rows of a side as integers, in blocks of the columns of a pass: as they are added to tables,
// and as factors of what the other side has added.
class IntegerRows {
 public:
  IntegerRows(Matrix<const float> matrix, index_t at_once)
      : matrix_(matrix),
        width_(at_once * kFastColumns),
        columns_((matrix.columns + width_ - 1) / width_ * width_) {}

  void take(Arena& arena, bool added, bool factors) {
    const index_t rows = matrix_.rows, passes = columns_ / width_;
    to_integer_ = arena.take<float>(added ? columns_ : 0);
    scale_ = arena.take<float>(added ? columns_ : 0);
    added_ = arena.take<std::int16_t>(added ? rows * columns_ : 0);
    factors_ = arena.take<std::int16_t>(factors ? rows * columns_ : 0);
    to_factor_ = arena.take<float>(factors ? rows * passes : 0);
  }
  // False where 16 bits do not do. scale: of the sums.
  bool round_added(const FastAdded& added, float widening, float scale) {
    for (index_t column = 0; column < columns_; column += 2 * kFastColumns) {
      const index_t slices = std::min<index_t>((columns_ - column) / kFastColumns, 2);
      if (!choose_steps(from(column, 2 * kFastColumns), slices, added, kLargestError, widening,
                        to_integer_ + column))
        return false;
    }
    for (index_t c = 0; c < columns_; ++c)
      scale_[c] = to_integer_[c] > 0 ? scale / to_integer_[c] : 0;
    for (index_t column = 0; column < columns_; column += width_)
      kernels().fast_values(from(column, width_), to_integer_ + column,
                            added_ + column * matrix_.rows, width_);
    return true;
  }
  void negate_scale() {
    for (index_t c = 0; c < columns_; ++c) scale_[c] = -scale_[c];
  }
  bool round_factors(const IntegerRows& of) {
    for (index_t column = 0; column < columns_; column += width_)
      if (!kernels().fast_factors(from(column, width_), of.scale(column),
                                  factors_ + column * matrix_.rows, width_,
                                  to_factor_ + column / width_ * matrix_.rows))
        return false;
    return true;
  }
  // Of the pass whose first column this is.
  Matrix<const std::int16_t> added(index_t column) const {
    return {added_ + column * matrix_.rows, width_, matrix_.rows, width_};
  }
  Matrix<const std::int16_t> factors(index_t column) const {
    return {factors_ + column * matrix_.rows, width_, matrix_.rows, width_};
  }
  const float* to_factor(index_t column) const {
    return to_factor_ + column / width_ * matrix_.rows;
  }
  const float* scale(index_t column) const { return scale_ + column; }

 private:
  Matrix<const float> from(index_t column, index_t width) const {
    return {matrix_.data + column, matrix_.stride, matrix_.rows,
            std::clamp<index_t>(matrix_.columns - column, 0, width)};
  }

  Matrix<const float> matrix_;
  index_t width_, columns_;  // of a pass, and of all
  float *to_integer_, *scale_, *to_factor_;
  std::int16_t *added_, *factors_;
};

bool pays(const WeightedHead<float>& s) {
  return s.fast && kernels().fast_weighted_add && s.order == Order::all && s.first_hash == 0 &&
         std::min(taking_part(s.query), taking_part(s.key)) >= kLeastRows;
}
float square_of(const float* x, index_t n) {
  float sums[8] = {};  // so that additions go on side by side
  index_t c = 0;
  for (; c + 8 <= n; c += 8)
    for (int i = 0; i < 8; ++i) sums[i] += x[c + i] * x[c + i];
  for (; c < n; ++c) sums[0] += x[c] * x[c];
  float all = 0;
  for (const float sum : sums) all += sum;
  return all;
}
// Whether no row of sums is close to the error of them all.
bool rows_are_large(Matrix<const float> out, const IntegerRows& values, const FastAdded& added,
                    index_t n_hashes) {
  double error = 0;
  for (index_t c = 0; c < out.columns; ++c)
    error += double(values.scale(c)[0]) * double(values.scale(c)[0]);
  const double least = kLeastSum * kLeastSum * error * added.noise * double(n_hashes);
  for (index_t i = 0; i < out.rows; ++i) {
    const float square = square_of(out.row(i), out.columns);
    if (square > 0 && square < least) return false;
  }
  return true;
}

// The passes of a hash, each of which says whether its sums stay within 16 bits. Where one does
// not, what those before it have added to the sums is taken back: false.
template <class Run>
bool all_or_none(Passes& passes, const ColumnBlocks<float>& sums, index_t columns, index_t hash,
                 IntegerRows& added, const Run& run) {
  index_t done = 0;
  bool within = true;
  passes.each_pass(columns, [&](FastWeightedPass& p, index_t column) {
    if (within) within = run(p, column);
    if (within) done = column + p.width;
  });
  // The sums of the first hash replace what is there.
  if (within || done == 0 || hash == 0 || !sums.matrix.data) return within;
  passes.clear();
  added.negate_scale();
  passes.each_pass(columns, [&](FastWeightedPass& p, index_t column) {
    if (column < done) run(p, column);
  });
  return false;
}

// The weights' gradient of the hashes of a batch before `end`, unless its client has them.
void take_grads(const Expanded<float>& e, index_t end) {
  ProbeRun run = e.batch;
  if (!e.side->take_grads || end > run.hash + run.group) return;
  run.group = end - run.hash;
  if (run.group > 0) e.side->take_grads(run, 1, e.batch_weights, e.batch_grads);
}

}  // namespace

index_t fast_weighted_sum(const WeightedHead<float>& head, Matrix<float> out, float* weight_sums) {
  if (!pays(head)) return head.first_hash;
  WeightedHead<float> s = head;
  Passes passes(s, 0, fast_slice_count(s.values.columns), 1);
  if (!passes.whole()) return s.first_hash;
  const Expanded<float>&queries = passes.probes_of(passes.queries(), s.first_hash),
        &keys = passes.probes_of(passes.keys(), s.first_hash);
  SideWeights query = weights_of(s, queries), key = weights_of(s, keys);
  const FastAdded added_keys = added_of(s, key, keys, query, s.query.n_probes);
  IntegerRows values(s.values, passes.at_once());
  Arena size;
  values.take(size, true, false);
  Arena arena(thread_scratch(size.used(), Scratch::fast));
  values.take(arena, true, false);
  const ColumnBlocks<float> blocks = passes.blocks(out, 0);

  for (float widening = 1; s.first_hash < s.n_hashes; widening *= kWiden) {
    if (!values.round_added(added_keys, widening, s.scale)) break;
    if (widening > 1) passes.forget();
    passes.each_group([&](index_t hash, index_t group) {
      bool within = true;
      passes.sweep(passes.keys(), passes.queries(), s.order, hash, group,
                   [&](index_t row, index_t added, index_t readers) {
                     const auto pass = [&](FastWeightedPass& p, index_t column) {
                       p.add = passes.rows(passes.keys(), added, values.added(column), row);
                       if (added > 0 && !kernels().fast_weighted_add(p)) return false;
                       if (readers == 0) return true;
                       p.read = passes.rows(passes.queries(), readers, Matrix<const std::int16_t>{},
                                            row);
                       const Matrix<float> to = blocks.from(column);
                       p.sum = to.row(row);
                       p.sum_stride = to.stride;
                       p.sum_scale = values.scale(column);
                       p.accumulate_sum = hash > 0;
                       kernels().fast_weighted_read(p);
                       return true;
                     };
                     within = all_or_none(passes, blocks, s.values.columns, hash, values, pass);
                     if (within && weight_sums)
                       passes.column(s.order, passes.keys(), added, nullptr, passes.queries(),
                                     readers, nullptr, row, weight_sums, nullptr);
                   });
      s.first_hash = hash + within;
      return within;
    });
  }
  if (s.first_hash > 0) blocks.store();
  const Matrix<const float> sums{out.data, out.stride, out.rows, out.columns};
  if (s.first_hash == 0 || rows_are_large(sums, values, added_keys, s.n_hashes))
    return s.first_hash;
  if (weight_sums) std::fill_n(weight_sums, s.query.rows, 0.0f);
  return 0;
}

index_t fast_weighted_sum_backward(const WeightedHead<float>& head, Matrix<const float> grad,
                                   const float* bias, Matrix<float> value_grad) {
  if (!pays(head)) return head.first_hash;
  WeightedHead<float> s = head;
  const bool of_queries = bool(s.query.take_grads), of_keys = bool(s.key.take_grads);
  const bool back = value_grad.data || of_keys;
  Passes passes(s, 0, fast_slice_count(s.values.columns), 1);
  if (!passes.whole()) return s.first_hash;
  Expanded<float>&queries = passes.probes_of(passes.queries(), s.first_hash),
  &keys = passes.probes_of(passes.keys(), s.first_hash);
  SideWeights query = weights_of(s, queries), key = weights_of(s, keys);
  const FastAdded from_keys = added_of(s, key, keys, query, s.query.n_probes);
  const FastAdded from_queries = added_of(s, query, queries, key, s.key.n_probes);
  IntegerRows values(s.values, passes.at_once()), grads(grad, passes.at_once());
  const auto take = [&](Arena& arena) {
    values.take(arena, of_queries, of_keys);
    grads.take(arena, back, of_queries);
  };
  Arena size;
  take(size);
  Arena arena(thread_scratch(size.used(), Scratch::fast));
  take(arena);

  const ColumnBlocks<float> value_grads = passes.blocks(value_grad, 0);
  for (float widening = 1; s.first_hash < s.n_hashes; widening *= kWiden) {
    if (of_queries &&
        !(values.round_added(from_keys, widening, s.scale) && grads.round_factors(values)))
      break;
    if (back && !grads.round_added(from_queries, widening, s.scale)) break;
    if (of_keys && !values.round_factors(grads)) break;
    if (widening > 1) passes.forget();
    passes.each_group([&](index_t hash, index_t group) {
      bool within = true;
      // One of the two sweeps of weighted_sum_backward.
      const auto sweep = [&](Expanded<float>& from, Expanded<float>& to, IntegerRows& added_rows,
                             const IntegerRows& factors, const ColumnBlocks<float>& sums, bool dots,
                             const float* added_bias, const float* read_bias) {
        passes.sweep(from, to, s.order, hash, group,
                     [&](index_t row, index_t added, index_t readers) {
                       const auto pass = [&](FastWeightedPass& p, index_t column) {
                         p.add = passes.rows(from, added, added_rows.added(column), row);
                         if (added > 0 && !kernels().fast_weighted_add(p)) return false;
                         if (readers == 0) return true;
                         p.read = passes.rows(to, readers, factors.factors(column), row);
                         const Matrix<float> sum = sums.from(column);
                         p.sum = sum.data ? sum.row(row) : nullptr;
                         p.sum_stride = sum.stride;
                         p.sum_scale = added_rows.scale(column);
                         p.accumulate_sum = hash > 0;
                         p.dots = dots ? to.grads : nullptr;
                         p.dot_scale = factors.to_factor(column);
                         p.accumulate_dots = column > 0;
                         kernels().fast_weighted_read(p);
                         return true;
                       };
                       within = all_or_none(passes, sums, s.values.columns, hash, added_rows, pass);
                       if (within && bias && dots)
                         passes.column(s.order, from, added, added_bias, to, readers, read_bias,
                                       row, nullptr, to.grads);
                     });
      };
      if (of_queries) {
        sweep(keys, queries, values, grads, ColumnBlocks<float>(), true, nullptr, bias);
        passes.clear();
      }
      if (back && within) sweep(queries, keys, grads, values, value_grads, of_keys, bias, nullptr);
      if (!within) return false;
      s.first_hash = hash + 1;
      for (const Expanded<float>* e : {&queries, &keys})
        if (e->batch.hash + e->batch.group == s.first_hash) take_grads(*e, s.first_hash);
      return true;
    });
    // Of a batch that has not come to its end.
    for (const Expanded<float>* e : {&queries, &keys})
      if (e->batch.hash + e->batch.group > s.first_hash) take_grads(*e, s.first_hash);
  }
  if (s.first_hash > 0) value_grads.store();
  return s.first_hash;
}

}  // namespace lshkit

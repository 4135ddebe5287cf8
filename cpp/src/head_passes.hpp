#pragma once
// How the weighted sums of one head are cut into passes that fit the caches, and the buffers of a
// pass: tables and probes.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "bucket_slots.hpp"
#include "bucket_sum.hpp"
#include "kernels/weighted_bucket_sum.hpp"
#include "lshkit/runtime.hpp"
#include "parallel.hpp"
#include "weighted_bucket_sum.hpp"

namespace lshkit {

// Probes of a side that are there at once, at most: longer sides go in runs of rows.
inline constexpr index_t kProbeBytes = index_t(24) << 20;
inline constexpr index_t kMostTables = index_t(512) << 10;  // bytes of a pass
inline constexpr index_t kLeastBlock = index_t(128) << 10;  // bytes of columns that are copied

// Probes a bucket from which on its table is cleared, not masked: see kernels/used_rows.hpp.
// Clearing takes 0.95 of the time of masks at 4 and 0.9 at 7 (Zen 4), 0.93 to 0.97 at 8 (Intel).
inline constexpr index_t kDenseProbes = 4;

// Probes of a run of rows, with codes replaced by table rows.
template <class T>
struct Expanded {
  const WeightedSide<T>* side;
  std::uint16_t* batch_slots;  // of a batch of hashes, one group after the other
  T* batch_weights;
  ProbeRun batch, run;  // what is there: a batch, and that group of it that is in use
  T* batch_grads;       // of the weights, where they are wanted
  // Of the run. fast_weights: for 16-bit tables, made when it is read, so that they are in L2 then.
  std::uint32_t* fast_weights;
  std::uint16_t* slots = nullptr;
  T *weights = nullptr, *grads = nullptr;

  index_t probes() const { return run.group * side->n_probes; }
};

// A matrix of a row a token, as the passes over slices of its columns see it: in its place, or cut
// into blocks of columns, each a contiguous copy. Rows that are visited in part, at a large stride,
// would use a part of the sets of a cache.
template <class T>
struct ColumnBlocks {
  Matrix<T> matrix;
  std::remove_const_t<T>* copy = nullptr;
  index_t width = 0;  // of a block

  // The block that begins with this column.
  Matrix<T> from(index_t column) const {
    const index_t columns = std::min(width, matrix.columns - column);
    if (copy) return {copy + column * matrix.rows, columns, matrix.rows, columns};
    return {matrix.data ? matrix.data + column : nullptr, matrix.stride, matrix.rows, columns};
  }
  void load() const {
    each_slice([&](index_t i, index_t column, index_t at, auto bytes) {
      std::memcpy(copy + at, matrix.row(i) + column, bytes);
    });
  }
  void store() const {
    each_slice([&](index_t i, index_t column, index_t at, auto bytes) {
      std::memcpy(matrix.row(i) + column, copy + at, bytes);
    });
  }

 private:
  // move(row, column, its place in the copy, bytes) for slices, whole ones of a constant size.
  template <class Move>
  void each_slice(const Move& move) const {
    constexpr index_t slice = kSliceBytes / index_t(sizeof(T));
    for (index_t i = 0; copy && i < matrix.rows; ++i)
      for (index_t first = 0; first < matrix.columns; first += width) {
        const index_t columns = std::min(width, matrix.columns - first);
        const index_t at = first * matrix.rows + i * columns;
        index_t c = 0;
        for (; c + slice <= columns; c += slice)
          move(i, first + c, at + c, std::integral_constant<std::size_t, kSliceBytes>());
        if (c < columns) move(i, first + c, at + c, sizeof(T) * std::size_t(columns - c));
      }
  }
};

// How a head is cut, and its buffers: the tables of a group of hashes, and probes. Table: of what
// the tables are, T or 16-bit integers.
//
// The probes of a batch of hashes are made together. Slices of columns come next, and only then the
// hashes of the batch: a table is read straight after its rows were added, from the L2 cache, and
// the columns of a long sequence come from the L3 cache for all hashes of a batch but the first.
template <class T, class Table = T>
class HeadPasses {
  static constexpr bool kFast = sizeof(Table) < sizeof(T);
  static constexpr index_t kPeriod = 256;  // slots that are numbered at once, at least
  static constexpr index_t kWidth = kSliceBytes / index_t(sizeof(Table));  // columns of a slice

 public:
  using Pass = std::conditional_t<kFast, FastWeightedPass, WeightedPass<T>>;

  // Slices [first, last) of the values. most_copies: of `blocks`.
  HeadPasses(const WeightedHead<T>& head, index_t first, index_t last, int most_copies)
      : s_(head), first_slice_(first), last_slice_(last), most_copies_(most_copies) {
    const index_t most = head.key.rows * head.key.n_probes;
    const index_t rows = std::max(head.query.rows, head.key.rows);
    const index_t row_bytes =
        std::max(head.query.n_probes, head.key.n_probes) * index_t(2 + sizeof(T));
    masked_ = kernels().masks_rows() &&
              std::max(most, head.query.rows * head.query.n_probes) < kDenseProbes * head.n_buckets;
    // Slots pay up to one probe for 2 rows, beside masks up to one for 8 while a table is small.
    const bool small = head.n_buckets * kSliceBytes <= kMostTables;
    compact_ = BucketSlots::pay(masked_ && small ? 4 * most : most, head.n_buckets) &&
               rows * row_bytes <= kProbeBytes;
    table_rows_ = compact_ ? most + 1 : head.n_buckets;
    // A pass's tables take half of the L2 cache, beside the rows that stream through it, those of
    // two slices all of it: codes and weights are gone through half as often, in 512 KB for 0.93 of
    // the time. More than kMostTables take longer where it is larger, too: 1.2 times, 1 MB of 2.
    // By fours, whose table rows are fetched ahead, those of two slices may take all of 1 MB where
    // L2 is not larger (13 bits: 0.9), and those of two hashes where columns of long sequences come
    // from the L3 cache, half as often then (65,536 rows: 0.9 with backward, 131,072: 0.85; causal
    // 1.1).
    const index_t l2 = cache_sizes().l2;
    const bool by_four = !kFast && made_by_four(head.query) && made_by_four(head.key);
    const index_t of_two_slices =
        std::min(l2, by_four && l2 < 4 * kMostTables ? 2 * kMostTables : kMostTables);
    const bool streams = head.order == Order::all && 4 * kSliceBytes * rows > cache_sizes().l3 / 4;
    const index_t tables = streams ? of_two_slices : std::min(l2 / 2, kMostTables);
    at_once_ = table_rows_ * 2 * kSliceBytes <= of_two_slices ? 2 : 1;
    group_ = compact_ || kFast  // sums of several hashes would leave 16 bits
                 ? 1
                 : std::clamp<index_t>(
                       tables / (table_rows_ * at_once_ * kSliceBytes), 1,
                       std::min<index_t>(by_four ? kHashesOfFour : kMaxGroup, head.n_hashes));
    const index_t wanted = std::max(head.query.batch, head.key.batch);
    batch_ =
        group_ *
        std::max<index_t>(
            std::min(wanted, kProbeBytes / (std::max<index_t>(rows, 1) * row_bytes)) / group_, 1);
    run_rows_ =
        std::clamp<index_t>(kProbeBytes / (batch_ * row_bytes), 16, std::max<index_t>(rows, 16));
    // What belongs to one hash and run, slots in a compact table and dot products that grow from
    // slice to slice, is not kept for a second visit.
    const bool together = compact_ || run_rows_ < rows || kFast;
    chunk_ = together ? last_slice_ - first_slice_ : at_once_;
    // Copies in blocks of columns are worthwhile where the columns of a pass are not in L2. Where
    // that is large, blocks of values and sums fit beside the tables and whole rows would not: from
    // kLeastBlock on, for so many passes (4,096 rows of 12 bits: 0.83 of the time). Integers have
    // blocks of their own, and their sums need one where there are several passes.
    const index_t block = rows * at_once_ * kWidth * index_t(sizeof(T));
    const index_t hashes_left = head.n_hashes - head.first_hash;
    const bool fits =
        l2 >= 4 * kMostTables && block >= kLeastBlock && hashes_left >= kPackedPasses * group_;
    const bool cut_up = kFast ? last_slice_ - first_slice_ > at_once_ : !together;
    blocks_ = cut_up && (fits || block > l2);
    whole_ = run_rows_ >= rows;
    cut(Arena());
    cut(Arena(thread_scratch(bytes_)));
    if (compact_) slots_.start(head.n_buckets);
  }

  index_t group() const { return group_; }
  bool whole() const { return whole_; }  // all rows are one run
  int at_once() const { return at_once_; }
  Expanded<T>& queries() { return queries_; }
  Expanded<T>& keys() { return keys_; }
  // A copy in blocks of columns where that pays. Its memory is number `use` of the passes, below
  // most_copies.
  template <class Element>
  ColumnBlocks<Element> blocks(Matrix<Element> matrix, int use) const {
    const bool all = first_slice_ == 0 && last_slice_ == (matrix.columns + kWidth - 1) / kWidth;
    const bool copied = blocks_ && all && matrix.data;
    return {matrix, copied ? block_memory_[use] : nullptr, at_once_ * kWidth};
  }
  // Of the visits to a hash.
  bool first_visit() const { return chunk_first_ == first_slice_; }
  bool last_visit() const { return chunk_last_ == last_slice_; }

  // body(hash, group) with empty tables for a group of hashes: once for every chunk of slices. It
  // tells whether to go on.
  template <class Body>
  void each_group(const Body& body) {
    for (index_t batch = s_.first_hash; batch < s_.n_hashes; batch += batch_) {
      const index_t end = std::min(batch + batch_, s_.n_hashes);
      for (chunk_first_ = first_slice_; chunk_first_ < last_slice_; chunk_first_ += chunk_) {
        chunk_last_ = std::min(chunk_first_ + chunk_, last_slice_);
        for (index_t hash = batch; hash < end; hash += group_) {
          const index_t group = std::min(group_, end - hash);
          begin(hash, group);
          if (!body(hash, group)) return;
        }
      }
    }
  }
  // The probes of all rows and one hash, until it is visited: whole() only. Those of its batch stay
  // there for each_group.
  Expanded<T>& probes_of(Expanded<T>& e, index_t hash) const {
    view(e, {0, e.side->rows, hash, 1});
    return e;
  }
  // Before each_group from a hash that has been visited: its probes are made again.
  void forget() {
    for (Expanded<T>* e : {&queries_, &keys_}) e->batch = e->run = {};
  }
  void clear() {
    empty_tables();
    std::memset(column_table_, 0, sizeof(T) * group_ * table_rows_);
  }

  // Adds the rows of `from` and reads with those of `to`, run by run in this order, which is that
  // of the rows that read. body(add, read) has a run's rows of either or of both.
  template <class Body>
  void sweep(Expanded<T>& from, Expanded<T>& to, Order order, index_t hash, index_t group,
             const Body& body) {
    const auto expand = [&](Expanded<T>& e, index_t first) {
      const index_t rows = std::clamp<index_t>(e.side->rows - first, 0, run_rows_);
      fill(e, {first, rows, hash, group});
      return rows;
    };
    if (order == Order::all && !whole_) {
      for (index_t first = 0; first < from.side->rows; first += run_rows_) {
        const index_t rows = expand(from, first);
        body(first, rows, 0);
      }
      for (index_t first = 0; first < to.side->rows; first += run_rows_) {
        const index_t rows = expand(to, first);
        body(first, 0, rows);
      }
      return;
    }
    const index_t runs = (std::max(from.side->rows, to.side->rows) + run_rows_ - 1) / run_rows_;
    for (index_t k = 0; k < runs; ++k) {
      const index_t first = (order == Order::causal ? k : runs - 1 - k) * run_rows_;
      const index_t added = expand(from, first), readers = expand(to, first);
      const index_t done = std::clamp<index_t>(s_.first_query - first, 0, readers);
      if (done > 0) body(first, std::min(added, done), 0);
      body(first + done, std::max<index_t>(added - done, 0), readers - done);
    }
  }

  // The rows of a run, for the kernels: what they are (rows may be null) and their probes.
  WeightedRows<T> rows(const Expanded<T>& e, index_t count, Matrix<const T> matrix,
                       index_t first) const {
    return rows_of<WeightedRows<T>>(e, e.weights, count, matrix, first);
  }
  FastWeightedRows rows(const Expanded<T>& e, index_t count, Matrix<const std::int16_t> matrix,
                        index_t first) const {
    return rows_of<FastWeightedRows>(e, e.fast_weights, count, matrix, first);
  }
  // Calls for every pass over slices with its table, slices and columns set. Tables of 16-bit
  // integers are those of the pass before, emptied: what is added is read within the call.
  template <class Call>
  void each_pass(index_t columns, const Call& call) const {
    for (index_t slice = chunk_first_; slice < chunk_last_; slice += at_once_) {
      Pass p;
      p.slices = int(std::min<index_t>(at_once_, chunk_last_ - slice));
      const index_t rows_before = kFast ? 0 : (slice - chunk_first_) * group_ * table_rows_;
      if (kFast && slice > chunk_first_) empty_tables();
      p.table = table_ + rows_before * kWidth;
      p.used = used_ ? used_ + rows_before : nullptr;
      p.width = int(std::min(p.slices * kWidth, columns - slice * kWidth));
      if constexpr (kFast)
        p.table_rows = table_rows_;
      else
        p.scale = s_.scale;
      call(p, slice * kWidth);
    }
  }
  // A single column, which gives the rows of `from` what is in add (null: ones) and takes with the
  // rows of `to` sums and dots with what is in read; where these are not wanted, null.
  void column(Order order, const Expanded<T>& from, index_t added, const T* add,
              const Expanded<T>& to, index_t readers, const T* read, index_t row, T* sum,
              T* dots) const {
    const auto one = [](const T* x) { return Matrix<const T>{x, 1, 0, 1}; };
    WeightedColumn<T> p;
    p.table = column_table_;
    p.order = order;
    p.add = rows(from, added, one(add), row);
    p.read = rows(to, readers, one(read), row);
    p.scale = s_.scale;
    p.sum = sum ? sum + row : nullptr;
    p.dots = dots;
    kernels().typed<T>().weighted_column_sum(p);
  }

 private:
  // Not a caller's arrays, whose batch is 1.
  static bool made_by_four(const WeightedSide<T>& side) {
    return kernels().makes_four_rows() && (side.n_probes == 3 || side.n_probes == 4) &&
           side.batch > 1;
  }
  template <class Rows, class Weight, class Element>
  static Rows rows_of(const Expanded<T>& e, const Weight* weights, index_t count,
                      Matrix<const Element> matrix, index_t first) {
    const index_t skipped = count > 0 ? (first - e.run.first) * e.probes() : 0;
    Rows r;
    r.count = count;
    r.n_probes = int(e.probes());
    r.slots = e.slots + skipped;
    r.weights = weights + skipped;
    if (matrix.data && count > 0) r.rows = matrix.row(first);
    r.stride = matrix.stride;
    r.valid = e.side->valid ? e.side->valid + first : nullptr;
    return r;
  }
  // Of 16-bit integers, a pass has the tables of the one before.
  index_t table_slices() const { return kFast ? std::min<index_t>(at_once_, chunk_) : chunk_; }
  void empty_tables() const {
    const index_t slices = std::min(table_slices(), chunk_last_ - chunk_first_);
    const std::size_t rows = group_ * table_rows_ * slices;
    used_ ? std::memset(used_, 0, rows * sizeof(*used_))
          : std::memset(table_, 0, rows * kSliceBytes);
  }
  // Empty tables, and slots of the keys of these hashes.
  void begin(index_t hash, index_t group) {
    clear();
    if (!compact_) return;
    slots_.clear();
    view(keys_, {0, s_.key.rows, hash, group});
    for (index_t k = 0; k < s_.key.rows * keys_.side->n_probes; ++k) slots_.add(keys_.slots[k]);
  }
  void cut(Arena arena) {
    const index_t rows_of_slices = group_ * table_rows_ * table_slices();
    table_ = arena.take<Table>(rows_of_slices * kWidth);
    used_ = masked_ ? arena.take<std::uint16_t>(rows_of_slices) : nullptr;
    column_table_ = arena.take<T>(group_ * table_rows_);
    const auto take = [&](const WeightedSide<T>& side) {
      const index_t probes = std::min(run_rows_, side.rows) * batch_ * side.n_probes;
      std::uint16_t* slots = arena.take<std::uint16_t>(probes);
      T* weights = arena.take<T>(probes);
      T* grads = arena.take<T>(side.take_grads ? probes : 0);
      std::uint32_t* fast = arena.take<std::uint32_t>(kFast ? probes / batch_ * group_ : 0);
      return Expanded<T>{&side, slots, weights, {}, {}, grads, fast};
    };
    queries_ = take(s_.query);
    keys_ = take(s_.key);
    const index_t probes = std::max(s_.query.n_probes, s_.key.n_probes);
    period_ = arena.take<std::uint16_t>(group_ > 1 ? kPeriod + group_ * probes : 0);
    const index_t rows = std::max(s_.query.rows, s_.key.rows);
    for (int use = 0; use < most_copies_; ++use)
      block_memory_[use] = arena.take<T>(blocks_ ? rows * s_.values.columns : 0);
    slots_ = compact_ ? BucketSlots(arena, table_rows_ - 1, s_.n_buckets) : BucketSlots();
    bytes_ = arena.used();
  }

  // From codes to table rows: the tables of a group, from hash h of the batch on, in turn.
  void number(const Expanded<T>& e, index_t h) const {
    const index_t t = e.side->n_probes, group = std::min(group_, e.batch.group - h);
    if (group == 1) return;
    // What is added repeats with the rows: a few of them at once, in whole vectors.
    const index_t row = group * t, count = e.batch.rows * row;
    const index_t period = std::min((kPeriod + row - 1) / row * row, count);
    for (index_t k = 0; k < period; ++k) period_[k] = std::uint16_t(k / t % group * table_rows_);
    std::uint16_t* slots = e.batch_slots + h * e.batch.rows * t;
    for (index_t first = 0; first < count; first += period)
      add(slots + first, period_, std::min(period, count - first));
  }
  static void add(std::uint16_t* __restrict to, const std::uint16_t* __restrict from,
                  index_t count) {
    for (index_t k = 0; k < count; ++k) to[k] = std::uint16_t(to[k] + from[k]);
  }
  // The probes of a group; in compact tables the codes as they come.
  void view(Expanded<T>& e, const ProbeRun& run) const {
    const ProbeRun& b = e.batch;
    if (b.first != run.first || b.rows != run.rows || run.hash < b.hash ||
        run.hash >= b.hash + b.group) {
      e.batch = {run.first, run.rows, run.hash, std::min(batch_, s_.n_hashes - run.hash)};
      e.side->probes(e.batch, group_, e.batch_slots, e.batch_weights);
      for (index_t h = 0; h < e.batch.group && !compact_; h += group_) number(e, h);
    }
    const index_t at = (run.hash - e.batch.hash) * run.rows * e.side->n_probes;
    e.slots = e.batch_slots + at;
    e.weights = e.batch_weights + at;
    e.grads = e.batch_grads + at;
  }
  void fill(Expanded<T>& e, const ProbeRun& run) const {
    const ProbeRun& is = e.run;
    if (run.rows == 0 || (is.first == run.first && is.rows == run.rows && is.hash == run.hash))
      return;
    view(e, run);
    e.run = run;
    const index_t count = run.rows * e.probes();
    if constexpr (kFast) kernels().fast_weights(e.weights, count, e.fast_weights);
    for (index_t k = 0; k < count && compact_; ++k) {
      e.slots[k] = slots_.of(e.slots[k]);
      if (kFast && e.slots[k] == 0) e.fast_weights[k] = 0;  // or what nobody reads would overflow
    }
  }

  const WeightedHead<T>& s_;
  index_t first_slice_, last_slice_, table_rows_, group_, batch_, run_rows_;
  index_t chunk_, chunk_first_ = 0, chunk_last_ = 0;  // slices
  int at_once_, most_copies_;
  bool compact_, masked_, blocks_, whole_;
  T* block_memory_[3];
  Table* table_;
  // Of the rows of slices: a pass of two leaves half of them alone. Null: not masked.
  std::uint16_t* used_;
  T* column_table_;
  std::uint16_t* period_;
  Expanded<T> queries_, keys_;
  BucketSlots slots_;
  std::size_t bytes_;
};

}  // namespace lshkit

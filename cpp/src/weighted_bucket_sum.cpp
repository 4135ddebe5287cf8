#include "weighted_bucket_sum.hpp"

#include <algorithm>
#include <cstring>

#include "bucket_sum.hpp"
#include "kernels/weighted_bucket_sum.hpp"
#include "parallel.hpp"

namespace lshkit {
namespace {

// A pass's tables should stay in the L2 cache.
constexpr index_t kPassBytes = index_t(512) << 10;
// Probes of a side that are there at once, at most: longer sides go in runs of rows.
constexpr index_t kProbeBytes = index_t(24) << 20;

// Probes of a run of rows, with codes replaced by table rows.
template <class T>
struct Expanded {
  const WeightedSide<T>* side;
  std::uint16_t* batch_slots;  // of a batch of hashes, one group after the other
  T* batch_weights;
  ProbeRun batch, run;       // what is there: a batch, and that group of it that is in use
  T* batch_grads = nullptr;  // of the weights, where they are wanted
  std::uint16_t* slots = nullptr;
  T *weights = nullptr, *grads = nullptr;

  index_t probes() const { return run.group * side->n_probes; }
};

// How a head is cut, and its buffers: tables of a group of hashes with all slices, and probes.
template <class T>
class HeadPasses {
 public:
  // Slices [first, last) of the values.
  HeadPasses(const WeightedHead<T>& head, index_t first, index_t last)
      : s_(head), first_slice_(first), last_slice_(last) {
    const index_t most = head.key.rows * head.key.n_probes;
    const index_t rows = std::max(head.query.rows, head.key.rows);
    const index_t row_bytes =
        std::max(head.query.n_probes, head.key.n_probes) * index_t(2 + sizeof(T));
    // Where most buckets must be empty, codes are replaced by slots in order of appearance among
    // the keys. Slot 0 is for codes that no key has.
    compact_ = most < head.n_buckets / 2 && rows * row_bytes <= kProbeBytes;
    table_rows_ = compact_ ? most + 1 : head.n_buckets;
    at_once_ = table_rows_ * 2 * kSliceBytes <= kPassBytes ? 2 : 1;
    group_ = compact_ ? 1
                      : std::clamp<index_t>(kPassBytes / (table_rows_ * at_once_ * kSliceBytes), 1,
                                            std::min<index_t>(kMaxGroup, head.n_hashes));
    const index_t wanted = std::max(head.query.batch, head.key.batch);
    batch_ =
        group_ *
        std::max<index_t>(
            std::min(wanted, kProbeBytes / (std::max<index_t>(rows, 1) * row_bytes)) / group_, 1);
    run_rows_ =
        std::clamp<index_t>(kProbeBytes / (batch_ * row_bytes), 16, std::max<index_t>(rows, 16));
    cut(Arena());
    cut(Arena(thread_scratch(bytes_)));
    if (compact_) std::memset(slot_of_, 0, sizeof(*slot_of_) * head.n_buckets);
  }

  index_t group() const { return group_; }
  Expanded<T>& queries() { return queries_; }
  Expanded<T>& keys() { return keys_; }

  // Empty tables, and slots of the keys of these hashes.
  void begin(index_t hash, index_t group) {
    clear();
    if (!compact_) return;
    for (index_t k = 0; k < used_; ++k) slot_of_[code_of_[k]] = 0;
    used_ = 0;
    view(keys_, {0, s_.key.rows, hash, group});
    for (index_t k = 0; k < s_.key.rows * keys_.side->n_probes; ++k) {
      std::uint16_t& slot = slot_of_[keys_.slots[k]];
      if (slot) continue;
      code_of_[used_++] = keys_.slots[k];
      slot = std::uint16_t(used_);
    }
  }
  void clear() {
    std::memset(table_, 0, group_ * table_rows_ * (last_slice_ - first_slice_) * kSliceBytes);
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
    if (order == Order::all) {
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
      body(first, added, readers);
    }
  }

  // The rows of a run, for the kernels: what they are (rows may be null) and their probes.
  WeightedRows<T> rows(const Expanded<T>& e, index_t count, Matrix<const T> matrix, index_t column,
                       index_t first) const {
    WeightedRows<T> r;
    r.count = count;
    r.n_probes = int(e.probes());
    r.slots = e.slots;
    r.weights = e.weights;
    if (matrix.data && count > 0) r.rows = matrix.row(first) + column;
    r.stride = matrix.stride;
    r.valid = e.side->valid ? e.side->valid + first : nullptr;
    return r;
  }
  // Calls for every pass over slices with its table, slices and columns set.
  template <class Call>
  void each_pass(index_t columns, const Call& call) const {
    constexpr index_t width = kSliceBytes / sizeof(T);
    for (index_t slice = first_slice_; slice < last_slice_; slice += at_once_) {
      WeightedPass<T> p;
      p.slices = int(std::min<index_t>(at_once_, last_slice_ - slice));
      p.table = table_ + (slice - first_slice_) * width * group_ * table_rows_;
      p.width = int(std::min(p.slices * width, columns - slice * width));
      p.scale = s_.scale;
      call(p, slice * width);
    }
  }
  T* column_table() const { return column_table_; }

 private:
  void cut(Arena arena) {
    table_ = arena.take<T>(group_ * table_rows_ * (last_slice_ - first_slice_) * kSliceBytes /
                           index_t(sizeof(T)));
    column_table_ = arena.take<T>(group_ * table_rows_);
    const auto take = [&](const WeightedSide<T>& side) {
      const index_t probes = std::min(run_rows_, side.rows) * batch_ * side.n_probes;
      std::uint16_t* slots = arena.take<std::uint16_t>(probes);
      T* weights = arena.take<T>(probes);
      return Expanded<T>{&side, slots, weights,
                         {},    {},    arena.take<T>(side.take_grads ? probes : 0)};
    };
    queries_ = take(s_.query);
    keys_ = take(s_.key);
    slot_of_ = arena.take<std::uint16_t>(compact_ ? s_.n_buckets : 0);
    code_of_ = arena.take<std::uint16_t>(compact_ ? table_rows_ : 0);
    bytes_ = arena.used();
  }

  // The probes of a group, codes as they come.
  void view(Expanded<T>& e, const ProbeRun& run) const {
    const ProbeRun& b = e.batch;
    if (b.first != run.first || b.rows != run.rows || run.hash < b.hash ||
        run.hash >= b.hash + b.group) {
      e.batch = {run.first, run.rows, run.hash, std::min(batch_, s_.n_hashes - run.hash)};
      e.side->probes(e.batch, group_, e.batch_slots, e.batch_weights);
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
    if (compact_) {
      for (index_t k = 0; k < count; ++k) e.slots[k] = slot_of_[e.slots[k]];
      return;
    }
    for (index_t h = 1; h < run.group; ++h) {
      const std::uint16_t offset = std::uint16_t(h * table_rows_);
      std::uint16_t* slot = e.slots + h * e.side->n_probes;
      for (index_t i = 0; i < run.rows; ++i, slot += e.probes())
        for (index_t a = 0; a < e.side->n_probes; ++a) slot[a] = std::uint16_t(slot[a] + offset);
    }
  }

  const WeightedHead<T>& s_;
  index_t first_slice_, last_slice_, table_rows_, group_, batch_, run_rows_;
  int at_once_;
  bool compact_;
  T *table_, *column_table_;
  Expanded<T> queries_, keys_;
  std::uint16_t *slot_of_, *code_of_;
  index_t used_ = 0;
  std::size_t bytes_;
};

template <class T>
Matrix<const T> read_only(Matrix<T> m) {
  return {m.data, m.stride, m.rows, m.columns};
}

constexpr Order transposed(Order order) {
  return order == Order::all ? order : order == Order::causal ? Order::reversed : Order::causal;
}

}  // namespace

template <class T>
void weighted_sum(const WeightedHead<T>& s, Matrix<T> out, T* weight_sums, index_t first,
                  index_t last) {
  if (weight_sums) std::fill_n(weight_sums, s.query.rows, T(0));
  HeadPasses<T> passes(s, first, last);
  for (index_t hash = 0; hash < s.n_hashes; hash += passes.group()) {
    const index_t group = std::min(passes.group(), s.n_hashes - hash);
    passes.begin(hash, group);
    passes.sweep(passes.keys(), passes.queries(), s.order, hash, group,
                 [&](index_t row, index_t added, index_t readers) {
                   passes.each_pass(s.values.columns, [&](WeightedPass<T>& p, index_t column) {
                     p.order = s.order;
                     p.add = passes.rows(passes.keys(), added, s.values, column, row);
                     p.read = passes.rows(passes.queries(), readers, {}, 0, row);
                     p.sum = readers ? out.row(row) + column : nullptr;
                     p.sum_stride = out.stride;
                     p.accumulate_sum = hash > 0;
                     kernels().typed<T>().weighted_bucket_sum(p);
                   });
                   if (!weight_sums) return;
                   WeightedColumn<T> p;
                   p.table = passes.column_table();
                   p.order = s.order;
                   p.add = passes.rows(passes.keys(), added, {}, 0, row);
                   p.read = passes.rows(passes.queries(), readers, {}, 0, row);
                   p.scale = s.scale;
                   p.sum = weight_sums + row;
                   kernels().typed<T>().weighted_column_sum(p);
                 });
  }
}

template <class T>
void weighted_sum_backward(const WeightedHead<T>& s, Matrix<const T> grad, const T* bias,
                           Matrix<T> value_grad) {
  HeadPasses<T> passes(s, 0, slice_count<T>(s.values.columns));
  Expanded<T>&queries = passes.queries(), &keys = passes.keys();
  const Order back = transposed(s.order);
  for (index_t hash = 0; hash < s.n_hashes; hash += passes.group()) {
    const index_t group = std::min(passes.group(), s.n_hashes - hash);
    passes.begin(hash, group);
    const auto take = [&](const Expanded<T>& e, index_t rows) {
      const bool last = hash + group == e.batch.hash + e.batch.group;
      if (rows > 0 && last && e.side->take_grads)
        e.side->take_grads(e.batch, passes.group(), e.batch_weights, e.batch_grads);
    };
    // A query's weight gets the product of its gradient with the bucket of values.
    if (s.query.take_grads) {
      passes.sweep(keys, queries, s.order, hash, group,
                   [&](index_t row, index_t added, index_t readers) {
                     passes.each_pass(s.values.columns, [&](WeightedPass<T>& p, index_t column) {
                       p.order = s.order;
                       p.add = passes.rows(keys, added, s.values, column, row);
                       p.read = passes.rows(queries, readers, grad, column, row);
                       p.dots = queries.grads;
                       p.accumulate_dots = column > 0;
                       kernels().typed<T>().weighted_bucket_sum(p);
                     });
                     if (bias) {
                       WeightedColumn<T> p;
                       p.table = passes.column_table();
                       p.order = s.order;
                       p.add = passes.rows(keys, added, {}, 0, row);
                       p.read = passes.rows(queries, readers, {bias, 1, s.query.rows, 1}, 0, row);
                       p.scale = s.scale;
                       p.dots = queries.grads;
                       kernels().typed<T>().weighted_column_sum(p);
                     }
                     take(queries, readers);
                   });
      passes.clear();
    }
    // A key's weight gets that of its value with the bucket of gradients, and its value the sum of
    // those buckets.
    passes.sweep(queries, keys, back, hash, group,
                 [&](index_t row, index_t added, index_t readers) {
                   passes.each_pass(s.values.columns, [&](WeightedPass<T>& p, index_t column) {
                     p.order = back;
                     p.add = passes.rows(queries, added, grad, column, row);
                     p.read = passes.rows(keys, readers, s.values, column, row);
                     p.sum = readers ? value_grad.row(row) + column : nullptr;
                     p.sum_stride = value_grad.stride;
                     p.accumulate_sum = hash > 0;
                     if (s.key.take_grads) {
                       p.dots = keys.grads;
                       p.accumulate_dots = column > 0;
                     }
                     kernels().typed<T>().weighted_bucket_sum(p);
                   });
                   if (bias && s.key.take_grads) {
                     WeightedColumn<T> p;
                     p.table = passes.column_table();
                     p.order = back;
                     p.add = passes.rows(queries, added, {bias, 1, s.query.rows, 1}, 0, row);
                     p.read = passes.rows(keys, readers, {}, 0, row);
                     p.scale = s.scale;
                     p.dots = keys.grads;
                     kernels().typed<T>().weighted_column_sum(p);
                   }
                   take(keys, readers);
                 });
  }
}

namespace {

// The probes of a head as the caller's arrays have them.
template <class T, class Code>
WeightedSide<T> side_of(const Probes<T>& probes, index_t head, index_t rows, index_t n_hashes,
                        const std::uint8_t* valid, T* weight_grads) {
  const index_t t = probes.n_probes, row_size = n_hashes * t, begin = head * rows * row_size;
  const Code* codes = static_cast<const Code*>(probes.codes.data) + begin;
  const T* weights = probes.weights ? probes.weights + begin : nullptr;
  WeightedSide<T> side{rows, t, valid, nullptr, nullptr};
  side.probes = [=](const ProbeRun& run, index_t, std::uint16_t* to_codes, T* to_weights) {
    const index_t count = run.group * t;
    for (index_t i = 0; i < run.rows; ++i) {
      const index_t at = (run.first + i) * row_size + run.hash * t;
      for (index_t a = 0; a < count; ++a) {
        to_codes[i * count + a] = codes[at + a];
        to_weights[i * count + a] = weights ? weights[at + a] : T(1);
      }
    }
  };
  if (!weight_grads) return side;
  weight_grads += begin;
  side.take_grads = [=](const ProbeRun& run, index_t, const T*, const T* grads) {
    const index_t count = run.group * t;
    for (index_t i = 0; i < run.rows; ++i) {
      T* to = weight_grads + (run.first + i) * row_size + run.hash * t;
      if (valid && !valid[run.first + i])
        std::fill_n(to, count, T(0));
      else
        std::copy_n(grads + i * count, count, to);
    }
  };
  return side;
}

template <class T>
WeightedHead<T> head_of(const BucketSumShape& shape, const Probes<T>& queries,
                        const Probes<T>& keys, Tensor<const T> values, Mask key_mask, Order order,
                        T scale, index_t head, T* query_grads, T* key_grads) {
  const index_t batch = head / shape.heads;
  const std::uint8_t* valid = key_mask.rows(batch);
  const auto side = [&](const Probes<T>& probes, index_t rows, const std::uint8_t* rows_valid,
                        T* grads) {
    return probes.codes.bytes == 1
               ? side_of<T, std::uint8_t>(probes, head, rows, shape.n_hashes, rows_valid, grads)
               : side_of<T, std::uint16_t>(probes, head, rows, shape.n_hashes, rows_valid, grads);
  };
  return {
      side(queries, shape.n_queries, nullptr, query_grads),
      side(keys, shape.n_keys, valid, key_grads),
      shape.n_hashes,
      shape.n_buckets,
      {values.matrix(batch, head % shape.heads), values.row_stride, shape.n_keys, shape.n_values},
      order,
      scale};
}

}  // namespace

template <class T>
void weighted_bucket_sum(const BucketSumShape& shape, Probes<T> queries, Probes<T> keys,
                         Tensor<const T> values, Mask key_mask, Order order, T scale, Tensor<T> out,
                         int threads) {
  const index_t heads = shape.batch * shape.heads, slices = slice_count<T>(shape.n_values);
  const index_t parts = heads >= 2 * thread_count(threads) ? 1 : slices;
  parallel_for(heads * parts, threads, [&](index_t task) {
    const index_t head = task / parts, part = task % parts;
    const WeightedHead<T> s =
        head_of<T>(shape, queries, keys, values, key_mask, order, scale, head, nullptr, nullptr);
    weighted_sum<T>(s,
                    {out.matrix(head / shape.heads, head % shape.heads), out.row_stride,
                     shape.n_queries, shape.n_values},
                    nullptr, parts == 1 ? 0 : part, parts == 1 ? slices : part + 1);
  });
}

template <class T>
void weighted_bucket_sum_backward(const BucketSumShape& shape, Probes<T> queries, Probes<T> keys,
                                  Tensor<const T> values, Mask key_mask, Order order, T scale,
                                  WeightedSumGradients<T> gradients, int threads) {
  const index_t heads = shape.batch * shape.heads;
  parallel_for(heads, threads, [&](index_t head) {
    const index_t batch = head / shape.heads, h = head % shape.heads;
    const WeightedHead<T> s = head_of<T>(shape, queries, keys, values, key_mask, order, scale, head,
                                         gradients.query_weights, gradients.key_weights);
    const Matrix<T> value_grad{gradients.values.matrix(batch, h), gradients.values.row_stride,
                               shape.n_keys, shape.n_values};
    weighted_sum_backward<T>(
        s,
        {gradients.out.matrix(batch, h), gradients.out.row_stride, shape.n_queries, shape.n_values},
        nullptr, value_grad);
    for (index_t j = 0; s.key.valid && j < shape.n_keys; ++j)
      if (!s.key.valid[j]) std::fill_n(value_grad.row(j), shape.n_values, T(0));
  });
}

#define LSHKIT_INSTANTIATE(T)                                                                     \
  template void weighted_sum(const WeightedHead<T>&, Matrix<T>, T*, index_t, index_t);            \
  template void weighted_sum_backward(const WeightedHead<T>&, Matrix<const T>, const T*,          \
                                      Matrix<T>);                                                 \
  template void weighted_bucket_sum(const BucketSumShape&, Probes<T>, Probes<T>, Tensor<const T>, \
                                    Mask, Order, T, Tensor<T>, int);                              \
  template void weighted_bucket_sum_backward(const BucketSumShape&, Probes<T>, Probes<T>,         \
                                             Tensor<const T>, Mask, Order, T,                     \
                                             WeightedSumGradients<T>, int);
LSHKIT_INSTANTIATE(float)
LSHKIT_INSTANTIATE(double)

}  // namespace lshkit

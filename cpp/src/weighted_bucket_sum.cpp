#include "weighted_bucket_sum.hpp"

#include <algorithm>
#include <cstring>

#include "bucket_sum.hpp"
#include "fast_weighted_sum.hpp"
#include "head_pairs.hpp"
#include "head_passes.hpp"
#include "kernels/weighted_bucket_sum.hpp"
#include "parallel.hpp"

namespace lshkit {
namespace {

// By pairs for as many hashes as they are few in; causal, for all hashes of as many queries.
template <class T>
void sum_by_pairs(WeightedHead<T>& s, Matrix<T> out, T* weight_sums, index_t first, index_t last) {
  if (!HeadPairs<T>::pay(s)) return;
  constexpr index_t width = kSliceBytes / sizeof(T);
  const index_t columns = std::min(last * width, s.values.columns) - first * width;
  HeadPairs<T> pairs(s, false);
  index_t hash = 0, queries = s.query.rows;
  for (; hash < s.n_hashes && (queries = pairs.fill(hash)) > 0; hash += pairs.hashes()) {
    WeightedPairSum<T> p{pairs.pairs(), {}, hash > 0, weight_sums};
    p.values = {s.values.data + first * width, s.values.stride, s.values.rows, columns};
    p.sum = {out.data + first * width, out.stride, out.rows, columns};
    kernels().typed<T>().weighted_pair_sum(p);
  }
  s.first_hash = hash;
  if (s.order == Order::all || queries == s.query.rows) return;
  s.first_hash = 0;
  s.first_query = queries;
  if (weight_sums) std::fill(weight_sums + queries, weight_sums + s.query.rows, T(0));
}
template <class T>
index_t gradients_by_pairs(const WeightedHead<T>& s, Matrix<const T> grad, const T* bias,
                           Matrix<T> value_grad) {
  if (!HeadPairs<T>::pay(s)) return 0;
  for (index_t j = 0; value_grad.data && j < value_grad.rows; ++j)
    std::fill_n(value_grad.row(j), value_grad.columns, T(0));
  HeadPairs<T> pairs(s, true);
  index_t hash = 0;
  for (; hash < s.n_hashes && pairs.fill(hash) == s.query.rows; hash += pairs.hashes()) {
    WeightedPairGradient<T> p{pairs.pairs(),           grad,      bias, pairs.clear_query_grads(),
                              pairs.clear_key_grads(), value_grad};
    p.values = s.values;
    kernels().typed<T>().weighted_pair_gradient(p);
    pairs.take_grads();
  }
  return hash;
}

}  // namespace

template <class T>
void weighted_sum(const WeightedHead<T>& head, Matrix<T> out, T* weight_sums, index_t first,
                  index_t last) {
  if (weight_sums) std::fill_n(weight_sums, head.query.rows, T(0));
  WeightedHead<T> s = head;
  sum_by_pairs(s, out, weight_sums, first, last);
  if constexpr (sizeof(T) == sizeof(float))
    if (first == 0 && last == slice_count<T>(s.values.columns))
      s.first_hash = fast_weighted_sum(s, out, weight_sums);
  if (s.first_hash == s.n_hashes) return;
  HeadPasses<T> passes(s, first, last, 2);
  const ColumnBlocks<const T> values = passes.blocks(s.values, 0);
  const ColumnBlocks<T> sums = passes.blocks(out, 1);
  values.load();
  if (s.first_hash > 0 || s.first_query > 0) sums.load();
  passes.each_group([&](index_t hash, index_t group) {
    passes.sweep(passes.keys(), passes.queries(), s.order, hash, group,
                 [&](index_t row, index_t added, index_t readers) {
                   passes.each_pass(s.values.columns, [&](WeightedPass<T>& p, index_t column) {
                     p.order = s.order;
                     p.add = passes.rows(passes.keys(), added, values.from(column), row);
                     p.read = passes.rows(passes.queries(), readers, Matrix<const T>{}, row);
                     const Matrix<T> to = sums.from(column);
                     p.sum = readers ? to.row(row) : nullptr;
                     p.sum_stride = to.stride;
                     p.accumulate_sum = hash > 0;
                     kernels().typed<T>().weighted_bucket_sum(p);
                   });
                   if (weight_sums && passes.first_visit())
                     passes.column(s.order, passes.keys(), added, nullptr, passes.queries(),
                                   readers, nullptr, row, weight_sums, nullptr);
                 });
    return true;
  });
  sums.store();
}

template <class T>
void weighted_sum_backward(const WeightedHead<T>& head, Matrix<const T> grad, const T* bias,
                           Matrix<T> value_grad) {
  WeightedHead<T> s = head;
  s.first_hash = gradients_by_pairs(head, grad, bias, value_grad);
  if constexpr (sizeof(T) == sizeof(float))
    s.first_hash = fast_weighted_sum_backward(s, grad, bias, value_grad);
  if (s.first_hash == s.n_hashes) return;
  HeadPasses<T> passes(s, 0, slice_count<T>(s.values.columns), 3);
  Expanded<T>&queries = passes.queries(), &keys = passes.keys();
  const Order back = transposed_order(s.order);
  const ColumnBlocks<const T> values = passes.blocks(s.values, 0), grads = passes.blocks(grad, 1);
  const ColumnBlocks<T> value_grads = passes.blocks(value_grad, 2);
  values.load();
  grads.load();
  if (s.first_hash > 0) value_grads.load();
  passes.each_group([&](index_t hash, index_t group) {
    const auto take = [&](const Expanded<T>& e, index_t rows) {
      const bool last = passes.last_visit() && hash + group == e.batch.hash + e.batch.group;
      if (rows > 0 && last && e.side->take_grads)
        e.side->take_grads(e.batch, passes.group(), e.batch_weights, e.batch_grads);
    };
    // A query's weight gets the product of its gradient with the bucket of values.
    if (s.query.take_grads) {
      passes.sweep(keys, queries, s.order, hash, group,
                   [&](index_t row, index_t added, index_t readers) {
                     passes.each_pass(s.values.columns, [&](WeightedPass<T>& p, index_t column) {
                       p.order = s.order;
                       p.add = passes.rows(keys, added, values.from(column), row);
                       p.read = passes.rows(queries, readers, grads.from(column), row);
                       p.dots = queries.grads;
                       p.accumulate_dots = column > 0;
                       kernels().typed<T>().weighted_bucket_sum(p);
                     });
                     if (bias && passes.first_visit())
                       passes.column(s.order, keys, added, nullptr, queries, readers, bias, row,
                                     nullptr, queries.grads);
                     take(queries, readers);
                   });
      passes.clear();
    }
    if (!value_grad.data && !s.key.take_grads) return true;
    // A key's weight gets that of its value with the bucket of gradients, and its value the sum of
    // those buckets.
    passes.sweep(queries, keys, back, hash, group,
                 [&](index_t row, index_t added, index_t readers) {
                   passes.each_pass(s.values.columns, [&](WeightedPass<T>& p, index_t column) {
                     p.order = back;
                     p.add = passes.rows(queries, added, grads.from(column), row);
                     p.read = passes.rows(keys, readers, values.from(column), row);
                     const Matrix<T> to = value_grads.from(column);
                     p.sum = readers && value_grad.data ? to.row(row) : nullptr;
                     p.sum_stride = to.stride;
                     p.accumulate_sum = hash > 0;
                     if (s.key.take_grads) {
                       p.dots = keys.grads;
                       p.accumulate_dots = column > 0;
                     }
                     kernels().typed<T>().weighted_bucket_sum(p);
                   });
                   if (bias && s.key.take_grads && passes.first_visit())
                     passes.column(back, queries, added, bias, keys, readers, nullptr, row, nullptr,
                                   keys.grads);
                   take(keys, readers);
                 });
    return true;
  });
  value_grads.store();
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
  side.probes = [=](const ProbeRun& run, index_t group, std::uint16_t* to_codes, T* to_weights) {
    for (index_t h = 0; h < run.group; h += group) {
      const index_t count = std::min(group, run.group - h) * t;
      for (index_t i = 0; i < run.rows; ++i, to_codes += count, to_weights += count) {
        const index_t at = (run.first + i) * row_size + (run.hash + h) * t;
        for (index_t a = 0; a < count; ++a) {
          to_codes[a] = codes[at + a];
          to_weights[a] = weights ? weights[at + a] : T(1);
        }
      }
    }
  };
  if (!weight_grads) return side;
  weight_grads += begin;
  side.take_grads = [=](const ProbeRun& run, index_t group, const T*, const T* grads) {
    for (index_t h = 0; h < run.group; h += group) {
      const index_t count = std::min(group, run.group - h) * t;
      for (index_t i = 0; i < run.rows; ++i, grads += count) {
        T* to = weight_grads + (run.first + i) * row_size + (run.hash + h) * t;
        if (valid && !valid[run.first + i])
          std::fill_n(to, count, T(0));
        else
          std::copy_n(grads, count, to);
      }
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
  const index_t heads = shape.batch * shape.heads;
  const HeadParts parts(heads, slice_count<T>(shape.n_values), threads);
  parallel_for(heads * parts.count, threads, [&](index_t task) {
    const index_t head = task / parts.count, part = task % parts.count;
    const WeightedHead<T> s =
        head_of<T>(shape, queries, keys, values, key_mask, order, scale, head, nullptr, nullptr);
    weighted_sum<T>(s,
                    {out.matrix(head / shape.heads, head % shape.heads), out.row_stride,
                     shape.n_queries, shape.n_values},
                    nullptr, parts.first(part), parts.first(part + 1));
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

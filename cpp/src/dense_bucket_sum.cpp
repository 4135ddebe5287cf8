#include "dense_bucket_sum.hpp"

#include <algorithm>
#include <cstring>

#include "bucket_sum.hpp"
#include "kernels/dense_bucket_sum.hpp"
#include "parallel.hpp"

namespace lshkit {
namespace {

constexpr index_t kMostBuckets = 4096;  // beyond, a chunk of weights would leave the cache
constexpr index_t kTableBytes = index_t(2) << 20;   // of a batch of hashes
constexpr index_t kGroupBytes = index_t(32) << 10;  // tables that rows of a chunk meet together
constexpr index_t kRows = 128;                      // of a chunk
// In a causal chunk pairs of rows meet one by one: work that grows with its length.
constexpr index_t kCausalRows = 64;

index_t padded(index_t n) { return (n + 15) / 16 * 16; }

bool finite(Matrix<const float> x, const std::uint8_t* valid) {
  std::uint32_t not_finite = 0;
  for (index_t i = 0; i < x.rows; ++i) {
    if (valid && !valid[i]) continue;
    const float* row = x.row(i);
    for (index_t c = 0; c < x.columns; ++c) {
      std::uint32_t bits;
      std::memcpy(&bits, row + c, sizeof(bits));
      not_finite |= (bits & 0x7fffffffu) >= 0x7f800000u;
    }
  }
  return !not_finite;
}

// How a head is cut, its buffers, and the steps of a chunk. Tables hold scaled sums.
class Chunks {
 public:
  static constexpr index_t kPairStride = kCausalRows + 16;

  Chunks(const WeightedHead<float>& s, index_t columns, bool with_column, bool backward)
      : causal_(s.order == Order::causal),
        with_column_(with_column),
        backward_(backward),
        n_buckets_(s.n_buckets),
        columns_(columns),
        stride_(padded(columns)),
        rows(causal_ ? kCausalRows : kRows) {
    const index_t table = n_buckets_ * stride_ * index_t(sizeof(float));
    batch_ = std::clamp<index_t>(kTableBytes / table, 1, s.n_hashes);
    group_ = std::clamp<index_t>(kGroupBytes / table, 1, batch_);
    cut(Arena());
    cut(Arena(thread_scratch(bytes_)));
  }

 private:
  bool causal_, with_column_, backward_;
  index_t n_buckets_, columns_, stride_, batch_, group_;
  float *table_, *column_, *first_, *second_, *grads_;
  std::size_t bytes_;

 public:
  index_t rows;             // of a chunk
  float *value, *grad;      // (rows, stride), scaled
  float *value_t, *grad_t;  // (columns, weight_stride)
  float *ones, *bias;       // (rows)
  float *pairs, *products;  // of a causal chunk, at kPairStride

  index_t batch() const { return batch_; }  // hashes whose tables are kept
  index_t stride() const { return stride_; }
  // Powers of two apart, the rows of a column would share a few sets of the cache.
  index_t weight_stride() const { return rows + 16; }

  void clear(index_t hashes) const {
    std::memset(table_, 0, sizeof(float) * hashes * n_buckets_ * stride_);
    std::memset(column_, 0, sizeof(float) * hashes * n_buckets_);
  }
  // body(row, added, readers) for all chunks.
  template <class Body>
  void sweep(const WeightedSide<float>& from, const WeightedSide<float>& to, Order order,
             const Body& body) const {
    const auto count = [&](const WeightedSide<float>& side, index_t row) {
      return std::clamp<index_t>(side.rows - row, 0, rows);
    };
    if (order == Order::all) {
      for (index_t row = 0; row < from.rows; row += rows) body(row, count(from, row), 0);
      for (index_t row = 0; row < to.rows; row += rows) body(row, 0, count(to, row));
      return;
    }
    const index_t chunks = (std::max(from.rows, to.rows) + rows - 1) / rows;
    for (index_t i = 0; i < chunks; ++i) {
      const index_t row = (order == Order::causal ? i : chunks - 1 - i) * rows;
      body(row, count(from, row), count(to, row));
    }
  }
  // body(run, table) for the groups of the hashes [hash, hash + hashes).
  template <class Body>
  void each_group(index_t row, index_t hash, index_t hashes, const Body& body) const {
    for (index_t h = 0; h < hashes; h += group_) {
      const index_t group = std::min(group_, hashes - h), at = h * n_buckets_;
      body(ProbeRun{row, 0, hash + h, group},
           DenseTable{table_ + at * stride_, group * n_buckets_, stride_, columns_,
                      with_column_ ? column_ + at : nullptr});
    }
  }
  // In the first or the second buffer.
  DenseWeights weights(const WeightedSide<float>& side, ProbeRun run, index_t count,
                       bool second = false) const {
    const DenseWeights w{second ? second_ : first_, weight_stride(), count};
    run.rows = count;
    if (count > 0) side.dense(run, w.data, w.stride);
    return w;
  }
  DenseWeights grads(index_t count) const { return {grads_, weight_stride(), count}; }

  void pack(Matrix<const float> x, const WeightedSide<float>& side, index_t row, float scale,
            float* to) const {
    kernels().dense_pack(part(x, side, row), side.valid ? side.valid + row : nullptr, scale, to,
                         stride_);
  }
  void pack_transposed(Matrix<const float> x, const WeightedSide<float>& side, index_t row,
                       float* to) const {
    kernels().dense_pack_transposed(part(x, side, row), side.valid ? side.valid + row : nullptr, to,
                                    weight_stride());
  }
  // pairs = (or +=, add) the products of the weights of queries and keys.
  void multiply_weights(index_t count, const DenseWeights& q, const DenseWeights& k,
                        bool add) const {
    kernels().dense_matmul(q.rows, k.rows, count, q.data, 1, q.stride, k.data, k.stride, pairs,
                           kPairStride, add);
  }
  // to += weights * products.
  void add_products(index_t count, const DenseWeights& w, const DenseWeights& to) const {
    kernels().dense_matmul(count, to.rows, w.rows, w.data, w.stride, 1, products, kPairStride,
                           to.data, to.stride, true);
  }

 private:
  Matrix<const float> part(Matrix<const float> x, const WeightedSide<float>& side,
                           index_t row) const {
    return {x.row(row), x.stride, std::min(rows, side.rows - row), x.columns};
  }
  void cut(Arena arena) {
    const index_t table = batch_ * n_buckets_, group = group_ * n_buckets_ * weight_stride();
    table_ = arena.take<float>(table * stride_);
    column_ = arena.take<float>(table);
    first_ = arena.take<float>(group);
    second_ = arena.take<float>(group);
    grads_ = arena.take<float>(backward_ ? group : 0);
    value = arena.take<float>(rows * stride_);
    grad = arena.take<float>(backward_ ? rows * stride_ : 0);
    value_t = arena.take<float>(backward_ ? stride_ * weight_stride() : 0);
    grad_t = arena.take<float>(backward_ ? stride_ * weight_stride() : 0);
    ones = arena.take<float>(rows);
    bias = arena.take<float>(rows);
    pairs = arena.take<float>(causal_ ? rows * kPairStride : 0);
    products = arena.take<float>(causal_ && backward_ ? rows * kPairStride : 0);
    bytes_ = arena.used();
  }
};

// Zeros after the diagonal, or else before it.
void keep_triangle(float* pairs, index_t rows, index_t columns, bool lower) {
  for (index_t i = 0; i < rows; ++i) {
    float* row = pairs + i * Chunks::kPairStride;
    if (lower)
      std::fill(row + std::min(i + 1, columns), row + columns, 0.0f);
    else
      std::fill(row, row + std::min(i, columns), 0.0f);
  }
}

void clear_rows(Matrix<float> m) {
  for (index_t i = 0; i < m.rows; ++i) std::memset(m.row(i), 0, sizeof(float) * m.columns);
}

}  // namespace

bool dense_sum_pays(const WeightedHead<float>& s) {
  if (!s.query.dense || !s.key.dense) return false;
  if (s.n_buckets > kMostBuckets || s.values.columns == 0) return false;
  const auto [fewer, more] = std::minmax({s.query.n_probes, s.key.n_probes});
  return more == s.n_buckets && (fewer == more || s.order == Order::all);
}

bool dense_sum(const WeightedHead<float>& s, Matrix<float> out, float* weight_sums, index_t first,
               index_t last) {
  constexpr index_t width = kSliceBytes / sizeof(float);
  const index_t column = first * width;
  const index_t columns = std::min(last * width, s.values.columns) - column;
  const Matrix<const float> values{s.values.data + column, s.values.stride, s.values.rows, columns};
  const Matrix<float> to{out.data + column, out.stride, s.query.rows, columns};
  if (s.order == Order::causal && !finite(values, s.key.valid)) return false;
  const Kernels& k = kernels();
  const Chunks c(s, columns, weight_sums != nullptr, false);
  clear_rows(to);
  if (weight_sums) std::fill_n(weight_sums, s.query.rows, 0.0f);
  std::fill_n(c.ones, c.rows, s.scale);
  for (index_t hash = 0; hash < s.n_hashes; hash += c.batch()) {
    const index_t hashes = std::min(c.batch(), s.n_hashes - hash);
    c.clear(hashes);
    c.sweep(s.key, s.query, s.order, [&](index_t row, index_t keys, index_t queries) {
      if (keys) c.pack(values, s.key, row, s.scale, c.value);
      const bool both = keys && queries;
      float* sums = weight_sums ? weight_sums + row : nullptr;
      bool add = false;
      c.each_group(row, hash, hashes, [&](const ProbeRun& run, const DenseTable& table) {
        const DenseWeights q = c.weights(s.query, run, queries);
        const DenseWeights w = c.weights(s.key, run, keys, true);
        if (queries) k.dense_read(table, q, to.row(row), to.stride, sums);
        if (both) c.multiply_weights(table.count, q, w, add);
        if (keys) k.dense_add(table, w, c.value, c.ones);
        add = true;
      });
      if (!both) return;
      keep_triangle(c.pairs, queries, keys, true);
      k.dense_matmul(queries, columns, keys, c.pairs, c.kPairStride, 1, c.value, c.stride(),
                     to.row(row), to.stride, true);
      for (index_t i = 0; sums && i < queries; ++i) {
        float sum = 0;
        for (index_t j = 0; j < keys; ++j) sum += c.pairs[i * c.kPairStride + j];
        sums[i] += s.scale * sum;
      }
    });
  }
  return true;
}

bool dense_sum_backward(const WeightedHead<float>& s, Matrix<const float> grad, const float* bias,
                        Matrix<float> value_grad) {
  const index_t columns = s.values.columns;
  const bool causal = s.order == Order::causal;
  if (causal && !(finite(s.values, s.key.valid) && finite(grad, s.query.valid))) return false;
  const Kernels& k = kernels();
  const Chunks c(s, columns, bias != nullptr, true);
  clear_rows(value_grad);
  // Values go with a column of ones, gradients with bias.
  const auto fill_bias = [&](index_t row, index_t queries, float scale) {
    for (index_t i = 0; bias && i < queries; ++i)
      c.bias[i] = !s.query.valid || s.query.valid[row + i] ? scale * bias[row + i] : 0;
  };
  const auto take = [](const WeightedSide<float>& side, ProbeRun run, const DenseWeights& w,
                       const DenseWeights& g) {
    run.rows = w.rows;
    side.take_dense_grads(run, w.data, g.data, w.stride);
  };
  for (index_t hash = 0; hash < s.n_hashes; hash += c.batch()) {
    const index_t hashes = std::min(c.batch(), s.n_hashes - hash);
    // A query's weights get the products of its gradient with the tables of values.
    if (s.query.take_dense_grads) {
      c.clear(hashes);
      std::fill_n(c.ones, c.rows, s.scale);
      c.sweep(s.key, s.query, s.order, [&](index_t row, index_t keys, index_t queries) {
        if (causal && !queries) return;
        if (keys) c.pack(s.values, s.key, row, s.scale, c.value);
        if (queries) c.pack_transposed(grad, s.query, row, c.grad_t);
        fill_bias(row, queries, 1);
        const bool both = keys && queries;
        if (both) {  // (keys, queries)
          k.dense_matmul(keys, queries, columns, c.value, c.stride(), 1, c.grad_t,
                         c.weight_stride(), c.products, c.kPairStride, false);
          for (index_t j = 0; bias && j < keys; ++j)
            for (index_t i = 0; i < queries; ++i)
              c.products[j * c.kPairStride + i] += s.scale * c.bias[i];
          keep_triangle(c.products, keys, queries, false);
        }
        c.each_group(row, hash, hashes, [&](const ProbeRun& run, const DenseTable& table) {
          const DenseWeights q = c.weights(s.query, run, queries);
          const DenseWeights w = c.weights(s.key, run, keys, true);
          const DenseWeights g = c.grads(queries);
          if (queries) k.dense_dots(table, c.grad_t, c.bias, g);
          if (both) c.add_products(table.count, w, g);
          if (keys) k.dense_add(table, w, c.value, c.ones);
          if (queries) take(s.query, run, q, g);
        });
      });
    }
    // A key's weights get the products of its value with the tables of gradients, and its value
    // the weighted sum of those.
    c.clear(hashes);
    std::fill_n(c.ones, c.rows, 1.0f);
    const bool dots = bool(s.key.take_dense_grads);
    const Order back = causal ? Order::reversed : Order::all;
    c.sweep(s.query, s.key, back, [&](index_t row, index_t queries, index_t keys) {
      if (queries) c.pack(grad, s.query, row, s.scale, c.grad);
      if (keys) c.pack_transposed(s.values, s.key, row, c.value_t);
      fill_bias(row, queries, s.scale);
      const bool both = keys && queries;
      if (both && dots) {  // (queries, keys)
        k.dense_matmul(queries, keys, columns, c.grad, c.stride(), 1, c.value_t, c.weight_stride(),
                       c.products, c.kPairStride, false);
        for (index_t i = 0; bias && i < queries; ++i)
          for (index_t j = 0; j < keys; ++j) c.products[i * c.kPairStride + j] += c.bias[i];
        keep_triangle(c.products, queries, keys, true);
      }
      bool add = false;
      c.each_group(row, hash, hashes, [&](const ProbeRun& run, const DenseTable& table) {
        const DenseWeights q = c.weights(s.query, run, queries, true);
        const DenseWeights w = c.weights(s.key, run, keys);
        const DenseWeights g = c.grads(keys);
        if (keys) k.dense_read(table, w, value_grad.row(row), value_grad.stride, nullptr);
        if (keys && dots) k.dense_dots(table, c.value_t, c.ones, g);
        if (both) c.multiply_weights(table.count, q, w, add);
        if (both && dots) c.add_products(table.count, q, g);
        if (queries) k.dense_add(table, q, c.grad, c.bias);
        if (keys && dots) take(s.key, run, w, g);
        add = true;
      });
      if (!both) return;
      keep_triangle(c.pairs, queries, keys, true);
      k.dense_matmul(keys, columns, queries, c.pairs, 1, c.kPairStride, c.grad, c.stride(),
                     value_grad.row(row), value_grad.stride, true);
    });
  }
  return true;
}

}  // namespace lshkit

#include "lshkit/lsh_attention.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "attention_head.hpp"
#include "code_buckets.hpp"
#include "kernels/colliding_softmax.hpp"

namespace lshkit {
namespace {

Matrix<const float> rows_of(const Tensor<const float>& x, index_t batch, index_t head, index_t rows,
                            index_t columns) {
  return {x.matrix(batch, head), x.row_stride, rows, columns};
}
Matrix<float> rows_of(const Tensor<float>& x, index_t batch, index_t head, index_t rows,
                      index_t columns) {
  if (!x.data) return {nullptr, 0, 0, columns};  // not wanted
  return {x.matrix(batch, head), x.row_stride, rows, columns};
}

struct Problem {
  const AttentionShape& shape;
  const LshAttentionOptions& options;
  const LshAttentionInputs& in;
  index_t key_heads, group;
  std::vector<float> query_norms, key_norms;  // inverse ones, of all heads
  std::vector<std::uint8_t> query_valid, key_valid;
  std::vector<index_t> last_sink;  // of each sequence

  Problem(const AttentionShape& sizes, const LshAttentionOptions& o, const LshAttentionInputs& i,
          int threads)
      : shape(sizes),
        options(o),
        in(i),
        key_heads(lshkit::key_heads(sizes)),
        group(sizes.heads / key_heads),
        query_norms(sizes.batch * sizes.heads * sizes.n_queries),
        key_norms(sizes.batch * key_heads * sizes.n_keys),
        query_valid(query_norms.size()),
        key_valid(key_norms.size()) {
    const index_t query_matrices = shape.batch * shape.heads;
    parallel_for(query_matrices + shape.batch * key_heads, threads, [&](index_t task) {
      if (task < query_matrices) {
        const index_t at = task * shape.n_queries;
        kernels().f32.inverse_norms(query(task / shape.heads, task % shape.heads), nullptr,
                                    query_norms.data() + at, query_valid.data() + at);
      } else {
        const index_t matrix = task - query_matrices, at = matrix * shape.n_keys;
        kernels().f32.inverse_norms(
            rows_of(in.key, matrix / key_heads, matrix % key_heads, shape.n_keys, shape.n_features),
            in.key_mask.rows(matrix / key_heads), key_norms.data() + at, key_valid.data() + at);
      }
    });
    for (index_t b = 0; b < shape.batch; ++b) {
      const std::uint8_t* mask = in.key_mask.rows(b);
      index_t end = 0;
      for (index_t left = options.n_sinks; left > 0 && end < shape.n_keys; ++end)
        left -= !mask || mask[end];
      last_sink.push_back(end);
    }
  }
  Matrix<const float> query(index_t batch, index_t head) const {
    return rows_of(in.query, batch, head, shape.n_queries, shape.n_features);
  }
  SoftmaxKeys keys(index_t batch, index_t head) const {
    const index_t matrix = batch * key_heads + head, at = matrix * shape.n_keys;
    return {rows_of(in.key, batch, head, shape.n_keys, shape.n_features),
            rows_of(in.value, batch, head, shape.n_keys, shape.n_values),
            in.key_codes.matrix(matrix, shape.n_keys, options.n_hashes),
            key_norms.data() + at,
            key_valid.data() + at,
            last_sink[batch]};
  }
  Codes query_codes(index_t first_matrix) const {
    const Codes& codes = in.query_codes;
    return {codes.matrix(first_matrix, shape.n_queries, options.n_hashes), codes.bytes};
  }
  Codes key_codes(index_t matrix) const {
    return {in.key_codes.matrix(matrix, shape.n_keys, options.n_hashes), in.key_codes.bytes};
  }
  CodeBuckets query_buckets(index_t matrix) const {
    const std::uint8_t* valid = query_valid.data() + matrix * shape.n_queries;
    return CodeBuckets(query_codes(matrix), shape.n_queries, options.n_hashes, valid,
                       index_t(1) << options.n_bits, 1);
  }
  CodeBuckets key_buckets(index_t matrix, int threads) const {
    const std::uint8_t* valid = key_valid.data() + matrix * shape.n_keys;
    return CodeBuckets(key_codes(matrix), shape.n_keys, options.n_hashes, valid,
                       index_t(1) << options.n_bits, threads);
  }
  // The queries [first, first + rows) of a head.
  SoftmaxQueries queries(index_t matrix, index_t first, index_t rows) const {
    const index_t at = matrix * shape.n_queries + first;
    Matrix<const float> x = query(matrix / shape.heads, matrix % shape.heads);
    return {{x.row(first), x.stride, rows, x.columns},
            in.query_codes.rows(at, options.n_hashes),
            query_norms.data() + at,
            query_valid.data() + at,
            options.offset + first};
  }
};

BucketRows rows_of(const CodeBuckets& buckets) {
  return {buckets.start.data(), buckets.order.data(), buckets.n_buckets, buckets.n_rows};
}

// Times of finding pairs by buckets, measured, in the time that comparing a query with 256 keys
// takes in one hash. Backward, bits are marked all over the queries instead of in one row.
struct BucketCosts {
  double look_up, pair;  // of a bucket, and of a pair in one
};
constexpr BucketCosts kForwardCosts{8, 1}, kBackwardCosts{24, 6};

// Whether the pairs of a head of keys are found by buckets: the same at any number of threads, as
// sums are taken in another order then.
bool by_buckets(const Problem& problem, index_t key_matrix, const BucketCosts& cost, int threads) {
  constexpr double kBits = 4;  // of 256 keys, all hashes
  const AttentionShape& shape = problem.shape;
  const index_t m = problem.options.n_hashes, n_buckets = index_t(1) << problem.options.n_bits;
  const index_t rows = problem.group * shape.n_queries;
  const double blocks = double(shape.n_keys) / 256;
  const double seen = problem.options.causal ? 0.5 : 1;
  const double compare = seen * double(rows) * m * blocks * problem.in.key_codes.bytes;
  const double look_up = double(rows) * (m * cost.look_up + blocks * kBits);
  // Few queries, and tables larger than the codes: sorting would take longer.
  if (shape.n_queries < 256 || n_buckets > 4 * shape.n_keys || look_up >= compare) return false;
  const double pairs =
      bucket_pairs(problem.query_codes(key_matrix * problem.group), rows,
                   problem.key_codes(key_matrix), shape.n_keys, m, n_buckets, threads);
  return look_up + seen * cost.pair * pairs < compare;
}

// Queries whose sums a task keeps. Sorting a block of keys into buckets costs a task what looking
// up some hundreds of queries does; beyond 1024 the sums leave the L2 cache. By buckets it keeps
// their bits for all keys as well, 16 MB at most.
index_t run_length(const AttentionShape& shape, index_t heads, bool by_buckets, int threads) {
  const index_t fair = heads * shape.n_queries / (4 * thread_count(threads)) + 1;
  const index_t most = by_buckets ? (index_t(16) << 23) / shape.n_keys : 1024;
  return std::clamp<index_t>(std::min(fair, most), 128, 1024);
}

}  // namespace

void lsh_attention_forward(const AttentionShape& shape, const LshAttentionOptions& options,
                           const LshAttentionInputs& in, Tensor<float> out, double* log_sum,
                           std::int32_t* pairs, int threads) {
  const Problem problem(shape, options, in, threads);
  const auto attend = [&](const std::vector<index_t>& key_matrices, const BucketRows& buckets) {
    const index_t group = problem.group, heads = index_t(key_matrices.size()) * group;
    const index_t run = run_length(shape, heads, buckets.start, threads);
    const index_t runs = (shape.n_queries + run - 1) / run;
    parallel_for(heads * runs, threads, [&](index_t task) {
      const index_t nth = task / runs, first = task % runs * run;
      const index_t matrix = key_matrices[nth / group] * group + nth % group;
      const index_t batch = matrix / shape.heads, head = matrix % shape.heads;
      const index_t rows = std::min(run, shape.n_queries - first);
      SoftmaxForward pass;
      pass.options = options;
      pass.code_bytes = in.query_codes.bytes;
      pass.keys = problem.keys(batch, head / group);
      pass.key_buckets = buckets;
      pass.queries = problem.queries(matrix, first, rows);
      pass.out = rows_of(out, batch, head, shape.n_queries, shape.n_values);
      pass.out = {pass.out.row(first), pass.out.stride, rows, shape.n_values};
      pass.log_sum = log_sum + matrix * shape.n_queries + first;
      pass.pairs = pairs + matrix * shape.n_queries + first;
      pass.scratch = thread_scratch(kernels().softmax_forward_scratch(pass));
      kernels().softmax_forward(pass);
    });
  };
  std::vector<index_t> compared;
  for (index_t matrix = 0; matrix < shape.batch * problem.key_heads; ++matrix) {
    if (by_buckets(problem, matrix, kForwardCosts, threads))
      attend({matrix}, rows_of(problem.key_buckets(matrix, threads)));
    else
      compared.push_back(matrix);
  }
  attend(compared, {});
}

void lsh_attention_backward(const AttentionShape& shape, const LshAttentionOptions& options,
                            const LshAttentionInputs& in, const LshAttentionGradients& gradients,
                            int threads) {
  const Problem problem(shape, options, in, threads);
  const index_t group = problem.group, n = shape.n_queries;
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  parallel_for(shape.batch * problem.key_heads, threads, [&](index_t task) {
    const index_t batch = task / problem.key_heads, key_head = task % problem.key_heads;
    std::vector<float> along(group * n);
    std::vector<SoftmaxQueryGradient> heads(group);
    std::vector<CodeBuckets> buckets;
    const bool few_collide = by_buckets(problem, task, kBackwardCosts, 1);
    for (index_t g = 0; g < group; ++g) {
      const index_t head = key_head * group + g, matrix = batch * shape.heads + head;
      SoftmaxQueryGradient& q = heads[g];
      static_cast<SoftmaxQueries&>(q) = problem.queries(matrix, 0, n);
      if (few_collide) q.buckets = rows_of(buckets.emplace_back(problem.query_buckets(matrix)));
      q.grad_out = rows_of(gradients.grad_out, batch, head, n, shape.n_values);
      q.grad_query = rows_of(gradients.query, batch, head, n, shape.n_features);
      q.log_sum = gradients.log_sum + matrix * n;
      q.along = along.data() + g * n;
      const Matrix<const float> out = rows_of(gradients.out, batch, head, n, shape.n_values);
      for (index_t i = 0; i < n; ++i) {
        float sum = 0;
        for (index_t c = 0; c < shape.n_values; ++c) sum += out.row(i)[c] * q.grad_out.row(i)[c];
        along[g * n + i] = sum;
      }
    }
    SoftmaxBackward pass;
    pass.options = options;
    pass.code_bytes = in.query_codes.bytes;
    pass.keys = problem.keys(batch, key_head);
    pass.heads = heads.data();
    pass.n_heads = group;
    pass.grad_key = rows_of(gradients.key, batch, key_head, shape.n_keys, shape.n_features);
    pass.grad_value = rows_of(gradients.value, batch, key_head, shape.n_keys, shape.n_values);
    pass.scratch = thread_scratch(kernels().softmax_backward_scratch(pass));
    kernels().softmax_backward(pass);
    // What has a NaN or infinity has no gradient.
    for (const SoftmaxQueryGradient& q : heads)
      for (index_t i = 0; i < q.grad_query.rows; ++i)
        if (!q.valid[i]) std::fill_n(q.grad_query.row(i), shape.n_features, kNaN);
    const std::uint8_t* mask = in.key_mask.rows(batch);
    for (index_t j = 0; j < pass.grad_key.rows; ++j)
      if (!pass.keys.valid[j] && (!mask || mask[j]))
        std::fill_n(pass.grad_key.row(j), shape.n_features, kNaN);
  });
}

}  // namespace lshkit

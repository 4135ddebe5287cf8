#include "lshkit/lsh_attention.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "attention_head.hpp"
#include "kernels/colliding_softmax.hpp"

namespace lshkit {
namespace {

Matrix<const float> rows_of(const Tensor<const float>& x, index_t batch, index_t head, index_t rows,
                            index_t columns) {
  return {x.matrix(batch, head), x.row_stride, rows, columns};
}
Matrix<float> rows_of(const Tensor<float>& x, index_t batch, index_t head, index_t rows,
                      index_t columns) {
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

// Queries whose sums a task keeps. Sorting a block of keys into buckets costs a task what looking
// up some hundreds of queries does; beyond 1024 the sums leave the L2 cache.
index_t run_length(const AttentionShape& shape, int threads) {
  const index_t heads = shape.batch * shape.heads;
  const index_t fair = heads * shape.n_queries / (4 * thread_count(threads)) + 1;
  return std::clamp<index_t>(fair, 128, 1024);
}

}  // namespace

void lsh_attention_forward(const AttentionShape& shape, const LshAttentionOptions& options,
                           const LshAttentionInputs& in, Tensor<float> out, float* log_sum,
                           std::int32_t* pairs, int threads) {
  const Problem problem(shape, options, in, threads);
  const index_t run = run_length(shape, threads);
  const index_t runs = (shape.n_queries + run - 1) / run;
  parallel_for(shape.batch * shape.heads * runs, threads, [&](index_t task) {
    const index_t matrix = task / runs, first = task % runs * run;
    const index_t batch = matrix / shape.heads, head = matrix % shape.heads;
    const index_t rows = std::min(run, shape.n_queries - first);
    SoftmaxForward pass;
    pass.options = options;
    pass.code_bytes = in.query_codes.bytes;
    pass.keys = problem.keys(batch, head / problem.group);
    pass.queries = problem.queries(matrix, first, rows);
    pass.out = rows_of(out, batch, head, shape.n_queries, shape.n_values);
    pass.out = {pass.out.row(first), pass.out.stride, rows, shape.n_values};
    pass.log_sum = log_sum + matrix * shape.n_queries + first;
    pass.pairs = pairs + matrix * shape.n_queries + first;
    pass.scratch = thread_scratch(kernels().softmax_forward_scratch(pass));
    kernels().softmax_forward(pass);
  });
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
    for (index_t g = 0; g < group; ++g) {
      const index_t head = key_head * group + g, matrix = batch * shape.heads + head;
      SoftmaxQueryGradient& q = heads[g];
      static_cast<SoftmaxQueries&>(q) = problem.queries(matrix, 0, n);
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
      for (index_t i = 0; i < n; ++i)
        if (!q.valid[i]) std::fill_n(q.grad_query.row(i), shape.n_features, kNaN);
    const std::uint8_t* mask = in.key_mask.rows(batch);
    for (index_t j = 0; j < shape.n_keys; ++j)
      if (!pass.keys.valid[j] && (!mask || mask[j]))
        std::fill_n(pass.grad_key.row(j), shape.n_features, kNaN);
  });
}

}  // namespace lshkit

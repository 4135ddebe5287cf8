#include <cstring>
#include <vector>

#include "attention_head.hpp"
#include "bucket_sum.hpp"

namespace lshkit {
namespace {

HeadSum<float> head_sum(const AttentionShape& shape, const AttentionHead<float>& head,
                        Codes query_codes, Codes key_codes, index_t index, int n_bits,
                        index_t n_hashes, bool causal, Matrix<float> out) {
  HeadSum<float> s;
  s.n_queries = shape.n_queries;
  s.n_keys = shape.n_keys;
  s.n_hashes = n_hashes;
  s.n_buckets = index_t(1) << n_bits;
  s.query_codes = query_codes.matrix(index, shape.n_queries, n_hashes);
  s.key_codes = key_codes.matrix(index, shape.n_keys, n_hashes);
  s.code_bytes = query_codes.bytes;
  s.values = head.value;
  s.key_mask = head.key_mask;
  s.order = causal ? Order::causal : Order::all;
  s.scale = 1.0f / float(n_hashes);
  s.out = out;
  return s;
}

// counts_i = scale * the number of (key, hash) pairs in which query i collides: the sum of its
// weights, bucket_sum of a column of ones.
template <class Code>
void collision_counts(const HeadSum<float>& s, float* counts) {
  const Code* query_codes = static_cast<const Code*>(s.query_codes);
  const Code* key_codes = static_cast<const Code*>(s.key_codes);
  auto* in_bucket = static_cast<std::int32_t*>(thread_scratch(sizeof(std::int32_t) * s.n_buckets));
  std::memset(in_bucket, 0, sizeof(std::int32_t) * s.n_buckets);
  std::memset(counts, 0, sizeof(float) * s.n_queries);
  const auto add = [&](index_t j, index_t h) {
    if (!s.key_mask || s.key_mask[j]) ++in_bucket[key_codes[j * s.n_hashes + h]];
  };
  const bool causal = s.order == Order::causal;
  for (index_t h = 0; h < s.n_hashes; ++h) {
    for (index_t j = 0; j < s.n_keys && !causal; ++j) add(j, h);
    for (index_t i = 0; i < s.n_queries; ++i) {
      if (causal && i < s.n_keys) add(i, h);
      counts[i] += float(in_bucket[query_codes[i * s.n_hashes + h]]);
    }
    for (index_t j = 0; j < s.n_keys; ++j) in_bucket[key_codes[j * s.n_hashes + h]] = 0;
  }
  for (index_t i = 0; i < s.n_queries; ++i) counts[i] *= s.scale;
}

void collision_counts(const HeadSum<float>& s, float* counts) {
  s.code_bytes == 1 ? collision_counts<std::uint8_t>(s, counts)
                    : collision_counts<std::uint16_t>(s, counts);
}

}  // namespace

void yoso_forward(const AttentionShape& shape, const AttentionOptions& options,
                  const HashFunctions& functions, AttentionInputs<float> in, Tensor<float> out,
                  void* query_codes, void* key_codes, int threads) {
  const index_t heads = shape.batch * shape.heads;
  const int code_bytes = functions.n_bits <= 8 ? 1 : 2;
  const Codes queries{query_codes, code_bytes}, keys{key_codes, code_bytes};
  const bool finite_queries = hash(functions, in.query, shape.batch, shape.heads, shape.n_queries,
                                   shape.n_features, query_codes, threads);
  const bool finite_keys = hash(functions, in.key, shape.batch, shape.heads, shape.n_keys,
                                shape.n_features, key_codes, threads);
  // Rows that are not finite are looked for only when there is a sign of them.
  std::vector<float> inverse;
  std::vector<std::uint8_t> valid;
  const index_t rows = shape.n_queries + shape.n_keys;
  if (!finite_queries || !finite_keys) {
    inverse.resize(heads * rows);
    valid.resize(heads * rows);
    parallel_for(heads, threads, [&](index_t index) {
      const AttentionHead<float> head = head_of(shape, in, index);
      kernels().f32.inverse_norms(head.query, nullptr, &inverse[index * rows],
                                  &valid[index * rows]);
      kernels().f32.inverse_norms(head.key, head.key_mask, &inverse[index * rows] + shape.n_queries,
                                  &valid[index * rows] + shape.n_queries);
    });
  }
  const auto sum_of = [&](index_t index) {
    AttentionHead<float> head = head_of(shape, in, index);
    if (!valid.empty()) head.key_mask = &valid[index * rows] + shape.n_queries;
    return head_sum(shape, head, queries, keys, index, functions.n_bits, functions.n_hashes,
                    options.causal, rows_of(out, shape, index, shape.n_queries, shape.n_values));
  };
  const auto finish = [&](index_t index) {
    const HeadSum<float> s = sum_of(index);
    float* counts = nullptr;
    if (options.normalize == Normalize::sum) {
      counts = static_cast<float*>(thread_scratch(sizeof(float) * s.n_queries, Scratch::head));
      collision_counts(s, counts);
    }
    normalize_output(options.normalize, s.out, counts);
    if (!valid.empty()) fill_invalid_rows(s.out, &valid[index * rows]);
  };

  const index_t slices = slice_count<float>(shape.n_values);
  if (heads >= 2 * thread_count(threads)) {
    parallel_for(heads, threads, [&](index_t index) {
      sum_slices(sum_of(index), 0, slices);
      finish(index);
    });
  } else {
    parallel_for(heads * slices, threads, [&](index_t task) {
      sum_slices(sum_of(task / slices), task % slices, task % slices + 1);
    });
    parallel_for(heads, threads, finish);
  }
}

void yoso_backward(const AttentionShape& shape, const AttentionOptions& options, int n_bits,
                   index_t n_hashes, AttentionInputs<float> in, Codes query_codes, Codes key_codes,
                   AttentionGradients<float> gradients, int threads) {
  const index_t slices = slice_count<float>(shape.n_values);
  parallel_for(shape.batch * shape.heads, threads, [&](index_t index) {
    AttentionHead<float> head = head_of(shape, in, index);
    const auto s = BackwardScratch<float>::of_thread(shape, options.normalize);
    s.norms.fill(head);
    head.key_mask = s.norms.key_valid;
    HeadSum<float> forward =
        head_sum(shape, head, query_codes, key_codes, index, n_bits, n_hashes, options.causal, {});
    const float* bias;
    const Matrix<const float> grad = output_backward<float>(
        options.normalize, rows_of(gradients.out, shape, index, shape.n_queries, shape.n_values), s,
        &bias, [&](Matrix<float> raw, float* sums) {
          forward.out = raw;
          sum_slices(forward, 0, slices);
          if (options.normalize == Normalize::sum) collision_counts(forward, sums);
        });

    // Values: the transpose of the sum, from the same codes.
    HeadSum<float> transposed = forward;
    std::swap(transposed.n_queries, transposed.n_keys);
    std::swap(transposed.query_codes, transposed.key_codes);
    transposed.values = grad;
    transposed.key_mask = s.norms.query_valid;
    transposed.order = options.causal ? Order::reversed : Order::all;
    transposed.out = rows_of(gradients.value, shape, index, shape.n_keys, shape.n_values);
    sum_slices(transposed, 0, slices);
    for (index_t j = 0; j < shape.n_keys; ++j)
      if (!s.norms.key_valid[j])
        std::memset(transposed.out.row(j), 0, sizeof(float) * shape.n_values);

    const Matrix<float> query_grad =
        rows_of(gradients.query, shape, index, shape.n_queries, shape.n_features);
    const Matrix<float> key_grad =
        rows_of(gradients.key, shape, index, shape.n_keys, shape.n_features);
    if (options.gradient == Gradient::lower_bound) {
      LowerBoundGradient p;
      fill_pair_gradient<float>(p, head, s.norms, grad, bias, options.causal, query_grad, key_grad);
      p.query_codes = forward.query_codes;
      p.key_codes = forward.key_codes;
      p.code_bytes = query_codes.bytes;
      p.n_hashes = n_hashes;
      p.n_buckets = forward.n_buckets;
      p.scale = 0.5f * float(n_bits) / float(n_hashes);
      p.bfloat16_products = options.bfloat16_products;
      if (options.sketch.rank < shape.n_values) {
        p.rank = options.sketch.rank;
        p.rotation = options.sketch.rotation + index % shape.heads * options.sketch.head_stride;
        p.rotation_columns = options.sketch.columns;
      }
      p.scratch = thread_scratch(kernels().lower_bound_scratch(p));
      kernels().lower_bound_gradient(p);
      unit_norms_backward(p);
    } else {
      ExpectedGradient<float> p;
      fill_pair_gradient<float>(p, head, s.norms, grad, bias, options.causal, query_grad, key_grad);
      p.n_bits = n_bits;
      p.weight = Gradient::expected;
      p.value_grad = {};
      p.scratch = thread_scratch(kernels().f32.expected_scratch(shape.n_features, shape.n_values));
      kernels().f32.expected_gradient(p);
      unit_norms_backward(p);
    }
  });
}

}  // namespace lshkit

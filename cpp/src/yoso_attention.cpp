#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "attention_head.hpp"
#include "bucket_sum.hpp"
#include "fast_bucket_sum.hpp"
#include "packed_planes.hpp"

namespace lshkit {
namespace {

HeadSum<float> head_sum(const HeadRange& r, Codes query_codes, Codes key_codes, int n_bits,
                        index_t n_hashes, bool causal) {
  HeadSum<float> s;
  s.n_queries = r.n_queries;
  s.n_keys = r.n_keys;
  s.n_hashes = n_hashes;
  s.n_buckets = index_t(1) << n_bits;
  s.query_codes = query_codes.rows(r.query_row, n_hashes);
  s.key_codes = key_codes.rows(r.key_row, n_hashes);
  s.code_bytes = query_codes.bytes;
  s.order = causal ? Order::causal : Order::all;
  s.scale = 1.0f / float(n_hashes);
  return s;
}

// The sums of a head, in tables of 16-bit integers where the inputs have 16 bits.
struct Sums {
  void (*run)(const HeadSum<float>& sum, index_t first, index_t last);
  index_t slices;

  Sums(bool fast, index_t n_values)
      : run(fast ? fast_sum_slices : sum_slices<float>),
        slices(fast ? fast_slice_count(n_values) : slice_count<float>(n_values)) {}
  void all(const HeadSum<float>& sum) const { run(sum, 0, slices); }
};

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
                  const HashFunctions& functions, AttentionInputs<float> in, Output<float> out,
                  void* query_codes, void* key_codes, int threads, float* divisors) {
  const index_t heads = head_count(shape);
  const int code_bytes = functions.n_bits <= 8 ? 1 : 2;
  const Codes queries{query_codes, code_bytes}, keys{key_codes, code_bytes};
  const bool fast = in.query.converted();
  const Precision precision = fast ? Precision::fast : Precision::full;
  HashFunctions query_functions = functions;
  query_functions.heads_per_set = shape.heads / key_heads(shape);
  // Queries and keys have the same hash functions: products where both can be multiplied.
  const Element element = in.query.element == in.key.element ? in.query.element : Element::float32;
  const PackedPlanes planes(
      functions, key_heads(shape),
      shape.batch * (shape.heads * shape.n_queries + key_heads(shape) * shape.n_keys),
      shape.n_features, element, precision, threads);
  const bool finite_queries =
      hash(query_functions, planes, in.query, shape.batch, shape.heads, shape.n_queries,
           shape.n_features, query_codes, threads, precision);
  const bool finite_keys = hash(functions, planes, in.key, shape.batch, key_heads(shape),
                                shape.n_keys, shape.n_features, key_codes, threads, precision);
  // Rows that are not finite are looked for only when there is a sign of them.
  std::optional<ValidRows> valid;
  if (!finite_queries || !finite_keys) valid.emplace(shape, in, threads);

  const Sums sums(fast, shape.n_values);

  // Slices [first, last) of a head's sums; at the end of a head its normalisation.
  const auto run = [&](index_t index, index_t first, index_t last, bool finish) {
    const HeadRange r = head_range(shape, index);
    HeadSum<float> s =
        head_sum(r, queries, keys, functions.n_bits, functions.n_hashes, options.causal);
    const index_t value_size = conversion_size(in.value, r.n_keys, shape.n_values);
    const index_t out_size = conversion_size(out, r.n_queries, shape.n_values);
    Arena arena(thread_scratch(sizeof(float) * (value_size + out_size) + 128, Scratch::rows));
    s.values = {nullptr, shape.n_values, r.n_keys, shape.n_values};
    s.source = in.value;
    s.source_at = r.keys;
    s.memory = arena.take<float>(value_size);
    if (!fast || !in.value.converted()) s.need_values();
    s.out =
        rows_to<float>(out, r.queries, r.n_queries, shape.n_values, arena.take<float>(out_size));
    s.key_mask = valid ? valid->keys.data() + r.key_row : mask_of(in.key_mask, r);
    sums.run(s, first, last);
    if (!finish) return;
    float* divisor = divisors ? divisors + r.query_row : nullptr;
    if (options.normalize == Normalize::sum) {
      if (!divisor)
        divisor = static_cast<float*>(thread_scratch(sizeof(float) * s.n_queries, Scratch::head));
      collision_counts(s, divisor);
    }
    finish_output(options.normalize, out, r.queries, s.out, divisor,
                  valid ? valid->queries.data() + r.query_row : nullptr);
  };

  for_each_slice(heads, sums.slices, in.value.converted() || out.converted(), threads, run);
}

void yoso_backward(const AttentionShape& shape, const AttentionOptions& options, int n_bits,
                   index_t n_hashes, AttentionInputs<float> in, Codes query_codes, Codes key_codes,
                   AttentionGradients<float> gradients, int threads) {
  const Sums sums(in.query.converted(), shape.n_values);
  for_each_head_backward(shape, in, gradients, threads, [&](const HeadBackward<float>& b) {
    AttentionHead<float> head = b.head;
    const auto s = BackwardScratch<float>::of_thread(head, options.normalize);
    s.norms.fill(head);
    head.key_mask = s.norms.key_valid;
    HeadSum<float> forward =
        head_sum(b.range, query_codes, key_codes, n_bits, n_hashes, options.causal);
    forward.values = head.value;
    forward.key_mask = head.key_mask;
    const float* bias;
    const Matrix<const float> grad = output_backward<float>(
        options.normalize, b.grad, s, &bias, [&](Matrix<float> raw, float* counts) {
          if (options.kept.divisors)
            return restore_sums(options.normalize, options.kept.out, options.kept.divisors, b.range,
                                raw, counts);
          forward.out = raw;
          sums.all(forward);
          if (options.normalize == Normalize::sum) collision_counts(forward, counts);
        });

    // Values: the transpose of the sum, from the same codes.
    if (b.value_grad.data) {
      HeadSum<float> transposed = forward;
      std::swap(transposed.n_queries, transposed.n_keys);
      std::swap(transposed.query_codes, transposed.key_codes);
      transposed.values = grad;
      transposed.key_mask = s.norms.query_valid;
      transposed.order = transposed_order(forward.order);
      transposed.out = b.value_grad;
      sums.all(transposed);
      clear_invalid_rows(b.value_grad, s.norms.key_valid);
    }

    const GradientCodes& subset = options.gradient_codes;
    const auto fill = [&](SampledGradient& p) {
      fill_pair_gradient(p, b, s.norms, grad, bias, options.causal);
      p.query_codes = forward.query_codes;
      p.key_codes = forward.key_codes;
      p.code_bytes = query_codes.bytes;
      p.n_hashes = n_hashes;
      if (subset.n_hashes == 0) return;
      p.query_codes = subset.queries.rows(b.range.query_row, subset.n_hashes);
      p.key_codes = subset.keys.rows(b.range.key_row, subset.n_hashes);
      p.n_hashes = subset.n_hashes;
    };
    if (!b.query_grad.data && !b.key_grad.data) return;
    if (shape.n_values == 0) {  // products of no columns, which kernels would not write
      for (const Matrix<float>& to : {b.query_grad, b.key_grad})
        for (index_t i = 0; to.data && i < to.rows; ++i) std::fill_n(to.row(i), to.columns, 0.0f);
      return;
    }
    if (options.gradient == Gradient::lower_bound) {
      LowerBoundGradient p;
      fill(p);
      p.n_buckets = forward.n_buckets;
      p.scale = 0.5f * float(n_bits) / float(p.n_hashes);
      p.bfloat16_products = options.bfloat16_products;
      p.scratch = thread_scratch(kernels().lower_bound_scratch(p));
      kernels().lower_bound_gradient(p);
      unit_norms_backward(p);
    } else {
      CollidedGradient p;
      fill(p);
      p.n_bits = n_bits;
      p.weight = options.gradient;
      p.scratch = thread_scratch(kernels().collided_scratch(p));
      kernels().collided_gradient(p);
      unit_norms_backward(p);
    }
  });
}

}  // namespace lshkit

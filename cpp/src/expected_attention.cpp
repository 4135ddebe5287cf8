#include <algorithm>

#include "attention_head.hpp"

namespace lshkit {
namespace {

template <class T>
ExpectedSum<T> expected_rows(const AttentionHead<T>& head, const Norms<T>& norms, bool causal,
                             int n_bits, index_t first_query, Matrix<T> out, T* row_sum) {
  ExpectedSum<T> p;
  p.query = head.query;
  p.key = head.key;
  p.value = head.value;
  p.query_inverse_norm = norms.query;
  p.key_inverse_norm = norms.key;
  p.key_valid = norms.key_valid;
  p.causal = causal;
  p.first_query = first_query;
  p.n_bits = n_bits;
  p.out = out;
  p.row_sum = row_sum;
  p.scratch =
      thread_scratch(kernels().typed<T>().expected_scratch(head.query.columns, head.value.columns));
  return p;
}

}  // namespace

template <class T>
void expected_forward(const AttentionShape& shape, const AttentionOptions& options, int n_bits,
                      AttentionInputs<T> in, Tensor<T> out, int threads) {
  // Runs of queries, so that a single long sequence is shared among threads.
  constexpr index_t kRows = 384;
  const index_t heads = shape.batch * shape.heads;
  const index_t rows = heads >= 2 * thread_count(threads) ? shape.n_queries : kRows;
  const index_t parts = rows > 0 ? (shape.n_queries + rows - 1) / rows : 0;
  parallel_for(heads * parts, threads, [&](index_t task) {
    const index_t first = task % parts * rows;
    AttentionShape run = shape;
    run.n_queries = std::min(rows, shape.n_queries - first);
    AttentionHead<T> head = head_of(shape, in, task / parts);
    head.query = {head.query.row(first), head.query.stride, run.n_queries, shape.n_features};
    Matrix<T> to = rows_of(out, shape, task / parts, shape.n_queries, shape.n_values);
    to = {to.row(first), to.stride, run.n_queries, shape.n_values};

    const auto cut = [&](Arena arena, T** sums) {
      const Norms<T> norms(arena, run);
      *sums = arena.take<T>(run.n_queries);
      return std::make_pair(norms, arena.used());
    };
    T* sums = nullptr;
    const std::size_t bytes = cut(Arena(), &sums).second;
    const Norms<T> norms = cut(Arena(thread_scratch(bytes, Scratch::head)), &sums).first;
    norms.fill(head);
    kernels().typed<T>().expected_sum(
        expected_rows(head, norms, options.causal, n_bits, first, to,
                      options.normalize == Normalize::sum ? sums : nullptr));
    normalize_output(options.normalize, to, sums);
    fill_invalid_rows(to, norms.query_valid);
  });
}

template <class T>
void expected_backward(const AttentionShape& shape, const AttentionOptions& options, int n_bits,
                       AttentionInputs<T> in, AttentionGradients<T> gradients, int threads) {
  parallel_for(shape.batch * shape.heads, threads, [&](index_t index) {
    const AttentionHead<T> head = head_of(shape, in, index);
    const auto s = BackwardScratch<T>::of_thread(shape, options.normalize);
    s.norms.fill(head);
    const T* bias;
    const Matrix<const T> grad = output_backward<T>(
        options.normalize, rows_of(gradients.out, shape, index, shape.n_queries, shape.n_values), s,
        &bias, [&](Matrix<T> raw, T* sums) {
          kernels().typed<T>().expected_sum(
              expected_rows(head, s.norms, options.causal, n_bits, 0, raw,
                            options.normalize == Normalize::sum ? sums : nullptr));
        });
    ExpectedGradient<T> p;
    fill_pair_gradient<T>(p, head, s.norms, grad, bias, options.causal,
                          rows_of(gradients.query, shape, index, shape.n_queries, shape.n_features),
                          rows_of(gradients.key, shape, index, shape.n_keys, shape.n_features));
    p.n_bits = n_bits;
    p.weight = options.gradient;
    p.value_grad = rows_of(gradients.value, shape, index, shape.n_keys, shape.n_values);
    p.scratch =
        thread_scratch(kernels().typed<T>().expected_scratch(shape.n_features, shape.n_values));
    kernels().typed<T>().expected_gradient(p);
    unit_norms_backward(p);
  });
}

#define LSHKIT_INSTANTIATE(T)                                                          \
  template void expected_forward(const AttentionShape&, const AttentionOptions&, int,  \
                                 AttentionInputs<T>, Tensor<T>, int);                  \
  template void expected_backward(const AttentionShape&, const AttentionOptions&, int, \
                                  AttentionInputs<T>, AttentionGradients<T>, int);
LSHKIT_INSTANTIATE(float)
LSHKIT_INSTANTIATE(double)

}  // namespace lshkit

#pragma once
// What the sampled and the expected estimator share on one head: which rows take part, and the way
// through the normalisation of the output and of queries and keys.
#include <algorithm>
#include <limits>

#include "kernels/kernels.hpp"
#include "lshkit/attention.hpp"
#include "parallel.hpp"

namespace lshkit {

template <class T>
struct AttentionHead {
  Matrix<const T> query, key, value;
  const std::uint8_t* key_mask;  // null: all keys
};

template <class T>
AttentionHead<T> head_of(const AttentionShape& shape, const AttentionInputs<T>& in, index_t head) {
  const index_t b = head / shape.heads, h = head % shape.heads;
  return {{in.query.matrix(b, h), in.query.row_stride, shape.n_queries, shape.n_features},
          {in.key.matrix(b, h), in.key.row_stride, shape.n_keys, shape.n_features},
          {in.value.matrix(b, h), in.value.row_stride, shape.n_keys, shape.n_values},
          in.key_mask.rows(b)};
}

// A row's inverse norm and whether it takes part: see TypedKernels::inverse_norms.
template <class T>
struct Norms {
  T *query, *key;
  std::uint8_t *query_valid, *key_valid;

  Norms(Arena& arena, const AttentionShape& shape)
      : query(arena.take<T>(shape.n_queries)),
        key(arena.take<T>(shape.n_keys)),
        query_valid(arena.take<std::uint8_t>(shape.n_queries)),
        key_valid(arena.take<std::uint8_t>(shape.n_keys)) {}
  // Of the caller's memory, (n_queries + n_keys) of each.
  Norms(T* inverse, std::uint8_t* valid, index_t n_queries)
      : query(inverse),
        key(inverse + n_queries),
        query_valid(valid),
        key_valid(valid + n_queries) {}

  void fill(const AttentionHead<T>& head) const {
    kernels().typed<T>().inverse_norms(head.query, nullptr, query, query_valid);
    kernels().typed<T>().inverse_norms(head.key, head.key_mask, key, key_valid);
  }
};

// Buffers of one head's backward, n_queries * (n_values + 2) numbers and the norms.
template <class T>
struct BackwardScratch {
  Norms<T> norms;
  Matrix<T> raw;  // the output before its normalisation, then its gradient
  T *sums, *bias;
  std::size_t bytes;

  BackwardScratch(Arena arena, const AttentionShape& shape, Normalize normalize)
      : norms(arena, shape) {
    const index_t rows = normalize == Normalize::none ? 0 : shape.n_queries;
    raw = {arena.take<T>(rows * shape.n_values), shape.n_values, shape.n_queries, shape.n_values};
    const index_t sum_rows = normalize == Normalize::sum ? shape.n_queries : 0;
    sums = arena.take<T>(sum_rows);
    bias = arena.take<T>(sum_rows);
    bytes = arena.used();
  }
  static BackwardScratch of_thread(const AttentionShape& shape, Normalize normalize) {
    const std::size_t bytes = BackwardScratch(Arena(), shape, normalize).bytes;
    return BackwardScratch(Arena(thread_scratch(bytes, Scratch::head)), shape, normalize);
  }
};

template <class T>
void normalize_output(Normalize normalize, Matrix<T> out, const T* sums) {
  if (normalize == Normalize::l2) kernels().typed<T>().normalize_l2(out);
  if (normalize == Normalize::sum) kernels().typed<T>().normalize_sum(out, sums);
}

// A query with a NaN or infinity gives a row of NaN, whatever it sees.
template <class T>
void fill_invalid_rows(Matrix<T> out, const std::uint8_t* query_valid) {
  for (index_t i = 0; i < out.rows; ++i)
    if (!query_valid[i]) std::fill_n(out.row(i), out.columns, std::numeric_limits<T>::quiet_NaN());
}

// The gradient of the unnormalised output. raw_output(raw, sums) computes that output and, for
// Normalize::sum, its divisors; bias is what every g_i . v_j gains, null for nothing.
template <class T, class RawOutput>
Matrix<const T> output_backward(Normalize normalize, Matrix<const T> grad,
                                const BackwardScratch<T>& s, const T** bias,
                                const RawOutput& raw_output) {
  *bias = nullptr;
  if (normalize == Normalize::none) return grad;
  raw_output(s.raw, s.sums);
  if (normalize == Normalize::l2) {
    kernels().typed<T>().normalize_l2_backward(grad, s.raw);
  } else {
    kernels().typed<T>().normalize_sum_backward(grad, s.raw, s.sums, s.bias);
    *bias = s.bias;
  }
  return {s.raw.data, s.raw.stride, s.raw.rows, s.raw.columns};
}

// The parts of a pair gradient that do not depend on the weight of a pair.
template <class T>
void fill_pair_gradient(PairGradient<T>& p, const AttentionHead<T>& head, const Norms<T>& norms,
                        Matrix<const T> grad, const T* bias, bool causal, Matrix<T> query_grad,
                        Matrix<T> key_grad) {
  p.query = head.query;
  p.key = head.key;
  p.value = head.value;
  p.grad = grad;
  p.bias = bias;
  p.query_inverse_norm = norms.query;
  p.key_inverse_norm = norms.key;
  p.query_valid = norms.query_valid;
  p.key_valid = norms.key_valid;
  p.causal = causal;
  p.query_grad = query_grad;
  p.key_grad = key_grad;
}

template <class T>
void unit_norms_backward(const PairGradient<T>& p) {
  kernels().typed<T>().unit_norm_backward(p.query, p.query_inverse_norm, p.query_grad);
  kernels().typed<T>().unit_norm_backward(p.key, p.key_inverse_norm, p.key_grad);
}

template <class T>
Matrix<T> rows_of(Tensor<T> tensor, const AttentionShape& shape, index_t head, index_t rows,
                  index_t columns) {
  return {tensor.matrix(head / shape.heads, head % shape.heads), tensor.row_stride, rows, columns};
}

}  // namespace lshkit

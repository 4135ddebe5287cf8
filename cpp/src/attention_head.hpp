#pragma once
// What the sampled and the expected estimator share on one head: which rows take part, and the way
// through the normalisation of the output and of queries and keys.
#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/kernels.hpp"
#include "lshkit/attention.hpp"
#include "parallel.hpp"
#include "rows.hpp"

namespace lshkit {

// One head of one sequence: which rows of the tensors, and of the contiguous arrays of codes.
struct HeadRange {
  index_t index;  // of the head of queries
  RowPosition queries, keys;
  index_t n_queries, n_keys;
  index_t query_row, key_row;  // of all rows of all heads in turn
};

inline index_t key_heads(const AttentionShape& shape) {
  return shape.key_heads ? shape.key_heads : shape.heads;
}
inline index_t sequence_count(const AttentionShape& shape) {
  return shape.query_starts ? shape.sequences : shape.batch;
}
inline index_t head_count(const AttentionShape& shape) {
  return sequence_count(shape) * shape.heads;
}

// Heads are numbered sequence by sequence.
inline HeadRange head_range(const AttentionShape& shape, index_t index) {
  const index_t sequence = index / shape.heads, head = index % shape.heads;
  const index_t key_head = head / (shape.heads / key_heads(shape));
  HeadRange r;
  r.index = index;
  r.n_queries = shape.n_queries;
  r.n_keys = shape.n_keys;
  r.queries = {sequence, head, 0};
  r.keys = {sequence, key_head, 0};
  if (shape.query_starts) {
    r.queries = {0, head, shape.query_starts[sequence]};
    r.keys = {0, key_head, shape.key_starts[sequence]};
    r.n_queries = shape.query_starts[sequence + 1] - r.queries.row;
    r.n_keys = shape.key_starts[sequence + 1] - r.keys.row;
  }
  r.query_row = (r.queries.batch * shape.heads + head) * shape.n_queries + r.queries.row;
  r.key_row = (r.keys.batch * key_heads(shape) + key_head) * shape.n_keys + r.keys.row;
  return r;
}

// run(head, first, last, finish) for slices [first, last) of a head's columns, and with `finish`
// once these are done. A few heads are cut into slices, unless rows must be converted as a whole.
template <class Run>
void for_each_slice(index_t heads, index_t slices, bool converted, int threads, const Run& run) {
  const HeadParts parts(heads, slices, threads);
  if (parts.count == 1 || converted) {
    parallel_for(heads, threads, [&](index_t head) { run(head, 0, slices, true); });
    return;
  }
  parallel_for(heads * parts.count, threads, [&](index_t task) {
    const index_t part = task % parts.count;
    run(task / parts.count, parts.first(part), parts.first(part + 1), false);
  });
  parallel_for(heads, threads, [&](index_t head) { run(head, 0, 0, true); });
}

template <class T>
struct AttentionHead {
  Matrix<const T> query, key, value;
  const std::uint8_t* key_mask;  // null: all keys
};

// Memory for the rows of a head whose elements are converted.
template <class T>
struct ConvertedHead {
  T *query, *key, *value;

  ConvertedHead(Arena& arena, const AttentionShape& shape, const AttentionInputs<T>& in,
                const HeadRange& r)
      : query(arena.take<T>(conversion_size(in.query, r.n_queries, shape.n_features))),
        key(arena.take<T>(conversion_size(in.key, r.n_keys, shape.n_features))),
        value(arena.take<T>(conversion_size(in.value, r.n_keys, shape.n_values))) {}
};

inline const std::uint8_t* mask_of(Mask mask, const HeadRange& r) {
  return mask.data ? mask.rows(r.keys.batch) + r.keys.row : nullptr;
}
template <class T>
AttentionHead<T> head_of(const AttentionShape& shape, const AttentionInputs<T>& in,
                         const HeadRange& r, const ConvertedHead<T>& memory) {
  return {rows_as<T>(in.query, r.queries, r.n_queries, shape.n_features, memory.query),
          rows_as<T>(in.key, r.keys, r.n_keys, shape.n_features, memory.key),
          rows_as<T>(in.value, r.keys, r.n_keys, shape.n_values, memory.value),
          mask_of(in.key_mask, r)};
}

// A row's inverse norm and whether it takes part: see TypedKernels::inverse_norms.
template <class T>
struct Norms {
  T *query, *key;
  std::uint8_t *query_valid, *key_valid;

  Norms(Arena& arena, index_t n_queries, index_t n_keys)
      : query(arena.take<T>(n_queries)),
        key(arena.take<T>(n_keys)),
        query_valid(arena.take<std::uint8_t>(n_queries)),
        key_valid(arena.take<std::uint8_t>(n_keys)) {}
  // In the caller's memory, (n_queries + n_keys) of each.
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

// Which rows of all heads take part: not masked, and finite.
struct ValidRows {
  std::vector<std::uint8_t> queries, keys;

  ValidRows(const AttentionShape& shape, const AttentionInputs<float>& in, int threads) {
    find(in.query, shape.batch, shape.heads, shape.n_queries, shape.n_features, {}, threads,
         queries);
    find(in.key, shape.batch, key_heads(shape), shape.n_keys, shape.n_features, in.key_mask,
         threads, keys);
  }
  static void find(const Input<float>& x, index_t batch, index_t heads, index_t rows,
                   index_t columns, Mask mask, int threads, std::vector<std::uint8_t>& valid) {
    valid.resize(batch * heads * rows);
    parallel_for(batch * heads, threads, [&](index_t head) {
      Arena arena(thread_scratch(sizeof(float) * (rows + conversion_size(x, rows, columns)) + 128));
      float* inverse = arena.take<float>(rows);
      const Matrix<const float> m =
          rows_as<float>(x, {head / heads, head % heads, 0}, rows, columns,
                         arena.take<float>(conversion_size(x, rows, columns)));
      kernels().f32.inverse_norms(m, mask.rows(head / heads), inverse, valid.data() + head * rows);
    });
  }
};

// Buffers of one head's backward, n_queries * (n_values + 2) numbers and the norms.
template <class T>
struct BackwardScratch {
  Norms<T> norms;
  Matrix<T> raw;  // the output before its normalisation, then its gradient
  T *sums, *bias;
  std::size_t bytes;

  BackwardScratch(Arena arena, const AttentionHead<T>& head, Normalize normalize)
      : norms(arena, head.query.rows, head.key.rows) {
    const index_t n = head.query.rows, n_values = head.value.columns;
    const index_t rows = normalize == Normalize::none ? 0 : n;
    raw = {arena.take<T>(rows * n_values), n_values, n, n_values};
    const index_t sum_rows = normalize == Normalize::sum ? n : 0;
    sums = arena.take<T>(sum_rows);
    bias = arena.take<T>(sum_rows);
    bytes = arena.used();
  }
  static BackwardScratch of_thread(const AttentionHead<T>& head, Normalize normalize) {
    const std::size_t bytes = BackwardScratch(Arena(), head, normalize).bytes;
    return BackwardScratch(Arena(thread_scratch(bytes, Scratch::head)), head, normalize);
  }
};

// norms: of the rows, where it is not null and normalize is l2.
template <class T>
void normalize_output(Normalize normalize, Matrix<T> out, const T* sums, T* norms = nullptr) {
  if (normalize == Normalize::l2) kernels().typed<T>().normalize_l2(out, norms);
  if (normalize == Normalize::sum) kernels().typed<T>().normalize_sum(out, sums);
}

// A query with a NaN or infinity gives a row of NaN, whatever it sees.
template <class T>
void fill_invalid_rows(Matrix<T> out, const std::uint8_t* query_valid) {
  for (index_t i = 0; i < out.rows; ++i)
    if (!query_valid[i]) std::fill_n(out.row(i), out.columns, std::numeric_limits<T>::quiet_NaN());
}

// The end of a head's forward pass: rows are normalised, NaN where a query is not finite
// (query_valid: null where all are), and brought to the tensor, a few at a time, from the L1 cache.
// divisors: with Normalize::sum the sums of weights; with l2 the norms, written where not null.
template <class T>
void finish_output(Normalize normalize, const Output<T>& out, RowPosition at, Matrix<T> all,
                   T* divisors, const std::uint8_t* query_valid) {
  constexpr index_t kRows = 64;
  const bool l2 = normalize == Normalize::l2;
  for (index_t first = 0; first < all.rows; first += kRows) {
    const Matrix<T> rows{all.row(first), all.stride, std::min(kRows, all.rows - first),
                         all.columns};
    T* const of_rows = divisors ? divisors + first : nullptr;
    normalize_output(normalize, rows, of_rows, l2 ? of_rows : nullptr);
    if (query_valid) fill_invalid_rows(rows, query_valid + first);
    store_rows(out, {at.batch, at.head, at.row + first}, rows);
  }
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

// The rows of sums that `out` is the normalised form of, and for Normalize::sum their divisors.
inline void restore_sums(Normalize normalize, const Input<float>& out, const float* divisors,
                         const HeadRange& range, Matrix<float> raw, float* sums) {
  const float* divisor = divisors + range.query_row;
  if (normalize == Normalize::sum) std::copy_n(divisor, raw.rows, sums);
  const Matrix<const float> rows =
      rows_as<float>(out, range.queries, raw.rows, raw.columns, raw.data);
  for (index_t i = 0; i < raw.rows; ++i)
    for (index_t c = 0; c < raw.columns; ++c) raw.row(i)[c] = rows.row(i)[c] * divisor[i];
}

// The backward pass of one head: its inputs, and where its gradients go. One that is not wanted is
// a matrix without data and rows.
template <class T>
struct HeadBackward {
  HeadRange range;
  AttentionHead<T> head;
  Matrix<const T> grad;  // of the output
  Matrix<T> query_grad, key_grad, value_grad;
};
template <class T>
Matrix<T> gradient_rows(const Output<T>& x, RowPosition at, index_t rows, index_t columns,
                        T* converted) {
  if (!x.data) return {nullptr, 0, 0, columns};
  return rows_to(x, at, rows, columns, converted);
}

// The parts of a pair gradient that do not depend on the weight of a pair. grad: of the output
// before its normalisation.
template <class T>
void fill_pair_gradient(PairGradient<T>& p, const HeadBackward<T>& b, const Norms<T>& norms,
                        Matrix<const T> grad, const T* bias, bool causal) {
  p.query = b.head.query;
  p.key = b.head.key;
  p.value = b.head.value;
  p.grad = grad;
  p.bias = bias;
  p.query_inverse_norm = norms.query;
  p.key_inverse_norm = norms.key;
  p.query_valid = norms.query_valid;
  p.key_valid = norms.key_valid;
  p.causal = causal;
  p.query_grad = b.query_grad;
  p.key_grad = b.key_grad;
}

template <class T>
void unit_norms_backward(const PairGradient<T>& p) {
  const auto& typed = kernels().typed<T>();
  if (p.query_grad.data) typed.unit_norm_backward(p.query, p.query_inverse_norm, p.query_grad);
  if (p.key_grad.data) typed.unit_norm_backward(p.key, p.key_inverse_norm, p.key_grad);
}
// A row that takes no part has no gradient of its value.
template <class T>
void clear_invalid_rows(Matrix<T> value_grad, const std::uint8_t* valid) {
  for (index_t j = 0; j < value_grad.rows; ++j)
    if (!valid[j]) std::fill_n(value_grad.row(j), value_grad.columns, T(0));
}

// Memory of a thread for the heads of queries that share a head of keys: what is converted, and the
// gradients of keys and values of one of them before they are added to the sum.
template <class T>
struct BackwardMemory {
  ConvertedHead<T> head;
  T *grad, *query_grad, *key_sum, *value_sum, *key_grad, *value_grad;
  std::size_t bytes;

  BackwardMemory(Arena arena, const AttentionShape& shape, const AttentionInputs<T>& in,
                 const AttentionGradients<T>& to, const HeadRange& r, bool several)
      : head(arena, shape, in, r),
        grad(arena.take<T>(conversion_size(to.out, r.n_queries, shape.n_values))),
        query_grad(arena.take<T>(conversion_size(to.query, r.n_queries, shape.n_features))),
        key_sum(arena.take<T>(conversion_size(to.key, r.n_keys, shape.n_features))),
        value_sum(arena.take<T>(conversion_size(to.value, r.n_keys, shape.n_values))),
        key_grad(arena.take<T>(several ? r.n_keys * shape.n_features : 0)),
        value_grad(arena.take<T>(several ? r.n_keys * shape.n_values : 0)),
        bytes(arena.used()) {}
};

template <class T>
void add_rows(Matrix<T> to, Matrix<T> from) {
  for (index_t i = 0; i < to.rows; ++i)
    for (index_t c = 0; c < to.columns; ++c) to.row(i)[c] += from.row(i)[c];
}

// body(const HeadBackward<T>&) writes the gradients of one head: of those that share the head of
// keys number `task` of all sequences in turn, one after the other. Their gradients of its keys and
// values are added up in this order.
template <class T, class Body>
void key_head_backward(const AttentionShape& shape, const AttentionInputs<T>& in,
                       const AttentionGradients<T>& to, index_t task, const Body& body) {
  if (shape.heads == 0) return;
  const index_t group = shape.heads / key_heads(shape);
  const index_t d = shape.n_features, dv = shape.n_values;
  HeadBackward<T> b;
  b.range = head_range(shape, task * group);
  const index_t n_queries = b.range.n_queries, n_keys = b.range.n_keys;
  if (n_queries == 0 && n_keys == 0) return;
  const bool several = group > 1;
  const std::size_t bytes = BackwardMemory<T>(Arena(), shape, in, to, b.range, several).bytes;
  const BackwardMemory<T> memory(Arena(thread_scratch(bytes, Scratch::rows)), shape, in, to,
                                 b.range, several);
  const Matrix<T> key_sum = gradient_rows(to.key, b.range.keys, n_keys, d, memory.key_sum);
  const Matrix<T> value_sum = gradient_rows(to.value, b.range.keys, n_keys, dv, memory.value_sum);
  const auto of_one_head = [&](index_t g, const Matrix<T>& sum, T* own) {
    return g == 0 || !sum.data ? sum : Matrix<T>{own, sum.columns, sum.rows, sum.columns};
  };
  b.head = head_of(shape, in, b.range, memory.head);
  for (index_t g = 0; g < group; ++g) {
    b.range = head_range(shape, task * group + g);
    if (g > 0)
      b.head.query = rows_as<T>(in.query, b.range.queries, n_queries, d, memory.head.query);
    b.grad = rows_as<T>(to.out, b.range.queries, n_queries, dv, memory.grad);
    b.query_grad = gradient_rows(to.query, b.range.queries, n_queries, d, memory.query_grad);
    b.key_grad = of_one_head(g, key_sum, memory.key_grad);
    b.value_grad = of_one_head(g, value_sum, memory.value_grad);
    body(b);
    store_rows(to.query, b.range.queries, b.query_grad);
    if (g == 0) continue;
    add_rows(key_sum, b.key_grad);
    add_rows(value_sum, b.value_grad);
  }
  store_rows(to.key, b.range.keys, key_sum);
  store_rows(to.value, b.range.keys, value_sum);
}

template <class T, class Body>
void for_each_head_backward(const AttentionShape& shape, const AttentionInputs<T>& in,
                            const AttentionGradients<T>& to, int threads, const Body& body) {
  parallel_for(sequence_count(shape) * key_heads(shape), threads,
               [&](index_t task) { key_head_backward(shape, in, to, task, body); });
}

}  // namespace lshkit

#include <algorithm>

#include "attention_head.hpp"

namespace lshkit {
namespace {

// Whether the rows are bfloat16 without loss, and the instruction set has products of them.
template <class T>
bool in_bfloat16(const AttentionInputs<T>& in) {
  for (const auto* x : {&in.query, &in.key, &in.value})
    if (x->element != Element::bfloat16) return false;
  return kernels().expected_bfloat16_sum != nullptr;
}

template <class T>
ExpectedOutput<T> output_of(const Norms<T>& norms, bool causal, int n_bits, index_t first_query,
                            Matrix<T> out, T* row_sum) {
  ExpectedOutput<T> p;
  p.query_inverse_norm = norms.query;
  p.key_inverse_norm = norms.key;
  p.key_valid = norms.key_valid;
  p.causal = causal;
  p.first_query = first_query;
  p.n_bits = n_bits;
  p.out = out;
  p.row_sum = row_sum;
  return p;
}

template <class T>
void compute(const AttentionHead<T>& head, const ExpectedOutput<T>& output) {
  ExpectedSum<T> p{output, head.query, head.key, head.value};
  p.scratch = thread_scratch(kernels().typed<T>().expected_scratch(p.query, p.value));
  kernels().typed<T>().expected_sum(p);
}

// A head's rows of bfloat16 as they lie in the tensors.
struct Bfloat16Head {
  Matrix<const std::uint16_t> query, key, value;

  Bfloat16Head(const AttentionShape& shape, const AttentionInputs<float>& in, const HeadRange& r)
      : query(rows(in.query, r.queries, r.n_queries, shape.n_features)),
        key(rows(in.key, r.keys, r.n_keys, shape.n_features)),
        value(rows(in.value, r.keys, r.n_keys, shape.n_values)) {}

  static Matrix<const std::uint16_t> rows(const Input<float>& x, RowPosition at, index_t rows,
                                          index_t columns) {
    return {static_cast<const std::uint16_t*>(x.row(at.batch, at.head, at.row)), x.row_stride, rows,
            columns};
  }
  void fill(const Norms<float>& norms, const std::uint8_t* key_mask) const {
    kernels().bfloat16_inverse_norms(query, nullptr, norms.query, norms.query_valid);
    kernels().bfloat16_inverse_norms(key, key_mask, norms.key, norms.key_valid);
  }
  // By products of bfloat16. False where they may not be taken.
  bool compute(const ExpectedOutput<float>& output) const {
    ExpectedBfloat16Sum p{output, query, key, value};
    p.scratch = thread_scratch(
        kernels().expected_bfloat16_scratch(query.rows, query.columns, value.columns, false));
    return kernels().expected_bfloat16_sum(p);
  }
};

// By the products of bfloat16 where these may be taken, and otherwise in T.
template <class T>
void compute(ExpectedGradient<T> p, bool bfloat16) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (bfloat16) {
      p.scratch = thread_scratch(kernels().expected_bfloat16_scratch(p.query.rows, p.query.columns,
                                                                     p.value.columns, true));
      if (kernels().expected_bfloat16_gradient(p)) return;
    }
  }
  p.scratch = thread_scratch(kernels().typed<T>().expected_scratch(p.query, p.value));
  kernels().typed<T>().expected_gradient(p);
}

}  // namespace

template <class T>
void expected_forward(const AttentionShape& shape, const AttentionOptions& options, int n_bits,
                      AttentionInputs<T> in, Output<T> out, int threads, T* divisors) {
  // Runs of queries, so that a single long sequence is shared among threads.
  constexpr index_t kRows = 384;
  const index_t heads = head_count(shape), n = shape.n_queries;
  const index_t rows = heads >= 2 * thread_count(threads) || shape.query_starts ? n : kRows;
  const index_t parts = rows > 0 ? (n + rows - 1) / rows : 0;
  const bool bfloat16 = in_bfloat16(in);
  parallel_for(heads * parts, threads, [&](index_t task) {
    HeadRange r = head_range(shape, task / parts);
    const index_t first = task % parts * rows;
    r.queries.row += first;
    r.n_queries = std::min(rows, r.n_queries - first);

    const auto convert = [&](Arena arena, T** to) {
      const ConvertedHead<T> memory(arena, shape, in, r);
      *to = arena.take<T>(conversion_size(out, r.n_queries, shape.n_values));
      return std::make_pair(memory, arena.used());
    };
    T* converted = nullptr;
    void* memory = thread_scratch(convert(Arena(), &converted).second, Scratch::rows);
    const ConvertedHead<T> rows_in_t = convert(Arena(memory), &converted).first;
    const Matrix<T> to = rows_to(out, r.queries, r.n_queries, shape.n_values, converted);

    const auto cut = [&](Arena arena, T** sums) {
      const Norms<T> norms(arena, r.n_queries, r.n_keys);
      *sums = arena.take<T>(r.n_queries);
      return std::make_pair(norms, arena.used());
    };
    T* sums = nullptr;
    const std::size_t bytes = cut(Arena(), &sums).second;
    const Norms<T> norms = cut(Arena(thread_scratch(bytes, Scratch::head)), &sums).first;
    T* divisor = divisors ? divisors + r.query_row + first : nullptr;
    if (divisor && options.normalize == Normalize::sum) sums = divisor;
    const ExpectedOutput<T> output =
        output_of(norms, options.causal, n_bits, first, to,
                  options.normalize == Normalize::sum ? sums : nullptr);
    bool computed = false;
    if constexpr (sizeof(T) == sizeof(float)) {
      if (bfloat16) {
        const Bfloat16Head head(shape, in, r);
        head.fill(norms, mask_of(in.key_mask, r));
        computed = head.compute(output);
      }
    }
    if (!computed) {
      const AttentionHead<T> head = head_of(shape, in, r, rows_in_t);
      norms.fill(head);
      compute(head, output);
    }
    finish_output(options.normalize, out, r.queries, to,
                  options.normalize == Normalize::sum ? sums : divisor, norms.query_valid);
  });
}

template <class T>
void expected_backward(const AttentionShape& shape, const AttentionOptions& options, int n_bits,
                       AttentionInputs<T> in, AttentionGradients<T> gradients, int threads) {
  const bool bfloat16 = in_bfloat16(in);
  for_each_head_backward(shape, in, gradients, threads, [&](const HeadBackward<T>& b) {
    const auto s = BackwardScratch<T>::of_thread(b.head, options.normalize);
    s.norms.fill(b.head);
    const T* bias;
    const Matrix<const T> grad =
        output_backward<T>(options.normalize, b.grad, s, &bias, [&](Matrix<T> raw, T* sums) {
          const ExpectedOutput<T> output =
              output_of(s.norms, options.causal, n_bits, 0, raw,
                        options.normalize == Normalize::sum ? sums : nullptr);
          if constexpr (sizeof(T) == sizeof(float)) {
            if (options.kept.divisors)
              return restore_sums(options.normalize, options.kept.out, options.kept.divisors,
                                  b.range, raw, sums);
            if (bfloat16 && Bfloat16Head(shape, in, b.range).compute(output)) return;
          }
          compute(b.head, output);
        });
    ExpectedGradient<T> p;
    fill_pair_gradient(p, b, s.norms, grad, bias, options.causal);
    p.n_bits = n_bits;
    p.weight = options.gradient;
    p.value_grad = b.value_grad;
    compute(p, bfloat16);
    unit_norms_backward(p);
  });
}

#define LSHKIT_INSTANTIATE(T)                                                          \
  template void expected_forward(const AttentionShape&, const AttentionOptions&, int,  \
                                 AttentionInputs<T>, Output<T>, int, T*);              \
  template void expected_backward(const AttentionShape&, const AttentionOptions&, int, \
                                  AttentionInputs<T>, AttentionGradients<T>, int);
LSHKIT_INSTANTIATE(float)
LSHKIT_INSTANTIATE(double)

}  // namespace lshkit

#pragma once
// What attention by hard and by soft codes share: the sizes of a problem, and the normalisation of
// its output and the gradients through it as rows.cuh takes them.
#include "lshkit/cuda/attention.hpp"
#include "lshkit/cuda/rows.cuh"

namespace lshkit::cuda {

template <class Options>
struct AttentionProblem {
  const Queue& queue;
  const AttentionShape& s;
  const Options& options;
  const AttentionInputs<float>& in;

  index_t key_heads() const { return s.key_heads ? s.key_heads : s.heads; }
  index_t group() const { return key_heads() ? s.heads / key_heads() : 1; }
  index_t heads() const { return s.batch * s.heads; }  // of queries, all
  index_t queries() const { return heads() * s.n_queries; }
  index_t keys() const { return s.batch * key_heads() * s.n_keys; }
  index_t keys_of_queries() const { return heads() * s.n_keys; }
  int counts() const { return options.normalize == Normalize::sum; }
  index_t sum_columns() const { return s.n_values + counts(); }
  Side query_side() const { return {s.n_queries, s.heads, 1, s.query_starts}; }
  Side key_side() const { return {s.n_keys, key_heads(), group(), s.key_starts}; }

  // From the sums. divisors: what each row was divided by, or null.
  void finish_output(const float* sums, const std::uint8_t* valid, const Output<float>& out,
                     float* divisors) const {
    NormalizeRows a;
    set_output(a, valid);
    a.sums = sums;
    a.out = Elements(out);
    a.data = out.data;
    a.divisors = divisors;
    normalize(queue, a);
  }
  // The gradient of the sums, from these or, where there are divisors, from the output.
  void sums_backward(float* sums, const Input<float>& out, const float* divisors,
                     const std::uint8_t* valid, const Input<float>& grad, float* bias,
                     int significand = 24) const {
    NormalizeBackward a;
    set_output(a, valid);
    a.sums = sums;
    if (divisors) {
      a.out = Elements(out);
      a.divisors = divisors;
    }
    a.grad = Elements(grad);
    a.bias = bias;
    a.significand = significand;
    normalize_backward(queue, a);
  }
  // Of queries or of keys, from those of the unit vectors, `own_group` of them for a head.
  void finish_rows(bool query, const float* own, index_t own_group, const float* inverse,
                   const Output<float>& to) const {
    FinishGradient f = of_side(query, own, own_group, s.n_features, to);
    f.x = Elements(query ? in.query : in.key);
    f.inverse = inverse;
    finish_gradient(queue, f);
  }
  void finish_values(const float* own, const std::uint8_t* valid, const Output<float>& to) const {
    FinishGradient f = of_side(false, own, group(), s.n_values, to);
    f.valid = valid;
    finish_gradient(queue, f);
  }

 private:
  template <class Rows>
  void set_output(Rows& a, const std::uint8_t* valid) const {
    a.batch = s.batch;
    a.heads = s.heads;
    a.n_rows = s.n_queries;
    a.columns = s.n_values;
    a.counts = counts();
    a.normalize = options.normalize;
    a.valid = valid;
  }
  FinishGradient of_side(bool query, const float* own, index_t own_group, index_t columns,
                         const Output<float>& to) const {
    FinishGradient f;
    f.own = own;
    f.batch = s.batch;
    f.heads = query ? s.heads : key_heads();
    f.group = own_group;
    f.n_rows = query ? s.n_queries : s.n_keys;
    f.columns = columns;
    f.out = Elements(to);
    f.data = to.data;
    return f;
  }
};

}  // namespace lshkit::cuda

#pragma once
// The kernels of one instruction set, behind a table of function pointers. Each works on one head
// in one thread; threads, heads and scratch are the callers' (cpp/src/*.cpp).
#include "lshkit/attention.hpp"
#include "lshkit/tensor.hpp"

namespace lshkit {

// ---- hash ----
struct HashRows {
  const float* parameters;  // of this head, laid out as HashFunctions says
  index_t columns;
  int n_bits;
  index_t n_hashes;
  const float* x;
  index_t row_stride, rows, n_features;
  void* codes;     // (rows, n_hashes)
  float* scratch;  // 64-byte aligned, kHashTile * (2 * columns + n_hashes + kHashPadding) floats
};
constexpr int kHashTile = 32;     // tokens, at most, whose features and codes lie in scratch
constexpr int kHashPadding = 96;  // to whole registers of features and of packed codes

// ---- rows ----
template <class T>
struct Matrix {
  T* data;
  index_t stride, rows, columns;
  T* row(index_t i) const { return data + i * stride; }
};

// ---- soft_hash ----
// Codes, selected bits and margins as soft_hash.hpp defines them.
struct SoftHashRows : HashRows {
  Family family;
  const float* inverse_norm;  // (rows)
  int n_selected;
  std::uint8_t* bits;  // (rows, n_hashes, n_selected)
  float* margins;      // (rows, n_hashes, n_selected)
};
// From the gradient of the margins to that of the unit vectors x_i * inverse_norm_i; the way
// through the norm is unit_norm_backward.
struct SoftHashGradient {
  Family family;
  const float* parameters;
  index_t columns;
  int n_bits;
  index_t n_hashes;
  int n_selected;
  const void* codes;  // (rows, n_hashes)
  int code_bytes;
  const std::uint8_t* bits;   // (rows, n_hashes, n_selected)
  const float* margin_grads;  // (rows, n_hashes, n_selected)
  Matrix<float> grad;         // every element is written
  float* scratch;             // 64-byte aligned
};
// The gradient of the hyperplanes of the hashes [first, last), added to plane_grads
// (n_hashes * n_bits, n_features). Rows without an inverse norm (0 or NaN) take no part.
struct PlaneGradient : SoftHashGradient {
  Matrix<const float> x;
  const float* inverse_norm;
  float* plane_grads;
};
// The probes of the hashes [first_hash, first_hash + group) of a run of rows.
struct ProbeRows {
  const void* codes;  // (rows, n_hashes)
  int code_bytes;
  const std::uint8_t* bits;  // (rows, n_hashes, n_selected)
  const float* margins;      // (rows, n_hashes, n_selected)
  index_t rows, n_hashes, first_hash, group, n_probes;
  index_t probe_stride;       // from one row's (group, n_probes) to the next
  int n_selected;             // selected_bits(n_probes)
  const std::uint8_t* valid;  // (rows), null: all; other rows have weights 0 and pass no gradient
  float sharpness;
};

// ---- bucket_sum ----
// A pass over one or two slices of the value columns and one group of hashes, whose tables fit the
// L2 cache.
constexpr int kSliceBytes = 64;  // one cache line of a table row
constexpr int kMaxGroup = 16;    // hashes a pass
template <class T>
struct BucketSumPass {
  const void *query_codes, *key_codes;  // of the group's first hash
  index_t query_code_stride, key_code_stride;
  int code_bytes, group;
  index_t n_queries, n_keys, table_rows;
  const T* values;  // the slice's first column
  index_t value_stride;
  int slices, width;  // 1 or 2, and their columns: at most slices * kSliceBytes / sizeof(T)
  const std::uint8_t* key_mask;
  Order order;
  T scale;
  T* out;
  index_t out_stride;
  bool accumulate;  // add to out, which an earlier group has written
  T* table;         // group * table_rows rows of slices * kSliceBytes, aligned to 64
};
// Whole rows of a BucketTable: one hash's (n_buckets, n_values) after the other's.
template <class T>
struct BucketTableRows {
  T* table;
  index_t n_hashes, n_buckets, n_values;
  const void* codes;  // (rows, n_hashes)
  int code_bytes;
  index_t rows;
};

// ---- decoding ----
// Keys for and queries of the tables of one key head. A row has n_probes codes for each hash, with
// weights, or one code of weight 1 where there are no weights.
struct DecodingCodes {
  const void* codes;     // (rows, n_hashes, n_probes)
  const float* weights;  // the same shape, or null
  index_t n_probes, rows;
};
struct DecodingHead {
  void* sums;     // (n_hashes, n_buckets, n_values), of float or IEEE half precision
  float* counts;  // (n_hashes, n_buckets), or null
  bool half;
  int code_bytes;
  index_t n_hashes, n_buckets, n_values;
  DecodingCodes keys, queries;  // queries.rows of each of the group's heads, head after head
  index_t group;
  const float* values;
  index_t value_stride;
  const std::uint8_t* key_valid;  // null: all keys
  bool causal;                    // key i before query i, else all keys before all queries
  float* out;                     // of the group's first head, with the strides of rows and heads
  index_t out_row_stride, out_head_stride;
  float* out_counts;  // (group, queries): where there are counts
};

// ---- gradients of queries and keys ----
// With s_ij = grad_i . value_j + bias_i and unit vectors q_i, k_j (query_i * query_inverse_norm_i):
// query_grad_i = sum_j w_ij s_ij k_j and key_grad_j = sum_i w_ij s_ij q_i, in the unit vectors.
// Only rows whose valid byte is set take part. Every element of the outputs is written.
template <class T>
struct PairGradient {
  Matrix<const T> query, key, value, grad;
  const T* bias;  // (queries), or null for zero
  const T *query_inverse_norm, *key_inverse_norm;
  const std::uint8_t *query_valid, *key_valid;
  bool causal;  // key j <= query i
  Matrix<T> query_grad, key_grad;
  void* scratch;  // 64-byte aligned
};
// w = scale * the number of hashes in which query and key collide.
struct LowerBoundGradient : PairGradient<float> {
  const void *query_codes, *key_codes;  // (rows, n_hashes)
  int code_bytes;
  index_t n_hashes, n_buckets;
  float scale;
};
// w from the collision probability p(x) = (1 - acos(x) / pi)^n_bits, x = q_i . k_j.
template <class T>
struct ExpectedGradient : PairGradient<T> {
  int n_bits;
  Gradient weight;
  Matrix<T> value_grad;  // sum_i p_ij grad_i; no data: not wanted
};
// out_i = sum_j p_ij value_j and, where not null, row_sum_i = sum_j p_ij.
template <class T>
struct ExpectedSum {
  Matrix<const T> query, key, value;
  const T *query_inverse_norm, *key_inverse_norm;
  const std::uint8_t* key_valid;
  bool causal;
  index_t first_query;  // the position of row 0 among all queries
  int n_bits;
  Matrix<T> out;
  T* row_sum;
  void* scratch;
};

template <class T>
struct TypedKernels {
  void (*bucket_sum)(const BucketSumPass<T>&);
  void (*table_add)(const BucketTableRows<T>&, index_t hash, const T* values, index_t value_stride,
                    T sign);  // to one hash's table
  void (*table_query)(const BucketTableRows<T>&, T scale, T* out);
  // inverse_i = 1 / |x_i|: 0 for a row of zeros or masked out (null mask: none is), NaN for a row
  // with a NaN or infinity. valid_i: not masked, and finite.
  void (*inverse_norms)(Matrix<const T> x, const std::uint8_t* mask, T* inverse,
                        std::uint8_t* valid);
  // y = y / |y|, or y_i / sums_i; 0 where the divisor is (next to) zero.
  void (*normalize_l2)(Matrix<T> y);
  void (*normalize_sum)(Matrix<T> y, const T* sums);
  // From the output's gradient and the unnormalised output to the latter's gradient, in its place
  // (y: unnormalised in, gradient out). bias_i is what every s_ij of the row gains.
  void (*normalize_l2_backward)(Matrix<const T> grad, Matrix<T> y);
  void (*normalize_sum_backward)(Matrix<const T> grad, Matrix<T> y, const T* sums, T* bias);
  // grad: in the unit vectors in, in x out: (g - (g . u) u) / |x|; 0 where inverse is 0.
  void (*unit_norm_backward)(Matrix<const T> x, const T* inverse, Matrix<T> grad);
  index_t (*expected_scratch)(index_t n_features, index_t n_values);  // bytes
  void (*expected_sum)(const ExpectedSum<T>&);
  void (*expected_gradient)(const ExpectedGradient<T>&);
};

struct Kernels {
  const char* name;
  bool (*hash_hadamard)(const HashRows&);
  bool (*hash_hyperplane)(const HashRows&);
  index_t (*soft_hash_scratch)(const SoftHashRows&);  // bytes
  void (*soft_hash)(const SoftHashRows&);
  index_t (*soft_hash_gradient_scratch)(const SoftHashGradient&);  // bytes
  void (*soft_hash_gradient)(const SoftHashGradient&);
  void (*plane_gradient)(const PlaneGradient&, index_t first, index_t last);
  // probe_codes (uint8 or uint16, probe_code_bytes) and weights: (rows, group, n_probes).
  void (*expand_probes)(const ProbeRows&, int probe_code_bytes, void* probe_codes, float* weights);
  // weights, as expand_probes gave them (0: the row passes no gradient), and weight_grads. Writes
  // margin_grads (rows, group, n_selected) at a row stride and returns the gradient of sharpness.
  double (*reduce_probes)(const ProbeRows&, const float* weights, const float* weight_grads,
                          float* margin_grads, index_t margin_grad_stride);
  index_t (*lower_bound_scratch)(const LowerBoundGradient&);  // bytes
  void (*lower_bound_gradient)(const LowerBoundGradient&);
  TypedKernels<float> f32;
  TypedKernels<double> f64;
  // Raw sums: out = sum over hashes and probes of weight * row. Heads in turn, each one's rows are
  // fetched while the one before is worked on.
  void (*decode_heads)(const DecodingHead* heads, index_t count);

  template <class T>
  const TypedKernels<T>& typed() const {
    if constexpr (sizeof(T) == sizeof(float))
      return f32;
    else
      return f64;
  }
};

// The table of the instruction set in use.
const Kernels& kernels();
namespace base {
Kernels table();
}
namespace avx2 {
Kernels table();
}
namespace avx512 {
Kernels table();
}

#ifdef LSHKIT_ISA
// What the kernel files of one instruction set define, and its table.cpp collects.
namespace LSHKIT_ISA {
bool hash_hadamard(const HashRows&);
bool hash_hyperplane(const HashRows&);
index_t soft_hash_scratch(const SoftHashRows&);
void soft_hash(const SoftHashRows&);
index_t soft_hash_gradient_scratch(const SoftHashGradient&);
void soft_hash_gradient(const SoftHashGradient&);
void plane_gradient(const PlaneGradient&, index_t first, index_t last);
void expand_probes(const ProbeRows&, int, void*, float*);
double reduce_probes(const ProbeRows&, const float*, const float*, float*, index_t);
index_t lower_bound_scratch(const LowerBoundGradient&);
void lower_bound_gradient(const LowerBoundGradient&);
index_t lower_bound_pairs_scratch(const LowerBoundGradient&);
void lower_bound_pairs(const LowerBoundGradient&);
index_t lower_bound_buckets_scratch(const LowerBoundGradient&);
void lower_bound_buckets(const LowerBoundGradient&);
void decode_heads(const DecodingHead* heads, index_t count);
#define LSHKIT_DECLARE(T)                                                      \
  void bucket_sum(const BucketSumPass<T>&);                                    \
  void table_add(const BucketTableRows<T>&, index_t, const T*, index_t, T);    \
  void table_query(const BucketTableRows<T>&, T, T*);                          \
  void inverse_norms(Matrix<const T>, const std::uint8_t*, T*, std::uint8_t*); \
  void normalize_l2(Matrix<T>);                                                \
  void normalize_sum(Matrix<T>, const T*);                                     \
  void normalize_l2_backward(Matrix<const T>, Matrix<T>);                      \
  void normalize_sum_backward(Matrix<const T>, Matrix<T>, const T*, T*);       \
  void unit_norm_backward(Matrix<const T>, const T*, Matrix<T>);               \
  void expected_sum(const ExpectedSum<T>&);                                    \
  void expected_gradient(const ExpectedGradient<T>&);
LSHKIT_DECLARE(float)
LSHKIT_DECLARE(double)
#undef LSHKIT_DECLARE
index_t expected_scratch_f32(index_t n_features, index_t n_values);
index_t expected_scratch_f64(index_t n_features, index_t n_values);
}  // namespace LSHKIT_ISA
#endif

}  // namespace lshkit

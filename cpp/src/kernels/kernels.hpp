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

// ---- rows of attention ----
template <class T>
struct Matrix {
  T* data;
  index_t stride, rows, columns;
  T* row(index_t i) const { return data + i * stride; }
};

// ---- collisions ----
// The rows whose pairs are looked at; n_hashes <= 65535.
struct PairCodes {
  const void *query_codes, *key_codes;  // (rows, n_hashes)
  int code_bytes;
  index_t n_hashes, n_queries, n_keys;
  const std::uint8_t *query_valid, *key_valid;  // null: all
  bool causal;                                  // key <= query
  index_t first_query;                          // the position of query 0 among all
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
// Of the pairs that collide in some hash: w from the cosine, see Gradient::collided and unbiased.
// n_hashes <= 65535.
struct CollidedGradient : PairGradient<float> {
  const void *query_codes, *key_codes;  // (rows, n_hashes)
  int code_bytes;
  index_t n_hashes;
  int n_bits;
  Gradient weight;
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

// ---- near window ----
// The pairs of valid rows with |i - j| < window, causal: 0 <= i - j < window.
struct WindowPairs : PairGradient<float> {
  PairCodes codes;
  int n_bits;
  index_t window;
};
// out_i += sum_j e_ij value_j and, where not null, row_sum_i += sum_j e_ij, with e_ij = p(x_ij) -
// the share of the hashes in which the pair collides, for the queries first <= i < last.
struct WindowSum : WindowPairs {
  index_t first, last;
  Matrix<float> out;
  float* row_sum;
};
// value_grad_j += sum_i e_ij grad_i, and query_grad and key_grad gain what the pairs' exact weights
// are above their sampled ones.
struct WindowGradient : WindowPairs {
  Gradient weight;
  Matrix<float> value_grad;
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
  // count floats from bfloat16 or float16 and back, rounded to nearest even; NaN stays NaN.
  void (*widen)(const void* from, Element element, index_t count, float* to);
  void (*narrow)(const float* from, index_t count, Element element, void* to);
  bool (*hash_hadamard)(const HashRows&);
  bool (*hash_hyperplane)(const HashRows&);
  index_t (*lower_bound_scratch)(const LowerBoundGradient&);  // bytes
  void (*lower_bound_gradient)(const LowerBoundGradient&);
  index_t (*collided_scratch)(const CollidedGradient&);  // bytes
  void (*collided_gradient)(const CollidedGradient&);
  index_t (*window_scratch)(const WindowPairs&);  // bytes
  void (*window_sum)(const WindowSum&);
  void (*window_gradient)(const WindowGradient&);
  TypedKernels<float> f32;
  TypedKernels<double> f64;

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
void widen(const void*, Element, index_t, float*);
void narrow(const float*, index_t, Element, void*);
bool hash_hadamard(const HashRows&);
bool hash_hyperplane(const HashRows&);
index_t lower_bound_scratch(const LowerBoundGradient&);
void lower_bound_gradient(const LowerBoundGradient&);
index_t lower_bound_pairs_scratch(const LowerBoundGradient&);
void lower_bound_pairs(const LowerBoundGradient&);
index_t lower_bound_buckets_scratch(const LowerBoundGradient&);
void lower_bound_buckets(const LowerBoundGradient&);
index_t collided_scratch(const CollidedGradient&);
void collided_gradient(const CollidedGradient&);
index_t window_scratch(const WindowPairs&);
void window_sum(const WindowSum&);
void window_gradient(const WindowGradient&);
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

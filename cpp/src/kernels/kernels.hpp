#pragma once
// The kernels of one instruction set, behind a table of function pointers. Each works on one head
// in one thread; threads, heads and scratch are the callers' (cpp/src/*.cpp).
#include "kernel_arguments.hpp"

namespace lshkit {

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
  void (*normalize_l2)(Matrix<T> y, T* lengths);  // lengths: null, or gets those before
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
  void (*weighted_bucket_sum)(const WeightedPass<T>&);
  void (*weighted_column_sum)(const WeightedColumn<T>&);
  void (*binned_hash)(const BinnedRows<T>&);
  void (*pair_products)(const PairProducts<T>&, index_t query, index_t begin, index_t end);
};

struct Kernels {
  const char* name;
  // count floats from bfloat16 or float16 and back, rounded to nearest even; NaN stays NaN.
  void (*widen)(const void* from, Element element, index_t count, float* to);
  void (*narrow)(const float* from, index_t count, Element element, void* to);
  bool (*hash_hadamard)(const HashRows&);
  bool (*hash_hyperplane)(const HashRows&);
  bool (*fast_hash_hadamard)(const HashRows&);  // columns <= kMaxFastColumns
  // value_j * scale to the nearest integer, columns in the order of fast_bucket_sum's lanes
  void (*fast_values)(Matrix<const float> values, const float* scale, std::int16_t* out,
                      index_t out_stride);
  void (*fast_column_sums)(Matrix<const float> values, const std::uint8_t* mask, FastColumnSums*);
  // False if a bucket left 16 bits at some time: the output may be anything.
  bool (*fast_bucket_sum)(const FastSumPass&);
  index_t (*soft_hash_scratch)(const SoftHashRows&);  // bytes
  void (*soft_hash)(const SoftHashRows&);
  index_t (*soft_hash_gradient_scratch)(const SoftHashGradient&);  // bytes
  void (*soft_hash_gradient)(const SoftHashGradient&);
  void (*plane_gradient)(const PlaneGradient&, index_t first, index_t last);
  // probe_codes and weights: (rows, group, n_probes) at probe_stride. probe_code_bytes: 2, or 1 for
  // codes of one byte.
  void (*expand_probes)(const ProbeRows&, int probe_code_bytes, void* probe_codes, float* weights);
  // weights, as expand_probes gave them (0: the row passes no gradient), and weight_grads. Writes
  // margin_grads (rows, group, n_selected) at a row stride and returns the gradient of sharpness.
  double (*reduce_probes)(const ProbeRows&, const float* weights, const float* weight_grads,
                          float* margin_grads, index_t margin_grad_stride);
  // The same for n_probes = 2^n_bits <= 2^12: weights of the buckets in order, (group * n_probes,
  // rows) at a row stride, which is a multiple of 16; columns up to one are written.
  void (*dense_probes)(const ProbeRows&, float* weights, index_t stride);
  double (*dense_probes_gradient)(const ProbeRows&, const float* weights, const float* weight_grads,
                                  index_t stride, float* margin_grads, index_t margin_grad_stride);
  // to (rows, stride) = scale * x, or to (columns, stride) = x transposed; zeros beyond them and in
  // rows that are not valid. stride: a multiple of 16.
  void (*dense_pack)(Matrix<const float> x, const std::uint8_t* valid, float scale, float* to,
                     index_t stride);
  void (*dense_pack_transposed)(Matrix<const float> x, const std::uint8_t* valid, float* to,
                                index_t stride);
  // c_ri = sum over k < depth of a[r * a_row + k * a_depth] * b[k * b_stride + i], or added to it.
  // b is read up to a multiple of 16 columns.
  void (*dense_matmul)(index_t rows, index_t columns, index_t depth, const float* a, index_t a_row,
                       index_t a_depth, const float* b, index_t b_stride, float* c,
                       index_t c_stride, bool add);
  // Adds weight * x to the table, x (rows, the table's stride), and weight * column to its column.
  void (*dense_add)(const DenseTable&, const DenseWeights&, const float* x, const float* column);
  // Adds the weighted sums of the table to sum, and those of its column to column_sum (may be
  // null).
  void (*dense_read)(const DenseTable&, const DenseWeights&, float* sum, index_t sum_stride,
                     float* column_sum);
  // to = dot products of table rows with x (columns, to.stride), plus the product of the columns.
  void (*dense_dots)(const DenseTable&, const float* x, const float* column,
                     const DenseWeights& to);
  index_t (*lower_bound_scratch)(const LowerBoundGradient&);  // bytes
  void (*lower_bound_gradient)(const LowerBoundGradient&);
  index_t (*collided_scratch)(const CollidedGradient&);  // bytes
  void (*collided_gradient)(const CollidedGradient&);
  index_t (*window_scratch)(const WindowPairs&);  // bytes
  void (*window_sum)(const WindowSum&);
  void (*window_gradient)(const WindowGradient&);
  index_t (*collisions_scratch)(const PairCodes&);  // bytes
  void (*collisions)(const CollisionPass&);
  TypedKernels<float> f32;
  TypedKernels<double> f64;
  // The listed rows, transposed, for packed_products: whole panels of kListPanel of them.
  void (*pack_listed)(Matrix<const float> rows, const std::int32_t* list, index_t count, float* to);
  // out (queries, count) = products of all queries with all packed rows
  void (*packed_products)(Matrix<const float> queries, const float* packed, index_t count,
                          float* out, index_t out_stride);
  float (*largest_of)(const float* x, index_t count, float largest);  // of these and `largest`
  // Of exp(x - largest), for x <= largest. Below 2^-125 a term is 2^-125.
  ExponentialSums (*exponential_sums)(const float* x, index_t count, float largest);
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
void widen(const void*, Element, index_t, float*);
void narrow(const float*, index_t, Element, void*);
bool hash_hadamard(const HashRows&);
bool hash_hyperplane(const HashRows&);
bool fast_hash_hadamard(const HashRows&);
void binned_hash(const BinnedRows<float>&);
void binned_hash(const BinnedRows<double>&);
void fast_values(Matrix<const float>, const float*, std::int16_t*, index_t);
void fast_column_sums(Matrix<const float>, const std::uint8_t*, FastColumnSums*);
bool fast_bucket_sum(const FastSumPass&);
index_t soft_hash_scratch(const SoftHashRows&);
void soft_hash(const SoftHashRows&);
index_t soft_hash_gradient_scratch(const SoftHashGradient&);
void soft_hash_gradient(const SoftHashGradient&);
void plane_gradient(const PlaneGradient&, index_t first, index_t last);
void expand_probes(const ProbeRows&, int, void*, float*);
double reduce_probes(const ProbeRows&, const float*, const float*, float*, index_t);
void dense_probes(const ProbeRows&, float*, index_t);
double dense_probes_gradient(const ProbeRows&, const float*, const float*, index_t, float*,
                             index_t);
void dense_pack(Matrix<const float>, const std::uint8_t*, float, float*, index_t);
void dense_pack_transposed(Matrix<const float>, const std::uint8_t*, float*, index_t);
void dense_matmul(index_t, index_t, index_t, const float*, index_t, index_t, const float*, index_t,
                  float*, index_t, bool);
void dense_add(const DenseTable&, const DenseWeights&, const float*, const float*);
void dense_read(const DenseTable&, const DenseWeights&, float*, index_t, float*);
void dense_dots(const DenseTable&, const float*, const float*, const DenseWeights&);
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
index_t collisions_scratch(const PairCodes&);
void collisions(const CollisionPass&);
void decode_heads(const DecodingHead* heads, index_t count);
void pack_listed(Matrix<const float>, const std::int32_t*, index_t, float*);
void packed_products(Matrix<const float>, const float*, index_t, float*, index_t);
float largest_of(const float*, index_t, float);
ExponentialSums exponential_sums(const float*, index_t, float);
#define LSHKIT_DECLARE(T)                                                      \
  void bucket_sum(const BucketSumPass<T>&);                                    \
  void table_add(const BucketTableRows<T>&, index_t, const T*, index_t, T);    \
  void table_query(const BucketTableRows<T>&, T, T*);                          \
  void inverse_norms(Matrix<const T>, const std::uint8_t*, T*, std::uint8_t*); \
  void normalize_l2(Matrix<T>, T*);                                            \
  void normalize_sum(Matrix<T>, const T*);                                     \
  void normalize_l2_backward(Matrix<const T>, Matrix<T>);                      \
  void normalize_sum_backward(Matrix<const T>, Matrix<T>, const T*, T*);       \
  void unit_norm_backward(Matrix<const T>, const T*, Matrix<T>);               \
  void expected_sum(const ExpectedSum<T>&);                                    \
  void expected_gradient(const ExpectedGradient<T>&);                          \
  void weighted_bucket_sum(const WeightedPass<T>&);                            \
  void weighted_column_sum(const WeightedColumn<T>&);                          \
  void pair_products(const PairProducts<T>&, index_t, index_t, index_t);
LSHKIT_DECLARE(float)
LSHKIT_DECLARE(double)
#undef LSHKIT_DECLARE
index_t expected_scratch_f32(index_t n_features, index_t n_values);
index_t expected_scratch_f64(index_t n_features, index_t n_values);
}  // namespace LSHKIT_ISA
#endif

}  // namespace lshkit

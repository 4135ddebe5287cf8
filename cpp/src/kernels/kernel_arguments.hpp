#pragma once
// What the kernels of kernel_list.hpp are given: rows, codes and scratch of one head.
#include <algorithm>

#include "lshkit/attention.hpp"
#include "lshkit/binned_hash.hpp"
#include "lshkit/collisions.hpp"
#include "lshkit/pair_products.hpp"
#include "lshkit/random_numbers.hpp"
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
  const std::uint16_t* short_x = nullptr;  // of the fast kernels: of `element`, in the place of x
  Element element = Element::float32;
  void* codes;  // (rows, n_hashes)
  // 64-byte aligned, hash_scratch() floats. In 16 bits kHashTile * (4 * columns + n_hashes), and
  // ceil(n_hashes / 16) * n_bits * columns for the signs.
  float* scratch;
  // Of codes longer than the 32 bits of a pass: the n_bits from first_bit on of all_bits (0: all).
  int first_bit = 0, all_bits = 0;

  index_t bits() const { return all_bits ? all_bits : n_bits; }
};
constexpr index_t kMaxFastColumns = 128;  // beyond, 16 bits would change too many codes
// Rows for kernels/bfloat16/hash.cpp, all bits of a code; hash_tiles: a block of them.
struct HashTiles : HashRows {
  bool bfloat16;  // which the rows are without loss
  // 64-byte aligned: what pack_planes makes of parameters, hash_tiles_planes() floats, or
  // pack_rotations, fast_hash_tiles_planes().
  float* planes;
};
constexpr index_t kTileRows = 32;  // of a block, at most
// Beyond so many features, float32's rounding leaves the signs of too many sums open.
constexpr index_t kMaxTileFeatures = 2048;
constexpr index_t hash_tiles_planes(index_t code_bytes, index_t n_hashes, index_t n_features) {
  const index_t planes = (8 * code_bytes * n_hashes + 15) / 16 * 16;
  return planes * ((n_features + 31) / 32 * 32 + 1);  // two parts of bfloat16, and the norm
}
constexpr index_t fast_hash_tiles_planes(index_t code_bytes, index_t n_hashes, index_t n_features) {
  return (8 * code_bytes * n_hashes + 15) / 16 * 8 * ((n_features + 31) / 32 * 32);
}
constexpr index_t hash_tiles_scratch(index_t n_features) {  // floats
  return kTileRows * ((n_features + 31) / 32 * 32 + 32);    // two parts, and sums
}
// Of pack_rotations: a tile of unit vectors, and Rotations of up to 64 bits (hadamard.hpp).
constexpr index_t pack_rotations_scratch(index_t columns) { return 96 * columns; }
constexpr int kHashTile = 32;     // tokens, at most, whose features and codes lie in scratch
constexpr int kHashPadding = 96;  // to whole registers of features and of packed codes
// Of a tile and its codes, and Rotations of up to 32 bits.
constexpr index_t hash_scratch(index_t columns, index_t n_hashes) {
  return kHashTile * (3 * columns + n_hashes + kHashPadding);
}

template <class T>
struct BinnedRows {
  BinnedFunctions functions;
  const T* x;
  index_t row_stride, rows;
  void* codes;    // (rows, n_hashes)
  void* scratch;  // 64-byte aligned, kBinnedTile * (n_features + kBinnedPadding) doubles
};
constexpr int kBinnedTile = 32;    // rows, at most, whose features lie in scratch
constexpr int kBinnedPadding = 8;  // to a whole register of features

// ---- rows ----
template <class T>
struct Matrix {
  T* data;
  index_t stride, rows, columns;
  T* row(index_t i) const { return data + i * stride; }
};

// ---- soft_hash ----
// Codes and margins as soft_hash.hpp defines them.
struct SoftHashRows : HashRows {
  Family family;
  const float* inverse_norm;  // (rows)
  int n_selected;
  float* margins;  // (rows, n_hashes, n_selected)
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
  const float* margin_grads;  // (rows, n_hashes, n_selected), as reduce_probes writes them
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
// Of a part, at most, where 3 or 4 probes are made of four rows at a time.
constexpr int kHashesOfFour = 2;
// The probes of the hashes [first_hash, first_hash + group) of a run of rows: for one part of the
// hashes after the other, each (rows, part, n_probes).
struct ProbeRows {
  const void* codes;  // (rows, n_hashes)
  int code_bytes;
  const float* margins;  // (rows, n_hashes, n_selected)
  index_t rows, n_hashes, first_hash, group, n_probes;
  index_t part;               // at most so many hashes
  index_t probe_stride;       // of a single part, from one row's (group, n_probes) to the next
  int n_selected;             // selected_bits(n_probes)
  int last_bit;               // a larger number of a bit counts as this one
  const std::uint8_t* valid;  // (rows), null: all; other rows have weights 0 and pass no gradient
  float sharpness;
};

// ---- bucket_sum ----
// A pass over one or two slices of the value columns and one group of hashes, whose tables are in
// use together.
constexpr int kSliceBytes = 64;  // one cache line of a table row
constexpr int kMaxGroup = 16;    // hashes a pass
struct SumPass {
  const void *query_codes, *key_codes;  // of the group's first hash
  index_t code_stride;
  int code_bytes, group;
  index_t n_queries, n_keys, table_rows;
  index_t first_query;  // those before are not read; causal only
  const std::uint8_t* key_mask;
  Order order;
  int slices, width;  // 1 or 2, and their columns
  bool accumulate;    // add to the output, which an earlier group has written
};
template <class T>
struct BucketSumPass : SumPass {
  const T* values;  // the slice's first column
  index_t value_stride;
  T scale;
  T* out;
  index_t out_stride;
  T* table;  // group * table_rows rows of slices * kSliceBytes, aligned to 64
};
// The same in 16-bit integers, of values that have been rounded to them.
constexpr int kFastColumns = kSliceBytes / 2;
struct FastSumPass : SumPass {
  const std::int16_t* values;  // rows of fast_values, the slice's first column
  index_t value_stride;
  const float* scale;  // of each column: from a sum of rounded values to the output
  float* out;
  index_t out_stride;
  std::uint32_t* table;  // as above
};
// The pairs of a query and a key in one bucket, one by one, where they are few: see
// keys_by_bucket.hpp. table_rows: the buckets; first_query and slices are not read.
constexpr int kPairGroup = 8;    // hashes, at most
constexpr int kPairQueries = 8;  // whose pairs are listed together
struct PairSearch : SumPass {
  bool linked;  // keys, or else sorted: for two in a bucket at most as a rule
  // Pairs of these hashes: of the first i queries, in their order, most + i * most_of_query at
  // most.
  index_t most, most_of_query;
  std::uint16_t* buckets;  // (2 * table_rows + 3, kPairGroup)
  std::uint16_t* keys;     // (n_keys + 1, kPairGroup)
  std::uint16_t* found;    // (found_pairs() + 8 * kPairGroup)

  index_t found_pairs() const {  // at most, of kPairQueries
    return std::min(most + n_queries * most_of_query, kPairQueries * n_keys * kPairGroup);
  }
};
// A pass over all columns without tables.
template <class T>
struct PairSumPass : PairSearch {
  Matrix<const T> values;
  T scale;
  Matrix<T> out;
};
// Rows of floats, or of numbers of 16 bits.
struct FloatRows {
  const void* data;
  index_t stride, rows, columns;
  Element element;

  FloatRows(Matrix<const float> m)
      : FloatRows(m.data, m.stride, m.rows, m.columns, Element::float32) {}
  FloatRows(const void* first, index_t step, index_t n, index_t width, Element kind)
      : data(first), stride(step), rows(n), columns(width), element(kind) {}
  FloatRows slice(index_t first, index_t width) const {
    return {static_cast<const char*>(data) + first * element_bytes(element), stride, rows,
            width < columns - first ? width : columns - first, element};
  }
};
// Of the columns of two slices at most, over the keys that are not masked out. weight_sum is of the
// keys that are not zero there.
struct FastColumnSums {
  using Columns = float[2 * kFastColumns];
  Columns largest, sum, magnitude_sum, square_sum, weighted_magnitude_sum, weight_sum;
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
// visit(context, query, keys, counts, n): see CollisionVisitor.
struct CollisionPass {
  PairCodes codes;
  CollisionVisitor visit;
  void* context;
  void* scratch;  // 64-byte aligned
};

// ---- see weighted_bucket_sum.hpp, colliding_softmax.hpp, kernel_sums.hpp, leave_one_out.hpp,
// lower_bound_bfloat16.hpp ----
template <class T>
struct WeightedPass;
template <class T>
struct WeightedPairs;
template <class T>
struct WeightedPairSum;
template <class T>
struct WeightedPairGradient;
template <class T>
struct WeightedColumn;
struct FastWeightedPass;
struct SoftmaxForward;
struct SoftmaxBackward;
struct Bfloat16Rows;
struct Bfloat16Side;
struct CodeRows;
struct CodeScan;
struct CodeSelect;
struct CodeRead;
template <class T>
struct KernelSumPass;
template <class T>
struct NearestPass;
template <class T>
struct LeaveOneOutPass;

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
// Only rows whose valid byte is set take part. Every element of the outputs is written; one that is
// not wanted has no data and no rows.
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
struct SampledGradient : PairGradient<float> {
  const void *query_codes, *key_codes;  // (rows, n_hashes)
  int code_bytes;
  index_t n_hashes;
};
// w = scale * the number of hashes in which query and key collide.
struct LowerBoundGradient : SampledGradient {
  index_t n_buckets;
  float scale;
  bool bfloat16_products = false;  // may be taken
};
// Of the pairs that collide in some hash: w from the cosine, see Gradient::collided and unbiased.
// n_hashes <= 65535.
struct CollidedGradient : SampledGradient {
  int n_bits;
  Gradient weight;
};
// w from the collision probability p(x) = (1 - acos(x) / pi)^n_bits, x = q_i . k_j.
template <class T>
struct ExpectedGradient : PairGradient<T> {
  int n_bits;
  Gradient weight;
  Matrix<T> value_grad;  // sum_i p_ij grad_i
};
// out_i = sum_j p_ij value_j and, where not null, row_sum_i = sum_j p_ij.
template <class T>
struct ExpectedOutput {  // all but the rows
  const T *query_inverse_norm, *key_inverse_norm;
  const std::uint8_t* key_valid;
  bool causal;
  index_t first_query;  // the position of row 0 among all queries
  int n_bits;
  Matrix<T> out;
  T* row_sum;
  void* scratch;
};
template <class T, class Row = T>  // Row: T, or the bits of a bfloat16
struct ExpectedSum : ExpectedOutput<T> {
  Matrix<const Row> query, key, value;
};
using ExpectedBfloat16Sum = ExpectedSum<float, std::uint16_t>;

// ---- partition_sums ----
constexpr index_t kListPanel = 256;  // rows of a list that pack_listed lays side by side
struct ExponentialSums {
  double sum, squares;
};

}  // namespace lshkit

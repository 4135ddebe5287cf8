// The kernels, each declared here and nowhere else: result, name, arguments. kernels.hpp makes of
// this list the tables of function pointers and the declarations of one instruction set, so there
// is no include guard. A kernel of LSHKIT_TYPED_KERNEL has an overload for float and for double, by
// the T among its arguments; one of LSHKIT_SHORT_KERNEL is there with AVX-512 and for amx_twin,
// null in other sets; one of LSHKIT_BFLOAT16_KERNEL is there where an instruction set multiplies
// bfloat16, one of LSHKIT_TILE_KERNEL where it does so by tiles, and one of
// LSHKIT_BFLOAT16_VECTOR_KERNEL where it does so by AVX512-BF16 alone: CPUs with tiles have that at
// half the rate of float32.
#ifndef LSHKIT_KERNEL
#define LSHKIT_KERNEL(result, name, ...)
#endif
#ifndef LSHKIT_TYPED_KERNEL
#define LSHKIT_TYPED_KERNEL(result, name, ...)
#endif
#ifndef LSHKIT_SHORT_KERNEL
#define LSHKIT_SHORT_KERNEL(result, name, ...)
#endif
#ifndef LSHKIT_BFLOAT16_KERNEL
#define LSHKIT_BFLOAT16_KERNEL(result, name, ...)
#endif
#ifndef LSHKIT_TILE_KERNEL
#define LSHKIT_TILE_KERNEL(result, name, ...)
#endif
#ifndef LSHKIT_BFLOAT16_VECTOR_KERNEL
#define LSHKIT_BFLOAT16_VECTOR_KERNEL(result, name, ...)
#endif

// ---- rows ----
// count floats from bfloat16 or float16 and back, rounded to nearest even; NaN stays NaN.
LSHKIT_KERNEL(void, widen, const void* from, Element element, index_t count, float* to)
LSHKIT_KERNEL(void, narrow, const float* from, index_t count, Element element, void* to)
// inverse_i = 1 / |x_i|: 0 for a row of zeros or masked out (null mask: none is), NaN for a row
// with a NaN or infinity. valid_i: not masked, and finite.
LSHKIT_TYPED_KERNEL(void, inverse_norms, Matrix<const T> x, const std::uint8_t* mask, T* inverse,
                    std::uint8_t* valid)
// Of rows of bfloat16.
LSHKIT_KERNEL(void, bfloat16_inverse_norms, Matrix<const std::uint16_t> x, const std::uint8_t* mask,
              float* inverse, std::uint8_t* valid)
// y = y / |y|, or y_i / sums_i; 0 where the divisor is zero. norms: null, or gets those before.
LSHKIT_TYPED_KERNEL(void, normalize_l2, Matrix<T> y, T* norms)
LSHKIT_TYPED_KERNEL(void, normalize_sum, Matrix<T> y, const T* sums)
// From the output's gradient and the unnormalised output to the latter's gradient, in its place
// (y: unnormalised in, gradient out). bias_i is what every s_ij of the row gains.
LSHKIT_TYPED_KERNEL(void, normalize_l2_backward, Matrix<const T> grad, Matrix<T> y)
LSHKIT_TYPED_KERNEL(void, normalize_sum_backward, Matrix<const T> grad, Matrix<T> y, const T* sums,
                    T* bias)
// grad: in the unit vectors in, in x out: (g - (g . u) u) / |x|; 0 where inverse is 0.
LSHKIT_TYPED_KERNEL(void, unit_norm_backward, Matrix<const T> x, const T* inverse, Matrix<T> grad)

// ---- codes ----
LSHKIT_KERNEL(void, random_numbers, RandomKey key, const RandomNumbers& numbers)
LSHKIT_KERNEL(void, random_normals, RandomKey key, const RandomNormals& normals)
// False where a row may not be finite.
LSHKIT_KERNEL(bool, hash_hadamard, const HashRows& rows)
LSHKIT_KERNEL(bool, hash_hyperplane, const HashRows& rows)
LSHKIT_KERNEL(bool, fast_hash_hadamard, const HashRows& rows)  // columns <= kMaxFastColumns
LSHKIT_TYPED_KERNEL(bool, binned_hash, const BinnedRows<T>& rows)

// ---- soft codes ----
LSHKIT_KERNEL(index_t, soft_hash_scratch, const SoftHashRows& rows)  // bytes
LSHKIT_KERNEL(void, soft_hash, const SoftHashRows& rows)
LSHKIT_KERNEL(index_t, soft_hash_gradient_scratch, const SoftHashGradient& gradient)  // bytes
LSHKIT_KERNEL(void, soft_hash_gradient, const SoftHashGradient& gradient)
LSHKIT_KERNEL(void, plane_gradient, const PlaneGradient& gradient, index_t first, index_t last)
// probe_codes and weights: laid out as ProbeRows says. probe_code_bytes: 2, or 1 for
// codes of one byte.
LSHKIT_KERNEL(void, expand_probes, const ProbeRows& rows, int probe_code_bytes, void* probe_codes,
              float* weights)
// weights, as expand_probes gave them (0: the row passes no gradient), and weight_grads. Writes
// margin_grads (rows, group, n_selected) at a row stride, with the numbers of the margins' bits as
// these have them, and returns the gradient of sharpness.
LSHKIT_KERNEL(double, reduce_probes, const ProbeRows& rows, const float* weights,
              const float* weight_grads, float* margin_grads, index_t margin_grad_stride)

// ---- bucket sums ----
LSHKIT_TYPED_KERNEL(void, bucket_sum, const BucketSumPass<T>& pass)
// Of how many queries the sums are there: the others have too many pairs. Not causal: of all or
// none.
LSHKIT_TYPED_KERNEL(index_t, pair_sum, const PairSumPass<T>& pass)
// value_j * scale to the nearest integer, columns in the order of fast_bucket_sum's lanes
LSHKIT_KERNEL(void, fast_values, const FloatRows& values, const float* scale, std::int16_t* out,
              index_t out_stride)
LSHKIT_KERNEL(void, fast_column_sums, const FloatRows& values, const std::uint8_t* mask,
              const float* weights, FastColumnSums* sums)
// False if a bucket left 16 bits at some time: the output may be anything.
LSHKIT_KERNEL(bool, fast_bucket_sum, const FastSumPass& pass)
// Whether tables of weighted sums may have a mask for each row and not be cleared: see
// used_rows.hpp
LSHKIT_KERNEL(bool, masks_rows, )
// Whether 3 or 4 probes are made, and reduced, of four rows at a time, with up to kHashesOfFour
// hashes a part
LSHKIT_KERNEL(bool, makes_four_rows, )
LSHKIT_TYPED_KERNEL(void, weighted_bucket_sum, const WeightedPass<T>& pass)
LSHKIT_TYPED_KERNEL(void, weighted_column_sum, const WeightedColumn<T>& column)
// fast_weighted_add: false if a bucket left 16 bits at some time. fast_factors: rows * scale, each
// row to the integers of 14 bits that times to_factor_i are nearest to it, in the order of
// fast_values; false where a row is not finite, or its size far from 1.
LSHKIT_SHORT_KERNEL(bool, fast_weighted_add, const FastWeightedPass& pass)
LSHKIT_SHORT_KERNEL(void, fast_weighted_read, const FastWeightedPass& pass)
LSHKIT_SHORT_KERNEL(void, fast_weights, const float* weights, index_t count, std::uint32_t* out)
LSHKIT_SHORT_KERNEL(bool, fast_factors, Matrix<const float> rows, const float* scale,
                    std::int16_t* out, index_t out_stride, float* to_factor)
// Of how many queries the pairs are there: the others have too many. Not causal: of all or none.
LSHKIT_TYPED_KERNEL(index_t, find_pairs, const WeightedPairs<T>& pairs)
LSHKIT_TYPED_KERNEL(void, weighted_pair_sum, const WeightedPairSum<T>& sum)
LSHKIT_TYPED_KERNEL(void, weighted_pair_gradient, const WeightedPairGradient<T>& gradient)
// To one hash's table.
LSHKIT_TYPED_KERNEL(void, table_add, const BucketTableRows<T>& rows, index_t hash, const T* values,
                    index_t value_stride, T sign)
LSHKIT_TYPED_KERNEL(void, table_query, const BucketTableRows<T>& rows, T scale, T* out)
// Raw sums: out = sum over hashes and probes of weight * row. Heads in turn, each one's rows are
// fetched while the one before is worked on.
LSHKIT_KERNEL(void, decode_heads, const DecodingHead* heads, index_t count)

// ---- pairs ----
LSHKIT_KERNEL(index_t, collisions_scratch, const PairCodes& codes)  // bytes
LSHKIT_KERNEL(void, collisions, const CollisionPass& pass)
LSHKIT_TYPED_KERNEL(void, pair_products, const PairProducts<T>& pairs, index_t query, index_t begin,
                    index_t end)

// ---- gradients of sampled attention ----
LSHKIT_KERNEL(index_t, lower_bound_scratch, const LowerBoundGradient& gradient)  // bytes
LSHKIT_KERNEL(void, lower_bound_gradient, const LowerBoundGradient& gradient)
LSHKIT_KERNEL(index_t, collided_scratch, const CollidedGradient& gradient)  // bytes
LSHKIT_KERNEL(void, collided_gradient, const CollidedGradient& gradient)

// ---- the expectation ----
LSHKIT_TYPED_KERNEL(index_t, expected_scratch, Matrix<const T> query,
                    Matrix<const T> value)  // bytes
LSHKIT_TYPED_KERNEL(void, expected_sum, const ExpectedSum<T>& sum)
LSHKIT_TYPED_KERNEL(void, expected_gradient, const ExpectedGradient<T>& gradient)

// ---- softmax over the pairs that collide ----
LSHKIT_KERNEL(index_t, softmax_forward_scratch, const SoftmaxForward& pass)  // bytes
LSHKIT_KERNEL(void, softmax_forward, const SoftmaxForward& pass)
LSHKIT_KERNEL(index_t, softmax_backward_scratch, const SoftmaxBackward& pass)  // bytes
LSHKIT_KERNEL(void, softmax_backward, const SoftmaxBackward& pass)

// ---- a cache of codes ----
LSHKIT_KERNEL(void, code_rows, const CodeRows& rows)
// out (n_bits) = x (n_features) times planes (n_features, n_bits)
LSHKIT_KERNEL(void, code_projections, const float* x, index_t n_features, const float* planes,
              index_t n_bits, float* out)
LSHKIT_KERNEL(void, code_estimates, const CodeScan& scan)
LSHKIT_KERNEL(index_t, code_select, const CodeSelect& select)  // how many were written
LSHKIT_KERNEL(void, code_read, const CodeRead& read)

// ---- sums of kernels and of exponentials ----
LSHKIT_TYPED_KERNEL(index_t, kernel_sums_scratch, const KernelSumPass<T>& pass)  // bytes
LSHKIT_TYPED_KERNEL(void, kernel_sums, const KernelSumPass<T>& pass)
LSHKIT_TYPED_KERNEL(index_t, nearest_rows_scratch, const NearestPass<T>& pass)  // bytes
LSHKIT_TYPED_KERNEL(void, nearest_rows, const NearestPass<T>& pass)
LSHKIT_TYPED_KERNEL(index_t, leave_one_out_scratch, const LeaveOneOutPass<T>& pass)  // bytes
LSHKIT_TYPED_KERNEL(void, leave_one_out, const LeaveOneOutPass<T>& pass)
// The listed rows, transposed, for packed_products: whole panels of kListPanel of them.
LSHKIT_KERNEL(void, pack_listed, Matrix<const float> rows, const std::int32_t* list, index_t count,
              float* to)
// out (queries, count) = products of all queries with all packed rows
LSHKIT_KERNEL(void, packed_products, Matrix<const float> queries, const float* packed,
              index_t count, float* out, index_t out_stride)
// Of these and `largest`.
LSHKIT_KERNEL(float, largest_of, const float* x, index_t count, float largest)
// Of exp(x - largest), for x <= largest. Below 2^-125 a term is 2^-125.
LSHKIT_KERNEL(ExponentialSums, exponential_sums, const float* x, index_t count, float largest)

// ---- products of bfloat16, in kernels/bfloat16/: null in the sets that have none ----
// The expectation of bfloat16, and its gradient where rows are bfloat16 without loss. False, with
// outputs of any content, for causal rows that are not finite.
LSHKIT_BFLOAT16_KERNEL(index_t, expected_bfloat16_scratch, index_t n_queries, index_t n_features,
                       index_t n_values, bool gradient)  // bytes
LSHKIT_BFLOAT16_KERNEL(bool, expected_bfloat16_sum, const ExpectedBfloat16Sum& sum)
LSHKIT_BFLOAT16_KERNEL(bool, expected_bfloat16_gradient, const ExpectedGradient<float>& gradient)

// Codes of hyperplanes, those of hash_hyperplane. False, with codes of any content, where that one
// has to make them: for planes of norms far from 1, and blocks with such rows.
LSHKIT_TILE_KERNEL(bool, pack_planes, const HashTiles& planes)
LSHKIT_TILE_KERNEL(bool, hash_tiles, const HashTiles& rows)
// Codes of hadamard's rotations by one product, others than those of fast_hash_hadamard, of rows of
// bfloat16 (short_x) of a multiple of 32 features. False where a row is not finite. The scratch of
// pack_rotations is of pack_rotations_scratch().
LSHKIT_TILE_KERNEL(void, pack_rotations, const HashTiles& h)
LSHKIT_TILE_KERNEL(bool, fast_hash_tiles, const HashTiles& rows)

// See lower_bound_bfloat16.hpp: the rows, and the gradients that p wants of queries and keys, at
// most kPairedRows of either, pair by pair. Where that is by tiles, the caller holds them.
LSHKIT_TILE_KERNEL(void, hold_tiles, bool hold)
LSHKIT_BFLOAT16_KERNEL(void, bfloat16_rows, const LowerBoundGradient& p, const Bfloat16Rows& words)
LSHKIT_BFLOAT16_KERNEL(void, bfloat16_pairs, const LowerBoundGradient& p, const Bfloat16Rows& words,
                       const Bfloat16Side& queries, const Bfloat16Side& keys)
// gradient_t += a_t^T (scale * the sum of a_f b_f^T), f of `from` and t of `to`
LSHKIT_BFLOAT16_VECTOR_KERNEL(void, bfloat16_bucket, const Bfloat16Rows& words,
                              const Bfloat16Side& from, const Bfloat16Side& to, float scale,
                              Matrix<float> gradient)

#undef LSHKIT_KERNEL
#undef LSHKIT_TYPED_KERNEL
#undef LSHKIT_SHORT_KERNEL
#undef LSHKIT_BFLOAT16_KERNEL
#undef LSHKIT_TILE_KERNEL
#undef LSHKIT_BFLOAT16_VECTOR_KERNEL

// The kernels of this object's instruction set, collected.
#include "kernels.hpp"

#define LSHKIT_STRING_(x) #x
#define LSHKIT_STRING(x) LSHKIT_STRING_(x)

namespace lshkit {
namespace LSHKIT_ISA {

Kernels table() {
  return Kernels{LSHKIT_STRING(LSHKIT_ISA),
                 widen,
                 narrow,
                 hash_hadamard,
                 hash_hyperplane,
                 fast_hash_hadamard,
                 fast_values,
                 fast_column_sums,
                 fast_bucket_sum,
                 soft_hash_scratch,
                 soft_hash,
                 soft_hash_gradient_scratch,
                 soft_hash_gradient,
                 plane_gradient,
                 expand_probes,
                 reduce_probes,
                 dense_probes,
                 dense_probes_gradient,
                 dense_pack,
                 dense_pack_transposed,
                 dense_matmul,
                 dense_add,
                 dense_read,
                 dense_dots,
                 lower_bound_scratch,
                 lower_bound_gradient,
                 collided_scratch,
                 collided_gradient,
                 window_scratch,
                 window_sum,
                 window_gradient,
                 collisions_scratch,
                 collisions,
                 {bucket_sum, table_add, table_query, inverse_norms, normalize_l2, normalize_sum,
                  normalize_l2_backward, normalize_sum_backward, unit_norm_backward,
                  expected_scratch_f32, expected_sum, expected_gradient, weighted_bucket_sum,
                  weighted_column_sum, binned_hash, pair_products},
                 {bucket_sum, table_add, table_query, inverse_norms, normalize_l2, normalize_sum,
                  normalize_l2_backward, normalize_sum_backward, unit_norm_backward,
                  expected_scratch_f64, expected_sum, expected_gradient, weighted_bucket_sum,
                  weighted_column_sum, binned_hash, pair_products},
                 pack_listed,
                 packed_products,
                 largest_of,
                 exponential_sums,
                 decode_heads};
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

#pragma once
// Soft codes on the rows of one head, for the clients that go head by head.
#include "kernels/kernels.hpp"
#include "lshkit/soft_hash.hpp"

namespace lshkit {

// The functions of one head.
inline HashFunctions functions_of_head(HashFunctions functions, index_t head) {
  functions.parameters += head * functions.head_stride;
  functions.head_stride = 0;
  return functions;
}

// The hashes [first, first + group) of rows that begin at `soft`; probe arrays are contiguous.
ProbeRows probe_rows(SoftCodes soft, index_t rows, index_t n_hashes, index_t first, index_t group,
                     index_t n_probes, float sharpness, const std::uint8_t* valid);

// From the gradient of the margins (rows, n_hashes, n_selected) to that of x, through the unit
// norm: 0 where the inverse norm is 0, NaN where it is. functions: of this head. Uses
// thread_scratch.
void soft_hash_rows_backward(const HashFunctions& functions, Matrix<const float> x,
                             const float* inverse_norm, SoftCodes soft, int n_selected,
                             const float* margin_grads, Matrix<float> grad);

}  // namespace lshkit

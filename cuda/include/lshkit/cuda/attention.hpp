#pragma once
// lshkit/attention.hpp on a GPU: all pointers are of the device, the starts of packed sequences
// too. Work is queued on the stream, nothing is waited for and nothing is allocated: scratch is the
// caller's, of as many bytes as a call with null scratch returns. Throws what CUDA reports.
//
// Hashes and tables of 16 bits ask for less than is given here: all is computed in full.
#include "lshkit/attention.hpp"
#include "lshkit/bucket_sum.hpp"
#include "lshkit/cuda/queue.hpp"

namespace lshkit::cuda {

const char* architectures();  // that machine code was compiled for
// Null, or why no kernel can run on this device.
const char* refusal(int device);

// valid (batch, heads, rows), or null: whether a row is finite and not masked. Returns whether that
// was written: some kernels do not look.
bool hash(const Queue& queue, const HashFunctions& functions, Input<float> x, index_t batch,
          index_t heads, index_t rows, index_t n_features, void* codes,
          std::uint8_t* valid = nullptr, Mask mask = {});

template <class T>
void bucket_sum(const Queue& queue, const BucketSumShape& shape, Codes query_codes, Codes key_codes,
                Tensor<const T> values, Mask key_mask, Order order, T scale, Tensor<T> out);

index_t yoso_forward(const Queue& queue, const AttentionShape& shape,
                     const AttentionOptions& options, const HashFunctions& functions,
                     AttentionInputs<float> in, Output<float> out, void* query_codes,
                     void* key_codes, void* scratch, float* divisors = nullptr);
index_t yoso_backward(const Queue& queue, const AttentionShape& shape,
                      const AttentionOptions& options, int n_bits, index_t n_hashes,
                      AttentionInputs<float> in, Codes query_codes, Codes key_codes,
                      AttentionGradients<float> gradients, void* scratch);
index_t expected_forward(const Queue& queue, const AttentionShape& shape,
                         const AttentionOptions& options, int n_bits, AttentionInputs<float> in,
                         Output<float> out, void* scratch, float* divisors = nullptr);
index_t expected_backward(const Queue& queue, const AttentionShape& shape,
                          const AttentionOptions& options, int n_bits, AttentionInputs<float> in,
                          AttentionGradients<float> gradients, void* scratch);

}  // namespace lshkit::cuda

#pragma once
// Soft codes on a GPU: lshkit/soft_hash.hpp, weighted_bucket_sum.hpp and soft_attention.hpp, with
// pointers of the device; see attention.hpp beside this. A function returns the bytes of scratch it
// takes, and does nothing else where scratch is null.
#include "lshkit/cuda/queue.hpp"
#include "lshkit/soft_attention.hpp"
#include "lshkit/weighted_bucket_sum.hpp"

namespace lshkit::cuda {

// out is contiguous; a code that is not below n_buckets is in no bucket.
template <class T>
index_t weighted_bucket_sum(const Queue& queue, const BucketSumShape& shape, Probes<T> queries,
                            Probes<T> keys, Tensor<const T> values, Mask key_mask, Order order,
                            T scale, Tensor<T> out, void* scratch);
// gradients.values is contiguous.
template <class T>
index_t weighted_bucket_sum_backward(const Queue& queue, const BucketSumShape& shape,
                                     Probes<T> queries, Probes<T> keys, Tensor<const T> values,
                                     Mask key_mask, Order order, T scale,
                                     WeightedSumGradients<T> gradients, void* scratch);

// Soft codes, and every probe with its weight. heads: of x; functions.heads_per_set is 1.
index_t soft_hash(const Queue& queue, const HashFunctions& functions, Input<float> x, index_t batch,
                  index_t heads, index_t rows, index_t n_features, index_t n_probes,
                  const float* sharpness, index_t sharpness_stride, SoftCodesOut soft,
                  void* probe_codes, float* weights, void* scratch);
index_t soft_hash_backward(const Queue& queue, const HashFunctions& functions, Input<float> x,
                           index_t batch, index_t heads, index_t rows, index_t n_features,
                           index_t n_probes, const float* sharpness, index_t sharpness_stride,
                           SoftCodes soft, const float* weights, const float* weight_grads,
                           SoftHashGradients gradients, void* scratch);

index_t soft_attention_forward(const Queue& queue, const AttentionShape& shape,
                               const SoftOptions& options, const HashFunctions& functions,
                               AttentionInputs<float> in, Output<float> out, float* divisors,
                               SoftCodesOut queries, SoftCodesOut keys, void* scratch);
index_t soft_attention_backward(const Queue& queue, const AttentionShape& shape,
                                const SoftOptions& options, const HashFunctions& functions,
                                AttentionInputs<float> in, Input<float> out, const float* divisors,
                                SoftCodes queries, SoftCodes keys,
                                AttentionGradients<float> gradients, float* sharpness_grads,
                                float* parameter_grads, void* scratch);

}  // namespace lshkit::cuda

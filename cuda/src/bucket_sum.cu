// Hashing and the sum verb as the bindings call them.
#include "lshkit/cuda/attention.hpp"
#include "lshkit/cuda/bucket_sum.cuh"
#include "lshkit/cuda/byte_sum.cuh"
#include "lshkit/cuda/byte_sum_ordered.cuh"
#include "lshkit/cuda/hash.cuh"
#include "lshkit/cuda/runtime.cuh"

namespace lshkit::cuda {

bool hash(const Queue& queue, const HashFunctions& functions, Input<float> x, index_t batch,
          index_t heads, index_t rows, index_t n_features, void* codes, std::uint8_t* valid,
          Mask mask) {
  const DeviceGuard guard(queue);
  Hash h = hash_of(functions, x, batch, heads, rows, n_features);
  h.codes = codes;
  h.valid = valid;
  h.mask = mask.data;
  h.mask_stride = mask.batch_stride;
  hash(queue, functions.family, h, shared_limit(queue));
  return valid && finds_valid(functions.family, h);
}

template <class T>
void bucket_sum(const Queue& queue, BucketSum<T> a, index_t sequences, index_t shared_limit) {
  if constexpr (sizeof(T) == 4)
    if (a.order == Order::all ? byte_sum(queue, a, sequences, shared_limit)
                              : byte_sum_ordered(queue, a, sequences, shared_limit))
      return;
  a.plan = plan_bucket_sum<T>(a.n_hashes, a.n_buckets, a.columns(), a.order, shared_limit);
  const index_t blocks = sequences * a.query_heads * ceil_div(a.columns(), index_t(a.plan.columns));
  const auto run = [&](auto kernel) {
    launch(queue, "bucket_sum", kernel, blocks, kSumThreads, std::size_t(a.plan.shared_bytes), a);
  };
  if (a.plan.columns == 1) return run(bucket_sum_kernel<T, 1>);
  if (a.plan.columns == 2) return run(bucket_sum_kernel<T, 2>);
  if constexpr (most_columns(sizeof(T)) == 4) run(bucket_sum_kernel<T, 4>);
}
template void bucket_sum(const Queue&, BucketSum<float>, index_t, index_t);
template void bucket_sum(const Queue&, BucketSum<double>, index_t, index_t);

template <class T>
void bucket_sum(const Queue& queue, const BucketSumShape& shape, Codes query_codes, Codes key_codes,
                Tensor<const T> values, Mask key_mask, Order order, T scale, Tensor<T> out) {
  const DeviceGuard guard(queue);
  BucketSum<T> a;
  a.query = {shape.n_queries, shape.heads, 1, nullptr};
  a.key = {shape.n_keys, shape.heads, 1, nullptr};
  a.query_heads = shape.heads;
  a.query_codes = query_codes.data;
  a.key_codes = key_codes.data;
  a.code_bytes = query_codes.bytes;
  a.n_hashes = shape.n_hashes;
  a.n_buckets = shape.n_buckets;
  a.values = Elements(FloatTensor<T, const void>(values));
  a.n_values = shape.n_values;
  a.key_valid = key_mask.data;
  a.valid_batch = key_mask.batch_stride;
  a.order = order;
  a.scale = scale;
  a.out = out.data;
  bucket_sum(queue, a, shape.batch, shared_limit(queue));
}
template void bucket_sum(const Queue&, const BucketSumShape&, Codes, Codes, Tensor<const float>,
                         Mask, Order, float, Tensor<float>);
template void bucket_sum(const Queue&, const BucketSumShape&, Codes, Codes, Tensor<const double>,
                         Mask, Order, double, Tensor<double>);

}  // namespace lshkit::cuda

// The pairs verb as the bindings call it.
#include "lshkit/cuda/collisions.cuh"
#include "lshkit/cuda/collisions.hpp"
#include "lshkit/cuda/runtime.cuh"

namespace lshkit::cuda {
namespace {

Collisions collisions_of(const CollisionShape& shape, Codes query_codes, Codes key_codes,
                         const std::uint8_t* key_mask, Order order) {
  Collisions a;
  a.query_codes = query_codes.data;
  a.key_codes = key_codes.data;
  a.n_queries = shape.n_queries;
  a.n_keys = shape.n_keys;
  a.n_hashes = shape.n_hashes;
  a.key_mask = key_mask;
  a.causal = order == Order::causal;
  return a;
}

}  // namespace

void collision_indptr(const Queue& queue, const CollisionShape& shape, Codes query_codes,
                      Codes key_codes, const std::uint8_t* key_mask, Order order,
                      std::int64_t* indptr) {
  const DeviceGuard guard(queue);
  Collisions a = collisions_of(shape, query_codes, key_codes, key_mask, order);
  a.indptr = indptr;
  find_collisions<false>(queue, a, query_codes.bytes);
  sums_so_far(queue, indptr, shape.n_queries + 1);
}

void collisions(const Queue& queue, const CollisionShape& shape, Codes query_codes, Codes key_codes,
                const std::uint8_t* key_mask, Order order, const std::int64_t* indptr, index_t size,
                std::int32_t* indices, std::int32_t* counts) {
  const DeviceGuard guard(queue);
  Collisions a = collisions_of(shape, query_codes, key_codes, key_mask, order);
  a.indptr = const_cast<std::int64_t*>(indptr);
  a.size = size;
  a.indices = indices;
  a.counts = counts;
  find_collisions<true>(queue, a, query_codes.bytes);
}

}  // namespace lshkit::cuda

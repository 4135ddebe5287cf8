#pragma once
// lshkit/collisions.hpp on a GPU, by comparing the codes of all pairs: all pointers are of the
// device, work is queued on the stream, nothing is waited for.
#include "lshkit/collisions.hpp"
#include "lshkit/cuda/queue.hpp"

namespace lshkit::cuda {

void collision_indptr(const Queue& queue, const CollisionShape& shape, Codes query_codes,
                      Codes key_codes, const std::uint8_t* key_mask, Order order,
                      std::int64_t* indptr);
// size: of indices and counts. Of a row that is longer than indptr has it, the rest is left out.
void collisions(const Queue& queue, const CollisionShape& shape, Codes query_codes, Codes key_codes,
                const std::uint8_t* key_mask, Order order, const std::int64_t* indptr, index_t size,
                std::int32_t* indices, std::int32_t* counts);

}  // namespace lshkit::cuda

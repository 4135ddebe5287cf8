#pragma once
// The pairs verb: every pair of a query and a key that share a code in some hash, once, with the
// number of hashes in which they do.
#include "lshkit/tensor.hpp"

namespace lshkit {

struct CollisionShape {
  index_t n_queries = 0, n_keys = 0;  // below 2^31
  index_t n_hashes = 0;               // 1 to 65535
};

// The keys of one query, ascending, and in how many hashes each collides. A query may come in
// several calls, one after the other with higher keys; different queries come from several threads
// at once. Queries without a collision do not come. The arrays last for the call.
using CollisionVisitor = void (*)(void* context, index_t query, const std::int32_t* keys,
                                  const std::int32_t* counts, index_t n);

// key_mask: null, or bytes of which zero takes a key out. Order: all or causal. The cheaper of two
// ways: comparing the codes of all pairs, n_queries * n_keys * n_hashes bytes through the vector
// unit, or going through the buckets, where the work is that of the collisions. The latter keeps
// tables of at most 20 bytes a key and hash, and 9 bytes a key and thread; the former a block.
void for_each_collision(const CollisionShape& shape, Codes query_codes, Codes key_codes,
                        const std::uint8_t* key_mask, Order order, CollisionVisitor visit,
                        void* context, int threads);

// The same for a callable visit(query, keys, counts, n).
template <class Visit>
void for_each_collision(const CollisionShape& shape, Codes query_codes, Codes key_codes,
                        const std::uint8_t* key_mask, Order order, Visit& visit, int threads) {
  const CollisionVisitor call = [](void* context, index_t query, const std::int32_t* keys,
                                   const std::int32_t* counts, index_t n) {
    (*static_cast<Visit*>(context))(query, keys, counts, n);
  };
  for_each_collision(shape, query_codes, key_codes, key_mask, order, call, &visit, threads);
}

// In CSR form: indptr (n_queries + 1) first, then indices and counts (indptr[n_queries]), which the
// caller allocates in between. std::runtime_error where indptr does not fit the codes.
void collision_indptr(const CollisionShape& shape, Codes query_codes, Codes key_codes,
                      const std::uint8_t* key_mask, Order order, std::int64_t* indptr, int threads);
void collisions(const CollisionShape& shape, Codes query_codes, Codes key_codes,
                const std::uint8_t* key_mask, Order order, const std::int64_t* indptr,
                std::int32_t* indices, std::int32_t* counts, int threads);

}  // namespace lshkit

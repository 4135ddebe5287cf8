#include "lshkit/collisions.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "code_buckets.hpp"
#include "kernels/kernels.hpp"
#include "parallel.hpp"

namespace lshkit {
namespace {

struct Problem {
  const CollisionShape& shape;
  Codes queries, keys;
  const std::uint8_t* key_mask;
  bool causal;
  int threads;
};

struct Visitor {
  CollisionVisitor visit;
  void* context;
};

// ---- by comparison ----
void by_comparison(const Problem& p, Visitor v) {
  // A run packs all keys for itself, which pays from some hundred queries on. The ends of too many
  // rows of results would not stay in cache from one block of keys to the next.
  const index_t fair = p.shape.n_queries / (4 * thread_count(p.threads)) + 1;
  const index_t run = std::clamp<index_t>(fair, 256, 1024);
  parallel_for((p.shape.n_queries + run - 1) / run, p.threads, [&](index_t task) {
    const index_t first = task * run;
    CollisionPass pass;
    pass.codes = {
        static_cast<const char*>(p.queries.data) + first * p.shape.n_hashes * p.queries.bytes,
        p.keys.data,
        p.queries.bytes,
        p.shape.n_hashes,
        std::min(run, p.shape.n_queries - first),
        p.shape.n_keys,
        nullptr,
        p.key_mask,
        p.causal,
        first};
    pass.visit = v.visit;
    pass.context = v.context;
    pass.scratch = thread_scratch(kernels().collisions_scratch(pass.codes));
    kernels().collisions(pass);
  });
}

// ---- by buckets ----
struct RunScratch {
  index_t words;
  std::int32_t *count, *keys;  // of each key, and those of a query
  std::uint64_t* bits;         // of all keys; zeros between uses
  std::size_t bytes;

  RunScratch(Arena arena, index_t n_keys)
      : words((n_keys + 63) / 64),
        count(arena.take<std::int32_t>(n_keys)),
        keys(arena.take<std::int32_t>(n_keys)),
        bits(arena.take<std::uint64_t>(words)),
        bytes(arena.used()) {}

  // Sorts n distinct keys, in time words + n.
  void sort(index_t n) const {
    for (index_t t = 0; t < n; ++t) bits[keys[t] / 64] |= std::uint64_t(1) << (keys[t] % 64);
    std::int32_t* next = keys;
    for (index_t w = 0; w < words; ++w) {
      for (; bits[w]; bits[w] &= bits[w] - 1)
        *next++ = std::int32_t(w * 64 + __builtin_ctzll(bits[w]));
    }
  }
};

void by_buckets(const Problem& p, const CodeBuckets& buckets, Visitor v, bool ascending) {
  const index_t n_hashes = p.shape.n_hashes, n_keys = p.shape.n_keys;
  constexpr index_t kRun = 256;
  parallel_for((p.shape.n_queries + kRun - 1) / kRun, p.threads, [&](index_t task) {
    const RunScratch size(Arena(), n_keys);
    const RunScratch s(Arena(thread_scratch(size.bytes)), n_keys);
    std::int32_t *count = s.count, *keys = s.keys;
    std::memset(count, 0, sizeof(std::int32_t) * n_keys);
    std::memset(s.bits, 0, sizeof(std::uint64_t) * s.words);
    std::vector<std::int32_t> counts;
    const index_t end = std::min(p.shape.n_queries, (task + 1) * kRun);
    for (index_t i = task * kRun; i < end; ++i) {
      index_t n = 0;
      for (index_t h = 0; h < n_hashes; ++h) {
        const index_t at = h * (buckets.n_buckets + 1) + code_of(p.queries, i * n_hashes + h);
        const std::int32_t* bucket = &buckets.order[h * n_keys];
        for (index_t t = buckets.start[at]; t < buckets.start[at + 1]; ++t) {
          const std::int32_t j = bucket[t];
          if (p.causal && j > i) break;
          if (count[j]++ == 0) keys[n++] = j;
        }
      }
      if (n == 0) continue;
      if (ascending && n < s.words / 16)
        std::sort(keys, keys + n);
      else if (ascending)
        s.sort(n);
      counts.resize(n);
      for (index_t t = 0; t < n; ++t) {
        counts[t] = count[keys[t]];
        count[keys[t]] = 0;
      }
      v.visit(v.context, i, keys, counts.data(), n);
    }
  });
}

// ---- the cheaper way ----
// Measured, in the time that comparing 64 bytes of codes takes: a pair of a bucket, and the look-up
// of a bucket.
constexpr double kBucketPair = 16, kLookUp = 128;

void for_each(const Problem& p, Visitor v, bool ascending) {
  const index_t n_queries = p.shape.n_queries, n_keys = p.shape.n_keys;
  const index_t n_hashes = p.shape.n_hashes, n_buckets = p.queries.bytes == 1 ? 256 : 65536;
  const double rows = double(n_queries) * double(n_hashes), look_up = rows * kLookUp;
  const double compare = rows * double(n_keys) * p.queries.bytes / 64;
  // Small tables against the keys' codes, and a chance that it pays.
  if (n_buckets <= 4 * n_keys && look_up < compare &&
      look_up + kBucketPair * bucket_pairs(p.queries, n_queries, p.keys, n_keys, n_hashes,
                                           n_buckets, p.threads) <
          compare)
    by_buckets(p, CodeBuckets(p.keys, n_keys, n_hashes, p.key_mask, n_buckets, p.threads), v,
               ascending);
  else
    by_comparison(p, v);
}

}  // namespace

void for_each_collision(const CollisionShape& shape, Codes query_codes, Codes key_codes,
                        const std::uint8_t* key_mask, Order order, CollisionVisitor visit,
                        void* context, int threads) {
  if (shape.n_queries == 0 || shape.n_keys == 0) return;
  for_each({shape, query_codes, key_codes, key_mask, order == Order::causal, threads},
           {visit, context}, true);
}

void collision_indptr(const CollisionShape& shape, Codes query_codes, Codes key_codes,
                      const std::uint8_t* key_mask, Order order, std::int64_t* indptr,
                      int threads) {
  std::fill_n(indptr, shape.n_queries + 1, 0);
  if (shape.n_queries == 0 || shape.n_keys == 0) return;
  const CollisionVisitor add = [](void* context, index_t query, const std::int32_t*,
                                  const std::int32_t*, index_t n) {
    static_cast<std::int64_t*>(context)[query + 1] += n;
  };
  for_each({shape, query_codes, key_codes, key_mask, order == Order::causal, threads},
           {add, indptr}, false);
  for (index_t i = 0; i < shape.n_queries; ++i) indptr[i + 1] += indptr[i];
}

void collisions(const CollisionShape& shape, Codes query_codes, Codes key_codes,
                const std::uint8_t* key_mask, Order order, const std::int64_t* indptr,
                std::int32_t* indices, std::int32_t* counts, int threads) {
  std::vector<std::int64_t> next(indptr, indptr + shape.n_queries);
  std::atomic<bool> fits{true};
  auto write = [&](index_t query, const std::int32_t* keys, const std::int32_t* key_counts,
                   index_t n) {
    if (n > indptr[query + 1] - next[query]) {
      fits = false;
      return;
    }
    std::memcpy(indices + next[query], keys, sizeof(std::int32_t) * n);
    std::memcpy(counts + next[query], key_counts, sizeof(std::int32_t) * n);
    next[query] += n;
  };
  for_each_collision(shape, query_codes, key_codes, key_mask, order, write, threads);
  for (index_t i = 0; i < shape.n_queries && fits; ++i) fits = next[i] == indptr[i + 1];
  if (!fits) throw std::runtime_error("indptr does not belong to these codes: have they changed?");
}

}  // namespace lshkit

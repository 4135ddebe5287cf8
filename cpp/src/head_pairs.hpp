#pragma once
// The weighted sums of one head by pairs of probes that share a bucket, where there are few of
// them: what is needed for a batch of hashes.
#include <algorithm>

#include "kernels/kernels.hpp"
#include "kernels/weighted_pairs.hpp"
#include "parallel.hpp"
#include "weighted_bucket_sum.hpp"

namespace lshkit {

template <class T>
class HeadPairs {
 public:
  // By the level pairs (below), were codes uniform; by three quarters of them where what is visited
  // at random leaves an L1 cache of 32 KB, or tables may be of 16 bits, never causal ones. Those
  // that are found decide in the end: see fill. Not where values are on too many pages.
  static bool pay(const WeightedHead<T>& s) {
    const index_t probes = s.key.rows * s.key.n_probes;
    const index_t row_bytes = std::min(s.values.stride * index_t(sizeof(T)), kPage);
    const bool causal = s.order == Order::causal;
    const bool cheap = s.n_buckets <= 4096 && !short_tables(s);
    const index_t seen = causal ? probes / 2 : probes;  // in the mean, of as many queries
    return s.order != Order::reversed && s.query.rows > 0 && s.values.columns > 0 && probes > 0 &&
           probes <= kMostKeyProbes && s.query.rows * s.query.n_probes <= kMostQueryProbes &&
           most_of(s, kHashes) <= kMostPairs && s.key.rows * row_bytes <= kMostPages * kPage &&
           4 * seen * s.query.n_probes <= (cheap ? 4 : 3) * level_pairs(s, s.n_buckets);
  }

  HeadPairs(const WeightedHead<T>& s, bool gradients)
      : s_(s), query_rows_(s.query.rows), key_rows_(s.key.rows) {
    hashes_ = std::min<index_t>(kHashes, s.n_hashes);
    cut(Arena(), gradients);
    cut(Arena(thread_scratch(bytes_)), gradients);
    p_.n_buckets = s.n_buckets;
    p_.scale = s.scale;
    p_.causal = s.order == Order::causal;
  }

  // Finds the pairs of the hashes from this one on, and returns of how many queries: the others
  // have too many, in this batch or one before. Causal: of the first ones, whatever later keys are.
  // Otherwise of all or of none.
  index_t fill(index_t hash) {
    batch_ = {0, 0, hash, std::min(hashes_, s_.n_hashes - hash)};
    p_.n_hashes = int(batch_.group);
    p_.query.rows = query_rows_;
    p_.key.rows = key_rows_;
    s_.query.probes(run(query_rows_), 1, query_codes_, query_weights_);
    s_.key.probes(run(key_rows_), 1, key_codes_, key_weights_);
    key_weights_[batch_.group * key_rows_ * s_.key.n_probes] = 0;  // of no key
    // Causal: with room from the start on, and no more of a hash in the end than most_of.
    p_.most_of_query = p_.causal ? level_pairs(s_, 1) : 0;
    p_.most =
        p_.causal ? most_of(s_, 1) - p_.most_of_query * s_.query.rows : most_of(s_, batch_.group);
    query_rows_ = p_.query.rows = kernels().typed<T>().find_pairs(p_);
    // What gradients are laid out by, all rows, changes only where nobody goes on to gradients.
    if (query_rows_ < s_.query.rows) key_rows_ = std::min(key_rows_, query_rows_);
    return query_rows_;
  }
  index_t hashes() const { return batch_.group; }
  const WeightedPairs<T>& pairs() const { return p_; }

  // The gradients of the weights of the batch, zeros; null where they are not wanted.
  T* clear_query_grads() const { return clear(s_.query, query_grads_); }
  T* clear_key_grads() const { return clear(s_.key, key_grads_); }
  void take_grads() const {
    if (s_.query.take_grads)
      s_.query.take_grads(run(s_.query.rows), 1, query_weights_, query_grads_);
    if (s_.key.take_grads) s_.key.take_grads(run(s_.key.rows), 1, key_weights_, key_grads_);
  }

 private:
  static constexpr index_t kHashes = 8;             // of a batch
  static constexpr index_t kMostKeyProbes = 65535;  // they have numbers of 16 bits
  static constexpr index_t kMostQueryProbes = index_t(1) << 18;
  static constexpr index_t kMostPairs = index_t(1) << 22;  // all that a batch finds is kept
  static_assert(kMostQueryProbes <= index_t(1) << kHashBit);
  // Pages of values: with those of their gradients and of weights, as many as a core keeps the
  // addresses of. Beyond, the gradient by pairs takes twice as long as by tables (Zen 3).
  static constexpr index_t kPage = 4096, kMostPages = 512;

  static constexpr index_t kLeastPairs = 512;           // of a hash, whatever its level
  static bool short_tables(const WeightedHead<T>& s) {  // of 16 bits, where sums fit them
    return s.fast && kernels().fast_weighted_add && s.order != Order::causal;
  }
  // Of so many queries and a hash, so many that tables would take as long: 4 of a query with 4
  // probes and 64 columns of floats. Tables' rows are visited three times as often, to be added to
  // and to be read. They take less time for fewer columns, finding pairs does not: a level falls
  // with the number of slices, and where tables have masks with its square, but not below that of
  // `least`. Tables of 16 bits have an even number. From 5 slices on no more was gained.
  static index_t level_pairs(const WeightedHead<T>& s, index_t queries) {
    const bool shorts = short_tables(s);
    const index_t all = slice_count<T>(s.values.columns);
    const index_t slices = std::min<index_t>(shorts ? (all + 1) / 2 * 2 : all, 5);
    const index_t least = !kernels().masks_rows() ? 4 : shorts ? 3 : 2;
    const index_t work = slices * std::max(slices, least);
    constexpr index_t kUnit = 4 * 4 * 3;  // of 4 slices, and of three times as many probes
    return (s.query.n_probes + 2 * s.key.n_probes) * work * queries / kUnit;
  }
  // So many take longer than tables, but not longer than pairs in vain and tables.
  static index_t most_of(const WeightedHead<T>& s, index_t hashes) {
    return hashes * std::max(level_pairs(s, 2 * s.query.rows), kLeastPairs);
  }

  ProbeRun run(index_t rows) const { return {0, rows, batch_.hash, batch_.group}; }
  T* clear(const WeightedSide<T>& side, T* grads) const {
    if (!side.take_grads) return nullptr;
    std::fill_n(grads, batch_.group * side.rows * side.n_probes, T(0));
    return grads;
  }
  void cut(Arena arena, bool gradients) {
    const auto take = [&](const WeightedSide<T>& side, std::uint16_t*& codes, T*& weights,
                          T*& grads) {
      const index_t probes = hashes_ * side.rows * side.n_probes;
      codes = arena.take<std::uint16_t>(probes);
      weights = arena.take<T>(probes + 1);
      grads = arena.take<T>(side.take_grads ? probes : 0);
      return PairProbes<T>{side.rows, int(side.n_probes), codes, weights, side.valid};
    };
    p_.query = take(s_.query, query_codes_, query_weights_, query_grads_);
    p_.key = take(s_.key, key_codes_, key_weights_, key_grads_);
    const index_t keys = s_.key.rows * s_.key.n_probes;
    const index_t most = most_of(s_, hashes_), found = most + 2 * s_.query.n_probes + kPairsAhead;
    const index_t of_query = std::min(most, hashes_ * s_.query.n_probes * keys) + kPairsAhead;
    const auto list = [&](index_t pairs) {
      return PairList<T>{arena.take<std::uint16_t>(pairs), arena.take<T>(pairs),
                         gradients ? arena.take<std::uint32_t>(pairs) : nullptr};
    };
    p_.first = arena.take<std::uint16_t>(s_.n_buckets);
    p_.next = arena.take<std::uint16_t>(keys + 1);
    // An odd number of cache lines, so that those of a query are in different sets of the L1 cache.
    p_.begins_stride = (s_.query.rows / 32 + 1) * 32 + 16;
    p_.begins = arena.take<std::uint32_t>(hashes_ * p_.begins_stride);
    p_.found = list(found);
    p_.pairs = list(of_query);
    p_.dots = arena.take<T>(gradients ? of_query : 0);
    bytes_ = arena.used();
  }

  const WeightedHead<T>& s_;
  WeightedPairs<T> p_{};
  index_t hashes_, query_rows_, key_rows_;
  ProbeRun batch_{};
  std::uint16_t *query_codes_, *key_codes_;
  T *query_weights_, *key_weights_, *query_grads_, *key_grads_;
  std::size_t bytes_;
};

}  // namespace lshkit

#pragma once
// The keys of a few hashes in lists by bucket, and the queries that look for those in theirs: what
// a query finds in all hashes makes one list.
#include "kernels.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int kHashes = kPairGroup;
constexpr int kUsual = 8;               // keys of a bucket that are moved without a branch
constexpr int kQueries = kPairQueries;  // found before their rows are read: loops know their ends

typedef std::uint16_t Eight __attribute__((vector_size(16)));
static_assert(kUsual == 8 && kHashes == 8);
LSHKIT_INLINE Eight load_eight(const std::uint16_t* from) {
  Eight x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}
LSHKIT_INLINE void store_eight(std::uint16_t* to, Eight x) { std::memcpy(to, &x, sizeof(x)); }

// Nobody reads the keys behind the last query.
LSHKIT_INLINE index_t keys_seen(const PairSearch& p) {
  return p.order == Order::causal ? smaller(p.n_keys, p.n_queries) : p.n_keys;
}

// Keys linked by bucket, of Hashes hashes or of p.group (0): for buckets that are empty or have one
// or two keys as a rule. n_keys stands for none. Pointers are kept in registers: what is written
// could be p's members.
template <class Code, int Hashes>
struct LinkedKeys {
  int hashes;
  index_t n_keys, code_stride;
  const Code* codes;
  const std::uint8_t* mask;
  std::uint16_t* __restrict first, * __restrict next;  // (n_buckets, kHashes), (n_keys + 1,
                                                       // kHashes)

  LSHKIT_INLINE explicit LinkedKeys(const PairSearch& p)
      : hashes(Hashes ? Hashes : p.group),
        n_keys(p.n_keys),
        code_stride(p.code_stride),
        codes(static_cast<const Code*>(p.key_codes)),
        mask(p.key_mask),
        first(p.buckets),
        next(p.keys) {
    const Eight none = Eight{} + std::uint16_t(n_keys);
    for (index_t c = 0; c < p.table_rows; ++c) store_eight(first + c * kHashes, none);
    store_eight(next + n_keys * kHashes, none);
  }
  // At the front of its buckets.
  LSHKIT_INLINE void add(index_t key) const {
    if (mask && !mask[key]) return;
    const Code* code = codes + key * code_stride;
    LSHKIT_UNROLL
    for (int h = 0; h < hashes; ++h) {
      std::uint16_t& bucket = first[code[h] * kHashes + h];
      next[key * kHashes + h] = bucket;
      bucket = std::uint16_t(key);
    }
  }
  // Writes those in the buckets of these codes to found[count] and on, and returns the new count;
  // it stops where that is beyond `most`. Some elements more are written.
  LSHKIT_INLINE index_t find(const Code* code, std::uint16_t* __restrict found, index_t count,
                             index_t most) const {
    const unsigned none = unsigned(n_keys);
    LSHKIT_UNROLL
    for (int h = 0; h < hashes; ++h) {
      // A branch would be taken at random.
      const auto after = [&](unsigned key)
                             LSHKIT_ALWAYS_INLINE { return next[index_t(key) * kHashes + h]; };
      const unsigned key = first[code[h] * kHashes + h], second = after(key);
      found[count] = std::uint16_t(key);
      found[count + 1] = std::uint16_t(second);
      count += index_t(key < none) + index_t(second < none);  // none is larger than all
      unsigned more = after(second);
      if (__builtin_expect(more == none, 1)) continue;
      do {
        found[count++] = std::uint16_t(more);
        more = after(more);
      } while (more != none && count <= most);
    }
    return count;
  }
};

// The same for buckets with more: keys sorted by bucket, by counting.
template <class Code, int Hashes>
struct SortedKeys {
  int hashes;
  index_t stride, code_stride;  // of `keys`, a hash; of `codes`, a row
  const Code* codes;
  const std::uint8_t* mask;
  // Of bucket c and hash h: keys[h * stride + begins[c * kHashes + h]] to the one before that of
  // `ends`, which grows with each key.
  std::uint16_t* __restrict keys, * __restrict ends;
  const std::uint16_t* begins;

  LSHKIT_INLINE explicit SortedKeys(const PairSearch& p)
      : hashes(Hashes ? Hashes : p.group),
        stride(p.n_keys),
        code_stride(p.code_stride),
        codes(static_cast<const Code*>(p.key_codes)),
        mask(p.key_mask),
        keys(p.keys),
        ends(p.buckets + kHashes) {
    const index_t n_keys = keys_seen(p), size = (p.table_rows + 1) * kHashes;
    std::memset(ends - kHashes, 0, sizeof(std::uint16_t) * (kHashes + size));
    // ends[c + 1]: how many keys bucket c has, then where those before bucket c + 1 end.
    for (index_t j = 0; j < n_keys; ++j) {
      if (mask && !mask[j]) continue;
      const Code* code = codes + j * code_stride;
      LSHKIT_UNROLL
      for (int h = 0; h < hashes; ++h) ++ends[(code[h] + 1) * kHashes + h];
    }
    Eight before = {};
    for (index_t at = 0; at < size; at += kHashes)
      store_eight(ends + at, before += load_eight(ends + at));
    // When all are added, a bucket begins where the one before ends.
    begins = ends - kHashes;
    if (p.order != Order::all) {
      std::memcpy(ends + size, ends, sizeof(std::uint16_t) * size);
      begins = ends + size;
    }
  }
  LSHKIT_INLINE void add(index_t key) const {
    if (mask && !mask[key]) return;
    const Code* code = codes + key * code_stride;
    LSHKIT_UNROLL
    for (int h = 0; h < hashes; ++h)
      keys[h * stride + ends[code[h] * kHashes + h]++] = std::uint16_t(key);
  }
  LSHKIT_INLINE index_t find(const Code* code, std::uint16_t* __restrict found, index_t count,
                             index_t most) const {
    LSHKIT_UNROLL
    for (int h = 0; h < hashes; ++h) {
      const index_t bucket = code[h] * kHashes + h, begin = begins[bucket];
      const index_t n = ends[bucket] - begin;
      const std::uint16_t* from = keys + h * stride + begin;
      store_eight(found + count, load_eight(from));
      if (__builtin_expect(n > kUsual, 0)) {
        if (count + n > most) return count + n;
        for (index_t k = kUsual; k < n; k += kUsual)
          store_eight(found + count + k, load_eight(from + k));
      }
      count += n;
    }
    return count;
  }
};

// use(query, found, count) for the queries in their order. Of how many, before one that has too
// many pairs; not causal: of all or, with some of them used, none.
template <class Code, class Keys, class Use>
LSHKIT_INLINE index_t each_query(const PairSearch& p, const Keys& keys, const Use& use) {
  const bool all = p.order == Order::all, reversed = p.order == Order::reversed;
  const index_t n_queries = p.n_queries, code_stride = p.code_stride, n_keys = keys_seen(p);
  for (index_t j = n_keys - 1; j >= (all ? 0 : reversed ? n_queries : n_keys); --j) keys.add(j);
  const Code* codes = static_cast<const Code*>(p.query_codes);
  std::uint16_t* const found = p.found;
  const index_t most_of_query = p.most_of_query;
  index_t most = p.most;
  for (index_t first = 0; first < n_queries; first += kQueries) {
    const auto query = [&](index_t q) LSHKIT_ALWAYS_INLINE {
      return reversed ? n_queries - 1 - first - q : first + q;
    };
    const index_t some = smaller(kQueries, n_queries - first);
    index_t ends[kQueries], count = 0, done = 0;
    for (; done < some && count <= most; ++done) {
      const index_t i = query(done);
      if (!all && i < n_keys) keys.add(i);
      most += most_of_query;
      ends[done] = count = keys.find(codes + i * code_stride, found, count, most);
    }
    const bool too_many = count > most;
    if (too_many && p.order != Order::causal) return 0;
    most -= count;
    done -= too_many;
    for (index_t q = 0, k = 0; q < done; k = ends[q++]) use(query(q), found + k, ends[q] - k);
    if (too_many) return first + done;
  }
  return n_queries;
}

template <class Code, int Hashes, class Use>
index_t search_hashes(const PairSearch& p, const Use& use) {
  return p.linked ? each_query<Code>(p, LinkedKeys<Code, Hashes>(p), use)
                  : each_query<Code>(p, SortedKeys<Code, Hashes>(p), use);
}
template <class Code, class Use>
index_t search_codes(const PairSearch& p, const Use& use) {
  return p.group == kHashes ? search_hashes<Code, kHashes>(p, use) : search_hashes<Code, 0>(p, use);
}
template <class Use>
index_t search_pairs(const PairSearch& p, const Use& use) {
  return p.code_bytes == 1 ? search_codes<std::uint8_t>(p, use)
                           : search_codes<std::uint16_t>(p, use);
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

// The sums of one head by pairs of a query and a key in one bucket, where these are few.
#include <algorithm>

#include "bucket_sum.hpp"
#include "parallel.hpp"

namespace lshkit {
namespace {

template <class T>
struct PairMemory {
  std::size_t bytes;

  PairMemory(Arena arena, PairSumPass<T>& pass) {
    pass.buckets = arena.take<std::uint16_t>((2 * pass.table_rows + 3) * kPairGroup);
    pass.keys = arena.take<std::uint16_t>((pass.n_keys + 1) * kPairGroup);
    pass.found = arena.take<std::uint16_t>(pass.found_pairs() + 8 * kPairGroup);
    bytes = arena.used();
  }
};

}  // namespace

// By its sizes, if codes were uniform.
template <class T>
bool pairs_pay(const HeadSum<T>& s) {
  constexpr index_t kMostKeys = 65535;  // they have numbers of 16 bits
  // Tables take less time for fewer columns, finding pairs does not.
  const index_t slices = std::min<index_t>(slice_count<T>(s.values.columns), 4);
  return s.n_queries > 0 && s.n_keys > 0 && s.n_keys <= kMostKeys &&
         4 * s.n_keys <= slices * s.n_buckets && s.n_buckets <= 16 * slices * s.n_keys;
}

template <class T>
index_t sum_by_pairs(const HeadSum<T>& s, index_t first, index_t last) {
  constexpr index_t columns = kSliceBytes / sizeof(T);
  if (first == last || !pairs_pay(s)) return 0;
  PairSumPass<T> pass;
  pass.n_queries = s.n_queries;
  pass.n_keys = s.n_keys;
  pass.table_rows = s.n_buckets;
  pass.code_stride = s.n_hashes;
  pass.code_bytes = s.code_bytes;
  pass.key_mask = s.key_mask;
  pass.order = s.order;
  const index_t width = std::min(last * columns, s.values.columns) - first * columns;
  pass.values = {s.values.data + first * columns, s.values.stride, s.n_keys, width};
  pass.scale = s.scale;
  pass.out = {s.out.data + first * columns, s.out.stride, s.n_queries, width};
  pass.linked = 2 * s.n_keys <= s.n_buckets;
  // So many pairs of a query and hash in the mean take no longer than tables, and some more to
  // start with. Causal pairs are few at first, and tables may have to do the rest.
  const auto limit = [&](index_t group) {
    pass.group = int(group);
    pass.most_of_query = (s.order == Order::causal ? 1 : 2) * group;
    pass.most = pass.most_of_query * s.n_keys / 8;
  };
  limit(std::min<index_t>(kPairGroup, s.n_hashes));
  const std::size_t bytes = PairMemory<T>(Arena(), pass).bytes;
  PairMemory<T>(Arena(thread_scratch(bytes)), pass);
  for (index_t hash = 0; hash < s.n_hashes && pass.n_queries > 0; hash += kPairGroup) {
    pass.query_codes = static_cast<const char*>(s.query_codes) + hash * s.code_bytes;
    pass.key_codes = static_cast<const char*>(s.key_codes) + hash * s.code_bytes;
    limit(std::min<index_t>(kPairGroup, s.n_hashes - hash));
    pass.accumulate = hash > 0;
    pass.n_queries = kernels().typed<T>().pair_sum(pass);
  }
  return pass.n_queries;
}

template bool pairs_pay(const HeadSum<float>&);
template bool pairs_pay(const HeadSum<double>&);
template index_t sum_by_pairs(const HeadSum<float>&, index_t, index_t);
template index_t sum_by_pairs(const HeadSum<double>&, index_t, index_t);

}  // namespace lshkit

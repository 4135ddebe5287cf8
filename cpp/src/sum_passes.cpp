#include "sum_passes.hpp"

#include <algorithm>
#include <cstring>

#include "lshkit/runtime.hpp"

namespace lshkit {

SumCut::SumCut(const SumRows& s, index_t row_bytes) {
  compact = BucketSlots::pay(s.n_keys, s.n_buckets);
  table_rows = compact ? s.n_keys + 1 : s.n_buckets;
  // Half of the L2 cache for tables, the other half for the rows that stream through it; but tables
  // of eight hashes wherever kEightTables allows. Alone, a hash would have the rows of all keys and
  // queries pass for a single table.
  const CacheSizes& cache = cache_sizes();
  const index_t l2 = cache.l2 / 2, slice = table_rows * kSliceBytes;
  const index_t most = std::min<index_t>(kMaxGroup, s.n_hashes);
  at_once = 2;
  group = std::clamp<index_t>(l2 / (2 * slice), 1, most);
  if (8 * 2 * slice <= std::min(kEightTables, 2 * cache.l2))
    group = std::max(group, std::min<index_t>(8, most));
  if (group == 1 && most > 1) {
    at_once = 2 * slice <= l2 ? 1 : 2;
    group = at_once == 1 || 4 * slice <= cache.l3 / 4 ? 2 : 1;
  }
  const index_t rows = std::max(s.n_queries, s.n_keys);
  packed = s.n_hashes / group >= kPackedPasses && rows * row_bytes >= std::min(l2, kMostUnpacked);
}

namespace {

// Codes of the hashes of a group lie side by side, (groups, rows, group): at a stride of all hashes
// each would take a cache line of its own from the L2 cache.
template <int Group, class Code>
void arrange_groups(const Code* codes, index_t rows, index_t n_hashes, index_t group, Code* to) {
  constexpr index_t kRows = 64;  // whose codes stay in the L1 cache
  for (index_t first = 0; first < rows; first += kRows) {
    const index_t last = std::min(first + kRows, rows);
    for (index_t hash = 0; hash < n_hashes; hash += group) {
      const index_t width = Group ? Group : std::min(group, n_hashes - hash);
      Code* out = to + hash * rows + first * width;
      for (index_t i = first; i < last; ++i, out += width)
        std::memcpy(out, codes + i * n_hashes + hash, sizeof(Code) * width);
    }
  }
}
template <class Code>
void arrange_groups(const void* codes, index_t rows, index_t n_hashes, index_t group, void* to) {
  const auto run = n_hashes % group ? arrange_groups<0, Code>
                   : group == 2     ? arrange_groups<2, Code>
                   : group == 4     ? arrange_groups<4, Code>
                                    : arrange_groups<0, Code>;
  run(static_cast<const Code*>(codes), rows, n_hashes, group, static_cast<Code*>(to));
}

}  // namespace

PassCodes::PassCodes(Arena& arena, const SumRows& rows, const SumCut& cut)
    : s_(rows),
      group_(cut.group),
      compact_(cut.compact),
      // Half a cache line of codes a row does not need it.
      arranged_(compact_ || (group_ < s_.n_hashes && group_ * s_.code_bytes < 16)),
      bytes_(compact_ ? 2 : s_.code_bytes),
      query_(s_.query_codes),
      key_(s_.key_codes),
      most_rows_(cut.table_rows) {
  table_rows_ = arena.take<index_t>((s_.n_hashes + group_ - 1) / group_);
  if (arranged_) {
    to_query_ = arena.take<char>(s_.n_queries * s_.n_hashes * bytes_);
    to_key_ = arena.take<char>(s_.n_keys * s_.n_hashes * bytes_);
  }
  if (compact_) slots_ = BucketSlots(arena, s_.n_keys, s_.n_buckets);
}

void PassCodes::arrange() {
  std::fill_n(table_rows_, (s_.n_hashes + group_ - 1) / group_, most_rows_);
  if (!arranged_) return;
  query_ = to_query_;
  key_ = to_key_;
  if (compact_) {
    s_.code_bytes == 1 ? assign_slots<std::uint8_t>() : assign_slots<std::uint16_t>();
    return;
  }
  const auto run = bytes_ == 1 ? arrange_groups<std::uint8_t> : arrange_groups<std::uint16_t>;
  run(s_.query_codes, s_.n_queries, s_.n_hashes, group_, to_query_);
  run(s_.key_codes, s_.n_keys, s_.n_hashes, group_, to_key_);
}

template <class Code>
void PassCodes::assign_slots() {
  slots_.start(s_.n_buckets);
  auto* to_query = static_cast<std::uint16_t*>(to_query_);
  auto* to_key = static_cast<std::uint16_t*>(to_key_);
  for (index_t hash = 0; hash < s_.n_hashes; hash += group_) {
    const index_t width = std::min(group_, s_.n_hashes - hash);
    index_t most = 0;
    for (index_t h = 0; h < width; ++h) {
      const Code* keys = static_cast<const Code*>(s_.key_codes) + hash + h;
      const Code* queries = static_cast<const Code*>(s_.query_codes) + hash + h;
      for (index_t j = 0; j < s_.n_keys; ++j)
        to_key[hash * s_.n_keys + j * width + h] = slots_.add(keys[j * s_.n_hashes]);
      for (index_t i = 0; i < s_.n_queries; ++i)
        to_query[hash * s_.n_queries + i * width + h] = slots_.of(queries[i * s_.n_hashes]);
      most = std::max(most, slots_.table_rows());
      slots_.clear();
    }
    table_rows_[hash / group_] = most;
  }
}

void PassCodes::select(index_t hash, SumPass& pass) const {
  pass.n_queries = s_.n_queries;
  pass.n_keys = s_.n_keys;
  pass.key_mask = s_.key_mask;
  pass.order = s_.order;
  pass.first_query = s_.first_query;
  pass.group = int(std::min(group_, s_.n_hashes - hash));
  const auto at = [&](const void* codes, index_t rows) {
    return static_cast<const char*>(codes) + hash * (arranged_ ? rows : 1) * bytes_;
  };
  pass.query_codes = at(query_, s_.n_queries);
  pass.key_codes = at(key_, s_.n_keys);
  pass.code_stride = arranged_ ? pass.group : s_.n_hashes;
  pass.code_bytes = bytes_;
  pass.table_rows = table_rows_[hash / group_];
  pass.accumulate = hash > 0;
}

}  // namespace lshkit

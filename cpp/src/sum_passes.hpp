#pragma once
// How the sums of one head are cut into passes that fit the caches, and the codes of a pass.
#include "bucket_slots.hpp"
#include "bucket_sum.hpp"

namespace lshkit {

// From the sizes alone: results do not depend on who computes which slices.
struct SumCut {
  bool compact;        // slots in the place of codes
  index_t table_rows;  // at most
  index_t group;       // hashes whose tables are in use together
  int at_once;  // slices of a pass, one or two: two read the codes and the loop once for both
  bool packed;  // slices of the values and of the output are copied into contiguous arrays

  // row_bytes: of the values.
  SumCut(const SumRows& s, index_t row_bytes);

 private:
  // Bytes of values from which copies are made where half of the L2 cache is more.
  static constexpr index_t kMostUnpacked = index_t(512) << 10;
  // Of eight hashes, in bytes, in use together also where they take up to twice the L2 cache: a
  // row's columns and codes are loaded once for them. With 512 KB that takes 0.8 of the time of
  // four hashes (9 bits) or two (10 bits).
  static constexpr index_t kEightTables = index_t(1) << 20;
};

// The codes of a head as its passes read them: those of the hashes of a pass side by side, or slots
// in their place.
class PassCodes {
 public:
  PassCodes(Arena& arena, const SumRows& rows, const SumCut& cut);

  void arrange();
  // The rows, group and codes of the pass over the tables of this hash and those that follow it.
  void select(index_t hash, SumPass& pass) const;

 private:
  template <class Code>
  void assign_slots();

  const SumRows& s_;
  index_t group_;
  bool compact_, arranged_;  // arranged: else as they were given
  int bytes_;
  const void *query_, *key_;  // of the first hash
  void *to_query_ = nullptr, *to_key_ = nullptr;
  index_t most_rows_, *table_rows_;  // of the table of each group
  BucketSlots slots_;
};

}  // namespace lshkit

#pragma once
// Where most buckets must be empty, codes are replaced by slots in order of appearance among the
// keys, so that a table has a row for each distinct key code and not for each bucket. Slot 0 is for
// codes that no key has: always zero.
#include <cstring>

#include "parallel.hpp"

namespace lshkit {

class BucketSlots {
 public:
  // For tables to which `most` codes are added at most.
  static bool pay(index_t most, index_t n_buckets) { return most < n_buckets / 2; }

  BucketSlots() = default;
  BucketSlots(Arena& arena, index_t most, index_t n_buckets)
      : slot_of_(arena.take<std::uint16_t>(n_buckets)), code_of_(arena.take<std::uint16_t>(most)) {}

  void start(index_t n_buckets) {  // before anything else
    std::memset(slot_of_, 0, sizeof(*slot_of_) * n_buckets);
    used_ = 0;
  }
  std::uint16_t add(std::uint16_t code) {
    std::uint16_t& slot = slot_of_[code];
    if (slot == 0) {
      code_of_[used_++] = code;
      slot = std::uint16_t(used_);
    }
    return slot;
  }
  std::uint16_t of(std::uint16_t code) const { return slot_of_[code]; }
  index_t table_rows() const { return used_ + 1; }
  void clear() {
    for (index_t k = 0; k < used_; ++k) slot_of_[code_of_[k]] = 0;
    used_ = 0;
  }

 private:
  std::uint16_t *slot_of_ = nullptr, *code_of_ = nullptr;
  index_t used_ = 0;
};

}  // namespace lshkit

#pragma once
#include <memory>

#include "lshkit/hash.hpp"

namespace lshkit {

// Hash functions as the matrices that tiles multiply rows with, for each head's set or for all
// heads; none where tiles are not there or do not pay.
class PackedPlanes {
 public:
  // rows_of_all: that are hashed with them, of all heads, and are `element`.
  PackedPlanes(const HashFunctions& functions, index_t heads, index_t rows_of_all,
               index_t n_features, Element element, Precision precision, int threads);
  explicit operator bool() const { return memory_ != nullptr; }
  float* of_set(index_t set) const { return memory_[set * lines_].numbers; }

 private:
  struct alignas(64) Line {
    float numbers[16];
  };
  std::unique_ptr<Line[]> memory_;
  index_t lines_ = 0;  // of a set
};

// As that of hash.hpp, with planes of these functions and this precision.
bool hash(const HashFunctions& functions, const PackedPlanes& planes, Input<float> x, index_t batch,
          index_t heads, index_t rows, index_t n_features, void* codes, int threads,
          Precision precision);

}  // namespace lshkit

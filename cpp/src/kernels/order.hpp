#pragma once
// The order in which the sum verb adds rows to tables and reads rows from them.
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// One loop for all orders: add and read are large, and are compiled once.
template <class Add, class Read>
LSHKIT_INLINE void in_order(Order order, index_t added, index_t readers, Add add, Read read) {
  index_t steps = larger(added, readers), adds = 0, reads = 0, direction = 1;
  if (order == Order::all) {
    steps = added + readers;
    reads = -added;
  } else if (order == Order::reversed) {
    adds = reads = steps - 1;
    direction = -1;
  }
  for (; steps > 0; --steps, adds += direction, reads += direction) {
    if (adds < added) add(adds);
    if (reads >= 0 && reads < readers) read(reads);
  }
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

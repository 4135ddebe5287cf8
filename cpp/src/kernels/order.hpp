#pragma once
// The order in which the sum verb adds rows to tables and reads rows from them.
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// Causal or reversed: one loop for both, as add and read are large.
template <class Add, class Read>
LSHKIT_INLINE void take_turns(Order order, index_t added, index_t readers, Add add, Read read,
                              index_t first_reader = 0) {
  const index_t steps = larger(added, readers);
  for (index_t step = 0; step < steps; ++step) {
    const index_t i = order == Order::causal ? step : steps - 1 - step;
    if (i < added) add(i);
    if (i >= first_reader && i < readers) read(i);
  }
}

template <class Add, class Read>
LSHKIT_INLINE void in_order(Order order, index_t added, index_t readers, Add add, Read read,
                            index_t first_reader = 0) {
  if (order != Order::all) return take_turns(order, added, readers, add, read, first_reader);
  for (index_t j = 0; j < added; ++j) add(j);
  for (index_t i = first_reader; i < readers; ++i) read(i);
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

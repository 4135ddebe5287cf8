#pragma once
// The sums of cpp/include/lshkit/leave_one_out.hpp for a run of queries in one thread.
#include "lshkit/leave_one_out.hpp"

namespace lshkit {

constexpr index_t kLeftOutQueries = 64;  // of a run, at most

template <class T>
struct LeaveOneOutPass {
  LeaveOneOutProblem<T> problem;  // shape.n_queries of them, from the run's first on
  void* scratch;                  // 64-byte aligned
};

}  // namespace lshkit

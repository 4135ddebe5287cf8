// For test_threads: a library that runs tasks on threads.
#include <atomic>

#include "parallel.hpp"

extern "C" __attribute__((visibility("default"))) int count_tasks(int count) {
  std::atomic<int> runs{0};
  lshkit::parallel_for(count, 3, [&](lshkit::index_t) { ++runs; });
  return runs;
}

// The threads of the core, by OpenMP.
#include <omp.h>
#ifndef _WIN32
#include <pthread.h>
#endif

#include "lshkit/runtime.hpp"
#include "lshkit/threads.hpp"
#include "parallel.hpp"

namespace lshkit {
namespace {

// Whoever ran OpenMP in the parent, torch too, has left its threads behind, and GNU OpenMP would
// wait for them. Children that did not inherit any cannot be told apart, so every child computes on
// one thread.
bool in_forked_child = false;

#ifndef _WIN32
struct ForkHandler {
  ForkHandler() {
    pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });
  }
} fork_handler;
#endif

}  // namespace

const char* thread_backend() { return "openmp"; }

int max_threads() { return in_forked_child ? 1 : omp_get_max_threads(); }

int set_max_threads(int threads) {
  const int before = max_threads();
  if (!in_forked_child && threads >= 1) omp_set_num_threads(threads);
  return before;
}

int thread_count(int requested) {
  return requested > 0 && !in_forked_child ? requested : max_threads();
}

void run_tasks(Tasks& tasks, int threads) {
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic, 1) nowait
    for (index_t i = 0; i < tasks.count; ++i) tasks.run(i);
    release_large_scratch();
  }
}

}  // namespace lshkit

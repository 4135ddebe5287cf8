#pragma once
// Threads and scratch of the core. Work is cut into tasks whose results do not depend on which
// thread runs them, so every result has the same bits at any thread count.
#include <atomic>
#include <cstddef>
#include <exception>

#include "lshkit/tensor.hpp"

namespace lshkit {

// The number of threads to use for a request (<= 0: OpenMP's default). One in a forked child: GNU
// OpenMP would wait for threads that fork left behind, of this library or another.
int thread_count(int requested);

// This thread's buffer of at least `bytes`, 64-byte aligned, contents undefined. A later call of
// the same use on the same thread invalidates it. Up to 4 MB of each are kept between calls: fresh
// pages cost more than the work on short inputs.
enum class Scratch : int {
  pass = 0,  // of one verb's run on one head
  head = 1,  // what a client keeps while it runs verbs on a head
  rows = 2   // of a head, converted or not yet added up
};
void* thread_scratch(std::size_t bytes, Scratch use = Scratch::pass);
void release_large_scratch();  // of this thread

// Runs task(0) ... task(count - 1) on up to `threads` threads.
// The first exception ends the remaining tasks and is thrown to the caller.
template <class Task>
void parallel_for(index_t count, int threads, const Task& task) {
  threads = thread_count(threads);
  if (threads > count) threads = int(count);
#ifdef _OPENMP
  if (threads > 1) {
    std::exception_ptr error;
    std::atomic<bool> failed{false};
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, 1) nowait
      for (index_t i = 0; i < count; ++i) {
        if (failed) continue;
        try {
          task(i);
        } catch (...) {
          if (!failed.exchange(true)) error = std::current_exception();
        }
      }
      release_large_scratch();
    }
    if (error) std::rethrow_exception(error);
    return;
  }
#endif
  for (index_t i = 0; i < count; ++i) task(i);
  release_large_scratch();
}

// Cuts thread scratch into aligned pieces. Sized by a first pass with no memory behind it.
class Arena {
 public:
  explicit Arena(void* memory = nullptr) : begin_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(index_t count) {
    T* p = begin_ ? reinterpret_cast<T*>(begin_ + used_) : nullptr;
    used_ += (std::size_t(count) * sizeof(T) + 63) / 64 * 64;
    return p;
  }
  std::size_t used() const { return used_; }

 private:
  char* begin_;
  std::size_t used_ = 0;
};

}  // namespace lshkit

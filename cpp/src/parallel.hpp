#pragma once
// Threads and scratch of the core. Work is cut into tasks whose results do not depend on which
// thread runs them, so every result has the same bits at any thread count.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>

#include "lshkit/tensor.hpp"

namespace lshkit {

// The number of threads to use for a request (<= 0: max_threads()).
int thread_count(int requested);

// This thread's buffer of at least `bytes`, 64-byte aligned, contents undefined. A later call of
// the same use on the same thread invalidates it. Up to 4 MB of each are kept between calls: fresh
// pages cost more than the work on short inputs.
enum class Scratch : int {
  pass = 0,  // of one verb's run on one head
  head = 1,  // what a client keeps while it runs verbs on a head
  rows = 2,  // of a head, converted or not yet added up
  fast = 3   // those rows as 16-bit integers
};
void* thread_scratch(std::size_t bytes, Scratch use = Scratch::pass);
void release_large_scratch();  // of this thread

// What the threads of one parallel_for share. The first exception ends the remaining tasks.
struct Tasks {
  const index_t count;
  const void* const task;
  void (*const call)(const void* task, index_t i);
  std::atomic<bool> failed{false};
  std::exception_ptr error{};

  void run(index_t i) {
    if (failed) return;
    try {
      call(task, i);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  }
};

// Of the thread backend (threads/): runs all tasks on up to `threads` threads, this one among them,
// and returns when they are done. Within a task: on this thread.
void run_tasks(Tasks& tasks, int threads);

// Runs task(0) ... task(count - 1) on up to `threads` threads.
// The first exception ends the remaining tasks and is thrown to the caller.
template <class Task>
void parallel_for(index_t count, int threads, const Task& task) {
  threads = thread_count(threads);
  if (threads > count) threads = int(count);
  if (threads > 1) {
    Tasks tasks{count, &task, [](const void* f, index_t i) { (*static_cast<const Task*>(f))(i); }};
    run_tasks(tasks, threads);
    if (tasks.error) std::rethrow_exception(tasks.error);
    return;
  }
  for (index_t i = 0; i < count; ++i) task(i);
  release_large_scratch();
}

// The slices of a head's columns as tasks of their own: no more than keep the threads busy, as each
// reads the codes of the head.
struct HeadParts {
  index_t slices, count;  // tasks a head

  HeadParts(index_t heads, index_t n_slices, int threads) : slices(n_slices), count(1) {
    const index_t tasks = index_t(2) * thread_count(threads);
    if (tasks > 2 && heads > 0)
      count = std::clamp<index_t>((tasks + heads - 1) / heads, 1, std::max<index_t>(slices, 1));
  }
  // Of part `index`, up to the first of the one after.
  index_t first(index_t index) const { return index * slices / count; }
};

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

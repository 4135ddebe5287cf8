// The threads of the core, by std::thread: one pool for all callers. A caller works on its own job,
// so it waits for nobody to begin, and threads of the pool that have nothing to do help it. Callers
// that run at once share these threads: of C callers on P processors at most C + P - 1 run.
//
// The threads are never joined, and the pool is never destroyed. They sleep when the process exits,
// which ends them, whatever runs still or has been destroyed by then.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#include "lshkit/runtime.hpp"
#include "lshkit/threads.hpp"
#include "parallel.hpp"
#ifdef __linux__
#include <sched.h>
#endif
#ifndef _WIN32
#include <pthread.h>
#endif

namespace lshkit {
namespace {

thread_local int calls_threads = 0;  // set_max_threads of this thread; 0: the default
thread_local bool in_task = false;

// ---- waiting ----
// Longer than between two jobs of one call, and than a sleeping thread takes to wake up. A thread
// that spins keeps a core from other libraries' threads, so not much longer.
constexpr std::chrono::microseconds kSpin{50};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Condition>
bool spin_until(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (condition()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// ---- processors ----
#ifdef __linux__
int this_processor() { return sched_getcpu(); }

// Where a thread may run. Linux may wake it on the processor of its caller where other programs use
// the rest, and leave both there for milliseconds, in which the two do the work of one. So a thread
// sleeps with that processor forbidden to it, and works on any.
class Placement {
 public:
  void avoid(int processor) {
    if (processor == avoided_) return;
    if (avoided_ >= 0) {
      avoided_ = -1;
      cpu_set_t now;  // unless others moved the thread meanwhile
      if (sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&now, &others_))
        sched_setaffinity(0, sizeof all_, &all_);
    }
    if (processor < 0 || processor >= CPU_SETSIZE) return;
    if (sched_getaffinity(0, sizeof all_, &all_) != 0 || !CPU_ISSET(processor, &all_)) return;
    others_ = all_;
    CPU_CLR(processor, &others_);
    if (CPU_COUNT(&others_) > 0 && sched_setaffinity(0, sizeof others_, &others_) == 0)
      avoided_ = processor;
  }

 private:
  cpu_set_t all_, others_;  // with and without the processor that is avoided
  int avoided_ = -1;        // none
};
#else
int this_processor() { return -1; }

struct Placement {
  void avoid(int) {}
};
#endif

// ---- the pool ----
// Of one caller, on its stack. The pool's mutex guards what is not atomic.
struct Job {
  Tasks& tasks;
  const int places;  // for threads of the pool
  const int processor = this_processor();
  std::atomic<int> helpers{0};   // threads of the pool at work; changed under the mutex
  std::atomic<index_t> next{0};  // task
  Job* other = nullptr;

  Job(Tasks& of, int threads) : tasks(of), places(threads - 1) {}
  int wanted() const { return next < tasks.count ? places - helpers : 0; }

  void work() {
    in_task = true;
    for (index_t i; (i = next.fetch_add(1)) < tasks.count;) tasks.run(i);
    in_task = false;
    release_large_scratch();
  }
};

// Those that this process may run on: of the machine's, those in the affinity mask.
int processors() {
#ifdef __linux__
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) return std::max(1, CPU_COUNT(&mask));
#endif
  return std::max(1, int(std::thread::hardware_concurrency()));
}

class Pool {
 public:
  void run(Tasks& tasks, int threads) {
    Job job(tasks, threads);
    begin(job);
    job.work();
    const auto left_alone = [&] { return job.helpers == 0; };
    spin_until(left_alone);
    std::unique_lock<std::mutex> lock(mutex_);  // even then: the last helper may still hold it
    Job** place = &jobs_;
    while (*place != &job) place = &(*place)->other;
    *place = job.other;
    helper_left_.wait(lock, left_alone);
  }

 private:
  void begin(Job& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    job.other = jobs_;
    jobs_ = &job;
    posted_.fetch_add(1);
    int wanted = 0;
    for (const Job* any = jobs_; any; any = any->other) wanted += any->wanted();
    const int most = std::max(processors_, job.places + 1) - 1;
    try {
      for (; threads_ < most && threads_ - busy_ < wanted; ++threads_)
        std::thread([this] { help(); }).detach();
    } catch (const std::system_error&) {
      // No more threads to be had: those that there are do the work, the caller at least.
    }
    // Those awake look for a job before they fall asleep.
    const int awake = threads_ - busy_ - sleeping_;
    const int to_wake = std::min(sleeping_, wanted - awake);
    lock.unlock();
    for (int i = 0; i < to_wake; ++i) wake_up_.notify_one();
  }

  // That with the fewest helpers of those that want more, or none.
  Job* wanting() const {
    Job* best = nullptr;
    for (Job* job = jobs_; job; job = job->other)
      if (job->wanted() > 0 && (!best || job->helpers < best->helpers)) best = job;
    return best;
  }

  void help() {
    // This thread has scratch from here on, and a destructor for it: until a thread has run it, the
    // C library does not unload the code, even where the library that holds this is closed.
    release_large_scratch();
    Placement placement;
    int caller_at = -1;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = wanting();
      if (!job) {
        const unsigned before = posted_;
        const auto posted = [&] { return posted_ != before; };
        lock.unlock();
        const bool found = spin_until(posted);
        if (!found) placement.avoid(caller_at);
        lock.lock();
        if (!found) {
          ++sleeping_;
          wake_up_.wait(lock, posted);
          --sleeping_;
        }
        continue;
      }
      ++job->helpers;
      ++busy_;
      caller_at = job->processor;
      lock.unlock();
      if (this_processor() == caller_at) placement.avoid(caller_at);  // leaves it at once
      placement.avoid(-1);
      job->work();
      lock.lock();
      --busy_;
      if (--job->helpers == 0) helper_left_.notify_all();
    }
  }

  const int processors_ = processors();
  std::mutex mutex_;
  std::condition_variable wake_up_, helper_left_;
  Job* jobs_ = nullptr;
  int threads_ = 0, busy_ = 0,
      sleeping_ = 0;  // those busy, and those asleep, are among the threads
  alignas(64) std::atomic<unsigned> posted_{0};  // jobs; those that spin read it
};

// Not a local static: a fork could leave the child with its lock.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
  Pool* present = pool;
  if (!present) {
    Pool* made = new Pool;
    if (pool.compare_exchange_strong(present, made)) return *made;
    delete made;
  }
  return *present;
}

// A child has none of the parent's threads: it starts its own when it needs them.
#ifndef _WIN32
struct ForkHandler {
  ForkHandler() {
    pthread_atfork(nullptr, nullptr, [] { pool = nullptr; });
  }
} fork_handler;
#endif

int default_threads() {
  static const int threads = [] {
    const char* asked = std::getenv("OMP_NUM_THREADS");  // what users set for all libraries
    const long number = asked ? std::strtol(asked, nullptr, 10) : 0;
    return number >= 1 ? int(std::min(number, 1024L)) : processors();
  }();
  return threads;
}

}  // namespace

const char* thread_backend() { return "std"; }

int max_threads() { return calls_threads > 0 ? calls_threads : default_threads(); }

int set_max_threads(int threads) {
  const int before = max_threads();
  if (threads >= 1) calls_threads = threads;
  return before;
}

int thread_count(int requested) { return requested > 0 ? requested : max_threads(); }

void run_tasks(Tasks& tasks, int threads) {
  if (!in_task) return the_pool().run(tasks, threads);
  for (index_t i = 0; i < tasks.count; ++i) tasks.run(i);  // all threads have work already
}

}  // namespace lshkit

// Threads, whichever backend runs them. ThreadSanitizer knows those of std::thread.
#ifdef __linux__
#include <sched.h>
#endif
#ifndef _WIN32
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <atomic>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "lshkit/runtime.hpp"
#include "lshkit/threads.hpp"
#include "parallel.hpp"

using namespace lshkit;

namespace {

// Whether each task ran once. What tasks write is read without locks.
bool each_task_runs_once(index_t count, int threads) {
  std::vector<int> runs(count);
  parallel_for(count, threads, [&](index_t i) { ++runs[i]; });
  for (int n : runs)
    if (n != 1) return false;
  return true;
}

void in_threads(int callers, const std::function<void(int)>& call) {
  std::vector<std::thread> threads;
  for (int i = 0; i < callers; ++i) threads.emplace_back(call, i);
  for (std::thread& thread : threads) thread.join();
}

#ifndef _WIN32
bool child_succeeds(const std::function<bool()>& succeeds) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // a child that hangs is killed
    _exit(succeeds() ? 0 : 1);
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}
#endif

const bool has_openmp = std::string(thread_backend()) == "openmp";

}  // namespace

TEST(backend_has_a_name) { CHECK(has_openmp || std::string(thread_backend()) == "std"); }

TEST(each_task_runs_once_at_any_number_of_threads) {
  for (int threads : {1, 2, 3, 8, 40, 5})
    for (index_t count : {0, 1, 2, 7, 1000}) CHECK(each_task_runs_once(count, threads));
}

TEST(many_short_regions) {
  for (int i = 0; i < 2000; ++i) CHECK(each_task_runs_once(1 + i % 5, 2 + i % 3));
}

TEST(threads_that_slept_wake_up) {
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    CHECK(each_task_runs_once(50, 4));
  }
}

TEST(tasks_run_on_several_threads) {
  // Each waits for the other, which one thread alone would never see.
  std::atomic<int> arrived{0};
  std::atomic<bool> late{false};
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  parallel_for(2, 2, [&](index_t) {
    ++arrived;
    while (arrived < 2 && !late) {
      std::this_thread::yield();
      if (std::chrono::steady_clock::now() > end) late = true;
    }
  });
  CHECK(!late);
}

#ifdef __linux__
TEST(threads_at_work_may_run_where_their_caller_may) {
  // Also those that have slept, in which time some processors are forbidden to them.
  cpu_set_t wanted;
  CHECK(sched_getaffinity(0, sizeof wanted, &wanted) == 0);
  for (int i = 0; i < 5; ++i) {
    std::atomic<int> differ{0};
    parallel_for(20, 3, [&](index_t) {
      cpu_set_t mine;
      if (sched_getaffinity(0, sizeof mine, &mine) != 0 || !CPU_EQUAL(&mine, &wanted)) ++differ;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    });
    CHECK(differ == 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}
#endif

TEST(first_exception_reaches_the_caller) {
  for (int i = 0; i < 50; ++i) {
    std::atomic<int> runs{0};
    std::string message;
    try {
      parallel_for(1000, 3, [&](index_t task) {
        ++runs;
        if (task % 2 == 0) throw std::runtime_error("task " + std::to_string(task));
      });
    } catch (const std::runtime_error& error) {
      message = error.what();
    }
    CHECK(message.rfind("task ", 0) == 0);
    CHECK(runs < 1000);
    CHECK(each_task_runs_once(100, 3));  // and the threads work as before
  }
}

TEST(nested_regions_run_all_tasks) {
  std::atomic<int> runs{0};
  parallel_for(6, 3, [&](index_t) { parallel_for(7, 3, [&](index_t) { ++runs; }); });
  CHECK(runs == 42);
}

TEST(callers_share_the_threads) {
  std::atomic<int> failures{0};
  in_threads(6, [&](int caller) {
    for (int i = 0; i < 200; ++i)
      if (!each_task_runs_once(20 + caller, 2 + caller % 3)) ++failures;
  });
  CHECK(failures == 0);
}

TEST(exceptions_reach_their_own_caller) {
  std::atomic<int> failures{0};
  in_threads(4, [&](int caller) {
    for (int i = 0; i < 100; ++i) try {
        parallel_for(20, 3, [&](index_t) { throw caller; });
      } catch (int thrown) {
        if (thrown != caller) ++failures;
      }
  });
  CHECK(failures == 0);
}

TEST(each_thread_has_a_number_of_its_own) {
  const int before = set_max_threads(7);
  CHECK(max_threads() == 7 && thread_count(0) == 7 && thread_count(-1) == 7 &&
        thread_count(3) == 3);
  int elsewhere = 0;
  in_threads(1, [&](int) {
    set_max_threads(5);
    elsewhere = max_threads();
  });
  CHECK(elsewhere == 5);
  CHECK(set_max_threads(0) == 7 && max_threads() == 7);  // no number: nothing is set
  CHECK(set_max_threads(before) == 7 && max_threads() == before);
}

#ifndef _WIN32  // which has no fork
TEST(a_child_computes) {
  CHECK(each_task_runs_once(100, 4));  // so that the parent has threads to lose
  const int threads = max_threads();
  const auto computes = [&] {
    return max_threads() == (has_openmp ? 1 : threads) && each_task_runs_once(100, 4) &&
           child_succeeds([] { return each_task_runs_once(100, 4); });
  };
  CHECK(child_succeeds(computes));
  CHECK(each_task_runs_once(100, 4));  // and the parent keeps its own
}

#ifndef __SANITIZE_THREAD__  // which does not know that other threads end with a fork
TEST(a_child_of_a_process_at_work_computes) {
  // Whatever its other threads hold at that moment.
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) each_task_runs_once(3, 3);
  });
  for (int i = 0; i < 20; ++i) CHECK(child_succeeds([] { return each_task_runs_once(100, 3); }));
  stop = true;
  busy.join();
}
#endif

#ifndef LSHKIT_EMULATOR  // qemu ends with an assertion of its own where such a child starts threads
TEST(exit_waits_for_nobody) {
  // A thread at work while the process exits, as a daemon thread of Python's.
  for (int i = 0; i < 5; ++i)
    CHECK(child_succeeds([] {
      std::atomic<bool> works{false};
      std::thread([&] {
        for (;; works = true) each_task_runs_once(5, 3);
      }).detach();
      while (!works) std::this_thread::yield();
      std::exit(0);
      return false;
    }));
}
#endif

TEST(library_that_is_closed_leaves_its_threads_asleep) {
  // A library with a copy of the core of its own, closed while its threads spin or sleep.
  for (int i = 0; i < 6; ++i) {
    void* library = dlopen(LSHKIT_THREADS_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    CHECK(library);
    if (!library) return;
    auto count = reinterpret_cast<int (*)(int)>(dlsym(library, "count_tasks"));
    CHECK(count && count(100) == 100);
    if (i % 2) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    dlclose(library);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // those that spun fall asleep
  }
}
#endif

LSHKIT_TEST_MAIN

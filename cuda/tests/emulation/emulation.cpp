#include "emulation.hpp"

#include <ucontext.h>

#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
// This file itself is compiled without it: what it does to share one thread is no race.
#ifdef LSHKIT_SANITIZE_THREAD
#include <sanitizer/tsan_interface.h>
#else
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
#endif

thread_local lshkit::emulation::Index threadIdx, blockIdx, blockDim, gridDim;

namespace lshkit::emulation {
namespace {

constexpr unsigned kMaxThreads = 1024, kWarpSize = 32;
constexpr std::int64_t kMaxBlocks = 0x7fffffff, kSharedOfAnyGpu = 48 * 1024;
std::mutex one_launch;

enum class State { ready, at_block_barrier, at_warp_barrier, done };
enum class Wait : char { synchronize, give, take };  // at a warp's barrier: for what
struct Fibre {
  void* stack_pointer = nullptr;
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state = State::done;
  Wait wait = Wait::synchronize;
  void* sanitized = nullptr;                       // what ThreadSanitizer knows it as
  unsigned block_barriers = 0, warp_barriers = 0;  // passed in this block
};
constexpr std::size_t kStackBytes = 128 * 1024;
constexpr unsigned kSets = 2;
// The threads of a block. Blocks of even and of odd number have sets of their own: within a set
// barriers put blocks in order, between the sets nothing does.
struct Set {
  std::vector<Fibre> fibres;
  std::vector<unsigned char> shared;
  // What ThreadSanitizer orders by. In turn, or a thread that has come to the next barrier would be
  // before one that has yet to leave this one.
  char at_block_barrier[2], at_warp_barrier[kMaxThreads / kWarpSize][2], block_ends[2];
  unsigned turn = 0;  // of its blocks: one begins after the ends of the one before, not its own
} sets[kSets];
Set* set;
char launch_begins;
[[maybe_unused]] char launch_ends;
Fibre scheduler;
unsigned current;
std::uint64_t slots[kMaxThreads];
const std::function<void()>* running;
std::exception_ptr error;

void run_fibre();
#ifdef __x86_64__
// What a call leaves to the called function, kept on the stack that is left: some twenty times
// faster than swapcontext, which asks the kernel for the signal mask, and for which
// AddressSanitizer forgets all that it knows of the other stack.
extern "C" void lshkit_emulation_switch(void** from, void* to);
asm(R"(
  .text
  .type lshkit_emulation_switch, @function
lshkit_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
void prepare(Fibre& fibre) {
#ifdef __SANITIZE_ADDRESS__  // the frames that its last run has never returned from
  ASAN_UNPOISON_MEMORY_REGION(fibre.stack.get(), kStackBytes);
#endif
  auto** top = reinterpret_cast<void**>(fibre.stack.get() + kStackBytes);
  top = reinterpret_cast<void**>(reinterpret_cast<std::uintptr_t>(top) & ~std::uintptr_t(15));
  *--top = nullptr;  // so that the stack is aligned as after a call
  *--top = reinterpret_cast<void*>(&run_fibre);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fibre.stack_pointer = top;
}
void change_stack(Fibre& from, Fibre& to) {
  lshkit_emulation_switch(&from.stack_pointer, to.stack_pointer);
}
#else
void prepare(Fibre& fibre) {
  getcontext(&fibre.context);
  fibre.context.uc_stack.ss_sp = fibre.stack.get();
  fibre.context.uc_stack.ss_size = kStackBytes;
  fibre.context.uc_link = &scheduler.context;
  makecontext(&fibre.context, &run_fibre, 0);
}
void change_stack(Fibre& from, Fibre& to) { swapcontext(&from.context, &to.context); }
#endif

#ifdef __SANITIZE_ADDRESS__
const void* scheduler_stack;
std::size_t scheduler_size;
#endif
void switch_to(Fibre& from, Fibre& to) {
#ifdef LSHKIT_SANITIZE_THREAD
  __tsan_switch_to_fiber(to.sanitized, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef __SANITIZE_ADDRESS__
  void* fake_stack = nullptr;
  const bool back = &to == &scheduler;
  __sanitizer_start_switch_fiber(back && from.state == State::done ? nullptr : &fake_stack,
                                 back ? scheduler_stack : to.stack.get(),
                                 back ? scheduler_size : kStackBytes);
#endif
  change_stack(from, to);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

void run_fibre() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size);
#endif
  __tsan_acquire(&launch_begins);
  __tsan_acquire(&set->block_ends[set->turn % 2]);
  try {
    (*running)();
  } catch (...) {
    error = std::current_exception();
  }
  __tsan_release(&set->block_ends[(set->turn + 1) % 2]);
  set->fibres[current].state = State::done;
  switch_to(set->fibres[current], scheduler);
}

// Shuffles and votes have no barrier: lanes meet there, and what they have stored is in no order.
void wait(State state, char* barrier) {
  if (barrier) __tsan_release(barrier);
  set->fibres[current].state = state;
  switch_to(set->fibres[current], scheduler);
  if (barrier) __tsan_acquire(barrier);
}

// Lets fibres go on whose barrier all living ones of their warp, or all of the block, have reached.
bool release(std::vector<Fibre>& fibres, unsigned threads) {
  unsigned at_block = 0, done = 0;
  bool moved = false;
  for (unsigned first = 0; first < threads; first += kWarpSize) {
    unsigned living = 0, waiting = 0;
    const unsigned last = first + kWarpSize < threads ? first + kWarpSize : threads;
    for (unsigned t = first; t < last; ++t) {
      done += fibres[t].state == State::done;
      at_block += fibres[t].state == State::at_block_barrier;
      living += fibres[t].state != State::done;
      waiting += fibres[t].state == State::at_warp_barrier;
    }
    if (waiting == 0 || waiting != living) continue;
    moved = true;
    const Fibre* one = nullptr;
    for (unsigned t = first; t < last; ++t) {
      if (fibres[t].state != State::at_warp_barrier) continue;
      if (one && one->wait != fibres[t].wait)
        throw std::runtime_error("lanes of a warp that wait for each other in different functions");
      one = &fibres[t];
      fibres[t].state = State::ready;
    }
    if (one->wait != Wait::synchronize && living != kWarpSize)
      throw std::runtime_error("a shuffle or vote of a warp of which not all lanes take part");
  }
  if (done == threads) return false;
  if (at_block == threads) {
    moved = true;
    for (unsigned t = 0; t < threads; ++t) fibres[t].state = State::ready;
  }
  if (!moved) throw std::runtime_error("a barrier that not every thread of the block reaches");
  return true;
}

// Other numbers at every launch, the same in every run of a program.
std::uint64_t next_random() {
  static std::uint64_t state = 0;
  std::uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  return z ^ z >> 31;
}

void run_block(unsigned threads, bool descending) {
  std::vector<Fibre>& fibres = set->fibres;
  for (unsigned t = 0; t < threads; ++t) {
    prepare(fibres[t]);
    fibres[t].block_barriers = fibres[t].warp_barriers = 0;
    fibres[t].state = State::ready;
  }
  do {
    for (unsigned n = 0; n < threads; ++n) {
      current = descending ? threads - 1 - n : n;
      if (fibres[current].state != State::ready) continue;
      threadIdx.x = current;
      switch_to(scheduler, fibres[current]);
      if (error) {
        const std::exception_ptr thrown = error;
        error = nullptr;
        std::rethrow_exception(thrown);
      }
    }
  } while (release(fibres, threads));
}

// All that a launch's threads have done is before what comes after it.
void join([[maybe_unused]] unsigned threads) {
#ifdef LSHKIT_SANITIZE_THREAD
  for (const Set& s : sets)
    for (unsigned t = 0; t < threads; ++t) {
      __tsan_switch_to_fiber(s.fibres[t].sanitized, __tsan_switch_to_fiber_no_sync);
      __tsan_release(&launch_ends);
    }
  __tsan_switch_to_fiber(scheduler.sanitized, __tsan_switch_to_fiber_no_sync);
  __tsan_acquire(&launch_ends);
#endif
}

}  // namespace

unsigned char* shared_memory() { return set->shared.data(); }
std::size_t shared_bytes() { return set->shared.size(); }
void synchronize_block() {
  const unsigned turn = set->fibres[current].block_barriers++ % 2;
  wait(State::at_block_barrier, &set->at_block_barrier[turn]);
}
static void wait_for_warp(Wait wait_for) {
  set->fibres[current].wait = wait_for;
  wait(State::at_warp_barrier, nullptr);
}
void synchronize_warp() {
  Fibre& fibre = set->fibres[current];
  fibre.wait = Wait::synchronize;
  const unsigned turn = fibre.warp_barriers++ % 2;
  wait(State::at_warp_barrier, &set->at_warp_barrier[current / kWarpSize][turn]);
}
std::uint64_t exchange(std::uint64_t value, unsigned lane) {
  const unsigned me = current;
  slots[me] = value;
  wait_for_warp(Wait::give);
  value = slots[me / kWarpSize * kWarpSize + lane];
  wait_for_warp(Wait::take);
  return value;
}
void give_all(const std::uint32_t* mine, int count, Given* all) {
  // Volatile: no memcpy, which ThreadSanitizer sees.
  static volatile std::uint32_t given[kMaxThreads][kGivenWords];
  const unsigned me = current;
  for (int i = 0; i < count; ++i) given[me][i] = mine[i];
  wait_for_warp(Wait::give);
  for (unsigned lane = 0; lane < kWarpSize; ++lane)
    for (int i = 0; i < count; ++i)
      all[lane].words[i] = given[me / kWarpSize * kWarpSize + lane][i];
  wait_for_warp(Wait::take);
}
unsigned ballot(bool vote) {
  const unsigned first = current / kWarpSize * kWarpSize;
  slots[current] = vote;
  wait_for_warp(Wait::give);
  unsigned votes = 0;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) votes |= unsigned(slots[first + lane]) << lane;
  wait_for_warp(Wait::take);
  return votes;
}

void bound_piece([[maybe_unused]] void* piece, [[maybe_unused]] std::size_t bytes,
                 [[maybe_unused]] std::size_t whole) {
#ifdef __SANITIZE_ADDRESS__
  ASAN_UNPOISON_MEMORY_REGION(piece, bytes);
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(piece) + bytes, whole - bytes);
#endif
}

void launch(const char* name, std::int64_t n_blocks, std::int64_t n_threads,
            std::size_t shared_bytes, const std::function<void()>& kernel) {
  const std::int64_t most_bytes = shared_limit > kSharedOfAnyGpu ? shared_limit : kSharedOfAnyGpu;
  if (n_blocks < 1 || n_blocks > kMaxBlocks || n_threads < 1 || n_threads > kMaxThreads ||
      std::int64_t(shared_bytes) > most_bytes)
    throw std::runtime_error(std::string(name) + ": no GPU takes " + std::to_string(n_blocks) +
                             " blocks of " + std::to_string(n_threads) + " threads and " +
                             std::to_string(shared_bytes) + " bytes of shared memory");
  const std::lock_guard<std::mutex> guard(one_launch);
  const unsigned blocks = unsigned(n_blocks), threads = unsigned(n_threads);
  const bool descending = next_random() % 2 != 0;
  const std::uint64_t first_block = next_random() % blocks;
  std::uint64_t step = next_random() % blocks;  // prime to their number: each has its turn
  while (std::gcd(step, std::uint64_t(blocks)) != 1) ++step;
  for (Set& s : sets) {
    if (s.fibres.size() < threads) s.fibres.resize(threads);
    for (unsigned t = 0; t < threads; ++t) {
      if (!s.fibres[t].stack) s.fibres[t].stack.reset(new char[kStackBytes]);
#ifdef LSHKIT_SANITIZE_THREAD
      if (!s.fibres[t].sanitized) s.fibres[t].sanitized = __tsan_create_fiber(0);
#endif
    }
    // Of the exact size, so that AddressSanitizer sees an access beyond it.
    s.shared = std::vector<unsigned char>();
    s.shared.reserve(shared_bytes);
    s.shared.resize(shared_bytes);
  }
#ifdef LSHKIT_SANITIZE_THREAD
  scheduler.sanitized = __tsan_get_current_fiber();
#endif
  running = &kernel;
  blockDim.x = threads;
  gridDim.x = blocks;
  __tsan_release(&launch_begins);
  for (unsigned n = 0; n < blocks; ++n) {
    blockIdx.x = unsigned((first_block + n * step) % blocks);
    set = &sets[blockIdx.x % kSets];
    // What a kernel reads before it writes is NaN. Volatile: no memset, which ThreadSanitizer sees.
    volatile unsigned char* bytes = set->shared.data();
    for (std::size_t i = 0; i < shared_bytes; ++i) bytes[i] = 0xff;
    try {
      run_block(threads, descending);
    } catch (...) {
      join(threads);
      throw;
    }
    ++set->turn;
  }
  join(threads);
}

}  // namespace lshkit::emulation

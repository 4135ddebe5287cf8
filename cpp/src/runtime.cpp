#include "lshkit/runtime.hpp"

#ifndef _WIN32
#include <sys/mman.h>
#endif

#include <cstdint>
#include <new>

#include "parallel.hpp"

namespace lshkit {
namespace {

// ---- pages ----
constexpr std::size_t kLargePage = std::size_t(2) << 20;
void advise_large_pages(void* begin, std::size_t bytes) {
#ifdef MADV_HUGEPAGE
  madvise(begin, bytes, MADV_HUGEPAGE);  // a hint: it may be refused
#else
  (void)begin, (void)bytes;
#endif
}

// ---- scratch ----
constexpr std::size_t kKeptScratch = std::size_t(4) << 20;
struct Buffer {
  void* memory = nullptr;
  std::size_t bytes = 0;
  std::align_val_t page{};

  void allocate(std::size_t at_least, Scratch use) {
    // Tables are read all over: with small pages the look-up of addresses would take its share, and
    // which sets of a cache they fall on would be another matter of luck in each process. What is
    // gone through in order has less of that, and a large page is 2 MB for each thread.
    const std::size_t large = use == Scratch::pass ? kLargePage / 16 : kLargePage / 2;
    const std::size_t size = at_least >= large ? kLargePage : 4096;
    const std::size_t rounded = (at_least + size - 1) / size * size;
    page = std::align_val_t(size);
    memory = ::operator new(rounded, page);
    bytes = rounded;
    if (size == kLargePage) advise_large_pages(memory, bytes);
  }
  void release() {
    ::operator delete(memory, page);
    memory = nullptr;
    bytes = 0;
  }
  ~Buffer() { release(); }
};
thread_local Buffer buffers[4];  // by Scratch

}  // namespace

void prefer_large_pages(void* begin, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::uintptr_t first = (address + kLargePage - 1) / kLargePage * kLargePage;
  const std::uintptr_t last = (address + bytes) / kLargePage * kLargePage;
  if (bytes >= 2 * kLargePage && last > first)
    advise_large_pages(reinterpret_cast<void*>(first), last - first);
}

void* thread_scratch(std::size_t bytes, Scratch use) {
  Buffer& buffer = buffers[int(use)];
  if (bytes > buffer.bytes) {
    buffer.release();
    buffer.allocate(bytes, use);
  }
  return buffer.memory;
}

void release_large_scratch() {
  for (Buffer& buffer : buffers)
    if (buffer.bytes > kKeptScratch) buffer.release();
}

}  // namespace lshkit

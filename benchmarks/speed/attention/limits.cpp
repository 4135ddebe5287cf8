// What one core gives: nanoseconds for a row of 256 bytes (64 floats) of a table of so many bytes,
// the smallest of some rounds. Compiled and called by bounds.py.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

// A register: GCC keeps sums of wider vectors in memory, which takes ten times as long.
#if defined(__AVX512F__)
constexpr int kRegister = 64;
#elif defined(__AVX__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif
typedef float Vector __attribute__((vector_size(kRegister)));
constexpr int kVectors = 256 / kRegister;
struct Row {
  Vector vectors[kVectors];
};
constexpr int kRounds = 12;

struct Table {
  std::size_t rows;
  Row* row;

  explicit Table(std::size_t bytes) : rows(bytes / sizeof(Row)) {
    constexpr std::size_t page = std::size_t(2) << 20;
    bytes = (bytes + page - 1) / page * page;
    row = static_cast<Row*>(std::aligned_alloc(page, bytes));
#ifdef MADV_HUGEPAGE
    madvise(row, bytes, MADV_HUGEPAGE);
#endif
    std::memset(static_cast<void*>(row), 0, bytes);
  }
  ~Table() { std::free(row); }
};

// A round visits these rows, in turn or at random.
typedef std::vector<std::uint32_t> Order;
template <class Round>
double nanoseconds(std::size_t bytes, bool random, const Round& round) {
  const Table table(bytes);
  Order order(std::max<std::size_t>(table.rows, 1 << 16));
  std::uint32_t state = 1;
  for (std::size_t i = 0; i < order.size(); ++i) {
    state = state * 1664525u + 1013904223u;
    order[i] = std::uint32_t((random ? state >> 8 : i) % table.rows);
  }
  double best = 1e9;
  for (int k = 0; k < kRounds; ++k) {
    const auto begin = std::chrono::steady_clock::now();
    round(table.row, order);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    best = took.count() < best ? took.count() : best;
  }
  return best / double(order.size()) * 1e9;
}

void sum(const Row* rows, const Order& order) {
  Row all{};
  for (const std::uint32_t i : order)
    for (int k = 0; k < kVectors; ++k) all.vectors[k] += rows[i].vectors[k];
  __asm__ volatile("" : : "m"(all));  // or the compiler leaves it out
}
void add(Row* rows, const Order& order) {
  for (const std::uint32_t i : order)
    for (Vector& vector : rows[i].vectors) vector += 1e-9f;
}

}  // namespace

extern "C" {
double gather(std::size_t bytes) { return nanoseconds(bytes, true, sum); }
double scatter_add(std::size_t bytes) { return nanoseconds(bytes, true, add); }
double read(std::size_t bytes) { return nanoseconds(bytes, false, sum); }
double update(std::size_t bytes) { return nanoseconds(bytes, false, add); }
}

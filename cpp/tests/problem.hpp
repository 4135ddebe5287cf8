#pragma once
// Random problems for the tests, and memory that shows what a kernel must not touch.
#ifdef _WIN32
#include <windows.h>
#undef near
#undef far
#else
#include <sys/mman.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "lshkit/tensor.hpp"

using lshkit::index_t;

inline std::vector<float> normal(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> x(count);
  for (float& value : x) value = distribution(generator);
  return x;
}

// From -1 to 1.
inline std::vector<double> numbers(index_t count, unsigned seed) {
  std::vector<double> v(count);
  std::uint64_t state = seed;
  for (double& x : v) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    x = double(state >> 40) / double(1 << 24) * 2 - 1;
  }
  return v;
}

template <class Code>
std::vector<Code> random_codes(std::size_t count, int n_buckets, unsigned seed) {
  std::mt19937 generator(seed);
  std::uniform_int_distribution<int> distribution(0, n_buckets - 1);
  std::vector<Code> codes(count);
  for (Code& code : codes) code = Code(distribution(generator));
  return codes;
}

// An output to be written: NaN where it has not been. Allocated to its exact size, so that
// AddressSanitizer sees a write or read past the end.
template <class T>
std::vector<T> unwritten(std::size_t count) {
  return std::vector<T>(count, std::numeric_limits<T>::quiet_NaN());
}

// In the norm; absolute where zeros are wanted.
inline double relative_error(const std::vector<float>& x, const std::vector<float>& wanted) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += (double(x[i]) - wanted[i]) * (double(x[i]) - wanted[i]);
    size += double(wanted[i]) * wanted[i];
  }
  return size > 0 ? std::sqrt(error / size) : error;
}

// A contiguous (1, heads, rows, columns) view.
template <class T, class V>
lshkit::Tensor<T> view(V& x, index_t rows, index_t columns) {
  return {x.data(), 0, rows * columns, columns};
}

// Address space without memory behind it but for the pages that are used. Null if refused.
class SparseMemory {
 public:
  explicit SparseMemory(std::size_t bytes) : bytes_(bytes) {
#ifdef _WIN32
    data_ = VirtualAlloc(nullptr, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
#else
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    data_ = p == MAP_FAILED ? nullptr : p;
#endif
  }
  ~SparseMemory() {
    if (!data_) return;
#ifdef _WIN32
    VirtualFree(data_, 0, MEM_RELEASE);
#else
    munmap(data_, bytes_);
#endif
  }
  float* floats() const { return static_cast<float*>(data_); }

 private:
  void* data_;
  std::size_t bytes_;
};

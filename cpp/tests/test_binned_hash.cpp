// Codes of bins against the definition in binned_hash.hpp.
#include "check.hpp"
#include "lshkit/binned_hash.hpp"
#include "problem.hpp"

using namespace lshkit;

namespace {

struct Numbers {
  std::vector<double> factors, shifts;
  std::vector<std::uint32_t> multipliers;
  BinnedFunctions functions;

  Numbers(index_t d, index_t n_bits, index_t n_hashes, unsigned seed) {
    const index_t rows = n_hashes * (n_bits ? n_bits : 1);
    for (const float z : normal(rows * d, seed)) factors.push_back(3.0 * z);
    std::uint32_t state = seed;
    for (index_t i = 0; i < rows * (n_bits ? 1 : d); ++i) {
      state = state * 1664525u + 1013904223u;
      shifts.push_back(state / 4294967296.0);
      multipliers.push_back(state * 2654435761u + 12345u);
    }
    functions = {factors.data(), shifts.data(), multipliers.data(), d, n_hashes, n_bits};
  }
};

// near: whether a position is within rounding of the edge of a bin.
template <class T>
std::uint32_t code(const BinnedFunctions& f, const T* x, index_t hash, bool* near) {
  const index_t bins = f.n_bits ? f.n_bits : f.n_features;
  std::uint64_t sum = 0;
  for (index_t b = 0; b < bins; ++b) {
    const index_t at = hash * bins + b;
    long double position = f.shifts[at], size = 1;
    if (f.n_bits == 0) {
      position += (long double)f.factors[at] * x[b];
      size += std::fabs((long double)f.factors[at] * x[b]);
    }
    for (index_t i = 0; f.n_bits && i < f.n_features; ++i) {
      position += (long double)f.factors[at * f.n_features + i] * x[i];
      size += std::fabs((long double)f.factors[at * f.n_features + i] * x[i]);
    }
    if (std::fabs(position - std::round(position)) <= size * f.n_features * 4.5e-16) *near = true;
    const std::uint32_t word = std::uint32_t(std::int64_t(std::floor(position)));
    sum += std::uint64_t(word) * f.multipliers[at];
  }
  for (const std::uint64_t factor : {0xff51afd7ed558ccdull, 0xc4ceb9fe1a85ec53ull})
    sum = (sum ^ sum >> 33) * factor;
  return std::uint32_t((sum ^ sum >> 33) >> 32);
}

template <class T>
void check_codes(index_t n, index_t d, index_t n_bits, index_t n_hashes, double scale,
                 int threads) {
  const Numbers numbers(d, n_bits, n_hashes, 1);
  const index_t stride = d + 3;
  std::vector<T> x;
  for (const float z : normal(n * stride, 2)) x.push_back(T(scale * z));
  std::vector<std::uint32_t> codes(n * n_hashes);
  binned_hash(numbers.functions, x.data(), stride, n, codes.data(), threads);
  index_t wrong = 0, close = 0;
  for (index_t i = 0; i < n; ++i)
    for (index_t j = 0; j < n_hashes; ++j) {
      bool near = false;
      const std::uint32_t wanted = code(numbers.functions, &x[i * stride], j, &near);
      close += near;
      wrong += codes[i * n_hashes + j] != wanted && !near;
    }
  CHECK(wrong == 0);
  CHECK(close <= n * n_hashes / 100);
}

}  // namespace

TEST(codes_are_those_of_the_bins) {
  for (const index_t n_bits : {0, 1, 3, 9}) {
    check_codes<float>(1, 1, n_bits, 1, 1, 1);
    check_codes<float>(17, 7, n_bits, 5, 1, 2);
    check_codes<double>(33, 64, n_bits, 32, 1, 1);
    check_codes<double>(300, 9, n_bits, 3, 1e9, 2);
    check_codes<float>(259, 65, n_bits, 4, 1e3, 2);
  }
}

template <class Code>
void check_folded(int bits) {
  const index_t n = 77, d = 9, m = 5;
  Numbers numbers(d, 0, m, 3);
  const std::vector<float> x = normal(n * d, 4);
  std::vector<std::uint32_t> whole(n * m);
  binned_hash(numbers.functions, x.data(), d, n, whole.data(), 1);
  std::vector<std::uint64_t> fold;
  for (index_t i = 0; i < 2 * m; ++i) fold.push_back((i + 3) * 0x9e3779b97f4a7c15ull);
  numbers.functions.fold = fold.data();
  numbers.functions.fold_bits = bits;
  std::vector<Code> codes(n * m);
  binned_hash(numbers.functions, x.data(), d, n, codes.data(), 2);
  index_t wrong = 0;
  for (index_t i = 0; i < n * m; ++i)
    wrong += codes[i] != Code((fold[i % m] * whole[i] + fold[m + i % m]) >> (64 - bits));
  CHECK(wrong == 0);
}

TEST(folded_codes_are_those_of_the_whole_ones) {
  for (const int bits : {1, 5, 8}) check_folded<std::uint8_t>(bits);
  for (const int bits : {9, 12, 16}) check_folded<std::uint16_t>(bits);
}

TEST(strides_reach_beyond_32_bits) {
  const index_t d = 16, m = 4, stride = (index_t(1) << 31) + 64, n = 3;
  SparseMemory memory(sizeof(float) * (stride * n));
  if (!memory.floats()) return;
  const std::vector<float> x = normal(n * d, 5);
  for (index_t i = 0; i < n; ++i)
    std::memcpy(memory.floats() + i * stride, &x[i * d], sizeof(float) * d);
  const Numbers numbers(d, 0, m, 6);
  std::vector<std::uint32_t> near(n * m), far(n * m);
  binned_hash(numbers.functions, x.data(), d, n, near.data(), 1);
  binned_hash<float>(numbers.functions, memory.floats(), stride, n, far.data(), 1);
  CHECK(near == far);
}

TEST(rows_that_are_not_finite_are_reported_and_leave_the_others_alone) {
  const index_t d = 19, m = 4, n = 40;
  for (const index_t n_bits : {0, 3}) {
    const Numbers numbers(d, n_bits, m, 6);
    const std::vector<float> x = normal(n * d, 5);
    std::vector<std::uint32_t> clean(n * m), codes(n * m);
    CHECK(binned_hash(numbers.functions, x.data(), d, n, clean.data(), 1));
    for (const index_t row : {0, 35, 39})
      for (const index_t column : {0, 15, 18})
        for (const float bad : {NAN, INFINITY, -INFINITY, 3e38f}) {
          std::vector<float> changed = x;
          changed[row * d + column] = bad;
          const bool finite = binned_hash(numbers.functions, changed.data(), d, n, codes.data(), 1);
          CHECK(finite == (bad == 3e38f));
          for (index_t i = 0; i < n * m; ++i) CHECK(i / m == row || codes[i] == clean[i]);
        }
  }
}

TEST(no_rows_is_no_work) { CHECK(binned_hash<float>({}, nullptr, 0, 0, nullptr, 1)); }

LSHKIT_TEST_MAIN

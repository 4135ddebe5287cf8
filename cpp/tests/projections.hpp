#pragma once
// Hash functions and their projections by the definition in hash.hpp, in double precision.
#include <cmath>

#include "lshkit/hash.hpp"
#include "problem.hpp"

using namespace lshkit;

struct Parameters {
  std::vector<float> numbers;
  index_t columns;
};

inline Parameters hyperplane(index_t d, int n_bits, index_t n_hashes, index_t heads,
                             unsigned seed) {
  return {normal(heads * n_hashes * n_bits * d, seed), d};
}

inline Parameters hadamard(index_t d, int n_bits, index_t n_hashes, index_t heads, unsigned seed) {
  index_t columns = 64;
  while (columns < d) columns *= 2;
  const index_t rows = 3 + (n_hashes + columns - 1) / columns * n_bits;
  Parameters p{normal(heads * rows * columns, seed), columns};
  for (index_t head = 0; head < heads; ++head)
    for (index_t r = 0; r < rows; ++r)
      for (index_t c = 0; c < columns; ++c) {
        float* row = &p.numbers[(head * rows + r) * columns];
        if (r >= 3) row[c] = row[c] > 0 ? 1.0f : -1.0f;
      }
  for (index_t head = 0; head < heads; ++head)
    for (index_t r = 0; r < 3; ++r)
      for (index_t c = 0; c < columns / 2; ++c) {
        float* row = &p.numbers[(head * rows + r) * columns];
        const double angle = 3 * row[c];
        row[c] = float(std::cos(angle));
        row[columns / 2 + c] = float(std::sin(angle));
      }
  return p;
}

inline void transform(std::vector<double>& x) {
  for (std::size_t half = 1; half < x.size(); half *= 2)
    for (std::size_t i = 0; i < x.size(); ++i)
      if (!(i & half)) {
        const double a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
}

inline void rotate(std::vector<double>& x, const float* angles) {
  const std::size_t half = x.size() / 2;
  for (std::size_t i = 0; i < half; ++i) {
    const double a = x[i], b = x[half + i];
    x[i] = angles[i] * a - angles[half + i] * b;
    x[half + i] = angles[half + i] * a + angles[i] * b;
  }
}

// Of the columns of a bit, by the matrix itself.
inline index_t permuted_column(index_t i, int bit) {
  for (; bit > 0; --bit) {
    const index_t x = i & 1, y = i >> 1 & 1, z = i >> 2 & 1;
    i = (i & ~index_t(7)) | y | (x ^ z) << 1 | (y ^ z) << 2;
  }
  return i;
}

// The projection of bit `bit` of hash `hash`, and the size of the terms it sums.
inline double projection(Family family, const float* p, index_t columns, const float* x, index_t d,
                         int n_bits, index_t hash, int bit, double* size) {
  double sum = 0, norm = 0;
  if (family == Family::hyperplane) {
    for (index_t c = 0; c < d; ++c) {
      sum += double(p[(hash * n_bits + bit) * d + c]) * x[c];
      norm += std::fabs(double(p[(hash * n_bits + bit) * d + c]) * x[c]);
    }
    *size = norm;
    return sum;
  }
  std::vector<double> z(columns, 0.0);
  for (index_t c = 0; c < d; ++c) z[c] = x[c];
  rotate(z, p);
  transform(z);
  rotate(z, p + columns);
  transform(z);
  rotate(z, p + 2 * columns);
  const float* signs = p + (3 + hash / columns * n_bits + bit) * columns;
  std::vector<double> permuted(columns);
  for (index_t i = 0; i < columns; ++i) {
    const index_t c = permuted_column(i, bit);
    permuted[i] = z[c] * signs[c];
    norm += std::fabs(permuted[i]);
  }
  transform(permuted);
  *size = norm;
  return permuted[hash % columns];
}

#pragma once
// Codes of the kernels against the CPU's.
#include "../../cpp/tests/projections.hpp"
#include "check.hpp"
#include "lshkit/cuda/attention.hpp"
#include "lshkit/cuda/elements.cuh"

inline HashFunctions functions_of(const Parameters& p, Family family, int n_bits, index_t n_hashes,
                                  index_t heads) {
  HashFunctions f;
  f.family = family;
  f.parameters = p.numbers.data();
  f.head_stride = index_t(p.numbers.size()) / heads;
  f.columns = p.columns;
  f.n_bits = n_bits;
  f.n_hashes = n_hashes;
  return f;
}
inline std::uint32_t code_at(const std::vector<std::uint8_t>& codes, int bytes, index_t i) {
  return bytes == 1 ? codes[i] : std::uint32_t(codes[2 * i] | codes[2 * i + 1] << 8);
}

// Bits may differ where the projection is within rounding of zero, and nowhere else.
inline void check_hash(Family family, index_t n, index_t d, int n_bits, index_t n_hashes,
                       Element element = Element::float32, index_t gap = 0, index_t offset = 0) {
  const index_t heads = 2;
  const Parameters p = family == Family::hyperplane ? hyperplane(d, n_bits, n_hashes, heads, 3)
                                                    : hadamard(d, n_bits, n_hashes, heads, 3);
  const HashFunctions f = functions_of(p, family, n_bits, n_hashes, heads);
  // Rows with a gap between them, from an offset; x is what they hold.
  const index_t row = d + gap, bytes_of = element_bytes(element);
  std::vector<float> x = normal(heads * n * d, 1);
  if (element != Element::float16)  // rows whose projections are beyond float32, or subnormal
    for (index_t i = 3; i < heads * n; i += 3)
      for (index_t c = 0; c < d; ++c) x[i * d + c] = std::ldexp(x[i * d + c], i % 2 ? 124 : -120);
  if (n > 1) x[d] = std::nanf("");
  if (n > 2)
    for (index_t c = 0; c < d; ++c) x[2 * d + c] = 0;
  std::vector<unsigned char> stored((offset + heads * n * row) * bytes_of, 0xff);
  for (index_t i = 0; i < heads * n; ++i)
    for (index_t c = 0; c < d; ++c) {
      const index_t at = offset + i * row + c;
      cuda::store_element<float>(stored.data(), at, element, x[i * d + c]);
      x[i * d + c] = cuda::load_element<float>(stored.data(), at, element);
    }
  const int bytes = hash_code_bytes(n_bits);
  std::vector<std::uint8_t> wanted(heads * n * n_hashes * bytes, 0xab), codes(wanted);
  const Input<float> rows(stored.data() + offset * bytes_of, 0, n * row, row, element);
  hash(f, rows, 1, heads, n, d, wanted.data(), 1);
  cuda::hash(cuda::Queue{}, f, rows, 1, heads, n, d, codes.data());
  index_t differ = 0;
  for (index_t i = 0; i < heads * n * n_hashes; ++i) {
    const std::uint32_t other = code_at(wanted, bytes, i) ^ code_at(codes, bytes, i);
    for (int bit = 0; other >> bit; ++bit) {
      if (!(other >> bit & 1)) continue;
      const index_t row = i / n_hashes, head = row / n;
      double size;
      const double z = projection(family, f.parameters + head * f.head_stride, f.columns,
                                  x.data() + row * d, d, n_bits, i % n_hashes, bit, &size);
      CHECK(std::fabs(z) <= 1e-6 * size);
      ++differ;
    }
  }
  CHECK(differ <= heads * n * n_hashes / 100);
}

#pragma once
// Rows of 32-bit or 16-bit floats, for the kernels and for the CPU's functions.
#include "check.hpp"
#include "lshkit/cuda/elements.cuh"

using namespace lshkit;

// Elements of some kind, and what a CPU function reads of them: the same bytes.
struct Bytes {
  std::vector<unsigned char> bytes;
  Element element;
  Bytes(const std::vector<float>& x, Element kind) : element(kind) {
    bytes.resize(x.size() * element_bytes(kind));
    for (std::size_t i = 0; i < x.size(); ++i)
      cuda::store_element<float>(bytes.data(), index_t(i), kind, x[i]);
  }
  float at(index_t i) const { return cuda::load_element<float>(bytes.data(), i, element); }
  Input<float> input(index_t heads, index_t rows, index_t columns) const {
    return {bytes.data(), heads * rows * columns, rows * columns, columns, element};
  }
  Output<float> output(index_t heads, index_t rows, index_t columns) {
    return {bytes.data(), heads * rows * columns, rows * columns, columns, element};
  }
  std::vector<float> floats() const {
    std::vector<float> x(size());
    for (index_t i = 0; i < size(); ++i) x[i] = at(i);
    return x;
  }
  index_t size() const { return index_t(bytes.size()) / element_bytes(element); }
};

inline void check_close(const Bytes& got, const Bytes& wanted, double tolerance) {
  double square = 0;
  index_t finite = 0;
  for (index_t i = 0; i < wanted.size(); ++i)
    if (std::isfinite(wanted.at(i))) {
      square += double(wanted.at(i)) * wanted.at(i);
      ++finite;
    }
  const double size = finite ? std::sqrt(square / double(finite)) : 0;
  for (index_t i = 0; i < wanted.size(); ++i)
    CHECK_CLOSE(got.at(i), wanted.at(i), tolerance, tolerance * size);
}

#pragma once
// Soft codes: a row belongs to the n_probes most likely buckets of a hash, with weights that are
// differentiable in the row. With z the projections of the row's unit vector at unit variance
// (hyperplane: plane . x / |x|; hadamard: the rotation of hash.hpp divided by D), the own code has
// bit b where z_b > 0, and probe a = 0 .. n_probes - 1 is that code with the k-th selected bit
// flipped wherever bit k of a is set. Selected are the ceil(log2 n_probes) bits of the smallest
// |z|, their margins, ascending. The weights are the softmax over the probes of
// -2 sharpness (sum of the flipped margins): of sum_b log sigmoid(2 sharpness z_b bit_b), the
// logarithm of a bucket's likelihood.
#include <cstring>

#include "lshkit/hash.hpp"

namespace lshkit {

constexpr int selected_bits(index_t n_probes) {
  int bits = 0;
  while ((index_t{1} << bits) < n_probes) ++bits;
  return bits;
}

// The 4 lowest bits of a margin hold the number of its bit, those above a float without them, which
// stands for the middle of what they leave open: 20 significant bits. Zero stands for itself.
constexpr std::uint32_t kBitOfMargin = 15;

inline int bit_of(float margin) {
  std::uint32_t word;
  std::memcpy(&word, &margin, sizeof(word));
  return int(word & kBitOfMargin);
}
inline float without_bit(float margin) {
  std::uint32_t word;
  std::memcpy(&word, &margin, sizeof(word));
  const bool zero = (word & 0x7fffffff) <= kBitOfMargin;
  word = (word & ~kBitOfMargin) | (zero ? 0 : 8);
  std::memcpy(&margin, &word, sizeof(margin));
  return margin;
}

// What the probes and their gradient are made from; the probes themselves need not be kept.
// Contiguous: codes (batch, heads, rows, n_hashes), margins the same with a last dimension
// n_selected = selected_bits(n_probes).
struct SoftCodes {
  const void* codes = nullptr;
  int bytes = 1;  // 1 or 2 a code
  const float* margins = nullptr;

  SoftCodes matrix(index_t flat_head, index_t rows, index_t n_hashes, int n_selected) const {
    const index_t first = flat_head * rows * n_hashes;
    return {static_cast<const char*>(codes) + first * bytes, bytes, margins + first * n_selected};
  }
  // From a row of all heads' rows in turn.
  SoftCodes rows(index_t row, index_t n_hashes, int n_selected) const {
    return matrix(row, 1, n_hashes, n_selected);
  }
};

// Writes codes (uint8 for n_bits <= 8, else uint16) and margins; n_probes: 1 to 2^n_bits. A row of
// zeros has code 0 and margins 0, a row with a NaN or infinity margins of NaN. Returns true when
// every row is finite.
bool soft_hash(const HashFunctions& functions, Input<float> x, index_t batch, index_t heads,
               index_t rows, index_t n_features, index_t n_probes, void* codes, float* margins,
               int threads);

// The probes of every row and hash, contiguous (batch, heads, rows, n_hashes, n_probes): codes as
// wide as the codes they come from, and weights. sharpness: one number, or heads of them with
// sharpness_stride 1.
void soft_probes(SoftCodes soft, index_t batch, index_t heads, index_t rows, index_t n_hashes,
                 index_t n_probes, const float* sharpness, index_t sharpness_stride,
                 void* probe_codes, float* weights, int threads);

// From the gradient of the weights to those of x, of the sharpness and, for hyperplanes and where
// not null, of the parameters (every set of them: (1 or heads, n_hashes * n_bits, n_features)).
// Exact for the given selection of bits. x of zeros gets 0, x with a NaN or infinity NaN.
struct SoftHashGradients {
  Tensor<float> x;
  float* sharpness;  // (batch, heads): to be summed over what shares one
  float* parameters;
};
void soft_hash_backward(const HashFunctions& functions, Tensor<const float> x, index_t batch,
                        index_t heads, index_t rows, index_t n_features, index_t n_probes,
                        const float* sharpness, index_t sharpness_stride, SoftCodes soft,
                        const float* weights, const float* weight_grads,
                        SoftHashGradients gradients, int threads);

}  // namespace lshkit

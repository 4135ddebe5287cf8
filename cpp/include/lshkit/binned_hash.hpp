#pragma once
// Hash families of the distance: a code is a 32-bit hash of the bins that a row falls in.
#include <cstdint>

#include "lshkit/tensor.hpp"

namespace lshkit {

// Bins of random projections (Datar et al. 2004): of bit b of hash j,
//   bin = floor(sum_i factors[j][b][i] x_i + shifts[j][b]),        factors (n_hashes, n_bits, d).
// Bins of features (random binning, Rahimi and Recht 2007): of feature i and hash j,
//   bin = floor(factors[j][i] x_i + shifts[j][i]),                 factors (n_hashes, d).
// code = mix(sum of (bin mod 2^32) * multiplier) in arithmetic modulo 2^64. Over the choice of the
// multipliers different bins have different sums but for a probability of 2^-32. mix is the
// finaliser of MurmurHash3, of which the upper 32 bits are kept.
//
// With a fold, hash j gives (fold[0][j] code + fold[1][j]) >> (64 - fold_bits), 1 to 16 bits:
// different codes share it with probability 2^-fold_bits (Dietzfelbinger 1996).
struct BinnedFunctions {
  const double* factors = nullptr;
  const double* shifts = nullptr;
  const std::uint32_t* multipliers = nullptr;  // like shifts
  index_t n_features = 0;
  index_t n_hashes = 0;
  index_t n_bits = 0;                   // projections of a code; 0: bins of features
  const std::uint64_t* fold = nullptr;  // (2, n_hashes) or none
  int fold_bits = 0;

  // Of a code: 4, or that of the smallest type that holds fold_bits.
  int code_bytes() const { return !fold ? 4 : fold_bits <= 8 ? 1 : 2; }
};

// Rows a stride apart, of float or double; computed in double. codes: (rows, n_hashes).
// False where a row has a NaN or infinity; its codes are undefined.
template <class T>
bool binned_hash(const BinnedFunctions& functions, const T* x, index_t row_stride, index_t rows,
                 void* codes, int threads);

}  // namespace lshkit

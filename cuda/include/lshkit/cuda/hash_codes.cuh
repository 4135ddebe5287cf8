#pragma once
// What is hashed, and where the codes go.
#include "lshkit/cuda/words.cuh"
#include "lshkit/hash.hpp"

namespace lshkit::cuda {

struct Hash {
  Elements x;
  index_t batch = 1, heads = 1, n_rows = 0, n_features = 0;
  const float* parameters = nullptr;
  index_t head_stride = 0, columns = 0, heads_per_set = 1;
  int n_bits = 8;
  index_t n_hashes = 1;
  int code_bytes = 1;
  void* codes = nullptr;  // (batch, heads, n_rows, n_hashes)
  // (batch, heads, n_rows), or null: whether a row is finite and not masked. Not by all kernels.
  std::uint8_t* valid = nullptr;
  const std::uint8_t* mask = nullptr;  // (batch, n_rows), or null
  index_t mask_stride = 0;

  // Of head `flat` of all sequences' heads in turn.
  __device__ const float* parameters_of(index_t flat) const {
    return parameters + flat % heads / heads_per_set * head_stride;
  }
  __device__ index_t offset_of_row(index_t flat, index_t row) const {
    return flat / heads * x.batch + flat % heads * x.head + row * x.row;
  }
  __device__ void store_valid(index_t flat, index_t row, bool finite) const {
    if (!valid) return;
    const bool masked = mask && !mask[flat / heads * mask_stride + row];
    valid[flat * n_rows + row] = finite && !masked;
  }
};

inline Hash hash_of(const HashFunctions& functions, const Input<float>& x, index_t batch,
                    index_t heads, index_t rows, index_t n_features) {
  Hash h;
  h.x = Elements(x);
  h.batch = batch;
  h.heads = heads;
  h.n_rows = rows;
  h.n_features = n_features;
  h.parameters = functions.parameters;
  h.head_stride = functions.head_stride;
  h.columns = functions.columns;
  h.heads_per_set = functions.heads_per_set;
  h.n_bits = functions.n_bits;
  h.n_hashes = functions.n_hashes;
  h.code_bytes = hash_code_bytes(functions.n_bits);
  return h;
}

// A code depends on a row's direction alone, but float32 holds the projections of rows far from 1
// in size badly or not at all. The power of two for a row with this largest number, as on the CPU.
__device__ inline float scale_for(float largest) {
  return largest > 0x1p60f ? 0x1p-100f : largest < 0x1p-60f ? 0x1p100f : 1.0f;
}
// The same for numbers at(i), i < columns, by all lanes of a warp. Passes by NaN.
template <class At>
__device__ inline float scale_by_warp(index_t columns, const At& at) {
  float largest = 0;
  for (index_t i = lane_index(); i < columns; i += kWarp) largest = fmaxf(largest, fabsf(at(i)));
  for (int step = kWarp / 2; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
  return scale_for(largest);
}

__device__ inline void store_code(const Hash& h, index_t flat, index_t row, index_t hash,
                                  std::uint32_t code) {
  const index_t at = (flat * h.n_rows + row) * h.n_hashes + hash;
  if (h.code_bytes == 1)
    static_cast<std::uint8_t*>(h.codes)[at] = std::uint8_t(code);
  else
    static_cast<std::uint16_t*>(h.codes)[at] = std::uint16_t(code);
}

// Codes of Count hashes in a row, as far as there are so many; 16 bytes at a time where these are
// aligned.
template <int Count>
__device__ __forceinline__ void store_codes(const Hash& h, index_t flat, index_t row, index_t hash,
                                            const std::uint32_t* code) {
  const index_t at = (flat * h.n_rows + row) * h.n_hashes + hash;
  if (Count % 16 == 0 && hash + Count <= h.n_hashes) {
    if (h.code_bytes == 1) {
      std::uint8_t* const to = static_cast<std::uint8_t*>(h.codes) + at;
      if (is_aligned(to, 16)) {
        LSHKIT_UNROLL
        for (int j = 0; j < Count; j += 16) {
          Quad four;
          LSHKIT_UNROLL
          for (int k = 0; k < 4; ++k) {
            const std::uint32_t* const c = code + j + 4 * k;
            four.word[k] = select_bytes(select_bytes(c[0], c[1], 0x0040),
                                        select_bytes(c[2], c[3], 0x0040), 0x5410);
          }
          store_quad(to + j, four);
        }
        return;
      }
    } else {
      std::uint16_t* const to = static_cast<std::uint16_t*>(h.codes) + at;
      if (is_aligned(to, 16)) {
        LSHKIT_UNROLL
        for (int j = 0; j < Count; j += 8) {
          Quad four;
          LSHKIT_UNROLL
          for (int k = 0; k < 4; ++k)
            four.word[k] = select_bytes(code[j + 2 * k], code[j + 2 * k + 1], 0x5410);
          store_quad(to + j, four);
        }
        return;
      }
    }
  }
  LSHKIT_UNROLL
  for (int j = 0; j < Count; ++j)
    if (hash + j < h.n_hashes) store_code(h, flat, row, hash + j, code[j]);
}

}  // namespace lshkit::cuda

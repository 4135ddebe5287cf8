#pragma once
// Angular hashing with the arrays of lshkit/hash.hpp. Codes differ from the CPU's only where a
// projection is within rounding of zero.
//
// Fast Hadamard: in registers up to 2048 columns (hash_registers.cuh); beyond, a block for a token,
// in shared memory.
#include "lshkit/cuda/hash_planes.cuh"
#include "lshkit/cuda/hash_registers.cuh"
#include "lshkit/hash.hpp"

namespace lshkit::cuda {

// In shared memory, by all threads of the block: (columns) numbers.
__device__ inline void transform_shared(float* z, index_t columns) {
  for (index_t half = 1; half < columns; half *= 2) {
    __syncthreads();
    for (index_t k = thread_index(); k < columns / 2; k += kHashThreads) {
      const index_t i = k / half * 2 * half + k % half;
      const float a = z[i], b = z[i + half];
      z[i] = a + b;
      z[i + half] = a - b;
    }
  }
  __syncthreads();
}

// P S z of a bit, by all threads of the block.
__device__ inline void load_rotated(const float* z, const float* signs, index_t columns, int bit,
                                    float* to) {
  for (index_t i = thread_index(); i < columns; i += kHashThreads) {
    const index_t c = rotation_column(i, bit);
    to[i] = z[c] * signs[c];
  }
}

LSHKIT_KERNEL void __launch_bounds__(kHashThreads) hash_shared_kernel(Hash h) {
  LSHKIT_SHARED_MEMORY(memory);
  const index_t columns = h.columns, half = columns / 2;
  float* const z = reinterpret_cast<float*>(memory);
  float* const work = z + columns;
  std::uint32_t* const codes = reinterpret_cast<std::uint32_t*>(work + columns);
  const index_t flat = block_index() / h.n_rows, row = block_index() % h.n_rows;
  const float* const parameters = h.parameters_of(flat);
  const int thread = thread_index();

  const index_t from = h.offset_of_row(flat, row);
  const auto at = [&](index_t i) { return load_element<float>(h.x.data, from + i, h.x.element); };
  const float scale = scale_by_warp(h.n_features, at);
  for (index_t i = thread; i < columns; i += kHashThreads)
    z[i] = i < h.n_features ? at(i) * scale : 0;
  for (int step = 0; step < 3; ++step) {
    __syncthreads();
    const float* const angles = parameters + step * columns;
    for (index_t i = thread; i < half; i += kHashThreads) {
      const float c = angles[i], s = angles[half + i], a = z[i], b = z[half + i];
      z[i] = c * a - s * b;
      z[half + i] = s * a + c * b;
    }
    if (step < 2) transform_shared(z, columns);
  }
  __syncthreads();
  for (index_t hash = 0; hash < h.n_hashes; hash += columns) {
    const index_t used = least(columns, h.n_hashes - hash);
    for (int bit = 0; bit < h.n_bits; ++bit) {
      const float* const signs = parameters + (3 + hash / columns * h.n_bits + bit) * columns;
      load_rotated(z, signs, columns, bit, work);
      transform_shared(work, columns);
      for (index_t j = thread; j < used; j += kHashThreads)  // the same thread for every bit
        codes[j] = (bit == 0 ? 0u : codes[j]) | std::uint32_t(work[j] > 0) << bit;
      __syncthreads();
    }
    for (index_t j = thread; j < used; j += kHashThreads)
      store_code(h, flat, row, hash + j, codes[j]);
  }
}

constexpr index_t kMostRegisterColumns = 2048;
// Whether the kernel also says which rows are valid.
inline bool finds_valid(Family family, const Hash& h) {
  return family == Family::hadamard && h.columns <= kMostRegisterColumns;
}

// Throws where a row with its rotation does not fit into shared memory (8,192 features do on every
// supported GPU). A template, so that its kernels are compiled where it is called and not in every
// file.
template <class Same = void>
void hash(const Queue& queue, Family family, const Hash& h, index_t shared_limit) {
  const index_t heads = h.batch * h.heads;
  if (h.n_rows == 0) return;
  if (family == Family::hyperplane) return hash_planes(queue, h, heads);
  if (h.columns == 64) return hash_registers<1>(queue, h, heads);
  if (h.columns == 128) return hash_registers<2>(queue, h, heads);
  if (h.columns == 256) return hash_registers<4>(queue, h, heads);
  if (h.columns == 512) return hash_registers<8>(queue, h, heads);
  if (h.columns == 1024) return hash_registers<16>(queue, h, heads);
  if (h.columns == kMostRegisterColumns) return hash_registers<32>(queue, h, heads);
  const index_t bytes = 4 * (2 * h.columns + least(h.columns, h.n_hashes));
  if (bytes > shared_limit)
    throw std::runtime_error("lshkit: rows of " + std::to_string(h.n_features) +
                             " features are too long for the hasher \"hadamard\" on this GPU: use "
                             "\"hyperplane\"");
  launch(queue, "hash", hash_shared_kernel, heads * h.n_rows, kHashThreads, std::size_t(bytes), h);
}

}  // namespace lshkit::cuda

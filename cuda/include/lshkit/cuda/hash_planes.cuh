#pragma once
// Hyperplanes: a product of the rows with the normals in tiles of 128 rows and 128 normals, in fp32
// outside the tensor cores, so that codes are those of the CPU but for rounding. A thread has 8
// rows and 8 normals, which make a byte of a row's string of bits; codes are cut from that.
// The bound is the n_features products of a row and bit: of 77 instructions a column 64 are
// products (counted in the machine code for sm_90), with 4 loads of 16 bytes from shared memory.
#include "lshkit/cuda/hash_codes.cuh"

namespace lshkit::cuda {

constexpr int kPlaneThreads = 256, kPlaneTile = 128, kPlaneDepth = 64, kPlaneStep = kPlaneTile + 4;
constexpr int kPlaneBytes = 128;  // of the string of bits of a row: what one pass over it makes

constexpr index_t hash_planes_bytes() {
  return index_t(sizeof(float)) * (2 * kPlaneDepth * kPlaneStep + kPlaneTile) +
         kPlaneTile * (kPlaneBytes + 4);
}

// Columns of kPlaneTile rows to (kPlaneDepth, kPlaneStep), zeros where there are none. eight(row,
// column, x) loads eight columns of a row, one(row, column) a single one. scales: of the rows, or
// null.
template <class Eight, class One>
__device__ __forceinline__ void stage_columns(index_t rows, index_t columns, bool by_eights,
                                              float* to, const float* scales, const Eight& eight,
                                              const One& one) {
#ifdef __CUDACC__
#pragma unroll 1  // no register is left for two at a time
#endif
  for (int i = thread_index(); i < kPlaneTile * (kPlaneDepth / 8); i += kPlaneThreads) {
    const int row = i % kPlaneTile, column = i / kPlaneTile * 8;
    float x[8];
    if (by_eights && row < rows && column + 8 <= columns) {
      eight(row, column, x);
    } else {
      LSHKIT_UNROLL
      for (int k = 0; k < 8; ++k)
        x[k] = row < rows && column + k < columns ? one(row, column + k) : 0.0f;
    }
    const float scale = scales ? scales[row] : 1;
    LSHKIT_UNROLL
    for (int k = 0; k < 8; ++k) to[(column + k) * kPlaneStep + row] = x[k] * scale;
  }
}

LSHKIT_KERNEL void __launch_bounds__(kPlaneThreads, 2) hash_planes_kernel(Hash h, bool eights) {
  LSHKIT_SHARED_MEMORY(memory);
  float* const x = reinterpret_cast<float*>(memory);  // (kPlaneDepth, kPlaneStep)
  float* const normals = x + kPlaneDepth * kPlaneStep;
  float* const scales = normals + kPlaneDepth * kPlaneStep;  // of rows
  // (kPlaneTile, kPlaneBytes), four bytes apart
  std::uint8_t* const bits = reinterpret_cast<std::uint8_t*>(scales + kPlaneTile);
  const index_t d = h.n_features, tiles = ceil_div(h.n_rows, kPlaneTile);
  const index_t flat = block_index() / tiles, first = block_index() % tiles * kPlaneTile;
  const int count = int(least(kPlaneTile, h.n_rows - first));
  const float* const parameters = h.parameters_of(flat);
  const bool normals_by_fours = d % 4 == 0 && is_aligned(parameters, 16);
  // Rows 4 r to 4 r + 3 and 64 more, normals 8 p to 8 p + 7: a quarter of a warp has one p.
  const int r = warp_index() % 2 * 8 + lane_index() % 8;
  const int p = warp_index() / 2 * 4 + lane_index() / 8;

  for (index_t row = warp_index(); row < count; row += kPlaneThreads / kWarp) {
    const index_t from = h.offset_of_row(flat, first + row);
    const float scale = scale_by_warp(
        d, [&](index_t i) { return load_element<float>(h.x.data, from + i, h.x.element); });
    if (lane_index() == 0) scales[row] = scale;
  }
  for (index_t row = count + thread_index(); row < kPlaneTile; row += kPlaneThreads)
    scales[row] = 1;

  const index_t hashes_of_pass = 8 * kPlaneBytes / h.n_bits;
  for (index_t hash = 0; hash < h.n_hashes; hash += hashes_of_pass) {
    const int hashes = int(least(hashes_of_pass, h.n_hashes - hash));
    const int planes = hashes * h.n_bits;  // in 32 bits: registers are short
    const float* const from = parameters + hash * h.n_bits * d;
    for (int plane = 0; plane < planes; plane += kPlaneTile) {
      float sum[8][8] = {};
      for (index_t k = 0; k < d; k += kPlaneDepth) {
        __syncthreads();
        if (d > kPlaneDepth || (hash == 0 && plane == 0))
          stage_columns(
              count, d - k, eights, x, scales,
              [&](int row, int column, float* to) {
                load_eight(h.x.data, h.offset_of_row(flat, first + row) + k + column, h.x.element,
                           to);
              },
              [&](int row, int column) {
                return load_element<float>(
                    h.x.data, h.offset_of_row(flat, first + row) + k + column, h.x.element);
              });
        stage_columns(
            planes - plane, d - k, normals_by_fours, normals, nullptr,
            [&](int row, int column, float* to) {
              load_eight(from, index_t(plane + row) * d + k + column, Element::float32, to);
            },
            [&](int row, int column) { return from[index_t(plane + row) * d + k + column]; });
        __syncthreads();
        const int depth = int(least(kPlaneDepth, d - k));
        for (int i = 0; i < depth; ++i) {
          const float* const xs = x + i * kPlaneStep + 4 * r;
          const float* const ns = normals + i * kPlaneStep + 8 * p;
          const Quad a[2] = {load_quad(xs), load_quad(xs + 64)},
                     b[2] = {load_quad(ns), load_quad(ns + 4)};
          LSHKIT_UNROLL
          for (int row = 0; row < 8; ++row) LSHKIT_UNROLL
          for (int bit = 0; bit < 8; ++bit)
            sum[row][bit] +=
                float_of_bits(a[row / 4].word[row % 4]) * float_of_bits(b[bit / 4].word[bit % 4]);
        }
      }
      LSHKIT_UNROLL
      for (int row = 0; row < 8; ++row) {
        std::uint32_t byte = 0;
        LSHKIT_UNROLL
        for (int bit = 0; bit < 8; ++bit) byte |= std::uint32_t(sum[row][bit] > 0) << bit;
        bits[(row / 4 * 64 + 4 * r + row % 4) * (kPlaneBytes + 4) + plane / 8 + p] =
            std::uint8_t(byte);
      }
    }
    __syncthreads();
    for (int i = thread_index(); i < count * hashes; i += kPlaneThreads) {
      const int row = i / hashes, at = i % hashes * h.n_bits;
      const std::uint8_t* const string = bits + row * (kPlaneBytes + 4) + at / 8;
      const std::uint32_t word =
          string[0] | std::uint32_t(string[1]) << 8 | std::uint32_t(string[2]) << 16;
      store_code(h, flat, first + row, hash + i % hashes, word >> at % 8 & ((1u << h.n_bits) - 1));
    }
  }
}

inline void hash_planes(const Queue& queue, const Hash& h, index_t heads) {
  launch(queue, "hash", hash_planes_kernel, heads * ceil_div(h.n_rows, kPlaneTile), kPlaneThreads,
         std::size_t(hash_planes_bytes()), h, rows_of_eights(h.x, 8));
}

}  // namespace lshkit::cuda

#pragma once
// Fast Hadamard rotations of 64 to 2048 columns: a token in the registers of Lanes lanes, 64
// columns each. Lane l of a token has the columns l, l + Lanes, ...: the high bits of a column tell
// registers apart, so that the plane rotations and most stages of a transform meet in one lane, the
// low bits lanes: there a stage is a shuffle and a product.
//
// The bound is instructions. Counted in the machine code for sm_90, a token of 64 columns in
// bfloat16, 8 bits and 32 hashes: 3,930, of which 2,944 are additions and products. 280 a bit (160
// additions, 64 products with signs, 32 shifts that take in the sign of a sum each, 16 loads of
// four signs, 4 moves), 1,260 for what the bits share, 450 to load, stage and store. As products of
// matrices on the tensor cores, in three parts of bfloat16 each so that codes stay those of fp32,
// the same would be 49,152 multiplications a token: no less time.
//
// More columns take Lanes times as many and log2(Lanes) shuffles of each register a transform, but
// of the sums that no code needs none: of 64 columns a lane Keep are left for the last stages.
//
// P, which permutes the columns of a bit, permutes the rows of H as well: which row of bit b
// belongs to a hash changes from bit to bit by the same step. So bits go from register to register,
// or, where a row of eight is in another lane, each is taken from its row's code at the end.
#include "lshkit/cuda/hash_codes.cuh"

namespace lshkit::cuda {

constexpr int kHashThreads = 128;
constexpr int kRegisterColumns = 64, kRegisterStep = kRegisterColumns + 4;

// The transform of 64 registers, of which the first Out outputs are computed. Stages are templates:
// a loop over them that the compiler left rolled would put the registers into memory.
template <int Out, int Half = kRegisterColumns / 2>
__device__ __forceinline__ void transform_registers(float* z) {
  if constexpr (Half >= Out) {
    LSHKIT_UNROLL
    for (int i = 0; i < Half; ++i) z[i] += z[i + Half];
  } else {
    LSHKIT_UNROLL
    for (int i = 0; i < Out; ++i)
      if (!(i & Half)) {
        const float a = z[i], b = z[i + Half];
        z[i] = a + b;
        z[i + Half] = a - b;
      }
  }
  if constexpr (Half > 1) transform_registers<Out, Half / 2>(z);
}
// Of the first Out registers of all lanes of a token.
template <int Lanes, int Out>
__device__ __forceinline__ void transform_lanes(float* z) {
  if constexpr (Lanes > 1) {
    LSHKIT_UNROLL
    for (int step = Lanes / 2; step > 0; step /= 2) {
      const float sign = lane_index() & step ? -1.0f : 1.0f;
      LSHKIT_UNROLL
      for (int i = 0; i < Out; ++i) z[i] = __shfl_xor_sync(kAllLanes, z[i], step) + sign * z[i];
    }
  }
}
__device__ __forceinline__ void rotate_registers(float* z, const float* angles) {
  constexpr int half = kRegisterColumns / 2;
  LSHKIT_UNROLL
  for (int i = 0; i < half; ++i) {
    const float c = angles[i], s = angles[half + i], a = z[i], b = z[half + i];
    z[i] = c * a - s * b;
    z[half + i] = s * a + c * b;
  }
}

// x[i] = next(i, x[rotation_row(i, 1)]) for all i, along the cycle that seven of eight make.
template <class T, int Count, class Next>
__device__ __forceinline__ void to_next_rows(T (&x)[Count], const Next& next) {
  static_assert(Count % 8 == 0, "");
  LSHKIT_UNROLL
  for (int eight = 0; eight < Count; eight += 8) {
    x[eight] = next(eight, x[eight]);
    const T last = x[eight + 1];
    int i = 1;
    LSHKIT_UNROLL
    for (int step = 0; step < 6; ++step) {
      const int from = int(rotation_row(i, 1));
      x[eight + i] = next(eight + i, x[eight + from]);
      i = from;
    }
    x[eight + i] = next(eight + i, last);
  }
}

// The 64 columns of a row from `from`, zeros beyond n_features. 16 bytes at a time where these are
// aligned.
template <class Raw, class Convert>
__device__ __forceinline__ void load_columns(const Hash& h, index_t from, float* z,
                                             const Convert& convert) {
  constexpr int kEach = 16 / int(sizeof(Raw));
  const Raw* const row = static_cast<const Raw*>(h.x.data) + from;
  if (h.n_features == kRegisterColumns && is_aligned(row, 16)) {
    LSHKIT_UNROLL
    for (int i = 0; i < kRegisterColumns; i += kEach) {
      const Quad four = load_quad(row + i);
      LSHKIT_UNROLL
      for (int k = 0; k < kEach; ++k)
        z[i + k] = convert(Raw(sizeof(Raw) == 4 ? four.word[k] : four.word[k / 2] >> k % 2 * 16));
    }
    return;
  }
  LSHKIT_UNROLL
  for (int i = 0; i < kRegisterColumns; ++i) z[i] = i < h.n_features ? convert(row[i]) : 0.0f;
}
__device__ __forceinline__ void load_token(const Hash& h, index_t from, float* z) {
  if (h.x.element == Element::bfloat16)
    load_columns<std::uint16_t>(h, from, z, [](std::uint16_t x) { return from_bfloat16(x); });
  else if (h.x.element == Element::float16)
    load_columns<std::uint16_t>(h, from, z, [](std::uint16_t x) { return from_float16(x); });
  else
    load_columns<std::uint32_t>(h, from, z, [](std::uint32_t x) { return float_of_bits(x); });
}

// The tokens of a warp to where its lanes want their columns: (lanes, kRegisterStep).
template <int Lanes>
__device__ inline void stage_tokens(const Hash& h, index_t flat, index_t first, index_t count,
                                    float* tile) {
  constexpr int D = Lanes * kRegisterColumns;
  const auto stage = [&](const auto& load) {
    for (int token = 0; token < kWarp / Lanes; ++token) {
      const bool here = token < count;
      const index_t from = here ? h.offset_of_row(flat, first + token) : 0;
      LSHKIT_UNROLL
      for (int i = 0; i < D / kWarp; ++i) {
        const int column = i * kWarp + lane_index();
        tile[(token * Lanes + column % Lanes) * kRegisterStep + column / Lanes] =
            here && column < h.n_features ? load(from + column) : 0.0f;
      }
    }
  };
  const void* const data = h.x.data;
  if (h.x.element == Element::bfloat16)
    stage([&](index_t i) { return from_bfloat16(static_cast<const std::uint16_t*>(data)[i]); });
  else if (h.x.element == Element::float16)
    stage([&](index_t i) { return from_float16(static_cast<const std::uint16_t*>(data)[i]); });
  else
    stage([&](index_t i) { return static_cast<const float*>(data)[i]; });
  __syncwarp();
}

// Rows of `numbers`, (Lanes, kRegisterStep) each: of columns as their lanes have them.
template <int Lanes>
__device__ inline void stage_numbers(const float* from, int rows, float sign, float* numbers) {
  constexpr int D = Lanes * kRegisterColumns;
  __syncthreads();
  for (int i = thread_index(); i < rows * D; i += kHashThreads) {
    const int row = i / D, column = i % D;
    numbers[(row * Lanes + column % Lanes) * kRegisterStep + column / Lanes] = sign * from[i];
  }
  __syncthreads();
}

__host__ __device__ constexpr int hash_rounds_of(int lanes) {
  return lanes <= 4 ? 16 : lanes == 8 ? 8 : 4;
}  // bits

template <int Lanes>
constexpr index_t hash_registers_bytes() {
  return index_t(sizeof(float)) * kRegisterStep *
         (hash_rounds_of(Lanes) * Lanes + (Lanes > 1 ? kHashThreads : 0));
}

// A token at a size that float32 holds well.
template <int Lanes>
__device__ __forceinline__ void scale_token(float* z) {
  float largest = 0;
  LSHKIT_UNROLL
  for (int i = 0; i < kRegisterColumns; ++i) largest = fmaxf(largest, fabsf(z[i]));
  LSHKIT_UNROLL
  for (int step = Lanes / 2; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
  const float scale = scale_for(largest);
  if (scale == 1) return;
  LSHKIT_UNROLL
  for (int i = 0; i < kRegisterColumns; ++i) z[i] *= scale;
}

// The code of a hash from those that rows have: a bit b is in row rotation_row(hash, b).
__device__ __forceinline__ std::uint32_t code_of_rows(const std::uint16_t* rows, int hash) {
  std::uint32_t code = 0;
  LSHKIT_UNROLL
  for (int bit = 0; bit < 7; ++bit)
    code |= rows[rotation_row(hash, bit)] & (0x4081u << bit);  // bits 0, 7 and 14
  return code;
}

// Keep: rows of a rotation that make codes, of those that a lane has; a power of two.
template <int Lanes, int Keep>
__global__ void __launch_bounds__(kHashThreads, Keep* Lanes < 64 ? 3 : 2)
    hash_registers_kernel(Hash h) {
  constexpr int kTokens = kHashThreads / Lanes, kTokensOfWarp = kWarp / Lanes;
  constexpr int kRows = Keep * Lanes;  // of a rotation
  constexpr int kRound = hash_rounds_of(Lanes);
  LSHKIT_SHARED_MEMORY(memory);
  float* const numbers = reinterpret_cast<float*>(memory);  // (kRound, Lanes, kRegisterStep)
  float* const tile = numbers + kRound * Lanes * kRegisterStep +
                      warp_index() * kWarp * kRegisterStep;  // of a warp, where Lanes > 1
  const index_t tiles = ceil_div(h.n_rows, kTokens);
  const index_t flat = block_index() / tiles;
  const index_t first = block_index() % tiles * kTokens + warp_index() * kTokensOfWarp;
  const index_t count = least(kTokensOfWarp, h.n_rows - first);  // of the warp; may be negative
  const float* const parameters = h.parameters_of(flat);
  const int token = lane_index() / Lanes, part = lane_index() % Lanes;
  const bool here = token < count;

  float z[kRegisterColumns];
  if constexpr (Lanes == 1) {
    load_token(h, h.offset_of_row(flat, least(first + token, h.n_rows - 1)), z);
  } else {
    stage_tokens<Lanes>(h, flat, first, count, tile);
    LSHKIT_UNROLL
    for (int i = 0; i < kRegisterColumns; ++i) z[i] = tile[lane_index() * kRegisterStep + i];
  }
  scale_token<Lanes>(z);
  stage_numbers<Lanes>(parameters, 3, 1.0f, numbers);
  const float* const angles = numbers + part * kRegisterStep;
  LSHKIT_UNROLL
  for (int step = 0; step < 3; ++step) {
    rotate_registers(z, angles + step * Lanes * kRegisterStep);
    if (step == 2) break;
    transform_registers<kRegisterColumns>(z);
    transform_lanes<Lanes, kRegisterColumns>(z);
  }
  // A row of zeros, or with a NaN or an infinity, which is everywhere by now: no bit is set.
  // Elsewhere a projection of exactly zero is +0, a sum of what cancels, and its sign says no too.
  const float some = (std::fabs(z[0]) + std::fabs(z[1])) + (std::fabs(z[2]) + std::fabs(z[3]));
  const std::uint32_t any = some > 0 ? 0xffffffffu : 0u;
  if (here && part == 0) h.store_valid(flat, first + token, is_finite(some));

  for (index_t hash = 0; hash < h.n_hashes; hash += Lanes * kRegisterColumns) {
    std::uint32_t code[Keep] = {};
    const float* const signs =
        parameters + (3 + hash / kRegisterColumns / Lanes * h.n_bits) * Lanes * kRegisterColumns;
    // From the last bit to the first, each shifted in.
    for (int end = h.n_bits; end > 0; end -= kRound) {
      const int begin = end > kRound ? end - kRound : 0;
      stage_numbers<Lanes>(signs + begin * Lanes * kRegisterColumns, end - begin, -1.0f, numbers);
      for (int bit = end - begin - 1; bit >= 0; --bit) {
        const float* const sign = numbers + (bit * Lanes + part) * kRegisterStep;
        float w[kRegisterColumns];
        LSHKIT_UNROLL
        for (int i = 0; i < kRegisterColumns; ++i) w[i] = z[i] * sign[i];
        transform_registers<Keep>(w);
        transform_lanes<Lanes, Keep>(w);
        const auto next = [&](int j, std::uint32_t bits) {
          return shift_in_sign(bits, w[j]);  // of -projection
        };
        if constexpr (Lanes == 1) {
          to_next_rows(code, next);
        } else {
          LSHKIT_UNROLL
          for (int j = 0; j < Keep; ++j) code[j] = next(j, code[j]);
        }
      }
    }
    LSHKIT_UNROLL
    for (int j = 0; j < Keep; ++j) code[j] &= any;
    if constexpr (Lanes == 1) {
      if (here) store_codes<Keep>(h, flat, first + token, hash, code);
    } else {
      // Through the tile, as (tokens, kRows) of 16 bits, so that a warp writes rows.
      std::uint16_t* const rows = reinterpret_cast<std::uint16_t*>(tile);
      __syncwarp();
      LSHKIT_UNROLL
      for (int j = 0; j < Keep; ++j)
        rows[token * kRows + j * Lanes + part] = std::uint16_t(code[j]);
      __syncwarp();
      const int used = int(least(kRows, h.n_hashes - hash));
      for (int i = lane_index(); i < kTokensOfWarp * kRows; i += kWarp)
        if (i / kRows < count && i % kRows < used)
          store_code(h, flat, first + i / kRows, hash + i % kRows,
                     code_of_rows(rows + i / kRows * kRows, i % kRows));
    }
  }
}

template <int Lanes>
void hash_registers(const Queue& queue, const Hash& h, index_t heads) {
  void (*kernel)(Hash) = hash_registers_kernel<Lanes, 64>;
  if (h.n_hashes <= 32) kernel = hash_registers_kernel<Lanes, 32 / Lanes>;
  if constexpr (Lanes == 2 || Lanes == 4)
    if (h.n_hashes > 32 && h.n_hashes <= 64) kernel = hash_registers_kernel<Lanes, 64 / Lanes>;
  launch(queue, "hash", kernel, heads * ceil_div(h.n_rows, kHashThreads / Lanes), kHashThreads,
         std::size_t(hash_registers_bytes<Lanes>()), h);
}

}  // namespace lshkit::cuda

#pragma once
// Soft codes with the arrays of lshkit/soft_hash.hpp: a margin has the number of its bit in the 4
// lowest bits, so that the smallest words are the margins of the selected bits. Probes and their
// weights are made of these when they are needed, and the gradient of the weights goes back to the
// margins.
//
// Fast Hadamard with 64 columns and up to 16 probes: a thread holds a token in registers. 16 hashes
// at a time (of more than 4 probes 8), whose rows of a rotation 64 products, 16 additions and a
// transform of 16 bring, 144 operations a bit; 5 more a bit and hash shift in its sign and keep the
// smallest words. The bound is these.
#include "lshkit/cuda/hash.cuh"
#include "lshkit/cuda/margins.cuh"
#include "lshkit/cuda/rows.cuh"

namespace lshkit::cuda {

// Of queries or of keys, as they are hashed.
struct RowNorms {
  float* inverse;
  std::uint8_t* valid;
  RowNorms(Cut& cut, index_t rows)
      : inverse(cut.take<float>(rows)), valid(cut.take<std::uint8_t>(rows)) {}
  void fill(const Queue& queue, const Hash& h, Mask mask = {}) const {
    UnitRows a;
    a.x = h.x;
    a.batch = h.batch;
    a.heads = h.heads;
    a.n_rows = h.n_rows;
    a.columns = h.n_features;
    a.mask = mask.data;
    a.mask_stride = mask.batch_stride;
    a.inverse = inverse;
    a.valid = valid;
    unit_rows(queue, a);
  }
};

// Of a thread, as registers allow.
template <int R>
constexpr int kHashesAtOnce = R <= 2 ? 16 : 8;
constexpr int kSoftHashChunk = 32;   // of a block
constexpr int kMostInRegisters = 4;  // selected bits

struct SoftHash {
  Hash hash;                       // without codes: batch, heads, rows and functions
  const float* inverse = nullptr;  // norms, by row of all heads in turn
  int n_selected = 0;
  float* margins = nullptr;

  __device__ index_t selected_at(index_t flat, index_t row, index_t i) const {
    return ((flat * hash.n_rows + row) * hash.n_hashes + i) * n_selected;
  }
};

// Signs of n_bits rotations by 64 columns for the hashes from `first` of a group on, times `sign`,
// in shared memory: row `first` + j of H is row j times the signs of row `first`, a multiple of 8.
// Permuted: those of the elements of P S z, in the order of H's columns; else those of z's.
template <bool Permuted>
__device__ inline void load_signs(const Hash& h, const float* parameters, index_t first, float sign,
                                  float* to) {
  constexpr int D = kRegisterColumns;
  const float* const signs = parameters + (3 + first / D * h.n_bits) * D;
  const unsigned of_first = unsigned(first % D);
  for (int i = thread_index(); i < h.n_bits * D; i += kHashThreads) {
    const float own = sign * signs[Permuted ? rotation_column(i, i / D) : i];
    to[i] = __popc(of_first & unsigned(i % D)) % 2 ? -own : own;
  }
}

// From one token's words in shared memory to the next's: whole fours of words, of an odd number of
// such, for banks of their own.
__host__ __device__ constexpr int word_stride(int words) { return ((words + 3) / 4 | 1) * 4; }

// What a warp has to say of its 32 tokens, a row of words each in shared memory, goes to rows that
// are `stride` bytes apart: 16 bytes at a time where that is aligned, so that sectors are written
// whole, else an element.
template <class Element, int Words>
__device__ inline void store_rows_of_words(std::uint32_t* stage,
                                           const std::uint32_t (&words)[Words], int rows, void* to,
                                           index_t stride, int row_bytes) {
  constexpr int kStride = word_stride(Words);
  __syncwarp();
  LSHKIT_UNROLL
  for (int w = 0; w < Words; ++w) stage[lane_index() * kStride + w] = words[w];
  __syncwarp();
  auto* const bytes = static_cast<unsigned char*>(to);
  const auto* const from = reinterpret_cast<const unsigned char*>(stage);
  if (row_bytes % 16 == 0 && stride % 16 == 0 && is_aligned(to, 16)) {
    const int pieces = row_bytes / 16;
    for (int i = lane_index(); i < rows * pieces; i += kWarp) {
      const int row = i / pieces, piece = i - row * pieces;
      store_quad(bytes + row * stride + piece * 16,
                 load_quad(from + row * kStride * 4 + piece * 16));
    }
    return;
  }
  const int elements = row_bytes / int(sizeof(Element));
  for (int i = lane_index(); i < rows * elements; i += kWarp) {
    const int row = i / elements, e = i - row * elements;
    reinterpret_cast<Element*>(bytes + row * stride)[e] =
        reinterpret_cast<const Element*>(from + row * kStride * 4)[e];
  }
}
// A hash of a token: its code, and the smallest of its margins' words.
template <int R>
struct SoftCode {
  std::uint32_t code = 0, margins[R + 1];
};
// Those of some hashes of a token: codes, then margins.
template <int R>
__device__ inline void store_soft_codes(const SoftHash& s, std::uint32_t* stage, index_t flat,
                                        index_t row, int rows, index_t hash,
                                        const SoftCode<R> (&codes)[kHashesAtOnce<R>]) {
  constexpr int kHashes = kHashesAtOnce<R>;
  const Hash& h = s.hash;
  const int used = int(least(kHashes, h.n_hashes - hash));
  const index_t at = (flat * h.n_rows + row) * h.n_hashes + hash;
  auto* const to_codes = static_cast<unsigned char*>(h.codes) + at * h.code_bytes;
  if (h.code_bytes == 1) {
    std::uint32_t words[kHashes / 4] = {};
    LSHKIT_UNROLL
    for (int j = 0; j < kHashes; ++j) words[j / 4] |= codes[j].code << (j % 4 * 8);
    store_rows_of_words<std::uint8_t>(stage, words, rows, to_codes, h.n_hashes, used);
  } else {
    std::uint32_t words[kHashes / 2] = {};
    LSHKIT_UNROLL
    for (int j = 0; j < kHashes; ++j) words[j / 2] |= codes[j].code << (j % 2 * 16);
    store_rows_of_words<std::uint16_t>(stage, words, rows, to_codes, h.n_hashes * 2, used * 2);
  }
  if constexpr (R > 0) {
    std::uint32_t words[kHashes * R];
    LSHKIT_UNROLL
    for (int j = 0; j < kHashes; ++j) LSHKIT_UNROLL
    for (int k = 0; k < R; ++k) words[j * R + k] = codes[j].margins[k];
    store_rows_of_words<float>(stage, words, rows, s.margins + at * R,
                               h.n_hashes * R * index_t(sizeof(float)),
                               used * R * int(sizeof(float)));
  }
}
// Words of a token at most.
constexpr int kStageWords = word_stride(32);

template <int R>
__global__ void __launch_bounds__(kHashThreads, 3) soft_hash_registers_kernel(SoftHash s) {
  constexpr int D = kRegisterColumns, kHashes = kHashesAtOnce<R>;
  static_assert(kHashes * (R > 1 ? R : 1) <= 32, "");
  LSHKIT_SHARED_MEMORY(memory);
  const Hash& h = s.hash;
  std::uint32_t* const stage = reinterpret_cast<std::uint32_t*>(memory);  // (threads, kStageWords)
  float* const numbers =
      reinterpret_cast<float*>(stage + kHashThreads * kStageWords);  // angles, then signs
  const index_t tiles = ceil_div(h.n_rows, kHashThreads);
  const index_t flat = block_index() / tiles, first = block_index() % tiles * kHashThreads;
  const index_t count = least(kHashThreads, h.n_rows - first);
  const float* const parameters = h.parameters_of(flat);
  const int thread = thread_index();
  const index_t row = least(first + thread, h.n_rows - 1);

  for (int i = thread; i < 3 * D; i += kHashThreads) numbers[i] = parameters[i];
  float z[D];
  load_token(h, h.offset_of_row(flat, row), z);
  const float inverse = s.inverse[flat * h.n_rows + row];
  LSHKIT_UNROLL
  for (int i = 0; i < D; ++i) z[i] = z[i] * inverse * (1.0f / D);
  __syncthreads();
  rotate_registers(z, numbers);
  transform_registers<D>(z);
  rotate_registers(z, numbers + D);
  transform_registers<D>(z);
  rotate_registers(z, numbers + 2 * D);
  // A row of zeros, or with a NaN, which is everywhere by now: no bit is set.
  const float some = (std::fabs(z[0]) + std::fabs(z[1])) + (std::fabs(z[2]) + std::fabs(z[3]));
  const std::uint32_t any = some > 0 ? 0xffffffffu : 0u;

  for (index_t hash = 0; hash < h.n_hashes; hash += kHashes) {
    __syncthreads();
    load_signs<false>(h, parameters, hash, -1.0f, numbers);
    __syncthreads();
    SoftCode<R> codes[kHashes];
    LSHKIT_UNROLL
    for (int j = 0; j < kHashes; ++j) LSHKIT_UNROLL
    for (int k = 0; k < R; ++k) codes[j].margins[k] = 0x7fffffffu;
    for (int bit = h.n_bits - 1; bit >= 0; --bit) {
      float w[D];
      LSHKIT_UNROLL
      for (int i = 0; i < D; ++i) w[i] = z[i] * numbers[bit * D + i];
      transform_registers<kHashes>(w);
      to_next_rows(codes, [&](int j, SoftCode<R> own) {
        own.code = shift_in_sign(own.code, w[j]);  // of -projection
        std::uint32_t key = margin_word(w[j], bit);
        LSHKIT_UNROLL
        for (int k = 0; k < R; ++k) {
          const std::uint32_t lower = key < own.margins[k] ? key : own.margins[k];
          key = key < own.margins[k] ? own.margins[k] : key;
          own.margins[k] = lower;
        }
        return own;
      });
    }
    LSHKIT_UNROLL
    for (int j = 0; j < kHashes; ++j) codes[j].code &= any;
    const int first_of_warp = warp_index() * kWarp;
    if (first_of_warp >= count) continue;
    store_soft_codes<R>(s, stage + first_of_warp * kStageWords, flat, first + first_of_warp,
                        int(least(kWarp, count - first_of_warp)), hash, codes);
  }
}

// The first stage of Fast Hadamard on a row in shared memory, by all threads of the block.
__device__ inline void rotate_shared(float* z, index_t columns, const float* angles) {
  const index_t half = columns / 2;
  __syncthreads();
  for (index_t i = thread_index(); i < half; i += kHashThreads) {
    const float c = angles[i], s = angles[half + i], a = z[i], b = z[half + i];
    z[i] = c * a - s * b;
    z[half + i] = s * a + c * b;
  }
}

// A block a row, both families and any sizes: the projections of some hashes in shared memory, then
// each bit's rank among the keys of its code.
LSHKIT_KERNEL void __launch_bounds__(kHashThreads, 1)
    soft_hash_shared_kernel(SoftHash s, bool hyperplanes) {
  LSHKIT_SHARED_MEMORY(memory);
  const Hash& h = s.hash;
  const index_t columns = hyperplanes ? h.n_features : h.columns;
  float* const projections = reinterpret_cast<float*>(memory);  // (n_bits, kSoftHashChunk)
  float* const z = projections + h.n_bits * kSoftHashChunk;
  float* const work = z + columns;
  const index_t flat = block_index() / h.n_rows, row = block_index() % h.n_rows;
  const float* const parameters = h.parameters_of(flat);
  const int thread = thread_index();
  const index_t from = h.offset_of_row(flat, row);
  const float scale = s.inverse[flat * h.n_rows + row] * (hyperplanes ? 1 : 1.0f / float(columns));
  for (index_t i = thread; i < columns; i += kHashThreads)
    z[i] = i < h.n_features ? load_element<float>(h.x.data, from + i, h.x.element) * scale : 0;
  if (!hyperplanes)
    for (int step = 0; step < 3; ++step) {
      rotate_shared(z, columns, parameters + step * columns);
      if (step < 2) transform_shared(z, columns);
    }
  const index_t group = hyperplanes ? h.n_hashes : columns;
  for (index_t hash = 0; hash < h.n_hashes;) {
    const index_t in_group = hash % group;
    const index_t used = least(kSoftHashChunk, least(h.n_hashes - hash, group - in_group));
    __syncthreads();
    for (int bit = 0; bit < h.n_bits && !hyperplanes; ++bit) {
      const float* const signs = parameters + (3 + hash / columns * h.n_bits + bit) * columns;
      load_rotated(z, signs, columns, bit, work);
      transform_shared(work, columns);
      for (index_t j = thread; j < used; j += kHashThreads)
        projections[bit * kSoftHashChunk + j] = work[in_group + j];
      __syncthreads();
    }
    for (index_t p = warp_index(); p < used * h.n_bits && hyperplanes; p += kHashThreads / kWarp) {
      const float* const plane = parameters + (hash * h.n_bits + p) * columns;
      float sum = 0;
      for (index_t i = lane_index(); i < columns; i += kWarp) sum += z[i] * plane[i];
      sum = warp_sum(sum);
      if (lane_index() == 0) projections[p % h.n_bits * kSoftHashChunk + p / h.n_bits] = sum;
    }
    __syncthreads();
    for (index_t j = thread; j < used; j += kHashThreads) {
      std::uint32_t code = 0;
      const index_t at = s.selected_at(flat, row, hash + j);
      for (int bit = 0; bit < h.n_bits; ++bit) {
        const float own = projections[bit * kSoftHashChunk + j];
        const std::uint32_t key = margin_word(own, bit);
        code |= std::uint32_t(own > 0) << bit;
        int rank = 0;
        for (int other = 0; other < h.n_bits; ++other)
          rank += margin_word(projections[other * kSoftHashChunk + j], other) < key;
        if (rank < s.n_selected) s.margins[at + rank] = float_of_bits(key);
      }
      store_code(h, flat, row, hash + j, code);
    }
    hash += used;
  }
}

// Hyperplanes, up to 16 probes: a lane has kPlaneTokens tokens, a warp one hash after the other,
// four of its bits at a time: 8 loads for 16 products.
constexpr int kPlaneTokens = 4, kPlaneBits = 4;
template <int R>
__global__ void __launch_bounds__(kPlaneThreads) soft_hash_planes_kernel(SoftHash s) {
  LSHKIT_SHARED_MEMORY(memory);
  constexpr int kRows = kWarp * kPlaneTokens;
  const Hash& h = s.hash;
  float* const tile = reinterpret_cast<float*>(memory);  // (kRows, an odd number >= n_features)
  const index_t d = h.n_features, stride = d | 1;
  const index_t tiles = ceil_div(h.n_rows, kRows);
  const index_t flat = block_index() / tiles, first = block_index() % tiles * kRows;
  const index_t count = least(kRows, h.n_rows - first);
  const float* const parameters = h.parameters_of(flat);
  for (index_t i = thread_index(); i < kRows * d; i += kPlaneThreads) {
    const index_t row = i / d, column = i % d;
    float x = 0;
    if (row < count)
      x = load_element<float>(h.x.data, h.offset_of_row(flat, first + row) + column, h.x.element) *
          s.inverse[flat * h.n_rows + first + row];
    tile[row * stride + column] = x;
  }
  __syncthreads();
  for (index_t hash = warp_index(); hash < h.n_hashes; hash += kPlaneThreads / kWarp) {
    std::uint32_t codes[kPlaneTokens] = {}, keys[kPlaneTokens][R + 1];
    LSHKIT_UNROLL
    for (int t = 0; t < kPlaneTokens; ++t) LSHKIT_UNROLL
    for (int k = 0; k < R; ++k) keys[t][k] = 0x7fffffffu;
    for (int bit = 0; bit < h.n_bits; bit += kPlaneBits) {
      float sum[kPlaneBits][kPlaneTokens] = {};
      const float* const planes = parameters + (hash * h.n_bits + bit) * d;
      const int bits = int(least(kPlaneBits, h.n_bits - bit));
      for (index_t k = 0; k < d; ++k) {
        float x[kPlaneTokens];
        LSHKIT_UNROLL
        for (int t = 0; t < kPlaneTokens; ++t) x[t] = tile[(lane_index() + t * kWarp) * stride + k];
        LSHKIT_UNROLL
        for (int b = 0; b < kPlaneBits; ++b) {
          const float normal = b < bits ? planes[b * d + k] : 0;
          LSHKIT_UNROLL
          for (int t = 0; t < kPlaneTokens; ++t) sum[b][t] += normal * x[t];
        }
      }
      LSHKIT_UNROLL
      for (int b = 0; b < kPlaneBits; ++b) {
        if (b >= bits) continue;
        LSHKIT_UNROLL
        for (int t = 0; t < kPlaneTokens; ++t) {
          codes[t] |= std::uint32_t(sum[b][t] > 0) << (bit + b);
          std::uint32_t key = margin_word(sum[b][t], bit + b);
          LSHKIT_UNROLL
          for (int k = 0; k < R; ++k) {
            const bool less = key < keys[t][k];
            const std::uint32_t other = less ? keys[t][k] : key;
            keys[t][k] = less ? key : keys[t][k];
            key = other;
          }
        }
      }
    }
    LSHKIT_UNROLL
    for (int t = 0; t < kPlaneTokens; ++t) {
      const index_t row = lane_index() + t * kWarp;
      if (row >= count) continue;
      store_code(h, flat, first + row, hash, codes[t]);
      const index_t at = s.selected_at(flat, first + row, hash);
      LSHKIT_UNROLL
      for (int k = 0; k < R; ++k) s.margins[at + k] = float_of_bits(keys[t][k]);
    }
  }
}

// call(std::integral_constant) of a number from 0 to kMostInRegisters.
template <class Call>
void with_selected(int n_selected, const Call& call) {
  switch (n_selected) {
    case 0:
      return call(std::integral_constant<int, 0>{});
    case 1:
      return call(std::integral_constant<int, 1>{});
    case 2:
      return call(std::integral_constant<int, 2>{});
    case 3:
      return call(std::integral_constant<int, 3>{});
    default:
      return call(std::integral_constant<int, 4>{});
  }
}
// Of `words` for each thread besides angles or signs.
inline std::size_t register_tile_bytes(int words, int n_bits) {
  const int numbers = (n_bits > 3 ? n_bits : 3) * kRegisterColumns;
  return sizeof(float) * std::size_t(kHashThreads * words + numbers);
}
inline void check_soft_row(index_t bytes, index_t shared_limit, index_t n_features) {
  if (bytes > shared_limit)
    throw std::runtime_error("lshkit: rows of " + std::to_string(n_features) +
                             " features are too long for soft codes on this GPU");
}

inline void soft_hash(const Queue& queue, Family family, const SoftHash& s, index_t shared_limit) {
  const Hash& h = s.hash;
  const index_t heads = h.batch * h.heads;
  if (heads * h.n_rows == 0) return;
  const bool hyperplanes = family == Family::hyperplane;
  if (s.n_selected <= kMostInRegisters && !hyperplanes && h.columns == kRegisterColumns)
    return with_selected(s.n_selected, [&](auto r) {
      launch(queue, "soft_hash", soft_hash_registers_kernel<decltype(r)::value>,
             heads * ceil_div(h.n_rows, kHashThreads), kHashThreads,
             register_tile_bytes(kStageWords, h.n_bits), s);
    });
  constexpr int kRows = kWarp * kPlaneTokens;
  const index_t tile = index_t(sizeof(float)) * kRows * (h.n_features | 1);
  if (s.n_selected <= kMostInRegisters && hyperplanes && tile <= shared_limit)
    return with_selected(s.n_selected, [&](auto r) {
      launch(queue, "soft_hash", soft_hash_planes_kernel<decltype(r)::value>,
             heads * ceil_div(h.n_rows, kRows), kPlaneThreads, std::size_t(tile), s);
    });
  const index_t row = hyperplanes ? h.n_features : 2 * h.columns;
  const index_t bytes = index_t(sizeof(float)) * (row + h.n_bits * kSoftHashChunk);
  check_soft_row(bytes, shared_limit, h.n_features);
  launch(queue, "soft_hash", soft_hash_shared_kernel, heads * h.n_rows, kHashThreads,
         std::size_t(bytes), s, hyperplanes);
}

}  // namespace lshkit::cuda

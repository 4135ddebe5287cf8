#pragma once
// From the gradient of margins to that of unit vectors and of hyperplanes. A margin |z| passes its
// gradient, with the sign of z, to the projection of a selected bit.
//
// Fast Hadamard with 64 columns and up to 16 probes: a thread holds a token, as in soft_hash.cuh:
// for each bit a vector over the hashes, mostly zeros, which the transposed rotation takes to one
// sum over bits, 16 hashes at a time: 64 additions of a transform of 16 and 64 products.
#include "lshkit/cuda/soft_hash.cuh"

namespace lshkit::cuda {

struct SoftHashBack {
  Hash hash;  // without codes and x: batch, heads, rows and functions
  SoftCodes soft;
  int n_selected = 0;
  // (heads * group, rows, n_hashes, n_selected): the sum over a group is taken.
  const float* margin_grads = nullptr;
  index_t group = 1;
  float* out = nullptr;  // (heads, rows, n_features)

  // The gradient of the projection of a selected bit, and the bit; a larger number counts as the
  // last.
  __device__ float slope(index_t flat, index_t row, index_t i, int k, int* bit) const {
    const index_t pair = (flat * hash.n_rows + row) * hash.n_hashes + i;
    *bit = int(least(bit_of_margin(soft.margins[pair * n_selected + k]), hash.n_bits - 1));
    const float* const grads =
        margin_grads + (flat * group * hash.n_rows + row) * per_row() + i * n_selected + k;
    float sum = grads[0];
    for (index_t g = 1; g < group; ++g) sum += grads[g * hash.n_rows * per_row()];
    return load_code(soft.codes, soft.bytes, pair) >> *bit & 1 ? sum : -sum;
  }
  __device__ index_t per_row() const { return hash.n_hashes * n_selected; }
};

// Count elements next to each other, the first `used` of them: by loads of Bytes where `aligned`,
// when all are used and their address is a multiple of that.
template <int Bytes, int Count, class T>
__device__ __forceinline__ void load_elements(const T* from, int used, bool aligned,
                                              T (&to)[Count]) {
  constexpr int kEach = Bytes / int(sizeof(T));
  static_assert(Count % kEach == 0, "");
  LSHKIT_UNROLL
  for (int i = 0; i < Count; i += kEach) {
    Words<T, kEach> words;
    if (aligned) {
      load_words(from + i, words);
    } else {
      LSHKIT_UNROLL
      for (int k = 0; k < kEach; ++k) words.word[k] = i + k < used ? from[i + k] : T(0);
    }
    LSHKIT_UNROLL
    for (int k = 0; k < kEach; ++k) to[i + k] = words.word[k];
  }
}
// The slopes of `used` of Hashes hashes from `first` on.
template <int Hashes, int R>
__device__ __forceinline__ void load_slopes(const SoftHashBack& s, index_t flat, index_t row,
                                            index_t first, int used, bool aligned,
                                            float (&slopes)[Hashes][R + 1],
                                            int (&bits)[Hashes][R + 1]) {
  const index_t pair = (flat * s.hash.n_rows + row) * s.hash.n_hashes + first;
  const float* grads =
      s.margin_grads + (flat * s.group * s.hash.n_rows + row) * s.per_row() + first * R;
  float own[Hashes * R], sum[Hashes * R] = {};
  for (index_t g = 0; g < s.group; ++g, grads += s.hash.n_rows * s.per_row()) {
    load_elements<16>(grads, used * R, aligned, own);
    LSHKIT_UNROLL
    for (int i = 0; i < Hashes * R; ++i) sum[i] += own[i];
  }
  load_elements<16>(s.soft.margins + pair * R, used * R, aligned, own);
  std::uint16_t codes[Hashes];
  if (s.soft.bytes == 1) {
    std::uint8_t bytes[Hashes];
    load_elements<8>(static_cast<const std::uint8_t*>(s.soft.codes) + pair, used, aligned, bytes);
    LSHKIT_UNROLL
    for (int j = 0; j < Hashes; ++j) codes[j] = bytes[j];
  } else {
    load_elements<16>(static_cast<const std::uint16_t*>(s.soft.codes) + pair, used, aligned, codes);
  }
  LSHKIT_UNROLL
  for (int j = 0; j < Hashes; ++j) LSHKIT_UNROLL
  for (int k = 0; k < R; ++k) {
    const int i = j * R + k, bit = bit_of_margin(own[i]);
    bits[j][k] = bit;
    slopes[j][k] = codes[j] >> bit & 1 ? sum[i] : -sum[i];
  }
}

__device__ __forceinline__ void rotate_registers_back(float* z, const float* angles) {
  constexpr int half = kRegisterColumns / 2;
  LSHKIT_UNROLL
  for (int i = 0; i < half; ++i) {
    const float c = angles[i], s = angles[half + i], a = z[i], b = z[half + i];
    z[i] = c * a + s * b;
    z[half + i] = c * b - s * a;
  }
}

template <int R>
__global__ void __launch_bounds__(kHashThreads, R < 2 ? 3 : 2)
    soft_hash_back_registers_kernel(SoftHashBack s, bool aligned) {
  constexpr int D = kRegisterColumns, kStep = D + 1, kHashes = kHashesAtOnce<R>;
  LSHKIT_SHARED_MEMORY(memory);
  const Hash& h = s.hash;
  float* const tile = reinterpret_cast<float*>(memory);  // (kHashThreads, kStep)
  float* const numbers = tile + kHashThreads * kStep;    // signs, then angles
  const index_t tiles = ceil_div(h.n_rows, kHashThreads);
  const index_t flat = block_index() / tiles, first = block_index() % tiles * kHashThreads;
  const index_t count = least(kHashThreads, h.n_rows - first);
  const float* const parameters = h.parameters_of(flat);
  const int thread = thread_index();
  float sum[D] = {};
  for (index_t hash = 0; hash < h.n_hashes && R > 0; hash += kHashes) {
    __syncthreads();
    load_signs<true>(h, parameters, hash, 1.0f, numbers);
    float slopes[kHashes][R + 1];
    int bits[kHashes][R + 1];
    if constexpr (R > 0)
      load_slopes<kHashes, R>(s, flat, least(first + thread, h.n_rows - 1), hash,
                              int(least(kHashes, h.n_hashes - hash)), aligned, slopes, bits);
    __syncthreads();
    // A column goes from register to register, to where P has it. After bit 0 register i has column
    // i again, as before the first bit of a number that 7 divides.
    for (int bit = ceil_div(h.n_bits, 7) * 7; bit > h.n_bits; --bit)
      to_next_rows(sum, [](int, float x) { return x; });
    for (int bit = h.n_bits - 1; bit >= 0; --bit) {
      float v[kHashes];
      LSHKIT_UNROLL
      for (int j = 0; j < kHashes; ++j) {
        v[j] = 0;  // a bit is selected once
        LSHKIT_UNROLL
        for (int k = 0; k < R; ++k) v[j] = bits[j][k] == bit ? slopes[j][k] : v[j];
      }
      transform_registers<kHashes, kHashes / 2>(v);
      to_next_rows(sum, [&](int i, float x) { return x + numbers[bit * D + i] * v[i % kHashes]; });
    }
  }
  __syncthreads();
  for (int i = thread; i < 3 * D; i += kHashThreads) numbers[i] = parameters[i];
  __syncthreads();
  rotate_registers_back(sum, numbers + 2 * D);
  transform_registers<D>(sum);
  rotate_registers_back(sum, numbers + D);
  transform_registers<D>(sum);
  rotate_registers_back(sum, numbers);
  LSHKIT_UNROLL
  for (int i = 0; i < D; ++i) tile[thread * kStep + i] = sum[i] * (1.0f / D);
  __syncthreads();
  for (int i = thread; i < count * D; i += kHashThreads) {
    const int row = i / D, column = i % D;
    if (column < h.n_features)
      s.out[(flat * h.n_rows + first + row) * h.n_features + column] = tile[row * kStep + column];
  }
}

__device__ inline void rotate_shared_back(float* z, index_t columns, const float* angles) {
  const index_t half = columns / 2;
  __syncthreads();
  for (index_t i = thread_index(); i < half; i += kHashThreads) {
    const float c = angles[i], s = angles[half + i], a = z[i], b = z[half + i];
    z[i] = c * a + s * b;
    z[half + i] = c * b - s * a;
  }
  __syncthreads();
}

// A block a row, any sizes.
LSHKIT_KERNEL void __launch_bounds__(kHashThreads, 1) soft_hash_back_shared_kernel(SoftHashBack s) {
  LSHKIT_SHARED_MEMORY(memory);
  const Hash& h = s.hash;
  const index_t columns = h.columns;
  float* const sum = reinterpret_cast<float*>(memory);
  float* const work = sum + columns;
  const index_t flat = block_index() / h.n_rows, row = block_index() % h.n_rows;
  const float* const parameters = h.parameters_of(flat);
  const int thread = thread_index();
  for (index_t i = thread; i < columns; i += kHashThreads) sum[i] = 0;
  for (index_t hash = 0; hash < h.n_hashes && s.n_selected > 0; hash += columns)
    for (int bit = 0; bit < h.n_bits; ++bit) {
      __syncthreads();
      for (index_t j = thread; j < columns; j += kHashThreads) {
        float v = 0;
        for (int k = 0; k < s.n_selected && hash + j < h.n_hashes; ++k) {
          int own;
          const float slope = s.slope(flat, row, hash + j, k, &own);
          if (own == bit) v += slope;
        }
        work[j] = v;
      }
      transform_shared(work, columns);
      const float* const signs = parameters + (3 + hash / columns * h.n_bits + bit) * columns;
      for (index_t c = thread; c < columns; c += kHashThreads)
        sum[c] += signs[c] * work[rotation_row(c, bit)];
    }
  for (int step = 2; step >= 0; --step) {
    rotate_shared_back(sum, columns, parameters + step * columns);
    if (step > 0) transform_shared(sum, columns);
  }
  for (index_t i = thread; i < h.n_features; i += kHashThreads)
    s.out[(flat * h.n_rows + row) * h.n_features + i] = sum[i] / float(columns);
}

// Hyperplanes, a block a row: the normals of the selected bits times their slopes.
constexpr int kSlopes = 256;  // in shared memory at a time
LSHKIT_KERNEL void __launch_bounds__(kHashThreads) soft_hash_back_planes_kernel(SoftHashBack s) {
  LSHKIT_SHARED_MEMORY(memory);
  const Hash& h = s.hash;
  float* const slopes = reinterpret_cast<float*>(memory);        // (kSlopes)
  int* const planes = reinterpret_cast<int*>(slopes + kSlopes);  // (kSlopes)
  const index_t flat = block_index() / h.n_rows, row = block_index() % h.n_rows;
  const float* const parameters = h.parameters_of(flat);
  float* const out = s.out + (flat * h.n_rows + row) * h.n_features;
  const index_t total = s.per_row();
  for (index_t first = 0; first < total || first == 0; first += kSlopes) {
    const int count = int(least(kSlopes, total - first));
    __syncthreads();
    for (int i = thread_index(); i < count; i += kHashThreads) {
      const index_t hash = (first + i) / s.n_selected;
      int bit;
      slopes[i] = s.slope(flat, row, hash, int((first + i) % s.n_selected), &bit);
      planes[i] = int(hash * h.n_bits + bit);
    }
    __syncthreads();
    for (index_t c = thread_index(); c < h.n_features; c += kHashThreads) {
      float sum = first == 0 ? 0 : out[c];
      for (int i = 0; i < count; ++i) sum += slopes[i] * parameters[planes[i] * h.n_features + c];
      out[c] = sum;
    }
  }
}

// The gradient of unit vectors, zeros where no bits are selected.
inline void soft_hash_back(const Queue& queue, Family family, const SoftHashBack& s,
                           index_t shared_limit) {
  const Hash& h = s.hash;
  const index_t heads = h.batch * h.heads;
  if (heads * h.n_rows == 0) return;
  if (family == Family::hyperplane)
    return launch(queue, "soft_hash_backward", soft_hash_back_planes_kernel, heads * h.n_rows,
                  kHashThreads, (sizeof(float) + sizeof(int)) * kSlopes, s);
  if (s.n_selected <= kMostInRegisters && h.columns == kRegisterColumns)
    return with_selected(s.n_selected, [&](auto r) {
      constexpr int R = decltype(r)::value;
      // Then so is what 8 or 16 hashes have: numbers by 16 bytes, codes of a byte by 8.
      const bool aligned = h.n_hashes % kHashesAtOnce<R> == 0 && is_aligned(s.margin_grads, 16) &&
                           is_aligned(s.soft.margins, 16) && is_aligned(s.soft.codes, 16);
      launch(queue, "soft_hash_backward", soft_hash_back_registers_kernel<R>,
             heads * ceil_div(h.n_rows, kHashThreads), kHashThreads,
             register_tile_bytes(kRegisterColumns + 1, h.n_bits), s, aligned);
    });
  const index_t bytes = 2 * index_t(sizeof(float)) * h.columns;
  check_soft_row(bytes, shared_limit, h.n_features);
  launch(queue, "soft_hash_backward", soft_hash_back_shared_kernel, heads * h.n_rows, kHashThreads,
         std::size_t(bytes), s);
}

// The gradient of hyperplanes: a block takes a part of the rows that use a set, one hash and some
// columns; each of its warps has sums of its own in shared memory, which are then added in order.
constexpr int kPlaneGradThreads = 256, kPlaneGradWarps = kPlaneGradThreads / kWarp;
constexpr index_t kPlaneGradColumns = 64, kPlaneGradParts = 16;
struct PlaneGrads {
  SoftHashBack back;
  Elements x;
  const float* inverse = nullptr;
  index_t sets = 1, parts = 1;
  float* partial = nullptr;  // (parts, sets, n_hashes, n_bits, n_features)

  __host__ __device__ index_t slices() const {
    return ceil_div(back.hash.n_features, kPlaneGradColumns);
  }
  __host__ __device__ index_t set_size() const {
    return back.hash.n_hashes * back.hash.n_bits * back.hash.n_features;
  }
};
LSHKIT_KERNEL void __launch_bounds__(kPlaneGradThreads, 1) plane_grads_kernel(PlaneGrads g) {
  LSHKIT_SHARED_MEMORY(memory);
  const Hash& h = g.back.hash;
  index_t block = block_index();
  const index_t first_column = block % g.slices() * kPlaneGradColumns;
  block /= g.slices();
  const index_t part = block % g.parts, hash = block / g.parts % h.n_hashes;
  const index_t set = block / g.parts / h.n_hashes;
  const int width = int(least(kPlaneGradColumns, h.n_features - first_column));
  const int size = h.n_bits * width;
  float* const sums = reinterpret_cast<float*>(memory);  // (warps, n_bits, width)
  float* const own = sums + warp_index() * size;
  for (int i = thread_index(); i < kPlaneGradWarps * size; i += kPlaneGradThreads) sums[i] = 0;
  __syncthreads();
  const index_t heads = h.heads / g.sets, rows = h.batch * heads * h.n_rows;
  const index_t end = rows * (part + 1) / g.parts;
  for (index_t r = rows * part / g.parts + warp_index(); r < end; r += kPlaneGradWarps) {
    const index_t row = r % h.n_rows, head = r / h.n_rows;
    const index_t flat = head / heads * h.heads + set * heads + head % heads;
    const float inverse = g.inverse[flat * h.n_rows + row];
    if (!(inverse > 0)) continue;
    const index_t from = flat / h.heads * g.x.batch + flat % h.heads * g.x.head + row * g.x.row;
    for (int k = 0; k < g.back.n_selected; ++k) {
      int bit;
      const float slope = g.back.slope(flat, row, hash, k, &bit) * inverse;
      for (int c = lane_index(); c < width; c += kWarp)
        own[bit * width + c] +=
            slope * load_element<float>(g.x.data, from + first_column + c, g.x.element);
    }
  }
  __syncthreads();
  float* const to = g.partial + (part * g.sets + set) * g.set_size() +
                    hash * h.n_bits * h.n_features + first_column;
  for (int i = thread_index(); i < size; i += kPlaneGradThreads) {
    float sum = 0;
    for (int w = 0; w < kPlaneGradWarps; ++w) sum += sums[w * size + i];
    to[i / width * h.n_features + i % width] = sum;
  }
}
LSHKIT_KERNEL void __launch_bounds__(kPlaneGradThreads)
    add_parts_kernel(const float* partial, index_t parts, index_t size, float* out) {
  const index_t i = block_index() * kPlaneGradThreads + thread_index();
  if (i >= size) return;
  float sum = 0;
  for (index_t p = 0; p < parts; ++p) sum += partial[p * size + i];
  out[i] = sum;
}

// Of a side; rows whose bits are not selected give zeros.
inline void plane_grads(const Queue& queue, const PlaneGrads& g) {
  const Hash& h = g.back.hash;
  launch(queue, "plane_gradient", plane_grads_kernel, g.sets * h.n_hashes * g.parts * g.slices(),
         kPlaneGradThreads,
         sizeof(float) * std::size_t(kPlaneGradWarps * h.n_bits * kPlaneGradColumns), g);
}
inline void add_parts(const Queue& queue, const float* partial, index_t parts, index_t size,
                      float* out) {
  launch(queue, "plane_gradient", add_parts_kernel, ceil_div(size, kPlaneGradThreads),
         kPlaneGradThreads, 0, partial, parts, size, out);
}

}  // namespace lshkit::cuda

#pragma once
// Row by row, a warp each: unit vectors, the normalisation of the output, and the gradients through
// both. Bound: device memory, each number read and written once.
#include "lshkit/cuda/elements.cuh"

namespace lshkit::cuda {

constexpr int kRowThreads = 256, kRowsOfBlock = kRowThreads / kWarp;
constexpr float kSmallestNorm = 1e-12f;  // below it the output has no direction

// The norm of the numbers at(c), c < columns, whose square may leave the range of floats: once
// more, scaled by the largest.
template <class At>
__device__ inline float warp_norm(index_t columns, const At& at) {
  float square = 0;
  for (index_t c = lane_index(); c < columns; c += kWarp) square += at(c) * at(c);
  square = warp_sum(square);
  if (square > 1e-30f && square < 1e30f) return sqrtf(square);
  float largest = 0;
  for (index_t c = lane_index(); c < columns; c += kWarp) {
    const float a = fabsf(at(c));
    if (!(a <= largest)) largest = a;  // NaN stays
    if (largest != largest) break;
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const float a = __shfl_xor_sync(kAllLanes, largest, step);
    if (largest == largest && !(a <= largest)) largest = a;
  }
  if (largest == 0 || !is_finite(largest)) return largest;
  square = 0;
  for (index_t c = lane_index(); c < columns; c += kWarp) {
    const float a = at(c) / largest;
    square += a * a;
  }
  return largest * sqrtf(warp_sum(square));
}

// Inverse norms as the CPU has them: 0 for masked rows and for those too short to have one, NaN for
// those that are not finite. Both of the latter are invalid.
struct UnitRows {
  Elements x;
  index_t batch = 1, heads = 1, n_rows = 0, columns = 0;
  const std::uint8_t* mask = nullptr;  // (batch, n_rows), or null
  index_t mask_stride = 0;
  float* unit = nullptr;  // (batch, heads, n_rows, columns), zeros for invalid rows, or null
  float* inverse = nullptr;
  std::uint8_t* valid = nullptr;
};

LSHKIT_KERNEL void __launch_bounds__(kRowThreads) unit_rows_kernel(UnitRows a) {
  const index_t row = block_index() * kRowsOfBlock + warp_index();
  if (row >= a.batch * a.heads * a.n_rows) return;
  const index_t flat = row / a.n_rows, i = row % a.n_rows, batch = flat / a.heads;
  const index_t from = batch * a.x.batch + flat % a.heads * a.x.head + i * a.x.row;
  const bool masked = a.mask && !a.mask[batch * a.mask_stride + i];
  const auto at = [&](index_t c) { return load_element<float>(a.x.data, from + c, a.x.element); };
  float inverse = 0;
  bool valid = false;
  if (!masked) {
    const float length = warp_norm(a.columns, at), reciprocal = 1 / length;
    valid = is_finite(length);
    inverse = !valid ? not_a_number() : is_finite(reciprocal) ? reciprocal : 0;
  }
  if (lane_index() == 0) {
    a.inverse[row] = inverse;
    a.valid[row] = valid;
  }
  if (a.unit)
    for (index_t c = lane_index(); c < a.columns; c += kWarp)
      a.unit[row * a.columns + c] = valid ? at(c) * inverse : 0;
}

// A sum of weights that is zero, or so small that its reciprocal is infinite.
__device__ inline bool vanishes(float sum) { return sum < 1.2e-38f; }

// The output from its sums, whose rows have `counts` more columns.
struct NormalizeRows {
  const float* sums = nullptr;  // (rows, columns + counts)
  index_t batch = 1, heads = 1, n_rows = 0, columns = 0;
  int counts = 0;
  Normalize normalize = Normalize::none;
  const std::uint8_t* valid = nullptr;  // by row: 0 gives a row of NaN
  Elements out;
  void* data = nullptr;
  float* divisors = nullptr;  // (rows), or null: what each was divided by
};

LSHKIT_KERNEL void __launch_bounds__(kRowThreads) normalize_kernel(NormalizeRows a) {
  const index_t row = block_index() * kRowsOfBlock + warp_index();
  if (row >= a.batch * a.heads * a.n_rows) return;
  const index_t flat = row / a.n_rows, i = row % a.n_rows;
  const float* const sums = a.sums + row * (a.columns + a.counts);
  float divisor = 1;
  bool none = false;
  if (a.normalize == Normalize::l2) {
    divisor = warp_norm(a.columns, [&](index_t c) { return sums[c]; });
    none = divisor <= kSmallestNorm;
  } else if (a.normalize == Normalize::sum) {
    divisor = sums[a.columns];
    none = vanishes(divisor);
  }
  const float scale = 1 / divisor;
  if (a.divisors && lane_index() == 0) a.divisors[row] = divisor;
  const bool valid = !a.valid || a.valid[row];
  const index_t to = flat / a.heads * a.out.batch + flat % a.heads * a.out.head + i * a.out.row;
  for (index_t c = lane_index(); c < a.columns; c += kWarp)
    store_element<float>(a.data, to + c, a.out.element,
                         !valid ? not_a_number()
                         : none ? 0
                                : sums[c] * scale);
}

// The gradient of the sums, in their place, and what it adds to every g_i . v_j ("sum").
struct NormalizeBackward {
  float* sums = nullptr;  // (rows, columns + counts)
  index_t batch = 1, heads = 1, n_rows = 0, columns = 0;
  int counts = 0;
  Normalize normalize = Normalize::none;
  const std::uint8_t* valid = nullptr;  // by row: 0 gives no gradient
  Elements grad;
  float* bias = nullptr;  // (rows), or null
};

LSHKIT_KERNEL void __launch_bounds__(kRowThreads) normalize_backward_kernel(NormalizeBackward a) {
  const index_t row = block_index() * kRowsOfBlock + warp_index();
  if (row >= a.batch * a.heads * a.n_rows) return;
  const index_t flat = row / a.n_rows, i = row % a.n_rows;
  float* const sums = a.sums + row * (a.columns + a.counts);
  const index_t from =
      flat / a.heads * a.grad.batch + flat % a.heads * a.grad.head + i * a.grad.row;
  const auto grad = [&](index_t c) {
    return load_element<float>(a.grad.data, from + c, a.grad.element);
  };
  float inverse = 1, along = 0, bias = 0;
  bool none = !a.valid[row];
  if (!none && a.normalize == Normalize::l2) {
    const float length = warp_norm(a.columns, [&](index_t c) { return sums[c]; });
    none = length <= kSmallestNorm;
    inverse = 1 / length;
    for (index_t c = lane_index(); c < a.columns; c += kWarp)
      along += grad(c) * (sums[c] * inverse);
    along = warp_sum(along);
  } else if (!none && a.normalize == Normalize::sum) {
    none = vanishes(sums[a.columns]);
    inverse = 1 / sums[a.columns];
    for (index_t c = lane_index(); c < a.columns; c += kWarp) bias += grad(c) * sums[c];
    bias = none ? 0 : -warp_sum(bias) * inverse * inverse;
  }
  if (a.bias && lane_index() == 0) a.bias[row] = bias;
  for (index_t c = lane_index(); c < a.columns; c += kWarp) {
    const float y = a.normalize == Normalize::l2 ? sums[c] * inverse : 0;
    sums[c] = none ? 0 : (grad(c) - along * y) * inverse;
  }
}

// The sum, in order, over the heads of queries that share a row, through its unit vector where
// there is one: (g - (g . u) u) / |x|.
struct FinishGradient {
  const float* own = nullptr;  // (batch, heads * group, n_rows, columns)
  index_t batch = 1, heads = 1, group = 1, n_rows = 0, columns = 0;
  Elements x;                           // the row itself
  const float* inverse = nullptr;       // null: not through unit vectors
  const std::uint8_t* valid = nullptr;  // by row, where there is no inverse: 0 gives zeros
  Elements out;
  void* data = nullptr;
};

LSHKIT_KERNEL void __launch_bounds__(kRowThreads) finish_gradient_kernel(FinishGradient a) {
  const index_t row = block_index() * kRowsOfBlock + warp_index();
  if (row >= a.batch * a.heads * a.n_rows) return;
  const index_t flat = row / a.n_rows, i = row % a.n_rows;
  const index_t batch = flat / a.heads, head = flat % a.heads;
  const float* const first =
      a.own + ((batch * a.heads + head) * a.group * a.n_rows + i) * a.columns;
  const auto total = [&](index_t c) {
    float sum = 0;
    for (index_t g = 0; g < a.group; ++g) sum += first[g * a.n_rows * a.columns + c];
    return sum;
  };
  const index_t to = batch * a.out.batch + head * a.out.head + i * a.out.row;
  if (!a.inverse) {
    for (index_t c = lane_index(); c < a.columns; c += kWarp)
      store_element<float>(a.data, to + c, a.out.element, a.valid[row] ? total(c) : 0);
    return;
  }
  const index_t from = batch * a.x.batch + head * a.x.head + i * a.x.row;
  const auto x = [&](index_t c) { return load_element<float>(a.x.data, from + c, a.x.element); };
  const float inverse = a.inverse[row];
  float along = 0;
  for (index_t c = lane_index(); c < a.columns; c += kWarp) along += total(c) * x(c);
  along = warp_sum(along) * inverse;
  for (index_t c = lane_index(); c < a.columns; c += kWarp)
    store_element<float>(a.data, to + c, a.out.element,
                         inverse == 0 ? 0 : inverse * (total(c) - along * (x(c) * inverse)));
}

inline index_t blocks_of_rows(index_t rows) { return ceil_div(rows, kRowsOfBlock); }

inline void unit_rows(const Queue& queue, const UnitRows& a) {
  launch(queue, "unit_rows", unit_rows_kernel, blocks_of_rows(a.batch * a.heads * a.n_rows),
         kRowThreads, 0, a);
}
inline void normalize(const Queue& queue, const NormalizeRows& a) {
  launch(queue, "normalize", normalize_kernel, blocks_of_rows(a.batch * a.heads * a.n_rows),
         kRowThreads, 0, a);
}
inline void normalize_backward(const Queue& queue, const NormalizeBackward& a) {
  launch(queue, "normalize_backward", normalize_backward_kernel,
         blocks_of_rows(a.batch * a.heads * a.n_rows), kRowThreads, 0, a);
}
inline void finish_gradient(const Queue& queue, const FinishGradient& a) {
  launch(queue, "finish_gradient", finish_gradient_kernel,
         blocks_of_rows(a.batch * a.heads * a.n_rows), kRowThreads, 0, a);
}

}  // namespace lshkit::cuda

#pragma once
// Row by row: unit vectors, the normalisation of the output, and the gradients through both. A row
// of up to 256 numbers is read once and stays in the registers of the lanes that share it, eight
// numbers in each: loads and stores of 16 bytes where the rows allow it. A block takes rows of one
// head.
//
// Bound: device memory, each number read and written once.
#include "lshkit/cuda/elements.cuh"

namespace lshkit::cuda {

constexpr int kRowThreads = 256, kRowPasses = 4;
constexpr int kHeld = 8;  // numbers of a row in a lane at a time

// The norm of a row times `factor`, a power of two: 1, or what brings the square of a norm that may
// leave the range of floats, subnormal numbers too, back into it.
struct ScaledNorm {
  float factor, norm;

  __device__ float of_row() const { return norm / factor; }
};
__device__ inline float factor_of_square(float square) {
  return square <= 1e-30f ? 0x1p100f : square >= 1e30f ? 0x1p-100f : 1;
}
// The reciprocal of a norm, or of a sum of weights, in a gradient. Sums of many such gradients must
// not overflow, so that it counts as 2^-100 where it is smaller.
__device__ inline float within_sums(float reciprocal) {
  return reciprocal > 0x1p100f ? 0x1p100f : reciprocal;
}

// Rows (batch, heads, n_rows, columns) and how they are dealt out.
struct RowGrid {
  index_t batch = 1, heads = 1, n_rows = 0, columns = 0;
  // Set at the launch: lanes of a row, as a power of two, and blocks of a head.
  int lane_bits = 0;
  unsigned tiles = 0;

  __host__ __device__ int lanes() const { return 1 << lane_bits; }
  __host__ __device__ int rows_of_pass() const { return kRowThreads >> lane_bits; }
};

// One lane of a row. Eights: its numbers are eight in a row; else `lanes` apart. Rows beyond the
// end of a head take part with zeros, as all lanes of a warp have to.
template <bool Eights>
struct RowLane {
  const RowGrid& grid;
  index_t flat, batch, head;  // flat: of all sequences' heads in turn
  index_t i;                  // the row of the head
  int lane;

  __device__ RowLane(const RowGrid& g, int pass) : grid(g) {
    // In 32 bits, as the blocks are numbered: half of the instructions.
    const unsigned block = unsigned(block_index()), tile = block % g.tiles;
    flat = block / g.tiles;
    batch = flat / unsigned(g.heads);
    head = flat % unsigned(g.heads);
    lane = thread_index() & (g.lanes() - 1);
    i = index_t(tile * kRowPasses + unsigned(pass)) * g.rows_of_pass() +
        (thread_index() >> g.lane_bits);
  }
  __device__ bool exists() const { return i < grid.n_rows; }
  __device__ index_t row() const { return flat * grid.n_rows + i; }
  __device__ index_t offset_in(const Elements& x) const {
    return batch * x.batch + head * x.head + i * x.row;
  }
  __device__ index_t step() const { return index_t(kHeld) << grid.lane_bits; }
  __device__ bool in_registers() const { return grid.columns <= step(); }
  __device__ index_t column(index_t first, int k) const {
    return first + (Eights ? lane * kHeld + k : (k << grid.lane_bits) + lane);
  }

  // The columns from `first` on of the row at `from`; zeros beyond the last.
  __device__ void load(const void* data, Element element, index_t from, index_t first,
                       float* x) const {
    LSHKIT_UNROLL
    for (int k = 0; k < kHeld; ++k) x[k] = 0;
    if (!exists()) return;
    if constexpr (Eights) {
      if (column(first, 0) < grid.columns) load_eight(data, from + column(first, 0), element, x);
    } else {
      LSHKIT_UNROLL
      for (int k = 0; k < kHeld; ++k)
        if (column(first, k) < grid.columns)
          x[k] = load_element<float>(data, from + column(first, k), element);
    }
  }
  __device__ void store(void* data, Element element, index_t from, index_t first,
                        const float* x) const {
    if (!exists()) return;
    if constexpr (Eights) {
      if (column(first, 0) < grid.columns) store_eight(data, from + column(first, 0), element, x);
    } else {
      LSHKIT_UNROLL
      for (int k = 0; k < kHeld; ++k)
        if (column(first, k) < grid.columns)
          store_element<float>(data, from + column(first, k), element, x[k]);
    }
  }

  // Of the row's lanes, the same number in each.
  __device__ float sum(float x) const {
    for (int step = grid.lanes() / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
    return x;
  }
  // From the sum of squares of the lane's numbers; load(first, x) gives the row's numbers again.
  template <class Load>
  __device__ ScaledNorm norm(float square, const Load& load) const {
    square = sum(square);
    const float factor = exists() ? factor_of_square(square) : 1;
    if (__ballot_sync(kAllLanes, factor != 1)) {
      float x[kHeld], scaled = 0;
      for (index_t first = 0; first < grid.columns; first += step()) {
        load(first, x);
        LSHKIT_UNROLL
        for (int k = 0; k < kHeld; ++k) scaled += x[k] * factor * (x[k] * factor);
      }
      scaled = sum(scaled);
      if (factor != 1) square = scaled;
    }
    return {factor, sqrtf(square)};
  }
};

// Inverse norms as the CPU has them: 0 for masked rows and for those too short to have one, NaN for
// those that are not finite. Masked rows and these are invalid.
struct UnitRows : RowGrid {
  Elements x;
  const std::uint8_t* mask = nullptr;  // (batch, n_rows), or null
  index_t mask_stride = 0;
  float* unit = nullptr;  // (batch, heads, n_rows, columns), zeros for invalid rows, or null
  float* inverse = nullptr;
  std::uint8_t* valid = nullptr;
};

template <bool Eights>
__global__ void __launch_bounds__(kRowThreads) unit_rows_kernel(UnitRows a) {
  for (int pass = 0; pass < kRowPasses; ++pass) {
    const RowLane<Eights> r(a, pass);
    const index_t from = r.offset_in(a.x);
    const auto load = [&](index_t first, float* x) {
      r.load(a.x.data, a.x.element, from, first, x);
    };
    float x[kHeld], square = 0;
    for (index_t first = 0; first < a.columns; first += r.step()) {
      load(first, x);
      LSHKIT_UNROLL
      for (int k = 0; k < kHeld; ++k) square += x[k] * x[k];
    }
    const ScaledNorm length = r.norm(square, load);  // of a finite row finite
    const float reciprocal = length.factor / length.norm;
    const bool masked = a.mask && r.exists() && !a.mask[r.batch * a.mask_stride + r.i];
    const bool valid = !masked && is_finite(length.norm);
    const float inverse = masked                  ? 0
                          : !valid                ? not_a_number()
                          : is_finite(reciprocal) ? reciprocal
                                                  : 0;
    if (r.exists() && r.lane == 0) {
      a.inverse[r.row()] = inverse;
      a.valid[r.row()] = valid;
    }
    if (!a.unit) continue;
    for (index_t first = 0; first < a.columns; first += r.step()) {
      if (!r.in_registers()) load(first, x);
      LSHKIT_UNROLL
      for (int k = 0; k < kHeld; ++k) x[k] = valid ? x[k] * inverse : 0;
      r.store(a.unit, Element::float32, r.row() * a.columns, first, x);
    }
  }
}

// A sum of weights that is zero, or so small that its reciprocal is infinite.
__device__ inline bool vanishes(float sum) { return sum < 1.2e-38f; }

// The output from its sums, whose rows have `counts` more columns.
struct NormalizeRows : RowGrid {
  const float* sums = nullptr;  // (rows, columns + counts)
  int counts = 0;
  Normalize normalize = Normalize::none;
  const std::uint8_t* valid = nullptr;  // by row: 0 gives a row of NaN
  Elements out;
  void* data = nullptr;
  float* divisors = nullptr;  // (rows), or null: what each was divided by
};

template <bool Eights>
__global__ void __launch_bounds__(kRowThreads) normalize_kernel(NormalizeRows a) {
  for (int pass = 0; pass < kRowPasses; ++pass) {
    const RowLane<Eights> r(a, pass);
    const index_t from = r.row() * (a.columns + a.counts), to = r.offset_in(a.out);
    const auto load = [&](index_t first, float* x) {
      r.load(a.sums, Element::float32, from, first, x);
    };
    float x[kHeld], divisor = 1, factor = 1, scale = 1, square = 0;
    bool none = false;
    for (index_t first = 0; first < a.columns; first += r.step()) {
      load(first, x);
      LSHKIT_UNROLL
      for (int k = 0; k < kHeld; ++k) square += x[k] * x[k];
    }
    if (a.normalize == Normalize::l2) {
      const ScaledNorm length = r.norm(square, load);
      divisor = length.of_row();
      factor = length.factor;
      scale = 1 / length.norm;
      none = length.norm == 0;
    } else if (a.normalize == Normalize::sum && r.exists()) {
      divisor = a.sums[from + a.columns];
      none = vanishes(divisor);
      scale = 1 / divisor;
    }
    if (a.divisors && r.exists() && r.lane == 0) a.divisors[r.row()] = divisor;
    const bool valid = !a.valid || !r.exists() || a.valid[r.row()];
    for (index_t first = 0; first < a.columns; first += r.step()) {
      if (!r.in_registers()) load(first, x);
      LSHKIT_UNROLL
      for (int k = 0; k < kHeld; ++k)
        x[k] = !valid ? not_a_number() : none ? 0 : x[k] * factor * scale;
      r.store(a.data, a.out.element, to, first, x);
    }
  }
}

// The gradient g of the sums, in their place, and what "sum" adds to every g_i . v_j: -g_i . y_i. g
// is rounded first where it is later, or the two would not cancel where y_i is next to v_j.
struct NormalizeBackward : RowGrid {
  float* sums = nullptr;  // (rows, columns + counts)
  // The output and what each of its rows was divided by, (rows), to have the sums again from; or
  // null: the sums are in their place.
  Elements out;
  const float* divisors = nullptr;
  int counts = 0;
  Normalize normalize = Normalize::none;
  const std::uint8_t* valid = nullptr;  // by row: 0 gives no gradient
  Elements grad;
  float* bias = nullptr;  // (rows), or null
  int significand = 24;   // bits that are kept of g where there is a bias
};

// Kept: there are divisors.
template <bool Eights, bool Kept>
__global__ void __launch_bounds__(kRowThreads, Eights ? 4 : 2)
    normalize_backward_kernel(NormalizeBackward a) {
  for (int pass = 0; pass < kRowPasses; ++pass) {
    const RowLane<Eights> r(a, pass);
    const index_t sums = r.row() * (a.columns + a.counts), from = r.offset_in(a.grad);
    const bool valid = r.exists() && a.valid[r.row()], divided = a.normalize != Normalize::none;
    const float divisor = Kept && r.exists() ? a.divisors[r.row()] : 1;
    const auto load = [&](index_t first, float* y) {  // before the division; not read without one
      if constexpr (Kept) {
        r.load(a.out.data, a.out.element, r.offset_in(a.out), first, y);
        LSHKIT_UNROLL
        for (int k = 0; k < kHeld; ++k) y[k] *= divisor;
      } else if (divided) {
        r.load(a.sums, Element::float32, sums, first, y);
      }
    };
    const auto load_grad = [&](index_t first, float* g) {
      r.load(a.grad.data, a.grad.element, from, first, g);
    };
    float y[kHeld] = {}, g[kHeld], square = 0, product = 0;
    for (index_t first = 0; first < a.columns; first += r.step()) {
      load(first, y);
      load_grad(first, g);
      LSHKIT_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        square += y[k] * y[k];
        product += g[k] * y[k];
      }
    }
    float factor = 1, unit = 1, inverse = 1, along = 0, bias = 0;
    bool none = !valid;
    if (a.normalize == Normalize::l2) {
      const ScaledNorm length = r.norm(square, load);
      none = none || length.norm == 0;
      factor = length.factor;
      unit = 1 / length.norm;
      inverse = within_sums(1 / length.norm * length.factor);
      product = 0;  // of the unit vector: the other may have left the range of floats
      for (index_t first = 0; first < a.columns; first += r.step()) {
        if (!r.in_registers()) {
          load(first, y);
          load_grad(first, g);
        }
        LSHKIT_UNROLL
        for (int k = 0; k < kHeld; ++k) product += g[k] * (y[k] * factor * unit);
      }
      along = r.sum(product);
    } else if (a.normalize == Normalize::sum) {
      const float sum = !r.exists() ? 1 : Kept ? divisor : a.sums[sums + a.columns];
      none = none || vanishes(sum);
      unit = 1 / sum;
      inverse = within_sums(unit);
      product = 0;
      for (index_t first = 0; first < a.columns; first += r.step()) {
        if (!r.in_registers()) {
          load(first, y);
          load_grad(first, g);
        }
        LSHKIT_UNROLL
        for (int k = 0; k < kHeld; ++k)
          product += rounded(g[k] * inverse, a.significand) * (y[k] * unit);
      }
      bias = r.sum(product);
      bias = none ? 0 : -bias;
    }
    if (a.bias && r.exists() && r.lane == 0) a.bias[r.row()] = bias;
    for (index_t first = 0; first < a.columns; first += r.step()) {
      if (!r.in_registers()) {
        load(first, y);
        load_grad(first, g);
      }
      LSHKIT_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        const float u = a.normalize == Normalize::l2 ? y[k] * factor * unit : 0;
        g[k] = none ? 0 : rounded((g[k] - along * u) * inverse, a.significand);
      }
      r.store(a.sums, Element::float32, sums, first, g);
    }
  }
}

// The sum, in order, over the heads of queries that share a row, through its unit vector where
// there is one: (g - (g . u) u) / |x|.
struct FinishGradient : RowGrid {
  const float* own = nullptr;  // (batch, heads * group, n_rows, columns)
  index_t group = 1;
  Elements x;                           // the row itself
  const float* inverse = nullptr;       // null: not through unit vectors
  const std::uint8_t* valid = nullptr;  // by row, where there is no inverse: 0 gives zeros
  Elements out;
  void* data = nullptr;
};

template <bool Eights>
__global__ void __launch_bounds__(kRowThreads) finish_gradient_kernel(FinishGradient a) {
  for (int pass = 0; pass < kRowPasses; ++pass) {
    const RowLane<Eights> r(a, pass);
    const index_t own = (r.flat * a.group * a.n_rows + r.i) * a.columns;
    const index_t from = r.offset_in(a.x), to = r.offset_in(a.out);
    const auto load_total = [&](index_t first, float* total) {
      float term[kHeld];
      r.load(a.own, Element::float32, own, first, total);
      for (index_t g = 1; g < a.group; ++g) {
        r.load(a.own, Element::float32, own + g * a.n_rows * a.columns, first, term);
        LSHKIT_UNROLL
        for (int k = 0; k < kHeld; ++k) total[k] += term[k];
      }
    };
    const auto load_row = [&](index_t first, float* x) {
      if (a.inverse) r.load(a.x.data, a.x.element, from, first, x);
    };
    const float inverse = !a.inverse ? 1 : r.exists() ? a.inverse[r.row()] : 0;
    const bool zeros = a.inverse ? inverse == 0 : r.exists() && !a.valid[r.row()];
    // Of the unit vector: products with the row itself may leave the range of floats.
    float total[kHeld], x[kHeld] = {}, along = 0;
    for (index_t first = 0; first < a.columns; first += r.step()) {
      load_total(first, total);
      load_row(first, x);
      LSHKIT_UNROLL
      for (int k = 0; k < kHeld; ++k) along += total[k] * (x[k] * inverse);
    }
    along = a.inverse ? r.sum(along) : 0;
    for (index_t first = 0; first < a.columns; first += r.step()) {
      if (!r.in_registers()) {
        load_total(first, total);
        load_row(first, x);
      }
      LSHKIT_UNROLL
      for (int k = 0; k < kHeld; ++k)
        total[k] = zeros ? 0 : inverse * (total[k] - along * (x[k] * inverse));
      r.store(a.data, a.out.element, to, first, total);
    }
  }
}

// Queues one of a kernel's two forms.
template <class Rows>
void launch_rows(const Queue& queue, const char* name, Rows a, bool eights, void (*in_eights)(Rows),
                 void (*else_)(Rows)) {
  while (a.lanes() < kWarp && a.lanes() * kHeld < a.columns) ++a.lane_bits;
  const index_t tiles = ceil_div(a.n_rows, index_t(a.rows_of_pass()) * kRowPasses);
  a.tiles = unsigned(tiles);  // launch() refuses more blocks than 31 bits number
  const index_t blocks = a.batch * a.heads * tiles;
  launch(queue, name, eights ? in_eights : else_, blocks, kRowThreads, 0, a);
}
// Rows of floats that follow each other.
inline bool floats_of_eights(const float* rows, index_t columns, index_t step) {
  return rows_of_eights(Elements(rows, 1, 1, step), columns);
}

// Templates, so that their kernels are compiled where they are called and not in every file.
template <class Same = void>
void unit_rows(const Queue& queue, const UnitRows& a) {
  launch_rows(queue, "unit_rows", a,
              rows_of_eights(a.x, a.columns) && floats_of_eights(a.unit, a.columns, a.columns),
              unit_rows_kernel<true>, unit_rows_kernel<false>);
}
template <class Same = void>
void normalize(const Queue& queue, const NormalizeRows& a) {
  launch_rows(
      queue, "normalize", a,
      rows_of_eights(a.out, a.columns) && floats_of_eights(a.sums, a.columns, a.columns + a.counts),
      normalize_kernel<true>, normalize_kernel<false>);
}
template <class Same = void>
void normalize_backward(const Queue& queue, const NormalizeBackward& a) {
  const bool eights = rows_of_eights(a.grad, a.columns) && rows_of_eights(a.out, a.columns) &&
                      floats_of_eights(a.sums, a.columns, a.columns + a.counts);
  if (a.divisors)
    launch_rows(queue, "normalize_backward", a, eights, normalize_backward_kernel<true, true>,
                normalize_backward_kernel<false, true>);
  else
    launch_rows(queue, "normalize_backward", a, eights, normalize_backward_kernel<true, false>,
                normalize_backward_kernel<false, false>);
}
template <class Same = void>
void finish_gradient(const Queue& queue, const FinishGradient& a) {
  launch_rows(queue, "finish_gradient", a,
              rows_of_eights(a.x, a.columns) && rows_of_eights(a.out, a.columns) &&
                  floats_of_eights(a.own, a.columns, a.columns),
              finish_gradient_kernel<true>, finish_gradient_kernel<false>);
}

}  // namespace lshkit::cuda

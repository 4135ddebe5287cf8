#pragma once
// The rotations of the fast Hadamard family on a tile of tokens: (columns, W), tokens in lanes.
#include "token_tile.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

struct Difference {
  template <class V>
  LSHKIT_INLINE V operator()(V a, V b) const {
    return a - b;
  }
};
// The transform of R registers, of which the first Out outputs are computed.
template <int R, int Out = R, class V, class Minus = Difference>
LSHKIT_INLINE void butterfly(V* v, const Minus& minus = {}) {
  LSHKIT_UNROLL
  for (int half = R / 2; half >= Out; half /= 2) LSHKIT_UNROLL
  for (int i = 0; i < half; ++i) v[i] += v[i + half];
  constexpr int n = Out < R ? Out : R;
  LSHKIT_UNROLL
  for (int half = n / 2; half >= 1; half /= 2) LSHKIT_UNROLL
  for (int i = 0; i < n; ++i)
    if (!(i & half)) {
      const V a = v[i], b = v[i + half];
      v[i] = a + b;
      v[i + half] = minus(a, b);
    }
}

// One radix-R pass at a stride, of element(0) ... element(columns - 1).
template <int R, class Element>
LSHKIT_INLINE void pass_of(const Element& element, float* to, index_t columns, index_t stride) {
  for (index_t base = 0; base < columns; base += R * stride)
    for (index_t i = base; i < base + stride; ++i) {
      F v[R];
      LSHKIT_UNROLL
      for (int k = 0; k < R; ++k) v[k] = element(i + k * stride);
      butterfly<R>(v);
      LSHKIT_UNROLL
      for (int k = 0; k < R; ++k) store(to + (i + k * stride) * W, v[k]);
    }
}
template <int R>
LSHKIT_INLINE void pass(float* x, index_t columns, index_t stride) {
  pass_of<R>([=](index_t i) LSHKIT_ALWAYS_INLINE { return load(x + i * W); }, x, columns, stride);
}

// The radix at a stride: 8, and what is left of `columns` at the last.
LSHKIT_INLINE int radix(index_t columns, index_t stride) {
  return int(smaller(8, columns / stride));
}

// The last pass of a rotation, of which the first `used` rows are wanted: take(row, projections).
template <int R, int Out, class Take>
LSHKIT_INLINE void last_pass_of(const float* from, index_t stride, index_t used, const Take& take) {
  for (index_t i = 0; i < stride; ++i) {
    F v[R];
    LSHKIT_UNROLL
    for (int k = 0; k < R; ++k) v[k] = load(from + (i + k * stride) * W);
    butterfly<R, Out>(v);
    LSHKIT_UNROLL
    for (int k = 0; k < Out; ++k)
      if (i + k * stride < used) take(i + k * stride, v[k]);
  }
}

template <int R, class Take>
LSHKIT_INLINE void last_pass(const float* from, index_t stride, index_t used, const Take& take) {
  if (used <= stride) return last_pass_of<R, 1>(from, stride, used, take);
  if (R > 2 && used <= 2 * stride) return last_pass_of<R, 2>(from, stride, used, take);
  if (R > 4 && used <= 4 * stride)
    return last_pass_of<R, (R > 4 ? 4 : R)>(from, stride, used, take);
  return last_pass_of<R, R>(from, stride, used, take);
}

// The plane (a, b) turned by an angle, of which c and s are cosine and sine, or back.
template <bool Back = false>
LSHKIT_INLINE void rotate_plane(F& a, F& b, float c, float s) {
  const F turned = Back ? c * a + s * b : c * a - s * b;
  b = Back ? c * b - s * a : s * a + c * b;
  a = turned;
}

// The largest stride of a transform's passes.
LSHKIT_INLINE index_t top_stride(index_t columns) {
  index_t top = 8;
  while (top * 8 < columns) top *= 8;
  return top;
}

// The plane rotations stand between transforms: of (x_i, x_{i + D/2}), by D/2 cosines and then D/2
// sines. The first pass of a transform, after one:
template <bool Back>
LSHKIT_INLINE void planes_and_pass(float* x, index_t columns, const float* angles) {
  const index_t half = columns / 2;
  for (index_t first = 0; first < half; first += 8) {
    F v[8], w[8];
    LSHKIT_UNROLL
    for (int k = 0; k < 8; ++k) {
      v[k] = load(x + (first + k) * W);
      w[k] = load(x + (half + first + k) * W);
      rotate_plane<Back>(v[k], w[k], angles[first + k], angles[half + first + k]);
    }
    butterfly<8>(v);
    butterfly<8>(w);
    LSHKIT_UNROLL
    for (int k = 0; k < 8; ++k) {
      store(x + (first + k) * W, v[k]);
      store(x + (half + first + k) * W, w[k]);
    }
  }
}
// The last one, of R = columns / top elements, and the rotation after it: take(i, x_i, x_{i +
// D/2}).
template <bool Back, int R, class Take>
LSHKIT_INLINE void pass_and_planes(const float* x, index_t top, const float* angles,
                                   const Take& take) {
  for (index_t i = 0; i < top; ++i) {
    F v[R];
    LSHKIT_UNROLL
    for (int k = 0; k < R; ++k) v[k] = load(x + (i + k * top) * W);
    butterfly<R>(v);
    LSHKIT_UNROLL
    for (int k = 0; k < R / 2; ++k) {
      const index_t at = i + k * top;
      rotate_plane<Back>(v[k], v[k + R / 2], angles[at], angles[at + R / 2 * top]);
      take(at, v[k], v[k + R / 2]);
    }
  }
}
// What a first pass leaves of a transform, and the rotation after it.
template <bool Back, class Take>
LSHKIT_INLINE void passes_and_planes(float* x, index_t columns, const float* angles,
                                     const Take& take) {
  const index_t top = top_stride(columns);
  for (index_t stride = 8; stride < top; stride *= 8) pass<8>(x, columns, stride);
  switch (radix(columns, top)) {
    case 8:
      return pass_and_planes<Back, 8>(x, top, angles, take);
    case 4:
      return pass_and_planes<Back, 4>(x, top, angles, take);
    default:
      return pass_and_planes<Back, 2>(x, top, angles, take);
  }
}

// G2 H G1 H G0 x, or back by the transposed product: take(i, its elements i and i + D/2). x is
// overwritten.
template <bool Back = false, class Take>
LSHKIT_INLINE void shared_first_stage(float* x, index_t columns, const float* parameters,
                                      const Take& take) {
  planes_and_pass<Back>(x, columns, parameters + (Back ? 2 * columns : 0));
  passes_and_planes<Back>(x, columns, parameters + columns,
                          [=](index_t i, F a, F b) LSHKIT_ALWAYS_INLINE {
                            store(x + i * W, a);
                            store(x + (i + columns / 2) * W, b);
                          });
  pass<8>(x, columns, 1);
  passes_and_planes<Back>(x, columns, parameters + (Back ? 0 : 2 * columns), take);
}

// Whether the rows of H that are used repeat after half of its columns.
LSHKIT_INLINE bool in_halves(index_t columns, index_t used) {
  return 2 * used <= columns && columns >= 32;
}

// The first `used` rows of H v, v of `rows` elements: take(row, projections).
template <class Element, class Take>
LSHKIT_INLINE void transform_of(const Element& element, float* work, index_t rows, index_t used,
                                const Take& take) {
  const index_t top = top_stride(rows);
  pass_of<8>(element, work, rows, 1);
  for (index_t stride = 8; stride < top; stride *= 8) pass<8>(work, rows, stride);
  switch (radix(rows, top)) {
    case 8:
      return last_pass<8>(work, top, used, take);
    case 4:
      return last_pass<4>(work, top, used, take);
    default:
      return last_pass<2>(work, top, used, take);
  }
}
#if defined(LSHKIT_ISA_AVX512)
// All of 32 rows, which stay in registers. Half of the sums are products with 1 or -1 as well: as
// many additions alone would leave half of the arithmetic units idle.
template <class Element, class Take>
LSHKIT_INLINE void transform_32(const Element& element, const Take& take) {
  F v[32], negative = broadcast(-1.0f);
  __asm__("" : "+v"(negative));  // or the compiler subtracts
  const auto minus = [=](F a, F b) LSHKIT_ALWAYS_INLINE { return b * negative + a; };
  LSHKIT_UNROLL
  for (int first = 0; first < 32; first += 8) {
    LSHKIT_UNROLL
    for (int i = first; i < first + 8; ++i) v[i] = element(i);
    butterfly<8>(v + first, minus);
  }
  LSHKIT_UNROLL
  for (int i = 0; i < 8; ++i) {
    F last[4] = {v[i], v[i + 8], v[i + 16], v[i + 24]};
    butterfly<4>(last, minus);
    LSHKIT_UNROLL
    for (int k = 0; k < 4; ++k) take(i + 8 * k, last[k]);
  }
}
#endif

// Columns of eight elements of H's argument, by bit % 7 (rotation_column).
struct EightColumns {
  std::int32_t of[7][8] = {};
  constexpr EightColumns() {
    for (int bit = 0; bit < 7; ++bit)
      for (int i = 0; i < 8; ++i) of[bit][i] = std::int32_t(rotation_column(i, bit));
  }
  const std::int32_t* operator[](index_t bit) const { return of[bit % 7]; }
  index_t column(index_t i, index_t bit) const { return (i & ~index_t(7)) + of[bit % 7][i & 7]; }
};
constexpr EightColumns kEightColumns;

// The rotations H P S z of all groups of hashes. Where the last group uses half of H's rows or
// fewer, these repeat after half of the columns: its elements are sums of two of z's, and which
// signs these have is a matter of where they are read.
template <int Columns>  // 0: not known at compile time
class Rotations {
 public:
  Rotations(Cut& cut, index_t columns, index_t n_hashes, int n_bits)
      : given_columns_(columns),
        n_hashes_(n_hashes),
        last_((n_hashes - 1) / columns),
        n_bits_(n_bits),
        halves_(in_halves(columns, used(last_))),
        work_(cut.take<float>(columns * W)),
        sums_(cut.take<float>(halves_ ? 2 * columns * W : 0)),
        places_(cut.take<std::int32_t>(halves_ ? n_bits * columns / 2 : 0)) {}

  index_t used(index_t group) const { return smaller(columns(), n_hashes_ - group * columns()); }
  // Bits [first_bit, first_bit + n_bits) of `bits` that a hash function has.
  void set_bits(const float* parameters, index_t first_bit, index_t bits) {
    signs_ = parameters + (3 + first_bit) * columns();
    stride_ = bits;
    first_bit_ = first_bit;
    const index_t half = columns() / 2;
    for (index_t b = 0; halves_ && b < n_bits_; ++b) {
      const float* of = signs_of(last_, b);
      std::int32_t* to = places_ + b * half;
      for (index_t i = 0; i < half; ++i) {
        const index_t c = kEightColumns.column(i, first_bit + b);
        to[i] = std::int32_t(W * (c + (of[c] < 0 ? half : 0) + (of[c] != of[c + half]) * 2 * half));
      }
    }
  }
  // From a tile x to z, in its place where z is read.
  void set_tile(float* x, const float* parameters) {
    z_ = x;
    float* const sums = sums_;
    const index_t half = columns() / 2, size = half * W;
    const auto add = [=](index_t i, F a, F b) LSHKIT_ALWAYS_INLINE {
      float* to = sums + i * W;
      store(to, a + b);
      store(to + size, -a - b);
      store(to + 2 * size, a - b);
      store(to + 3 * size, b - a);
    };
    if (all_in_halves()) return shared_first_stage(x, columns(), parameters, add);
    const bool halves = halves_;
    shared_first_stage(x, columns(), parameters, [=](index_t i, F a, F b) LSHKIT_ALWAYS_INLINE {
      store(x + i * W, a);
      store(x + i * W + size, b);
      if (halves) add(i, a, b);
    });
  }
  // take(row, projections) for the rows of a group that are used.
  template <class Take>
  LSHKIT_INLINE void rotate(index_t group, index_t bit, const Take& take) const {
    if (in_halves_of(group)) {
      const index_t half = columns() / 2;
      const float* sums = sums_;
      const std::int32_t* places = places_ + bit * half;
      const auto sum = [=](index_t i) LSHKIT_ALWAYS_INLINE { return load(sums + places[i]); };
#if defined(LSHKIT_ISA_AVX512)
      if (half == 32 && used(group) == 32) return transform_32(sum, take);
#endif
      return transform_of(sum, work_, half, used(group), take);
    }
    const float* const z = z_;
    const float* const signs = signs_of(group, bit);
    const index_t order = first_bit_ + bit;
    const auto term = [=](index_t i) LSHKIT_ALWAYS_INLINE {
      const index_t c = kEightColumns.column(i, order);
      return load(z + c * W) * signs[c];
    };
    transform_of(term, work_, columns(), used(group), take);
  }

 protected:
  index_t columns() const { return Columns ? Columns : given_columns_; }
  bool all_in_halves() const { return halves_ && last_ == 0; }
  bool in_halves_of(index_t group) const { return halves_ && group == last_; }
  const float* signs_of(index_t group, index_t bit) const {
    return signs_ + (group * stride_ + bit) * columns();
  }

  index_t given_columns_, n_hashes_, last_;
  int n_bits_;
  bool halves_;
  float *work_, *sums_;
  std::int32_t* places_;
  const float* signs_ = nullptr;
  float* z_ = nullptr;
  index_t stride_ = 0, first_bit_ = 0;
};

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

// The gradient of soft codes in the unit vectors. A margin |z| passes its gradient, with the sign
// of z, to the projection of a selected bit; the rest of a code's bits pass nothing.
//
// FastHadamard, tokens in lanes: for each bit a sparse vector over the hashes, which the transposed
// rotation S H takes to one sum over bits; then the transposed first stage, once a tile.
#include "hadamard.hpp"
#include "margins.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

typedef std::int32_t __attribute__((may_alias)) Word;

// The gradients of a tile's projections.
struct ProjectionGradients {
  float* of_bits;                 // (n_bits, hashes, W)
  std::int32_t *codes, *margins;  // (hashes, W), (hashes, n_selected, W): what they are made of

  ProjectionGradients(Cut& cut, const SoftHashGradient& g) {
    const index_t hashes = smaller(g.columns, g.n_hashes);
    of_bits = cut.take<float>(g.n_bits * hashes * W);
    codes = cut.take<std::int32_t>(round_up(hashes, 4 * W) * W);
    margins = cut.take<std::int32_t>(round_up(hashes * g.n_selected, 4 * W) * W);
  }

  // Of the hashes [first, first + hashes) of the tokens from `token` on. Selected > 0: known at
  // compile time.
  template <int Selected>
  LSHKIT_NOINLINE void fill(const SoftHashGradient& g, index_t first, index_t hashes, index_t token,
                            index_t count) const {
    const int r = Selected ? Selected : g.n_selected;
    const index_t m = g.n_hashes, pair = token * m + first;
    if (g.code_bytes == 1)
      load_rows(static_cast<const std::uint8_t*>(g.codes) + pair, m, hashes, count, codes);
    else
      load_rows(static_cast<const std::uint16_t*>(g.codes) + pair, m, hashes, count, codes);
    load_rows(reinterpret_cast<const Word*>(g.margin_grads + pair * r), m * r, hashes * r, count,
              margins);
    for (index_t i = 0; i < hashes; ++i) {
      const I code = load(codes + i * W);
      I bits[Selected ? Selected : 16], slopes[Selected ? Selected : 16];
      LSHKIT_UNROLL
      for (int k = 0; k < r; ++k) {
        const I gradient = load(margins + (i * r + k) * W);
        bits[k] = gradient & kBitOfWord;
        const I set = (code >> bits[k]) & 1;
        slopes[k] = without_bits(gradient) ^ ((set == I{}) & std::int32_t(0x80000000));
      }
      float* to = of_bits + i * W;
      for (int b = 0; b < g.n_bits; ++b, to += hashes * W) {
        const I bit = broadcast(kNumbers[b]);
        I slope = {};  // a bit is selected once
        LSHKIT_UNROLL
        for (int k = 0; k < r; ++k) slope |= (bits[k] == bit) & slopes[k];
        store(to, (F)slope);
      }
    }
  }
};

// The first pass of H v, v zero from row In * stride on: v = rows where row < used.
template <int R, int In>
LSHKIT_INLINE void first_pass_of(float* to, index_t stride, index_t used, const float* rows) {
  for (index_t i = 0; i < stride; ++i) {
    F v[In];
    LSHKIT_UNROLL
    for (int k = 0; k < In; ++k)
      v[k] = i + k * stride < used ? load(rows + (i + k * stride) * W) : F{};
    butterfly<In>(v);
    LSHKIT_UNROLL
    for (int k = 0; k < R; ++k) store(to + (i + k * stride) * W, v[k % In]);
  }
}

template <int R>
LSHKIT_INLINE void first_pass(float* to, index_t stride, index_t used, const float* rows) {
  if (used <= stride) return first_pass_of<R, 1>(to, stride, used, rows);
  if (R > 2 && used <= 2 * stride) return first_pass_of<R, 2>(to, stride, used, rows);
  if (R > 4 && used <= 4 * stride) return first_pass_of<R, (R > 4 ? 4 : R)>(to, stride, used, rows);
  return first_pass_of<R, R>(to, stride, used, rows);
}
// H v, v of `rows` elements, of which the first `used` are given: take(i, element).
template <class Take>
LSHKIT_INLINE void transform_from(const float* v, index_t used, float* work, index_t rows,
                                  const Take& take) {
  const index_t top = top_stride(rows);
  switch (radix(rows, top)) {
    case 8:
      first_pass<8>(work, top, used, v);
      break;
    case 4:
      first_pass<4>(work, top, used, v);
      break;
    default:
      first_pass<2>(work, top, used, v);
  }
  for (index_t stride = top / 8; stride > 1; stride /= 8) pass<8>(work, rows, stride);
  for (index_t base = 0; base < rows; base += 8) {
    F part[8];
    LSHKIT_UNROLL
    for (int k = 0; k < 8; ++k) part[k] = load(work + (base + k) * W);
    butterfly<8>(part);
    LSHKIT_UNROLL
    for (int k = 0; k < 8; ++k) take(base + k, part[k]);
  }
}

// The way back through the rotations, summed up over all of them: S P' H v. What an element of the
// last group is added to is where Rotations reads it.
template <int Columns>
struct RotationsBack : Rotations<Columns> {
  using Rotations<Columns>::Rotations;

  void clear(float* z) {
    this->z_ = z;
    const std::size_t size =
        sizeof(float) * W * this->given_columns_;  // not known: a call of memset
    if (!this->all_in_halves()) std::memset(z, 0, size);
    if (this->halves_) std::memset(this->sums_, 0, 2 * size);
  }
  // v: gradients of the projections that are used, (used(group), W).
  LSHKIT_INLINE void add(index_t group, index_t bit, const float* v) const {
    const index_t columns = this->columns(), used = this->used(group);
    if (this->in_halves_of(group)) {
      const index_t half = columns / 2;
      float* const sums = this->sums_;
      const std::int32_t* const places = this->places_ + bit * half;
      const auto take = [=](index_t i, F x) LSHKIT_ALWAYS_INLINE {
        float* to = sums + places[i];
        store(to, load(to) + x);
      };
#if defined(LSHKIT_ISA_AVX512)
      if (half == 32 && used == 32)
        return transform_32([=](index_t i) LSHKIT_ALWAYS_INLINE { return load(v + i * W); }, take);
#endif
      return transform_from(v, used, this->work_, half, take);
    }
    float* const z = this->z_;
    const float* const signs = this->signs_of(group, bit);
    const index_t order = this->first_bit_ + bit;
    transform_from(v, used, this->work_, columns, [=](index_t i, F x) LSHKIT_ALWAYS_INLINE {
      const index_t c = kEightColumns.column(i, order);
      store(z + c * W, load(z + c * W) + x * signs[c]);
    });
  }
  // The sums, then the transposed first stage: the gradients of the tile, times `scale`.
  void finish(const float* parameters, float scale) const {
    float* const z = this->z_;
    const index_t columns = this->columns(), half = columns / 2, size = half * W;
    for (index_t i = 0; this->halves_ && i < half; ++i) {
      const float* from = this->sums_ + i * W;
      const F same = load(from) - load(from + size);
      const F other = load(from + 2 * size) - load(from + 3 * size);
      const F a = same + other, b = same - other;
      float* to = z + i * W;
      store(to, this->all_in_halves() ? a : load(to) + a);
      store(to + size, this->all_in_halves() ? b : load(to + size) + b);
    }
    shared_first_stage<true>(z, columns, parameters, [=](index_t i, F a, F b) LSHKIT_ALWAYS_INLINE {
      store(z + i * W, a * scale);
      store(z + i * W + size, b * scale);
    });
  }
};

template <int Columns>
struct GradientTile {
  float* z;  // (columns, W)
  ProjectionGradients projections;
  RotationsBack<Columns> rotations;
  index_t bytes;

  GradientTile(Cut cut, const SoftHashGradient& g) : GradientTile(&cut, g) { bytes = cut.used; }

 private:
  GradientTile(Cut* cut, const SoftHashGradient& g)
      : z(cut->take<float>(g.columns * W)),
        projections(*cut, g),
        rotations(*cut, g.columns, g.n_hashes, g.n_bits) {}
};

// Columns and Selected > 0: known at compile time.
template <int Columns, int Selected>
void hadamard_gradient(const SoftHashGradient& g) {
  const index_t columns = Columns ? Columns : g.columns;
  GradientTile<Columns> tile(Cut{g.scratch}, g);
  tile.rotations.set_bits(g.parameters, 0, g.n_bits);
  for (index_t token = 0; token < g.grad.rows; token += W) {
    const index_t count = smaller(W, g.grad.rows - token);
    tile.rotations.clear(tile.z);
    for (index_t group = 0; group * columns < g.n_hashes; ++group) {
      const index_t used = tile.rotations.used(group);
      tile.projections.template fill<Selected>(g, group * columns, used, token, count);
      for (int b = 0; b < g.n_bits; ++b)
        tile.rotations.add(group, b, tile.projections.of_bits + b * used * W);
    }
    tile.rotations.finish(g.parameters, 1.0f / float(columns));
    for (index_t first = 0; first < g.grad.columns; first += W) {
      F v[W];
      LSHKIT_UNROLL
      for (int i = 0; i < W; ++i) v[i] = load(tile.z + (first + i) * W);
      transpose<float>(v);
      const int width = int(smaller(W, g.grad.columns - first));
      LSHKIT_UNROLL
      for (int t = 0; t < W; ++t)
        if (t < count) store_first(g.grad.row(token + t) + first, v[t], width);
    }
  }
}

template <int Columns>
void hadamard_gradient_any(const SoftHashGradient& g) {
  with_constant<1, 2>(g.n_selected,
                      [&](auto selected) { hadamard_gradient<Columns, selected.value>(g); });
}

// The selected bits of a token: call(row of the parameters, gradient of its projection).
template <class Call>
LSHKIT_INLINE void each_slope(const SoftHashGradient& g, index_t token, index_t first, index_t last,
                              const Call& call) {
  for (index_t h = first; h < last; ++h) {
    const index_t pair = token * g.n_hashes + h;
    const std::uint32_t code = g.code_bytes == 1 ? static_cast<const std::uint8_t*>(g.codes)[pair]
                                                 : static_cast<const std::uint16_t*>(g.codes)[pair];
    for (int k = 0; k < g.n_selected; ++k) {
      const float gradient = g.margin_grads[pair * g.n_selected + k], size = without_bit(gradient);
      const int bit = smaller(bit_of(gradient), g.n_bits - 1);
      std::uint32_t slope;  // negated by its sign bit: a branch would be taken at random
      std::memcpy(&slope, &size, sizeof(slope));
      slope ^= ~(code >> bit) << 31;
      float signed_slope;
      std::memcpy(&signed_slope, &slope, sizeof(slope));
      call(h * g.n_bits + bit, signed_slope);
    }
  }
}

// Columns [first, first + Vectors * W) of a token's gradient; the last vector is `width` wide.
template <int Vectors>
LSHKIT_INLINE void hyperplane_columns(const SoftHashGradient& g, index_t token, index_t first,
                                      int width) {
  const index_t d = g.grad.columns;
  F sum[Vectors] = {};
  each_slope(g, token, 0, g.n_hashes, [&](index_t row, float slope) LSHKIT_ALWAYS_INLINE {
    const float* normal = g.parameters + row * d + first;
    LSHKIT_UNROLL
    for (int v = 0; v < Vectors - 1; ++v) sum[v] += slope * load(normal + v * W);
    sum[Vectors - 1] += slope * load_first(normal + (Vectors - 1) * W, width);
  });
  float* to = g.grad.row(token) + first;
  LSHKIT_UNROLL
  for (int v = 0; v < Vectors - 1; ++v) store(to + v * W, sum[v]);
  store_first(to + (Vectors - 1) * W, sum[Vectors - 1], width);
}

void hyperplane_gradient(const SoftHashGradient& g) {
  constexpr int kVectors = kRegisters >= 32 ? 4 : 8;
  const index_t d = g.grad.columns;
  for (index_t token = 0; token < g.grad.rows; ++token) {
    index_t c = 0;
    for (; c + kVectors * W <= d; c += kVectors * W) hyperplane_columns<kVectors>(g, token, c, W);
    for (; c < d; c += W) hyperplane_columns<1>(g, token, c, int(smaller(W, d - c)));
  }
}

}  // namespace

index_t soft_hash_gradient_scratch(const SoftHashGradient& g) {
  return g.family == Family::hadamard ? GradientTile<0>(Cut{nullptr}, g).bytes : 0;
}

void soft_hash_gradient(const SoftHashGradient& g) {
  if (g.family == Family::hyperplane) return hyperplane_gradient(g);
  return g.columns == 64 ? hadamard_gradient_any<64>(g) : hadamard_gradient_any<0>(g);
}

void plane_gradient(const PlaneGradient& g, index_t first, index_t last) {
  const index_t d = g.x.columns;
  for (index_t token = 0; token < g.x.rows; ++token) {
    const float inverse = g.inverse_norm[token];
    if (!(inverse > 0)) continue;
    const float* x = g.x.row(token);
    each_slope(g, token, first, last, [&](index_t row, float slope) LSHKIT_ALWAYS_INLINE {
      float* to = g.plane_grads + row * d;
      const F factor = broadcast(slope * inverse);
      index_t c = 0;
      for (; c + W <= d; c += W) store(to + c, load(to + c) + factor * load(x + c));
      for (; c < d; ++c) to[c] += slope * inverse * x[c];
    });
  }
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

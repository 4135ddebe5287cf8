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

struct GradientTile {
  float *sum, *work;    // (columns, W)
  std::int32_t* codes;  // (hashes, W)
  // (hashes, n_selected, W): numbers of bits, and the gradients of their z, which are floats.
  std::int32_t *bits, *slopes;
  index_t bytes;

  GradientTile(Cut cut, const SoftHashGradient& g) {
    const index_t hashes = smaller(g.columns, g.n_hashes);
    sum = cut.take<float>(g.columns * W);
    work = cut.take<float>(g.columns * W);
    codes = cut.take<std::int32_t>(round_up(hashes, 4 * W) * W);
    bits = cut.take<std::int32_t>(round_up(hashes * g.n_selected, 4 * W) * W);
    slopes = cut.take<std::int32_t>(round_up(hashes * g.n_selected, 4 * W) * W);
    bytes = cut.used;
  }

  // The hashes [first, first + hashes) of the tokens from `token` on.
  LSHKIT_NOINLINE void load_slopes(const SoftHashGradient& g, index_t first, index_t hashes,
                                   index_t token, index_t count) const {
    const index_t m = g.n_hashes, r = g.n_selected, pair = token * m + first;
    if (g.code_bytes == 1)
      load_rows(static_cast<const std::uint8_t*>(g.codes) + pair, m, hashes, count, codes);
    else
      load_rows(static_cast<const std::uint16_t*>(g.codes) + pair, m, hashes, count, codes);
    load_rows(reinterpret_cast<const Word*>(g.margin_grads + pair * r), m * r, hashes * r, count,
              slopes);
    for (index_t i = 0; i < hashes; ++i) {
      const I code = load(codes + i * W);
      for (index_t k = 0; k < r; ++k) {
        const index_t at = (i * r + k) * W;
        const I gradient = load(slopes + at), bit = gradient & kBitOfWord;
        const I set = (code >> bit) & 1;
        const I minus = (set == I{}) & std::int32_t(0x80000000);
        store(bits + at, bit);
        store(slopes + at, without_bits(gradient) ^ minus);
      }
    }
  }
};

// The first pass of H v, v zero from row In * stride on: rows[row] where row < used.
template <int R, int In, class Row>
LSHKIT_INLINE void first_pass_of(float* to, index_t stride, index_t used, const Row& row) {
  for (index_t i = 0; i < stride; ++i) {
    F v[In];
    LSHKIT_UNROLL
    for (int k = 0; k < In; ++k) v[k] = i + k * stride < used ? row(i + k * stride) : F{};
    butterfly<In>(v);
    LSHKIT_UNROLL
    for (int k = 0; k < R; ++k) store(to + (i + k * stride) * W, v[k % In]);
  }
}

template <int R, class Row>
LSHKIT_INLINE void first_pass(float* to, index_t stride, index_t used, const Row& row) {
  if (used <= stride) return first_pass_of<R, 1>(to, stride, used, row);
  if (R > 2 && used <= 2 * stride) return first_pass_of<R, 2>(to, stride, used, row);
  if (R > 4 && used <= 4 * stride) return first_pass_of<R, (R > 4 ? 4 : R)>(to, stride, used, row);
  return first_pass_of<R, R>(to, stride, used, row);
}

// sum += S H v for v of `rows` rows, whose transform repeats Terms times.
template <int Terms, class Row>
LSHKIT_INLINE void add_repeated_back(float* sum, float* work, index_t rows, const float* signs,
                                     index_t used, const Row& row) {
  const index_t top = top_stride(rows);
  switch (radix(rows, top)) {
    case 8:
      first_pass<8>(work, top, used, row);
      break;
    case 4:
      first_pass<4>(work, top, used, row);
      break;
    default:
      first_pass<2>(work, top, used, row);
  }
  for (index_t stride = top / 8; stride > 1; stride /= 8) pass<8>(work, rows, stride);
  for (index_t base = 0; base < rows; base += 8) {
    F v[8];
    LSHKIT_UNROLL
    for (int k = 0; k < 8; ++k) v[k] = load(work + (base + k) * W);
    butterfly<8>(v);
    LSHKIT_UNROLL
    for (int k = 0; k < 8; ++k) LSHKIT_UNROLL
    for (int t = 0; t < Terms; ++t) {
      const index_t at = base + k + t * rows;
      store(sum + at * W, load(sum + at * W) + v[k] * signs[at]);
    }
  }
}
template <class Row>
LSHKIT_INLINE void add_rotated_back(float* sum, float* work, index_t columns, const float* signs,
                                    index_t used, const Row& row) {
  if (in_halves(columns, used))
    return add_repeated_back<2>(sum, work, columns / 2, signs, used, row);
  add_repeated_back<1>(sum, work, columns, signs, used, row);
}

LSHKIT_INLINE void rotate_planes_back(float* x, index_t columns, const float* parameters) {
  const index_t half = columns / 2;
  for (index_t i = 0; i < half; ++i) {
    const float c = parameters[i], s = parameters[half + i];
    const F a = load(x + i * W), b = load(x + (half + i) * W);
    store(x + i * W, c * a + s * b);
    store(x + (half + i) * W, c * b - s * a);
  }
}

// The transposed first stage of a tile's sums, which are its tokens' gradients then.
LSHKIT_NOINLINE void finish(const SoftHashGradient& g, float* sum, index_t top, index_t token,
                            index_t count) {
  const index_t columns = g.columns;
  const float scale = 1.0f / float(columns);
  rotate_planes_back(sum, columns, g.parameters + 2 * columns);
  transform(sum, columns, top);
  rotate_planes_back(sum, columns, g.parameters + columns);
  transform(sum, columns, top);
  rotate_planes_back(sum, columns, g.parameters);
  for (index_t first = 0; first < g.grad.columns; first += W) {
    F v[W];
    LSHKIT_UNROLL
    for (int i = 0; i < W; ++i) v[i] = load(sum + (first + i) * W) * scale;
    transpose<float>(v);
    const int width = int(smaller(W, g.grad.columns - first));
    LSHKIT_UNROLL
    for (int t = 0; t < W; ++t)
      if (t < count) store_first(g.grad.row(token + t) + first, v[t], width);
  }
}

// Columns and Selected > 0: known at compile time.
template <int Columns, int Selected>
void hadamard_gradient(const SoftHashGradient& g) {
  const index_t columns = Columns ? Columns : g.columns, top = top_stride(columns);
  const int r = Selected ? Selected : g.n_selected;
  const GradientTile tile(Cut{g.scratch}, g);
  float* sum = tile.sum;
  for (index_t token = 0; token < g.grad.rows; token += W) {
    const index_t count = smaller(W, g.grad.rows - token);
    for (index_t i = 0; i < columns; ++i) store(sum + i * W, F{});
    for (index_t group = 0; group * columns < g.n_hashes; ++group) {
      const index_t used = smaller(columns, g.n_hashes - group * columns);
      tile.load_slopes(g, group * columns, used, token, count);
      for (int b = 0; b < g.n_bits; ++b) {
        const float* signs = g.parameters + (3 + group * g.n_bits + b) * columns;
        const I bit = broadcast<std::int32_t>(b);
        add_rotated_back(sum, tile.work, columns, signs, used,
                         [&](index_t row) LSHKIT_ALWAYS_INLINE {
                           I slope = {};  // a bit is selected once
                           const auto select = [&](int k) LSHKIT_ALWAYS_INLINE {
                             const index_t at = (row * r + k) * W;
                             slope |= (load(tile.bits + at) == bit) & load(tile.slopes + at);
                           };
                           if constexpr (Selected > 0) {
                             LSHKIT_UNROLL
                             for (int k = 0; k < Selected; ++k) select(k);
                           } else {  // a loop: it stands in this function some hundred times
                             for (int k = 0; k < r; ++k) select(k);
                           }
                           F v;
                           std::memcpy(&v, &slope, sizeof(v));
                           return v;
                         });
      }
    }
    finish(g, sum, top, token, count);
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
  return g.family == Family::hadamard ? GradientTile(Cut{nullptr}, g).bytes : 0;
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

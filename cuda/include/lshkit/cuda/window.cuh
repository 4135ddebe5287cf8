#pragma once
// The near window of the sampled estimator: pairs with |i - j| < window have the probability itself
// in the place of the share of the hashes in which they collide. What is added to the sampled sums
// and gradients is the difference of the two, a sum over the pairs of the band, blocked as in
// pairs.cuh: a block owns 64 rows of one side, adds to these rows alone, and meets those of the
// other side's 64-row tiles that the band reaches, from its first row on.
//
// Bound: arithmetic, as in pairs.cuh: 2 d + 2 m + 2 d_v (and 2 d for gradients) operations a pair
// of ceil((64 + reach) / 64) tiles for each 64 rows, where reach is window - 1, causal, or twice
// that. No memory.
#include "lshkit/cuda/pairs.cuh"

namespace lshkit::cuda {

// Pairs::weight names the gradient whose excess is added; `probability` is the excess of the sum
// itself. out is added to. Pairs::n_hashes and the codes are wanted for all of them.
struct Window {
  Pairs pairs;
  index_t reach = 1;  // the window
};

// What multiplies y of a pair beyond its share in the sampled sum. s: g . v and bias.
template <PairWeight Weight>
__device__ inline float excess(const Pairs& p, float x, float collisions, float s) {
  if (Weight == PairWeight::collided || Weight == PairWeight::unbiased) {
    const bool sampled = collisions > 0;
    if (Weight == PairWeight::collided && sampled) return 0 * s;
    const float slope = power(agreement(x), p.n_bits - 1) * (float(p.n_bits) / kPi) / sine_of(x);
    if (Weight == PairWeight::collided || !sampled) return slope * s;
    return (slope - unbiased_slope(x, p.n_bits, float(p.n_hashes))) * s;
  }
  const float more = power(agreement(x), p.n_bits) - collisions / float(p.n_hashes);
  return Weight == PairWeight::lower_bound ? more * (0.5f * float(p.n_bits)) * s : more;
}

// Of the pairs that are not seen: no weight that is computed, so that a zero weight among those
// seen passes on the NaN of what it multiplies, and they do not.
constexpr std::uint32_t kNotSeen = 0x80000000u;  // -0

template <PairWeight Weight>
__global__ void __launch_bounds__(kPairThreads) window_kernel(Window window) {
  const Pairs& p = window.pairs;
  constexpr bool kFactors = Weight != PairWeight::probability;
  LSHKIT_SHARED_MEMORY(memory);
  PairTiles& tiles = *reinterpret_cast<PairTiles*>(memory);
  constexpr int kStep = kPairTile + 1;
  float* const y_tile = tiles.a;  // (kPairTile, kStep), over a and b
  const int tx = thread_index() % 16, ty = thread_index() / 16;

  const index_t columns = p.y_columns + p.counts, column_tiles = ceil_div(columns, kPairTile);
  const index_t owner_tiles = ceil_div(p.owner.side.n_rows, kPairTile);
  const index_t first_column = block_index() % column_tiles * kPairTile;
  const index_t first = block_index() / column_tiles % owner_tiles * kPairTile;
  const index_t task = block_index() / column_tiles / owner_tiles;
  const Span owner = span_of<index_t>(p.owner.side, p.query_heads, task);
  const Span other = span_of<index_t>(p.other.side, p.query_heads, task);
  const index_t owners = least(kPairTile, owner.count - first);
  if (owners <= 0) return;  // all of the block

  // The others that the band of these owners reaches.
  const index_t before = p.causal && !p.owner_is_query ? 0 : window.reach - 1;
  const index_t after = p.causal && p.owner_is_query ? 0 : window.reach - 1;
  const index_t begin = first > before ? first - before : 0;
  const index_t end = least(other.count, first + owners + after);
  const auto multiply = [](float a, float b) { return a * b; };
  const auto w_of = [&](int r, int c) -> float& {
    return tiles.w[(ty + 16 * r) * kStep + tx + 16 * c];
  };

  float out[kPairSide][kPairSide] = {};
  for (index_t start = begin; start < end; start += kPairTile) {
    const index_t others = least(kPairTile, end - start);
    float cosine[kPairSide][kPairSide] = {};
    contract(
        tiles, p.n_features,
        [&](int row, index_t column) {
          return row < owners ? p.owner.unit[(owner.flat + first + row) * p.n_features + column]
                              : 0;
        },
        [&](int row, index_t column) {
          return row < others ? p.other.unit[(other.flat + start + row) * p.n_features + column]
                              : 0;
        },
        multiply, cosine);
    // Out of the registers until the weight is known: a thread's own places.
    each_pair([&](int r, int c) { w_of(r, c) = cosine[r][c]; });
    float product[kPairSide][kPairSide] = {}, collisions[kPairSide][kPairSide] = {};
    if (kFactors)
      contract(
          tiles, p.n_values,
          [&](int row, index_t column) {
            const Elements& f = p.owner.factor;
            return row < owners ? load_element<float>(
                                      f.data, offset_of(f, owner, first + row) + column, f.element)
                                : 0;
          },
          [&](int row, index_t column) {
            const Elements& f = p.other.factor;
            return row < others ? load_element<float>(
                                      f.data, offset_of(f, other, start + row) + column, f.element)
                                : 0;
          },
          multiply, product);
    contract(
        tiles, p.n_hashes,
        [&](int row, index_t column) {
          const index_t at = (owner.flat + first + row) * p.n_hashes + column;
          return row < owners ? float(load_code(p.owner.codes, p.code_bytes, at)) : -1;
        },
        [&](int row, index_t column) {
          const index_t at = (other.flat + start + row) * p.n_hashes + column;
          return row < others ? float(load_code(p.other.codes, p.code_bytes, at)) : -1;
        },
        [](float a, float b) { return a == b ? 1.0f : 0.0f; }, collisions);

    each_pair([&](int r, int c) {
      const index_t i = first + ty + 16 * r, j = start + tx + 16 * c;
      const index_t ahead = p.owner_is_query ? i - j : j - i;  // of the key, the query is
      const bool seen = i < owner.count && j < end && ahead < window.reach &&
                        -ahead < (p.causal ? 1 : window.reach) && p.owner.valid[owner.flat + i] &&
                        p.other.valid[other.flat + j];
      float w = float_of_bits(kNotSeen);
      if (seen) {
        float s = product[r][c];
        if (kFactors && p.bias) s += p.bias[p.owner_is_query ? owner.owned + i : other.owned + j];
        w = excess<Weight>(p, clamp_cosine(w_of(r, c)), collisions[r][c], s) + 0.0f;  // not -0
      }
      w_of(r, c) = w;
    });
    __syncthreads();  // a and b are done with
    for (int i = thread_index(); i < kPairTile * kPairTile; i += kPairThreads) {
      const int row = i / kPairTile;
      const index_t column = first_column + i % kPairTile;
      float y = 0;
      if (row < others) {
        if (column < p.y_columns)
          y = load_element<float>(p.y.data, offset_of(p.y, other, start + row) + column,
                                  p.y.element);
        else if (column < columns)
          y = 1;
      }
      y_tile[row * kStep + i % kPairTile] = y;
    }
    __syncthreads();
    for (int k = 0; k < int(others); ++k) {
      float a[kPairSide], b[kPairSide];
      LSHKIT_UNROLL
      for (int r = 0; r < kPairSide; ++r) {
        a[r] = tiles.w[(ty + 16 * r) * kStep + k];
        b[r] = y_tile[k * kStep + tx + 16 * r];
      }
      each_pair(
          [&](int r, int c) { out[r][c] += bits_of_float(a[r]) == kNotSeen ? 0.0f : a[r] * b[c]; });
    }
  }
  each_pair([&](int r, int c) {
    const index_t row = ty + 16 * r, column = first_column + tx + 16 * c;
    if (row < owners && column < columns)
      p.out[(owner.owned + first + row) * columns + column] += out[r][c];
  });
}

inline void add_window(const Queue& queue, const Window& w, index_t sequences) {
  const Pairs& p = w.pairs;
  const index_t blocks = sequences * p.query_heads * ceil_div(p.owner.side.n_rows, kPairTile) *
                         ceil_div(p.y_columns + p.counts, kPairTile);
  const auto run = [&](auto kernel) {
    launch(queue, "window", kernel, blocks, kPairThreads, sizeof(PairTiles), w);
  };
  switch (p.weight) {
    case PairWeight::probability:
      return run(window_kernel<PairWeight::probability>);
    case PairWeight::lower_bound:
      return run(window_kernel<PairWeight::lower_bound>);
    case PairWeight::collided:
      return run(window_kernel<PairWeight::collided>);
    case PairWeight::unbiased:
      return run(window_kernel<PairWeight::unbiased>);
    case PairWeight::exact:
      return;  // the expectation has no window
  }
}

}  // namespace lshkit::cuda

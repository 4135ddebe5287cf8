#pragma once
// Sums over pairs of rows, blocked, with no n x n matrix: out_i = sum_j w_ij y_j, where w is a
// function of the pair's cosine, of the number of hashes in which it collides, and of g . v. The
// expected estimator and all gradients of queries and keys are such sums: a block owns 64 rows of
// one side and meets the other side's in tiles of 64, so that no two blocks add to one place.
//
// Bound: arithmetic, per pair 2 d for a cosine, 2 m for the collisions, 2 d_v for g . v and 2 d for
// the sum, in fp32 outside the tensor cores. Shared memory serves 8 operations a float loaded.
#include "lshkit/cuda/elements.cuh"

namespace lshkit::cuda {

constexpr int kPairTile = 64, kPairThreads = 256, kPairChunk = 32;
constexpr int kPairSide = 4;  // a thread has 4 x 4 pairs, rows and columns 16 apart
constexpr float kPi = 3.14159265358979324f;
constexpr float kSlopeFloor = 1e-6f;  // as the CPU: 1 - x^2 is rounding noise below

// What multiplies y_j. p: the probability (1 - acos(x)/pi)^n_bits, c: the number of collisions.
enum class PairWeight : int {
  probability,  // p
  lower_bound,  // n_bits/2 p (g . v + bias)
  exact,        // p' (g . v + bias)
  collided,     // p' (g . v + bias) where c > 0
  unbiased      // that over 1 - (1 - p)^n_hashes
};

struct PairSide {
  Side side;
  const float* unit = nullptr;          // (heads' rows, n_features), zeros where invalid
  const std::uint8_t* valid = nullptr;  // (heads' rows)
  const void* codes = nullptr;
  Elements factor;  // g of queries or v of keys
  bool own_factor = false;
};

struct Pairs {
  PairSide owner, other;
  bool owner_is_query = true;
  index_t query_heads = 1, n_features = 0, n_values = 0;
  PairWeight weight = PairWeight::probability;
  bool causal = false;  // key <= query
  int n_bits = 8, code_bytes = 1;
  index_t n_hashes = 1;
  const float* bias = nullptr;  // by query of every head of queries, or null
  Elements y;                   // of the other side
  bool own_y = false;
  index_t y_columns = 0;
  int counts = 0;        // one more column of y, of ones
  float* out = nullptr;  // (query heads' rows of the owner, y_columns + counts)
};

// acos(|x|) by Abramowitz and Stegun 4.4.46, error below 3e-8, and the rest as the CPU has it.
__device__ inline float agreement(float x) {
  const float a = fabsf(x);
  float p = -0.0012624911f;
  p = p * a + 0.0066700901f;
  p = p * a - 0.0170881256f;
  p = p * a + 0.0308918810f;
  p = p * a - 0.0501743046f;
  p = p * a + 0.0889789874f;
  p = p * a - 0.2145988016f;
  p = p * a + 1.5707963050f;
  const float t = p * sqrtf(1 - a) * (1 / kPi);
  if (x >= 0) return 1 - t;
  return a > 1 - 4 * 1.1920929e-7f ? 0 : t;
}
__device__ inline float power(float base, int n) {
  float result = 1;
  for (; n > 0; n >>= 1) {
    if (n & 1) result *= base;
    base *= base;
  }
  return result;
}
__device__ inline float clamp_cosine(float x) { return x > 1 ? 1 : x < -1 ? -1 : x; }
__device__ inline float sine_of(float x) {
  const float square = 1 - x * x;
  return sqrtf(square < kSlopeFloor ? kSlopeFloor : square);
}
// p'(x) / (1 - (1 - p)^n_hashes) as (p' / p) (p / (1 - (1 - p)^n_hashes)): p may be too small for a
// float, its ratios are not.
__device__ inline float unbiased_slope(float x, int n_bits, float n_hashes) {
  const float bit = agreement(x);
  if (!(bit > 0)) return 0;
  const float p = power(bit, n_bits);
  const float misses = p < 1 ? n_hashes * log1pf(-p) : -80.0f;
  const float share = p < 1e-30f ? 1 / n_hashes : p / -expm1f(misses);
  return share * float(n_bits) / kPi / (sine_of(x) * bit);
}

struct PairTiles {
  float a[kPairTile * (kPairChunk + 1)];  // the owner's chunk of columns
  float b[kPairTile * (kPairChunk + 1)];  // the other's
  float w[kPairTile * (kPairTile + 1)];
};
static_assert(2 * (kPairChunk + 1) >= kPairTile + 2, "y takes the place of a and b");

template <class Pair>
__device__ inline void each_pair(const Pair& pair) {
  LSHKIT_UNROLL
  for (int r = 0; r < kPairSide; ++r) {
    LSHKIT_UNROLL
    for (int c = 0; c < kPairSide; ++c) pair(r, c);
  }
}

// sum[r][c] += over `columns` columns of product(owner row, other row), staged chunk by chunk.
// RowsTogether: consecutive threads load consecutive rows, where these lie next to each other.
template <bool RowsTogether = false, class LoadOwner, class LoadOther, class Product>
__device__ inline void contract(PairTiles& tiles, index_t columns, const LoadOwner& load_owner,
                                const LoadOther& load_other, const Product& product,
                                float (*sum)[kPairSide]) {
  constexpr int kStep = kPairChunk + 1;
  const int x = thread_index() % 16, y = thread_index() / 16;
  for (index_t first = 0; first < columns; first += kPairChunk) {
    __syncthreads();
    for (int i = thread_index(); i < kPairTile * kPairChunk; i += kPairThreads) {
      const int row = RowsTogether ? i % kPairTile : i / kPairChunk;
      const int column = RowsTogether ? i / kPairTile : i % kPairChunk;
      const bool inside = first + column < columns;
      tiles.a[row * kStep + column] = inside ? load_owner(row, first + column) : 0;
      tiles.b[row * kStep + column] = inside ? load_other(row, first + column) : 0;
    }
    __syncthreads();
    const int width = int(least(kPairChunk, columns - first));
    for (int k = 0; k < width; ++k) {
      float a[kPairSide], b[kPairSide];
      LSHKIT_UNROLL
      for (int r = 0; r < kPairSide; ++r) {
        a[r] = tiles.a[(y + 16 * r) * kStep + k];
        b[r] = tiles.b[(x + 16 * r) * kStep + k];
      }
      each_pair([&](int r, int c) { sum[r][c] += product(a[r], b[c]); });
    }
  }
}

template <PairWeight Weight>
__global__ void __launch_bounds__(kPairThreads) pairs_kernel(Pairs p) {
  constexpr bool kFactors = Weight != PairWeight::probability;
  constexpr bool kCollisions = Weight == PairWeight::collided || Weight == PairWeight::unbiased;
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

  // Of owner and other, by row of the tile; rows beyond the end are zeros.
  const auto factor = [](const PairSide& side, const Span& span, index_t i, index_t column) {
    const Elements& f = side.factor;
    return load_element<float>(
        f.data, (side.own_factor ? (span.owned + i) * f.row : offset_of(f, span, i)) + column,
        f.element);
  };
  // Which others the owners can see: keys up to a query, or queries from a key on.
  index_t begin = 0, end = other.count;
  if (p.causal && p.owner_is_query) end = least(end, first + owners);
  if (p.causal && !p.owner_is_query) begin = first / kPairTile * kPairTile;

  float out[kPairSide][kPairSide] = {};
  for (index_t start = begin; start < end; start += kPairTile) {
    const index_t others = least(kPairTile, other.count - start);
    float cosine[kPairSide][kPairSide] = {}, product[kPairSide][kPairSide] = {},
          collisions[kPairSide][kPairSide] = {};
    const auto multiply = [](float a, float b) { return a * b; };
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
    if (kFactors)
      contract(
          tiles, p.n_values,
          [&](int row, index_t column) {
            return row < owners ? factor(p.owner, owner, first + row, column) : 0;
          },
          [&](int row, index_t column) {
            return row < others ? factor(p.other, other, start + row, column) : 0;
          },
          multiply, product);
    if (kCollisions)  // codes below 2^16 are floats too; padding rows never count, see below
      contract(
          tiles, p.n_hashes,
          [&](int row, index_t column) {
            const index_t at = (owner.flat + first + row) * p.n_hashes + column;
            return row < owners ? float(load_code(p.owner.codes, p.code_bytes, at)) : -1;
          },
          [&](int row, index_t column) {
            const index_t at = (other.flat + start + row) * p.n_hashes + column;
            return row < others ? float(load_code(p.other.codes, p.code_bytes, at)) : -2;
          },
          [](float a, float b) { return a == b ? 1.0f : 0.0f; }, collisions);

    each_pair([&](int r, int c) {
      const index_t i = first + ty + 16 * r, j = start + tx + 16 * c;
      float w = 0;
      bool seen = i < owner.count && j < other.count && p.owner.valid[owner.flat + i] &&
                  p.other.valid[other.flat + j];
      if (p.causal) seen = seen && (p.owner_is_query ? j <= i : i <= j);
      if (kCollisions) seen = seen && collisions[r][c] > 0;
      if (seen) {
        const float x = clamp_cosine(cosine[r][c]);
        float s = product[r][c];
        if (kFactors && p.bias) s += p.bias[p.owner_is_query ? owner.owned + i : other.owned + j];
        if (Weight == PairWeight::probability) w = power(agreement(x), p.n_bits);
        if (Weight == PairWeight::lower_bound)
          w = power(agreement(x), p.n_bits) * (0.5f * float(p.n_bits)) * s;
        if (Weight == PairWeight::exact || Weight == PairWeight::collided)
          w = power(agreement(x), p.n_bits - 1) * (float(p.n_bits) / kPi) / sine_of(x) * s;
        if (Weight == PairWeight::unbiased) w = unbiased_slope(x, p.n_bits, float(p.n_hashes)) * s;
      }
      tiles.w[(ty + 16 * r) * kStep + tx + 16 * c] = w;
    });
    __syncthreads();  // a and b are done with
    for (int i = thread_index(); i < kPairTile * kPairTile; i += kPairThreads) {
      const int row = i / kPairTile;
      const index_t column = first_column + i % kPairTile;
      float y = 0;
      if (row < others && p.other.valid[other.flat + start + row]) {
        const index_t j = start + row;
        if (column < p.y_columns)
          y = load_element<float>(
              p.y.data, (p.own_y ? (other.owned + j) * p.y.row : offset_of(p.y, other, j)) + column,
              p.y.element);
        else if (column < columns)
          y = 1;
      }
      y_tile[row * kStep + i % kPairTile] = y;
    }
    __syncthreads();
    // Where some owners do not see some others, a NaN or infinity of these must not reach them.
    const bool straddles = p.causal && start < first + kPairTile && first < start + kPairTile;
    const auto add = [&](const auto& term) {
      for (int k = 0; k < kPairTile; ++k) {
        float a[kPairSide], b[kPairSide];
        LSHKIT_UNROLL
        for (int r = 0; r < kPairSide; ++r) {
          a[r] = tiles.w[(ty + 16 * r) * kStep + k];
          b[r] = y_tile[k * kStep + tx + 16 * r];
        }
        each_pair([&](int r, int c) { out[r][c] += term(a[r], b[c]); });
      }
    };
    if (straddles || kCollisions)
      add([](float a, float b) { return a == 0 ? 0 : a * b; });
    else
      add(multiply);
  }
  each_pair([&](int r, int c) {
    const index_t row = ty + 16 * r, column = first_column + tx + 16 * c;
    if (row < owners && column < columns)
      p.out[(owner.owned + first + row) * columns + column] = out[r][c];
  });
}

inline void sum_pairs(const Queue& queue, const Pairs& p, index_t sequences) {
  const index_t blocks = sequences * p.query_heads * ceil_div(p.owner.side.n_rows, kPairTile) *
                         ceil_div(p.y_columns + p.counts, kPairTile);
  const auto run = [&](auto kernel) {
    launch(queue, "sum_pairs", kernel, blocks, kPairThreads, sizeof(PairTiles), p);
  };
  switch (p.weight) {
    case PairWeight::probability:
      return run(pairs_kernel<PairWeight::probability>);
    case PairWeight::lower_bound:
      return run(pairs_kernel<PairWeight::lower_bound>);
    case PairWeight::exact:
      return run(pairs_kernel<PairWeight::exact>);
    case PairWeight::collided:
      return run(pairs_kernel<PairWeight::collided>);
    case PairWeight::unbiased:
      return run(pairs_kernel<PairWeight::unbiased>);
  }
}

}  // namespace lshkit::cuda

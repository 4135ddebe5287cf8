#pragma once
// Buckets of many rows, causal, for bucket_gradient_matrix.cuh: through the products M^T = K^T V
// and M'^T = Q^T G, 64 x 64 numbers each in a warp's registers while they are summed, then as
// 16-bit numbers in shared memory.
#include "lshkit/cuda/bucket_gradient_tiles.cuh"

namespace lshkit::cuda {

using ProductSum = float[4][8][4];  // 16 rows of M^T by 8 columns, as C

// The power of two that products are divided by. For float16: g is below 2^8, v and unit vectors
// are not above 1: sums over more than 2^7 rows might leave the range.
template <Element E>
__device__ inline float range_of_products(const MatrixItem& it) {
  float up = 1;
  if (E != Element::float16) return up;
  const int rows = it.queries.count > it.keys.count ? it.queries.count : it.keys.count;
  for (int most = 128; most < rows; most *= 2) {
    up *= 2;
    if (most > (1 << 29)) break;
  }
  return up;
}

template <Element E>
struct LinearBucket {
  const MatrixItem& it;
  const TileLane& lane;
  SharedAddress stages;   // kStages of two tiles: of units, then of factors
  SharedAddress product;  // 4 tiles: rows are M's columns
  float up = 1;           // float16 products are divided by that power of two, undone on the sums

  __device__ SharedAddress unit(int stage) const { return stages + 2 * stage * kTileBytes; }
  __device__ SharedAddress factor(int stage) const { return unit(stage) + kTileBytes; }

  __device__ static void clear(ProductSum& m) {
    LSHKIT_UNROLL
    for (int i = 0; i < 4; ++i) LSHKIT_UNROLL
    for (int n = 0; n < 8; ++n) LSHKIT_UNROLL
    for (int c = 0; c < 4; ++c) m[i][n][c] = 0;
  }
  // m += unit^T factor, of a tile of rows
  __device__ void accumulate(ProductSum& m, int stage) const {
    std::uint32_t a[4][4];
    LSHKIT_UNROLL
    for (int i = 0; i < 4; ++i) {
      std::uint32_t r[4];
      load_fragment<true>(r, unit(stage), lane, i);
      a[i][0] = r[0], a[i][1] = r[2], a[i][2] = r[1], a[i][3] = r[3];
    }
    LSHKIT_UNROLL
    for (int n = 0; n < 4; ++n) {
      std::uint32_t b[4];
      load_fragment<true>(b, factor(stage), lane, n);
      LSHKIT_UNROLL
      for (int i = 0; i < 4; ++i) {
        multiply<E>(m[i][2 * n], a[i], b[0], b[1]);
        multiply<E>(m[i][2 * n + 1], a[i], b[2], b[3]);
      }
    }
  }
  __device__ void store_product(const ProductSum& m) const {
    const float down = 1 / up;
    __syncwarp();
    LSHKIT_UNROLL
    for (int i = 0; i < 4; ++i) {
      LSHKIT_UNROLL
      for (int n = 0; n < 8; ++n) {
        const float* const x = m[i][n];
        const SharedAddress to = product + i * kTileBytes + (lane.sum ^ (n * 16));
        store_shared(to, pack<E>(x[0] * down, x[1] * down));
        store_shared(to + 1024, pack<E>(x[2] * down, x[3] * down));
      }
    }
    __syncwarp();
  }
  // sum += factor M, columns [32 half, 32 half + 32)
  __device__ void apply(float (&sum)[4][4], SharedAddress rows, int half) const {
    LSHKIT_UNROLL
    for (int k = 0; k < 4; ++k) {
      std::uint32_t a[4];
      load_fragment<false>(a, rows, lane, k);
      LSHKIT_UNROLL
      for (int n = 0; n < 2; ++n) {
        std::uint32_t b[4];
        load_fragment<false>(b, product + (2 * half + n) * kTileBytes, lane, k);
        multiply<E>(sum[2 * n], a, b[0], b[2]);
        multiply<E>(sum[2 * n + 1], a, b[1], b[3]);
      }
    }
  }
  __device__ void load(const MatrixRows& r, int first, bool with_unit, int stage) const {
    const int own = first + lane_index() % kTileRows;
    const int positions = own < r.count ? r.order[own] : 0;
    __syncwarp();
    if (with_unit)
      copy_tile<true, true>(r, positions, first, 0, lane, unit(stage), factor(stage));
    else
      copy_tile<false, true>(r, positions, first, 0, lane, unit(stage), factor(stage));
    end_copies();
  }

  // The tiles of rows [begin, end) of a bucket's side, in steps: queries from the first on, keys
  // from the last, as both meet what they see.
  struct Steps {
    int begin, end;
  };
  __device__ static int tiles_of(const MatrixRows& r) {
    return (r.count + kTileRows - 1) / kTileRows;
  }
  // Position of the first row of a tile, and of its last.
  __device__ static int first_of(const MatrixRows& r, int tile) {
    return r.order[tile * kTileRows];
  }
  __device__ static int last_of(const MatrixRows& r, int tile) {
    return r.order[least(r.count, (tile + 1) * kTileRows) - 1];
  }
  __device__ static int tile_of(const MatrixRows& r, int step, bool from_first) {
    return from_first ? step : tiles_of(r) - 1 - step;
  }
  // Whether all rows of a step's tile see all of those of a step of the other side.
  __device__ static bool sees_all(const MatrixRows& own, int step, const MatrixRows& other,
                                  int of_other, bool of_queries) {
    const int o = tile_of(own, step, of_queries), i = tile_of(other, of_other, of_queries);
    return of_queries ? last_of(other, i) <= first_of(own, o)
                      : first_of(other, i) >= last_of(own, o);
  }

  // m += the products of one step's tile of rows.
  __device__ void accumulate_step(ProductSum& m, const MatrixRows& r, int step,
                                  bool from_first) const {
    load(r, tile_of(r, step, from_first) * kTileRows, true, 0);
    wait_for_copies<0>();
    __syncwarp();
    accumulate(m, 0);
  }

  // Each tile of `own` rows, in their order where they are queries and from the last where they are
  // keys, meets through the product the tiles that all of its rows see, and pair by pair those that
  // some of them do.
  // Of the other side, the first `taken` steps are in m already.
  __device__ void causal(const MatrixRows& own, const MatrixRows& other, bool of_queries,
                         const Steps& steps, ProductSum& m, int taken) const {
    const int other_tiles = tiles_of(other);
    const auto other_tile = [&](int i) { return tile_of(other, i, of_queries); };
    bool stale = taken > 0;
    LSHKIT_KEEP_LOOP
    for (int step = steps.begin; step < steps.end; ++step) {
      const int o = tile_of(own, step, of_queries), first = o * kTileRows;
      const int own_first = first_of(own, o), own_last = last_of(own, o);
      load(own, first, false, 1);
      LSHKIT_KEEP_LOOP
      for (; taken < other_tiles; ++taken) {
        if (!sees_all(own, step, other, taken, of_queries)) break;
        accumulate_step(m, other, taken, of_queries);
        stale = true;
      }
      if (stale) store_product(m);
      stale = false;
      // Whether there are pairs with the next tile of others, which then is on its way.
      const auto begin = [&](int next, int stage) {
        const int i = other_tile(next);
        const bool some = next < other_tiles && (of_queries ? first_of(other, i) <= own_last
                                                            : last_of(other, i) >= own_first);
        if (some)
          load(other, i * kTileRows, true, stage);
        else
          end_copies();
        return some;
      };
      bool some = begin(taken, 0);
      wait_for_copies<1>();
      __syncwarp();
      float sum[2][4][4] = {};
      if (taken > 0) {
        LSHKIT_UNROLL
        for (int half = 0; half < 2; ++half) apply(sum[half], factor(1), half);
        if (E == Element::float16) {
          LSHKIT_UNROLL
          for (int half = 0; half < 2; ++half) LSHKIT_UNROLL
          for (int n = 0; n < 4; ++n) LSHKIT_UNROLL
          for (int c = 0; c < 4; ++c) sum[half][n][c] *= up;
        }
      }
      const int own_row = first + lane_index() % kTileRows;
      const int positions = own_row < own.count ? own.order[own_row] : 0;
      LSHKIT_KEEP_LOOP
      for (int next = taken, stage = 0; some; ++next, stage = 2 - stage) {
        const int other_first = other_tile(next) * kTileRows;
        const int other_row = other_first + lane_index() % kTileRows;
        const int others = other_row < other.count ? other.order[other_row] : 0;
        some = begin(next + 1, 2 - stage);
        wait_for_copies<1>();
        __syncwarp();
        std::uint32_t a[4][4], weights[4];
        LSHKIT_UNROLL
        for (int c = 0; c < 4; ++c) load_fragment<false>(a[c], factor(1), lane, c);
        float s[2][4] = {};
        multiply_factors<E>(s, a, factor(stage), lane);
        pack_weights<E>(weights, s, [&](int row, int column) {
          const int at = __shfl_sync(kAllLanes, positions, row);
          const int of_other = __shfl_sync(kAllLanes, others, column);
          return first + row < own.count && other_first + column < other.count &&
                 (of_queries ? of_other <= at : at <= of_other);
        });
        LSHKIT_UNROLL
        for (int half = 0; half < 2; ++half)
          multiply_unit<E>(sum[half], weights, unit(stage), lane, half);
      }
      const TileWriter<E> to{own, lane, unit(1), positions, first, 0, it.scale};
      LSHKIT_UNROLL
      for (int half = 0; half < 2; ++half) to.put(sum[half], half);
    }
    wait_for_copies<0>();
    __syncwarp();
  }
};

template <Element E>
__global__ void __launch_bounds__(kLinearWarps* kWarp, 2)
    bucket_linear_causal_kernel(MatrixGradient p) {
  LSHKIT_SHARED_MEMORY(memory);
  const index_t item = block_index() * kLinearWarps + uniform(warp_index());
  if (item >= p.items()) return;
  MatrixItem it = MatrixItem::of<E>(p, item);
  const TileLane lane;
  const SharedAddress own = shared_address(memory) + uniform(warp_index()) * kLinearWarpBytes;
  it.begin_run();
  LSHKIT_KEEP_LOOP
  for (int b = 0; b < it.buckets; ++b) {
    it.take_bucket(b);
    const int q = it.queries.count, k = it.keys.count;
    if (q == 0 || k == 0 || few(q, k) || is_crowded(p, q, k)) continue;
    LinearBucket<E> bucket{it, lane, own, own + 2 * kStages * kTileBytes};
    bucket.up = range_of_products<E>(it);
    ProductSum m;
    LinearBucket<E>::clear(m);
    bucket.causal(it.queries, it.keys, true, {0, bucket.tiles_of(it.queries)}, m, 0);
    LinearBucket<E>::clear(m);
    bucket.causal(it.keys, it.queries, false, {0, bucket.tiles_of(it.keys)}, m, 0);
  }
}

}  // namespace lshkit::cuda

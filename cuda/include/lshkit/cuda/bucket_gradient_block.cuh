#pragma once
// Buckets of many rows, not causal, for bucket_gradient_matrix.cuh: through the products
// M^T = K^T V and M'^T = Q^T G by a block of four warps, 64 rows at a time. A warp sums 16 rows of
// M^T from all rows of the bucket, and multiplies its own 16 of each 64 rows by the whole of M. The
// keys, the queries and the keys once more are one stream of such steps, the next of which is on
// its way while one is worked on, also from one of the three to the next.
#include "lshkit/cuda/bucket_gradient_linear.cuh"

namespace lshkit::cuda {

constexpr int kBlockWarps = kTileColumns / kTileRows, kBlockRows = kBlockWarps * kTileRows;
constexpr int kBlockBytes = (2 * 2 * kBlockWarps + 2 * kBlockWarps) * kTileBytes;

template <Element E>
struct BlockBucket {
  using Sum = float[8][4];  // 16 rows of M^T by 8 columns each, as C

  const MatrixItem& it;
  const TileLane& lane;
  int warp;
  SharedAddress memory;
  float up = 1;  // as of LinearBucket

  // Two steps of the rows' units and factors, a tile a warp; M; and a tile a warp on its way out.
  __device__ SharedAddress unit(int step, int tile) const {
    return memory + (step % 2 * 2 * kBlockWarps + tile) * kTileBytes;
  }
  __device__ SharedAddress factor(int step, int tile) const {
    return unit(step, tile) + kBlockWarps * kTileBytes;
  }
  __device__ SharedAddress product(int tile) const {
    return memory + (4 * kBlockWarps + tile) * kTileBytes;
  }
  __device__ SharedAddress out() const { return product(kBlockWarps + warp); }

  __device__ static void clear(Sum& m) {
    LSHKIT_UNROLL
    for (int n = 0; n < 8; ++n) LSHKIT_UNROLL
    for (int c = 0; c < 4; ++c) m[n][c] = 0;
  }
  // m += unit^T factor, of a step's tiles
  __device__ void accumulate(Sum& m, int step, int tiles) const {
#ifdef LSHKIT_WARP_GROUP
    const auto a = group_matrix(unit(step, 0)), b = group_matrix(factor(step, 0));
    (void)tiles;  // zeros beyond
    LSHKIT_UNROLL
    for (int t = 0; t < kBlockWarps; ++t)
      multiply_group<E, true>(m, a + t * (kTileBytes / 16), b + t * (kTileBytes / 16), true);
#else
    LSHKIT_UNROLL
    for (int t = 0; t < kBlockWarps; ++t) {
      if (t >= tiles) break;
      std::uint32_t r[4];
      load_fragment<true>(r, unit(step, t), lane, warp);
      const std::uint32_t a[4] = {r[0], r[2], r[1], r[3]};
      LSHKIT_UNROLL
      for (int n = 0; n < 4; ++n) {
        std::uint32_t b[4];
        load_fragment<true>(b, factor(step, t), lane, n);
        multiply<E>(m[2 * n], a, b[0], b[1]);
        multiply<E>(m[2 * n + 1], a, b[2], b[3]);
      }
    }
#endif
  }
  // sum = factor M, of this warp's tile of a step
  __device__ void apply(Sum& sum, int step) const {
#ifdef LSHKIT_WARP_GROUP
    const auto a = group_matrix(factor(step, 0)), b = group_matrix(product(0));
    LSHKIT_UNROLL
    for (int k = 0; k < 4; ++k) multiply_group<E, false>(sum, a + 2 * k, b + 2 * k, k > 0);
#else
    clear(sum);
    LSHKIT_UNROLL
    for (int k = 0; k < 4; ++k) {
      std::uint32_t a[4];
      load_fragment<false>(a, factor(step, warp), lane, k);
      LSHKIT_UNROLL
      for (int n = 0; n < 4; ++n) {
        std::uint32_t b[4];
        load_fragment<false>(b, product(n), lane, k);
        multiply<E>(sum[2 * n], a, b[0], b[2]);
        multiply<E>(sum[2 * n + 1], a, b[1], b[3]);
      }
    }
#endif
  }
  __device__ void store_product(const Sum& m) const {
    const float down = 1 / up;
    LSHKIT_UNROLL
    for (int n = 0; n < 8; ++n) {
      const SharedAddress to = product(warp) + (lane.sum ^ (n * 16));
      store_shared(to, pack<E>(m[n][0] * down, m[n][1] * down));
      store_shared(to + 1024, pack<E>(m[n][2] * down, m[n][3] * down));
    }
  }
  __device__ void all() const {
    const auto steps_of = [](const MatrixRows& r) {
      return (r.count + kBlockRows - 1) / kBlockRows;
    };
    const int of_keys = steps_of(it.keys), seen = of_keys + steps_of(it.queries);
    const int steps = seen + of_keys;
    const auto is_query = [&](int step) { return step >= of_keys && step < seen; };
    const auto first_of = [&](int step) {
      return (step < of_keys ? step : step < seen ? step - of_keys : step - seen) * kBlockRows;
    };
    const auto rows_of = [&](int step) {  // in registers: number by number
      const bool q = is_query(step);
      const MatrixRows &a = it.queries, &b = it.keys;
      return MatrixRows{q ? a.unit : b.unit,     q ? a.factor : b.factor, q ? a.order : b.order,
                        q ? a.starts : b.starts, q ? a.out : b.out,       q ? a.count : b.count};
    };
    const int own = warp * kTileRows;  // of a step's rows
    const auto position = [&](int step) {
      const MatrixRows r = rows_of(step);
      const int row = first_of(step) + own + lane_index() % kTileRows;
      return step < steps && row < r.count ? r.order[row] : 0;
    };
    const auto begin = [&](int step, int positions) {
      const MatrixRows r = rows_of(step);
      const int first = first_of(step) + own;
      if (step < seen && (first < r.count || kWarpGroup))
        copy_tile<true, true>(r, positions, first, 0, lane, unit(step, warp), factor(step, warp));
      else if (step < steps && first < r.count)
        copy_tile<false, true>(r, positions, first, 0, lane, unit(step, warp), factor(step, warp));
      end_copies();
    };

    Sum m, sum;
    clear(m);
    clear(sum);
    int now = position(0), next = position(1);
    begin(0, now);
    LSHKIT_KEEP_LOOP
    for (int step = 0; step < steps; ++step) {
      wait_for_copies<0>();
      publish_to_products();
      __syncthreads();  // the step is there, and what the next one overwrites has been read
      begin(step + 1, next);
      const int after = position(step + 2);
      const MatrixRows r = rows_of(step);
      const int first = first_of(step), left = r.count - first;
      begin_products(m, sum);
      if (step < seen) accumulate(m, step, (left + kTileRows - 1) / kTileRows);
      if (step >= of_keys && (own < left || kWarpGroup)) apply(sum, step);
      end_products(m, sum);
      if (step >= of_keys && own < left) {
        const TileWriter<E> to{r, lane, out(), now, first + own, 0, it.scale * up};
        LSHKIT_UNROLL
        for (int half = 0; half < 2; ++half) to.put(sum, half);
      }
      if (step == of_keys - 1 || step == seen - 1) {
        if (step == seen - 1) __syncthreads();  // M has been read
        store_product(m);                       // seen after the next step's barrier
        clear(m);
      }
      now = next;
      next = after;
    }
  }
};

// Blocks of a multiprocessor: as many as its shared memory has room for.
constexpr int kLinearBlocks = kBeforeHopper ? 3 : 4;
template <Element E>
__global__ void __launch_bounds__(kBlockWarps* kWarp, kLinearBlocks)
    bucket_linear_kernel(MatrixGradient p) {
  LSHKIT_SHARED_MEMORY(memory);
  MatrixItem it = MatrixItem::of<E>(p, block_index());
  const TileLane lane;
  const int warp = uniform(warp_index());
  it.for_buckets([&](int q, int k) { return is_linear(p, q, k); },
                 [&] {
                   if (it.queries.count == 0 || it.keys.count == 0) {
                     store_zeros<E>(it.queries, lane, warp, kBlockWarps);
                     store_zeros<E>(it.keys, lane, warp, kBlockWarps);
                     return;
                   }
                   BlockBucket<E> bucket{it, lane, warp, shared_address(memory)};
                   bucket.up = range_of_products<E>(it);
                   bucket.all();
                 });
}

}  // namespace lshkit::cuda

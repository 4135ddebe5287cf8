#pragma once
// Buckets of few rows, and those that lack queries or keys, for bucket_gradient_matrix.cuh.
#include "lshkit/cuda/bucket_gradient_tiles.cuh"

namespace lshkit::cuda {

// Buckets in the form of pairs, and those that lack queries or keys.
template <Element E>
__global__ void __launch_bounds__(kPairWarps* kWarp) bucket_pairs_kernel(MatrixGradient p) {
  LSHKIT_SHARED_MEMORY(memory);
  const index_t item = block_index() * kPairWarps + uniform(warp_index());
  if (item >= p.items()) return;
  const int l = lane_index();
  const TileLane lane;
  const SharedAddress tiles = shared_address(memory) + uniform(warp_index()) * kPairWarpBytes;
  const auto tile = [&](int array, int i) { return tiles + (2 * array + i) * kTileBytes; };
  enum { kGrad, kValue, kQuery, kKey };

  MatrixItem it = MatrixItem::of<E>(p, item);
  MatrixRows &q = it.queries, &k = it.keys;
  const std::int32_t *const query_order = q.order, *const key_order = k.order;
  const int q_starts = l <= it.buckets ? q.starts[l] : 0,
            k_starts = l <= it.buckets ? k.starts[l] : 0;
  int query_next = 0, key_next = 0;  // positions of the next bucket's row l
  const auto take = [&](int b) {
    const int q0 = __shfl_sync(kAllLanes, q_starts, b), k0 = __shfl_sync(kAllLanes, k_starts, b);
    q.count = __shfl_sync(kAllLanes, q_starts, b + 1) - q0;
    k.count = __shfl_sync(kAllLanes, k_starts, b + 1) - k0;
    q.order = query_order + q0;
    k.order = key_order + k0;
    query_next = l < q.count ? q.order[l] : 0;
    key_next = l < k.count ? k.order[l] : 0;
  };
  take(0);
  LSHKIT_KEEP_LOOP
  for (int b = 0; b < it.buckets; ++b) {
    const MatrixRows queries = q, keys = k;
    const int qi = query_next, ki = key_next;
    if (b + 1 < it.buckets) take(b + 1);
    if (queries.count == 0 || keys.count == 0) {
      store_zeros<E>(queries, lane);
      store_zeros<E>(keys, lane);
      continue;
    }
    if (!few(queries.count, keys.count)) continue;

    __syncwarp();  // the tiles are done with
    LSHKIT_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (16 * i < queries.count)
        copy_tile<false, true>(queries, qi, 16 * i, 16 * i, lane, tiles, tile(kGrad, i));
      if (16 * i < keys.count)
        copy_tile<false, true>(keys, ki, 16 * i, 16 * i, lane, tiles, tile(kValue, i));
    }
    end_copies();
    LSHKIT_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (16 * i < keys.count)
        copy_tile<true, false>(keys, ki, 16 * i, 16 * i, lane, tile(kKey, i), tiles);
      if (16 * i < queries.count)
        copy_tile<true, false>(queries, qi, 16 * i, 16 * i, lane, tile(kQuery, i), tiles);
    }
    end_copies();
    wait_for_copies<1>();
    __syncwarp();

    std::uint32_t weights[2][2][4] = {};  // of queries and keys, as A
    LSHKIT_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (16 * i >= queries.count) continue;
      std::uint32_t grad[4][4];
      LSHKIT_UNROLL
      for (int c = 0; c < 4; ++c) load_fragment<false>(grad[c], tile(kGrad, i), lane, c);
      LSHKIT_UNROLL
      for (int j = 0; j < 2; ++j) {
        if (16 * j >= keys.count) continue;
        float s[2][4] = {};
        multiply_factors<E>(s, grad, tile(kValue, j), lane);
        if (p.causal)
          pack_weights<E>(weights[i][j], s, [&](int row, int column) {
            const int at = __shfl_sync(kAllLanes, qi, 16 * i + row);
            const int other = __shfl_sync(kAllLanes, ki, 16 * j + column);
            return 16 * i + row < queries.count && 16 * j + column < keys.count && other <= at;
          });
        else
          pack_weights<E>(weights[i][j], s, [&](int row, int column) {
            return 16 * i + row < queries.count && 16 * j + column < keys.count;
          });
      }
    }
    wait_for_copies<0>();
    __syncwarp();
    LSHKIT_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (16 * i >= queries.count) continue;
      const TileWriter<E> to{queries, lane, tile(kGrad, i), qi, 16 * i, 16 * i, it.scale};
      LSHKIT_UNROLL
      for (int half = 0; half < 2; ++half) {
        float sum[4][4] = {};
        LSHKIT_UNROLL
        for (int j = 0; j < 2; ++j)
          if (16 * j < keys.count) multiply_unit<E>(sum, weights[i][j], tile(kKey, j), lane, half);
        to.put(sum, half);
      }
    }
    LSHKIT_UNROLL
    for (int j = 0; j < 2; ++j) {
      if (16 * j >= keys.count) continue;
      std::uint32_t turned[2][4];
      LSHKIT_UNROLL
      for (int i = 0; i < 2; ++i) {
        turned[i][0] = transpose(weights[i][j][0]);
        turned[i][1] = transpose(weights[i][j][2]);
        turned[i][2] = transpose(weights[i][j][1]);
        turned[i][3] = transpose(weights[i][j][3]);
      }
      const TileWriter<E> to{keys, lane, tile(kValue, j), ki, 16 * j, 16 * j, it.scale};
      LSHKIT_UNROLL
      for (int half = 0; half < 2; ++half) {
        float sum[4][4] = {};
        LSHKIT_UNROLL
        for (int i = 0; i < 2; ++i)
          if (16 * i < queries.count) multiply_unit<E>(sum, turned[i], tile(kQuery, i), lane, half);
        to.put(sum, half);
      }
    }
  }
}

}  // namespace lshkit::cuda

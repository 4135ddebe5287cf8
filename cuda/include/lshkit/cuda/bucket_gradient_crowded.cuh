#pragma once
// Buckets of more rows than one warp should take alone, causal, for bucket_gradient_matrix.cuh:
// inputs that are clustered have some of thousands of rows among many of a few. The warps of a
// block each take a part of the rows, in their order. The products of the parts are added up
// through shared memory, first to last, so that they are the same numbers every time.
#include "lshkit/cuda/bucket_gradient_linear.cuh"

namespace lshkit::cuda {

constexpr int kCrowdedRun = 16;  // buckets that a block looks at

template <Element E>
struct CrowdedBucket {
  const LinearBucket<E>& linear;

  __device__ static int own_warp() { return uniform(warp_index()); }
  // Words in shared memory of a warp's sums, four of a lane at a time.
  __device__ SharedAddress sums_of(int of_warp, int four) const {
    LSHKIT_SHARED_MEMORY(memory);
    return shared_address(memory) + of_warp * kLinearWarpBytes + (four * kWarp + lane_index()) * 16;
  }
  // m becomes the sum of those of warps [0, end), in this order. Nobody uses the warps' memory.
  __device__ void add_up(ProductSum& m, int end) const {
    __syncwarp();
    LSHKIT_UNROLL
    for (int i = 0; i < 4; ++i) LSHKIT_UNROLL
    for (int n = 0; n < 8; ++n) {
      const SharedAddress to = sums_of(warp_index(), i * 8 + n);
      store_shared(to, m[i][n][0], m[i][n][1]);
      store_shared(to + 8, m[i][n][2], m[i][n][3]);
    }
    __syncthreads();
    LinearBucket<E>::clear(m);
    LSHKIT_KEEP_LOOP
    for (int w = 0; w < end; ++w) {
      LSHKIT_UNROLL
      for (int i = 0; i < 4; ++i) LSHKIT_UNROLL
      for (int n = 0; n < 8; ++n) {
        const Words4 x = load_shared(sums_of(w, i * 8 + n));
        LSHKIT_UNROLL
        for (int c = 0; c < 4; ++c) m[i][n][c] += float_of_bits(x.w[c]);
      }
    }
    __syncthreads();
  }

  // The tiles of a warp, of so many.
  __device__ static int begin_of(int tiles, int warp) { return tiles * warp / kLinearWarps; }
  // How many steps of the other side all rows of the first step of a warp see: none for the first
  // warp, all for a warp without steps.
  __device__ int seen_by(const MatrixRows& own, const MatrixRows& other, bool of_queries,
                         int of_warp) const {
    const int tiles = LinearBucket<E>::tiles_of(own), step = begin_of(tiles, of_warp);
    int low = 0, high = LinearBucket<E>::tiles_of(other);
    if (of_warp == 0) return 0;
    if (step >= tiles) return high;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (uniform(LinearBucket<E>::sees_all(own, step, other, middle, of_queries)))
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }

  // Between what a warp's first step sees and what the next warp's does, the products are the
  // warp's to sum; what it starts from are the sums of the warps before.
  __device__ void causal(const MatrixRows& own, const MatrixRows& other, bool of_queries) const {
    const int tiles = LinearBucket<E>::tiles_of(own), warp = own_warp();
    const int from = seen_by(own, other, of_queries, warp);
    const int to = warp + 1 < kLinearWarps ? seen_by(own, other, of_queries, warp + 1) : from;
    ProductSum m;
    LinearBucket<E>::clear(m);
    LSHKIT_KEEP_LOOP
    for (int step = from; step < to; ++step) linear.accumulate_step(m, other, step, of_queries);
    add_up(m, warp);
    linear.causal(own, other, of_queries, {begin_of(tiles, warp), begin_of(tiles, warp + 1)}, m,
                  from);
    __syncthreads();
  }
};

template <Element E>
__global__ void __launch_bounds__(kLinearWarps* kWarp, 2) bucket_crowded_kernel(MatrixGradient p) {
  LSHKIT_SHARED_MEMORY(memory);
  MatrixItem it = MatrixItem::of<E>(p, block_index());
  const TileLane lane;
  const SharedAddress own = shared_address(memory) + uniform(warp_index()) * kLinearWarpBytes;
  it.for_buckets([&](int q, int k) { return is_crowded(p, q, k); },
                 [&] {
                   LinearBucket<E> bucket{it, lane, own, own + 2 * kStages * kTileBytes};
                   bucket.up = range_of_products<E>(it);
                   const CrowdedBucket<E> crowded{bucket};
                   crowded.causal(it.queries, it.keys, true);
                   crowded.causal(it.keys, it.queries, false);
                 });
}

}  // namespace lshkit::cuda

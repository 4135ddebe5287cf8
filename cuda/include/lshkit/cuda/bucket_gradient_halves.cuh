#pragma once
// Buckets of many rows, not causal, for bucket_gradient_matrix.cuh: as bucket_gradient_linear.cuh,
// by two warps. Each has half of M's columns, 64 numbers a lane, and so half of the columns of dQ
// and of dK: of the other's it needs nothing but the tiles that both copy. One warp's 128 numbers a
// lane would leave room for 8 warps a multiprocessor, too few to hide how long their chains of
// products take.
#include "lshkit/cuda/bucket_gradient_linear.cuh"

namespace lshkit::cuda {

constexpr int kHalves = 2;
constexpr int kHalvesBytes = (2 * kStages + 3 * kHalves) * kTileBytes;

template <Element E>
struct HalvedBucket {
  using Sum = float[2][8][4];  // 16 rows of M^T by 8 columns, as C

  const MatrixItem& it;
  const TileLane& lane;
  int half;
  SharedAddress stages;   // of both warps: kStages of two tiles: of units, then of factors
  SharedAddress product;  // 2 tiles: rows are M's columns
  SharedAddress rows;     // a tile, on its way out
  float up = 1;           // as of LinearBucket

  __device__ SharedAddress unit(int stage) const { return stages + 2 * stage * kTileBytes; }
  __device__ SharedAddress factor(int stage) const { return unit(stage) + kTileBytes; }

  __device__ static void clear(Sum& m) {
    LSHKIT_UNROLL
    for (int i = 0; i < 2; ++i) LSHKIT_UNROLL
    for (int n = 0; n < 8; ++n) LSHKIT_UNROLL
    for (int c = 0; c < 4; ++c) m[i][n][c] = 0;
  }
  // m += unit^T factor, of a tile of rows
  __device__ void accumulate(Sum& m, int stage) const {
    std::uint32_t a[2][4];
    LSHKIT_UNROLL
    for (int i = 0; i < 2; ++i) {
      std::uint32_t r[4];
      load_fragment<true>(r, unit(stage), lane, 2 * half + i);
      a[i][0] = r[0], a[i][1] = r[2], a[i][2] = r[1], a[i][3] = r[3];
    }
    LSHKIT_UNROLL
    for (int n = 0; n < 4; ++n) {
      std::uint32_t b[4];
      load_fragment<true>(b, factor(stage), lane, n);
      LSHKIT_UNROLL
      for (int i = 0; i < 2; ++i) {
        multiply<E>(m[i][2 * n], a[i], b[0], b[1]);
        multiply<E>(m[i][2 * n + 1], a[i], b[2], b[3]);
      }
    }
  }
  __device__ void store_product(const Sum& m) const {
    const float down = 1 / up;
    __syncwarp();
    LSHKIT_UNROLL
    for (int i = 0; i < 2; ++i) {
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
  // This half of the columns of factor M, of rows `first` on of a bucket.
  __device__ void write(const MatrixRows& r, int stage, int first, int positions) const {
    float sum[4][4] = {};
    LSHKIT_UNROLL
    for (int k = 0; k < 4; ++k) {
      std::uint32_t a[4];
      load_fragment<false>(a, factor(stage), lane, k);
      LSHKIT_UNROLL
      for (int n = 0; n < 2; ++n) {
        std::uint32_t b[4];
        load_fragment<false>(b, product + n * kTileBytes, lane, k);
        multiply<E>(sum[2 * n], a, b[0], b[2]);
        multiply<E>(sum[2 * n + 1], a, b[1], b[3]);
      }
    }
    const float scale = it.scale * up;
    if (TileWriter<E>::kWide) {
      TileWriter<E>{r, lane, rows, positions, first, 0, scale}.put(sum, half);
      return;
    }
    __syncwarp();
    LSHKIT_UNROLL
    for (int n = 0; n < 4; ++n) {
      const SharedAddress to = rows + (lane.sum ^ (half * 64 + n * 16));
      store_shared(to, pack<E>(sum[n][0] * scale, sum[n][1] * scale));
      store_shared(to + 1024, pack<E>(sum[n][2] * scale, sum[n][3] * scale));
    }
    __syncwarp();
    const int piece = half * 4 + lane_index() % 4;
    LSHKIT_UNROLL
    for (int step = 0; step < 2; ++step) {
      const int row = 8 * step + lane_index() / 4;
      const index_t at = __shfl_sync(kAllLanes, positions, row);
      if (first + row < r.count)
        store_streaming(r.out + at * kContributionBytes<E> + piece * 16,
                        load_shared(rows + row * 128 + (piece ^ (row & 7)) * 16));
    }
  }

  // This warp's half of a tile's rows.
  template <bool Unit>
  __device__ void copy(const MatrixRows& r, int positions, int first, int stage) const {
    LSHKIT_UNROLL
    for (int s = 0; s < 2; ++s) {
      const int step = 2 * half + s, row = 4 * step + lane.row;
      const index_t at =
          index_t(__shfl_sync(kAllLanes, positions, row)) * kTileColumns + lane.piece * 8;
      const bool inside = first + row < r.count;
      copy_async(factor(stage) + lane.move(step), r.factor + at, inside);
      if (Unit) copy_async(unit(stage) + lane.move(step), r.unit + at, inside);
    }
  }
  // body(stage, first row, positions) for every tile of rows, while the next ones are on their way.
  template <bool Unit, class Body>
  __device__ void stream(const MatrixRows& r, const Body& body) const {
    const int own = lane_index() % kTileRows;
    int positions[kStages];  // of the tiles that are on their way, the nearest first
    const auto position = [&](int first) {
      return first + own < r.count ? r.order[first + own] : 0;
    };
    LSHKIT_UNROLL
    for (int s = 0; s < kStages; ++s) positions[s] = position(s * kTileRows);
    LSHKIT_UNROLL
    for (int s = 0; s < kStages - 1; ++s) {
      if (s * kTileRows < r.count) copy<Unit>(r, positions[s], s * kTileRows, s);
      end_copies();
    }
    LSHKIT_KEEP_LOOP
    for (int first = 0, stage = 0; first < r.count; first += kTileRows) {
      wait_for_copies<kStages - 2>();
      __syncthreads();  // both halves are there, and what the next copy overwrites has been read
      const int ahead = first + (kStages - 1) * kTileRows;
      const int free = stage == 0 ? kStages - 1 : stage - 1;
      if (ahead < r.count) copy<Unit>(r, positions[kStages - 1], ahead, free);
      end_copies();
      body(stage, first, positions[0]);
      LSHKIT_UNROLL
      for (int s = 0; s + 1 < kStages; ++s) positions[s] = positions[s + 1];
      positions[kStages - 1] = position(ahead + kTileRows);
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    wait_for_copies<0>();
    __syncthreads();
  }

  __device__ void all() const {
    Sum m;
    clear(m);
    stream<true>(it.keys, [&](int stage, int, int) { accumulate(m, stage); });
    store_product(m);
    clear(m);
    stream<true>(it.queries, [&](int stage, int first, int positions) {
      accumulate(m, stage);
      write(it.queries, stage, first, positions);
    });
    store_product(m);
    stream<false>(it.keys, [&](int stage, int first, int positions) {
      write(it.keys, stage, first, positions);
    });
  }
};

template <Element E>
__global__ void __launch_bounds__(kHalves* kWarp, 6) bucket_linear_halves_kernel(MatrixGradient p) {
  LSHKIT_SHARED_MEMORY(memory);
  MatrixItem it = MatrixItem::of<E>(p, block_index());
  const TileLane lane;
  const int half = uniform(warp_index());
  const SharedAddress stages = shared_address(memory);
  const SharedAddress own = stages + (2 * kStages + 3 * half) * kTileBytes;
  it.begin_run();
  LSHKIT_KEEP_LOOP
  for (int b = 0; b < it.buckets; ++b) {
    it.take_bucket(b);
    if (it.queries.count == 0 || it.keys.count == 0 || few(it.queries.count, it.keys.count) ||
        is_crowded(p, it.queries.count, it.keys.count))
      continue;  // both warps
    HalvedBucket<E> bucket{it, lane, half, stages, own, own + 2 * kTileBytes};
    bucket.up = range_of_products<E>(it);
    bucket.all();
  }
}

}  // namespace lshkit::cuda

#pragma once
// What rows read of the tables of a weighted sum: see weighted_bucket_sum.cuh.
#include "lshkit/cuda/weighted_bucket_sum.cuh"

namespace lshkit::cuda {

// Lane i gets the sum over the lanes of p[i].
template <int Half = kWarp / 2, class T>
__device__ __forceinline__ T transposed_sum(T* p, int lane) {
  LSHKIT_UNROLL
  for (int i = 0; i < Half; ++i) {
    const bool upper = lane & Half;
    const T keep = upper ? p[i + Half] : p[i], send = upper ? p[i] : p[i + Half];
    p[i] = keep + __shfl_xor_sync(kAllLanes, send, Half);
  }
  if constexpr (Half > 1)
    return transposed_sum<Half / 2>(p, lane);
  else
    return p[0];
}

// E: the elements of the rows' vectors, Q: those of the tables.
template <class T, Element E, Element Q, int C, bool Sum, bool Dots>
__global__ void __launch_bounds__(kGatherThreads, 1) weighted_gather_kernel(WeightedPass<T> a) {
  const int lane = lane_index();
  const std::uint32_t of_task = std::uint32_t(a.gather_blocks);
  const std::uint32_t block = std::uint32_t(block_index()), local = block / of_task;
  const WeightedTask<T> task(a, local);
  const WeightedSide<T>& s = a.read;
  const index_t columns = a.columns();
  constexpr int kTableBytes = kElementBytes<Q>;
  const std::uint32_t row_bytes = std::uint32_t(columns * kTableBytes);
  const std::uint32_t probes = std::uint32_t(s.n_probes);
  const index_t n_entries = a.hashes * s.n_probes;
  const index_t step = a.gather_blocks * kGatherRows;
  const char* const tables = reinterpret_cast<const char*>(a.tables) +
                             a.table_of(local) * a.hashes * a.table_rows * columns * kTableBytes;
  for (index_t i = index_t(block - local * of_task) * kGatherRows + warp_index();
       i < task.read.count; i += step) {
    const index_t base = probes_at(s, task.read, task.head, i, a.first_hash);
    const bool valid = is_valid(s, task.read, i);
    const index_t at = Dots ? vector_at(s, task.read, i) : 0;
    for (index_t first_column = 0; first_column < columns; first_column += a.slice) {
      const int width = int(least(a.slice, columns - first_column));
      T own[C], sum[C];
      bool inside[C];
      const char* const lane_tables = tables + (first_column + lane) * kTableBytes;
      LSHKIT_UNROLL
      for (int k = 0; k < C; ++k) {
        inside[k] = lane + k * kWarp < width;
        own[k] = sum[k] = 0;
        if (Dots && valid && lane + k * kWarp < width)
          own[k] = vector_column<T, E>(a, s, task.read, i, at, first_column + lane + k * kWarp);
      }
      for (index_t first = 0; first < n_entries; first += kWarp) {
        std::uint32_t row = kNoRow;
        T weight = 0;
        index_t entry = 0;
        const bool has = first + lane < n_entries;
        if (has) {
          const std::uint32_t e = std::uint32_t(first) + lane;  // hashes and probes: below 2^31
          const std::uint32_t hash = divided(e, probes, a.probe_shift), probe = e - hash * probes;
          entry = base + hash * s.hash_stride + probe;
          const std::uint32_t code = load_code(s.codes, s.code_bytes, entry);
          if (valid && code < a.n_buckets) {
            const index_t copy = (task.read.first + i) * s.n_probes + probe;
            row =
                std::uint32_t(hash * a.table_rows + (a.order == Order::all ? index_t(code) : copy));
            if (Sum) weight = s.weights ? s.weights[entry] : T(1);
          }
        }
        T dots[kWarp];
        LSHKIT_UNROLL
        for (int group = 0; group < kWarp; group += kGatherBatch) {
          if (first + group >= n_entries) {
            LSHKIT_UNROLL
            for (int u = 0; u < kGatherBatch; ++u) dots[group + u] = 0;
            continue;
          }
          T x[kGatherBatch][C];
          LSHKIT_UNROLL
          for (int u = 0; u < kGatherBatch; ++u) {
            const std::uint32_t from = __shfl_sync(kAllLanes, row, group + u);
            const char* const bucket = lane_tables + std::uint64_t(from) * row_bytes;
            LSHKIT_UNROLL
            for (int k = 0; k < C; ++k)
              x[u][k] = from != kNoRow && inside[k] ? load_element<T>(bucket, k * kWarp, Q) : T(0);
          }
          LSHKIT_UNROLL
          for (int u = 0; u < kGatherBatch; ++u) {
            if (Sum) {
              const T w = __shfl_sync(kAllLanes, weight, group + u);
              LSHKIT_UNROLL
              for (int k = 0; k < C; ++k) sum[k] += w * x[u][k];
            }
            if (Dots) {
              dots[group + u] = own[0] * x[u][0];
              LSHKIT_UNROLL
              for (int k = 1; k < C; ++k) dots[group + u] += own[k] * x[u][k];
            }
          }
        }
        if (Dots) {
          const T dot = transposed_sum(dots, lane) * a.scale;
          if (has) {
            T& to = s.weight_grads[entry];
            to = first_column == 0 ? dot : to + dot;
          }
        }
      }
      if (Sum) {
        LSHKIT_UNROLL
        for (int k = 0; k < C; ++k) {
          const index_t column = first_column + lane + k * kWarp;
          if (lane + k * kWarp >= width || column >= s.sum_columns) continue;
          T& to = s.sum[(task.read.owned + i) * s.sum_columns + column];
          to = (a.first_hash == 0 ? 0 : to) + sum[k] * a.scale;
        }
      }
    }
  }
}

}  // namespace lshkit::cuda

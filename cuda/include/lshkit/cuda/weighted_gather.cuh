#pragma once
// What rows read of the tables of a weighted sum: see weighted_bucket_sum.cuh.
#include "lshkit/cuda/weighted_bucket_sum.cuh"
#include "lshkit/cuda/words.cuh"

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

// Blocks of a multiprocessor: as many as registers allow.
template <class T, Element Q, int C, int Columns, bool Both>
constexpr int gather_blocks = sizeof(T) > 4                                              ? 1
                              : Q == Element::bfloat16 && C == 2 && Columns > 1 && !Both ? 3
                                                                                         : 2;

// E: the elements of the rows' vectors, Q: those of the tables. A lane has C columns for each of
// kRowsAtOnce rows, Columns of them at a time.
template <class T, Element E, Element Q, int C, int Columns, bool Sum, bool Dots>
__global__ void __launch_bounds__(kGatherThreads, gather_blocks<T, Q, C, Columns, Sum && Dots>)
    weighted_gather_kernel(WeightedPass<T> a) {
  constexpr int kRows = kRowsAtOnce<Columns>, kLanes = kWarp / kRows;
  constexpr int kLoads = C * kRows / Columns, kOwn = kLoads * Columns, kStride = kLanes * Columns;
  // Steps in flight of a warp: as many as registers allow two blocks.
  constexpr int kBatch = kRows * kOwn * int(sizeof(T)) > 32 ? kGatherBatch / kRows : kGatherBatch;
  const int lane = lane_index(), of_row = lane % kLanes, part = lane / kLanes;
  const std::uint32_t of_task = std::uint32_t(a.gather_blocks);
  const std::uint32_t block = std::uint32_t(block_index()), local = block / of_task;
  const WeightedTask<T> task(a, local);
  const WeightedSide<T>& s = a.read;
  const index_t columns = a.columns();
  constexpr int kTableBytes = kElementBytes<Q>;
  std::uint32_t row_bytes = std::uint32_t(columns * kTableBytes);
  keep_in_register(row_bytes);
  const std::uint32_t probes = std::uint32_t(s.n_probes);
  const int n_entries = int(a.hashes * s.n_probes);  // of a row: below 2^31
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
      const int first_own = of_row * Columns;  // of this slice; whole numbers of Columns
      T own[kOwn], sum[kOwn];
      bool inside[kLoads];
      const char* lane_tables = tables + (first_column + first_own) * kTableBytes;
      keep_in_register(lane_tables);
      LSHKIT_UNROLL
      for (int k = 0; k < kLoads; ++k) {
        inside[k] = first_own + k * kStride < width;
        LSHKIT_UNROLL
        for (int c = 0; c < Columns; ++c) {
          const int j = k * Columns + c;
          own[j] = sum[j] = 0;
          if (Dots && valid && inside[k])
            own[j] = vector_column<T, E>(a, s, task.read, i, at,
                                         first_column + first_own + k * kStride + c);
        }
      }
      // Of this lane's probe among a warp of them; the next is on its way while this one is read.
      const int number = of_row * kRows + part;
      const auto number_of = [&](int first) {
        return std::uint32_t(first + number < n_entries ? first + number : 0);
      };
      const auto entry_of = [&](int first) {
        const std::uint32_t e = number_of(first), hash = divided(e, probes, a.probe_shift);
        return base + hash * s.hash_stride + (e - hash * probes);
      };
      std::uint32_t next_code = 0, next_row = 0;  // of the tables without the code
      T next_weight = 1;
      const auto look = [&](int first) {
        const std::uint32_t e = number_of(first), hash = divided(e, probes, a.probe_shift);
        const index_t copy = (task.read.first + i) * s.n_probes + (e - hash * probes);
        next_row = std::uint32_t(hash * a.table_rows + (a.order == Order::all ? 0 : copy));
        const index_t entry = entry_of(first);
        next_code = load_code(s.codes, s.code_bytes, entry);
        if (Sum && s.weights) next_weight = s.weights[entry];
      };
      look(0);
      for (int first = 0; first < n_entries; first += kWarp) {
        const bool has = first + number < n_entries;
        std::uint32_t row = kNoRow;
        if (has && valid && next_code < a.n_buckets)
          row = next_row + (a.order == Order::all ? next_code : 0);
        const T weight = row == kNoRow ? T(0) : next_weight;
        if (first + kWarp < n_entries) look(first + kWarp);
        T dots[kLanes];
        const auto read = [&](auto whole) {
          constexpr bool kWhole = decltype(whole)::value;
          LSHKIT_UNROLL
          for (int group = 0; group < kLanes; group += kBatch) {
            if (!kWhole && first + group * kRows >= n_entries) {
              LSHKIT_UNROLL
              for (int u = 0; u < kBatch; ++u) dots[group + u] = 0;
              continue;
            }
            T x[kBatch][kOwn];
            LSHKIT_UNROLL
            for (int u = 0; u < kBatch; ++u) {
              const std::uint32_t from = __shfl_sync(kAllLanes, row, part * kLanes + group + u);
              const char* const bucket = lane_tables + std::uint64_t(from) * row_bytes;
              LSHKIT_UNROLL
              for (int k = 0; k < kLoads; ++k)
                load_columns<Q, Columns>(bucket + k * kStride * kTableBytes,
                                         kWhole || (from != kNoRow && inside[k]),
                                         x[u] + k * Columns);
            }
            LSHKIT_UNROLL
            for (int u = 0; u < kBatch; ++u) {
              if (Sum) {
                const T w = __shfl_sync(kAllLanes, weight, part * kLanes + group + u);
                LSHKIT_UNROLL
                for (int j = 0; j < kOwn; ++j) sum[j] += w * x[u][j];
              }
              if (Dots) {
                dots[group + u] = own[0] * x[u][0];
                LSHKIT_UNROLL
                for (int j = 1; j < kOwn; ++j) dots[group + u] += own[j] * x[u][j];
              }
            }
          }
        };
        // As a rule all of them have a row, and every lane columns: no load is conditional then.
        if (kRows > 1 && width == kLanes * kOwn &&
            __ballot_sync(kAllLanes, row != kNoRow) == kAllLanes)
          read(std::true_type{});
        else
          read(std::false_type{});
        if (Dots) {
          const T dot = transposed_sum<kLanes / 2>(dots, lane) * a.scale;
          if (has) {
            T& to = s.weight_grads[entry_of(first)];
            to = first_column == 0 ? dot : to + dot;
          }
        }
      }
      if (Sum) {
        // Of both rows; then each half of the warp has every other of a lane's columns.
        LSHKIT_UNROLL
        for (int j = 0; j < kOwn; j += kRows) {
          T total = sum[j];
          if constexpr (kRows == 2) {
            const T keep = part ? sum[j + 1] : sum[j], send = part ? sum[j] : sum[j + 1];
            total = keep + __shfl_xor_sync(kAllLanes, send, kLanes);
          }
          const int of_slice = first_own + j / Columns * kStride + j % Columns + part;
          const index_t column = first_column + of_slice;
          if (of_slice >= width || column >= s.sum_columns) continue;
          T& to = s.sum[(task.read.owned + i) * s.sum_columns + column];
          to = (a.first_hash == 0 ? 0 : to) + total * a.scale;
        }
      }
    }
  }
}

}  // namespace lshkit::cuda

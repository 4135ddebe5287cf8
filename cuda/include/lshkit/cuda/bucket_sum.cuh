#pragma once
// The sum verb. A block has the tables of up to 32 hashes and a few columns of the values in shared
// memory: one number a bucket and lane, a lane being a hash and a column, so that the lanes of a
// warp never meet in a bank whatever the codes are. A lane adds the values of its column to its
// hash's buckets in the order of the keys: no atomics, the same sum at every run. Half of the
// block's threads stage the next chunk of rows meanwhile.
//
// Codes of one byte and sums in float32 have kernels of their own, made for speed: byte_sum.cuh and
// byte_sum_ordered.cuh. This one is for all else: codes of two bytes, float64, less shared memory.
//
// Traffic, per token and hash of d = 64 columns in fp32: 256 bytes read and 256 written to add, 256
// read to query, 768 of shared memory (causal: 1280, a query's numbers are staged to be summed).
// To that this adds 0.5 bytes in 4 for the codes, 0.25 for the values. It is far from that bound:
// four warps add, four keys at a time, and what a warp reads its next four keys wait for. Device
// memory: every slice of columns reads all codes again, n_columns / columns of a block times.
#include "lshkit/cuda/elements.cuh"

namespace lshkit::cuda {

constexpr int kSumThreads = 256, kSumChunk = 128;  // half of the threads stage, half compute
constexpr int kSumHashes = 32;                     // of a group at most
constexpr int kStagedQueries = 32;                 // of a causal sum, between two barriers
constexpr int kRowStep = kSumChunk + 4;            // of a hash's rows of a chunk, without conflicts

struct BucketSumPlan {
  int hashes = 1, columns = 1;  // of a group; lanes = hashes * columns
  int table_rows = 1;           // buckets of a pass; two more are for what has none
  bool ordered = false;         // causal or reversed
  index_t shared_bytes = 0;
  int lanes() const { return hashes * columns; }
};

template <class T>
struct BucketSum {
  Side query, key;
  index_t query_heads = 1;
  const void *query_codes = nullptr, *key_codes = nullptr;
  int code_bytes = 1;
  index_t n_hashes = 1, n_buckets = 1;
  Elements values;
  bool own_values = false;  // of every head of queries, not of every head of this side
  index_t n_values = 0;
  bool counts = false;  // one more column, of ones: the sum of the weights
  // Nonzero: the key takes part. By key of every head (batch stride, head stride), or null.
  const std::uint8_t* key_valid = nullptr;
  index_t valid_batch = 0, valid_head = 0;
  Order order = Order::all;
  T scale = 1;
  T* out = nullptr;  // (sequences' heads of queries, rows, n_values + counts), contiguous
  BucketSumPlan plan;

  __host__ __device__ index_t columns() const { return n_values + (counts ? 1 : 0); }
};

template <class T>
index_t bucket_sum_shared_bytes(const BucketSumPlan& p) {
  const index_t rows = 2 * index_t(p.hashes) * kRowStep * 2;
  return index_t(sizeof(T)) * p.lanes() * (p.table_rows + 2) + rows * (p.ordered ? 2 : 1) +
         index_t(sizeof(T)) * 2 * p.columns * kSumChunk +
         (p.ordered ? index_t(sizeof(T)) * kStagedQueries * p.lanes() : 0);
}

constexpr int most_columns(std::size_t element_bytes) { return element_bytes == 4 ? 4 : 2; }

// As many lanes as there is memory for: columns are read in slices, and few slices read the codes
// seldom. Where not even 32 lanes have room for all buckets, these are taken a range at a time.
template <class T>
BucketSumPlan plan_bucket_sum(index_t n_hashes, index_t n_buckets, index_t columns, Order order,
                              index_t shared_limit) {
  BucketSumPlan best;
  best.ordered = order != Order::all;
  for (int wanted = most_columns(sizeof(T)); wanted >= 1; wanted /= 2) {
    BucketSumPlan p = best;
    p.hashes = int(least(n_hashes, kSumHashes));
    p.columns = wanted;
    if (p.lanes() > kSumChunk || (wanted > 1 && wanted >= 2 * columns)) continue;
    p.table_rows = int(least(n_buckets, 65534));  // rows, and two more, are 16 bits
    if (bucket_sum_shared_bytes<T>(p) > shared_limit) {
      if (wanted > 1) continue;
      BucketSumPlan empty = p;
      empty.table_rows = 0;
      const index_t room = shared_limit - bucket_sum_shared_bytes<T>(empty);
      p.table_rows = int(least(p.table_rows, room / (index_t(sizeof(T)) * p.lanes())));
      if (p.table_rows < 1) break;
    }
    p.shared_bytes = bucket_sum_shared_bytes<T>(p);
    return p;
  }
  throw std::runtime_error("lshkit: this GPU has too little shared memory for bucket sums");
}

// What one chunk is staged from and to.
template <class T>
struct SumStage {
  const BucketSum<T>& a;
  Span query, key;
  index_t first_hash, first_column, first_bucket;
  int hashes;

  __device__ void rows(const void* codes, const Span& side, index_t chunk, int t,
                       std::uint16_t none, std::uint16_t* to) const {
    const index_t i = chunk * kSumChunk + t;
    const index_t from = (side.flat + i) * a.n_hashes + first_hash;
    for (int g = 0; g < a.plan.hashes; ++g) {
      std::uint16_t row = none;
      if (i < side.count && g < hashes) {
        const index_t bucket = index_t(load_code(codes, a.code_bytes, from + g)) - first_bucket;
        if (bucket >= 0 && bucket < a.plan.table_rows && bucket + first_bucket < a.n_buckets)
          row = std::uint16_t(bucket);
      }
      to[g * kRowStep + t] = row;
    }
  }
  // A key that takes no part has a row of zeros, whatever its value holds.
  __device__ void values(index_t chunk, int t, T* to) const {
    const index_t j = chunk * kSumChunk + t;
    const bool valid =
        j < key.count &&
        (!a.key_valid ||
         a.key_valid[key.batch * a.valid_batch + key.head * a.valid_head + key.first + j]);
    const Elements& v = a.values;
    const index_t from = a.own_values ? (key.owned + j) * v.row : offset_of(v, key, j);
    for (int c = 0; c < a.plan.columns; ++c) {
      const index_t column = first_column + c;
      T x = 0;
      if (valid && column < a.n_values)
        x = load_element<T>(v.data, from + column, v.element);
      else if (valid && column < a.columns())
        x = 1;
      to[c * kSumChunk + t] = x;
    }
  }
};

// Adds four keys to a lane's buckets in their order; row r[3] is the last one. What the keys before
// it bring to its bucket is added to a key first, so that no sum waits for another.
template <class T>
__device__ inline void add_four(const T* table, int lanes, const int* r, const T* v, T* x) {
  T old[4];
  LSHKIT_UNROLL
  for (int k = 0; k < 4; ++k) old[k] = table[r[k] * lanes];
  LSHKIT_UNROLL
  for (int k = 0; k < 4; ++k) {
    T sum = v[k];
    LSHKIT_UNROLL
    for (int before = 0; before < k; ++before)
      if (r[before] == r[k]) sum += v[before];
    x[k] = old[k] + sum;
  }
}

template <class T>
__device__ inline void add_chunk(T* table, int lanes, const std::uint16_t* rows, const T* values) {
  for (int t = 0; t < kSumChunk; t += 4) {
    int r[4];
    T v[4], x[4];
    LSHKIT_UNROLL
    for (int k = 0; k < 4; ++k) {
      r[k] = rows[t + k];
      v[k] = values[t + k];
    }
    add_four(table, lanes, r, v, x);
    LSHKIT_UNROLL
    for (int k = 0; k < 4; ++k) table[r[k] * lanes] = x[k];
  }
}

// Adds four keys, and reads for each of the four queries what is there after its own key.
template <class T>
__device__ inline void add_and_read_four(T* table, int lanes, const int* r, const int* q,
                                         const T* v, T* y) {
  T x[4];
  LSHKIT_UNROLL
  for (int k = 0; k < 4; ++k) y[k] = table[q[k] * lanes];
  add_four(table, lanes, r, v, x);
  LSHKIT_UNROLL
  for (int k = 0; k < 4; ++k) LSHKIT_UNROLL
  for (int before = 0; before <= k; ++before)
    if (q[k] == r[before]) y[k] = x[before];
  LSHKIT_UNROLL
  for (int k = 0; k < 4; ++k) table[r[k] * lanes] = x[k];
}

// One block: one slice of columns of one head of one sequence.
template <class T, int Columns>
__global__ void __launch_bounds__(kSumThreads, 1) bucket_sum_kernel(BucketSum<T> a) {
  LSHKIT_SHARED_MEMORY(memory);
  const int lanes = a.plan.hashes * Columns, hashes = a.plan.hashes, rows = a.plan.table_rows;
  T* const table = reinterpret_cast<T*>(memory);  // (rows + 2, lanes)
  T* const values = table + (rows + 2) * lanes;   // [2] (Columns, kSumChunk)
  T* const staged = values + 2 * Columns * kSumChunk;
  std::uint16_t* const key_rows = reinterpret_cast<std::uint16_t*>(
      staged + (a.plan.ordered ? kStagedQueries * lanes : 0));  // [2] (hashes, kRowStep)
  std::uint16_t* const query_rows = a.plan.ordered ? key_rows + 2 * hashes * kRowStep : key_rows;
  const std::uint16_t no_key = std::uint16_t(rows), no_query = std::uint16_t(rows + 1);

  const index_t slices = ceil_div(a.columns(), Columns);
  const index_t task = block_index() / slices;
  SumStage<T> stage{a, span_of(a.query, a.query_heads, task), span_of(a.key, a.query_heads, task),
                    0, block_index() % slices * Columns,      0,
                    0};
  const index_t query_chunks = ceil_div(stage.query.count, kSumChunk);
  const index_t key_chunks = ceil_div(stage.key.count, kSumChunk);
  const int thread = thread_index();
  const bool stages = thread >= kSumChunk;  // warps of their own
  const int t = thread % kSumChunk;
  const int lane_hash = t % hashes, lane_column = t / hashes;
  const bool owns = !stages && t < lanes;
  T* const lane_table = table + t;
  const int buffer_rows = hashes * kRowStep, buffer_values = Columns * kSumChunk;

  const auto stage_keys = [&](index_t chunk, int buffer) {
    stage.rows(a.key_codes, stage.key, chunk, t, no_key, key_rows + buffer * buffer_rows);
    stage.values(chunk, t, values + buffer * buffer_values);
  };
  const auto stage_queries = [&](index_t chunk, int buffer) {
    stage.rows(a.query_codes, stage.query, chunk, t, no_query, query_rows + buffer * buffer_rows);
  };
  // out = ((0 + pass 1) + pass 2 ...) * scale, each by the same thread
  const auto store = [&](index_t i, int c, T sum, bool first, bool last) {
    const index_t column = stage.first_column + c;
    if (i >= stage.query.count || column >= a.columns()) return;
    T& out = a.out[(stage.query.owned + i) * a.columns() + column];
    if (!first) sum += out;
    out = last ? sum * a.scale : sum;
  };

  for (stage.first_hash = 0; stage.first_hash < a.n_hashes; stage.first_hash += hashes)
    for (stage.first_bucket = 0; stage.first_bucket < a.n_buckets; stage.first_bucket += rows) {
      stage.hashes = int(least(hashes, a.n_hashes - stage.first_hash));
      const bool first = stage.first_hash == 0 && stage.first_bucket == 0;
      const bool last =
          stage.first_hash + hashes >= a.n_hashes && stage.first_bucket + rows >= a.n_buckets;
      __syncthreads();
      for (int i = thread; i < (rows + 2) * lanes; i += kSumThreads) table[i] = 0;

      if (a.order == Order::all) {
        if (stages && key_chunks > 0) stage_keys(0, 0);
        __syncthreads();
        for (index_t chunk = 0; chunk < key_chunks; ++chunk) {
          const int buffer = int(chunk % 2);
          if (stages && chunk + 1 < key_chunks) stage_keys(chunk + 1, 1 - buffer);
          if (owns)
            add_chunk(lane_table, lanes, key_rows + buffer * buffer_rows + lane_hash * kRowStep,
                      values + buffer * buffer_values + lane_column * kSumChunk);
          __syncthreads();
        }
        if (stages && query_chunks > 0) stage_queries(0, 0);
        __syncthreads();
        for (index_t chunk = 0; chunk < query_chunks; ++chunk) {
          const int buffer = int(chunk % 2);
          if (stages) {
            if (chunk + 1 < query_chunks) stage_queries(chunk + 1, 1 - buffer);
          } else {
            // Every lane of a warp starts at another hash: other banks.
            const std::uint16_t* from = query_rows + buffer * buffer_rows + t;
            T sum[Columns] = {};
            for (int g = t % hashes, n = 0; n < hashes; ++n, g = g + 1 == hashes ? 0 : g + 1) {
              const T* bucket = table + from[g * kRowStep] * lanes + g;
              LSHKIT_UNROLL
              for (int c = 0; c < Columns; ++c) sum[c] += bucket[c * hashes];
            }
            LSHKIT_UNROLL
            for (int c = 0; c < Columns; ++c) store(chunk * kSumChunk + t, c, sum[c], first, last);
          }
          __syncthreads();
        }
        continue;
      }

      // In order, or from the end: query i after key i.
      const bool reversed = a.order == Order::reversed;
      const index_t chunks = reversed && key_chunks > query_chunks ? key_chunks : query_chunks;
      const auto chunk_at = [&](index_t step) { return reversed ? chunks - 1 - step : step; };
      const auto stage_both = [&](index_t step, int buffer) {
        stage_keys(chunk_at(step), buffer);
        stage_queries(chunk_at(step), buffer);
      };
      if (stages && chunks > 0) stage_both(0, 0);
      __syncthreads();
      for (index_t step = 0; step < chunks; ++step) {
        const int buffer = int(step % 2);
        if (stages && step + 1 < chunks) stage_both(step + 1, 1 - buffer);
        const std::uint16_t* key = key_rows + buffer * buffer_rows + lane_hash * kRowStep;
        const std::uint16_t* query = query_rows + buffer * buffer_rows + lane_hash * kRowStep;
        const T* value = values + buffer * buffer_values + lane_column * kSumChunk;
        for (int part = 0; part < kSumChunk; part += kStagedQueries) {
          for (int u = 0; owns && u < kStagedQueries; u += 4) {
            int r[4], q[4];
            T v[4], y[4];
            LSHKIT_UNROLL
            for (int k = 0; k < 4; ++k) {
              const int at = reversed ? kSumChunk - 1 - (part + u + k) : part + u + k;
              r[k] = key[at];
              q[k] = query[at];
              v[k] = value[at];
            }
            add_and_read_four(lane_table, lanes, r, q, v, y);
            LSHKIT_UNROLL
            for (int k = 0; k < 4; ++k) staged[(u + k) * lanes + t] = y[k];
          }
          __syncthreads();
          for (int s = thread; s < kStagedQueries * Columns; s += kSumThreads) {
            const int u = s / Columns, c = s % Columns;
            const T* from = staged + u * lanes + c * hashes;
            T sum = 0;
            for (int g = thread % hashes, n = 0; n < hashes; ++n, g = g + 1 == hashes ? 0 : g + 1)
              sum += from[g];
            const int at = reversed ? kSumChunk - 1 - (part + u) : part + u;
            store(chunk_at(step) * kSumChunk + at, c, sum, first, last);
          }
          __syncthreads();
        }
      }
    }
}

// In bucket_sum.cu, for float and double.
template <class T>
void bucket_sum(const Queue& queue, BucketSum<T> a, index_t sequences, index_t shared_limit);

}  // namespace lshkit::cuda

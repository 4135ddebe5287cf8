#pragma once
// The lower bound's gradient of fp32 inputs, and of codes with more bits than are sorted by, hash
// by hash, in time linear in the length (YOSO, eq. 4); bucket_gradient_matrix.cuh has the rest. A
// counting sort brings a bucket's rows together, and a block takes a bucket. One of a queries and b
// keys costs a b (d_v + 2 d) products pair by pair, or 2 d d_v (a + b) through the products M =
// sum_j v_j k_j^T and sum_i g_i q_i^T: the cheaper is taken. A hash is a launch: no two blocks of
// it have a row in common, so that sums over the hashes are made in order, without atomics.
//
// Bound: arithmetic, 32,768 operations a token and hash in the linear form at d = d_v = 64, in fp32
// outside the tensor cores; device memory, 512 bytes of gradients read and written a row and hash.
#include "lshkit/cuda/bucket_sort.cuh"
#include "lshkit/cuda/pairs.cuh"

namespace lshkit::cuda {

constexpr int kSortBits = 11;   // of a code; rows that share these and no more are told apart later
constexpr int kSortHashes = 4;  // of a launch of the sort

struct BucketGradient {
  GroupSort sort;  // of all heads
  const float *query_unit = nullptr, *key_unit = nullptr;
  index_t n_features = 0, n_values = 0;
  Elements grad, value;         // grad: rows of every head of queries
  const float* bias = nullptr;  // what g . v gains, by query of every head of queries, or null
  bool causal = false;
  float scale = 1;
  bool exact_buckets = true;                         // all bits of a code were sorted by
  float *query_grad = nullptr, *key_grad = nullptr;  // added to

  // The bias is one more column: of g, where v has ones.
  __host__ __device__ index_t columns() const { return n_values + (bias ? 1 : 0); }
};

// The rows of one bucket, and what the pairs of them need.
struct BucketRows {
  const BucketGradient& p;
  Span query, key;
  const std::int32_t *queries, *keys;  // positions in the spans
  int n_queries, n_keys;
  index_t hash;

  __device__ float grad(int i, index_t column) const {
    const index_t row = query.owned + queries[i];
    if (column < p.n_values)
      return load_element<float>(p.grad.data, row * p.grad.row + column, p.grad.element);
    return column < p.columns() ? p.bias[row] : 0;
  }
  __device__ float value(int j, index_t column) const {
    if (column < p.n_values)
      return load_element<float>(p.value.data, offset_of(p.value, key, keys[j]) + column,
                                 p.value.element);
    return column < p.columns() ? 1 : 0;
  }
  __device__ float query_unit(int i, index_t column) const {
    return column < p.n_features ? p.query_unit[(query.flat + queries[i]) * p.n_features + column]
                                 : 0;
  }
  __device__ float key_unit(int j, index_t column) const {
    return column < p.n_features ? p.key_unit[(key.flat + keys[j]) * p.n_features + column] : 0;
  }
  __device__ bool same_code(int i, int j) const {
    const GroupSort& s = p.sort;
    return load_code(s.queries.codes, s.code_bytes,
                     (query.flat + queries[i]) * s.n_hashes + hash) ==
           load_code(s.keys.codes, s.code_bytes, (key.flat + keys[j]) * s.n_hashes + hash);
  }
  // Keys that the i-th query sees: the first of them, in order.
  __device__ int seen(int i) const {
    int low = 0, high = n_keys;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (keys[middle] <= queries[i])
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
};

// The block's arithmetic: tiles of 64 x 64 in shared memory, 4 x 4 numbers of each in a thread.
struct BucketTiles {
  PairTiles& tiles;
  static constexpr int kStep = kPairTile + 1;

  __device__ float* rows() const { return tiles.a; }     // (64, kStep), over a and b
  __device__ float* weights() const { return tiles.w; }  // (64, kStep)

  // rows = at(row, column), zeros from `count` rows on.
  template <class At>
  __device__ void load_rows(int count, index_t first_column, const At& at) const {
    __syncthreads();
    for (int i = thread_index(); i < kPairTile * kPairTile; i += kPairThreads) {
      const int row = i / kPairTile, column = i % kPairTile;
      rows()[row * kStep + column] = row < count ? at(row, first_column + column) : 0;
    }
    __syncthreads();
  }
  // out[r][c] += sum over k of a[row][k] (or a[k][row]) b[k][column]
  template <bool Transposed>
  __device__ static void multiply(const float* a, const float* b, float (*out)[kPairSide]) {
    const int x = thread_index() % 16, y = thread_index() / 16;
    for (int k = 0; k < kPairTile; ++k) {
      float left[kPairSide], right[kPairSide];
      LSHKIT_UNROLL
      for (int r = 0; r < kPairSide; ++r) {
        left[r] = Transposed ? a[k * kStep + y + 16 * r] : a[(y + 16 * r) * kStep + k];
        right[r] = b[k * kStep + x + 16 * r];
      }
      each_pair([&](int r, int c) { out[r][c] += left[r] * right[c]; });
    }
  }
  __device__ void store_weights(const float (*numbers)[kPairSide]) const {
    const int x = thread_index() % 16, y = thread_index() / 16;
    __syncthreads();
    each_pair([&](int r, int c) { weights()[(y + 16 * r) * kStep + x + 16 * c] = numbers[r][c]; });
    __syncthreads();
  }
  // to[order[row]] += numbers; the same thread has the same numbers of a tile every time.
  __device__ static void add(const float (*numbers)[kPairSide], float* to,
                             const std::int32_t* order, int count, index_t first_column,
                             index_t columns) {
    const int x = thread_index() % 16, y = thread_index() / 16;
    each_pair([&](int r, int c) {
      const index_t column = first_column + x + 16 * c;
      if (y + 16 * r < count && column < columns)
        to[order[y + 16 * r] * columns + column] += numbers[r][c];
    });
  }
};

struct BucketBlock {
  const BucketRows& b;
  BucketTiles t;

  // Pairs of queries [i0, i1), at most a tile, and keys [j0, j1).
  __device__ void pairs(int i0, int i1, int j0, int j1) const {
    const BucketGradient& p = b.p;
    float* const query_grad = p.query_grad + b.query.owned * p.n_features;
    float* const key_grad = p.key_grad + b.key.owned * p.n_features;
    const int x = thread_index() % 16, y = thread_index() / 16;
    for (int j = j0; j < j1; j += kPairTile) {
      const int nq = i1 - i0, nk = int(least(kPairTile, j1 - j));
      float weight[kPairSide][kPairSide] = {};
      contract(
          t.tiles, p.columns(),
          [&](int row, index_t column) { return row < nq ? b.grad(i0 + row, column) : 0; },
          [&](int row, index_t column) { return row < nk ? b.value(j + row, column) : 0; },
          [](float g, float v) { return g * v; }, weight);
      each_pair([&](int r, int c) {
        const int row = y + 16 * r, column = x + 16 * c;
        bool sees = row < nq && column < nk;
        if (sees && p.causal) sees = b.keys[j + column] <= b.queries[i0 + row];
        if (sees && !p.exact_buckets) sees = b.same_code(i0 + row, j + column);
        weight[r][c] = sees ? weight[r][c] * p.scale : 0;
      });
      t.store_weights(weight);
      for (index_t first = 0; first < p.n_features; first += kPairTile) {
        float of_query[kPairSide][kPairSide] = {}, of_key[kPairSide][kPairSide] = {};
        t.load_rows(nk, first, [&](int row, index_t c) { return b.key_unit(j + row, c); });
        t.multiply<false>(t.weights(), t.rows(), of_query);
        t.add(of_query, query_grad, b.queries + i0, nq, first, p.n_features);
        t.load_rows(nq, first, [&](int row, index_t c) { return b.query_unit(i0 + row, c); });
        t.multiply<true>(t.weights(), t.rows(), of_key);
        t.add(of_key, key_grad, b.keys + j, nk, first, p.n_features);
      }
    }
  }

  // product[value][feature] += scale sum over rows [r0, r1) of factor(row, value) unit(row,
  // feature)
  template <class Factor, class Unit>
  __device__ void accumulate(int r0, int r1, index_t first_value, index_t first_feature,
                             const Factor& factor, const Unit& unit,
                             float (*product)[kPairSide]) const {
    contract<true>(
        t.tiles, r1 - r0,
        [&](int c, index_t row) { return factor(r0 + int(row), first_value + c) * b.p.scale; },
        [&](int c, index_t row) { return unit(r0 + int(row), first_feature + c); },
        [](float f, float u) { return f * u; }, product);
  }
  // to[row] += factor(row)^T product, for rows [r0, r1)
  template <class Factor>
  __device__ void apply(int r0, int r1, index_t first_value, index_t first_feature,
                        const Factor& factor, const std::int32_t* order, float* to) const {
    for (int r = r0; r < r1; r += kPairTile) {
      const int count = int(least(kPairTile, r1 - r));
      float sum[kPairSide][kPairSide] = {};
      t.load_rows(count, first_value, [&](int row, index_t c) { return factor(r + row, c); });
      t.multiply<false>(t.rows(), t.weights(), sum);
      t.add(sum, to, order + r, count, first_feature, b.p.n_features);
    }
  }

  // Through the products. Causal: a tile of queries sees the keys before all of it through them;
  // keys in between are few and met pair by pair. Keys get theirs on the way back.
  __device__ void linear() const {
    const BucketGradient& p = b.p;
    const auto grad = [&](int i, index_t c) { return b.grad(i, c); };
    const auto value = [&](int j, index_t c) { return b.value(j, c); };
    const auto query_unit = [&](int i, index_t c) { return b.query_unit(i, c); };
    const auto key_unit = [&](int j, index_t c) { return b.key_unit(j, c); };
    float* const query_grad = p.query_grad + b.query.owned * p.n_features;
    float* const key_grad = p.key_grad + b.key.owned * p.n_features;
    const int step = p.causal ? kPairTile : b.n_queries;
    const int last = (b.n_queries - 1) / step;
    const auto end_of = [&](int chunk) { return int(least(b.n_queries, (chunk + 1) * step)); };
    const auto seen_by_all = [&](int chunk) { return p.causal ? b.seen(chunk * step) : b.n_keys; };
    for (index_t v = 0; v < p.columns(); v += kPairTile)
      for (index_t f = 0; f < p.n_features; f += kPairTile) {
        float product[kPairSide][kPairSide] = {};
        for (int chunk = 0, before = 0; chunk <= last; ++chunk) {
          const int seen = seen_by_all(chunk);
          accumulate(before, seen, v, f, value, key_unit, product);
          before = seen;
          if (before == 0) continue;
          t.store_weights(product);
          apply(chunk * step, end_of(chunk), v, f, grad, b.queries, query_grad);
        }
        float back[kPairSide][kPairSide] = {};
        for (int chunk = last; chunk >= 0; --chunk) {
          accumulate(chunk * step, end_of(chunk), v, f, grad, query_unit, back);
          const int from = chunk > 0 ? seen_by_all(chunk - 1) : 0, to = seen_by_all(chunk);
          if (from == to) continue;
          t.store_weights(back);
          apply(from, to, v, f, value, b.keys, key_grad);
        }
      }
    for (int chunk = 0; p.causal && chunk <= last; ++chunk)
      pairs(chunk * step, end_of(chunk), seen_by_all(chunk), b.seen(end_of(chunk) - 1));
  }
};

// One bucket of one task. `slot`: which of the hashes that were sorted together.
LSHKIT_KERNEL void __launch_bounds__(kPairThreads, 1)
    bucket_gradient_kernel(BucketGradient p, index_t slot) {
  LSHKIT_SHARED_MEMORY(memory);
  const GroupSort& s = p.sort;
  const index_t buckets = s.buckets(), task = block_index() / buckets;
  const index_t bucket = block_index() % buckets;
  const Span query = s.span(s.queries, task), key = s.span(s.keys, task);
  const index_t at = (slot * s.tasks() + task) * (buckets + 1) + bucket;
  const int query_start = s.queries.starts[at], query_end = s.queries.starts[at + 1];
  const int key_start = s.keys.starts[at], key_end = s.keys.starts[at + 1];
  if (query_start == query_end || key_start == key_end) return;  // all of the block
  const BucketRows rows{p,
                        query,
                        key,
                        s.queries.order + slot * s.rows(s.queries) + query.owned + query_start,
                        s.keys.order + slot * s.rows(s.keys) + key.owned + key_start,
                        query_end - query_start,
                        key_end - key_start,
                        s.first_hash + slot};
  const BucketBlock block{rows, {*reinterpret_cast<PairTiles*>(memory)}};
  const float a = float(rows.n_queries), b = float(rows.n_keys), d = float(p.n_features),
              dv = float(p.columns());
  if (p.exact_buckets && a * b * (dv + 2 * d) > 2 * d * dv * (a + b)) return block.linear();
  for (int i = 0; i < rows.n_queries; i += kPairTile) {
    const int end = int(least(rows.n_queries, i + kPairTile));
    block.pairs(i, end, 0, p.causal ? rows.seen(end - 1) : rows.n_keys);
  }
}

LSHKIT_KERNEL void __launch_bounds__(kPairThreads) clear_kernel(float* x, index_t count) {
  const index_t i = block_index() * kPairThreads + thread_index();
  if (i < count) x[i] = 0;
}
inline void clear(const Queue& queue, float* x, index_t count) {
  launch(queue, "clear", clear_kernel, ceil_div(count, kPairThreads), kPairThreads, 0, x, count);
}

// Adds to query_grad and key_grad, which are cleared first. Order and starts of the sort are
// scratch.
inline void bucket_gradient(const Queue& queue, BucketGradient p) {
  GroupSort& s = p.sort;
  clear(queue, p.query_grad, s.rows(s.queries) * p.n_features);
  clear(queue, p.key_grad, s.rows(s.keys) * p.n_features);
  for (s.first_hash = 0; s.first_hash < s.n_hashes; s.first_hash += kSortHashes) {
    s.hashes = least(kSortHashes, s.n_hashes - s.first_hash);
    group_sort(queue, s);
    for (index_t slot = 0; slot < s.hashes; ++slot)
      launch(queue, "bucket_gradient", bucket_gradient_kernel, s.tasks() * s.buckets(),
             kPairThreads, sizeof(PairTiles), p, slot);
  }
}

}  // namespace lshkit::cuda

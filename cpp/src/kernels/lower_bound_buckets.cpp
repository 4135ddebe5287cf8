// The lower bound's gradient hash by hash: a counting sort brings a bucket's rows together. A
// bucket of a queries and b keys costs a b (2 d_v + 4 d) flops pair by pair ("direct" where the
// rows lie, while they are few, "quadratic" once packed), or 4 d d_v (a + b) through the products
// sum_j v_j k_j^T and sum_i g_i q_i^T ("linear"), which keeps the whole linear in the length. The
// cheaper is taken.
//
// Bound: flops. The linear form takes 32,768 a token and hash at d = d_v = 64.
#include "bucket_sort.hpp"
#include "lower_bound_bfloat16.hpp"
#include "lower_bound_gradient.hpp"
#include "lower_bound_sketch.hpp"
#include "matmul.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int W = kLanes<float>;
using F = Vec<float>;
using Problem = LowerBoundGradient;

constexpr index_t kCacheBytes = index_t(2) << 20;  // rows beyond that are prefetched
constexpr index_t kChunk = 128;                    // rows of a bucket that are packed at once
constexpr index_t kDirectRows = 24;  // rows of a bucket up to which packing does not pay
constexpr index_t kMostVectors = kRegisters >= 32 ? 4 : 2;  // of such a row that is not packed

struct BucketScratch {
  BucketSort sort;
  std::int32_t* passed;  // keys before each chunk of queries
  float *key, *value, *query, *value_t, *pair, *product, *sum;
  index_t d, dv;
  Sketch sketch;
  Bfloat16Rows words;
  BucketScratch(const Problem& p, Cut& cut)
      : sort(p, cut),
        d(round_up(p.query.columns, W)),
        dv(round_up(p.value.columns, W)),
        sketch(p, cut),
        words(cut_words(p, cut)) {
    passed = cut.take<std::int32_t>(p.query.rows / kChunk + 2);
    key = cut.take<float>(kChunk * d);
    value = cut.take<float>(kChunk * dv);
    query = cut.take<float>(kChunk * d);
    value_t = cut.take<float>(kChunk * dv);
    pair = cut.take<float>(kChunk * kChunk);
    product = cut.take<float>(dv * d);
    sum = cut.take<float>(d);
  }
};

// The rows of one bucket of one hash, in ascending order.
struct Bucket {
  const Problem& p;
  const BucketScratch& s;
  const std::int32_t *queries, *keys;

  static LSHKIT_INLINE Rows<const float> rows(Matrix<const float> m, const std::int32_t* order) {
    return {m.data, m.stride, order};
  }
  static LSHKIT_INLINE Rows<float> rows(Matrix<float> m, const std::int32_t* order) {
    return {m.data, m.stride, order};
  }

  // All pairs of queries [i0, i1) and keys [j0, j1), in chunks.
  void quadratic(index_t i0, index_t i1, index_t j0, index_t j1) const {
    const index_t d = p.query.columns, dv = p.value.columns;
    for (index_t j = j0; j < j1; j += kChunk) {
      const index_t nk = smaller(kChunk, j1 - j), padded = round_up(nk, W);
      const std::int32_t* key_rows = keys + j;
      bool packed = false;
      for (index_t i = i0; i < i1; i += kChunk) {
        const index_t nq = smaller(kChunk, i1 - i);
        const std::int32_t* query_rows = queries + i;
        if (p.causal && query_rows[nq - 1] < key_rows[0]) continue;
        if (!packed) {
          pack_transposed<float>(nk, dv, padded, rows(p.value, key_rows), p.scale, nullptr,
                                 s.value_t);
          pack<float>(nk, d, s.d, rows(p.key, key_rows), 1, p.key_inverse_norm, s.key);
          packed = true;
        }
        pack<float>(nq, d, s.d, rows(p.query, query_rows), 1, p.query_inverse_norm, s.query);
        matmul<float>(nq, padded, dv, rows(p.grad, query_rows), 1, s.value_t, padded,
                      {s.pair, padded}, false);
        if (p.bias)
          for (index_t r = 0; r < nq; ++r)
            for (index_t c = 0; c < nk; ++c)
              s.pair[r * padded + c] += p.scale * p.bias[query_rows[r]];
        if (p.causal && key_rows[nk - 1] > query_rows[0])
          for (index_t r = 0, seen = 0; r < nq; ++r) {
            while (seen < nk && key_rows[seen] <= query_rows[r]) ++seen;
            for (index_t c = seen; c < nk; ++c) s.pair[r * padded + c] = 0;
          }
        matmul<float>(nq, d, nk, {s.pair, padded}, 1, s.key, s.d, rows(p.query_grad, query_rows),
                      true);
        matmul<float>(nk, d, nq, {s.pair, 1}, padded, s.query, s.d, rows(p.key_grad, key_rows),
                      true);
      }
    }
  }

  // product += sum over rows of a_r b_r^T and sum += sum over rows of weight_r b_r, b unit vectors.
  void accumulate(Matrix<const float> a, Matrix<const float> b, const float* inverse_norm,
                  const std::int32_t* order, index_t n, float* a_packed, float* b_packed,
                  const float* weight) const {
    for (index_t r = 0; r < n; r += kChunk) {
      const index_t count = smaller(kChunk, n - r);
      pack<float>(count, a.columns, s.dv, rows(a, order + r), p.scale, nullptr, a_packed);
      pack<float>(count, b.columns, s.d, rows(b, order + r), 1, inverse_norm, b_packed);
      matmul<float>(a.columns, s.d, count, {a_packed, 1}, s.dv, b_packed, s.d, {s.product, s.d},
                    true);
      if (p.bias)
        for (index_t i = 0; i < count; ++i) {
          const float w = weight ? p.scale * weight[order[r + i]] : p.scale;
          for (index_t c = 0; c < s.d; ++c) s.sum[c] += w * b_packed[i * s.d + c];
        }
    }
  }
  void clear_product() const {
    std::memset(s.product, 0, sizeof(float) * s.dv * s.d);
    std::memset(s.sum, 0, sizeof(float) * s.d);
  }
  void accumulate_keys(index_t j0, index_t j1) const {
    accumulate(p.value, p.key, p.key_inverse_norm, keys + j0, j1 - j0, s.value, s.key, nullptr);
  }
  void accumulate_queries(index_t i0, index_t i1) const {
    accumulate(p.grad, p.query, p.query_inverse_norm, queries + i0, i1 - i0, s.value, s.key,
               p.bias);
  }
  // query_grad_i += grad_i^T product + bias_i sum
  void apply_to_queries(index_t i0, index_t i1) const {
    const std::int32_t* order = queries + i0;
    matmul<float>(i1 - i0, p.query.columns, p.grad.columns, rows(p.grad, order), 1, s.product, s.d,
                  rows(p.query_grad, order), true);
    for (index_t i = i0; p.bias && i < i1; ++i)
      for (index_t c = 0; c < p.query.columns; ++c)
        p.query_grad.row(queries[i])[c] += p.bias[queries[i]] * s.sum[c];
  }
  // key_grad_j += value_j^T product + sum
  void apply_to_keys(index_t j0, index_t j1) const {
    const std::int32_t* order = keys + j0;
    matmul<float>(j1 - j0, p.key.columns, p.value.columns, rows(p.value, order), 1, s.product, s.d,
                  rows(p.key_grad, order), true);
    for (index_t j = j0; p.bias && j < j1; ++j)
      for (index_t c = 0; c < p.key.columns; ++c) p.key_grad.row(keys[j])[c] += s.sum[c];
  }

  void linear(index_t nq, index_t nk) const {
    const Bfloat16Rows& w = s.words;
    if (w.on) {
      const Bfloat16Side of_keys = {w.value, w.key, keys, nk},
                         of_queries = {w.grad, w.query, queries, nq};
      lshkit::kernels().bfloat16_bucket(w, of_keys, of_queries, p.scale, p.query_grad);
      lshkit::kernels().bfloat16_bucket(w, of_queries, of_keys, p.scale, p.key_grad);
      return;
    }
    clear_product();
    accumulate_keys(0, nk);
    apply_to_queries(0, nq);
    clear_product();
    accumulate_queries(0, nq);
    apply_to_keys(0, nk);
  }

  // The same in chunks of queries: keys before all of a chunk's queries go through the product,
  // those in between are few and taken pair by pair. Keys get theirs on the way back.
  void linear_causal(index_t nq, index_t nk) const {
    clear_product();
    index_t before = 0, n_chunks = 0;
    for (index_t i = 0; i < nq; i += kChunk, ++n_chunks) {
      const index_t end = smaller(i + kChunk, nq), seen = before;
      while (before < nk && keys[before] <= queries[i]) ++before;
      s.passed[n_chunks] = std::int32_t(before);
      accumulate_keys(seen, before);
      if (before > 0) apply_to_queries(i, end);
      index_t last = before;
      while (last < nk && keys[last] <= queries[end - 1]) ++last;
      if (last > before) quadratic(i, end, before, last);
    }
    clear_product();
    for (index_t chunk = n_chunks - 1; chunk >= 0; --chunk) {
      const index_t i = chunk * kChunk, first = chunk > 0 ? s.passed[chunk - 1] : 0;
      accumulate_queries(i, smaller(i + kChunk, nq));
      if (s.passed[chunk] > first) apply_to_keys(first, s.passed[chunk]);
    }
  }

  // A few rows of Vectors registers each, where they lie: two queries meet two keys at a time, and
  // nothing is packed.
  template <int Vectors>
  LSHKIT_NOINLINE void direct(index_t nq, index_t nk) const {
    for (index_t i = 0; i < nq; i += 2) {
      const index_t a = queries[i], b = queries[i + 1 < nq ? i + 1 : i];
      const float b_takes_part = i + 1 < nq ? p.scale : 0;
      F ga[Vectors], gb[Vectors], qa[Vectors], qb[Vectors], da[Vectors] = {}, db[Vectors] = {};
      LSHKIT_UNROLL
      for (int c = 0; c < Vectors; ++c) {
        ga[c] = load(p.grad.row(a) + c * W);
        gb[c] = load(p.grad.row(b) + c * W);
        qa[c] = load(p.query.row(a) + c * W) * p.query_inverse_norm[a];
        qb[c] = load(p.query.row(b) + c * W) * p.query_inverse_norm[b];
      }
      const Vec4 bias = p.bias ? Vec4{p.bias[a], p.bias[b], p.bias[a], p.bias[b]} : Vec4{};
      for (index_t j = 0; j < nk; j += 2) {
        const bool pair = j + 1 < nk;
        const index_t x = keys[j], y = keys[pair ? j + 1 : j];
        if (p.causal && x > b) break;
        const float *vx = p.value.row(x), *vy = p.value.row(y);
        F ax = {}, bx = {}, ay = {}, by = {};
        LSHKIT_UNROLL
        for (int c = 0; c < Vectors; ++c) {
          const F v = load(vx + c * W), w = load(vy + c * W);
          ax += ga[c] * v;
          bx += gb[c] * v;
          ay += ga[c] * w;
          by += gb[c] * w;
        }
        Vec4 take = {p.scale, b_takes_part, pair ? p.scale : 0, pair ? b_takes_part : 0};
        if (p.causal)
          take = Vec4{a < x ? 0 : take[0], b < x ? 0 : take[1], a < y ? 0 : take[2],
                      b < y ? 0 : take[3]};
        // Selected, not multiplied by zero: what is hidden may be a NaN.
        Vec4 s4 = (sum_lanes4(ax, bx, ay, by) + bias) * take;
        s4 = take != Vec4{} ? s4 : Vec4{};
        const float nx = p.key_inverse_norm[x], ny = p.key_inverse_norm[y];
        const Vec4 k4 = s4 * Vec4{nx, nx, ny, ny};
        add_pair<Vectors>(x, s4[0], s4[1], k4[0], k4[1], qa, qb, da, db);
        if (pair) add_pair<Vectors>(y, s4[2], s4[3], k4[2], k4[3], qa, qb, da, db);
      }
      float *out_a = p.query_grad.row(a), *out_b = p.query_grad.row(b);
      LSHKIT_UNROLL
      for (int c = 0; c < Vectors; ++c) store(out_a + c * W, load(out_a + c * W) + da[c]);
      if (i + 1 < nq) LSHKIT_UNROLL
      for (int c = 0; c < Vectors; ++c) store(out_b + c * W, load(out_b + c * W) + db[c]);
    }
  }
  template <int Vectors>
  LSHKIT_INLINE void add_pair(index_t key, float sa, float sb, float ka, float kb, const F* qa,
                              const F* qb, F* da, F* db) const {
    const float* k = p.key.row(key);
    float* dk = p.key_grad.row(key);
    LSHKIT_UNROLL
    for (int c = 0; c < Vectors; ++c) {
      const F row = load(k + c * W);
      da[c] += ka * row;
      db[c] += kb * row;
      store(dk + c * W, load(dk + c * W) + sa * qa[c] + sb * qb[c]);
    }
  }
};

template <class T>
LSHKIT_INLINE void prefetch_side(Matrix<const T> x, Matrix<const T> y, Matrix<float> gradient,
                                 const std::int32_t* order, index_t n) {
  for (index_t t = 0; t < smaller(n, 2 * kChunk); ++t) {
    prefetch_row(x.row(order[t]), 4 * x.columns);
    prefetch_row(y.row(order[t]), 4 * y.columns);
    prefetch_row(gradient.row(order[t]), 4 * gradient.columns);
  }
}

// Flops of a bucket pair by pair and through its products.
struct Costs {
  float pair, row;
  bool causal;

  Costs(const Problem& p, const BucketScratch& s)
      : pair(2 * float(s.dv) + 4 * float(s.d)),
        row(4 * float(s.d) * float(p.rank > 0 ? s.sketch.width : s.dv) * (s.words.on ? 0.5f : 1)),
        causal(p.causal) {}
  bool pairs_are_cheaper(index_t nq, index_t nk) const {
    return float(nq) * float(nk) * (causal ? 0.5f : 1.0f) * pair <= row * float(nq + nk);
  }
};

// Of the form that the bucket will be read in: pair by pair that is float32.
LSHKIT_INLINE void prefetch_rows(const Problem& p, const BucketScratch& s, const Costs& costs,
                                 const Buckets& of, index_t b) {
  const Bfloat16Rows& w = s.words;
  const std::int32_t *queries = of.query_order + of.query_start[b],
                     *keys = of.key_order + of.key_start[b];
  const index_t nq = of.queries(b), nk = of.keys(b);
  if (w.on && !costs.pairs_are_cheaper(nq, nk)) {
    const index_t x = w.d / 2, y = w.dv / 2;
    prefetch_side<std::uint32_t>({w.query, x, 0, x}, {w.grad, y, 0, y}, p.query_grad, queries, nq);
    prefetch_side<std::uint32_t>({w.key, x, 0, x}, {w.value, y, 0, y}, p.key_grad, keys, nk);
  } else {
    prefetch_side<float>(p.query, p.grad, p.query_grad, queries, nq);
    prefetch_side<float>(p.key, p.value, p.key_grad, keys, nk);
  }
}

// The products of the large buckets of n hashes from `first`, sketched. A part of the features and
// one direction at a time: of the rows that lie all over memory, as many as can be are in a cache.
void sketched(const Problem& p, const BucketScratch& s, const Costs& costs, index_t first,
              index_t n) {
  for (const bool to_queries : {true, false})
    for (index_t column = 0; column < p.query.columns; column += kSketchColumns * W)
      for (index_t g = 0; g < n; ++g) {
        const Buckets& of = s.sort.buckets[g];
        const index_t group = s.sketch.group(first + g, p.n_hashes);
        const SketchSide queries = {s.sketch.group_of(s.sketch.grad, p.query.rows, group), p.query,
                                    p.query_inverse_norm, p.query_grad};
        const SketchSide keys = {s.sketch.group_of(s.sketch.value, p.key.rows, group), p.key,
                                 p.key_inverse_norm, p.key_grad};
        // Keys get theirs on the way back, from the queries that come no earlier.
        const bool back = p.causal && !to_queries;
        for (index_t t = 0; t < of.count; ++t) {
          const index_t b = back ? of.count - 1 - t : t;
          const index_t nq = of.queries(b), nk = of.keys(b);
          if (nq == 0 || nk == 0 || costs.pairs_are_cheaper(nq, nk)) continue;
          const SketchRows query_rows = {of.query_order + of.query_start[b], nq},
                           key_rows = {of.key_order + of.key_start[b], nk};
          if (to_queries)
            sketch_columns(keys, key_rows, queries, query_rows, s.sketch.width, column, p.causal,
                           1);
          else
            sketch_columns(queries, query_rows, keys, key_rows, s.sketch.width, column, p.causal,
                           back ? -1 : 1);
        }
      }
}

}  // namespace

index_t lower_bound_buckets_scratch(const LowerBoundGradient& p) {
  Cut cut{nullptr};
  BucketScratch scratch(p, cut);
  return cut.used;
}

void lower_bound_buckets(const LowerBoundGradient& p) {
  Cut cut{p.scratch};
  BucketScratch s(p, cut);
  clear(p.query_grad);
  clear(p.key_grad);
  s.sketch.fill(p);
  if (s.words.on) lshkit::kernels().bfloat16_rows(p, s.words);
  const Costs costs(p, s);
  // Of each row, where Bucket::direct is compiled for as many; otherwise 0.
  const int vectors = p.query.columns != p.value.columns    ? 0
                      : p.query.columns == 2 * W            ? 2
                      : p.query.columns == kMostVectors * W ? kMostVectors
                                                            : 0;
  // A bucket's rows lie all over memory; within the L2 cache that does not matter.
  const index_t row_bytes = 4 * (2 * p.query.columns + p.value.columns);
  if (s.sort.number) std::memset(s.sort.number, 0, sizeof(*s.sort.number) * p.n_buckets);
  const bool prefetch = p.rank == 0 && (p.query.rows + p.key.rows) * row_bytes > kCacheBytes;
  for (index_t h = 0; h < p.n_hashes; ++h) {
    Buckets& of = s.sort.buckets[p.rank > 0 ? h % kGroup : 0];
    sort_hash(p, s.sort, h, of);
    for (index_t b = 0; b < of.count; ++b) {
      const index_t nq = of.queries(b), nk = of.keys(b);
      if (prefetch && b + 1 < of.count) prefetch_rows(p, s, costs, of, b + 1);
      if (nq == 0 || nk == 0) continue;
      const bool pairs = costs.pairs_are_cheaper(nq, nk);
      if (p.rank > 0 && !pairs) continue;  // sketched below
      const Bucket bucket{p, s, of.query_order + of.query_start[b], of.key_order + of.key_start[b]};
      if (vectors && nq <= kDirectRows && nk <= kDirectRows)
        vectors == 2 ? bucket.direct<2>(nq, nk) : bucket.direct<kMostVectors>(nq, nk);
      else if (pairs)
        bucket.quadratic(0, nq, 0, nk);
      else if (p.causal)
        bucket.linear_causal(nq, nk);
      else
        bucket.linear(nq, nk);
    }
    if (p.rank > 0 && (h % kGroup == kGroup - 1 || h == p.n_hashes - 1))
      sketched(p, s, costs, h / kGroup * kGroup, h % kGroup + 1);
  }
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

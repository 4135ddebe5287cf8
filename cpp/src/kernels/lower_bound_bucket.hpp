#pragma once
// The lower bound's gradient in one bucket of one hash. a queries and b keys cost a b (2 d_v + 4 d)
// flops pair by pair ("direct" where the rows lie, while they are few, "quadratic" once packed), or
// 4 d d_v (a + b) through the products sum_j v_j k_j^T and sum_i g_i q_i^T ("linear"), which keeps
// the whole linear in the length.
//
// A causal query sees half of a bucket's pairs on average. Blocks of rows follow the diagonal,
// small enough that little of what they compute is hidden, large enough to fill the registers.
#include "bucket_sort.hpp"
#include "lower_bound_bfloat16.hpp"
#include "matmul.hpp"
#include "simd.hpp"
#include "wanted_gradients.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int W = kLanes<float>;
using F = Vec<float>;
using Problem = LowerBoundGradient;

constexpr index_t kChunk = 128;        // rows of a bucket that are packed at once
constexpr index_t kCausalChunk = 48;   // queries that see the same keys through the products
constexpr index_t kTriangleRows = 24;  // of a block of pairs of which some are hidden
constexpr index_t kMostVectors = kRegisters >= 32 ? 4 : 2;  // of a row that is not packed

struct BucketScratch {
  BucketSort sort;
  std::int32_t* passed;  // keys before each chunk of queries
  float *key, *value, *query, *value_t, *pair, *product, *sum;
  index_t d, dv;
  Bfloat16Rows words;
  BucketScratch(const Problem& p, Cut& cut)
      : sort(p, cut),
        d(round_up(p.query.columns, W)),
        dv(round_up(p.value.columns, W)),
        words(cut_words(p, cut)) {
    passed = cut.take<std::int32_t>(p.query.rows / kCausalChunk + 2);
    key = cut.take<float>(kChunk * d);
    value = cut.take<float>(kChunk * dv);
    query = cut.take<float>(kChunk * d);
    value_t = cut.take<float>(kChunk * dv);
    pair = cut.take<float>(kChunk * kChunk);
    product = cut.take<float>(dv * d);
    sum = cut.take<float>(d);
  }
};

// A row in registers.
template <int Vectors>
struct RowVectors {
  static constexpr int kVectors = Vectors;
  F v[Vectors];
};
// Rows as Bucket::direct takes them: columns of grad and value in one order, those of key and of
// what add_to adds in one, and those of query as they lie.
template <int Vectors>
struct FloatForm {
  using Row = RowVectors<Vectors>;
  const Problem p;

  FloatForm(const Problem& problem, const Bfloat16Rows&) : p(problem) {}
  static LSHKIT_INLINE Row row(const float* x, float scale) {
    Row r;
    LSHKIT_UNROLL
    for (int c = 0; c < Vectors; ++c) r.v[c] = load(x + c * W) * scale;
    return r;
  }
  LSHKIT_INLINE Row grad(index_t i) const { return row(p.grad.row(i), 1); }
  LSHKIT_INLINE Row value(index_t j) const { return row(p.value.row(j), 1); }
  LSHKIT_INLINE Row key(index_t j) const { return row(p.key.row(j), 1); }
  LSHKIT_INLINE Row query(index_t i) const { return row(p.query.row(i), p.query_inverse_norm[i]); }
  LSHKIT_INLINE float key_scale(index_t j) const { return p.key_inverse_norm[j]; }
  static LSHKIT_INLINE void add_to(float* x, const Row& r) {
    LSHKIT_UNROLL
    for (int c = 0; c < Vectors; ++c) store(x + c * W, load(x + c * W) + r.v[c]);
  }
};
// Of the words: half the bytes. Two registers of columns come from one of words, those in the lower
// halves and those in the upper ones, and stay in this order but for a query's.
template <int Vectors>
struct WordForm {
  using Row = RowVectors<Vectors>;
  const Bfloat16Rows w;

  WordForm(const Problem&, const Bfloat16Rows& words) : w(words) {}
  static LSHKIT_INLINE Row row(const std::uint32_t* words) {
    Row r;
    LSHKIT_UNROLL
    for (int c = 0; c < Vectors; c += 2) {
      const Vec<std::uint32_t> both = load(words + c / 2 * W);
      r.v[c] = F(both << 16);
      r.v[c + 1] = F(both & 0xffff0000);
    }
    return r;
  }
  // The columns in the order in which they lie.
  static LSHKIT_INLINE Row in_order(const Row& r) {
    Row to;
    LSHKIT_UNROLL
    for (int c = 0; c < Vectors; c += 2) interleave(r.v[c], r.v[c + 1], to.v[c], to.v[c + 1]);
    return to;
  }
  LSHKIT_INLINE Row grad(index_t i) const { return row(w.grad + i * (w.dv / 2)); }
  LSHKIT_INLINE Row value(index_t j) const { return row(w.value + j * (w.dv / 2)); }
  LSHKIT_INLINE Row key(index_t j) const { return row(w.key + j * (w.d / 2)); }
  LSHKIT_INLINE Row query(index_t i) const { return in_order(row(w.query + i * (w.d / 2))); }
  LSHKIT_INLINE float key_scale(index_t) const { return 1; }
  static LSHKIT_INLINE void add_to(float* x, const Row& r) {
    FloatForm<Vectors>::add_to(x, in_order(r));
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

  // matmul, between whose tiles rows of the next bucket are fetched.
  LSHKIT_INLINE void multiply(index_t rows, index_t columns, index_t depth, Rows<const float> a,
                              index_t a_stride, const float* b, index_t b_stride, Rows<float> c,
                              bool add) const {
    RowsAhead& ahead = *s.words.ahead;
    matmul<float>(rows, columns, depth, a, a_stride, b, b_stride, c, add,
                  [&]() LSHKIT_ALWAYS_INLINE { fetch_rows(ahead, kRowsATile); });
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
        if (p.causal && key_rows[nk - 1] > query_rows[0]) {
          triangle(query_rows, nq, key_rows, nk, padded);
          continue;
        }
        pair_products(query_rows, nq, nk, padded, s.pair);
        if (p.key_grad.data)
          pack<float>(nq, d, s.d, rows(p.query, query_rows), 1, p.query_inverse_norm, s.query);
        if (p.query_grad.data)
          multiply(nq, d, nk, {s.pair, padded}, 1, s.key, s.d, rows(p.query_grad, query_rows),
                   true);
        if (p.key_grad.data)
          multiply(nk, d, nq, {s.pair, 1}, padded, s.query, s.d, rows(p.key_grad, key_rows), true);
      }
    }
  }

  // pair[r][c] = scale (grad_r . value_c + bias_r) of the first nk keys that are packed.
  void pair_products(const std::int32_t* query_rows, index_t nq, index_t nk, index_t padded,
                     float* pair) const {
    multiply(nq, round_up(nk, W), p.value.columns, rows(p.grad, query_rows), 1, s.value_t, padded,
             {pair, padded}, false);
    for (index_t r = 0; p.bias && r < nq; ++r)
      for (index_t c = 0; c < nk; ++c) pair[r * padded + c] += p.scale * p.bias[query_rows[r]];
  }

  // A chunk of queries and the packed keys, some of which come later than some queries: in blocks
  // of rows, each with the keys or queries that it has a pair with.
  void triangle(const std::int32_t* query_rows, index_t nq, const std::int32_t* key_rows,
                index_t nk, index_t padded) const {
    const index_t d = p.query.columns;
    for (index_t i = 0, seen = 0; i < nq; i += kTriangleRows) {
      const index_t n = smaller(kTriangleRows, nq - i);
      float* pair = s.pair + i * padded;
      index_t most = seen;
      while (most < nk && key_rows[most] <= query_rows[i + n - 1]) ++most;
      if (most > 0) pair_products(query_rows + i, n, most, padded, pair);
      for (index_t r = 0; r < n; ++r) {
        while (seen < nk && key_rows[seen] <= query_rows[i + r]) ++seen;
        for (index_t c = seen; c < nk; ++c) pair[r * padded + c] = 0;
      }
      if (most > 0 && p.query_grad.data)
        multiply(n, d, most, {pair, padded}, 1, s.key, s.d, rows(p.query_grad, query_rows + i),
                 true);
    }
    if (!p.key_grad.data) return;
    pack<float>(nq, d, s.d, rows(p.query, query_rows), 1, p.query_inverse_norm, s.query);
    for (index_t j = 0, first = 0; j < nk; j += kTriangleRows) {
      while (first < nq && query_rows[first] < key_rows[j]) ++first;
      if (first == nq) break;
      multiply(smaller(kTriangleRows, nk - j), d, nq - first, {s.pair + first * padded + j, 1},
               padded, s.query + first * s.d, s.d, rows(p.key_grad, key_rows + j), true);
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
      multiply(a.columns, s.d, count, {a_packed, 1}, s.dv, b_packed, s.d, {s.product, s.d}, true);
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
    multiply(i1 - i0, p.query.columns, p.grad.columns, rows(p.grad, order), 1, s.product, s.d,
             rows(p.query_grad, order), true);
    for (index_t i = i0; p.bias && i < i1; ++i)
      for (index_t c = 0; c < p.query.columns; ++c)
        p.query_grad.row(queries[i])[c] += p.bias[queries[i]] * s.sum[c];
  }
  // key_grad_j += value_j^T product + sum
  void apply_to_keys(index_t j0, index_t j1) const {
    const std::int32_t* order = keys + j0;
    multiply(j1 - j0, p.key.columns, p.value.columns, rows(p.value, order), 1, s.product, s.d,
             rows(p.key_grad, order), true);
    for (index_t j = j0; p.bias && j < j1; ++j)
      for (index_t c = 0; c < p.key.columns; ++c) p.key_grad.row(keys[j])[c] += s.sum[c];
  }

  // Their products of bfloat16 take.
  Bfloat16Side words_of_queries(index_t i, index_t n) const {
    return {s.words.grad, s.words.query, queries + i, n};
  }
  Bfloat16Side words_of_keys(index_t j, index_t n) const {
    return {s.words.value, s.words.key, keys + j, n};
  }
  void bfloat16_pairs(index_t nq, index_t nk) const {
    for (index_t i = 0; i < nq; i += kPairedRows)
      for (index_t j = 0; j < nk; j += kPairedRows) {
        if (p.causal && keys[j] > queries[smaller(i + kPairedRows, nq) - 1]) break;
        lshkit::kernels().bfloat16_pairs(p, s.words,
                                         words_of_queries(i, smaller(kPairedRows, nq - i)),
                                         words_of_keys(j, smaller(kPairedRows, nk - j)));
      }
  }

  void linear(index_t nq, index_t nk) const {
    const Bfloat16Rows& w = s.words;
    if (w.linear) {
      const Bfloat16Side of_keys = words_of_keys(0, nk), of_queries = words_of_queries(0, nq);
      const auto bucket = lshkit::kernels().bfloat16_bucket;
      if (p.query_grad.data) bucket(w, of_keys, of_queries, p.scale, p.query_grad);
      if (p.key_grad.data) bucket(w, of_queries, of_keys, p.scale, p.key_grad);
      return;
    }
    if (p.query_grad.data) {
      clear_product();
      accumulate_keys(0, nk);
      apply_to_queries(0, nq);
    }
    if (p.key_grad.data) {
      clear_product();
      accumulate_queries(0, nq);
      apply_to_keys(0, nk);
    }
  }

  // The same in chunks of queries: keys before all of a chunk's queries go through the product,
  // those in between are few and taken pair by pair. Keys get theirs on the way back.
  void linear_causal(index_t nq, index_t nk) const {
    clear_product();
    index_t before = 0, n_chunks = 0;
    for (index_t i = 0; i < nq; i += kCausalChunk, ++n_chunks) {
      const index_t end = smaller(i + kCausalChunk, nq), seen = before;
      while (before < nk && keys[before] <= queries[i]) ++before;
      s.passed[n_chunks] = std::int32_t(before);
      if (p.query_grad.data) {
        accumulate_keys(seen, before);
        if (before > 0) apply_to_queries(i, end);
      }
      index_t last = before;
      while (last < nk && keys[last] <= queries[end - 1]) ++last;
      if (last > before) quadratic(i, end, before, last);
    }
    if (!p.key_grad.data) return;
    clear_product();
    for (index_t chunk = n_chunks - 1; chunk >= 0; --chunk) {
      const index_t i = chunk * kCausalChunk, first = chunk > 0 ? s.passed[chunk - 1] : 0;
      accumulate_queries(i, smaller(i + kCausalChunk, nq));
      if (s.passed[chunk] > first) apply_to_keys(first, s.passed[chunk]);
    }
  }

  // A few rows where they lie: two queries meet two keys at a time, and nothing is packed.
  template <class Form, bool ToQuery, bool ToKey>
  LSHKIT_NOINLINE void direct(index_t nq, index_t nk) const {
    using Row = typename Form::Row;
    // Copies: stores to rows might change what a reference points to.
    const Form form(this->p, s.words);
    const Problem p = this->p;
    const std::int32_t *queries = this->queries, *keys = this->keys;
    RowsAhead& ahead = *s.words.ahead;
    for (index_t i = 0; i < nq; i += 2) {
      const index_t a = queries[i], b = queries[i + 1 < nq ? i + 1 : i];
      const float b_takes_part = i + 1 < nq ? p.scale : 0;
      const Row ga = form.grad(a), gb = form.grad(b), qa = form.query(a), qb = form.query(b);
      Row da = {}, db = {};
      const Vec4 bias = p.bias ? Vec4{p.bias[a], p.bias[b], p.bias[a], p.bias[b]} : Vec4{};
      for (index_t j = 0; j < nk; j += 2) {
        const bool pair = j + 1 < nk;
        const index_t x = keys[j], y = keys[pair ? j + 1 : j];
        if (p.causal && x > b) break;
        fetch_rows(ahead, 1);
        const Row vx = form.value(x), vy = form.value(y);
        F ax = {}, bx = {}, ay = {}, by = {};
        LSHKIT_UNROLL
        for (int c = 0; c < Row::kVectors; ++c) {
          ax += ga.v[c] * vx.v[c];
          bx += gb.v[c] * vx.v[c];
          ay += ga.v[c] * vy.v[c];
          by += gb.v[c] * vy.v[c];
        }
        Vec4 take = {p.scale, b_takes_part, pair ? p.scale : 0, pair ? b_takes_part : 0};
        if (p.causal)
          take = Vec4{a < x ? 0 : take[0], b < x ? 0 : take[1], a < y ? 0 : take[2],
                      b < y ? 0 : take[3]};
        // Selected, not multiplied by zero: what is hidden may be a NaN.
        Vec4 s4 = (sum_lanes4(ax, bx, ay, by) + bias) * take;
        s4 = take != Vec4{} ? s4 : Vec4{};
        const float nx = form.key_scale(x), ny = form.key_scale(y);
        const Vec4 k4 = s4 * Vec4{nx, nx, ny, ny};
        add_pair<ToQuery, ToKey>(form, p.key_grad, x, s4[0], s4[1], k4[0], k4[1], qa, qb, da, db);
        if (pair)
          add_pair<ToQuery, ToKey>(form, p.key_grad, y, s4[2], s4[3], k4[2], k4[3], qa, qb, da, db);
      }
      if (ToQuery) form.add_to(p.query_grad.row(a), da);
      if (ToQuery && i + 1 < nq) form.add_to(p.query_grad.row(b), db);
    }
  }
  template <bool ToQuery, bool ToKey, class Form>
  static LSHKIT_INLINE void add_pair(const Form& form, Matrix<float> key_grad, index_t key,
                                     float sa, float sb, float ka, float kb,
                                     const typename Form::Row& qa, const typename Form::Row& qb,
                                     typename Form::Row& da, typename Form::Row& db) {
    const typename Form::Row k = form.key(key);
    float* dk = key_grad.row(key);
    LSHKIT_UNROLL
    for (int c = 0; c < Form::Row::kVectors; ++c) {
      if (ToQuery) da.v[c] += ka * k.v[c];
      if (ToQuery) db.v[c] += kb * k.v[c];
      if (ToKey) store(dk + c * W, load(dk + c * W) + sa * qa.v[c] + sb * qb.v[c]);
    }
  }
};

// Bucket::direct where it is compiled for rows of this length; otherwise null.
template <bool ToQuery, bool ToKey>
auto direct_form(const Problem& p, bool words) {
  void (Bucket::*none)(index_t, index_t) const = nullptr;
  return p.query.columns != p.value.columns ? none
         : p.query.columns == 2 * W         ? words ? &Bucket::direct<WordForm<2>, ToQuery, ToKey>
                                                    : &Bucket::direct<FloatForm<2>, ToQuery, ToKey>
         : p.query.columns == kMostVectors * W
             ? words ? &Bucket::direct<WordForm<kMostVectors>, ToQuery, ToKey>
                     : &Bucket::direct<FloatForm<kMostVectors>, ToQuery, ToKey>
             : none;
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

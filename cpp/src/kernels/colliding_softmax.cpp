// lsh_attention on one head of keys: blocks of them stay in cache while queries pass. By comparison
// n_hashes bits are read for every pair, by buckets 4 bytes for every one that shares a bucket, as
// often as it does; the rest is for the pairs that are used: forward 4 d flops and an exponential,
// backward 10 d.
#include "colliding_softmax.hpp"

#include "exponential.hpp"
#include "pair_lists.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr float kInfinity = __builtin_huge_valf();

// ---- forward: a softmax that goes on from block to block ----
struct ForwardScratch {
  KeyBlock block;
  float *sums, *largest, *total;  // (queries, dv), and of each query the shift and the denominator
  float* row;
  ForwardScratch(const SoftmaxForward& p, Cut& cut)
      : block(p.keys, p.options, p.queries.query.rows, p.key_buckets.start, p.key_buckets.start,
              cut) {
    const index_t queries = p.queries.query.rows;
    sums = cut.take<float>(queries * block.dv);
    largest = cut.take<float>(queries);
    total = cut.take<float>(queries);
    row = cut.take<float>(larger(block.d, block.dv));
  }
};

// sums = factor * sums + sum of weight[t] * rows[keys[t]]; count: a multiple of two.
template <int N>
LSHKIT_INLINE void add_rows(float factor, const float* weight, const std::uint16_t* keys, int count,
                            const float* rows, index_t stride, float* sums) {
  constexpr int kMost = N ? N : 1;
  for (index_t first = 0; first < stride / W; first += kMost) {
    F even[kMost], odd[kMost] = {};
    LSHKIT_UNROLL
    for (int c = 0; c < kMost; ++c) even[c] = load(sums + (first + c) * W) * factor;
    for (int t = 0; t < count; t += 2) {
      const float* a = rows + row_offset(keys[t], stride) + first * W;
      const float* b = rows + row_offset(keys[t + 1], stride) + first * W;
      LSHKIT_UNROLL
      for (int c = 0; c < kMost; ++c) {
        even[c] += weight[t] * load(a + c * W);
        odd[c] += weight[t + 1] * load(b + c * W);
      }
    }
    LSHKIT_UNROLL
    for (int c = 0; c < kMost; ++c) store(sums + (first + c) * W, even[c] + odd[c]);
  }
}

template <int N>
LSHKIT_NOINLINE void flush(const SoftmaxForward& p, const ForwardScratch& s, PairList& list) {
  weigh(p.options, list);
  const float scale = p.options.scale;
  for (int r = 0; r < list.queries; ++r) {
    const int first = list.first[r], end = list.first[r + 1];
    const index_t i = list.query[r];
    // Scores are rounded before the largest is subtracted: a fused one could differ by any factor.
    const auto score_at = [&](int t) { return rounded(scale * load(list.dot + t)); };
    F most = broadcast(-kInfinity);
    for (int t = first; t < end; t += W) {
      const F score = score_at(t);
      most = score > most ? score : most;
    }
    float largest = s.largest[i];
    for (int c = 0; c < W; ++c) largest = most[c] > largest ? most[c] : largest;
    float factor = 1;
    if (largest > s.largest[i]) {
      factor = s.total[i] > 0 ? exp_minus(broadcast(largest - s.largest[i]))[0] : 0;
      s.largest[i] = largest;
    }
    F total = {};
    for (int t = first; t < end; t += W) {
      const F w = exp_minus(largest - score_at(t)) * load(list.weight + t);
      total += w;
      store(list.weight + t, w);
    }
    s.total[i] = s.total[i] * factor + sum_lanes(total);
    const int pairs = int(round_up(list.count[r], 2));
    add_rows<N>(factor, list.weight + first, list.key + first, pairs, s.block.value, s.block.dv,
                s.sums + i * s.block.dv);
  }
  list.n = list.queries = 0;
}

template <int N>
void forward_rows(const SoftmaxForward& p) {
  Cut cut{p.scratch};
  ForwardScratch s(p, cut);
  const SoftmaxQueries& q = p.queries;
  const index_t rows = q.query.rows, dv = s.block.dv;
  std::memset(s.sums, 0, sizeof(float) * rows * dv);
  for (index_t i = 0; i < rows; ++i) {
    s.largest[i] = -kInfinity;
    s.total[i] = 0;
    p.pairs[i] = 0;
  }
  const index_t keys =
      p.options.causal ? smaller(p.keys.key.rows, q.position + rows) : p.keys.key.rows;
  const bool by_buckets = p.key_buckets.start;
  if (by_buckets)
    for_codes(p.options, p.code_bytes, [&](auto code, auto twice) {
      find_all_hits<decltype(code), twice.value>(p.options, p.key_buckets, s.block, q);
    });
  PairList list;
  for (index_t j0 = 0; j0 < keys; j0 += s.block.most) {
    s.block.fill(p.keys, j0);
    const index_t begin = p.options.causal ? larger(0, j0 - q.position) : 0;
    if (by_buckets)
      s.block.hits = s.block.all_hits + j0 / s.block.most * s.block.all_stride;
    else
      for_codes(p.options, p.code_bytes, [&](auto code, auto twice) {
        find_hits<decltype(code), twice.value>(p.options, p.keys, s.block, q, begin, rows);
      });
    for (index_t i = begin; i < rows; ++i) {
      if (!q.valid[i]) continue;
      p.pairs[i] += append<N>(p.options, p.keys, s.block, q, i, s.row, list);
      if (list.full()) flush<N>(p, s, list);
    }
    flush<N>(p, s, list);
  }
  for (index_t i = 0; i < rows; ++i) {
    const float total = s.total[i], inverse = total > 0 ? 1 / total : 0;
    const float nan = __builtin_nanf("");
    float* out = p.out.row(i);
    // A sum that is NaN (scores beyond float) has to show.
    const float factor = !q.valid[i] || total != total ? nan : inverse;
    for (index_t c = 0; c < p.out.columns; ++c) out[c] = s.sums[i * dv + c] * factor;
    p.log_sum[i] = !q.valid[i] ? nan : double(s.largest[i]) + __builtin_logf(total);
  }
}

// ---- backward: with P = w / sum w, ds = P (g . v - g . out) ----
struct BackwardScratch {
  KeyBlock block;
  float *grad_key, *grad_value;      // of the block
  float *query, *grad, *grad_query;  // one padded row each
  BackwardScratch(const SoftmaxBackward& p, Cut& cut)
      : block(p.keys, p.options, p.heads[0].query.rows, p.heads[0].buckets.start, false, cut) {
    grad_key = cut.take<float>(block.most * block.d);
    grad_value = cut.take<float>(block.most * block.dv);
    query = cut.take<float>(block.d);
    grad = cut.take<float>(block.dv);
    grad_query = cut.take<float>(block.d);
  }
};

template <int N>
LSHKIT_NOINLINE void flush(const SoftmaxBackward& p, const SoftmaxQueryGradient& q,
                           const BackwardScratch& s, PairList& list) {
  weigh(p.options, list);
  const float scale = p.options.scale;
  const index_t d = s.block.d, dv = s.block.dv;
  const bool to_query = q.grad_query.data, to_key = p.grad_key.data, to_value = p.grad_value.data;
  float slope[kMostKeys + W];
  for (int r = 0; r < list.queries; ++r) {
    const index_t i = list.query[r];
    const int first = list.first[r], count = list.count[r];
    const std::uint16_t* keys = list.key + first;
    float* share = list.weight + first;
    const Row<N> grad(q.grad_out.row(i), q.grad_out.columns, int(dv / W), s.grad);
    if (to_query || to_key) dots(grad, s.block.value, dv, keys, count, slope);
    for (int t = count; t < round_up(count, W); ++t) slope[t] = 0;
    // In two parts, for scores of which a unit in the last place is a factor.
    const float log_sum = float(q.log_sum[i]);
    const float rest = log_sum > -kInfinity ? float(q.log_sum[i] - log_sum) : 0;
    const F zero = {}, along = broadcast(q.along[i]);
    for (int t = 0; t < count; t += W) {
      const F below = (log_sum - rounded(scale * load(list.dot + first + t))) + rest;
      const F w = exp_minus(select(below < zero, zero, below)) * load(share + t);
      store(share + t, w);
      store(slope + t, scale * w * (load(slope + t) - along));
    }
    const Row<N> query(q.query.row(i), q.query.columns, int(d / W), s.query);
    for (int t = 0; t < count; ++t) {
      float* grad_value = s.grad_value + row_offset(keys[t], dv);
      float* grad_key = s.grad_key + row_offset(keys[t], d);
      if (to_value) LSHKIT_UNROLL
      for (int c = 0; c < grad.n; ++c)
        store(grad_value + c * W, load(grad_value + c * W) + share[t] * grad.at(c));
      if (to_key) LSHKIT_UNROLL
      for (int c = 0; c < query.n; ++c)
        store(grad_key + c * W, load(grad_key + c * W) + slope[t] * query.at(c));
    }
    if (!to_query) continue;
    float* out = q.grad_query.row(i);
    std::memset(s.grad_query, 0, sizeof(float) * d);
    std::memcpy(s.grad_query, out, sizeof(float) * q.grad_query.columns);
    add_rows<N>(1, slope, keys, int(round_up(count, 2)), s.block.key, d, s.grad_query);
    std::memcpy(out, s.grad_query, sizeof(float) * q.grad_query.columns);
  }
  list.n = list.queries = 0;
}

template <int N>
void backward_rows(const SoftmaxBackward& p) {
  Cut cut{p.scratch};
  BackwardScratch s(p, cut);
  for (index_t h = 0; h < p.n_heads; ++h) clear(p.heads[h].grad_query);
  PairList list;
  for (index_t j0 = 0; j0 < p.keys.key.rows; j0 += s.block.most) {
    s.block.fill(p.keys, j0);
    std::memset(s.grad_key, 0, sizeof(float) * s.block.most * s.block.d);
    std::memset(s.grad_value, 0, sizeof(float) * s.block.most * s.block.dv);
    for (index_t h = 0; h < p.n_heads; ++h) {
      const SoftmaxQueryGradient& q = p.heads[h];
      const index_t begin = p.options.causal ? larger(0, j0 - q.position) : 0;
      for_codes(p.options, p.code_bytes, [&](auto code, auto twice) {
        using Code = decltype(code);
        const index_t end = q.query.rows;
        q.buckets.start
            ? find_queries<Code, twice.value>(p.options, q.buckets, p.keys, s.block, begin, end)
            : find_hits<Code, twice.value>(p.options, p.keys, s.block, q, begin, end);
      });
      for (index_t i = begin; i < q.query.rows; ++i) {
        if (!q.valid[i]) continue;
        append<N>(p.options, p.keys, s.block, q, i, s.query, list);
        if (list.full()) flush<N>(p, q, s, list);
      }
      flush<N>(p, q, s, list);
    }
    for (int j = 0; j < s.block.n; ++j) {
      if (p.grad_key.data)
        std::memcpy(p.grad_key.row(j0 + j), s.grad_key + j * s.block.d,
                    sizeof(float) * p.grad_key.columns);
      if (p.grad_value.data)
        std::memcpy(p.grad_value.row(j0 + j), s.grad_value + j * s.block.dv,
                    sizeof(float) * p.grad_value.columns);
    }
  }
}

}  // namespace

index_t softmax_forward_scratch(const SoftmaxForward& p) {
  Cut cut{nullptr};
  ForwardScratch scratch(p, cut);
  return cut.used;
}

void softmax_forward(const SoftmaxForward& p) {
  with_constant<2, 4, 8>(row_registers(p.keys), [&](auto n) { forward_rows<n.value>(p); });
}

index_t softmax_backward_scratch(const SoftmaxBackward& p) {
  Cut cut{nullptr};
  BackwardScratch scratch(p, cut);
  return cut.used;
}

void softmax_backward(const SoftmaxBackward& p) {
  with_constant<2, 4, 8>(row_registers(p.keys), [&](auto n) { backward_rows<n.value>(p); });
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

// The lower bound's gradient hash by hash: a counting sort brings a bucket's rows together, and the
// cheapest form of lower_bound_bucket.hpp is taken.
//
// Bound: flops. The linear form takes 32,768 a token and hash at d = d_v = 64. Of long sequences
// the rows' traffic besides, which a causal head has in full: 8 (3 d + d_v) bytes a token and hash.
#include "lower_bound_bucket.hpp"
#include "lower_bound_gradient.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr index_t kCacheBytes = index_t(2) << 20;  // rows beyond that are prefetched
// Rows of a bucket up to which packing does not pay. A packed bucket of a causal head has products
// that are hidden.
constexpr index_t kDirectRows = 24, kDirectCausalRows = 40;
constexpr index_t kLeastWordPairs = 32, kLeastTilePairs = 96;

// Flops of a bucket pair by pair and through its products.
struct Costs {
  float pair, row;
  bool causal;

  Costs(const Problem& p, const BucketScratch& s)
      : pair((2 * float(s.dv) + 4 * float(s.d)) * (s.words.on && !s.words.linear ? 0.5f : 1)),
        row(4 * float(s.d) * float(s.dv)),
        causal(p.causal) {}
  bool pairs_are_cheaper(index_t nq, index_t nk) const {
    return float(nq) * float(nk) * (causal ? 0.5f : 1.0f) * pair <= row * float(nq + nk);
  }
};

enum class Form { short_pairs, direct, pairs, products };  // short_pairs: of bfloat16

// Which form the buckets of a head take.
struct Forms {
  const BucketScratch& s;
  Costs costs;
  index_t most_direct;  // rows of a side

  Form of(index_t nq, index_t nk) const {
    const Bfloat16Rows& w = s.words;
    const bool pairs = costs.pairs_are_cheaper(nq, nk);
    // Of fewer, rows are best left where they lie. Half of a causal bucket's are hidden.
    const index_t least = (w.linear ? kLeastWordPairs : kLeastTilePairs) * (costs.causal ? 2 : 1);
    if (pairs && w.on && nq * nk >= least) return Form::short_pairs;
    if (nq <= most_direct && nk <= most_direct) return Form::direct;
    return pairs ? Form::pairs : Form::products;
  }
  bool reads_words(Form form) const {
    return form == Form::short_pairs || (form == Form::direct && s.words.on) ||
           (form == Form::products && s.words.linear);
  }
};

// What a bucket reads: the first rows of each side.
LSHKIT_INLINE RowsAhead rows_of(const Problem& p, const Forms& forms, const Buckets& of,
                                index_t b) {
  const std::int32_t *queries = of.query_order + of.query_start[b],
                     *keys = of.key_order + of.key_start[b];
  const index_t nq = of.queries(b), nk = of.keys(b);
  const auto side = [](auto x, auto y, Matrix<float> gradient, const std::int32_t* rows,
                       index_t n) -> RowsAhead::Side {
    return {{part_of_row(x), part_of_row(y), part_of_row(gradient)}, rows, smaller(n, 2 * kChunk)};
  };
  if (!forms.reads_words(forms.of(nq, nk)))
    return {{side(p.query, p.grad, p.query_grad, queries, nq),
             side(p.key, p.value, p.key_grad, keys, nk)},
            0};
  const Bfloat16Rows& w = forms.s.words;
  using Words = Matrix<const std::uint32_t>;
  const auto words = [&](const std::uint32_t* x, const std::uint32_t* y, auto... rest) {
    return side(Words{x, w.d / 2, 0, w.d / 2}, Words{y, w.dv / 2, 0, w.dv / 2}, rest...);
  };
  return {{words(w.query, w.grad, p.query_grad, queries, nq),
           words(w.key, w.value, p.key_grad, keys, nk)},
          0};
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
  const bool tiles = s.words.on && !s.words.linear;
  if (s.words.on) lshkit::kernels().bfloat16_rows(p, s.words);
  if (tiles) lshkit::kernels().hold_tiles(true);
  const auto direct = with_wanted(p, [&](auto to_query, auto to_key) {
    return direct_form<to_query.value, to_key.value>(p, s.words.on);
  });
  const Forms forms{s, Costs(p, s), !direct ? 0 : p.causal ? kDirectCausalRows : kDirectRows};
  // A bucket's rows lie all over memory; within the L2 cache that does not matter.
  const index_t row_bytes = 4 * (2 * p.query.columns + p.value.columns);
  if (s.sort.number) std::memset(s.sort.number, 0, sizeof(*s.sort.number) * p.n_buckets);
  const bool prefetch = (p.query.rows + p.key.rows) * row_bytes > kCacheBytes;
  RowsAhead ahead{};
  s.words.ahead = &ahead;
  Buckets& of = s.sort.buckets;
  for (index_t h = 0; h < p.n_hashes; ++h) {
    sort_hash(p, s.sort, h, of);
    for (index_t b = of.pairs_from(0), next; b < of.count; b = next) {
      const index_t nq = of.queries(b), nk = of.keys(b);
      next = of.pairs_from(b + 1);
      fetch_rows(ahead, rows_left(ahead));  // what is left of this bucket's
      if (prefetch && next < of.count) ahead = rows_of(p, forms, of, next);
      const Form form = forms.of(nq, nk);
      const Bucket bucket{p, s, of.query_order + of.query_start[b], of.key_order + of.key_start[b]};
      switch (form) {
        case Form::short_pairs:
          bucket.bfloat16_pairs(nq, nk);
          break;
        case Form::direct:
          (bucket.*direct)(nq, nk);
          break;
        case Form::pairs:
          bucket.quadratic(0, nq, 0, nk);
          break;
        case Form::products:
          p.causal ? bucket.linear_causal(nq, nk) : bucket.linear(nq, nk);
      }
    }
  }
  if (tiles) lshkit::kernels().hold_tiles(false);
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

// The lower bound's gradient where few rows share a bucket: a query looks for its pairs, and a pair
// costs a visit to three rows in each hash in which it collides.
#include "keys_by_bucket.hpp"
#include "lower_bound_gradient.hpp"
#include "matmul.hpp"
#include "row_columns.hpp"
#include "wanted_gradients.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

using Problem = LowerBoundGradient;

struct Scratch {
  PairSearch search;
  float* products;  // of the pairs of a query

  Scratch(const Problem& p, Cut& cut) {
    search.n_queries = p.query.rows;
    search.n_keys = p.key.rows;
    search.table_rows = p.n_buckets;
    search.code_stride = p.n_hashes;
    search.code_bytes = p.code_bytes;
    search.key_mask = p.key_valid;
    search.order = p.causal ? Order::causal : Order::all;
    search.linked = 2 * p.key.rows <= p.n_buckets;
    search.group = int(smaller(kPairGroup, p.n_hashes));
    limit(p);
    search.buckets = cut.take<std::uint16_t>((2 * p.n_buckets + 3) * kPairGroup);
    search.keys = cut.take<std::uint16_t>((p.key.rows + 1) * kPairGroup);
    search.found = cut.take<std::uint16_t>(search.found_pairs() + 8 * kPairGroup);
    products = cut.take<float>(search.found_pairs() + 4);
  }
  // In the mean one pair of a query and hash more than uniform codes have, and a sixteenth of one
  // to start with: rows that crowd collide in many hashes at once; the other ways visit such a pair
  // once. Of causal queries the first ones see half of as many keys in the mean, the others all.
  void limit(const Problem& p) {
    const index_t queries = p.query.rows, keys = smaller(p.key.rows, queries);
    const index_t seen = p.causal ? keys - keys * keys / (2 * queries) : p.key.rows;
    search.most_of_query = search.group + search.group * seen / p.n_buckets;
    search.most = p.key.rows * search.group / 16;
  }
};

template <bool ToQuery, bool ToKey>
bool pairs(const Problem& problem) {
  const Problem p = problem;  // whose members nothing that is written could be
  Cut cut{p.scratch};
  Scratch s(p, cut);
  float* const products = s.products;
  clear(p.query_grad);
  clear(p.key_grad);
  const auto use = [&](index_t i, const std::uint16_t* found, index_t count) LSHKIT_ALWAYS_INLINE {
    if (count == 0 || (p.query_valid && !p.query_valid[i])) return;
    products_of(p.grad.row(i), 1, p.value, found, count, products);
    const float bias = p.bias ? p.bias[i] : 0, inverse_norm = p.query_inverse_norm[i];
    for (index_t k = 0; k < count; ++k) products[k] = p.scale * (products[k] + bias);
    each_columns<float, kVectors / 2>(p.query.columns, [&](auto columns) LSHKIT_ALWAYS_INLINE {
      Vec<float> x[columns.vectors], row[columns.vectors];
      if (ToQuery) {
        columns.load_row(p.query_grad.row(i), x);
        for (index_t k = 0; k < count; ++k) {
          const Vec<float> weight = broadcast(products[k] * p.key_inverse_norm[found[k]]);
          columns.load_row(p.key.row(found[k]), row);
          LSHKIT_UNROLL
          for (int c = 0; c < columns.vectors; ++c) x[c] += weight * row[c];
        }
        columns.store_row(p.query_grad.row(i), x);
      }
      if (!ToKey) return;
      columns.load_row(p.query.row(i), x);
      for (index_t k = 0; k < count; ++k) {
        float* to = p.key_grad.row(found[k]);
        const Vec<float> weight = broadcast(products[k] * inverse_norm);
        columns.load_row(to, row);
        LSHKIT_UNROLL
        for (int c = 0; c < columns.vectors; ++c) row[c] += weight * x[c];
        columns.store_row(to, row);
      }
    });
  };
  for (index_t hash = 0; hash < p.n_hashes; hash += kPairGroup) {
    s.search.query_codes = static_cast<const char*>(p.query_codes) + hash * p.code_bytes;
    s.search.key_codes = static_cast<const char*>(p.key_codes) + hash * p.code_bytes;
    s.search.group = int(smaller(kPairGroup, p.n_hashes - hash));
    s.limit(p);
    if (search_pairs(s.search, use) < p.query.rows) return false;
  }
  return true;
}

}  // namespace

index_t lower_bound_lists_scratch(const LowerBoundGradient& p) {
  Cut cut{nullptr};
  Scratch scratch(p, cut);
  return cut.used;
}

bool lower_bound_lists(const LowerBoundGradient& p) {
  return with_wanted(
      p, [&](auto to_query, auto to_key) { return pairs<to_query.value, to_key.value>(p); });
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

// The pairs verb against a comparison of all pairs. The lengths reach both ways that it takes.
#include <map>
#include <mutex>

#include "check.hpp"
#include "lshkit/collisions.hpp"
#include "problem.hpp"

using namespace lshkit;

namespace {

using Pairs = std::map<std::pair<index_t, std::int32_t>, std::int32_t>;

template <class Code>
struct Problem {
  CollisionShape shape;
  std::vector<Code> queries, keys;
  std::vector<std::uint8_t> mask;
  Order order;

  Problem(index_t nq, index_t nk, index_t n_hashes, int n_buckets, bool masked, Order o)
      : shape{nq, nk, n_hashes},
        queries(random_codes<Code>(nq * n_hashes, n_buckets, 1)),
        keys(random_codes<Code>(nk * n_hashes, n_buckets, 2)),
        order(o) {
    if (masked)
      for (index_t j = 0; j < nk; ++j) mask.push_back(j % 5 != 3);
  }
  Codes query_codes() const { return {queries.data(), sizeof(Code)}; }
  Codes key_codes() const { return {keys.data(), sizeof(Code)}; }
  const std::uint8_t* key_mask() const { return mask.empty() ? nullptr : mask.data(); }

  Pairs dense() const {
    Pairs pairs;
    for (index_t i = 0; i < shape.n_queries; ++i)
      for (index_t j = 0; j < shape.n_keys; ++j) {
        if ((key_mask() && !mask[j]) || (order == Order::causal && j > i)) continue;
        std::int32_t count = 0;
        for (index_t h = 0; h < shape.n_hashes; ++h)
          count += queries[i * shape.n_hashes + h] == keys[j * shape.n_hashes + h];
        if (count) pairs[{i, std::int32_t(j)}] = count;
      }
    return pairs;
  }
};

template <class Code>
void check_problem(const Problem<Code>& p, int threads) {
  const Pairs wanted = p.dense();
  Pairs got;
  std::vector<std::int32_t> last(p.shape.n_queries, -1);
  bool ascending = true;
  std::mutex mutex;
  auto visit = [&](index_t query, const std::int32_t* keys, const std::int32_t* counts, index_t n) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (index_t t = 0; t < n; ++t) {
      ascending = ascending && keys[t] > last[query];
      last[query] = keys[t];
      got[{query, keys[t]}] = counts[t];
    }
  };
  for_each_collision(p.shape, p.query_codes(), p.key_codes(), p.key_mask(), p.order, visit,
                     threads);
  CHECK(ascending);
  CHECK(got == wanted);

  std::vector<std::int64_t> indptr(p.shape.n_queries + 1, -1);
  collision_indptr(p.shape, p.query_codes(), p.key_codes(), p.key_mask(), p.order, indptr.data(),
                   threads);
  CHECK(indptr.front() == 0 && indptr.back() == index_t(wanted.size()));
  std::vector<std::int32_t> indices(wanted.size(), -1), counts(wanted.size(), -1);
  collisions(p.shape, p.query_codes(), p.key_codes(), p.key_mask(), p.order, indptr.data(),
             indices.data(), counts.data(), threads);
  std::size_t at = 0;
  bool equal = true;
  for (const auto& [pair, count] : wanted) {
    equal = equal && indices[at] == pair.second && counts[at] == count &&
            indptr[pair.first] <= index_t(at) && index_t(at) < indptr[pair.first + 1];
    ++at;
  }
  CHECK(equal);
}

}  // namespace

TEST(by_comparison) {
  for (const Order order : {Order::all, Order::causal})
    for (const bool masked : {false, true})
      for (const index_t n_hashes : {1, 7, 300}) {
        check_problem(Problem<std::uint8_t>(300, 270, n_hashes, 50, masked, order), 2);
        check_problem(Problem<std::uint16_t>(130, 129, n_hashes, 500, masked, order), 1);
      }
}

TEST(by_buckets) {
  for (const Order order : {Order::all, Order::causal})
    for (const bool masked : {false, true}) {
      check_problem(Problem<std::uint16_t>(70, 17000, 2, 60000, masked, order), 2);
      check_problem(Problem<std::uint16_t>(600, 16400, 1, 1000, masked, order), 2);
    }
}

TEST(nothing_to_compare) {
  check_problem(Problem<std::uint8_t>(0, 5, 3, 4, false, Order::all), 2);
  check_problem(Problem<std::uint8_t>(5, 0, 3, 4, false, Order::causal), 2);
}

LSHKIT_TEST_MAIN

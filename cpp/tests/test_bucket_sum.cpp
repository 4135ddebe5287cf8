// The sum verb against all pairs of a query and a key.
#include "check.hpp"
#include "kernels/kernels.hpp"
#include "lshkit/bucket_sum.hpp"
#include "problem.hpp"

using namespace lshkit;

namespace {

template <class T, class Code>
void check_sum(index_t nq, index_t nk, index_t m, index_t dv, int n_buckets, Order order,
               bool masked, int threads, index_t alike_from = 1 << 20, index_t alike_hash = 0) {
  const index_t batch = 2, heads = 3;
  auto queries = random_codes<Code>(batch * heads * nq * m, n_buckets, 1);
  auto keys = random_codes<Code>(batch * heads * nk * m, n_buckets, 2);
  const auto make_alike = [&](std::vector<Code>& codes, index_t rows) {
    for (index_t i = 0; i < batch * heads * rows * m; ++i)
      if (i / m % rows >= alike_from && i % m >= alike_hash) codes[i] = Code(n_buckets - 1);
  };
  make_alike(queries, nq);
  make_alike(keys, nk);
  const std::vector<float> numbers = normal(batch * heads * nk * dv, 3);
  std::vector<T> values(numbers.begin(), numbers.end());
  std::vector<std::uint8_t> mask(batch * nk);
  for (index_t i = 0; i < batch * nk; ++i) mask[i] = i % 3 != 1;
  if (masked)  // what is masked must not be read into anything
    for (index_t row = 0; row < batch * heads * nk; ++row)
      if (!mask[row / (heads * nk) * nk + row % nk])
        for (index_t c = 0; c < dv; ++c) values[row * dv + c] = T(NAN);
  std::vector<T> out = unwritten<T>(batch * heads * nq * dv);
  const BucketSumShape shape{batch, heads, nq, nk, m, dv, n_buckets};
  bucket_sum<T>(shape, {queries.data(), sizeof(Code)}, {keys.data(), sizeof(Code)},
                {values.data(), heads * nk * dv, nk * dv, dv},
                masked ? Mask{mask.data(), nk} : Mask{}, order, T(0.5),
                {out.data(), heads * nq * dv, nq * dv, dv}, threads);
  int wrong = 0;
  for (index_t bh = 0; bh < batch * heads; ++bh)
    for (index_t i = 0; i < nq; ++i)
      for (index_t c = 0; c < dv; ++c) {
        double sum = 0, size = 0;
        for (index_t j = 0; j < nk; ++j) {
          if (masked && !mask[bh / heads * nk + j]) continue;
          if (order == Order::causal && j > i) continue;
          if (order == Order::reversed && j < i) continue;
          for (index_t h = 0; h < m; ++h)
            if (queries[(bh * nq + i) * m + h] == keys[(bh * nk + j) * m + h]) {
              sum += 0.5 * values[(bh * nk + j) * dv + c];
              size += std::fabs(values[(bh * nk + j) * dv + c]);
            }
        }
        const double epsilon = sizeof(T) == 4 ? 1e-6 : 1e-14;
        if (!check::close(out[(bh * nq + i) * dv + c], sum, 0, epsilon * (1 + size))) ++wrong;
      }
  CHECK(wrong == 0);
}

}  // namespace

TEST(sums_equal_all_pairs) {
  for (const Order order : {Order::all, Order::causal, Order::reversed})
    for (const bool masked : {false, true}) {
      check_sum<float, std::uint8_t>(33, 33, 16, 16, 8, order, masked, 1);
      check_sum<float, std::uint8_t>(40, 70, 17, 20, 4, order, masked, 2);
      check_sum<float, std::uint8_t>(70, 40, 33, 1, 256, order, masked, 1);
      check_sum<float, std::uint16_t>(30, 30, 3, 35, 65536, order, masked, 2);
      check_sum<float, std::uint16_t>(9, 300, 5, 64, 512, order, masked, 1);
      check_sum<double, std::uint8_t>(21, 34, 32, 12, 6, order, masked, 1);
      check_sum<double, std::uint16_t>(21, 34, 2, 8, 40000, order, masked, 1);
      check_sum<float, std::uint16_t>(40, 1100, 33, 17, 2048, order, masked, 1);
      // Pairs, of keys that are linked or sorted.
      check_sum<float, std::uint8_t>(60, 50, 9, 70, 200, order, masked, 2);
      check_sum<float, std::uint8_t>(50, 150, 16, 64, 200, order, masked, 1);
      check_sum<float, std::uint16_t>(150, 60, 11, 40, 512, order, masked, 2);
      check_sum<float, std::uint16_t>(130, 180, 3, 90, 257, order, masked, 1);
      check_sum<double, std::uint8_t>(70, 60, 8, 33, 256, order, masked, 1);
      check_sum<double, std::uint16_t>(40, 70, 19, 9, 500, order, masked, 2);
      // Rows of one bucket from one on: causal, pairs before and tables from there.
      for (const index_t alike : {0, 20, 55, 59}) {
        check_sum<float, std::uint8_t>(60, 60, 9, 70, 200, order, masked, 2, alike);
        check_sum<float, std::uint16_t>(60, 90, 20, 64, 110, order, masked, 1, alike);
        check_sum<double, std::uint16_t>(90, 60, 17, 9, 300, order, masked, 1, alike);
        check_sum<float, std::uint16_t>(60, 60, 20, 64, 110, order, masked, 1, alike, 8);
      }
    }
}

// In arrays of exactly as many elements as the kernel may use; all rows share a bucket.
TEST(pairs_beyond_the_most_are_not_written) {
  const index_t rows = 21, n_values = 5, n_buckets = 9;
  for (const Order order : {Order::all, Order::causal, Order::reversed})
    for (const bool linked : {false, true})
      for (const index_t keys : {index_t(1), index_t(7), rows, index_t(40)})
        for (const index_t most : {0, 20, 400})
          for (const index_t most_of_query : {0, 9, 60, 1000})
            for (const int group : {3, 8}) {
              const std::vector<std::uint8_t> codes(40 * group, 8);
              const std::vector<float> values(keys * n_values, 1);
              std::vector<float> out = unwritten<float>(rows * n_values);
              PairSumPass<float> p{};
              p.query_codes = p.key_codes = codes.data();
              p.code_stride = p.group = group;
              p.code_bytes = 1;
              p.n_queries = rows;
              p.n_keys = keys;
              p.table_rows = n_buckets;
              p.order = order;
              p.values = {values.data(), n_values, keys, n_values};
              p.scale = 1;
              p.out = {out.data(), n_values, rows, n_values};
              p.linked = linked;
              p.most = most;
              p.most_of_query = most_of_query;
              std::vector<std::uint16_t> buckets((2 * n_buckets + 3) * kPairGroup),
                  of_buckets((keys + 1) * kPairGroup), found(p.found_pairs() + 8 * kPairGroup);
              p.buckets = buckets.data();
              p.keys = of_buckets.data();
              p.found = found.data();
              const auto seen = [&](index_t i) {
                return order == Order::all      ? keys
                       : order == Order::causal ? std::min(i + 1, keys)
                                                : std::max<index_t>(keys - i, 0);
              };
              index_t wanted = 0, pairs = 0;
              for (; wanted < rows; ++wanted) {
                pairs += group * seen(order == Order::reversed ? rows - 1 - wanted : wanted);
                if (pairs > most + (wanted + 1) * most_of_query) break;
              }
              if (order != Order::causal && wanted < rows) wanted = 0;
              CHECK(kernels().f32.pair_sum(p) == wanted);
              for (index_t i = 0; i < wanted; ++i)
                CHECK(out[i * n_values + 4] == float(group * seen(i)));
            }
}

TEST(threads_do_not_change_a_bit) {
  const index_t n = 500, m = 32, dv = 50;
  const auto codes = random_codes<std::uint8_t>(n * m, 64, 1);
  const std::vector<float> values = normal(n * dv, 2);
  const BucketSumShape shape{1, 1, n, n, m, dv, 64};
  std::vector<float> one = unwritten<float>(n * dv), two = unwritten<float>(n * dv);
  for (auto* out : {&one, &two})
    bucket_sum<float>(shape, {codes.data(), 1}, {codes.data(), 1}, view<const float>(values, n, dv),
                      {}, Order::causal, 1.0f, view<float>(*out, n, dv), out == &one ? 1 : 2);
  CHECK(std::memcmp(one.data(), two.data(), sizeof(float) * one.size()) == 0);
}

TEST(no_keys_give_zeros_and_no_queries_nothing) {
  std::vector<float> out = unwritten<float>(6);
  const std::vector<std::uint8_t> codes(4);
  bucket_sum<float>({1, 1, 2, 0, 2, 3, 4}, {codes.data(), 1}, {}, {}, {}, Order::all, 1.0f,
                    view<float>(out, 2, 3), 1);
  for (const float value : out) CHECK(value == 0);
  bucket_sum<float>({1, 1, 0, 2, 2, 3, 4}, {}, {codes.data(), 1}, view<const float>(out, 2, 3), {},
                    Order::all, 1.0f, {}, 1);
}

TEST(strides_reach_beyond_32_bits) {
  const index_t n = 3, m = 2, dv = 8, stride = (index_t(1) << 31) + 16;
  SparseMemory in(sizeof(float) * stride * n), out(sizeof(float) * stride * n);
  if (!in.floats() || !out.floats()) return;
  for (index_t i = 0; i < n; ++i)
    for (index_t c = 0; c < dv; ++c) in.floats()[i * stride + c] = float(i + 1);
  const std::vector<std::uint8_t> codes(n * m, 1);
  bucket_sum<float>({1, 1, n, n, m, dv, 4}, {codes.data(), 1}, {codes.data(), 1},
                    {in.floats(), 0, 0, stride}, {}, Order::all, 1.0f, {out.floats(), 0, 0, stride},
                    1);
  for (index_t i = 0; i < n; ++i)
    for (index_t c = 0; c < dv; ++c) CHECK(out.floats()[i * stride + c] == 12);
}

TEST(a_table_gives_the_sums) {
  const index_t n = 50, m = 7, dv = 5, n_buckets = 9;
  const auto keys = random_codes<std::uint8_t>(n * m, n_buckets, 1);
  const auto queries = random_codes<std::uint8_t>(n * m, n_buckets, 2);
  const std::vector<float> values = normal(n * dv, 3);
  std::vector<float> table(m * n_buckets * dv), sums = unwritten<float>(n * dv), out = sums;
  bucket_table_add<float>(table.data(), m, n_buckets, dv, {keys.data(), 1}, values.data(), dv, n, 1,
                          2);
  bucket_table_query<float>(table.data(), m, n_buckets, dv, {queries.data(), 1}, n, 1.0f / m,
                            out.data(), 2);
  bucket_sum<float>({1, 1, n, n, m, dv, n_buckets}, {queries.data(), 1}, {keys.data(), 1},
                    view<const float>(values, n, dv), {}, Order::all, 1.0f / m,
                    view<float>(sums, n, dv), 1);
  for (index_t i = 0; i < n * dv; ++i) CHECK_CLOSE(out[i], sums[i], 1e-5, 1e-6);
  bucket_table_add<float>(table.data(), m, n_buckets, dv, {keys.data(), 1}, values.data(), dv, n,
                          -1, 1);
  for (const float value : table) CHECK_CLOSE(value, 0, 0, 1e-5);
}

LSHKIT_TEST_MAIN

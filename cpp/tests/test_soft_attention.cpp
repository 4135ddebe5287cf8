// The weighted sum verb and attention with soft codes against dense sums over all pairs, in double
// precision: outputs and gradients.
#include "check.hpp"
#include "kernels/kernels.hpp"
#include "kernels/weighted_pairs.hpp"
#include "lshkit/soft_attention.hpp"
#include "lshkit/weighted_bucket_sum.hpp"
#include "problem.hpp"

using namespace lshkit;

namespace {

struct Problem {
  index_t nq, nk, m, dv, tq, tk;
  int n_buckets;
  index_t uniform = 1 << 20;  // hashes; the codes of the others are 0
  index_t uniform_rows = 1 << 20;
  int n_codes = 0;  // codes are below it; 0: below n_buckets
};

template <class Code>
std::vector<Code> probes_of(const Problem& p, index_t rows, index_t t, unsigned seed) {
  auto codes = random_codes<Code>(rows * p.m * t, p.n_codes ? p.n_codes : p.n_buckets, seed);
  for (std::size_t k = 0; k < codes.size(); ++k)
    if (index_t(k) / t % p.m >= p.uniform || index_t(k) / t / p.m >= p.uniform_rows) codes[k] = 0;
  return codes;
}

template <class T>
std::vector<T> numbers(std::size_t count, unsigned seed) {
  const std::vector<float> x = normal(count, seed);
  return std::vector<T>(x.begin(), x.end());
}

bool sees(Order order, index_t i, index_t j) {
  return order == Order::all || (order == Order::causal ? j <= i : j >= i);
}

int differences(const std::vector<double>& got, const std::vector<double>& wanted,
                double tolerance) {
  double size = 1e-2;
  int wrong = 0;
  for (const double x : wanted) size = std::max(size, std::fabs(x));
  for (std::size_t i = 0; i < got.size(); ++i)
    wrong += !(std::fabs(got[i] - wanted[i]) <= tolerance * size);
  return wrong;
}
template <class T>
std::vector<double> doubles(const std::vector<T>& x) {
  return std::vector<double>(x.begin(), x.end());
}

template <class T, class Code>
void check_weighted(const Problem& p, Order order, bool masked, int threads) {
  const auto queries = probes_of<Code>(p, p.nq, p.tq, 1);
  const auto keys = probes_of<Code>(p, p.nk, p.tk, 2);
  const auto wq = numbers<T>(queries.size(), 3), wk = numbers<T>(keys.size(), 4);
  auto v = numbers<T>(p.nk * p.dv, 5);
  const auto g = numbers<T>(p.nq * p.dv, 6);
  std::vector<std::uint8_t> mask(p.nk);
  for (index_t j = 0; j < p.nk; ++j) {
    mask[j] = !masked || j % 3 != 1;
    if (!mask[j])
      for (index_t c = 0; c < p.dv; ++c) v[j * p.dv + c] = T(NAN);
  }
  const BucketSumShape shape{1, 1, p.nq, p.nk, p.m, p.dv, p.n_buckets};
  const Probes<T> query_probes{{queries.data(), sizeof(Code)}, wq.data(), p.tq};
  const Probes<T> key_probes{{keys.data(), sizeof(Code)}, wk.data(), p.tk};
  const Mask key_mask = masked ? Mask{mask.data(), p.nk} : Mask{};
  std::vector<T> out = unwritten<T>(p.nq * p.dv), dv = unwritten<T>(v.size());
  std::vector<T> dwq = unwritten<T>(wq.size()), dwk = unwritten<T>(wk.size());
  weighted_bucket_sum<T>(shape, query_probes, key_probes, view<const T>(v, p.nk, p.dv), key_mask,
                         order, T(0.5), view<T>(out, p.nq, p.dv), threads);
  weighted_bucket_sum_backward<T>(
      shape, query_probes, key_probes, view<const T>(v, p.nk, p.dv), key_mask, order, T(0.5),
      {view<const T>(g, p.nq, p.dv), view<T>(dv, p.nk, p.dv), dwq.data(), dwk.data()}, threads);

  std::vector<double> y(out.size()), gv(v.size()), gq(wq.size()), gk(wk.size());
  for (index_t i = 0; i < p.nq; ++i)
    for (index_t j = 0; j < p.nk; ++j) {
      if (!mask[j] || !sees(order, i, j)) continue;
      double along = 0, weight = 0;
      for (index_t c = 0; c < p.dv; ++c) along += 0.5 * g[i * p.dv + c] * v[j * p.dv + c];
      for (index_t h = 0; h < p.m; ++h)
        for (index_t a = (i * p.m + h) * p.tq; a < (i * p.m + h + 1) * p.tq; ++a)
          for (index_t b = (j * p.m + h) * p.tk; b < (j * p.m + h + 1) * p.tk; ++b)
            if (queries[a] == keys[b]) {
              weight += 0.5 * wq[a] * wk[b];
              gq[a] += along * wk[b];
              gk[b] += along * wq[a];
            }
      for (index_t c = 0; c < p.dv; ++c) {
        y[i * p.dv + c] += weight * v[j * p.dv + c];
        gv[j * p.dv + c] += weight * g[i * p.dv + c];
      }
    }
  const double tolerance = sizeof(T) == 4 ? 1e-5 : 1e-13;
  CHECK(differences(doubles(out), y, tolerance) == 0);
  CHECK(differences(doubles(dv), gv, tolerance) == 0);
  CHECK(differences(doubles(dwq), gq, tolerance) == 0);
  CHECK(differences(doubles(dwk), gk, tolerance) == 0);
}

// Attention, its loss sum of out * g, and what a step in one number changes.
struct Attention {
  index_t nq, nk, d, dv, m;
  int n_bits;
  SoftOptions options;
  float sharpness;
  std::vector<float> planes, q, k, v, g;

  AttentionShape shape() const { return {1, 1, nq, nk, d, dv}; }
  HashFunctions functions() const {
    HashFunctions f;
    f.family = Family::hyperplane;
    f.parameters = planes.data();
    f.columns = d;
    f.n_bits = n_bits;
    f.n_hashes = m;
    return f;
  }
};

struct Codes1 {
  std::vector<std::uint16_t> codes;  // room for either size
  std::vector<float> margins;
  Codes1(index_t rows, index_t m, index_t t)
      : codes(rows * m), margins(rows * m * selected_bits(t)) {}
  SoftCodesOut out() { return {codes.data(), margins.data()}; }
  SoftCodes soft(int n_bits) const { return {codes.data(), n_bits <= 8 ? 1 : 2, margins.data()}; }
};

void check_attention(index_t nq, index_t nk, index_t dv, int n_bits, index_t tq, index_t tk,
                     bool causal, Normalize normalize) {
  Attention a{nq,   nk, 6,  dv, 3,  n_bits, {causal, normalize, tq, tk, nullptr, 0},
              0.7f, {}, {}, {}, {}, {}};
  a.options.sharpness = &a.sharpness;
  a.planes = normal(a.m * n_bits * a.d, 1);
  a.q = normal(nq * a.d, 2);
  a.k = normal(nk * a.d, 3);
  a.v = normal(nk * dv, 4);
  a.g = normal(nq * dv, 5);
  Codes1 queries(nq, a.m, tq), keys(nk, a.m, tk);
  std::vector<float> out = unwritten<float>(nq * dv), two = out;
  std::vector<float> gq = unwritten<float>(a.q.size()), gk = unwritten<float>(a.k.size());
  std::vector<float> gv = unwritten<float>(a.v.size()), sharpness_grad = unwritten<float>(1);
  std::vector<float> gp = unwritten<float>(a.planes.size());
  const auto inputs = [&] {
    return AttentionInputs<float>{view<const float>(a.q, nq, a.d),
                                  view<const float>(a.k, nk, a.d),
                                  view<const float>(a.v, nk, dv),
                                  {}};
  };
  std::vector<float> divisors = unwritten<float>(nq);
  float* divisor = normalize == Normalize::none ? nullptr : divisors.data();
  const auto forward = [&](std::vector<float>& to, int threads) {
    soft_attention_forward(a.shape(), a.options, a.functions(), inputs(), view<float>(to, nq, dv),
                           divisor, queries.out(), keys.out(), threads);
  };
  forward(out, 1);
  forward(two, 2);
  CHECK(std::memcmp(out.data(), two.data(), sizeof(float) * out.size()) == 0);
  soft_attention_backward(a.shape(), a.options, a.functions(), inputs(),
                          view<const float>(out, nq, dv), divisor, queries.soft(n_bits),
                          keys.soft(n_bits),
                          {view<const float>(a.g, nq, dv), view<float>(gq, nq, a.d),
                           view<float>(gk, nk, a.d), view<float>(gv, nk, dv)},
                          sharpness_grad.data(), gp.data(), 1);
  const auto loss = [&] {
    std::vector<float> y = unwritten<float>(nq * dv);
    forward(y, 1);
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += double(y[i]) * a.g[i];
    return sum;
  };
  // Along the gradient the loss rises by its square. In queries and keys it jumps where the
  // selection of probes changes, which it cannot when all buckets are probed.
  const auto check_step = [&](std::vector<float>& x, const std::vector<float>& gradient) {
    double square = 0;
    for (const float value : gradient) square += double(value) * value;
    CHECK(std::isfinite(square));
    if (!(square > 1e-12)) return;
    const double step = 1e-3 / std::sqrt(square);
    const std::vector<float> before = x;
    double change = 0;
    for (const double sign : {1.0, -1.0}) {
      for (std::size_t i = 0; i < x.size(); ++i)
        x[i] = float(before[i] + sign * step * gradient[i]);
      change += sign * loss();
    }
    x = before;
    CHECK_CLOSE(change / (2 * step), square, 0.02, 1e-3);
  };
  check_step(a.v, gv);
  if (tq == index_t(1) << n_bits) check_step(a.q, gq);
  if (tk == index_t(1) << n_bits) check_step(a.k, gk);
  if (std::min(tq, tk) == index_t(1) << n_bits) check_step(a.planes, gp);
  for (const float x : gp) CHECK(std::isfinite(x));
  for (const float x : gq) CHECK(std::isfinite(x));
  for (const float x : gk) CHECK(std::isfinite(x));
  const float before = a.sharpness;
  a.sharpness = before + 1e-2f;
  const double above = loss();
  a.sharpness = before - 1e-2f;
  CHECK_CLOSE((above - loss()) / 2e-2, sharpness_grad[0], 0.02, 2e-3);
}

}  // namespace

TEST(weighted_sums_equal_all_pairs) {
  for (const Order order : {Order::all, Order::causal, Order::reversed})
    for (const bool masked : {false, true}) {
      check_weighted<float, std::uint8_t>({33, 33, 3, 16, 4, 4, 8}, order, masked, 1);
      check_weighted<float, std::uint8_t>({40, 70, 17, 20, 2, 2, 4}, order, masked, 2);
      check_weighted<float, std::uint8_t>({70, 40, 9, 64, 4, 4, 256}, order, masked, 1);
      check_weighted<float, std::uint8_t>({20, 30, 5, 65, 1, 4, 16}, order, masked, 2);
      check_weighted<float, std::uint16_t>({30, 30, 2, 35, 3, 20, 65536}, order, masked, 2);
      check_weighted<float, std::uint16_t>({9, 300, 3, 64, 33, 5, 512}, order, masked, 1);
      check_weighted<double, std::uint8_t>({21, 34, 12, 12, 4, 4, 6}, order, masked, 1);
      check_weighted<double, std::uint16_t>({21, 34, 2, 8, 9, 17, 4000}, order, masked, 1);
      // Pairs where few probes share a bucket, tables from the hashes on in which many do.
      check_weighted<float, std::uint16_t>({60, 70, 12, 70, 4, 4, 1024, 8}, order, masked, 2);
      check_weighted<float, std::uint16_t>({70, 60, 20, 40, 2, 3, 1024, 16}, order, masked, 1);
      check_weighted<float, std::uint16_t>({30, 30, 2, 35, 3, 20, 65536, 0}, order, masked, 1);
      check_weighted<double, std::uint16_t>({60, 70, 12, 9, 4, 4, 2048, 8}, order, masked, 1);
      check_weighted<float, std::uint16_t>({40, 2, 9, 16, 200, 1, 4096, 0}, order, masked, 1);
      check_weighted<float, std::uint16_t>({60, 90, 20, 20, 4, 4, 4096}, order, masked, 1);
      check_weighted<float, std::uint16_t>({90, 60, 20, 20, 4, 4, 4096}, order, masked, 2);
      // Causal: pairs for the first queries, tables for the others.
      const index_t all = 1 << 20;
      check_weighted<float, std::uint16_t>({90, 90, 12, 70, 4, 4, 4096, all, 40}, order, masked, 2);
      check_weighted<float, std::uint16_t>({90, 60, 9, 20, 2, 3, 1024, 8, 30}, order, masked, 1);
      check_weighted<double, std::uint16_t>({60, 90, 9, 9, 4, 4, 2048, all, 1}, order, masked, 1);
      // Up to as many pairs as there is room for, and more: of few columns they are fewer.
      for (const int n_codes : {1000, 700, 500, 400, 300, 200, 100})
        for (const index_t dv : {16, 32, 64})
          check_weighted<float, std::uint16_t>({90, 90, 9, dv, 4, 4, 4096, all, all, n_codes},
                                               order, masked, 1);
      // Less than one pair for each query, of few probes and columns.
      for (const int n_codes : {1024, 256, 64, 16})
        check_weighted<float, std::uint16_t>({200, 170, 9, 16, 2, 1, 1024, all, all, n_codes},
                                             order, masked, 1);
      // As many keys' probes as have numbers.
      check_weighted<float, std::uint16_t>({2, 13107, 2, 36, 1, 5, 65536}, order, masked, 1);
    }
}

// In arrays of exactly as many elements as the kernel may write.
TEST(pairs_beyond_the_most_are_not_written) {
  const index_t rows = 5, keys = 2, n_buckets = 9;
  for (const int t : {4, 200})
    for (const index_t most : {0, 7, 100, 3 * 2 * 5 * 200}) {
      const std::vector<std::uint16_t> query_codes(3 * rows * t, 8), key_codes(3 * keys * t, 8);
      const std::vector<float> ones(3 * rows * t, 1);
      for (const index_t key_rows : {index_t(1), keys}) {
        const int of_keys = key_rows == 1 ? 1 : t;
        const index_t probes = key_rows * of_keys, found = most + 2 * t + kPairsAhead, stride = 48;
        std::vector<std::uint16_t> first(n_buckets), next(probes + 1), found_keys(found);
        const std::vector<float> key_weights(3 * probes + 1, 1);
        std::vector<std::uint32_t> begins(3 * stride), found_probes(found);
        std::vector<float> products(found);
        WeightedPairs<float> p{};
        p.n_hashes = 3;
        p.n_buckets = n_buckets;
        p.query = {rows, t, query_codes.data(), ones.data(), nullptr};
        p.key = {key_rows, of_keys, key_codes.data(), key_weights.data(), nullptr};
        p.first = first.data();
        p.next = next.data();
        p.most = most;
        p.begins_stride = stride;
        p.begins = begins.data();
        p.found = {found_keys.data(), products.data(), found_probes.data()};
        const index_t pairs = 3 * rows * t * probes;
        CHECK(kernels().f32.find_pairs(p) == (pairs <= most ? rows : 0));
        if (pairs > most) continue;
        CHECK(index_t(begins[2 * stride + rows]) == pairs);
        for (index_t k = 0; k < pairs; ++k) {
          CHECK(products[k] == 1);
          const index_t of_hash = rows * t * probes, own = k % of_hash / probes;
          CHECK(found_probes[k] == std::uint32_t(k / of_hash << kHashBit | own));
          CHECK(found_keys[k] == k % probes);
        }
      }
    }
}

// All probes share a bucket.
TEST(causal_pairs_are_of_the_queries_before_too_many) {
  const index_t rows = 20, n_buckets = 9, stride = 48;
  const int t = 3;
  for (const index_t keys : {index_t(7), rows})
    for (const index_t most : {0, 20, 400})
      for (const index_t most_of_query : {0, 9, 60, 1000}) {
        std::vector<std::uint16_t> codes(3 * rows * t, 8), first(n_buckets), next(keys * t + 1);
        const index_t found = 3 * (most + rows * most_of_query) + 2 * t + kPairsAhead;
        std::vector<std::uint16_t> found_keys(found);
        const std::vector<float> ones(3 * rows * t + 1, 1);
        std::vector<std::uint32_t> begins(3 * stride), found_probes(found);
        std::vector<float> products(found);
        WeightedPairs<float> p{};
        p.n_hashes = 3;
        p.n_buckets = n_buckets;
        p.causal = true;
        p.query = {rows, t, codes.data(), ones.data(), nullptr};
        p.key = {keys, t, codes.data(), ones.data(), nullptr};
        p.first = first.data();
        p.next = next.data();
        p.most = most;
        p.most_of_query = most_of_query;
        p.begins_stride = stride;
        p.begins = begins.data();
        p.found = {found_keys.data(), products.data(), found_probes.data()};
        const auto before = [&](index_t i) {  // pairs of a hash and the queries before i
          index_t pairs = 0;
          for (index_t r = 0; r < i; ++r) pairs += t * t * std::min(r + 1, keys);
          return pairs;
        };
        index_t wanted = 0;
        while (wanted < rows && before(wanted + 1) <= most + (wanted + 1) * most_of_query) ++wanted;
        CHECK(kernels().f32.find_pairs(p) == wanted);
        for (int h = 0; h < 3; ++h)
          for (index_t i = 0; i < wanted; ++i) {
            const std::uint32_t* begin = &begins[h * stride + i];
            const index_t of_query = begin[1] - begin[0];
            CHECK(of_query == before(i + 1) - before(i));
            for (index_t k = 0; k < of_query; ++k) {
              CHECK(found_keys[begin[0] + k] / t <= i);
              CHECK(found_probes[begin[0] + k] >> kHashBit == std::uint32_t(h));
            }
          }
      }
}

TEST(attention_rises_along_its_gradient) {
  for (const bool causal : {false, true})
    for (const Normalize normalize : {Normalize::none, Normalize::sum, Normalize::l2}) {
      check_attention(19, 19, 5, 3, 4, 4, causal, normalize);
      check_attention(19, 12, 33, 3, 8, 8, causal, normalize);
      check_attention(12, 19, 20, 9, 512, 300, causal, normalize);
      check_attention(70, 150, 20, 4, 16, 16, causal, normalize);
      check_attention(150, 70, 66, 4, 16, 3, causal, normalize);
      check_attention(9, 12, 5, 12, 2, 4096, causal, normalize);
      check_attention(9, 9, 16, 4, 2, 1, causal, normalize);
      check_attention(9, 9, 16, 4, 1, 1, causal, normalize);
    }
}

LSHKIT_TEST_MAIN

// Weighted sums in tables of 16-bit integers, and their gradients, against those in float32 of the
// same probes: whether they do all hashes, and how far they are from each other.
#include "check.hpp"
#include "fast_weighted_sum.hpp"
#include "problem.hpp"

using namespace lshkit;

namespace {

struct Case {
  index_t nq, nk, m, dv, tq, tk;
  int n_buckets;
  index_t full_from = 1 << 20;  // the first hash whose codes are one of a few
  int few = 1;
};

// Buffers of their exact size, so that AddressSanitizer sees a step beyond.
struct Side {
  index_t rows, m, t;
  std::vector<std::uint16_t> codes;
  std::vector<float> weights, grads;
  std::vector<std::uint8_t> valid;
  bool taken_once = true;  // of the gradients

  Side(const Case& c, index_t n, index_t probes, unsigned seed)
      : rows(n),
        m(c.m),
        t(probes),
        codes(random_codes<std::uint16_t>(n * m * t, c.n_buckets, seed)),
        weights(uniform(n * m * t, seed + 1)),
        grads(unwritten<float>(n * m * t)),
        valid(n) {
    for (index_t i = 0; i < n * m; ++i) {
      float sum = 0;
      for (index_t a = i * t; a < (i + 1) * t; ++a) sum += weights[a];
      for (index_t a = i * t; a < (i + 1) * t; ++a) {
        weights[a] /= sum;
        if (i % m >= c.full_from) codes[a] = std::uint16_t(codes[a] % c.few);
      }
    }
    for (index_t i = 0; i < n; ++i) valid[i] = i % 5 != 3;
  }
  // Of hash h of a row.
  index_t at(const ProbeRun& run, index_t i, index_t h) const {
    return ((run.first + i) * m + run.hash + h) * t;
  }
  WeightedSide<float> weighted(bool with_grads) {
    WeightedSide<float> side{rows, t, valid.data(), nullptr, nullptr, 8};
    side.probes = [this](const ProbeRun& run, index_t group, std::uint16_t* to_codes, float* to) {
      each(run, group, [&](index_t from) {
        *to_codes++ = codes[from];
        *to++ = weights[from];
      });
    };
    if (with_grads)
      side.take_grads = [this](const ProbeRun& run, index_t group, const float*,
                               const float* from) {
        each(run, group, [&](index_t at) {
          taken_once = taken_once && std::isnan(grads[at]);
          grads[at] = *from++;
        });
      };
    return side;
  }

 private:
  static std::vector<float> uniform(std::size_t count, unsigned seed) {
    std::vector<float> x = normal(count, seed);
    for (float& value : x) value = std::min(std::fabs(value), 3.0f) / 3 + 0.01f;
    return x;
  }
  template <class Body>
  void each(const ProbeRun& run, index_t group, const Body& body) const {
    for (index_t h = 0; h < run.group; h += group)
      for (index_t i = 0; i < run.rows; ++i)
        for (index_t g = h; g < std::min(h + group, run.group); ++g)
          for (index_t a = 0; a < t; ++a) body(at(run, i, g) + a);
  }
};

struct Problem {
  Case c;
  Side query, key;
  std::vector<float> value, grad, bias, out, sums, value_grad;
  WeightedHead<float> head;

  Problem(const Case& problem, float mean)
      : c(problem),
        query(c, c.nq, c.tq, 1),
        key(c, c.nk, c.tk, 3),
        value(normal(c.nk * c.dv, 5)),
        grad(normal(c.nq * c.dv, 6)),
        bias(normal(c.nq, 7)) {
    for (float& x : value) x += mean;
    for (float& x : grad) x += mean;
  }
  static Matrix<float> matrix(std::vector<float>& x, index_t rows, index_t columns) {
    return {x.data(), columns, rows, columns};
  }
  static Matrix<const float> given(const std::vector<float>& x, index_t rows, index_t columns) {
    return {x.data(), columns, rows, columns};
  }
  void make_head(bool with_grads) {
    head = {query.weighted(with_grads),
            key.weighted(with_grads),
            c.m,
            c.n_buckets,
            given(value, c.nk, c.dv),
            Order::all,
            1.0f / float(c.m),
            true};
  }
  void clear() {
    out = unwritten<float>(c.nq * c.dv);
    sums = unwritten<float>(c.nq);
    value_grad = unwritten<float>(c.nk * c.dv);
    for (Side* side : {&query, &key}) side->grads = unwritten<float>(side->grads.size());
  }
  // Forward and backward; how many hashes 16 bits do in both.
  index_t done() {
    clear();
    std::fill(sums.begin(), sums.end(), 0.0f);
    make_head(false);
    const index_t forward = fast_weighted_sum(head, matrix(out, c.nq, c.dv), sums.data());
    make_head(true);
    return std::min(forward, fast_weighted_sum_backward(head, given(grad, c.nq, c.dv), bias.data(),
                                                        matrix(value_grad, c.nk, c.dv)));
  }
  void run(bool fast) {
    clear();
    make_head(true);
    head.fast = fast;
    weighted_sum(head, matrix(out, c.nq, c.dv), sums.data(), 0, (c.dv + 15) / 16);
    weighted_sum_backward(head, given(grad, c.nq, c.dv), const_cast<const float*>(bias.data()),
                          matrix(value_grad, c.nk, c.dv));
    CHECK(query.taken_once && key.taken_once);
  }
};

// Returns how many hashes 16 bits did.
index_t hashes_done(const Case& c, float mean, double bound) {
  Problem full(c, mean), fast(c, mean);
  full.run(false);
  const index_t done = fast.done();
  fast.run(true);
  CHECK(relative_error(fast.out, full.out) < bound);
  CHECK(relative_error(fast.value_grad, full.value_grad) < bound);
  CHECK(relative_error(fast.query.grads, full.query.grads) < bound);
  CHECK(relative_error(fast.key.grads, full.key.grads) < bound);
  CHECK(relative_error(fast.sums, full.sums) < 1e-6);
  return done;
}
bool has_products() { return kernels().fast_weighted_add != nullptr; }

}  // namespace

TEST(sums_and_gradients_are_close) {
  const Case cases[] = {{300, 280, 9, 64, 4, 4, 64},     {1100, 900, 17, 64, 4, 4, 512},
                        {900, 1000, 9, 64, 2, 2, 256},   {700, 90, 3, 130, 3, 5, 16},
                        {80, 300, 8, 1, 1, 4, 32},       {2100, 2300, 6, 33, 1, 1, 4096},
                        {400, 600, 5, 100, 8, 4, 64},    {1100, 900, 17, 130, 4, 4, 512},
                        {1000, 1000, 17, 64, 1, 1, 4096}};
  for (const Case& c : cases) CHECK(hashes_done(c, 0, 2e-3) == (has_products() ? c.m : 0));
}

// Small weights' products would be lost in a sum of few of them.
TEST(sums_of_few_products_are_left_to_float32) {
  for (const Case& c : {Case{500, 500, 2, 33, 16, 1, 65536}, Case{400, 100, 5, 64, 4, 4, 4096}})
    CHECK(hashes_done(c, 0, 1e-5) == 0);
}

TEST(few_rows_and_other_orders_are_left_to_float32) {
  Problem few({63, 300, 3, 64, 4, 4, 64}, 0), causal({300, 300, 3, 64, 4, 4, 64}, 0);
  few.make_head(false);
  CHECK(fast_weighted_sum(few.head, Problem::matrix(few.out, 0, 64), nullptr) == 0);
  causal.make_head(false);
  causal.head.order = Order::causal;
  CHECK(fast_weighted_sum(causal.head, Problem::matrix(causal.out, 0, 64), nullptr) == 0);
}

TEST(wider_steps_where_later_hashes_have_fuller_buckets) {
  // Slots stand for the codes where buckets are far more than keys.
  for (const Case& c :
       {Case{300, 300, 20, 64, 4, 4, 64, 11, 8}, Case{1000, 1000, 20, 64, 1, 1, 4096, 11, 60}})
    CHECK(hashes_done(c, 0, 2e-3) == (has_products() ? c.m : 0));
}

// The last columns, of one sign, leave 16 bits where many rows share a bucket; those before, whose
// sums have been added by then, do not.
TEST(sums_of_earlier_columns_are_taken_back) {
  for (const bool of_values : {true, false})
    for (const int few : {2, 4, 8, 16}) {
      const Case c{700, 700, 20, 140, 4, 4, 64, 11, few};
      Problem full(c, 0), fast(c, 0);
      for (Problem* p : {&full, &fast}) {
        std::vector<float>& x = of_values ? p->value : p->grad;
        for (index_t i = 0; i < 700 * c.dv; ++i)
          if (i % c.dv >= 130) x[i] = 0.1f * x[i] + 1;
      }
      full.run(false);
      CHECK(fast.done() >= (has_products() ? 11 : 0));
      fast.run(true);
      CHECK(relative_error(fast.out, full.out) < 2e-3);
      CHECK(relative_error(fast.value_grad, full.value_grad) < 2e-3);
      CHECK(relative_error(fast.query.grads, full.query.grads) < 2e-3);
      CHECK(relative_error(fast.key.grads, full.key.grads) < 2e-3);
      CHECK(relative_error(fast.sums, full.sums) < 1e-6);
    }
}

TEST(float32_from_the_hash_on_that_16_bits_cannot_hold) {
  const Case c{2000, 2000, 20, 70, 4, 4, 4096, 11, 1};
  CHECK(hashes_done(c, 3, 2e-3) == (has_products() ? 11 : 0));
}

TEST(sums_that_leave_16_bits_and_come_back) {
  Problem full({4000, 4000, 4, 64, 4, 4, 64}, 0), fast = full;
  for (Problem* p : {&full, &fast})
    for (std::size_t i = 0; i < p->value.size(); ++i) {
      p->value[i] = 0.1f * p->value[i] + (i < p->value.size() / 2 ? 1.0f : -1.0f);
      p->grad[i] = 0.1f * p->grad[i] + (i < p->grad.size() / 2 ? 1.0f : -1.0f);
    }
  full.run(false);
  fast.run(true);
  CHECK(relative_error(fast.out, full.out) < 4e-3);
  CHECK(relative_error(fast.value_grad, full.value_grad) < 4e-3);
}

// Dot products of numbers of one sign are the largest that 16 bits by 14 can make.
TEST(dots_of_rows_of_one_sign) {
  for (const int n_buckets : {16, 32})
    CHECK(hashes_done({300, 300, 4, 64, 2, 2, n_buckets}, 20, 2e-3) == (has_products() ? 4 : 0));
}

TEST(values_that_rounding_would_lose) {
  for (const float large : {1e6f, INFINITY, NAN}) {
    Problem p({300, 300, 5, 64, 4, 4, 64}, 0);
    p.value[7 * 64 + 50] = large;
    p.make_head(false);
    p.out = unwritten<float>(300 * 64);
    CHECK(fast_weighted_sum(p.head, Problem::matrix(p.out, 300, 64), nullptr) == 0);
    p.key.valid[7] = 0;  // a row that takes no part
    CHECK(fast_weighted_sum(p.head, Problem::matrix(p.out, 300, 64), nullptr) ==
          (has_products() ? 5 : 0));
    for (const float x : p.out) CHECK(!has_products() || std::isfinite(x));
  }
}

LSHKIT_TEST_MAIN

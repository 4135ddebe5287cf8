// Both estimators and their gradients against dense sums over all pairs, in double precision. The
// sizes reach every way the lower bound is computed: pairs, lists, direct, quadratic and linear
// buckets.
#include "check.hpp"
#include "lshkit/attention.hpp"
#include "lshkit/hash.hpp"
#include "problem.hpp"

using namespace lshkit;

namespace {

constexpr double kPi = 3.14159265358979323846;

struct Case {
  index_t nq, nk, d, dv;
  int n_bits;
  index_t n_hashes;
};

struct Run {
  Case c;
  AttentionOptions options;
  bool masked;
  std::vector<float> q, k, v, g, out, dq, dk, dv;
  std::vector<std::uint8_t> query_codes, key_codes, mask;

  AttentionShape shape() const { return {1, 1, c.nq, c.nk, c.d, c.dv}; }
  AttentionInputs<float> inputs() const {
    return {view<const float>(q, c.nq, c.d), view<const float>(k, c.nk, c.d),
            view<const float>(v, c.nk, c.dv), masked ? Mask{mask.data(), 0} : Mask{}};
  }
  AttentionGradients<float> gradients() {
    return {view<const float>(g, c.nq, c.dv), view<float>(dq, c.nq, c.d),
            view<float>(dk, c.nk, c.d), view<float>(dv, c.nk, c.dv)};
  }
  Codes queries() const { return {query_codes.data(), c.n_bits <= 8 ? 1 : 2}; }
  Codes keys() const { return {key_codes.data(), c.n_bits <= 8 ? 1 : 2}; }

  Run(const Case& problem, AttentionOptions o, bool mask_keys, unsigned seed)
      : c(problem),
        options(o),
        masked(mask_keys),
        q(normal(c.nq * c.d, seed)),
        k(normal(c.nk * c.d, seed + 1)),
        v(normal(c.nk * c.dv, seed + 2)),
        g(normal(c.nq * c.dv, seed + 3)),
        out(unwritten<float>(c.nq * c.dv)),
        dq(unwritten<float>(q.size())),
        dk(unwritten<float>(k.size())),
        dv(unwritten<float>(v.size())),
        query_codes(c.nq * c.n_hashes * 2),
        key_codes(c.nk * c.n_hashes * 2),
        mask(c.nk) {
    for (index_t j = 0; j < c.nk; ++j) mask[j] = j % 4 != 2;
  }
  bool sees(index_t i, index_t j) const {
    return (!masked || mask[j]) && (!options.causal || j <= i);
  }
};

double cosine(const Run& r, index_t i, index_t j) {
  double dot = 0, a = 0, b = 0;
  for (index_t c = 0; c < r.c.d; ++c) {
    const double x = r.q[i * r.c.d + c], y = r.k[j * r.c.d + c];
    dot += x * y;
    a += x * x;
    b += y * y;
  }
  return dot / std::sqrt(a * b);
}

int code(const Codes& codes, index_t i) {
  return codes.bytes == 1 ? static_cast<const std::uint8_t*>(codes.data)[i]
                          : static_cast<const std::uint16_t*>(codes.data)[i];
}

// weight[i, j] of a value, slope[i, j] of a cosine
void dense_weights(const Run& r, bool sampled, std::vector<double>& weight,
                   std::vector<double>& slope) {
  const Case& c = r.c;
  weight.assign(c.nq * c.nk, 0);
  slope.assign(c.nq * c.nk, 0);
  for (index_t i = 0; i < c.nq; ++i)
    for (index_t j = 0; j < c.nk; ++j) {
      if (!r.sees(i, j)) continue;
      double w = 0;
      if (sampled) {
        for (index_t h = 0; h < c.n_hashes; ++h)
          w += code(r.queries(), i * c.n_hashes + h) == code(r.keys(), j * c.n_hashes + h);
        w /= double(c.n_hashes);
        if (w == 0) continue;
      }
      const double x = cosine(r, i, j), bit = 1 - std::acos(x) / kPi;
      const double p = std::pow(bit, c.n_bits);
      if (!sampled) w = p;
      weight[i * c.nk + j] = w;
      double& s = slope[i * c.nk + j];
      s = c.n_bits * p / bit / (kPi * std::sqrt(1 - x * x));
      switch (r.options.gradient) {
        case Gradient::lower_bound:
          s = 0.5 * c.n_bits * w;
          break;
        case Gradient::exact:
          break;
        case Gradient::unbiased:
          s /= -std::expm1(double(c.n_hashes) * std::log1p(-p));
          [[fallthrough]];
        case Gradient::collided:
          if (w == 0) s = 0;
      }
    }
}

// a row of x through d(x / |x|)
void through_unit_norm(const float* x, index_t d, const double* unit_gradient, double* gradient) {
  double square = 0, along = 0;
  for (index_t c = 0; c < d; ++c) square += double(x[c]) * x[c];
  const double norm = std::sqrt(square);
  for (index_t c = 0; c < d; ++c) along += unit_gradient[c] * x[c] / norm;
  for (index_t c = 0; c < d; ++c) gradient[c] = (unit_gradient[c] - along * x[c] / norm) / norm;
}

int differences(const std::vector<float>& got, const std::vector<double>& wanted,
                double tolerance) {
  double size = 0;
  for (const double value : wanted) size = std::max(size, std::fabs(value));
  int wrong = 0;
  for (std::size_t i = 0; i < got.size(); ++i)
    if (!(std::fabs(got[i] - wanted[i]) <= tolerance * (1e-3 + size))) ++wrong;
  return wrong;
}

void check_against_dense(const Run& r, bool sampled) {
  const Case& c = r.c;
  std::vector<double> weight, slope;
  dense_weights(r, sampled, weight, slope);
  std::vector<double> y(c.nq * c.dv), dq(c.nq * c.d), dk(c.nk * c.d), dv(c.nk * c.dv);
  std::vector<double> unit_dq(c.nq * c.d), unit_dk(c.nk * c.d), scale(c.nq), bias(c.nq),
      g(c.nq * c.dv);
  for (index_t i = 0; i < c.nq; ++i) {
    double total = 0, square = 0, along = 0;
    for (index_t j = 0; j < c.nk; ++j) {
      if (weight[i * c.nk + j] == 0) continue;
      total += weight[i * c.nk + j];
      for (index_t e = 0; e < c.dv; ++e)
        y[i * c.dv + e] += weight[i * c.nk + j] * r.v[j * c.dv + e];
    }
    for (index_t e = 0; e < c.dv; ++e) square += y[i * c.dv + e] * y[i * c.dv + e];
    double divisor = 1;
    if (r.options.normalize == Normalize::l2) divisor = std::sqrt(square);
    if (r.options.normalize == Normalize::sum) divisor = total;
    scale[i] = divisor > 0 ? 1 / divisor : 0;
    for (index_t e = 0; e < c.dv; ++e) {
      y[i * c.dv + e] *= scale[i];
      along += r.g[i * c.dv + e] * y[i * c.dv + e];
    }
    for (index_t e = 0; e < c.dv; ++e)
      g[i * c.dv + e] =
          scale[i] * (r.g[i * c.dv + e] -
                      (r.options.normalize == Normalize::l2 ? along * y[i * c.dv + e] : 0));
    bias[i] = r.options.normalize == Normalize::sum ? -along * scale[i] : 0;
  }
  std::vector<double> query_norm(c.nq), key_norm(c.nk);
  for (index_t i = 0; i < c.nq; ++i)
    for (index_t e = 0; e < c.d; ++e) query_norm[i] += double(r.q[i * c.d + e]) * r.q[i * c.d + e];
  for (index_t j = 0; j < c.nk; ++j)
    for (index_t e = 0; e < c.d; ++e) key_norm[j] += double(r.k[j * c.d + e]) * r.k[j * c.d + e];
  for (index_t i = 0; i < c.nq; ++i)
    for (index_t j = 0; j < c.nk; ++j) {
      if (weight[i * c.nk + j] == 0 && slope[i * c.nk + j] == 0) continue;
      double s = bias[i];
      for (index_t e = 0; e < c.dv; ++e) {
        s += g[i * c.dv + e] * r.v[j * c.dv + e];
        dv[j * c.dv + e] += weight[i * c.nk + j] * g[i * c.dv + e];
      }
      s *= slope[i * c.nk + j];
      for (index_t e = 0; e < c.d; ++e) {
        unit_dq[i * c.d + e] += s * r.k[j * c.d + e] / std::sqrt(key_norm[j]);
        unit_dk[j * c.d + e] += s * r.q[i * c.d + e] / std::sqrt(query_norm[i]);
      }
    }
  for (index_t i = 0; i < c.nq; ++i)
    through_unit_norm(&r.q[i * c.d], c.d, &unit_dq[i * c.d], &dq[i * c.d]);
  for (index_t j = 0; j < c.nk; ++j)
    through_unit_norm(&r.k[j * c.d], c.d, &unit_dk[j * c.d], &dk[j * c.d]);
  CHECK(differences(r.out, y, 1e-5) == 0);
  CHECK(differences(r.dv, dv, 1e-5) == 0);
  CHECK(differences(r.dq, dq, 1e-4) == 0);
  CHECK(differences(r.dk, dk, 1e-4) == 0);
}

void run_sampled(Run& r, int threads) {
  const std::vector<float> planes = normal(r.c.n_hashes * r.c.n_bits * r.c.d, 77);
  HashFunctions f;
  f.family = Family::hyperplane;
  f.parameters = planes.data();
  f.columns = r.c.d;
  f.n_bits = r.c.n_bits;
  f.n_hashes = r.c.n_hashes;
  yoso_forward(r.shape(), r.options, f, r.inputs(), view<float>(r.out, r.c.nq, r.c.dv),
               r.query_codes.data(), r.key_codes.data(), threads);
  yoso_backward(r.shape(), r.options, r.c.n_bits, r.c.n_hashes, r.inputs(), r.queries(), r.keys(),
                r.gradients(), threads);
}

void run_expected(Run& r, int threads) {
  expected_forward<float>(r.shape(), r.options, r.c.n_bits, r.inputs(),
                          view<float>(r.out, r.c.nq, r.c.dv), threads);
  expected_backward<float>(r.shape(), r.options, r.c.n_bits, r.inputs(), r.gradients(), threads);
}

const Case kCases[] = {
    {9, 9, 5, 3, 2, 4},           // pairs, odd rows
    {130, 70, 20, 33, 9, 7},      // pairs, 16-bit codes
    {40, 90, 64, 64, 4, 300},     // pairs, counts beyond a byte
    {1100, 1050, 64, 64, 8, 40},  // pairs, more than a list has
    {1100, 1030, 20, 20, 14, 9},  // lists of linked keys
    {1030, 1100, 64, 40, 10, 9},  // lists of sorted keys
    {600, 520, 64, 64, 10, 9},    // lists on Intel with AVX-512
    {1100, 1050, 64, 64, 8, 3},   // buckets: direct
    {300, 300, 32, 32, 2, 2},     // buckets: direct rows of 32, linear
    {300, 280, 24, 40, 3, 2},     // buckets: quadratic
    {700, 700, 20, 12, 1, 2},     // buckets: linear, many chunks
};

}  // namespace

TEST(sampled_equals_dense) {
  for (const Case& c : kCases)
    for (const bool causal : {false, true})
      for (const Normalize normalize : {Normalize::none, Normalize::sum, Normalize::l2})
        for (const Gradient gradient :
             {Gradient::lower_bound, Gradient::collided, Gradient::unbiased}) {
          if (gradient != Gradient::lower_bound && c.nq > 400) continue;  // one way for all lengths
          Run r(c, {causal, normalize, gradient}, causal, 5);
          run_sampled(r, 1);
          check_against_dense(r, true);
        }
}

TEST(expected_equals_dense) {
  for (const Case& c : kCases)
    for (const bool causal : {false, true})
      for (const Normalize normalize : {Normalize::none, Normalize::sum, Normalize::l2})
        for (const Gradient gradient : {Gradient::lower_bound, Gradient::exact}) {
          if (c.nq > 400) continue;
          Run r(c, {causal, normalize, gradient}, !causal, 6);
          run_expected(r, 2);
          check_against_dense(r, false);
        }
}

TEST(threads_do_not_change_a_bit) {
  for (const bool sampled : {true, false}) {
    Run one({1100, 1050, 64, 64, 8, 11}, {true, Normalize::sum, Gradient::lower_bound}, true, 8),
        two = one;
    for (Run* r : {&one, &two})
      sampled ? run_sampled(*r, r == &one ? 1 : 2) : run_expected(*r, r == &one ? 1 : 2);
    CHECK(one.out == two.out && one.dq == two.dq && one.dk == two.dk && one.dv == two.dv);
  }
}

TEST(a_bad_row_stays_alone) {
  for (const bool sampled : {true, false}) {
    const Case c{50, 45, 16, 16, 3, 8};
    Run clean(c, {false, Normalize::l2, Gradient::lower_bound}, true, 9);
    Run bad = clean;
    bad.q[4 * c.d + 1] = NAN;   // a query that takes no part
    bad.k[2 * c.d] = INFINITY;  // a masked key may hold anything
    bad.v[2 * c.dv] = NAN;
    for (Run* r : {&clean, &bad}) sampled ? run_sampled(*r, 1) : run_expected(*r, 1);
    for (index_t i = 0; i < c.nq * c.dv; ++i)
      CHECK(i / c.dv == 4 ? std::isnan(bad.out[i]) : bad.out[i] == clean.out[i]);
    for (index_t i = 0; i < c.nq * c.d; ++i)
      CHECK(i / c.d == 4 ? std::isnan(bad.dq[i]) : bad.dq[i] == clean.dq[i]);
    for (const float value : bad.dk) CHECK(std::isfinite(value));
    for (const float value : bad.dv) CHECK(std::isfinite(value));
    for (index_t e = 0; e < c.d; ++e) CHECK(bad.dk[2 * c.d + e] == 0);
    for (index_t e = 0; e < c.dv; ++e) CHECK(bad.dv[2 * c.dv + e] == 0);
  }
}

// The output does not depend on the size of the values, their gradient is as much larger.
TEST(sums_of_any_size_have_a_direction) {
  for (const bool sampled : {true, false})
    for (const int exponent : {-66, -90, -126, -140, 66}) {
      Run r({40, 35, 16, 20, 3, 8}, {false, Normalize::l2, Gradient::lower_bound}, true, 11);
      Run scaled = r;
      for (float& x : scaled.v) x = std::ldexp(x, exponent);
      for (Run* run : {&r, &scaled}) sampled ? run_sampled(*run, 1) : run_expected(*run, 1);
      const double bound = exponent < -126   ? 2e-2
                           : exponent < -120 ? 1e-4
                                             : 1e-5;  // subnormal numbers have few digits
      for (std::size_t i = 0; i < r.out.size(); ++i)
        CHECK_CLOSE(scaled.out[i], r.out[i], bound, bound);
      for (index_t i = 0; i < 40; ++i) {
        double square = 0;
        for (index_t e = 0; e < 20; ++e)
          square += double(scaled.out[i * 20 + e]) * scaled.out[i * 20 + e];
        CHECK_CLOSE(square, 1, 1e-5, 0);
      }
      for (const auto* x : {&scaled.dq, &scaled.dk, &scaled.dv})
        for (const float value : *x) CHECK(std::isfinite(value));
      if (exponent < -100) continue;  // the gradient is held back
      for (std::size_t i = 0; i < r.dq.size(); ++i) CHECK_CLOSE(scaled.dq[i], r.dq[i], 1e-3, 1e-3);
      for (std::size_t i = 0; i < r.dv.size(); ++i)
        CHECK_CLOSE(std::ldexp(scaled.dv[i], exponent), r.dv[i], 1e-3, 1e-3);
    }
}

TEST(zero_rows_and_hidden_keys_give_zeros) {
  for (const bool sampled : {true, false}) {
    Run r({12, 12, 8, 8, 2, 4}, {false, Normalize::l2, Gradient::lower_bound}, true, 10);
    for (index_t e = 0; e < 8; ++e) r.q[3 * 8 + e] = r.k[5 * 8 + e] = 0;
    sampled ? run_sampled(r, 1) : run_expected(r, 1);
    for (index_t e = 0; e < 8; ++e) CHECK(r.dq[3 * 8 + e] == 0 && r.dk[5 * 8 + e] == 0);
    for (const auto* x : {&r.out, &r.dq, &r.dk, &r.dv})
      for (const float value : *x) CHECK(std::isfinite(value));
    std::fill(r.mask.begin(), r.mask.end(), 0);
    sampled ? run_sampled(r, 1) : run_expected(r, 1);
    for (const auto* x : {&r.out, &r.dq, &r.dk, &r.dv})
      for (const float value : *x) CHECK(value == 0);
  }
}

LSHKIT_TEST_MAIN

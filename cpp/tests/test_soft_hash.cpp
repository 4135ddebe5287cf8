// Soft codes against the definition in soft_hash.hpp, in double precision.
#include <algorithm>

#include "check.hpp"
#include "projections.hpp"
#include "soft_hash.hpp"

namespace {

// One problem and everything that the core makes of it. Outputs have their exact size, so that
// AddressSanitizer sees a write or read past their end.
struct Problem {
  Family family;
  index_t batch = 2, heads = 2, n, d;
  int n_bits;
  index_t n_hashes, n_probes;
  int r, bytes;
  Parameters parameters;
  HashFunctions functions;
  std::vector<float> x, sharpness{1.5f, 0.5f};
  std::vector<std::uint8_t> codes, probe_codes;
  std::vector<float> margins, weights;
  bool finite;

  Problem(Family f, index_t rows, index_t features, int b, index_t m, index_t t, int threads)
      : family(f),
        n(rows),
        d(features),
        n_bits(b),
        n_hashes(m),
        n_probes(t),
        r(selected_bits(t)),
        bytes(b <= 8 ? 1 : 2),
        parameters(f == Family::hadamard ? hadamard(d, b, m, heads, 1)
                                         : hyperplane(d, b, m, heads, 1)),
        x(normal(batch * heads * n * d, 2)) {
    functions.family = f;
    functions.parameters = parameters.numbers.data();
    functions.head_stride = index_t(parameters.numbers.size()) / heads;
    functions.columns = parameters.columns;
    functions.n_bits = b;
    functions.n_hashes = m;
    hash_again(threads);
  }
  index_t pairs() const { return batch * heads * n * n_hashes; }
  Tensor<const float> rows() const { return {x.data(), heads * n * d, n * d, d}; }
  SoftCodes soft() const { return {codes.data(), bytes, margins.data()}; }
  int bit(index_t at) const { return bit_of(margins[at]); }
  float margin(index_t at) const { return without_bit(margins[at]); }
  void hash_again(int threads) {
    codes.assign(pairs() * bytes, 255);
    margins = unwritten<float>(pairs() * r);
    finite = soft_hash(functions, rows(), batch, heads, n, d, n_probes, codes.data(),
                       margins.data(), threads);
    probe_codes.assign(pairs() * n_probes * bytes, 255);
    weights = unwritten<float>(pairs() * n_probes);
    soft_probes(soft(), batch, heads, n, n_hashes, n_probes, sharpness.data(), 1,
                probe_codes.data(), weights.data(), threads);
  }
  int code(const std::vector<std::uint8_t>& from, index_t at) const {
    return bytes == 1 ? from[at] : from[2 * at] | from[2 * at + 1] << 8;
  }
  index_t head(index_t row) const { return row / n % heads; }

  // The projections of a row's hash at unit variance, for the row in `of`.
  std::vector<double> projections(const float* of, index_t row, index_t hash, double* error) const {
    double norm = 0, size;
    for (index_t c = 0; c < d; ++c) norm += double(of[c]) * of[c];
    norm = std::sqrt(norm) * (family == Family::hadamard ? double(parameters.columns) : 1);
    std::vector<double> z(n_bits);
    for (int b = 0; b < n_bits; ++b) {
      z[b] = projection(family, functions.parameters + head(row) * functions.head_stride,
                        parameters.columns, of, d, n_bits, hash, b, &size) /
             norm;
      *error = std::max(*error, 1e-6 * size / norm + 2e-6 * std::fabs(z[b]));
    }
    return z;
  }
};

// Weights of the probes from margins, in double.
std::vector<double> softmax(const std::vector<double>& margins, index_t n_probes,
                            double sharpness) {
  std::vector<double> w(n_probes);
  double sum = 0;
  for (index_t a = 0; a < n_probes; ++a) {
    double logit = 0;
    for (std::size_t k = 0; k < margins.size(); ++k)
      if (a >> k & 1) logit -= 2 * sharpness * margins[k];
    sum += w[a] = std::exp(logit);
  }
  for (double& v : w) v /= sum;
  return w;
}

void check_soft_codes(const Problem& p) {
  CHECK(p.finite);
  int wrong = 0;
  for (index_t pair = 0; pair < p.pairs(); ++pair) {
    const index_t row = pair / p.n_hashes;
    double error = 0;
    const std::vector<double> z = p.projections(&p.x[row * p.d], row, pair % p.n_hashes, &error);
    const int own = p.code(p.codes, pair);
    std::vector<double> sorted, margins;
    for (int b = 0; b < p.n_bits; ++b) {
      if (std::fabs(z[b]) > error && (own >> b & 1) != (z[b] > 0)) ++wrong;
      sorted.push_back(std::fabs(z[b]));
    }
    std::sort(sorted.begin(), sorted.end());
    int taken = 0;
    for (int k = 0; k < p.r; ++k) {
      const int bit = p.bit(pair * p.r + k);
      if (bit >= p.n_bits || taken >> bit & 1) ++wrong;
      taken |= 1 << bit;
      const double margin = p.margin(pair * p.r + k);
      if (!check::close(margin, std::fabs(z[bit]), 2e-6, error)) ++wrong;
      if (!check::close(margin, sorted[k], 4e-6, 2 * error)) ++wrong;
      margins.push_back(margin);
    }
    const std::vector<double> w = softmax(margins, p.n_probes, p.sharpness[p.head(row)]);
    for (index_t a = 0; a < p.n_probes; ++a) {
      int code = own;
      for (int k = 0; k < p.r; ++k)
        if (a >> k & 1) code ^= 1 << p.bit(pair * p.r + k);
      if (p.code(p.probe_codes, pair * p.n_probes + a) != code) ++wrong;
      if (!check::close(p.weights[pair * p.n_probes + a], w[a], 1e-5, 1e-30)) ++wrong;
    }
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST(soft_codes_are_as_defined) {
  for (const Family family : {Family::hyperplane, Family::hadamard}) {
    check_soft_codes(Problem(family, 1, 1, 1, 1, 2, 1));
    check_soft_codes(Problem(family, 17, 7, 8, 5, 4, 2));
    check_soft_codes(Problem(family, 33, 64, 8, 32, 1, 1));
    check_soft_codes(Problem(family, 5, 65, 9, 33, 3, 2));
    check_soft_codes(Problem(family, 3, 200, 16, 7, 16, 1));
    check_soft_codes(Problem(family, 2, 60, 12, 130, 8, 1));
    check_soft_codes(Problem(family, 2, 600, 5, 40, 32, 1));
    check_soft_codes(Problem(family, 19, 64, 12, 32, 4, 1));
    check_soft_codes(Problem(family, 2, 20, 10, 3, 1024, 1));
    check_soft_codes(Problem(family, 2, 20, 10, 3, 777, 1));
  }
}

// Central differences in double of sum_a g_a w_a for the selection of the row as it is.
TEST(gradients_are_the_derivatives) {
  for (const Family family : {Family::hyperplane, Family::hadamard})
    for (const index_t t : {2, 3, 4, 8, 16, 21}) {
      const index_t d = t % 2 ? 65 : 24;
      const Problem p(family, 9, d, t == 4 ? 12 : 7, 33, t, 1);
      const std::vector<float> g = normal(p.weights.size(), 3);
      std::vector<float> grad = unwritten<float>(p.x.size()), grad_sharpness(4);
      std::vector<float> grad_planes = unwritten<float>(p.parameters.numbers.size());
      const bool planes = family == Family::hyperplane;
      soft_hash_backward(p.functions, p.rows(), p.batch, p.heads, p.n, p.d, t, p.sharpness.data(),
                         1, p.soft(), p.weights.data(), g.data(),
                         {{grad.data(), p.heads * p.n * d, p.n * d, d},
                          grad_sharpness.data(),
                          planes ? grad_planes.data() : nullptr},
                         2);
      const auto loss_of_row = [&](const float* of, index_t row, double sharpness) {
        double loss = 0, error = 0;
        for (index_t h = 0; h < p.n_hashes; ++h) {
          const index_t pair = row * p.n_hashes + h;
          const std::vector<double> z = p.projections(of, row, h, &error);
          std::vector<double> margins;
          for (int k = 0; k < p.r; ++k) {
            const int bit = p.bit(pair * p.r + k);
            margins.push_back(p.code(p.codes, pair) >> bit & 1 ? z[bit] : -z[bit]);
          }
          const std::vector<double> w = softmax(margins, t, sharpness);
          for (index_t a = 0; a < t; ++a) loss += g[pair * t + a] * w[a];
        }
        return loss;
      };
      for (const index_t row : {index_t(0), index_t(8), p.batch * p.heads * p.n - 1}) {
        double largest = 0;
        for (index_t c = 0; c < d; ++c)
          largest = std::max(largest, std::fabs(double(grad[row * d + c])));
        for (const index_t c : {index_t(0), index_t(5), d - 1}) {
          std::vector<float> up(&p.x[row * d], &p.x[row * d] + d), down = up;
          up[c] += 1.0f / 256;  // what float32 makes of the step is the step
          down[c] -= 1.0f / 256;
          const double beta = p.sharpness[p.head(row)];
          const double slope =
              (loss_of_row(up.data(), row, beta) - loss_of_row(down.data(), row, beta)) /
              (double(up[c]) - down[c]);
          CHECK_CLOSE(grad[row * d + c], slope, 1e-3, 1e-3 * largest);
        }
      }
      double slope = 0;
      for (index_t i = 0; i < p.n; ++i)
        slope +=
            (loss_of_row(&p.x[i * d], i, 1.5 + 1e-5) - loss_of_row(&p.x[i * d], i, 1.5 - 1e-5)) /
            2e-5;
      CHECK_CLOSE(grad_sharpness[0], slope, 1e-4, 1e-3);
      if (planes)
        for (const float v : grad_planes) CHECK(std::isfinite(v));
    }
}

// A client goes through the hashes in groups and leaves out rows.
TEST(groups_of_hashes_are_parts_of_all) {
  for (const int n_bits : {8, 12})
    for (const index_t t : {1, 2, 3, 4, 8, 11, 16}) {
      const Problem p(Family::hadamard, 7, 20, n_bits, 21, t, 1);
      const index_t m = p.n_hashes, stride = 9 * t + 3;
      const std::uint8_t valid[7] = {1, 0, 1, 1, 1, 0, 1};
      const std::vector<float> g = normal(p.n * m * t, 5);
      std::vector<float> all_grads(p.n * m * p.r), grads = unwritten<float>(p.n * m * p.r);
      ProbeRows all = probe_rows(p.soft(), p.n, m, 0, m, t, 1.5f, valid);
      const double total =
          kernels().reduce_probes(all, p.weights.data(), g.data(), all_grads.data(), m * p.r);
      double sum = 0;
      for (index_t first = 0; first < m; first += 9) {
        const index_t group = std::min<index_t>(9, m - first);
        ProbeRows part = probe_rows(p.soft(), p.n, m, first, group, t, 1.5f, valid);
        part.probe_stride = stride;
        // uint16 whatever the codes: a client may have one type for all.
        std::vector<std::uint16_t> codes(p.n * stride, 0xabcd);
        std::vector<float> weights = unwritten<float>(p.n * stride), part_g(p.n * stride);
        kernels().expand_probes(part, 2, codes.data(), weights.data());
        for (index_t i = 0; i < p.n; ++i)
          for (index_t a = 0; a < stride; ++a) {
            const index_t at = i * stride + a, whole = (i * m + first) * t + a;
            if (a >= group * t) {
              CHECK(codes[at] == 0xabcd && std::isnan(weights[at]));
              continue;
            }
            CHECK(codes[at] == p.code(p.probe_codes, whole));
            CHECK(weights[at] == (valid[i] ? p.weights[whole] : 0));
            part_g[at] = g[whole];
          }
        sum += kernels().reduce_probes(part, weights.data(), part_g.data(),
                                       grads.data() + first * p.r, m * p.r);
      }
      CHECK(grads == all_grads);
      CHECK_CLOSE(sum, total, 1e-5, 1e-4);
    }
}

// Tables take the probes of some hashes after the others. More rows than have their exponentials
// taken together; of 16 hashes in parts of one or two, several rows are written at once.
void check_parts(int n_bits, index_t n_hashes, index_t t, index_t part, bool masked) {
  const Problem p(Family::hadamard, 301, 20, n_bits, n_hashes, t, 1);
  const index_t m = p.n_hashes, first = 1, group = m - first;
  std::vector<std::uint8_t> valid(p.n, 1);
  if (masked) valid[3] = valid[150] = valid[300] = 0;
  const std::vector<float> g = normal(p.n * group * t, 5);
  ProbeRows rows =
      probe_rows(p.soft(), p.n, m, first, group, t, 1.5f, masked ? valid.data() : nullptr);
  std::vector<float> whole_grads(p.n * m * p.r), grads(p.n * m * p.r);
  std::vector<float> whole_weights(p.n * group * t), weights = unwritten<float>(p.n * group * t);
  std::vector<std::uint16_t> whole_codes(p.n * group * t), codes(p.n * group * t, 0xabcd);
  kernels().expand_probes(rows, 2, whole_codes.data(), whole_weights.data());
  const double total =
      kernels().reduce_probes(rows, whole_weights.data(), g.data(), whole_grads.data(), m * p.r);
  rows.part = part;
  kernels().expand_probes(rows, 2, codes.data(), weights.data());
  std::vector<float> part_g(g.size());
  for (index_t i = 0; i < p.n; ++i)
    for (index_t h = 0; h < group; ++h) {
      const index_t begin = h / part * part, size = std::min(part, group - begin);
      for (index_t a = 0; a < t; ++a) {
        const index_t at = (begin * p.n + i * size + h - begin) * t + a;
        const index_t from = (i * group + h) * t + a;
        CHECK(codes[at] == whole_codes[from] && weights[at] == whole_weights[from]);
        CHECK(valid[i] ? weights[at] == p.weights[(i * m + first + h) * t + a] : !weights[at]);
        part_g[at] = g[from];
      }
    }
  CHECK(kernels().reduce_probes(rows, weights.data(), part_g.data(), grads.data(), m * p.r) ==
        total);
  CHECK(grads == whole_grads);
}
TEST(parts_lie_one_after_the_other) {
  for (const index_t t : {1, 2, 3, 4, 8, 11, 16}) {
    for (const index_t part : {1, 2, 4, 5, 12}) check_parts(12, 13, t, part, true);
    check_parts(12, 290, t, 100, true);
    for (const int n_bits : {8, 12})
      for (const index_t part : {1, 2})
        for (const bool masked : {false, true}) check_parts(n_bits, 17, t, part, masked);
  }
}

TEST(rows_without_a_direction) {
  for (const Family family : {Family::hyperplane, Family::hadamard}) {
    Problem p(family, 40, 24, 8, 9, 4, 1);
    const Problem clean = p;
    for (index_t c = 0; c < p.d; ++c) p.x[3 * p.d + c] = c % 2 ? -0.0f : 0.0f;
    p.x[35 * p.d + 23] = NAN;
    p.x[36 * p.d + 1] = INFINITY;
    p.hash_again(1);
    CHECK(!p.finite);
    for (index_t pair = 0; pair < p.pairs(); ++pair) {
      const index_t row = pair / p.n_hashes;
      if (row == 3) {
        CHECK(p.code(p.codes, pair) == 0 && p.bit(pair * 2) == 0 && p.bit(pair * 2 + 1) == 1);
        CHECK(p.margin(pair * 2) == 0 && p.margin(pair * 2 + 1) == 0);
      } else if (row == 35 || row == 36) {
        CHECK(std::isnan(p.margins[pair * 2]) && std::isnan(p.weights[pair * 4]));
        CHECK(p.bit(pair * 2) < 8 && p.bit(pair * 2) != p.bit(pair * 2 + 1));
      } else {
        CHECK(p.code(p.codes, pair) == clean.code(clean.codes, pair));
        CHECK(p.margins[pair * 2 + 1] == clean.margins[pair * 2 + 1]);
      }
    }
  }
}

TEST(no_rows_is_no_work) {
  HashFunctions f;
  CHECK(soft_hash(f, {}, 1, 4, 0, 8, 4, nullptr, nullptr, 1));
  soft_probes({}, 1, 4, 0, 32, 4, nullptr, 0, nullptr, nullptr, 1);
}

LSHKIT_TEST_MAIN

// Products of bfloat16: the tiles' twin against what the manual says, every instruction set's
// expectation against double precision, codes by tiles against those of float32, and which
// instruction sets a machine has.
#include <algorithm>
#include <array>

#include "check.hpp"
#include "lshkit/attention.hpp"
#include "lshkit/hash.hpp"
#include "lshkit/runtime.hpp"
#include "problem.hpp"

#define LSHKIT_ISA twin_under_test
#include "instruction_sets.hpp"
#include "kernels/bfloat16/tiles.hpp"

using namespace lshkit;
using namespace lshkit::twin_under_test;

namespace {

std::uint16_t rounded_half(float x) {
  Half halves[kLanes<float>];
  store_half(halves, to_bfloat16(broadcast<float>(x)));
  return halves[0];
}
float widened(Half x) {
  const std::uint32_t bits = std::uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}
std::vector<float> short_normal(std::size_t count, unsigned seed) {
  std::vector<float> x = normal(count, seed);
  for (float& value : x) value = widened(rounded_half(value));
  return x;
}

struct Rows {
  std::vector<const float*> row;
  std::vector<float> factor;
  Rows(const std::vector<float>& x, index_t rows, index_t columns) : factor(rows, 1.0f) {
    for (index_t r = 0; r < rows; ++r) row.push_back(&x[r * columns]);
  }
};

Half high_half(float x) {  // not rounded, subnormal numbers too
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return Half(bits >> 16);
}
// A row of A, a column of B and a number of C.
float one_product(std::initializer_list<float> a, std::initializer_list<float> b, float c) {
  alignas(64) Half x[2 * kTileSize] = {}, y[2 * kTileSize] = {};
  float sums[kTileSize] = {c};
  int i = 0;
  for (const float value : a) x[i++] = high_half(value);
  i = 0;
  for (const float value : b) {  // element 2k + o of the column: word k, half o
    y[i / 2 * 2 * kTile + i % 2] = high_half(value);
    ++i;
  }
  const TileUse use;
  multiply(1, 1, 1, reinterpret_cast<const Word*>(x), reinterpret_cast<const Word*>(y), sums, true);
  return sums[0];
}

}  // namespace

TEST(a_product_of_tiles_is_that_of_the_matrices) {
  const index_t sizes[][3] = {{1, 1, 1}, {16, 16, 32}, {17, 40, 33}, {50, 33, 70}, {33, 16, 64}};
  for (const auto& [m, n, k] : sizes) {
    const std::vector<float> x = short_normal(m * k, 1), y = short_normal(n * k, 2);
    std::vector<float> y_rows(k * n);  // the same matrix by rows of the dimension summed over
    for (index_t j = 0; j < n; ++j)
      for (index_t i = 0; i < k; ++i) y_rows[i * n + j] = y[j * k + i];
    const Rows a_rows(x, m, k), b_rows(y, n, k), pairs(y_rows, k, n);
    const index_t rows = tiles_of(m), columns = tiles_of(n), depth = depth_of(k);
    std::vector<Word> a(rows * depth * kTileSize, ~0u), b_as_a(columns * depth * kTileSize, ~0u);
    std::vector<Word> b(b_as_a.size(), ~0u), b_of_pairs(b_as_a.size(), ~0u);
    pack_rows(m, k, a_rows.row.data(), a_rows.factor.data(), a.data());
    pack_rows(n, k, b_rows.row.data(), b_rows.factor.data(), b_as_a.data());
    for (index_t t = 0; t < columns * depth; ++t)
      transpose_tile(&b_as_a[t * kTileSize], &b[t * kTileSize]);
    pack_pairs(k, n, pairs.row.data(), pairs.factor.data(), b_of_pairs.data());
    CHECK(b == b_of_pairs);
    std::vector<float> c(rows * columns * kTileSize, 3.0f);
    const TileUse use;
    multiply(rows, columns, depth, a.data(), b.data(), c.data(), false);
    multiply(rows, columns, depth, a.data(), b.data(), c.data(), true);
    for (index_t i = 0; i < m; ++i)
      for (index_t j = 0; j < n; ++j) {
        double wanted = 0;
        for (index_t f = 0; f < k; ++f) wanted += 2.0 * x[i * k + f] * y[j * k + f];
        CHECK_CLOSE(c[(i / 16 * columns + j / 16) * kTileSize + i % 16 * 16 + j % 16], wanted, 0,
                    1e-5 * double(k));
      }
  }
}

TEST(the_twin_rounds_as_the_manual_says) {
  // To nearest even, in each step: 2^24 + 1 is a tie that stays, 2^24 + 2 + 1 one that goes up.
  CHECK(one_product({0x1p24f, 0, 1}, {1, 0, 1}, 0) == 0x1p24f);
  CHECK(one_product({0x1p24f, 0, 2, 0, 1}, {1, 0, 1, 0, 1}, 0) == 0x1p24f + 4);
  // Even and odd elements have sums of their own, which lose nothing to each other.
  CHECK(one_product({0x1p24f, 1, -0x1p24f, 1}, {1, 1, 1, 1}, 0) == 2);
  // These are added before C is.
  CHECK(one_product({1, 1}, {1, 1}, 0x1p24f) == 0x1p24f + 2);
  // A product is not rounded before it is added.
  CHECK(one_product({0x1p-100f, 0, 0x1p100f, 0}, {0x1p-40f, 0, 1, 0}, 0) == 0x1p100f);
  // Subnormal operands and results are zeros.
  CHECK(one_product({0x1p-127f}, {0x1p100f}, 0) == 0);
  CHECK(one_product({0x1p-70f}, {0x1p-70f}, 0) == 0);
  CHECK(one_product({0x1p-63f}, {0x1p-63f}, 0) == 0x1p-126f);
  CHECK(one_product({0}, {0}, 0x1p-130f) == 0);
  CHECK(std::isnan(one_product({INFINITY}, {0}, 0)));
  CHECK(one_product({INFINITY}, {2}, 1) == INFINITY);
}

namespace {

struct Run {
  index_t nq, nk, d, dv;
  AttentionOptions options;
  std::vector<float> q, k, v, g;
  std::vector<std::uint8_t> mask;

  Run(index_t queries, index_t keys, index_t features, index_t values, AttentionOptions o)
      : nq(queries),
        nk(keys),
        d(features),
        dv(values),
        options(o),
        q(short_normal(nq * d, 3)),
        k(short_normal(nk * d, 4)),
        v(short_normal(nk * dv, 5)),
        g(short_normal(nq * dv, 6)),
        mask(nk) {
    for (index_t j = 0; j < nk; ++j) mask[j] = j % 5 != 3;
  }
  struct Result {
    std::vector<double> out, dq, dk, dv;
  };
  static std::vector<std::uint16_t> halves(const std::vector<float>& x) {
    std::vector<std::uint16_t> y(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) y[i] = rounded_half(x[i]);
    return y;
  }
  static std::vector<double> doubles(const std::vector<float>& x) { return {x.begin(), x.end()}; }

  // Of bfloat16 inputs, results in float32; and of the same numbers in double.
  Result in_bfloat16(int threads) const {
    const auto hq = halves(q), hk = halves(k), hv = halves(v);
    const auto input = [&](const std::vector<std::uint16_t>& x, index_t rows, index_t columns) {
      return Input<float>(x.data(), 0, rows * columns, columns, Element::bfloat16);
    };
    const AttentionInputs<float> in{input(hq, nq, d), input(hk, nk, d), input(hv, nk, dv),
                                    Mask{mask.data(), 0}};
    std::vector<float> out = unwritten<float>(nq * dv), dq = unwritten<float>(q.size()),
                       dk = unwritten<float>(k.size()), dvalue = unwritten<float>(v.size());
    const AttentionShape shape{1, 1, nq, nk, d, dv};
    expected_forward<float>(shape, options, 7, in, view<float>(out, nq, dv), threads);
    expected_backward<float>(shape, options, 7, in,
                             {view<const float>(g, nq, dv), view<float>(dq, nq, d),
                              view<float>(dk, nk, d), view<float>(dvalue, nk, dv)},
                             threads);
    return {doubles(out), doubles(dq), doubles(dk), doubles(dvalue)};
  }
  Result in_double() const {
    const auto dq_in = doubles(q), dk_in = doubles(k), dv_in = doubles(v), dg = doubles(g);
    const AttentionInputs<double> in{view<const double>(dq_in, nq, d),
                                     view<const double>(dk_in, nk, d),
                                     view<const double>(dv_in, nk, dv), Mask{mask.data(), 0}};
    Result r{std::vector<double>(nq * dv), std::vector<double>(q.size()),
             std::vector<double>(k.size()), std::vector<double>(v.size())};
    const AttentionShape shape{1, 1, nq, nk, d, dv};
    expected_forward<double>(shape, options, 7, in, view<double>(r.out, nq, dv), 1);
    expected_backward<double>(shape, options, 7, in,
                              {view<const double>(dg, nq, dv), view<double>(r.dq, nq, d),
                               view<double>(r.dk, nk, d), view<double>(r.dv, nk, dv)},
                              1);
    return r;
  }
};

// |a - b| / |b|
double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference / norm);
}

constexpr double kRounding = 1 / 256.0;  // of a bfloat16: half a unit at most

}  // namespace

TEST(expectation_of_bfloat16_rows_is_within_rounding) {
  const index_t sizes[][4] = {
      {1, 7, 5, 3}, {130, 140, 64, 64}, {75, 83, 37, 21}, {70, 300, 20, 90}};
  for (const auto& [nq, nk, d, dv] : sizes)
    for (const bool causal : {false, true})
      for (const Normalize normalize : {Normalize::none, Normalize::sum, Normalize::l2})
        for (const Gradient gradient : {Gradient::lower_bound, Gradient::exact}) {
          const Run run(nq, nk, d, dv, {causal, normalize, gradient});
          const Run::Result got = run.in_bfloat16(1), wanted = run.in_double();
          CHECK(distance(got.out, wanted.out) < kRounding);
          CHECK(distance(got.dv, wanted.dv) < kRounding);
          if (nq == 1 && normalize != Normalize::none) continue;  // terms cancel
          CHECK(distance(got.dq, wanted.dq) < kRounding);
          CHECK(distance(got.dk, wanted.dk) < kRounding);
        }
}

// All keys nearly one vector, all weights nearly equal: roundings do not add up with the length.
TEST(expectation_of_clustered_bfloat16_keys_is_within_rounding) {
  for (const Normalize normalize : {Normalize::none, Normalize::sum, Normalize::l2}) {
    Run run(40, 700, 32, 16, {false, normalize, Gradient::exact});
    for (std::vector<float>* x : {&run.q, &run.k})
      for (std::size_t i = 0; i < x->size(); ++i)
        (*x)[i] = widened(rounded_half((*x)[i] / 16 + std::sin(float(i % 32))));
    for (float& value : run.v) value = widened(rounded_half(value / 16 + 1));
    const Run::Result got = run.in_bfloat16(1), wanted = run.in_double();
    CHECK(distance(got.out, wanted.out) < kRounding);
    CHECK(distance(got.dv, wanted.dv) < kRounding);
  }
}

TEST(expectation_of_bfloat16_rows_has_the_same_bits_at_any_thread_count) {
  for (const bool causal : {false, true}) {
    const Run run(900, 500, 40, 24, {causal, Normalize::sum, Gradient::exact});
    const Run::Result one = run.in_bfloat16(1), three = run.in_bfloat16(3);
    CHECK(one.out == three.out && one.dq == three.dq && one.dk == three.dk && one.dv == three.dv);
  }
}

namespace {

// Gradients of queries and keys by the lower bound, of codes without order, in products of bfloat16
// or not.
std::array<std::vector<double>, 2> lower_bound(const Run& run, int n_bits, index_t n_hashes,
                                               bool short_products) {
  std::vector<std::uint8_t> codes[] = {std::vector<std::uint8_t>(run.nq * n_hashes),
                                       std::vector<std::uint8_t>(run.nk * n_hashes)};
  for (auto& side : codes)
    for (std::size_t i = 0; i < side.size(); ++i)
      side[i] = std::uint8_t((i * i * 2654435761u + side.size()) >> 13) % (1 << n_bits);
  AttentionOptions options = run.options;
  options.bfloat16_products = short_products;
  std::vector<float> dq = unwritten<float>(run.q.size()), dk = unwritten<float>(run.k.size()),
                     dv = unwritten<float>(run.v.size());
  yoso_backward({1, 1, run.nq, run.nk, run.d, run.dv}, options, n_bits, n_hashes,
                {view<const float>(run.q, run.nq, run.d), view<const float>(run.k, run.nk, run.d),
                 view<const float>(run.v, run.nk, run.dv), Mask{run.mask.data(), 0}},
                {codes[0].data(), 1}, {codes[1].data(), 1},
                {view<const float>(run.g, run.nq, run.dv), view<float>(dq, run.nq, run.d),
                 view<float>(dk, run.nk, run.d), view<float>(dv, run.nk, run.dv)},
                1);
  return {Run::doubles(dq), Run::doubles(dk)};
}
bool finite_alike(const std::vector<double>& a, const std::vector<double>& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (std::isfinite(a[i]) != std::isfinite(b[i])) return false;
  return true;
}

}  // namespace

// Of queries and keys: buckets of some 75 rows, of 18, and of 150, which are taken in parts.
TEST(gradient_of_sampled_bfloat16_pairs_is_within_rounding) {
  struct {
    index_t nq, nk, d, dv;
    int n_bits;
    index_t n_hashes;
  } const cases[] = {{300, 290, 64, 64, 2, 9},
                     {1100, 1050, 32, 80, 6, 3},
                     {290, 300, 16, 48, 1, 2},
                     {300, 290, 16, 48, 1, 2}};
  for (const auto& c : cases)
    for (const bool causal : {false, true})
      for (const Normalize normalize : {Normalize::none, Normalize::sum}) {
        const Run run(c.nq, c.nk, c.d, c.dv, {causal, normalize, Gradient::lower_bound});
        const auto got = lower_bound(run, c.n_bits, c.n_hashes, true),
                   wanted = lower_bound(run, c.n_bits, c.n_hashes, false);
        for (const int side : {0, 1}) CHECK(distance(got[side], wanted[side]) < kRounding);
      }
}

// Of a causal head those alone that see a value or an output gradient that is not finite.
TEST(gradient_of_sampled_bfloat16_pairs_that_are_not_finite) {
  for (const int n_bits : {1, 2, 3}) {
    Run run(300, 300, 32, 32, {true, Normalize::none, Gradient::lower_bound});
    run.v[280 * 32 + 1] = NAN;
    run.v[150 * 32] = INFINITY;
    run.g[20 * 32 + 3] = NAN;
    const auto got = lower_bound(run, n_bits, 1, true), wanted = lower_bound(run, n_bits, 1, false);
    for (const int side : {0, 1}) {
      CHECK(finite_alike(got[side], wanted[side]));
      CHECK(std::isfinite(got[side][21 * 32]));
    }
  }
}

// Norms that float32 has and whose products it does not have.
TEST(expectation_of_large_and_small_bfloat16_rows) {
  Run run(20, 40, 24, 8, {false, Normalize::none, Gradient::exact});
  const Run::Result wanted = run.in_bfloat16(1);
  for (float& x : run.q) x *= 0x1p-110f;
  for (float& x : run.k) x *= 0x1p100f;
  const Run::Result got = run.in_bfloat16(1);
  CHECK(distance(got.out, wanted.out) < 1e-6 && distance(got.dv, wanted.dv) < 1e-6);
}

// Rows that are not finite act as they do in float32.
TEST(expectation_of_bfloat16_rows_that_are_not_finite) {
  for (const bool causal : {false, true}) {
    Run run(50, 50, 16, 8, {causal, Normalize::none, Gradient::exact});
    run.q[3 * 16 + 2] = NAN;
    run.k[7 * 16] = INFINITY;
    run.v[20 * 8 + 1] = NAN;
    const Run::Result got = run.in_bfloat16(1), wanted = run.in_double();
    CHECK(finite_alike(got.out, wanted.out));
    CHECK(finite_alike(got.dq, wanted.dq));
    CHECK(finite_alike(got.dk, wanted.dk));
    CHECK(finite_alike(got.dv, wanted.dv));
  }
}

namespace {

// Hyperplanes and rows, of every eighth of which one projection is as good as zero.
struct Hashed {
  index_t n, d;
  HashFunctions functions;
  std::vector<float> planes, x;

  Hashed(index_t rows, index_t features, int n_bits, index_t n_hashes, Element element)
      : n(rows),
        d(features),
        planes(normal(n_bits * n_hashes * d, 1)),
        x(element == Element::bfloat16 ? short_normal(n * d, 2) : normal(n * d, 2)) {
    functions.family = Family::hyperplane;
    functions.parameters = planes.data();
    functions.columns = d;
    functions.n_bits = n_bits;
    functions.n_hashes = n_hashes;
    for (index_t i = 0; i < n && element == Element::float32; i += 8) {
      const float* plane = &planes[i % (n_bits * n_hashes) * d];
      double along = 0, square = 0;
      for (index_t c = 0; c < d; ++c) {
        along += double(x[i * d + c]) * plane[c];
        square += double(plane[c]) * plane[c];
      }
      for (index_t c = 0; c < d; ++c) x[i * d + c] -= float(along / square * plane[c]);
    }
  }
  // Hashed so many rows at a time: a hundred are too few for tiles.
  std::vector<std::uint8_t> codes(index_t at_once, Element element, int threads,
                                  bool* finite = nullptr) const {
    const index_t bytes = functions.n_hashes * hash_code_bytes(functions.n_bits);
    std::vector<std::uint8_t> result(n * bytes, 0xcc);
    const std::vector<std::uint16_t> halves = Run::halves(x);
    if (finite) *finite = true;
    for (index_t i = 0; i < n; i += at_once) {
      Input<float> rows(&x[i * d], 0, 0, d);
      if (element == Element::bfloat16) rows = {&halves[i * d], 0, 0, d, element};
      const bool all =
          hash(functions, rows, 1, 1, std::min(at_once, n - i), d, &result[i * bytes], threads);
      if (finite && !all) *finite = false;
    }
    return result;
  }
  void check() const {
    const std::vector<std::uint8_t> wanted = codes(100, Element::float32, 1);
    CHECK(codes(n, Element::float32, 1) == wanted);
    CHECK(codes(n, Element::float32, 3) == wanted);
  }
  bool by_tiles(bool bfloat16) const {  // whether tiles make the codes of the first rows
    std::vector<float> packed(
        hash_tiles_planes(hash_code_bytes(functions.n_bits), functions.n_hashes, d));
    std::vector<float> scratch(hash_tiles_scratch(d));
    std::vector<std::uint8_t> result(kTileRows * functions.n_hashes *
                                     hash_code_bytes(functions.n_bits));
    HashTiles h;
    h.parameters = planes.data();
    h.columns = h.n_features = h.row_stride = d;
    h.n_bits = functions.n_bits;
    h.n_hashes = functions.n_hashes;
    h.x = x.data();
    h.rows = kTileRows;
    h.codes = result.data();
    h.scratch = scratch.data();
    h.bfloat16 = bfloat16;
    h.planes = packed.data();
    return kernels().pack_planes(h) && kernels().hash_tiles(h);
  }
};

}  // namespace

TEST(codes_by_tiles_are_those_of_float32) {
  for (const Element element : {Element::float32, Element::bfloat16})
    for (const index_t d : {3, 24, 64, 97})
      for (const auto& [n_bits, n_hashes] :
           {std::pair<int, index_t>{3, 5}, {8, 32}, {8, 7}, {9, 5}, {16, 4}, {17, 3}, {40, 2}}) {
        const Hashed h(300, d, n_bits, n_hashes, element);
        h.check();
        CHECK(h.codes(h.n, element, 1) == h.codes(100, Element::float32, 1));
        if (kernels().hash_tiles) CHECK(h.by_tiles(element == Element::bfloat16));
      }
}

TEST(codes_by_tiles_of_rows_of_any_size) {
  for (const int exponent : {-149, -135, -120, -80, -45, 45, 80, 100}) {
    Hashed h(300, 40, 8, 9, Element::float32);
    for (std::size_t i = 0; i < h.x.size(); ++i)
      if (i / h.d % 7 == 2 || i / h.d >= 192) h.x[i] = std::ldexp(h.x[i], exponent);
    h.check();
  }
  Hashed h(300, 40, 8, 9, Element::float32);  // of numbers of all sizes
  for (std::size_t i = 0; i < h.x.size(); ++i) h.x[i] = std::ldexp(h.x[i], int(i * 7 % 190) - 150);
  h.check();
  for (float& value : h.planes) value *= 1e-20f;
  h.check();
  for (std::size_t i = 0; i < h.x.size(); i += 3) h.x[i] = 0;
  h.check();
}

TEST(codes_by_tiles_of_rows_that_are_orthogonal_to_the_normals) {
  Hashed h(300, 40, 8, 9, Element::float32);
  for (std::size_t i = 0; i < h.planes.size(); ++i)
    if (i % 40 < 20) h.planes[i] = 0;
  for (std::size_t i = 0; i < h.x.size(); ++i)
    if (i % 40 >= 20 && i / 40 % 3 < 2) h.x[i] = 0;
  if (kernels().hash_tiles) CHECK(!h.by_tiles(false));  // too many bits are left to float32
  h.check();
  for (std::size_t i = 0; i < h.x.size(); ++i)  // one in 64 rows
    if (i / 40 % 64 != 5) h.x[i] = float(i % 11) - 5.5f;
  if (kernels().hash_tiles) CHECK(h.by_tiles(false));
  h.check();
}

TEST(codes_by_tiles_of_rows_that_are_not_finite) {
  for (const float bad : {NAN, INFINITY}) {
    Hashed h(300, 40, 8, 9, Element::float32);
    bool finite = false;
    const std::vector<std::uint8_t> wanted = h.codes(h.n, Element::float32, 1, &finite);
    CHECK(finite);
    h.x[200 * 40 + 39] = bad;
    const std::vector<std::uint8_t> got = h.codes(h.n, Element::float32, 1, &finite);
    CHECK(!finite);
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(i / 9 == 200 || got[i] == wanted[i]);
  }
}

TEST(codes_by_tiles_of_heads_with_planes_of_their_own) {
  const index_t heads = 4, batch = 2, n = 150, d = 20, m = 6;
  const std::vector<float> planes = normal(heads / 2 * 8 * m * d, 1),
                           x = normal(batch * heads * n * d, 2);
  HashFunctions f;
  f.family = Family::hyperplane;
  f.parameters = planes.data();
  f.head_stride = 8 * m * d;
  f.heads_per_set = 2;
  f.columns = d;
  f.n_hashes = m;
  std::vector<std::uint8_t> got(batch * heads * n * m), wanted(n * m);
  hash(f, {x.data(), heads * n * d, n * d, d}, batch, heads, n, d, got.data(), 2);
  for (index_t head = 0; head < batch * heads; ++head) {
    HashFunctions one = f;
    one.parameters += head % heads / 2 * f.head_stride;
    one.head_stride = 0;
    for (index_t i = 0; i < n; i += 50)
      hash(one, {&x[(head * n + i) * d], 0, 0, d}, 1, 1, 50, d, &wanted[i * m], 1);
    CHECK(std::equal(wanted.begin(), wanted.end(), got.begin() + head * n * m));
  }
}

#if defined(__x86_64__)
namespace {

Processor with_everything() {
  Processor p;
  p.leaf1_ecx = p.leaf7_ebx = p.leaf7_edx = p.leaf7_1_eax = ~0u;
  p.saved_state = ~std::uint64_t(0);
  return p;
}
std::string chosen(const Processor& p) { return choose(instruction_sets(p), nullptr).name; }
std::string refusal(const Processor& p, const char* asked) {
  try {
    return choose(instruction_sets(p), asked).name;
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

TEST(the_best_instruction_set_that_runs_is_chosen) {
  Processor p = with_everything();
  CHECK(chosen(p) == "amx");
  p.tiles_refused = "the system gives this process no tiles: Operation not permitted";
  CHECK(chosen(p) == "avx512_bf16");
  CHECK(refusal(p, "amx") == "LSHKIT_ISA=amx does not run here: " + p.tiles_refused);
  p.intel = true;
  CHECK(chosen(p) == "avx512");
  CHECK(refusal(p, "avx512_bf16") == "avx512_bf16");
  p.intel = false;
  p.tiles_refused.clear();
  p.saved_state = 0xe7;
  CHECK(refusal(p, "amx") == "LSHKIT_ISA=amx does not run here: the system does not save tiles");
  p.leaf7_edx = ~(1u << 24);
  CHECK(refusal(p, "amx") == "LSHKIT_ISA=amx does not run here: the CPU has no amx_tile");
  p = with_everything();
  p.leaf7_1_eax = 0;  // tiles alone are not enough
  CHECK(chosen(p) == "avx512");
  CHECK(refusal(p, "amx") == "LSHKIT_ISA=amx does not run here: the CPU has no avx512_bf16");
  p.saved_state = 0x7;
  CHECK(chosen(p) == "avx2");
  p.leaf1_ecx &= ~(1u << 12);
  CHECK(chosen(p) == "base");
  CHECK(refusal(p, "avx2") == "LSHKIT_ISA=avx2 does not run here: the CPU has no fma");
  CHECK(chosen(Processor()) == "base");
}

TEST(an_instruction_set_is_taken_by_its_name) {
  for (const char* name : {"base", "avx2", "avx512", "avx512_bf16", "amx", "amx_twin"})
    CHECK(refusal(with_everything(), name) == name);
  CHECK(refusal(with_everything(), "amx2") ==
        "LSHKIT_ISA must be base, avx2, avx512, avx512_bf16, amx or amx_twin, was amx2");
}
#endif

LSHKIT_TEST_MAIN

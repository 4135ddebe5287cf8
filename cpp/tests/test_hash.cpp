// Codes against the definition in hash.hpp, in double precision.
#include "check.hpp"
#include "kernels/kernels.hpp"
#include "projections.hpp"

namespace {

void check_codes(Family family, index_t n, index_t d, int n_bits, index_t n_hashes, int threads) {
  const index_t batch = 2, heads = 2;
  const Parameters p = family == Family::hadamard ? hadamard(d, n_bits, n_hashes, heads, 1)
                                                  : hyperplane(d, n_bits, n_hashes, heads, 1);
  const std::vector<float> x = normal(batch * heads * n * d, 2);
  const int bytes = hash_code_bytes(n_bits);
  std::vector<std::uint8_t> codes(batch * heads * n * n_hashes * bytes);
  HashFunctions f;
  f.family = family;
  f.parameters = p.numbers.data();
  f.head_stride = index_t(p.numbers.size()) / heads;
  f.columns = p.columns;
  f.n_bits = n_bits;
  f.n_hashes = n_hashes;
  CHECK(hash(f, {x.data(), heads * n * d, n * d, d}, batch, heads, n, d, codes.data(), threads));
  int wrong = 0;
  for (index_t row = 0; row < batch * heads * n; ++row)
    for (index_t h = 0; h < n_hashes; ++h) {
      const index_t at = row * n_hashes + h;
      std::uint64_t code = 0;
      std::memcpy(&code, &codes[at * bytes], bytes);  // little-endian
      if (n_bits < 64 && code >> n_bits) ++wrong;
      for (int b = 0; b < n_bits; ++b) {
        double size;
        const double z = projection(family, f.parameters + row / n % heads * f.head_stride,
                                    p.columns, &x[row * d], d, n_bits, h, b, &size);
        if (std::fabs(z) > 1e-5 * size && (code >> b & 1) != std::uint64_t(z > 0)) ++wrong;
      }
    }
  CHECK(wrong == 0);
}

}  // namespace

TEST(codes_are_signs_of_projections) {
  for (const Family family : {Family::hyperplane, Family::hadamard}) {
    check_codes(family, 1, 1, 1, 1, 1);
    check_codes(family, 17, 7, 8, 5, 2);
    check_codes(family, 33, 64, 8, 32, 1);
    check_codes(family, 5, 65, 9, 33, 2);
    check_codes(family, 3, 200, 16, 7, 1);
    check_codes(family, 2, 60, 3, 130, 1);
    check_codes(family, 2, 600, 2, 40, 1);
    check_codes(family, 33, 24, 17, 9, 2);
    check_codes(family, 515, 7, 32, 5, 2);
    check_codes(family, 17, 64, 33, 70, 1);
    check_codes(family, 515, 7, 45, 5, 2);
    check_codes(family, 3, 20, 64, 130, 1);
  }
}

// Bits that are not within rounding of zero, of rows of every element.
TEST(fast_codes_are_signs_of_projections) {
  for (const index_t d : {1, 7, 32, 60, 64, 65, 128})
    for (const auto& [n_bits, n_hashes] :
         {std::pair<int, index_t>{1, 1}, {3, 7}, {8, 32}, {8, 33}, {12, 6}, {16, 130}})
      for (const Element element : {Element::float32, Element::bfloat16, Element::float16}) {
        const index_t n = 75, stride = d + 3;
        const Parameters p = hadamard(d, n_bits, n_hashes, 1, 1);
        std::vector<float> x = normal(n * stride, 2);
        std::vector<std::uint16_t> shorts(x.size());
        for (std::size_t i = 0; i < x.size(); ++i) {  // numbers that both 16-bit formats hold
          x[i] = std::round(x[i] * 32) / 32;
          kernels().narrow(&x[i], 1, element == Element::float16 ? element : Element::bfloat16,
                           &shorts[i]);
        }
        HashFunctions f;
        f.parameters = p.numbers.data();
        f.columns = p.columns;
        f.n_bits = n_bits;
        f.n_hashes = n_hashes;
        Input<float> rows(x.data(), 0, 0, stride);
        if (element != Element::float32) rows = {shorts.data(), 0, 0, stride, element};
        const int bytes = hash_code_bytes(n_bits);
        std::vector<std::uint8_t> codes(n * n_hashes * bytes);
        CHECK(hash(f, rows, 1, 1, n, d, codes.data(), 1, Precision::fast));
        int wrong = 0;
        for (index_t row = 0; row < n; ++row)
          for (index_t h = 0; h < n_hashes; h += 1 + h / 20) {
            std::uint32_t code = 0;
            std::memcpy(&code, &codes[(row * n_hashes + h) * bytes], bytes);
            if (code >> n_bits) ++wrong;
            for (int b = 0; b < n_bits; ++b) {
              double size;
              const double z = projection(Family::hadamard, f.parameters, p.columns,
                                          &x[row * stride], d, n_bits, h, b, &size);
              if (std::fabs(z) > 2e-3 * size && (code >> b & 1) != std::uint32_t(z > 0)) ++wrong;
            }
          }
        CHECK(wrong == 0);
      }
}

// The same rows, however many at once.
TEST(fast_codes_are_those_of_the_row_alone) {
  const index_t n = 100, d = 64, m = 32;
  const Parameters p = hadamard(d, 8, m, 1, 1);
  HashFunctions f;
  f.parameters = p.numbers.data();
  f.columns = p.columns;
  f.n_hashes = m;
  std::vector<float> x = normal(n * d, 2);
  for (float& value : x) value = std::round(value * 16) / 16;
  for (index_t i = 0; i < n; ++i)  // of sizes up to the ends of the range, zeros, and not finite
    for (index_t c = 0; c < d; ++c) x[i * d + c] = std::ldexp(x[i * d + c], int(i % 25) * 9 - 120);
  for (index_t c = 0; c < d; ++c) x[41 * d + c] = 0;
  x[42 * d + 5] = NAN;
  x[43 * d + 6] = -INFINITY;
  std::vector<std::uint16_t> shorts(n * d);
  kernels().narrow(x.data(), n * d, Element::bfloat16, shorts.data());
  const Input<float> rows(shorts.data(), 0, 0, d, Element::bfloat16);
  std::vector<std::uint8_t> together(n * m), alone(n * m);
  CHECK(!hash(f, rows, 1, 1, n, d, together.data(), 1, Precision::fast));
  for (index_t i = 0; i < n; ++i) {
    const Input<float> row(&shorts[i * d], 0, 0, d, Element::bfloat16);
    CHECK(hash(f, row, 1, 1, 1, d, &alone[i * m], 1, Precision::fast) == (i != 42 && i != 43));
  }
  for (index_t i = 0; i < n * m; ++i)
    if (i / m != 42 && i / m != 43) CHECK(together[i] == alone[i] && (i / m != 41 || !alone[i]));
}

TEST(zero_rows_have_code_zero_and_bad_rows_are_told) {
  for (const Family family : {Family::hyperplane, Family::hadamard}) {
    const index_t n = 40, d = 24, m = 9;
    const Parameters p =
        family == Family::hadamard ? hadamard(d, 8, m, 1, 3) : hyperplane(d, 8, m, 1, 3);
    HashFunctions f;
    f.family = family;
    f.parameters = p.numbers.data();
    f.columns = p.columns;
    f.n_hashes = m;
    std::vector<float> x = normal(n * d, 4);
    std::vector<std::uint8_t> clean(n * m), codes(n * m);
    for (index_t c = 0; c < d; ++c) x[3 * d + c] = c % 2 ? -0.0f : 0.0f;
    CHECK(hash(f, {x.data(), 0, 0, d}, 1, 1, n, d, clean.data(), 1));
    for (index_t h = 0; h < m; ++h) CHECK(clean[3 * m + h] == 0);
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      std::vector<float> y = x;
      y[35 * d + 23] = bad;
      CHECK(!hash(f, {y.data(), 0, 0, d}, 1, 1, n, d, codes.data(), 1));
      for (index_t i = 0; i < n * m; ++i) CHECK(i / m == 35 || codes[i] == clean[i]);
    }
  }
}

TEST(codes_are_those_of_the_direction) {
  for (const Family family : {Family::hyperplane, Family::hadamard})
    for (const Precision precision : {Precision::full, Precision::fast}) {
      const index_t n = 40, d = 60, m = 20;
      const Parameters p =
          family == Family::hadamard ? hadamard(d, 8, m, 1, 3) : hyperplane(d, 8, m, 1, 3);
      HashFunctions f;
      f.family = family;
      f.parameters = p.numbers.data();
      f.columns = p.columns;
      f.n_hashes = m;
      std::vector<float> x = normal(n * d, 4);
      std::vector<std::uint8_t> wanted(n * m), codes(n * m);
      hash(f, {x.data(), 0, 0, d}, 1, 1, n, d, wanted.data(), 1, precision);
      for (index_t i = 0; i < n; ++i)
        for (index_t c = 0; c < d; ++c) x[i * d + c] = std::ldexp(x[i * d + c], int(6 * i) - 109);
      CHECK(hash(f, {x.data(), 0, 0, d}, 1, 1, n, d, codes.data(), 1, precision));
      CHECK(codes == wanted);
      for (index_t i = 0; i < n; ++i)  // subnormal numbers, which are whole ones of 2^-149
        for (index_t c = 0; c < d; ++c)
          x[i * d + c] = std::round(std::ldexp(x[i * d + c], 117 - int(6 * i)));
      hash(f, {x.data(), 0, 0, d}, 1, 1, n, d, wanted.data(), 1, precision);
      for (float& number : x) number *= 0x1p-149f;
      CHECK(hash(f, {x.data(), 0, 0, d}, 1, 1, n, d, codes.data(), 1, precision));
      CHECK(codes == wanted);
    }
}

TEST(strides_reach_beyond_32_bits) {
  const index_t d = 32, m = 4, stride = (index_t(1) << 31) + 64, n = 3;
  SparseMemory memory(sizeof(float) * (stride * n));
  if (!memory.floats()) return;
  const std::vector<float> x = normal(n * d, 5);
  for (index_t i = 0; i < n; ++i)
    std::memcpy(memory.floats() + i * stride, &x[i * d], sizeof(float) * d);
  const Parameters p = hadamard(d, 8, m, 1, 6);
  HashFunctions f;
  f.parameters = p.numbers.data();
  f.columns = p.columns;
  f.n_hashes = m;
  std::vector<std::uint8_t> near(n * m), far(n * m);
  hash(f, {x.data(), 0, 0, d}, 1, 1, n, d, near.data(), 1);
  hash(f, {memory.floats(), 0, 0, stride}, 1, 1, n, d, far.data(), 1);
  CHECK(near == far);
}

TEST(no_rows_is_no_work) {
  HashFunctions f;
  CHECK(hash(f, {}, 1, 4, 0, 8, nullptr, 1));
}

LSHKIT_TEST_MAIN

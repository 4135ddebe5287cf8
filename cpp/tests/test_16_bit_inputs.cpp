// The forward of bfloat16 rows against that of the same rows in float32: few bits of the codes
// differ, and the sum of the codes that it gives is close to bucket_sum's.
#include <cmath>

#include "check.hpp"
#include "lshkit/attention.hpp"
#include "lshkit/bucket_sum.hpp"
#include "packed_planes.hpp"
#include "parallel.hpp"
#include "problem.hpp"

using namespace lshkit;

namespace {

struct Case {
  index_t nq, nk, d, dv;
  int n_bits;
  index_t n_hashes;
};

// Buffers of their exact size, so that AddressSanitizer sees a step beyond.
std::uint16_t to_bfloat16(float x) {  // x must be one
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return std::uint16_t(bits >> 16);
}
std::vector<std::uint16_t> to_bfloat16(const std::vector<float>& x) {
  std::vector<std::uint16_t> shorts(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) shorts[i] = to_bfloat16(x[i]);
  return shorts;
}
float from_bfloat16(std::uint16_t x) {
  const std::uint32_t bits = std::uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}
std::vector<float> short_normal(std::size_t count, unsigned seed) {
  std::vector<float> x = normal(count, seed);
  for (float& value : x) value = from_bfloat16(to_bfloat16(value));
  return x;
}

struct Forward {
  Case c;
  bool causal;
  std::vector<float> q, k, v, out, parameters;
  std::vector<std::uint8_t> query_codes, key_codes, mask;

  Forward(const Case& problem, bool is_causal)
      : c(problem),
        causal(is_causal),
        q(short_normal(c.nq * c.d, 1)),
        k(short_normal(c.nk * c.d, 2)),
        v(short_normal(c.nk * c.dv, 3)),
        out(unwritten<float>(c.nq * c.dv)),
        query_codes(c.nq * c.n_hashes * code_bytes()),
        key_codes(c.nk * c.n_hashes * code_bytes()),
        mask(c.nk) {
    for (index_t j = 0; j < c.nk; ++j) mask[j] = j % 4 != 2;
    const index_t groups = (c.n_hashes + columns() - 1) / columns();
    parameters = normal((3 + groups * c.n_bits) * columns(), 4);
    for (index_t rotation = 0; rotation < 3; ++rotation)
      for (index_t i = 0; i < columns() / 2; ++i) {
        float* plane = &parameters[rotation * columns() + i];
        const float angle = 10 * *plane;
        plane[0] = std::cos(angle);
        plane[columns() / 2] = std::sin(angle);
      }
    for (std::size_t i = 3 * columns(); i < parameters.size(); ++i)
      parameters[i] = parameters[i] < 0 ? -1.0f : 1.0f;
  }
  index_t columns() const { return c.d > 64 ? 128 : 64; }
  int code_bytes() const { return c.n_bits <= 8 ? 1 : 2; }

  HashFunctions functions() const {
    HashFunctions f;
    f.parameters = parameters.data();
    f.columns = columns();
    f.n_bits = c.n_bits;
    f.n_hashes = c.n_hashes;
    return f;
  }
  void run(bool in_16_bits, int threads) {
    AttentionOptions options;
    options.causal = causal;
    options.normalize = Normalize::none;
    const std::vector<std::uint16_t> shorts[] = {to_bfloat16(q), to_bfloat16(k), to_bfloat16(v)};
    std::vector<std::uint16_t> short_out(out.size());
    const auto input = [&](const std::vector<float>& x, const std::vector<std::uint16_t>& bits,
                           index_t rows, index_t width) -> Input<float> {
      if (!in_16_bits) return view<const float>(x, rows, width);
      return {bits.data(), 0, rows * width, width, Element::bfloat16};
    };
    const AttentionInputs<float> in{input(q, shorts[0], c.nq, c.d),
                                    input(k, shorts[1], c.nk, c.d),
                                    input(v, shorts[2], c.nk, c.dv),
                                    {mask.data(), 0}};
    Output<float> to = view<float>(out, c.nq, c.dv);
    if (in_16_bits) to = {short_out.data(), 0, c.nq * c.dv, c.dv, Element::bfloat16};
    yoso_forward({1, 1, c.nq, c.nk, c.d, c.dv}, options, functions(), in, to, query_codes.data(),
                 key_codes.data(), threads);
    for (std::size_t i = 0; in_16_bits && i < out.size(); ++i) out[i] = from_bfloat16(short_out[i]);
  }
  std::vector<float> sum_of_codes() const {
    auto sum = unwritten<float>(c.nq * c.dv);
    bucket_sum<float>({1, 1, c.nq, c.nk, c.n_hashes, c.dv, index_t(1) << c.n_bits},
                      {query_codes.data(), code_bytes()}, {key_codes.data(), code_bytes()},
                      view<const float>(v, c.nk, c.dv), {mask.data(), 0},
                      causal ? Order::causal : Order::all, 1.0f / float(c.n_hashes),
                      view<float>(sum, c.nq, c.dv), 1);
    return sum;
  }
};

const Case kCases[] = {
    {1, 1, 1, 1, 1, 1},        {33, 31, 64, 64, 3, 5},       {700, 650, 40, 80, 8, 33},
    {300, 420, 128, 7, 5, 70}, {2100, 2090, 64, 33, 12, 17}, {700, 700, 64, 64, 8, 32},
};

}  // namespace

TEST(sums_are_close_and_codes_nearly_equal) {
  for (const Case& c : kCases)
    for (const bool causal : {false, true}) {
      Forward full(c, causal), fast(c, causal);
      full.run(false, 1);
      fast.run(true, 1);
      CHECK(relative_error(fast.out, fast.sum_of_codes()) < 2e-3 + 1.0 / 256);
      index_t changed = 0;
      for (std::size_t i = 0; i < full.key_codes.size(); ++i)
        changed += full.key_codes[i] != fast.key_codes[i];
      // Of independent bits, within five standard deviations. Normals of bfloat16 change more.
      const PackedPlanes planes(full.functions(), 1, c.nk, c.d, Element::bfloat16, Precision::fast,
                                1);
      const double a_bit = planes ? 5.6e-4 : 1.5e-4;
      const double codes = double(c.nk * c.n_hashes);
      const double expected = codes * (1 - std::pow(1 - a_bit, c.n_bits));
      CHECK(double(changed) <= expected + 5 * std::sqrt(expected) + 1);
    }
}

TEST(threads_do_not_change_a_bit) {
  Forward one({700, 700, 64, 80, 8, 32}, false), two = one;
  one.run(true, 1);
  two.run(true, 2);
  CHECK(one.out == two.out && one.key_codes == two.key_codes);
}

TEST(columns_of_zeros_whatever_the_memory_held) {
  std::vector<float> wanted;
  for (const std::uint32_t held : {0u, 5u, 0x7f800000u, 0x7fc00001u, 0xffff1234u}) {
    Forward f({300, 280, 64, 70, 8, 32}, false);
    for (index_t j = 0; j < 280; ++j)
      for (index_t c = 0; c < 70; ++c)
        if (c == 5 || (c >= 32 && c < 64) || c == 69) f.v[j * 70 + c] = 0;
    constexpr std::size_t kBytes = std::size_t(4) << 20;
    auto* memory = static_cast<std::uint32_t*>(thread_scratch(kBytes));
    std::fill_n(memory, kBytes / sizeof(held), held);
    f.run(true, 1);
    if (wanted.empty()) wanted = f.out;
    CHECK(f.out == wanted);
    for (index_t i = 0; i < 300; ++i) CHECK(f.out[i * 70 + 5] == 0 && f.out[i * 70 + 40] == 0);
  }
}

TEST(buckets_that_overflow_are_summed_again) {
  for (const bool causal : {false, true}) {
    Forward f({3000, 3000, 16, 40, 8, 9}, causal);
    for (std::size_t i = 0; i < f.k.size(); ++i) f.k[i] = f.q[i] = 1;
    // Each half's sum is far from what values of this mean and size would have in one bucket.
    for (index_t i = 0; i < 3000 * 40; ++i) f.v[i] = i < 1500 * 40 ? 1.0f : -1.0f;
    f.run(true, 1);
    const std::vector<float> wanted = f.sum_of_codes();
    for (std::size_t i = 0; i < wanted.size(); ++i)
      CHECK_CLOSE(f.out[i], wanted[i], 1e-3 + 1.0 / 256, 2);
  }
}

TEST(values_of_any_size) {
  for (const float size : {1e30f, 1e-30f, INFINITY, NAN}) {
    Forward f({600, 600, 64, 64, 8, 8}, false);
    f.v[7 * 64 + 50] = from_bfloat16(to_bfloat16(f.v[7 * 64 + 50] * size));
    f.mask[7] = 1;
    f.run(true, 1);
    const std::vector<float> wanted = f.sum_of_codes();
    index_t unequal = 0;  // NaN where bucket_sum has NaN, and no other infinities
    for (std::size_t i = 0; i < wanted.size(); ++i)
      unequal += std::isfinite(wanted[i]) != std::isfinite(f.out[i]);
    CHECK(unequal == 0);
  }
}

LSHKIT_TEST_MAIN

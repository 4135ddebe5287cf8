// The tensor cores' twins on the host, the sort, and the lower bound's gradient made with them, the
// last against sums over all pairs in double.
#include <algorithm>
#include <cmath>
#include <limits>

#include "check.hpp"
#include "lshkit/cuda/bucket_gradient_matrix.cuh"
#include "quick.hpp"

namespace lshkit {
namespace {

using namespace cuda;

std::uint64_t state = 1;
double uniform() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return double(state >> 11) / 9007199254740992.0;
}
double gauss() {
  return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform());
}
std::uint16_t rounded(float x, Element e) {
  return e == Element::bfloat16 ? to_bfloat16(x) : to_float16(x);
}
float value_of(std::uint16_t x, Element e) {
  return e == Element::bfloat16 ? from_bfloat16(x) : from_float16(x);
}

// Where the PTX ISA puts what lane `lane` has of A, B and C: rows and columns by element.
struct Place {
  int row, column;
};
Place place_of_a(int lane, int i) {
  return {lane / 4 + ((i < 2 || (4 <= i && i < 6)) ? 0 : 8),
          lane % 4 * 2 + (i & 1) + (i < 4 ? 0 : 8)};
}
Place place_of_b(int lane, int i) { return {lane % 4 * 2 + (i & 1) + (i < 2 ? 0 : 8), lane / 4}; }
Place place_of_c(int lane, int i) { return {lane / 4 + (i < 2 ? 0 : 8), lane % 4 * 2 + (i & 1)}; }

template <Element E>
void product_kernel(const std::uint16_t* a, const std::uint16_t* b, float* c) {
  const int lane = lane_index();
  std::uint32_t ra[4], rb[2];
  for (int r = 0; r < 4; ++r) {
    const Place low = place_of_a(lane, 2 * r), high = place_of_a(lane, 2 * r + 1);
    ra[r] = a[low.row * 16 + low.column] | std::uint32_t(a[high.row * 16 + high.column]) << 16;
  }
  for (int r = 0; r < 2; ++r) {
    const Place low = place_of_b(lane, 2 * r), high = place_of_b(lane, 2 * r + 1);
    rb[r] = b[low.row * 8 + low.column] | std::uint32_t(b[high.row * 8 + high.column]) << 16;
  }
  float sum[4];
  for (int i = 0; i < 4; ++i) {
    const Place at = place_of_c(lane, i);
    sum[i] = c[at.row * 8 + at.column];
  }
  multiply<E>(sum, ra, rb[0], rb[1]);
  for (int i = 0; i < 4; ++i) {
    const Place at = place_of_c(lane, i);
    c[at.row * 8 + at.column] = sum[i];
  }
}

template <Element E>
void check_product() {
  std::vector<std::uint16_t> a(256), b(128);
  std::vector<float> c(128), wanted(128);
  for (auto& x : a) x = rounded(float(int(uniform() * 32) - 16), E);
  for (auto& x : b) x = rounded(float(int(uniform() * 32) - 16), E);
  for (auto& x : c) x = float(int(uniform() * 32));
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 8; ++j) {
      wanted[i * 8 + j] = c[i * 8 + j];
      for (int k = 0; k < 16; ++k)
        wanted[i * 8 + j] += value_of(a[i * 16 + k], E) * value_of(b[k * 8 + j], E);
    }
  launch(Queue{}, "product", product_kernel<E>, 1, 32, 0, a.data(), b.data(), c.data());
  CHECK(c == wanted);
}

// A tile through shared memory as the kernels move it: what its fragments hold, and the sums.
void tile_kernel(const std::uint16_t* rows, std::uint16_t* a, std::uint16_t* turned,
                 std::uint16_t* again) {
  LSHKIT_SHARED_MEMORY(memory);
  const SharedAddress tile = shared_address(memory);
  const TileLane lane;
  for (int step = 0; step < 4; ++step) {
    const int row = 4 * step + lane.row;
    copy_async(tile + lane.move(step), rows + row * 64 + lane.piece * 8, row < 13);
  }
  end_copies();
  wait_for_copies<0>();
  __syncwarp();
  for (int block = 0; block < 4; ++block) {
    std::uint32_t r[4];
    load_fragment<false>(r, tile, lane, block);
    for (int i = 0; i < 8; ++i) {  // as A
      const Place at = place_of_a(lane_index(), i);
      a[at.row * 64 + 16 * block + at.column] = std::uint16_t(r[i / 2] >> (16 * (i % 2)));
    }
    load_fragment<true>(r, tile, lane, block);
    for (int half = 0; half < 2; ++half)  // as B
      for (int i = 0; i < 4; ++i) {
        const Place at = place_of_b(lane_index(), i);
        turned[at.row * 64 + 16 * block + 8 * half + at.column] =
            std::uint16_t(r[2 * half + i / 2] >> (16 * (i % 2)));
      }
    const std::uint32_t first = transpose(transpose(r[0]));
    if (first != r[0]) turned[0] = 0xffff;
  }
  __syncwarp();
  for (int n = 0; n < 8; ++n) {  // numbers of C
    const int g = lane_index() / 4, column = n * 8 + lane_index() % 4 * 2;
    for (int half = 0; half < 2; ++half) {
      const int row = g + 8 * half;
      store_shared(tile + 1024 * half + (lane.sum ^ (n * 16)),
                   std::uint32_t(row * 64 + column) | std::uint32_t(row * 64 + column + 1) << 16);
    }
  }
  __syncwarp();
  for (int step = 0; step < 4; ++step)
    store_streaming(again + (4 * step + lane.row) * 64 + lane.piece * 8,
                    load_shared(tile + lane.move(step)));
}

void transpose_kernel(const std::uint16_t* from, std::uint16_t* to) {
  const int g = lane_index() / 4, t = lane_index() % 4;
  const std::uint32_t y =
      transpose(from[g * 8 + 2 * t] | std::uint32_t(from[g * 8 + 2 * t + 1]) << 16);
  to[g * 8 + 2 * t] = std::uint16_t(y);
  to[g * 8 + 2 * t + 1] = std::uint16_t(y >> 16);
}

struct Case {
  index_t batch = 1, heads = 1, key_heads = 1, nq = 20, nk = 20, d = 8, dv = 8;
  int bits = 2;
  index_t hashes = 2;
  bool causal = false, bias = false, packed = false;
  double skew = 1;  // above 1 most rows share a bucket
  int crowded = kCrowdedRows;
  index_t most_staged = GroupSort().most_staged;
  float grad_size = 1, value_size = 1;
  Element element = Element::bfloat16;
};

// The largest error, relative to the sizes of the terms: what is rounded are they.
double error_of(const std::vector<float>& got, const std::vector<double>& wanted,
                const std::vector<double>& sizes) {
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = std::fabs(got[i] - wanted[i]) / (sizes[i] + 1e-30);
    if (std::isnan(error)) return error;
    worst = std::max(worst, error);
  }
  return worst;
}

void check_gradient(const Case& c) {
  const index_t group = c.heads / c.key_heads;
  const index_t query_rows = c.batch * c.heads * c.nq, key_rows = c.batch * c.key_heads * c.nk;
  const index_t own_keys = c.batch * c.heads * c.nk;
  const int bytes = c.bits <= 8 ? 1 : 2;
  const auto rows = [&](index_t n, index_t columns, float size) {
    std::vector<std::uint16_t> x(n * columns);
    for (auto& y : x) y = rounded(float(gauss()) * size, c.element);
    return x;
  };
  const auto query = rows(query_rows, c.d, 1), key = rows(key_rows, c.d, 1);
  const auto value = rows(key_rows, c.dv, c.value_size);
  std::vector<float> grad(query_rows * (c.dv + 1)), bias(query_rows);
  for (auto& x : grad) x = float(gauss()) * c.grad_size;
  for (auto& x : bias) x = float(gauss()) * c.grad_size;
  const auto code_rows = [&](index_t n) {
    std::vector<std::uint8_t> x(n * c.hashes * bytes);
    for (index_t i = 0; i < n * c.hashes; ++i) {
      const int code = int(std::pow(uniform(), c.skew) * (1 << c.bits));
      x[i * bytes] = std::uint8_t(code);
      if (bytes == 2) x[i * bytes + 1] = std::uint8_t(code >> 8);
    }
    return x;
  };
  const auto query_codes = code_rows(query_rows), key_codes = code_rows(key_rows);
  const auto norms = [&](const std::vector<std::uint16_t>& x, index_t n) {
    std::vector<float> inverse(n);
    for (index_t i = 0; i < n; ++i) {
      double square = 0;
      for (index_t k = 0; k < c.d; ++k)
        square += std::pow(double(value_of(x[i * c.d + k], c.element)), 2);
      inverse[i] = float(1 / std::sqrt(square));
    }
    return inverse;
  };
  const auto query_inverse = norms(query, query_rows), key_inverse = norms(key, key_rows);
  std::vector<std::uint8_t> query_valid(query_rows), key_valid(key_rows);
  for (auto& x : query_valid) x = uniform() < 0.9;
  for (auto& x : key_valid) x = uniform() < 0.9;
  const std::vector<index_t> query_starts{0, c.nq / 3, c.nq / 3, c.nq},
      key_starts{0, c.nk / 2, c.nk - 1, c.nk};

  std::vector<float> dq(query_rows * c.d, std::nanf("")), dk(own_keys * c.d, std::nanf(""));
  MatrixProblem p;
  p.queries.side = {c.nq, c.heads, 1, c.packed ? query_starts.data() : nullptr};
  p.keys.side = {c.nk, c.key_heads, group, c.packed ? key_starts.data() : nullptr};
  p.queries.batch = p.keys.batch = c.batch;
  p.queries.valid = query_valid.data();
  p.keys.valid = key_valid.data();
  p.queries.codes = query_codes.data();
  p.keys.codes = key_codes.data();
  const auto elements = [&](const std::vector<std::uint16_t>& x, index_t heads, index_t n,
                            index_t columns) {
    Elements e(reinterpret_cast<const float*>(x.data()), heads, n, columns);
    e.element = c.element;
    return e;
  };
  p.queries.x = elements(query, c.heads, c.nq, c.d);
  p.keys.x = elements(key, c.key_heads, c.nk, c.d);
  p.queries.inverse = query_inverse.data();
  p.keys.inverse = key_inverse.data();
  p.queries.factor = Elements(grad.data(), c.heads, c.nq, c.dv + 1);
  p.keys.factor = elements(value, c.key_heads, c.nk, c.dv);
  p.queries.gradient = dq.data();
  p.keys.gradient = dk.data();
  p.query_heads = c.heads;
  p.sequences = c.packed ? 3 : 1;
  p.n_features = c.d;
  p.n_values = c.dv;
  p.n_hashes = c.hashes;
  p.code_bytes = bytes;
  p.bits = c.bits;
  p.biased = c.bias;
  p.causal = c.causal;
  p.scale = 0.75f;
  p.element = c.element;
  p.crowded = c.crowded;
  p.most_staged = c.most_staged;
  Cut measure(nullptr);
  MatrixScratch unused(measure, p);
  std::vector<Words4> memory(measure.used() / 16 + 1);
  std::memset(memory.data(), 0xff, memory.size() * 16);
  p.bias = c.bias ? bias.data() : nullptr;  // scratch itself, which is not there when measured
  Cut cut(memory.data());
  const MatrixScratch scratch(cut, p);
  CHECK(cut.used() == measure.used());
  bucket_gradient(Queue{}, p, scratch);

  std::vector<double> wanted_dq(dq.size()), wanted_dk(dk.size()), dq_sizes(dq.size()),
      dk_sizes(dk.size());
  const auto code = [&](const std::vector<std::uint8_t>& x, index_t i) {
    return bytes == 1 ? x[i] : x[2 * i] | x[2 * i + 1] << 8;
  };
  for (index_t u = 0; u < c.batch * c.heads; ++u) {
    const index_t kv = u / c.heads * c.key_heads + u % c.heads / group;
    for (index_t i = 0; i < c.nq; ++i)
      for (index_t j = 0; j < c.nk; ++j) {
        const index_t qi = u * c.nq + i, kj = kv * c.nk + j;
        if (!query_valid[qi] || !key_valid[kj]) continue;
        index_t at = i, of = j;
        if (c.packed) {
          int s = 0;
          while (i >= query_starts[s + 1]) ++s;
          if (j < key_starts[s] || j >= key_starts[s + 1]) continue;
          at -= query_starts[s];
          of -= key_starts[s];
        }
        if (c.causal && of > at) continue;
        int collisions = 0;
        for (index_t h = 0; h < c.hashes; ++h)
          collisions += code(query_codes, qi * c.hashes + h) == code(key_codes, kj * c.hashes + h);
        double w = c.bias ? bias[qi] : 0, size = std::fabs(w);
        for (index_t x = 0; x < c.dv; ++x) {
          const double term =
              double(grad[qi * (c.dv + 1) + x]) * value_of(value[kj * c.dv + x], c.element);
          w += term;
          size += std::fabs(term);
        }
        for (index_t x = 0; x < c.d; ++x) {
          const double k = value_of(key[kj * c.d + x], c.element) * key_inverse[kj];
          const double q = value_of(query[qi * c.d + x], c.element) * query_inverse[qi];
          const index_t of_query = qi * c.d + x, of_key = (u * c.nk + j) * c.d + x;
          wanted_dq[of_query] += 0.75 * collisions * w * k;
          wanted_dk[of_key] += 0.75 * collisions * w * q;
          dq_sizes[of_query] += 0.75 * collisions * size * std::fabs(k);
          dk_sizes[of_key] += 0.75 * collisions * size * std::fabs(q);
        }
      }
  }
  // g, the unit vectors and g . v are rounded, for bfloat16 what a hash contributes too.
  const double tolerance = c.element == Element::float16 ? 3.1 / 2048 : 4.1 / 256;
  const double of_queries = error_of(dq, wanted_dq, dq_sizes),
               of_keys = error_of(dk, wanted_dk, dk_sizes);
  if (!(of_queries <= tolerance && of_keys <= tolerance))
    std::printf("  nq %d nk %d d %d dv %d bits %d causal %d: errors %g %g\n", int(c.nq), int(c.nk),
                int(c.d), int(c.dv), c.bits, c.causal, of_queries, of_keys);
  CHECK(of_queries <= tolerance);
  CHECK(of_keys <= tolerance);
}

}  // namespace

TEST(fragments_lie_as_the_isa_says) {
  check_product<Element::bfloat16>();
  check_product<Element::float16>();
  std::vector<std::uint16_t> rows(16 * 64), a(rows), turned(rows), again(rows), wanted(rows);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = std::uint16_t(i + 1000);
  for (std::size_t i = 0; i < rows.size(); ++i) wanted[i] = i < 13 * 64 ? rows[i] : 0;
  launch(Queue{}, "tile", tile_kernel, 1, 32, kTileBytes, rows.data(), a.data(), turned.data(),
         again.data());
  CHECK(a == wanted);
  CHECK(turned == wanted);
  for (std::size_t i = 0; i < again.size(); ++i) CHECK(again[i] == i);
  std::vector<std::uint16_t> to(64);
  launch(Queue{}, "transpose", transpose_kernel, 1, 32, 0, rows.data(), to.data());
  for (int i = 0; i < 64; ++i) CHECK(to[i] == rows[i % 8 * 8 + i / 8]);
}

// Where a GPU would stop, the twin does.
void misaligned_kernel(unsigned char* bytes, int which) {
  LSHKIT_SHARED_MEMORY(memory);
  const SharedAddress tile = shared_address(memory);
  const Words4 x = {};
  std::uint32_t r[4];
  switch (which) {
    case 0:
      return copy_async(tile, bytes + 8, true);
    case 1:
      return copy_async(tile + 8, bytes, false);
    case 2:
      return store_streaming(bytes + 4, x);
    case 3:
      return store_four(bytes + 8, x);
    case 4:
      return void(load_streaming(bytes + 2));
    case 5:
      return void(load_shared(tile + 8));
    case 6:
      return store_shared(tile + 4, 1.0f, 2.0f);
    case 7:
      return store_shared(tile + 2, 1u);
    case 8:
      return load_fragment<false>(r, tile + 8, TileLane(), 0);
    default:
      return;  // nothing wrong
  }
}

TEST(misaligned_moves_are_errors) {
  std::vector<std::uint64_t> bytes(8);
  for (int which = 0; which < 10; ++which) {
    bool thrown = false;
    try {
      launch(Queue{}, "misaligned", misaligned_kernel, 1, 32, kTileBytes,
             reinterpret_cast<unsigned char*>(bytes.data()), which);
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    CHECK(thrown == (which < 9));
  }
}

TEST(gradient_on_tensor_cores) {
  for (const Element element : {Element::bfloat16, Element::float16})
    for (const bool causal : {false, true}) {
      Case c;
      c.element = element;
      c.causal = causal;
      if (kQuick && causal != (element == Element::float16)) continue;
      c.dv = 0;  // no weights, no gradients
      check_gradient(c);
      c.dv = Case{}.dv;
      c.nq = 30, c.nk = 45, c.bits = 1, c.hashes = kQuick ? 1 : 3;  // pairs of two tiles
      check_gradient(c);
      c.nq = 75, c.nk = 83, c.bits = 0, c.hashes = 1;  // linear, more tiles than stages
      check_gradient(c);
      if (kQuick) continue;
      c.nq = 150, c.nk = 170, c.bits = 0;  // more tiles than are on their way at a time
      check_gradient(c);
      c.bits = 2, c.skew = 4, c.nk = 40,
      c.d = c.dv = 64;  // sides that are empty; values as they lie
      check_gradient(c);
      c.skew = 1, c.d = Case{}.d;
      c.nq = 75, c.nk = 83, c.bits = 1, c.bias = true;
      c.dv = 64, c.d = 70;  // two tiles of columns of each
      check_gradient(c);
      c = Case{};
      c.element = element;
      c.causal = causal;
      c.nq = 150, c.nk = 170, c.bits = 3, c.skew = 2, c.hashes = 3, c.bias = true;  // all forms
      c.batch = 2, c.heads = 4, c.key_heads = 2;
      check_gradient(c);
      c.batch = 1, c.packed = true;
      check_gradient(c);
      c.bits = 9, c.hashes = 4;  // most buckets empty
      c.most_staged = 100;       // as more rows than 16 bits can number
      check_gradient(c);
    }
}

// Cut among four warps: with as many tiles of rows as these or more, and with fewer; what the first
// row of a part sees begins anywhere.
TEST(crowded_buckets) {
  for (const Element element : {Element::bfloat16, Element::float16}) {
    Case c;
    c.element = element;
    c.causal = true;
    c.crowded = 32;
    c.nq = kQuick ? 20 : 107, c.nk = kQuick ? 70 : 90, c.bits = 0, c.hashes = 1;
    check_gradient(c);
    c.nq = 70, c.nk = 20;
    check_gradient(c);
    if (kQuick) continue;
    c.nq = 150, c.nk = 170, c.bits = 3, c.skew = 2, c.hashes = 3, c.bias = true;  // all forms
    c.batch = 1, c.heads = 4, c.key_heads = 2, c.packed = true;
    check_gradient(c);
  }
}

TEST(large_gradients_in_float16) {
  Case c;
  c.element = Element::float16;
  c.nq = c.nk = kQuick ? 40 : 300;
  c.bits = 0, c.hashes = 1;
  for (const float size : {1e-9f, 1e6f}) {  // as a scaled loss makes them
    c.grad_size = size;
    c.value_size = size > 1 ? 1000 : 1e-2f;
    check_gradient(c);
    if (kQuick) break;
    c.crowded = 200;
  }
}

}  // namespace lshkit

// The kernels that go row by row, against the same in double: rows in sixteen-byte pieces and not,
// several to a warp and longer than its registers.
#include "check.hpp"
#include "lshkit/cuda/rows.cuh"
#include "problem.hpp"
#include "quick.hpp"

namespace {

using namespace lshkit;
using cuda::Elements;
using cuda::Queue;

// (batch, heads, n_rows, columns) of some kind, `gap` elements after each row, the first one
// `offset` elements into the memory, which ends with the last row.
struct Rows {
  index_t batch, heads, n_rows, columns, gap, offset;
  Element element;
  std::vector<unsigned char> bytes;

  Rows(index_t b, index_t h, index_t n, index_t c, Element kind, index_t more = 0, index_t at = 0,
       int seed = 0)
      : batch(b), heads(h), n_rows(n), columns(c), gap(more), offset(at), element(kind) {
    const index_t size = offset + b * h * n * (c + gap) - gap;
    const auto numbers = normal(size, seed);
    bytes.resize(size * element_bytes(kind));
    for (index_t i = 0; i < size; ++i)
      cuda::store_element<float>(bytes.data(), i, kind, seed ? numbers[i] : std::nanf(""));
  }
  void* data() { return bytes.data() + offset * element_bytes(element); }
  const void* data() const { return bytes.data() + offset * element_bytes(element); }
  index_t index(index_t row, index_t c) const { return row * (columns + gap) + c; }
  double at(index_t row, index_t c) const {
    return cuda::load_element<float>(data(), index(row, c), element);
  }
  void set(index_t row, index_t c, float x) {
    cuda::store_element<float>(data(), index(row, c), element, x);
  }
  Elements elements() const {
    const index_t step = columns + gap;
    return Elements(Input<float>(data(), heads * n_rows * step, n_rows * step, step, element));
  }
  index_t count() const { return batch * heads * n_rows; }
};

struct Case {
  index_t batch, heads, n_rows, columns;
  Element element;
  index_t gap, offset;
};
const Case kAllCases[] = {
    {1, 1, 1, 1, Element::float32, 0, 0},    {2, 2, 5, 8, Element::bfloat16, 0, 0},
    {1, 2, 67, 64, Element::bfloat16, 8, 0}, {1, 1, 130, 64, Element::float16, 0, 8},
    {1, 1, 35, 64, Element::float32, 4, 0},  {1, 1, 9, 64, Element::float32, 0, 1},
    {1, 2, 20, 60, Element::bfloat16, 0, 0}, {1, 1, 9, 200, Element::float32, 0, 0},
    {1, 1, 5, 256, Element::bfloat16, 0, 0}, {1, 1, 3, 264, Element::bfloat16, 0, 0},
    {1, 1, 3, 600, Element::float32, 0, 0},  {1, 1, 2, 515, Element::float16, 1, 0},
};
std::vector<Case> cases() {
  std::vector<Case> some;
  for (std::size_t i = 0; i < std::size(kAllCases); i += kQuick ? 2 : 1)
    some.push_back(kAllCases[i]);
  return some;
}
double tolerance_of(Element kind) {
  return kind == Element::float32 ? 1e-6 : kind == Element::float16 ? 1e-3 : 8e-3;
}
template <class Params>
Params sized(const Case& c) {
  Params a;
  a.batch = c.batch;
  a.heads = c.heads;
  a.n_rows = c.n_rows;
  a.columns = c.columns;
  return a;
}
Rows rows_of(const Case& c, int seed) {
  return Rows(c.batch, c.heads, c.n_rows, c.columns, c.element, c.gap, c.offset, seed);
}
std::vector<float> poison(index_t count) { return std::vector<float>(count, std::nanf("")); }

// The norm of a row in double.
template <class At>
double norm_of(index_t columns, const At& at) {
  double square = 0;
  for (index_t c = 0; c < columns; ++c) square += at(c) * at(c);
  return std::sqrt(square);
}

TEST(unit_vectors) {
  for (const Case& c : cases()) {
    Rows x = rows_of(c, 1);
    const index_t n = x.count(), d = c.columns;
    for (index_t column = 0; column < d; ++column) {
      if (n > 3) x.set(3, column, 0);
      if (n > 2) x.set(2, column, float(x.at(2, column)) * 1e-24f);  // float16: zeros
      if (n > 1 && c.element != Element::float16) x.set(1, column, float(x.at(1, column)) * 1e24f);
    }
    if (n > 4) x.set(4, d - 1, std::nanf(""));
    if (n > 5) x.set(5, 0, -std::numeric_limits<float>::infinity());
    std::vector<std::uint8_t> mask(c.batch * c.n_rows, 1), valid(n, 7);
    mask.back() = 0;
    std::vector<float> inverse = poison(n), unit = poison(n * d), same = inverse;
    std::vector<std::uint8_t> valid_too = valid;
    auto a = sized<cuda::UnitRows>(c);
    a.x = x.elements();
    a.mask = mask.data();
    a.mask_stride = c.n_rows;
    a.unit = unit.data();
    a.inverse = inverse.data();
    a.valid = valid.data();
    cuda::unit_rows(Queue{}, a);
    a.unit = nullptr;
    a.inverse = same.data();
    a.valid = valid_too.data();
    cuda::unit_rows(Queue{}, a);
    CHECK(valid == valid_too);
    for (index_t row = 0; row < n; ++row) {
      const bool masked = !mask[row / (c.heads * c.n_rows) * c.n_rows + row % c.n_rows];
      const double length = norm_of(d, [&](index_t k) { return x.at(row, k); });
      const bool taken = !masked && std::isfinite(length);
      CHECK(valid[row] == taken);
      const double wanted = masked || length == 0 ? 0 : taken ? 1 / length : std::nan("");
      CHECK_CLOSE(inverse[row], wanted, 1e-6, 0);
      CHECK_CLOSE(same[row], inverse[row], 0, 0);
      for (index_t k = 0; k < d; ++k)
        CHECK_CLOSE(unit[row * d + k], taken ? x.at(row, k) * wanted : 0, 1e-6, 0);
    }
  }
}

TEST(normalisation_and_its_gradient) {
  for (const Case& c : cases())
    for (const Normalize normalize : {Normalize::none, Normalize::sum, Normalize::l2}) {
      const index_t d = c.columns, n = c.batch * c.heads * c.n_rows;
      const int counts = normalize == Normalize::sum;
      Rows sums(c.batch, c.heads, c.n_rows, d + counts, Element::float32, 0, 0, 2);
      for (index_t k = 0; k < d; ++k) {
        if (n > 1) sums.set(1, k, 0);
        if (normalize != Normalize::l2) continue;
        if (n > 2) sums.set(2, k, float(sums.at(2, k)) * 1e20f);
        if (n > 3) sums.set(3, k, float(sums.at(3, k)) * 1e-20f);
        if (n > 4) sums.set(4, k, float(sums.at(4, k)) * 1e-28f);
      }
      for (index_t row = 0; counts && row < n; ++row)
        sums.set(row, d, row == 1 ? 0 : 0.5f + float(row % 3));
      std::vector<std::uint8_t> valid(n, 1);
      valid[n - 1] = n < 2;
      Rows out = rows_of(c, 0);
      auto a = sized<cuda::NormalizeRows>(c);
      a.sums = static_cast<const float*>(sums.data());
      a.counts = counts;
      a.normalize = normalize;
      a.valid = valid.data();
      a.out = out.elements();
      a.data = out.data();
      cuda::normalize(Queue{}, a);

      const Rows grad = rows_of(c, 3);
      Rows back = sums;
      std::vector<float> bias = poison(n);
      auto b = sized<cuda::NormalizeBackward>(c);
      b.sums = static_cast<float*>(back.data());
      b.counts = counts;
      b.normalize = normalize;
      b.valid = valid.data();
      b.grad = grad.elements();
      b.bias = counts ? bias.data() : nullptr;
      cuda::normalize_backward(Queue{}, b);

      for (index_t row = 0; row < n; ++row) {
        const double length = norm_of(d, [&](index_t k) { return sums.at(row, k); });
        const double by = normalize == Normalize::none  ? 1
                          : normalize == Normalize::sum ? sums.at(row, d)
                                                        : length;
        double along = 0;
        for (index_t k = 0; k < d && by > 0; ++k) along += grad.at(row, k) * (sums.at(row, k) / by);
        const double size = norm_of(d, [&](index_t k) { return grad.at(row, k); });
        for (index_t k = 0; k < d; ++k) {
          const double y = sums.at(row, k);
          CHECK_CLOSE(out.at(row, k),
                      !valid[row] ? std::nan("")
                      : by == 0   ? 0
                                  : y / by,
                      tolerance_of(c.element), 1e-6);
          double wanted =
              normalize == Normalize::l2 ? grad.at(row, k) - along * (y / by) : grad.at(row, k);
          wanted = valid[row] && by > 0 ? wanted / by : 0;
          CHECK_CLOSE(back.at(row, k), wanted, 1e-6, by > 0 ? 4e-6 * size / by : 0);
        }
        if (counts && valid[row] && by > 0) {
          double total = 0;  // the terms' sizes: what their sum's rounding is relative to
          for (index_t k = 0; k < d; ++k) total += std::fabs(grad.at(row, k) * sums.at(row, k));
          CHECK_CLOSE(bias[row], -along / by, 1e-6, 1e-6 * total / (by * by));
        } else if (counts) {
          CHECK(bias[row] == 0);
        }
      }
    }
}

TEST(gradients_through_unit_vectors_and_of_groups) {
  for (const Case& c : cases())
    for (const index_t group : {1, 3}) {
      const index_t d = c.columns, n = c.batch * c.heads * c.n_rows;
      const Rows own(c.batch, c.heads * group, c.n_rows, d, Element::float32, 0, 0, 4);
      const Rows x = rows_of(c, 5);
      Rows out = rows_of(c, 0), sums = rows_of(c, 0);
      std::vector<float> inverse(n);
      std::vector<std::uint8_t> valid(n, 1);
      for (index_t row = 0; row < n; ++row)
        inverse[row] = float(1 / norm_of(d, [&](index_t k) { return x.at(row, k); }));
      if (n > 1) inverse[1] = 0;
      if (n > 1) valid[1] = 0;
      auto a = sized<cuda::FinishGradient>(c);
      a.own = static_cast<const float*>(own.data());
      a.group = group;
      a.x = x.elements();
      a.inverse = inverse.data();
      a.out = out.elements();
      a.data = out.data();
      cuda::finish_gradient(Queue{}, a);
      auto b = sized<cuda::FinishGradient>(c);
      b.own = a.own;
      b.group = group;
      b.valid = valid.data();
      b.out = sums.elements();
      b.data = sums.data();
      cuda::finish_gradient(Queue{}, b);
      for (index_t row = 0; row < n; ++row) {
        const auto total = [&](index_t k) {
          double sum = 0;
          for (index_t g = 0; g < group; ++g)
            sum += own.at((row / c.n_rows * group + g) * c.n_rows + row % c.n_rows, k);
          return sum;
        };
        double along = 0;
        for (index_t k = 0; k < d; ++k) along += total(k) * x.at(row, k) * inverse[row];
        const double size = norm_of(d, total);
        for (index_t k = 0; k < d; ++k) {
          const double wanted = inverse[row] * (total(k) - along * x.at(row, k) * inverse[row]);
          const double relative = tolerance_of(c.element);
          CHECK_CLOSE(out.at(row, k), wanted, relative, 4e-6 * size * inverse[row] + 1e-7);
          CHECK_CLOSE(sums.at(row, k), valid[row] ? total(k) : 0, relative, 1e-6);
        }
      }
    }
}

// --- What the emulation reports ----------------------------------------------------------------

void some_return(int* out) {
  if (threadIdx.x % 32 >= 20) return;
  out[threadIdx.x] = __shfl_xor_sync(cuda::kAllLanes, int(threadIdx.x), 1);
}
void wait_differently(int* out) {
  if (threadIdx.x % 2)
    __syncwarp();
  else
    out[threadIdx.x] = __shfl_xor_sync(cuda::kAllLanes, 1, 2);
  __syncwarp();
}
void is_not_aligned(int* out) {
  if (threadIdx.x == 0) out[0] = int(cuda::load_quad(out + 1).word[0]);
}
template <class Kernel>
std::string said(Kernel kernel, index_t blocks, int threads, std::size_t shared) {
  alignas(16) static int out[64];
  try {
    cuda::launch(Queue{}, "kernel", kernel, blocks, threads, shared, out + 0);
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}
bool has(const std::string& text, const char* part) { return text.find(part) != text.npos; }

TEST(what_a_gpu_would_not_do_is_an_error) {
  CHECK(has(said(some_return, 1, 64, 0), "not all lanes"));
  CHECK(has(said(some_return, 1, 20, 0), "not all lanes"));
  CHECK(has(said(wait_differently, 1, 32, 0), "different functions"));
  CHECK(has(said(is_not_aligned, 1, 32, 0), "not aligned"));
  CHECK(has(said(is_not_aligned, 1, 1056, 0), "1056 threads"));
  CHECK(has(said(is_not_aligned, 1, 32, 228 * 1024), "shared memory"));
  CHECK(has(said(is_not_aligned, index_t(1) << 31, 32, 0), "blocks"));
}

void number_blocks(int* next) {
  LSHKIT_SHARED_MEMORY(memory);
  if (threadIdx.x == 0) next[blockIdx.x] = atomicAdd(next + 8, 1);
  (void)memory;
}
TEST(blocks_run_in_other_orders) {
  bool ascending = true;
  for (int launch = 0; launch < 10; ++launch) {
    std::vector<int> order(9);
    cuda::launch(Queue{}, "number_blocks", number_blocks, 8, 32, 0, order.data());
    CHECK(order[8] == 8);
    for (int b = 0; b < 8; ++b) ascending = ascending && order[b] == b;
  }
  CHECK(!ascending);
}

}  // namespace

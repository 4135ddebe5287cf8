// Rows that belong to all buckets: the sums are matrix products of their weights, at 2 flops a
// weight and column instead of a pass over a table row for each weight.
#include "dense_bucket_sum.hpp"

#include "matmul.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// Table rows that stay in L1 while all rows of a chunk read. Sums of thousands of terms in parts
// of so many also round less.
constexpr index_t kDepth = 128;

}  // namespace

void dense_pack(Matrix<const float> x, const std::uint8_t* valid, float scale, float* to,
                index_t stride) {
  pack<float>(x.rows, x.columns, stride, {x.data, x.stride}, scale, nullptr, to);
  for (index_t i = 0; valid && i < x.rows; ++i)
    if (!valid[i]) std::memset(to + i * stride, 0, sizeof(float) * stride);
}

void dense_pack_transposed(Matrix<const float> x, const std::uint8_t* valid, float* to,
                           index_t stride) {
  pack_transposed<float>(x.rows, x.columns, stride, {x.data, x.stride}, 1, nullptr, to);
  for (index_t i = 0; valid && i < x.rows; ++i)
    for (index_t c = 0; !valid[i] && c < x.columns; ++c) to[c * stride + i] = 0;
}

void dense_matmul(index_t rows, index_t columns, index_t depth, const float* a, index_t a_row,
                  index_t a_depth, const float* b, index_t b_stride, float* c, index_t c_stride,
                  bool add) {
  for (index_t k = 0; k < depth; k += kDepth)
    matmul<float>(rows, columns, smaller(kDepth, depth - k), {a + k * a_depth, a_row}, a_depth,
                  b + k * b_stride, b_stride, {c, c_stride}, add || k > 0);
}

void dense_add(const DenseTable& t, const DenseWeights& w, const float* x, const float* column) {
  matmul<float>(t.count, t.columns, w.rows, {w.data, w.stride}, 1, x, t.stride, {t.rows, t.stride},
                true);
  if (!t.column) return;
  constexpr int n = kLanes<float>;
  for (index_t f = 0; f < t.count; ++f) {
    const float* weight = w.data + f * w.stride;
    Vec<float> sum = {};
    for (index_t i = 0; i < w.rows; i += n) {
      const int count = int(w.rows - i);
      sum += load_first(weight + i, count) * load_first(column + i, count);
    }
    t.column[f] += sum_lanes(sum);
  }
}

void dense_read(const DenseTable& t, const DenseWeights& w, float* sum, index_t sum_stride,
                float* column_sum) {
  for (index_t f = 0; f < t.count; f += kDepth)
    matmul<float>(w.rows, t.columns, smaller(kDepth, t.count - f), {w.data + f * w.stride, 1},
                  w.stride, t.rows + f * t.stride, t.stride, {sum, sum_stride}, true);
  if (!column_sum) return;
  constexpr int n = kLanes<float>;
  for (index_t i = 0; i < w.rows; i += n) {
    const int count = int(w.rows - i);
    Vec<float> sums = load_first(column_sum + i, count);
    for (index_t first = 0; first < t.count; first += kDepth) {
      Vec<float> part = {};
      for (index_t f = first; f < smaller(first + kDepth, t.count); ++f)
        part += load(w.data + f * w.stride + i) * t.column[f];
      sums += part;
    }
    store_first(column_sum + i, sums, count);
  }
}

void dense_dots(const DenseTable& t, const float* x, const float* column, const DenseWeights& to) {
  matmul<float>(t.count, to.rows, t.columns, {t.rows, t.stride}, 1, x, to.stride,
                {to.data, to.stride}, false);
  if (!t.column) return;
  constexpr int n = kLanes<float>;
  for (index_t f = 0; f < t.count; ++f)
    for (index_t i = 0; i < to.rows; i += n) {
      float* out = to.data + f * to.stride + i;
      store(out, load(out) + load_first(column + i, int(to.rows - i)) * t.column[f]);
    }
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

// A head's rows in words of two bfloat16: see kernels/lower_bound_bfloat16.hpp.
#include "kernels/bfloat16/tiles.hpp"
#include "kernels/kernels.hpp"
#include "kernels/lower_bound_bfloat16.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int W = kLanes<float>;

// to[i] = the bfloat16 of factor_i * x_i in words of two columns, each row `stride` words.
LSHKIT_NOINLINE void to_words(Matrix<const float> x, const float* factor, index_t stride,
                              Word* to) {
  for (index_t i = 0; i < x.rows; ++i)
    for (index_t c = 0; c < x.columns; c += W)
      store_half(reinterpret_cast<Half*>(to + i * stride) + c,
                 to_bfloat16(load(x.row(i) + c) * (factor ? factor[i] : 1.0f)));
}

}  // namespace

void bfloat16_rows(const LowerBoundGradient& p, const Bfloat16Rows& w) {
  to_words(p.query, p.query_inverse_norm, w.d / 2, w.query);
  to_words(p.key, p.key_inverse_norm, w.d / 2, w.key);
  to_words(p.grad, nullptr, w.dv / 2, w.grad);
  to_words(p.value, nullptr, w.dv / 2, w.value);
  if (!p.bias) return;
  const index_t last = w.dv / 2 - 1;
  for (index_t i = 0; i < p.query.rows; ++i)
    w.grad[i * (last + 1) + last] = Half(to_bfloat16(broadcast(p.bias[i]))[0]);
  for (index_t j = 0; j < p.key.rows; ++j) w.value[j * (last + 1) + last] = 0x3f80;  // one
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

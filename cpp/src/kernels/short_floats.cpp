// Arrays of bfloat16 and float16 to float and back.
#include "short_floats.hpp"

#include "kernels.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr int W = kLanes<float>;

template <class Format>
void widen_all(const Half* from, index_t count, float* to) {
  index_t i = 0;
  for (; i + W <= count; i += W) store(to + i, Format::widen(load_half(from + i)));
  if (i == count) return;
  const int left = int(count - i);
  store_first(to + i, Format::widen(load_first_half(from + i, left)), left);
}
template <class Format>
void narrow_all(const float* from, index_t count, Half* to) {
  index_t i = 0;
  for (; i + W <= count; i += W) store_half(to + i, Format::narrow(load(from + i)));
  if (i == count) return;
  Half last[W];
  store_half(last, Format::narrow(load_first(from + i, int(count - i))));
  std::memcpy(to + i, last, sizeof(Half) * (count - i));
}

}  // namespace

void widen(const void* from, Element element, index_t count, float* to) {
  const auto convert = element == Element::bfloat16 ? widen_all<Bfloat16> : widen_all<Float16>;
  convert(static_cast<const Half*>(from), count, to);
}
void narrow(const float* from, index_t count, Element element, void* to) {
  const auto convert = element == Element::bfloat16 ? narrow_all<Bfloat16> : narrow_all<Float16>;
  convert(from, count, static_cast<Half*>(to));
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

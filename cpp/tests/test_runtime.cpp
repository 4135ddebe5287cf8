// What the machine offers, and the arithmetic of the views.
#include <cstdlib>
#include <cstring>
#include <string>

#include "check.hpp"
#include "lshkit/runtime.hpp"
#include "lshkit/tensor.hpp"

using namespace lshkit;

namespace {

// An empty value is as good as none.
void set_environment(const char* name, const char* value) {
#ifdef _WIN32
  _putenv_s(name, value);
#else
  setenv(name, value, 1);
#endif
}

}  // namespace

TEST(instruction_set_is_a_known_one_and_stays) {
  const std::string isa = instruction_set();
  bool known = false;
  for (const char* name : {"base", "avx2", "avx512", "avx512_bf16", "amx", "amx_twin"})
    known = known || isa == name;
  CHECK(known);
  set_environment("LSHKIT_ISA", "base");  // too late: it is read once
  CHECK(isa == instruction_set());
  set_environment("LSHKIT_ISA", "");
}

TEST(cache_sizes_are_in_order_and_stay) {
  const CacheSizes sizes = cache_sizes();
  CHECK(0 < sizes.l2 && sizes.l2 <= sizes.l3);
  set_environment("LSHKIT_CACHE_SIZES", "1,1");  // too late: they are read once
  CHECK(cache_sizes().l2 == sizes.l2 && cache_sizes().l3 == sizes.l3);
  set_environment("LSHKIT_CACHE_SIZES", "");
}

TEST(threads_are_at_least_one) { CHECK(max_threads() >= 1); }

TEST(offsets_exceed_32_bits) {
  // Only addresses are formed, in a space that is never touched: 2^33 elements and more.
  const std::uintptr_t origin = 4096;
  Tensor<float> x{reinterpret_cast<float*>(origin), index_t{1} << 33, index_t{1} << 31, 64};
  CHECK(reinterpret_cast<std::uintptr_t>(x.matrix(1, 1)) ==
        origin + 4 * ((std::uintptr_t{1} << 33) + (std::uintptr_t{1} << 31)));
  Codes codes{reinterpret_cast<const void*>(origin), 2};
  CHECK(reinterpret_cast<std::uintptr_t>(codes.matrix(3, index_t{1} << 20, 4096)) ==
        origin + 2 * 3 * (std::uintptr_t{1} << 32));
  Mask mask{reinterpret_cast<const std::uint8_t*>(origin), index_t{1} << 32};
  CHECK(reinterpret_cast<std::uintptr_t>(mask.rows(2)) == origin + 2 * (std::uintptr_t{1} << 32));
}

TEST(a_broadcast_dimension_has_stride_zero) {
  float value = 0;
  Tensor<float> x{&value, 0, 0, 0};
  CHECK(x.matrix(5, 7) == &value);
}

TEST(no_mask_gives_no_rows) { CHECK(Mask{}.rows(3) == nullptr); }

LSHKIT_TEST_MAIN

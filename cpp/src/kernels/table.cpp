// The kernels of this object's instruction set, collected.
#include "kernels.hpp"

#define LSHKIT_STRING_(x) #x
#define LSHKIT_STRING(x) LSHKIT_STRING_(x)

namespace lshkit {
namespace LSHKIT_ISA {

Kernels table() {
  Kernels t{};
  t.name = LSHKIT_STRING(LSHKIT_ISA);
#define LSHKIT_KERNEL(result, name, ...) t.name = name;
#define LSHKIT_TYPED_KERNEL(result, name, ...) t.f32.name = name, t.f64.name = name;
#if defined(LSHKIT_ISA_AVX512)
#define LSHKIT_SHORT_KERNEL LSHKIT_KERNEL
#endif
#include "kernel_list.hpp"
  return t;
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

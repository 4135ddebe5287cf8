// The kernels of an instruction set that adds products of bfloat16 to another.
#include "kernels/kernels.hpp"

#define LSHKIT_STRING_(x) #x
#define LSHKIT_STRING(x) LSHKIT_STRING_(x)

namespace lshkit {
namespace LSHKIT_ISA {

Kernels table() {
  Kernels t = LSHKIT_EXTENDS::table();
  t.name = LSHKIT_STRING(LSHKIT_ISA);
#define LSHKIT_BFLOAT16_KERNEL(result, name, ...) t.name = name;
#if defined(LSHKIT_ISA_AVX512_BF16) && !defined(LSHKIT_ISA_AMX)
#define LSHKIT_BFLOAT16_VECTOR_KERNEL LSHKIT_BFLOAT16_KERNEL
#else
#define LSHKIT_TILE_KERNEL LSHKIT_BFLOAT16_KERNEL
#endif
#if defined(LSHKIT_ISA_AMX_TWIN)
#define LSHKIT_SHORT_KERNEL LSHKIT_BFLOAT16_KERNEL
#endif
#include "kernels/kernel_list.hpp"
  return t;
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

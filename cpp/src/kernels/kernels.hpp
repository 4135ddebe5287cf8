#pragma once
// The kernels of one instruction set (kernel_list.hpp), behind a table of function pointers. Each
// works on one head in one thread; threads, heads and scratch are the callers' (cpp/src/*.cpp).
#include "kernel_arguments.hpp"

namespace lshkit {

template <class T>
struct TypedKernels {
#define LSHKIT_TYPED_KERNEL(result, name, ...) result (*name)(__VA_ARGS__);
#include "kernel_list.hpp"
};

struct Kernels {
  const char* name;
#define LSHKIT_KERNEL(result, name, ...) result (*name)(__VA_ARGS__);
#define LSHKIT_SHORT_KERNEL LSHKIT_KERNEL
#define LSHKIT_BFLOAT16_KERNEL(result, name, ...) result (*name)(__VA_ARGS__);
#define LSHKIT_TILE_KERNEL LSHKIT_BFLOAT16_KERNEL
#define LSHKIT_BFLOAT16_VECTOR_KERNEL LSHKIT_BFLOAT16_KERNEL
#include "kernel_list.hpp"
  TypedKernels<float> f32;
  TypedKernels<double> f64;

  template <class T>
  const TypedKernels<T>& typed() const {
    if constexpr (sizeof(T) == sizeof(float))
      return f32;
    else
      return f64;
  }
};

// The table of the instruction set in use.
const Kernels& kernels();
namespace base {
Kernels table();
}
namespace avx2 {
Kernels table();
}
namespace avx512 {
Kernels table();
}
// These take all kernels of avx512, and amx_twin those of base, but for products of bfloat16 (and
// amx_twin for weighted sums of 16 bits).
namespace avx512_bf16 {
Kernels table();
}
namespace amx {
Kernels table();
}
namespace amx_twin {
Kernels table();
}

#ifdef LSHKIT_ISA
// What the kernel files of one instruction set define, and its table.cpp collects.
namespace LSHKIT_ISA {
#define LSHKIT_KERNEL(result, name, ...) result name(__VA_ARGS__);
#define LSHKIT_SHORT_KERNEL LSHKIT_KERNEL
#define LSHKIT_BFLOAT16_KERNEL(result, name, ...) result name(__VA_ARGS__);
#define LSHKIT_TILE_KERNEL LSHKIT_BFLOAT16_KERNEL
#define LSHKIT_BFLOAT16_VECTOR_KERNEL LSHKIT_BFLOAT16_KERNEL
#include "kernel_list.hpp"
#define T float
#define LSHKIT_TYPED_KERNEL(result, name, ...) result name(__VA_ARGS__);
#include "kernel_list.hpp"
#undef T
#define T double
#define LSHKIT_TYPED_KERNEL(result, name, ...) result name(__VA_ARGS__);
#include "kernel_list.hpp"
#undef T
}  // namespace LSHKIT_ISA
#endif

}  // namespace lshkit

#pragma once
// For functions of the core that CUDA kernels call too. They are static, since each instruction set
// has its own.
#ifdef __CUDACC__
#define LSHKIT_ANYWHERE static __host__ __device__ inline
#else
#define LSHKIT_ANYWHERE [[maybe_unused]] static inline
#endif

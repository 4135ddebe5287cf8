// The weighted sums in 16-bit tables, else of AVX-512 alone, in plain C++ for the twin of AMX.
#if defined(LSHKIT_ISA_AMX_TWIN)
#include "kernels/fast_weighted_sum.cpp"
#endif

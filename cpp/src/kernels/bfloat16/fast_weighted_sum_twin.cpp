// Weighted sums in tables of 16 bits, which are of AVX-512, for the twin of AMX in plain C++.
#if defined(LSHKIT_ISA_AMX_TWIN)
#include "kernels/fast_weighted_sum.cpp"
#endif

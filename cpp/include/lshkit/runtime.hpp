#pragma once
// What the machine offers: instruction set and threads.

namespace lshkit {

// "base", "avx2" or "avx512": the best that the CPU runs, or what the environment variable
// LSHKIT_ISA asks for when that is lower. Read once; std::runtime_error for an unknown word.
const char* instruction_set();
// OpenMP's own default, or 1 without OpenMP and in a forked child.
int max_threads();
bool has_openmp();

}  // namespace lshkit

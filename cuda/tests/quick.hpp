#pragma once
// What the kernels' tests share: how much of them a sanitized build has time for, and scratch.
#include <cmath>
#include <vector>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kQuick = true;  // every kernel and branch, at the least size that reaches it
#else
constexpr bool kQuick = false;
#endif

// call(null) returns the bytes that call(scratch) is given.
template <class Call>
void with_scratch(const Call& call) {
  std::vector<float> scratch(call(nullptr) / 4, std::nanf(""));
  call(scratch.data());
}

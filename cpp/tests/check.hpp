#pragma once
// All there is to the C++ tests: TEST(name) { CHECK(condition); } and LSHKIT_TEST_MAIN. A program
// runs its tests in order, those alone whose name contains its argument, and counts what failed.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*run)();
};
inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
inline int failures = 0;  // of the running test
struct Register {
  Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

inline int main(const char* filter) {
  int run = 0, failed = 0;
  for (const Test& test : tests()) {
    if (filter && !std::strstr(test.name, filter)) continue;
    failures = 0;
    try {
      test.run();
    } catch (const std::exception& error) {
      std::printf("  %s\n", error.what());
      ++failures;
    }
    std::printf("%s %s\n", failures ? "FAILED" : "ok    ", test.name);
    ++run;
    failed += failures != 0;
  }
  std::printf("%d run, %d failed\n", run, failed);
  return run > 0 && failed == 0 ? 0 : 1;
}

// |a - b| <= absolute + relative * |b|. Equal infinities and two NaN are close.
inline bool close(double a, double b, double relative, double absolute = 0) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return a == b || std::fabs(a - b) <= absolute + relative * std::fabs(b);
}

}  // namespace check

#define TEST(name)                                            \
  static void test_##name();                                  \
  static check::Register register_##name(#name, test_##name); \
  static void test_##name()
#define CHECK(...)                                                             \
  do {                                                                         \
    if (!(__VA_ARGS__)) {                                                      \
      std::printf("  %s:%d: %s is false\n", __FILE__, __LINE__, #__VA_ARGS__); \
      ++check::failures;                                                       \
    }                                                                          \
  } while (0)
#define CHECK_CLOSE(a, b, relative, absolute)                                                    \
  do {                                                                                           \
    const double a_ = double(a), b_ = double(b);                                                 \
    if (!check::close(a_, b_, relative, absolute)) {                                             \
      std::printf("  %s:%d: %s = %.9g, wanted %s = %.9g\n", __FILE__, __LINE__, #a, a_, #b, b_); \
      ++check::failures;                                                                         \
    }                                                                                            \
  } while (0)
#define LSHKIT_TEST_MAIN \
  int main(int argc, char** argv) { return check::main(argc > 1 ? argv[1] : nullptr); }

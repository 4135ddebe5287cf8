#ifndef _WIN32
#include <unistd.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "lshkit/runtime.hpp"

namespace lshkit {
namespace {

constexpr index_t kKilobyte = 1024;
constexpr CacheSizes kUnknown{512 * kKilobyte, 8192 * kKilobyte};

// "L2,L3" in KB. False for anything else.
bool parse(const char* text, CacheSizes& sizes) {
  long l2, l3;
  char rest;
  if (std::sscanf(text, "%ld,%ld%c", &l2, &l3, &rest) != 2) return false;
  if (l2 < 1 || l3 < l2 || l3 > (1 << 30)) return false;
  sizes = {l2 * kKilobyte, l3 * kKilobyte};
  return true;
}

// What Linux says of a cache of the first processor; 0 where it does not.
index_t of_linux(int level) {
  for (int i = 0; i < 8; ++i) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/";
    const auto number = [&](const char* name) {
      long x = 0;
      if (std::FILE* file = std::fopen((folder + name).c_str(), "r")) {
        if (std::fscanf(file, "%ld", &x) != 1) x = 0;
        std::fclose(file);
      }
      return x;
    };
    if (number("level") == level) return number("size") * kKilobyte;
  }
  return 0;
}

CacheSizes read() {
  CacheSizes sizes = kUnknown;
  const char* asked = std::getenv("LSHKIT_CACHE_SIZES");
  if (asked && *asked) {
    if (!parse(asked, sizes))
      throw std::runtime_error(
          std::string("LSHKIT_CACHE_SIZES must be the sizes of the L2 and the L3 cache in KB, such "
                      "as 1024,32768, was ") +
          asked);
    return sizes;
  }
  index_t l2 = of_linux(2), l3 = of_linux(3);
#ifdef _SC_LEVEL2_CACHE_SIZE
  if (l2 <= 0) l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
  if (l2 > 0) sizes = {l2, 4 * l2};  // no L3 cache: some CPUs have none
  if (l3 > sizes.l2) sizes.l3 = l3;
  return sizes;
}

}  // namespace

const CacheSizes& cache_sizes() {
  static const CacheSizes sizes = read();
  return sizes;
}

}  // namespace lshkit

#include "run_ptx.hpp"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>
#include <string>

namespace lshkit::ptx {
namespace {

struct Kernels {
  std::map<std::string, Kernel> all;
  std::set<std::string> used;
  bool launched = false;
  ~Kernels() {
    if (!launched) return;
    std::fprintf(stderr, "PTX: %zu of %zu kernels ran\n", used.size(), all.size());
    const bool all_wanted = std::getenv("LSHKIT_PTX_ALL");
    if (all_wanted)
      for (const auto& kernel : all)
        if (!used.count(kernel.first)) std::fprintf(stderr, "PTX: not %s\n", kernel.first.c_str());
    // Of none: then no function had a symbol, and their source ran instead.
    if (used.empty() || (all_wanted && used.size() < all.size())) std::_Exit(1);
  }
};
Kernels& kernels() {
  static Kernels kernels;
  return kernels;
}

}  // namespace

bool add_kernel(const char* name, Kernel kernel) {
  kernels().all[name] = kernel;
  return true;
}

Kernel translated(const void* function) {
  kernels().launched = true;
  Dl_info info;
  if (!dladdr(function, &info) || !info.dli_sname || info.dli_saddr != function) return nullptr;
  const char kOurs[] = "_ZN6lshkit4cuda";
  if (std::strncmp(info.dli_sname, kOurs, sizeof kOurs - 1) != 0) return nullptr;
  const auto found = kernels().all.find(info.dli_sname);
  if (found == kernels().all.end())
    throw std::runtime_error(std::string("PTX: no kernel ") + info.dli_sname);
  kernels().used.insert(found->first);
  return found->second;
}

}  // namespace lshkit::ptx

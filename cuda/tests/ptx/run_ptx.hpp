#pragma once
// Launches of the emulation, by the translated PTX of the kernel in the place of its source.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <tuple>

namespace lshkit::ptx {

constexpr std::uint32_t kSharedBase = 3072;  // the first byte's address: 1024 times an odd number

using Kernel = void (*)(const void* const* parameters);

// By its symbol's name, which is the same for nvcc and for the host's compiler.
bool add_kernel(const char* name, Kernel kernel);
// That of the function that the program has at this address, null for a test's own kernel.
Kernel translated(const void* function);

// For emulation::launch.
template <class... Parameters, class... Arguments>
auto calls_of(void (*kernel)(Parameters...), const Arguments&... arguments) {
  const Kernel run = translated(reinterpret_cast<const void*>(kernel));
  return [run, kernel, values = std::tuple<std::decay_t<Parameters>...>(arguments...)] {
    std::apply(
        [run, kernel](const auto&... each) {
          if (!run) return kernel(each...);
          const void* const parameters[] = {&each...};
          run(parameters);
        },
        values);
  };
}

}  // namespace lshkit::ptx

#include "instruction_sets.hpp"

#ifdef LSHKIT_X86
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <stdexcept>

#include "lshkit/runtime.hpp"

namespace lshkit {
namespace {

// The names of the features that are not there, as /proc/cpuinfo writes them.
struct Feature {
  const char* name;
  std::uint32_t in;
  int bit;
};
std::string missing(std::initializer_list<Feature> features) {
  std::string names;
  for (const Feature& f : features)
    if (!(f.in >> f.bit & 1)) names += (names.empty() ? "" : ", ") + std::string(f.name);
  return names.empty() ? names : "the CPU has no " + names;
}
// The first of several reasons.
std::string first(std::initializer_list<std::string> reasons) {
  for (const std::string& reason : reasons)
    if (!reason.empty()) return reason;
  return {};
}
// Bits of XCR0.
constexpr std::uint64_t kAvxState = 0x6, kTileState = 0x60000;
#ifdef __APPLE__  // sets the others when they are first used
constexpr std::uint64_t kAvx512State = kAvxState;
#else
constexpr std::uint64_t kAvx512State = 0xe6;
#endif
std::string unsaved(const Processor& p, std::uint64_t state, const char* registers) {
  return (p.saved_state & state) == state ? ""
                                          : std::string("the system does not save ") + registers;
}

#ifdef LSHKIT_X86
// Linux gives tiles, 8 KB of registers a thread, to the processes that ask for them.
std::string request_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return {};
  return std::string("the system gives this process no tiles: ") + std::strerror(errno);
#else
  return "only Linux is asked for tiles";
#endif
}
#endif

}  // namespace

Processor Processor::this_one(bool ask_for_tiles) {
  Processor p;
#ifdef LSHKIT_X86
  unsigned eax, ebx, ecx, edx;
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx))
    p.intel = ebx == signature_INTEL_ebx && ecx == signature_INTEL_ecx;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx)) p.leaf1_ecx = ecx;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
    p.leaf7_ebx = ebx;
    p.leaf7_edx = edx;
    if (eax >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) p.leaf7_1_eax = eax;
  }
  if (p.leaf1_ecx >> 27 & 1) {  // OSXSAVE
    std::uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    p.saved_state = std::uint64_t(high) << 32 | low;
  }
  const bool has_tiles = p.leaf7_edx >> 22 & p.leaf7_edx >> 24 & 1;
  if (ask_for_tiles && has_tiles && (p.saved_state & kTileState) == kTileState)
    p.tiles_refused = request_tiles();
#else
  (void)ask_for_tiles;
#endif
  return p;
}

std::vector<InstructionSet> instruction_sets(const Processor& p) {
  std::vector<InstructionSet> sets = {{"base", base::table, {}, false}};
#ifdef LSHKIT_X86
  const auto add = [&](const char* name, Kernels (*table)(),
                       std::initializer_list<std::string> reasons) {
    // What a set needs the next one needs too.
    sets.push_back({name, table, first({sets.back().missing, first(reasons)}), false});
  };
  add("avx2", avx2::table,
      {missing({{"fma", p.leaf1_ecx, 12},
                {"avx2", p.leaf7_ebx, 5},
                {"bmi1", p.leaf7_ebx, 3},
                {"bmi2", p.leaf7_ebx, 8}}),
       unsaved(p, kAvxState, "the registers of AVX")});
  add("avx512", avx512::table,
      {missing({{"avx512f", p.leaf7_ebx, 16},
                {"avx512bw", p.leaf7_ebx, 30},
                {"avx512cd", p.leaf7_ebx, 28},
                {"avx512dq", p.leaf7_ebx, 17},
                {"avx512vl", p.leaf7_ebx, 31}}),
       unsaved(p, kAvx512State, "the registers of AVX-512")});
  add("avx512_bf16", avx512_bf16::table, {missing({{"avx512_bf16", p.leaf7_1_eax, 5}})});
  sets.back().slow = p.intel;  // products at half the rate of float32's
  add("amx", amx::table,
      {missing({{"amx_tile", p.leaf7_edx, 24}, {"amx_bf16", p.leaf7_edx, 22}}),
       unsaved(p, kTileState, "tiles"), p.tiles_refused});
#else
  (void)p;
#endif
  sets.push_back({"amx_twin", amx_twin::table, {}, false});
  return sets;
}

const InstructionSet& choose(const std::vector<InstructionSet>& sets, const char* asked) {
  const std::size_t last = sets.size() - 1;
  if (!asked || !*asked) {
    std::size_t best = last - 1;
    while (sets[best].slow || !sets[best].missing.empty()) --best;  // base misses nothing
    return sets[best];
  }
  std::string names;
  for (std::size_t i = 0; i <= last; ++i) {
    if (!std::strcmp(sets[i].name, asked)) {
      if (sets[i].missing.empty()) return sets[i];
      throw std::runtime_error(std::string("LSHKIT_ISA=") + asked +
                               " does not run here: " + sets[i].missing);
    }
    names += (i == 0 ? "" : i == last ? " or " : ", ") + std::string(sets[i].name);
  }
  throw std::runtime_error("LSHKIT_ISA must be " + names + ", was " + asked);
}

const Kernels& kernels() {
  static const Kernels chosen = [] {
    const char* asked = std::getenv("LSHKIT_ISA");
    const bool tiles = !asked || !*asked || !std::strcmp(asked, "amx");
    return choose(instruction_sets(Processor::this_one(tiles)), asked).table();
  }();
  return chosen;
}

const char* instruction_set() { return kernels().name; }

}  // namespace lshkit

#pragma once
// The instruction sets that the kernels are compiled for, and which of them this machine runs.
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/kernels.hpp"

namespace lshkit {

// What x86 CPUs and the system tell about themselves.
struct Processor {
  std::uint32_t leaf1_ecx = 0, leaf7_ebx = 0, leaf7_edx = 0, leaf7_1_eax = 0;  // of CPUID
  std::uint64_t saved_state = 0;  // XCR0: the registers that the system keeps
  bool intel = false;
  std::string tiles_refused;  // why the system gives this process no tiles, empty: it does

  // ask_for_tiles: which this process then has, with larger signal stacks, until it ends.
  static Processor this_one(bool ask_for_tiles);
};

struct InstructionSet {
  const char* name;
  Kernels (*table)();
  std::string missing;  // what it needs and the machine does not have; empty: nothing
  bool slow = false;    // it runs, but the set before it is faster here
};

// Each better than the ones before, but for the last, the twin of AMX: slow, for tests.
std::vector<InstructionSet> instruction_sets(const Processor& processor);

// The best one that runs and is not slow, or the one that `asked` names. std::runtime_error if that
// does not run here, or there is no such one. Null or empty: none is asked for.
const InstructionSet& choose(const std::vector<InstructionSet>& sets, const char* asked);

}  // namespace lshkit

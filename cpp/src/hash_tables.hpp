#pragma once
// What building a table and reading it share.
#include "lshkit/hash_tables.hpp"

namespace lshkit {

// The bin of a code in a compact table of 2^bits bins (bits >= 1): the highest bits of a hash.
inline std::uint64_t compact_bin(std::uint64_t code, int bits) {
  code *= 0x9E3779B97F4A7C15u;
  code = (code ^ (code >> 32)) * 0xD6E8FEB86659FD93u;
  return code >> (64 - bits);
}

inline int bit_length(std::uint64_t number) { return number ? 64 - __builtin_clzll(number) : 0; }

// Calls with a value of the type that holds codes of so many bytes.
template <class Call>
void with_code_type(int bytes, const Call& call) {
  if (bytes == 1)
    call(std::uint8_t{});
  else if (bytes == 2)
    call(std::uint16_t{});
  else if (bytes == 4)
    call(std::uint32_t{});
  else
    call(std::uint64_t{});
}

}  // namespace lshkit

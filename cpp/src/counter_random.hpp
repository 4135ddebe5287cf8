#pragma once
// Random numbers by counter: a function of the seed, the stream and the position alone, so that
// results do not depend on which thread asks (reference.random_words).
#include <cstdint>

namespace lshkit {

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words.
inline std::uint64_t mix64(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

class RandomStream {
 public:
  RandomStream(std::uint64_t seed, std::uint64_t stream)
      : start_(mix64(mix64(seed) + (stream + 1) * kStep)) {}
  std::uint64_t word(std::uint64_t t) const { return mix64(start_ + (t + 1) * kStep); }

 private:
  static constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15u;
  std::uint64_t start_;
};

// Uniform from 0 to bound - 1; no number's probability is off by more than 2^-64.
inline std::uint64_t below(std::uint64_t word, std::uint64_t bound) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>((Wide(word) * bound) >> 64);
}
// Uniform in [0, 1), a multiple of 2^-53.
inline double unit_interval(std::uint64_t word) { return double(word >> 11) * 0x1p-53; }

}  // namespace lshkit

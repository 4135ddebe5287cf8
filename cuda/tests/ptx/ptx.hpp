#pragma once
// What instructions of PTX do that C++ has no operator for, of the PTX ISA 9.0, for one thread of
// the emulation. Addresses of shared memory begin at a number that is a multiple of 16 and of
// nothing more, as PTX promises for memory declared so; each access is checked against its end and
// for its alignment.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulation.hpp"
#include "run_ptx.hpp"

namespace lshkit::ptx {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using s8 = std::int8_t;
using s16 = std::int16_t;
using s32 = std::int32_t;
using s64 = std::int64_t;
using f32 = float;
using f64 = double;

inline u32 lane() { return threadIdx.x % 32; }

template <class To, class From>
To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From), "the bits of a register of another size");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// ---- memory ----

inline void check_alignment(u64 address, std::size_t bytes) {
  if (address % bytes != 0)
    throw std::runtime_error("PTX: " + std::to_string(bytes) + " bytes at an address that is not " +
                             "a multiple of that");
}
inline unsigned char* shared_place(u32 address, std::size_t bytes) {
  check_alignment(address, bytes);
  if (address < kSharedBase || address - kSharedBase + bytes > emulation::shared_bytes())
    throw std::runtime_error("PTX: " + std::to_string(bytes) + " bytes at " +
                             std::to_string(std::int64_t(address) - kSharedBase) + " of " +
                             std::to_string(emulation::shared_bytes()) + " of shared memory");
  return emulation::shared_memory() + (address - kSharedBase);
}

template <class T, int N>
struct Place {
  unsigned char* at;
  std::array<T, N> copy() const {
    std::array<T, N> x;
    std::memcpy(x.data(), at, sizeof x);
    return x;
  }
  void store(const std::array<T, N>& x) const { std::memcpy(at, x.data(), sizeof x); }
};
template <class T, int N>
Place<T, N> shared_at(u64 base, s64 offset) {
  return {shared_place(u32(base + offset), sizeof(T) * N)};
}
template <class T, int N>
Place<T, N> global_at(u64 base, s64 offset) {
  check_alignment(base + offset, sizeof(T) * N);
  return {reinterpret_cast<unsigned char*>(base + offset)};
}
template <class T, int N>
Place<T, N> param_at(u64 base, s64 offset) {
  return {reinterpret_cast<unsigned char*>(base + offset)};
}

// Copies that arrive when they are waited for, and not before: where one is read without, there is
// what the copy found, spoilt. One that nobody waits for arrives when the thread's next one begins.
struct Copy {
  u32 to;
  const unsigned char* from;
  u32 bytes_read;
};
// Groups of the current thread, the open one last.
inline std::vector<std::vector<Copy>>& copies() {
  static std::vector<std::vector<std::vector<Copy>>> all(2 * 1024);
  auto& mine = all[blockIdx.x % 2 * 1024 + threadIdx.x];
  if (mine.empty()) mine.emplace_back();
  return mine;
}
inline void copy_later(u64 to, u64 from, u32 bytes, u32 bytes_read) {
  if (bytes != 16 || bytes_read > 16) throw std::runtime_error("PTX: cp.async of another size");
  check_alignment(from, 16);
  std::memset(shared_place(u32(to), 16), 0xff, 16);
  copies().back().push_back({u32(to), reinterpret_cast<const unsigned char*>(from), bytes_read});
}
inline void commit_copies() { copies().emplace_back(); }
inline void wait_for_copies(std::size_t pending) {  // all but the newest of the closed groups
  auto& groups = copies();
  const std::size_t closed = groups.size() - 1;
  if (closed <= pending) return;
  const auto end = groups.begin() + std::ptrdiff_t(closed - pending);
  for (auto group = groups.begin(); group != end; ++group)
    for (const Copy& copy : *group) {
      unsigned char* const to = shared_place(copy.to, 16);
      std::memset(to, 0, 16);
      if (copy.bytes_read) std::memcpy(to, copy.from, copy.bytes_read);
    }
  groups.erase(groups.begin(), end);
}

// ---- integers ----

template <class T>
T shifted_left(T x, u32 by) {
  return by < 8 * sizeof(T) ? T(x << by) : T(0);
}
template <class T>
T shifted_right(T x, u32 by) {
  return by < 8 * sizeof(T) ? T(x >> by) : T(x < 0 ? -1 : 0);
}
inline u32 funnel_left(u32 low, u32 high, u32 by) {
  return u32((u64(high) << 32 | low) << (by & 31) >> 32);
}
inline u32 permuted(u32 a, u32 b, u32 selector) {
  const u64 both = u64(b) << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 nibble = selector >> 4 * i & 15;
    const u32 byte = both >> 8 * (nibble & 7) & 255;
    out |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return out;
}
template <class T>
T inserted(T field, T into, u32 position, u32 length) {
  const u32 width = 8 * sizeof(T);
  position &= 255, length &= 255;
  if (length == 0 || position >= width) return into;
  const T ones = length >= width ? T(-1) : T((T(1) << length) - 1), mask = T(ones << position);
  return T((into & ~mask) | (T(field << position) & mask));
}
inline u64 upper_half(u64 a, u64 b) { return u64((unsigned __int128)a * b >> 64); }
inline s64 upper_half(s64 a, s64 b) { return s64((__int128)a * b >> 64); }
inline u32 upper_half(u32 a, u32 b) { return u32(u64(a) * b >> 32); }
inline s32 upper_half(s32 a, s32 b) { return s32(s64(a) * b >> 32); }
template <class T>
T quotient(T a, T b) {
  if (b == 0) throw std::runtime_error("PTX: a division by zero, whose result is not specified");
  return b == T(-1) ? T(0 - a) : T(a / b);
}
template <class T>
T remainder(T a, T b) {
  if (b == 0) throw std::runtime_error("PTX: a remainder of zero, whose result is not specified");
  return b == T(-1) && T(-1) < T(0) ? T(0) : T(a % b);
}

// ---- floating point ----

template <class T>
T least_of(T a, T b) {  // of a NaN and a number the number
  if constexpr (std::is_floating_point_v<T>)
    return std::fmin(a, b);
  else
    return a < b ? a : b;
}
template <class T>
T largest_of(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return std::fmax(a, b);
  else
    return a > b ? a : b;
}
inline f32 downward(f64 x) {
  const f32 y = f32(x);
  return f64(y) > x ? std::nextafter(y, -INFINITY) : y;
}
inline f32 toward_zero(f64 x) {
  const f32 y = f32(x);
  return std::fabs(f64(y)) > std::fabs(x) ? std::nextafter(y, 0.0f) : y;
}
inline f32 saturated(f32 x) { return x > 0 ? std::min(x, 1.0f) : 0.0f; }  // NaN is 0

inline u16 bfloat16_bits(f32 x) {
  const u32 bits = bits_as<u32>(x);
  if (x != x) return 0x7fff;
  return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline f32 bfloat16_value(u16 x) { return bits_as<f32>(u32(x) << 16); }
inline f32 float16_value(u16 x) {
  const int exponent = x >> 10 & 31, fraction = x & 1023;
  const f32 sign = x & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(f32(fraction), -24);
  return sign * std::ldexp(f32(1024 + fraction), exponent - 25);
}
inline u16 float16_bits(f32 x) {
  const u16 sign = u16(bits_as<u32>(x) >> 16 & 0x8000);
  if (x != x) return 0x7fff;
  x = std::fabs(x);
  if (x >= 65520.0f) return u16(sign | 0x7c00);
  if (x < std::ldexp(1.0f, -14)) return u16(sign | u16(std::nearbyint(std::ldexp(x, 24))));
  int exponent;
  const f32 fraction = std::frexp(x, &exponent);                      // 0.5 to 1
  const u32 rounded = u32(std::nearbyint(std::ldexp(fraction, 11)));  // 1024 to 2048
  return u16(sign | (u32(exponent + 14) << 10) + rounded - 1024);
}

// ---- warps ----

inline void whole_warp(u32 lanes) {
  if (lanes != u32(-1)) throw std::runtime_error("PTX: only whole warps are emulated");
}
inline void whole_segment(u32 clamp) {
  if (clamp != 31) throw std::runtime_error("PTX: only shuffles of a whole warp are emulated");
}
inline u32 matching(u32 x) {
  u32 equal = 0;
  for (u32 other = 0; other < 32; ++other)
    equal |= u32(u32(emulation::exchange(x, other)) == x) << other;
  return equal;
}

// What every lane of the warp holds, for `use` to read.
template <int N, class Use>
auto with_warp(const std::array<u32, N>& mine, Use use) {
  static u32 words[1024][8];
  static_assert(N <= 8, "");
  std::copy(mine.begin(), mine.end(), words[threadIdx.x]);
  emulation::exchange(0, 0);
  auto result = use(&words[threadIdx.x / 32 * 32]);
  emulation::exchange(0, 0);
  return result;
}

using Four = std::array<u32, 4>;
using FourFloats = std::array<f32, 4>;

// "Warp-level matrix load instruction: ldmatrix": the addresses of the rows of matrix i are those
// of the lanes 8 i to 8 i + 7; lane l receives of row l / 4 the elements 2 (l % 4) and the next.
// Transposed, of column l / 4.
template <bool Transposed>
Four load_matrices(u64 address) {
  return with_warp<1>({u32(address)}, [](const u32(*words)[8]) {
    Four d;
    for (u32 i = 0; i < 4; ++i) {
      u16 pair[2];
      for (u32 k = 0; k < 2; ++k) {
        const u32 row = Transposed ? 2 * (lane() % 4) + k : lane() / 4;
        const u32 column = Transposed ? lane() / 4 : 2 * (lane() % 4) + k;
        const u32 row_address = words[8 * i + row][0];
        std::memcpy(&pair[k], shared_place(row_address, 16) + 2 * column, 2);
      }
      d[i] = u32(pair[1]) << 16 | pair[0];
    }
    return d;
  });
}

// "Matrix transpose instruction: movmatrix": lane l holds of row l / 4 the elements 2 (l % 4) and
// the next, before and after.
inline u32 transposed(u32 x) {
  return with_warp<1>({x}, [](const u32(*words)[8]) {
    u32 d = 0;
    for (u32 k = 0; k < 2; ++k) {
      const u32 row = 2 * (lane() % 4) + k, column = lane() / 4;  // of what was given
      const u32 word = words[4 * row + column / 2][0];
      d |= (word >> 16 * (column % 2) & 0xffff) << 16 * k;
    }
    return d;
  });
}

// "Matrix fragments for mma.m16n8k16 with floating point type", with groupID = lane / 4 and
// threadID_in_group = lane % 4:
//   element i of A, 0 to 7: row groupID for 0, 1, 4, 5, else groupID + 8;
//                           column 2 threadID_in_group + i % 2, from 4 on 8 more
//   element i of B, 0 to 3: row 2 threadID_in_group + i % 2, from 2 on 8 more; column groupID
//   element i of C, 0 to 3: row groupID for 0 and 1, else groupID + 8;
//                           column 2 threadID_in_group + i % 2
template <f32 (*Value)(u16)>
FourFloats product(const Four& a, const std::array<u32, 2>& b, const FourFloats& c) {
  return with_warp<6>({a[0], a[1], a[2], a[3], b[0], b[1]}, [&](const u32(*words)[8]) {
    f32 A[16][16], B[16][8];
    for (u32 l = 0; l < 32; ++l) {
      const u32 group = l / 4, thread = l % 4;
      for (u32 i = 0; i < 8; ++i) {
        const bool first = i == 0 || i == 1 || i == 4 || i == 5;
        A[first ? group : group + 8][2 * thread + i % 2 + (i >= 4 ? 8 : 0)] =
            Value(u16(words[l][i / 2] >> 16 * (i % 2)));
      }
      for (u32 i = 0; i < 4; ++i)
        B[2 * thread + i % 2 + (i >= 2 ? 8 : 0)][group] =
            Value(u16(words[l][4 + i / 2] >> 16 * (i % 2)));
    }
    FourFloats d;
    for (u32 i = 0; i < 4; ++i) {
      const u32 row = i < 2 ? lane() / 4 : lane() / 4 + 8, column = 2 * (lane() % 4) + i % 2;
      f64 sum = c[i];
      for (u32 k = 0; k < 16; ++k) sum += f64(A[row][k]) * B[k][column];
      d[i] = f32(sum);
    }
    return d;
  });
}

// "Asynchronous warpgroup level matrix instructions", of matrices in shared memory by the swizzle
// of 128 bytes. A descriptor has in bits 0 to 13 the address of the first row, 16 to 29 and 32 to
// 45 the leading and the stride byte offset, all by 16; in 62 and 63 the swizzle, 1 being this one.
// Eight rows of 128 bytes lie after one another, the next eight a stride offset on; where rows are
// what is summed over ("MN-major"), the next 64 columns are a leading offset on. In an address the
// bits 4 to 6 are exclusive or with bits 7 to 9.
inline u32 place_in_matrix(u64 descriptor, u32 outer, u32 k, bool turned) {
  if (descriptor >> 62 != 1 || descriptor >> 49 & 7)
    throw std::runtime_error("PTX: another matrix");
  const u32 first = u32(descriptor & 0x3fff) << 4, stride = u32(descriptor >> 32 & 0x3fff) << 4;
  const u32 leading = u32(descriptor >> 16 & 0x3fff) << 4;
  const u32 row = turned ? k : outer, column = turned ? outer : k;
  const u32 at = first + column / 64 * leading + row / 8 * stride + row % 8 * 128 + column % 64 * 2;
  return at ^ (at >> 7 & 7) << 4;
}
// Sums of m64n64k16: thread t of the four warps holds in elements 4 n + i of rows
// 16 (t / 32) + t % 32 / 4, for i of 2 and 3 eight below, the columns 8 n + 2 (t % 4) + i % 2.
using GroupSums = std::array<f32, 32>;
template <f32 (*Value)(u16)>
GroupSums group_product(u64 a, u64 b, bool add, bool turned_a, bool turned_b, const GroupSums& c) {
  if (blockDim.x % 128) throw std::runtime_error("PTX: a warpgroup that is not whole");
  const auto at = [](u64 descriptor, u32 outer, u32 k, bool turned) {
    u16 x;
    std::memcpy(&x, shared_place(place_in_matrix(descriptor, outer, k, turned), 2), 2);
    return f64(Value(x));
  };
  GroupSums d;
  for (u32 i = 0; i < 32; ++i) {
    const u32 row = threadIdx.x % 128 / 32 * 16 + lane() / 4 + i % 4 / 2 * 8;
    const u32 column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
    f64 sum = add ? c[i] : 0;
    for (u32 k = 0; k < 16; ++k) sum += at(a, row, k, turned_a) * at(b, column, k, turned_b);
    d[i] = f32(sum);
  }
  return d;
}

}  // namespace lshkit::ptx

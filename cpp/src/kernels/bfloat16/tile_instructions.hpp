#pragma once
// The instructions of AMX that the kernels use, and their twins in plain C++, as the Software
// Developer's Manual (volume 2) defines them: what faults there aborts here.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "kernels/simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

#if defined(LSHKIT_ISA_AMX)
// Not GCC's intrinsics, which do not say that they read and write memory.
LSHKIT_INLINE void ldtilecfg(const void* shapes) {
  __asm__ volatile("ldtilecfg (%0)" ::"r"(shapes) : "memory");
}
LSHKIT_INLINE void tilerelease() { __asm__ volatile("tilerelease"); }
template <int T>
LSHKIT_INLINE void tilezero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
LSHKIT_INLINE void tileloadd(const void* from, index_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
LSHKIT_INLINE void tilestored(void* to, index_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>  // C += A B
LSHKIT_INLINE void tdpbf16ps() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#else
// The tiles of a thread.
struct TileState {
  bool configured;
  int rows[8], row_bytes[8];
  std::uint8_t data[8][16][64];

  void check(int t) const {
    if (!configured || rows[t] == 0 || row_bytes[t] == 0) std::abort();
  }
};
thread_local TileState tiles;

inline void ldtilecfg(const void* shapes) {
  const auto* bytes = static_cast<const std::uint8_t*>(shapes);
  if (bytes[0] != 1) std::abort();  // the palette
  for (int i = 1; i < 64; ++i)      // reserved
    if ((i < 16 || (i >= 32 && i < 48) || i >= 56) && bytes[i] != 0) std::abort();
  for (int t = 0; t < 8; ++t) {
    tiles.row_bytes[t] = bytes[16 + 2 * t] + 256 * bytes[17 + 2 * t];
    tiles.rows[t] = bytes[48 + t];
    if (tiles.rows[t] > 16 || tiles.row_bytes[t] > 64) std::abort();
  }
  std::memset(tiles.data, 0, sizeof(tiles.data));
  tiles.configured = true;
}
inline void tilerelease() { tiles.configured = false; }
template <int T>
void tilezero() {
  tiles.check(T);
  std::memset(tiles.data[T], 0, sizeof(tiles.data[T]));
}
template <int T>
void tileloadd(const void* from, index_t stride) {
  tilezero<T>();
  for (int r = 0; r < tiles.rows[T]; ++r)
    std::memcpy(tiles.data[T][r], static_cast<const char*>(from) + r * stride, tiles.row_bytes[T]);
}
template <int T>
void tilestored(void* to, index_t stride) {
  tiles.check(T);
  for (int r = 0; r < tiles.rows[T]; ++r)
    std::memcpy(static_cast<char*>(to) + r * stride, tiles.data[T][r], tiles.row_bytes[T]);
}
// Subnormal numbers are zero, as operands (DAZ) and as results (FTZ).
LSHKIT_INLINE float flushed(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}
LSHKIT_INLINE float bfloat16_at(const std::uint8_t* p) {
  const std::uint32_t bits = std::uint32_t(p[0]) << 16 | std::uint32_t(p[1]) << 24;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return flushed(x);
}
// Products of even and of odd elements are summed apart, each product fused with its sum and
// rounded to nearest even; the two sums are added, and that is added to C. A product has 16 bits,
// so that double rounds it and a sum of 24 to the float that is nearest.
template <int C, int A, int B>
void tdpbf16ps() {
  TileState& t = tiles;
  for (const int tile : {A, B, C}) t.check(tile);
  if (t.rows[C] != t.rows[A] || t.row_bytes[C] != t.row_bytes[B] ||
      t.row_bytes[A] != 4 * t.rows[B] || A == B || A == C || B == C)
    std::abort();
  float b[16][2][16];
  for (int k = 0; k < 16; ++k)
    for (int i = 0; i < 2; ++i)
      for (int n = 0; n < 16; ++n) b[k][i][n] = bfloat16_at(&t.data[B][k][4 * n + 2 * i]);
  for (int m = 0; m < t.rows[C]; ++m) {
    float sum[2][16] = {}, total[16];
    for (int k = 0; k < t.rows[B]; ++k)
      for (int i = 0; i < 2; ++i) {
        const double a = bfloat16_at(&t.data[A][m][4 * k + 2 * i]);
        for (int n = 0; n < 16; ++n) sum[i][n] = flushed(float(a * b[k][i][n] + sum[i][n]));
      }
    std::memcpy(total, t.data[C][m], sizeof(total));
    for (int n = 0; n < 16; ++n)
      total[n] = flushed(flushed(total[n]) + flushed(sum[0][n] + sum[1][n]));
    std::memcpy(t.data[C][m], total, t.row_bytes[C]);
  }
}
#endif

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

#pragma once
// What making the probes of rows and the way back from their gradients share: the runs of hashes
// whose probes lie together, and registers of several rows' probes.
#if defined(LSHKIT_ISA_AVX512)
#include <immintrin.h>
#endif

#include "kernels.hpp"
#include "margins.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

typedef float Four __attribute__((vector_size(16)));

// ceil(log2 Probes)
template <int Probes>
constexpr int kSelected = Probes <= 1   ? 0
                          : Probes <= 2 ? 1
                          : Probes <= 4 ? 2
                          : Probes <= 8 ? 3
                                        : 4;
constexpr index_t kAhead = 48;  // rows to prefetch ahead
constexpr index_t kRun = 1024;  // margins whose exponentials are kept, a multiple of every register

// body(h, count, at, stride) for the hashes [first, first + count) of a run, as many at a time as
// lie together: the probes of row i and hash h are at + i * stride.
template <class Body>
LSHKIT_INLINE void each_part(const ProbeRows& p, index_t t, index_t first, index_t count,
                             const Body& body) {
  for (index_t h = first; h < first + count;) {
    const index_t begin = h / p.part * p.part, end = smaller(begin + p.part, p.group);
    const index_t here = smaller(first + count, end) - h;
    const index_t stride = p.part < p.group ? (end - begin) * t : p.probe_stride;
    body(h, here, begin * p.rows * t + (h - begin) * t, stride);
    h += here;
  }
}

#if defined(LSHKIT_ISA_AVX512)
// Quarter q of register r to quarter r of register q.
LSHKIT_INLINE void transpose_quarters(Vec<float> (&r)[4]) {
  const Vec<float> a = _mm512_shuffle_f32x4(r[0], r[1], 0x44);
  const Vec<float> b = _mm512_shuffle_f32x4(r[0], r[1], 0xee);
  const Vec<float> c = _mm512_shuffle_f32x4(r[2], r[3], 0x44);
  const Vec<float> d = _mm512_shuffle_f32x4(r[2], r[3], 0xee);
  r[0] = _mm512_shuffle_f32x4(a, c, 0x88);
  r[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
  r[2] = _mm512_shuffle_f32x4(b, d, 0x88);
  r[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
}

// Probes that are made, and reduced, of four rows and eight hashes at a time, a hash or two a part.
template <int Probes>
constexpr bool kFourRows = Probes == 3 || Probes == 4;
LSHKIT_INLINE bool hashes_fill_registers(const ProbeRows& p) {
  return p.part <= kHashesOfFour && p.group % (kLanes<float> / 2) == 0;
}

// Three or four probes of each of four pairs of row and hash, in four lanes of a register, one pair
// after the other in memory. Of three, the fourth lane is read as 0 and not written.
template <int Probes>
LSHKIT_INLINE Vec<float> load_rows_of(const float* p) {
  if constexpr (Probes == 4) return load(p);
  const __m512i from = _mm512_setr_epi32(0, 1, 2, 0, 3, 4, 5, 0, 6, 7, 8, 0, 9, 10, 11, 0);
  return _mm512_maskz_permutexvar_ps(0x7777, from, _mm512_maskz_loadu_ps(0xfff, p));
}
template <int Probes>
LSHKIT_INLINE void store_rows_of(float* p, Vec<float> v) {
  if constexpr (Probes == 4) return store(p, v);
  const __m512i from = _mm512_setr_epi32(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 0, 0, 0, 0);
  _mm512_mask_storeu_ps(p, 0xfff, _mm512_permutexvar_ps(from, v));
}
template <int Probes>
LSHKIT_INLINE void store_rows_of(std::uint16_t* p, __m256i v) {
  if constexpr (Probes == 4) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
  const __m256i from = _mm256_setr_epi16(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 0, 0, 0, 0);
  _mm256_mask_storeu_epi16(p, 0xfff, _mm256_permutexvar_epi16(from, v));
}
#endif

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

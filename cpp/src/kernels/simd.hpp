#pragma once
// Vectors of the instruction set that this object is compiled for, on GCC's and Clang's vector
// extension: the same kernel source serves all of them. Everything is in an unnamed namespace, so
// that no symbol of one instruction set can stand in for another's.
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "lshkit/tensor.hpp"

#define LSHKIT_NOINLINE __attribute__((noinline))
#ifndef LSHKIT_SANITIZED
#define LSHKIT_INLINE inline __attribute__((always_inline))
#define LSHKIT_ALWAYS_INLINE __attribute__((always_inline))  // of a lambda
#define LSHKIT_UNROLL _Pragma("GCC unroll 16")
#define LSHKIT_NO_UNROLL _Pragma("GCC unroll 1")
// Of a loop over hashes, which takes a register or some of a table row of each.
#if defined(LSHKIT_ISA_AVX512) || defined(LSHKIT_ISA_AVX2)
#define LSHKIT_UNROLL_HASHES _Pragma("GCC unroll 8")
#else
#define LSHKIT_UNROLL_HASHES _Pragma("GCC unroll 2")
#endif
#else  // each access is checked wherever it stands: copies of it only take time to compile
#define LSHKIT_INLINE inline
#define LSHKIT_ALWAYS_INLINE
#define LSHKIT_UNROLL
#define LSHKIT_NO_UNROLL
#define LSHKIT_UNROLL_HASHES
#endif

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

#if defined(LSHKIT_ISA_AVX512)
constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
#elif defined(LSHKIT_ISA_AVX2)
constexpr int kVectorBytes = 32;
constexpr int kRegisters = 16;
#else
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 16;
#endif

// Vec<T>: one register of T. Int<T>: the integers that comparisons of it give.
template <class T>
struct VecOf;
template <>
struct VecOf<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
  typedef float unaligned __attribute__((vector_size(kVectorBytes), aligned(4)));
  typedef std::int32_t ints __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VecOf<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
  typedef double unaligned __attribute__((vector_size(kVectorBytes), aligned(8)));
  typedef std::int64_t ints __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VecOf<std::int32_t> {
  typedef std::int32_t type __attribute__((vector_size(kVectorBytes)));
  typedef std::int32_t unaligned __attribute__((vector_size(kVectorBytes), aligned(4)));
  typedef std::int32_t ints __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VecOf<std::int16_t> {
  typedef std::int16_t type __attribute__((vector_size(kVectorBytes)));
  typedef std::int16_t unaligned __attribute__((vector_size(kVectorBytes), aligned(2)));
  typedef std::int16_t ints __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VecOf<std::uint32_t> {
  typedef std::uint32_t type __attribute__((vector_size(kVectorBytes)));
  typedef std::uint32_t unaligned __attribute__((vector_size(kVectorBytes), aligned(4)));
  typedef std::int32_t ints __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vec = typename VecOf<T>::type;
template <class T>
using Int = typename VecOf<T>::ints;
template <class T>
constexpr int kLanes = kVectorBytes / int(sizeof(T));

template <class T>
LSHKIT_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename VecOf<T>::unaligned*>(p);
}
template <class T>
LSHKIT_INLINE void store(T* p, Vec<T> v) {
  *reinterpret_cast<typename VecOf<T>::unaligned*>(p) = v;
}
template <class T>
LSHKIT_INLINE Vec<T> broadcast(T x) {
  return x - Vec<T>{};  // x - 0 keeps the sign of zero, 0 + x would not
}
// The first `count` lanes (0 to all) from memory, zero in the others: never reads past them.
template <class T>
LSHKIT_INLINE Vec<T> load_first(const T* p, int count) {
  if (count >= kLanes<T>) return load(p);
  T lanes[kLanes<T>] = {};
  if (count > 0) std::memcpy(lanes, p, sizeof(T) * count);
  return load(lanes);
}
template <class T>
LSHKIT_INLINE void store_first(T* p, Vec<T> v, int count) {
  if (count >= kLanes<T>) return store(p, v);
  T lanes[kLanes<T>];
  store(lanes, v);
  if (count > 0) std::memcpy(p, lanes, sizeof(T) * count);
}
// The same value, which the compiler does not see through: a product that is rounded before it is
// added to, in every function alike. Otherwise it would become a fused multiply-add in some.
template <class V>
LSHKIT_INLINE V rounded(V v) {
#if defined(LSHKIT_ISA_AVX512)
  __asm__("" : "+v"(v));
#elif defined(__x86_64__)
  __asm__("" : "+x"(v));
#elif defined(__aarch64__)
  __asm__("" : "+w"(v));
#else
  __asm__("" : "+m"(v));
#endif
  return v;
}
// ---- Shuffles with patterns computed at compile time ----
template <int Step, class V, std::size_t... I>
LSHKIT_INLINE V exchange_low(V a, V b, std::index_sequence<I...>) {
  constexpr int n = sizeof...(I);
  return __builtin_shufflevector(a, b, ((int(I) & Step) ? n + int(I) - Step : int(I))...);
}
template <int Step, class V, std::size_t... I>
LSHKIT_INLINE V exchange_high(V a, V b, std::index_sequence<I...>) {
  constexpr int n = sizeof...(I);
  return __builtin_shufflevector(a, b, ((int(I) & Step) ? n + int(I) : int(I) + Step)...);
}

template <class V, std::size_t... I>
LSHKIT_INLINE void interleave(V a, V b, V& first, V& second, std::index_sequence<I...>) {
  constexpr int n = sizeof...(I);
  first = __builtin_shufflevector(a, b, (int(I) / 2 + (I % 2 ? n : 0))...);
  second = __builtin_shufflevector(a, b, (n / 2 + int(I) / 2 + (I % 2 ? n : 0))...);
}
// The lanes of a and b in turn.
LSHKIT_INLINE void interleave(Vec<float> a, Vec<float> b, Vec<float>& first, Vec<float>& second) {
  interleave(a, b, first, second, std::make_index_sequence<kLanes<float>>{});
}

// Lanes of a, those with Step in their numbers of b; and of each the lane Step away.
template <int Step, class V, std::size_t... I>
LSHKIT_INLINE V blend(V a, V b, std::index_sequence<I...>) {
  constexpr int n = sizeof...(I);
  return __builtin_shufflevector(a, b, ((int(I) & Step) ? n + int(I) : int(I))...);
}
template <int Step, class V, std::size_t... I>
LSHKIT_INLINE V blend_others(V a, V b, std::index_sequence<I...>) {
  constexpr int n = sizeof...(I);
  return __builtin_shufflevector(a, b, ((int(I) & Step) ? n + int(I) - Step : int(I) + Step)...);
}

// Lane i is the sum of the lanes of r[i]: a blend and a shuffle of two registers for each pair. Of
// fewer than kLanes, r[i] is in parts in each lane of i modulo Count. First: each r[i] is such a
// result of that many.
template <int Count, class T, int First = 1>
LSHKIT_INLINE Vec<T> sum_each(const Vec<T>* r) {
  if constexpr (Count == 1) {
    return r[0];
  } else {
    constexpr int half = Count / 2, step = half * First;
    constexpr auto lanes = std::make_index_sequence<kLanes<T>>{};
    const Vec<T> a = sum_each<half, T, First>(r), b = sum_each<half, T, First>(r + half);
    return blend<step>(a, b, lanes) + blend_others<step>(a, b, lanes);
  }
}
template <int Step, class T>
LSHKIT_INLINE void transpose_step(Vec<T>* r) {
  constexpr int n = kLanes<T>;
  LSHKIT_UNROLL
  for (int i = 0; i < n; ++i)
    if (!(i & Step)) {
      const Vec<T> a = r[i], b = r[i + Step];
      r[i] = exchange_low<Step>(a, b, std::make_index_sequence<n>{});
      r[i + Step] = exchange_high<Step>(a, b, std::make_index_sequence<n>{});
    }
}
// Transposes the square block r[row][lane] by exchanging off-diagonal halves at every scale.
template <class T>
LSHKIT_INLINE void transpose(Vec<T>* r) {
  constexpr int n = kLanes<T>;
  if constexpr (n > 8) transpose_step<8, T>(r);
  if constexpr (n > 4) transpose_step<4, T>(r);
  if constexpr (n > 2) transpose_step<2, T>(r);
  if constexpr (n > 1) transpose_step<1, T>(r);
}

typedef float Vec4 __attribute__((vector_size(16)));
template <int From, class V>
LSHKIT_INLINE Vec4 quarter(V v) {
  return __builtin_shufflevector(v, v, From, From + 1, From + 2, From + 3);
}
template <int Lanes, class V>
LSHKIT_INLINE Vec4 fold(V v) {
  if constexpr (Lanes == 16)
    return (quarter<0>(v) + quarter<4>(v)) + (quarter<8>(v) + quarter<12>(v));
  else if constexpr (Lanes == 8)
    return quarter<0>(v) + quarter<4>(v);
  else
    return v;
}
LSHKIT_INLINE float sum_lanes(Vec<float> v) {
  const Vec4 s = fold<kLanes<float>>(v);
  return (s[0] + s[1]) + (s[2] + s[3]);
}
LSHKIT_INLINE double sum_lanes(Vec<double> v) {
  double sum = v[0];
  for (int i = 1; i < kLanes<double>; ++i) sum += v[i];
  return sum;
}
// The lane sums of four vectors.
LSHKIT_INLINE Vec4 sum_lanes4(Vec<float> a, Vec<float> b, Vec<float> c, Vec<float> d) {
  constexpr auto seq = std::make_index_sequence<kLanes<float>>{};
  const Vec<float> ab = exchange_low<1>(a, b, seq) + exchange_high<1>(a, b, seq);
  const Vec<float> cd = exchange_low<1>(c, d, seq) + exchange_high<1>(c, d, seq);
  return fold<kLanes<float>>(exchange_low<2>(ab, cd, seq) + exchange_high<2>(ab, cd, seq));
}

LSHKIT_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
LSHKIT_INLINE void prefetch_row(const void* p, index_t bytes) {
  for (index_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i, 0, 2);
}
LSHKIT_INLINE index_t round_up(index_t n, index_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}
LSHKIT_INLINE index_t smaller(index_t a, index_t b) { return a < b ? a : b; }
LSHKIT_INLINE index_t larger(index_t a, index_t b) { return a > b ? a : b; }

// call(constant): n where it is among First and Rest, else 0, which its type tells.
template <int First, int... Rest, class Call>
LSHKIT_INLINE auto with_constant(index_t n, const Call& call) {
  if (n == First) return call(std::integral_constant<int, First>{});
  if constexpr (sizeof...(Rest) > 0)
    return with_constant<Rest...>(n, call);
  else
    return call(std::integral_constant<int, 0>{});
}

// Cuts the caller's scratch into aligned pieces. With no memory behind it, it only counts.
struct Cut {
  void* memory;
  index_t used = 0;  // bytes

  template <class T>
  LSHKIT_INLINE T* take(index_t count) {
    void* p = memory ? static_cast<char*>(memory) + used : nullptr;
    used += round_up(count * index_t(sizeof(T)), 64);
    return static_cast<T*>(p);
  }
};

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

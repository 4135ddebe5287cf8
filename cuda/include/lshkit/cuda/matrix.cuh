#pragma once
// Products of small matrices of 16-bit floats by a warp on the tensor cores, sums in fp32, and the
// moves that feed them. Everything here is for all lanes of a warp together, at one place.
//
// A tile is 16 rows of 64 numbers, 128 bytes a row, in shared memory at a multiple of 16 bytes. The
// eighth of a row, 16 bytes, that is numbered c lies at place c ^ (row & 7), so that the same
// eighth of eight rows lies in all 32 banks.
//
// Fragments as the PTX ISA has them, g = lane / 4 and t = lane % 4, two numbers a register:
//   A (16 x 16): rows g, g + 8, g, g + 8; columns 2 t, 2 t + 1, from the third register on 8 more
//   B (16 x 8):  rows 2 t, 2 t + 1, in the second register 8 more; column g
//   C (16 x 8):  row g, columns 2 t and 2 t + 1, then row g + 8
#include "lshkit/cuda/words.cuh"

#ifdef __CUDACC__
#define LSHKIT_KEEP_LOOP _Pragma("unroll 1")  // no copies of its body, which holds many registers
#else
#define LSHKIT_KEEP_LOOP
#endif

namespace lshkit::cuda {

constexpr int kTileRows = 16, kTileColumns = 64, kTileBytes = 2 * kTileRows * kTileColumns;
constexpr int kPieces = 8;  // of a row, 16 bytes each

struct alignas(16) Words4 {
  std::uint32_t w[4];
};

#ifdef __CUDACC__
using SharedAddress = std::uint32_t;
__device__ inline SharedAddress shared_address(void* p) {
  return SharedAddress(__cvta_generic_to_shared(p));
}
#else
using SharedAddress = unsigned char*;
inline SharedAddress shared_address(void* p) { return static_cast<SharedAddress>(p); }

namespace emulated {
// Moves of as many bytes as their address must be a multiple of.
template <class T>
inline void store(void* to, const T& x) {
  std::memcpy(const_cast<void*>(emulation::aligned(to, sizeof x)), &x, sizeof x);
}
template <class T>
inline T load(const void* from) {
  T x;
  std::memcpy(&x, emulation::aligned(from, sizeof x), sizeof x);
  return x;
}
// Copies that have not been waited for: what they write is not there before.
struct Copies {
  static constexpr int kMost = 256;
  struct {
    unsigned char* to;
    const unsigned char* from;  // null: zeros
    int group;
  } copy[kMost];
  int count = 0, group = 0;
};
inline Copies copies[2][1024];
inline Copies& own_copies() { return copies[blockIdx.x % 2][threadIdx.x]; }
}  // namespace emulated
#endif

// Where this lane takes part in moving tiles. All offsets are of a tile's first byte.
struct TileLane {
  int row, piece;  // of the four rows of a move of 16 bytes a lane, and of each row's pieces
  int fragment;    // of the row that it names to load_fragment
  int sum;         // of its two numbers of C, as 16-bit floats

  __device__ TileLane() {
    const int lane = lane_index(), at = lane % 8 + lane / 8 % 2 * 8;
    row = lane / 8;
    piece = lane % 8;
    fragment = at * 128 + ((lane / 16) ^ (at & 7)) * 16;
    sum = lane / 4 * 128 + (lane / 4) * 16 + lane % 4 * 4;
  }
  // Row 4 `step` + row of a tile.
  __device__ int move(int step) const {
    const int r = 4 * step + row;
    return r * 128 + (piece ^ (r & 7)) * 16;
  }
};

// The 16 x 16 numbers of columns [16 block, 16 block + 16) of a tile as four 8 x 8 matrices: rows
// 0-7 and 8-15 of its left half, then of its right half.
// Not transposed: A with its rows, or B's transpose: registers 0 and 2 are rows 0-7, 1 and 3 the
// others. Transposed: B with its rows: registers 0 and 1 are the left half, 2 and 3 the right one;
// or A's transpose, where registers 1 and 2 change places.
template <bool Transposed>
__device__ inline void load_fragment(std::uint32_t (&r)[4], SharedAddress tile,
                                     const TileLane& lane, int block) {
  const SharedAddress row = tile + (lane.fragment ^ (block * 32));
#ifdef __CUDACC__
  if (Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
#else
  emulation::Given all[kWarp];
  std::uint32_t mine[2];
  emulation::aligned(row, 16);
  std::memcpy(mine, &row, sizeof row);
  emulation::give_all(mine, 2, all);
  const int g = lane_index() / 4, t = lane_index() % 4;
  for (int m = 0; m < 4; ++m) {
    std::uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      const int r_of = Transposed ? 2 * t + i : g, c_of = Transposed ? g : 2 * t + i;
      const unsigned char* from;
      std::memcpy(&from, all[8 * m + r_of].words, sizeof from);
      std::memcpy(&pair[i], from + 2 * c_of, 2);
    }
    r[m] = pair[0] | std::uint32_t(pair[1]) << 16;
  }
#endif
}

// An 8 x 8 matrix of which a lane has row g, columns 2 t and 2 t + 1: the transpose's.
__device__ inline std::uint32_t transpose(std::uint32_t x) {
#ifdef __CUDACC__
  std::uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
#else
  emulation::Given all[kWarp];
  emulation::give_all(&x, 1, all);
  const int g = lane_index() / 4, t = lane_index() % 4;
  std::uint32_t y = 0;
  for (int i = 0; i < 2; ++i)
    y |= (all[(2 * t + i) * 4 + g / 2].words[0] >> (16 * (g % 2)) & 0xffff) << (16 * i);
  return y;
#endif
}

// c += a b
template <Element E>
__device__ inline void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                std::uint32_t b1) {
  static_assert(E == Element::bfloat16 || E == Element::float16, "16 bits");
#ifdef __CUDACC__
  if (E == Element::bfloat16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  emulation::Given all[kWarp];
  const std::uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  emulation::give_all(mine, 6, all);
  const auto number = [&](int lane, int word, int half) {
    const auto bits = std::uint16_t(all[lane].words[word] >> (16 * half));
    return E == Element::bfloat16 ? from_bfloat16(bits) : from_float16(bits);
  };
  const int g = lane_index() / 4, t = lane_index() % 4;
  for (int i = 0; i < 4; ++i) {
    const int column = 2 * t + i % 2;
    for (int k = 0; k < 16; ++k) {
      const float x = number(g * 4 + k % 8 / 2, i / 2 + k / 8 * 2, k % 2);
      const float y = number(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
      c[i] += x * y;
    }
  }
#endif
}

// ---- Products of the four warps of a block together, of tiles where they lie (sm_90a) ----
//
// Four tiles after one another, at a multiple of 1024, are 64 x 64 numbers whose 16-byte pieces lie
// as wgmma's swizzle of 128 bytes has them. Sums are those of C, eight times 8 columns, of the 16
// rows that are the warp's.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define LSHKIT_WARP_GROUP 1
constexpr bool kWarpGroup = true;
#else
constexpr bool kWarpGroup = false;
#endif

// Before products: what this thread wrote to shared memory, or had copied, is for them to read
// after the block's next barrier.
__device__ inline void publish_to_products() {
#ifdef LSHKIT_WARP_GROUP
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// To the compiler sums are registers as others: it must not move their uses across the fence or the
// wait, of which it knows nothing.
__device__ inline void hold_sums([[maybe_unused]] float (&d)[8][4]) {
#ifdef LSHKIT_WARP_GROUP
  LSHKIT_UNROLL
  for (int n = 0; n < 8; ++n)
    asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
#endif
}
// Around the products of two sums, which are there after the end.
__device__ inline void begin_products(float (&a)[8][4], float (&b)[8][4]) {
  hold_sums(a);
  hold_sums(b);
#ifdef LSHKIT_WARP_GROUP
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ inline void end_products(float (&a)[8][4], float (&b)[8][4]) {
#ifdef LSHKIT_WARP_GROUP
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
  hold_sums(a);
  hold_sums(b);
}
#ifdef LSHKIT_WARP_GROUP
// Groups of eight rows are 1024 bytes apart.
__device__ inline std::uint64_t group_matrix(SharedAddress tiles) {
  return std::uint64_t(1) << 62 | std::uint64_t(1024 / 16) << 32 | std::uint64_t(1) << 16 |
         (tiles & 0x3ffff) >> 4;
}
// d = or += a b, 64 x 16 by 16 x 64. Turned: of both, rows are what is summed over; else columns.
template <Element E, bool Turned>
__device__ inline void multiply_group(float (&d)[8][4], std::uint64_t a, std::uint64_t b,
                                      bool add) {
#define LSHKIT_SUMS(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define LSHKIT_PRODUCT(type)                                                                     \
  asm volatile(                                                                                  \
      "{ .reg .pred %%add; setp.ne.b32 %%add, %34, 0; "                                          \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "       \
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, %%add, " \
      "1, 1, %35, %35; }"                                                                        \
      : LSHKIT_SUMS(0), LSHKIT_SUMS(1), LSHKIT_SUMS(2), LSHKIT_SUMS(3), LSHKIT_SUMS(4),          \
        LSHKIT_SUMS(5), LSHKIT_SUMS(6), LSHKIT_SUMS(7)                                           \
      : "l"(a), "l"(b), "r"(int(add)), "n"(int(Turned)))
  if constexpr (E == Element::bfloat16)
    LSHKIT_PRODUCT("bf16");
  else
    LSHKIT_PRODUCT("f16");
#undef LSHKIT_PRODUCT
#undef LSHKIT_SUMS
}
#endif

// Two numbers, rounded; the first in the lower half.
template <Element E>
__device__ inline std::uint32_t pack(float low, float high) {
#ifdef __CUDACC__
  std::uint32_t r;
  if (E == Element::bfloat16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#else
  return E == Element::bfloat16 ? to_bfloat16(low) | std::uint32_t(to_bfloat16(high)) << 16
                                : to_float16(low) | std::uint32_t(to_float16(high)) << 16;
#endif
}

// Starts to copy 16 bytes from device to shared memory, past the L1 cache; zeros instead where not
// `inside`, of an address that need only be valid. They are there for the lane itself once it has
// waited, for its warp after a __syncwarp besides.
__device__ inline void copy_async(SharedAddress to, const void* from, bool inside) {
#ifdef __CUDACC__
  const int bytes = inside ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
#else
  emulated::Copies& own = emulated::own_copies();
  emulation::aligned(to, 16);
  emulation::aligned(from, 16);
  if (own.count == emulated::Copies::kMost) throw std::logic_error("too many copies at a time");
  std::memset(to, 0xff, 16);
  own.copy[own.count++] = {to, inside ? static_cast<const unsigned char*>(from) : nullptr,
                           own.group};
#endif
}
// Ends a group of copies, empty or not.
__device__ inline void end_copies() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  ++emulated::own_copies().group;
#endif
}
// Waits for all groups but the latest `Pending`.
template <int Pending>
__device__ inline void wait_for_copies() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#else
  emulated::Copies& own = emulated::own_copies();
  int kept = 0;
  for (int i = 0; i < own.count; ++i) {
    const auto& c = own.copy[i];
    if (c.group >= own.group - Pending) {
      own.copy[kept++] = c;
      continue;
    }
    if (c.from)
      std::memcpy(c.to, c.from, 16);
    else
      std::memset(c.to, 0, 16);
  }
  own.count = kept;
#endif
}

// Of shared memory, by a lane for itself.
__device__ inline void store_shared(SharedAddress to, std::uint32_t x) {
#ifdef __CUDACC__
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
#else
  emulated::store(to, x);
#endif
}
__device__ inline void store_shared(SharedAddress to, float x, float y) {
#ifdef __CUDACC__
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
#else
  emulated::store(to, Two{x, y});
#endif
}
__device__ inline Words4 load_shared(SharedAddress from) {
#ifdef __CUDACC__
  Words4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
               : "r"(from)
               : "memory");
  return x;
#else
  return emulated::load<Words4>(from);
#endif
}
// To device memory, 16 bytes at a multiple of 16, that will be read once: first to leave the cache.
__device__ inline void store_streaming(void* to, const Words4& x) {
#ifdef __CUDACC__
  __stcs(static_cast<uint4*>(to), make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]));
#else
  emulated::store(to, x);
#endif
}
// Stays in the cache as other stores do.
__device__ inline void store_four(void* to, const Words4& x) {
#ifdef __CUDACC__
  *static_cast<uint4*>(to) = make_uint4(x.w[0], x.w[1], x.w[2], x.w[3]);
#else
  emulated::store(to, x);
#endif
}
__device__ inline Words4 load_streaming(const void* from) {
#ifdef __CUDACC__
  const uint4 x = __ldcs(static_cast<const uint4*>(from));
  return {{x.x, x.y, x.z, x.w}};
#else
  return emulated::load<Words4>(from);
#endif
}

// As many blocks of a kernel on a multiprocessor as its shared memory has room for, and the L1
// cache gets the rest.
template <class... Parameters>
void prefer_shared_memory([[maybe_unused]] void (*kernel)(Parameters...)) {
#ifdef __CUDACC__
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             int(cudaSharedmemCarveoutMaxShared)),
        "cudaFuncSetAttribute");
#endif
}

}  // namespace lshkit::cuda

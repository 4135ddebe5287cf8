#pragma once
// What the sums of codes of one byte share: how tables lie in shared memory, and the threads that
// bring chunks of codes and values there.
#include <type_traits>

#include "lshkit/cuda/bucket_sum.cuh"
#include "lshkit/cuda/words.cuh"

namespace lshkit::cuda {

// Of a code, byte k of `word`, in the tables: byte 1 of an address whose others are of `low`.
__device__ inline std::uint32_t cell_of(std::uint32_t word, std::uint32_t low, int k) {
  return select_bytes(word, low, 0x7604u | std::uint32_t(k) << 4);
}

constexpr int kByteThreads = 256, kMostSumWarps = 3;
constexpr int kByteKeys = 4;            // of a warp in flight
constexpr int kTableBytes = 256 * 256;  // whatever n_buckets is: a code is in place in an address

// Of a pair of columns of a chunk, against conflicts.
__host__ __device__ constexpr int byte_value_step(int chunk) {
  return chunk + (26 - chunk % 16) % 16;  // 10 of 16
}

// Warps that add, each two columns of 32 hashes or four of 16; 0: not even one has room.
struct ByteSumPlan {
  int hashes = 32, warps = 0, columns = 0;
  index_t shared_bytes = 0;
};
inline ByteSumPlan plan_byte_sum(const BucketSum<float>& a, index_t shared_limit,
                                 index_t (*shared_bytes)(int hashes, int warps)) {
  ByteSumPlan p;
  if (a.code_bytes != 1 || a.n_buckets > 256) return p;
  p.hashes = a.n_hashes <= 16 ? 16 : 32;
  const int columns = 2 * kWarp / p.hashes;
  p.warps = int(least(kMostSumWarps, ceil_div(a.columns(), columns)));
  while (p.warps > 0 && shared_bytes(p.hashes, p.warps) > shared_limit) --p.warps;
  p.columns = p.warps * columns;
  p.shared_bytes = shared_bytes(p.hashes, p.warps);
  return p;
}

// call(hashes, warps): those of a plan that has warps, as constants.
template <class Call>
void with_layout(const ByteSumPlan& p, const Call& call) {
  const auto with_warps = [&](auto hashes) {
    if (p.warps == 3) return call(hashes, std::integral_constant<int, 3>{});
    if (p.warps == 2) return call(hashes, std::integral_constant<int, 2>{});
    call(hashes, std::integral_constant<int, 1>{});
  };
  if (p.hashes == 32) return with_warps(std::integral_constant<int, 32>{});
  with_warps(std::integral_constant<int, 16>{});
}

// Two columns of the sum of query i, out = ((0 + hashes 0 to 31) + hashes 32 ...) * scale, each by
// the same thread.
__device__ inline void store_sums(const BucketSum<float>& a, const Span& query, index_t i,
                                  index_t column, Two two, bool first, bool last) {
  float* const out = a.out + (query.owned + i) * a.columns() + column;
  const bool both = column + 1 < a.columns();
  if (!first) {
    two.x += out[0];
    if (both) two.y += out[1];
  }
  if (last) two = {two.x * a.scale, two.y * a.scale};
  if (both && a.columns() % 2 == 0 && is_aligned(a.out, 8)) {
    store_two(out, two);
  } else {
    out[0] = two.x;
    if (both) out[1] = two.y;
  }
}

// Four codes, of which those from n_buckets on become `none`.
__device__ inline std::uint32_t codes_in_range(std::uint32_t word, std::uint32_t n_buckets,
                                               std::uint32_t none) {
  std::uint32_t out = 0;
  LSHKIT_UNROLL
  for (int shift = 0; shift < 32; shift += 8) {
    const std::uint32_t code = word >> shift & 0xff;
    out |= (code < n_buckets ? code : none) << shift;
  }
  return out;
}

// The codes of four hashes of a row of bytes, zero beyond `hashes`.
__device__ inline std::uint32_t gather_code_word(const std::uint8_t* row, int hash, int hashes) {
  std::uint32_t word = 0;
  LSHKIT_UNROLL
  for (int k = 0; k < 4; ++k)
    if (hash + k < hashes) word |= std::uint32_t(row[hash + k]) << 8 * k;
  return word;
}

// The next chunk, by `Stagers` threads: every load before the first of them is waited for.
template <int Hashes, int Warps, int Chunk>
struct ByteStage {
  static constexpr int kStagers = kByteThreads - kWarp * Warps;
  static constexpr int kPairs = Warps * kWarp / Hashes;  // of columns
  static constexpr int kWords = Chunk / 4 * Hashes / 4, kValues = Chunk * kPairs;
  static constexpr int kValueStep = byte_value_step(Chunk);
  static constexpr int kWordsOfChunk = 4 * kWords, kValuesOfChunk = kValueStep * kPairs;

  const BucketSum<float>& a;
  const Span& key;
  index_t first_hash, first_column;
  int hashes;

  // Of the rows from `first` of a side, words (quads, Hashes): the codes of four rows. Those of no
  // bucket become `none`, where it is not negative.
  __device__ void codes(const void* of_side, const Span& side, index_t first, int thread,
                        std::uint32_t* to, int none = -1) const {
    constexpr int kEach = (kWords + kStagers - 1) / kStagers;
    const std::uint8_t* const codes =
        static_cast<const std::uint8_t*>(of_side) + (side.flat + first) * a.n_hashes + first_hash;
    const bool aligned = a.n_hashes % 4 == 0 && is_aligned(of_side, 4);
    const int count = int(least(Chunk, side.count - first));
    std::uint32_t word[kEach][4];
    LSHKIT_UNROLL
    for (int n = 0; n < kEach; ++n) {
      const int item = n * kStagers + thread;
      const int t = item / (Hashes / 4) * 4, hash = item % (Hashes / 4) * 4;
      const std::uint8_t* const row = codes + t * a.n_hashes + hash;
      LSHKIT_UNROLL
      for (int k = 0; k < 4; ++k) {
        word[n][k] = 0;
        if (aligned && t + k < count && hash < hashes)
          word[n][k] = *reinterpret_cast<const std::uint32_t*>(row + k * a.n_hashes);
      }
    }
    LSHKIT_UNROLL
    for (int n = 0; n < kEach; ++n) {
      const int item = n * kStagers + thread;
      if (item >= kWords) break;
      if (!aligned) {
        const int t = item / (Hashes / 4) * 4, hash = item % (Hashes / 4) * 4;
        LSHKIT_UNROLL
        for (int k = 0; k < 4; ++k)
          if (t + k < count)
            word[n][k] = gather_code_word(codes + (t + k) * a.n_hashes, hash, hashes);
      }
      if (none >= 0 && a.n_buckets < 256) {
        LSHKIT_UNROLL
        for (int k = 0; k < 4; ++k)
          word[n][k] = codes_in_range(word[n][k], std::uint32_t(a.n_buckets), std::uint32_t(none));
      }
      const std::uint32_t low01 = select_bytes(word[n][0], word[n][1], 0x5140),
                          low23 = select_bytes(word[n][2], word[n][3], 0x5140),
                          high01 = select_bytes(word[n][0], word[n][1], 0x7362),
                          high23 = select_bytes(word[n][2], word[n][3], 0x7362);
      // Of hash h: the codes of four keys.
      store_quad(to + 4 * item,
                 {{select_bytes(low01, low23, 0x5410), select_bytes(low01, low23, 0x7632),
                   select_bytes(high01, high23, 0x5410), select_bytes(high01, high23, 0x7632)}});
    }
  }

  // A key that takes no part has zeros, whatever its value holds.
  __device__ void values(index_t first, int thread, Two* to) const {
    const Elements& v = a.values;
    const index_t start =
        (a.own_values ? key.owned * v.row : offset_of(v, key, 0)) + first * v.row + first_column;
    const int count = int(least(Chunk, key.count - first));
    const std::uint8_t* const valid = a.key_valid ? a.key_valid + key.batch * a.valid_batch +
                                                        key.head * a.valid_head + key.first + first
                                                  : nullptr;
    // Pairs of columns that are read as words; then the others, element by element.
    int pairs = int(least(kPairs, (a.n_values - first_column) / 2));
    if (v.element == Element::float32) {
      const float* const from = static_cast<const float*>(v.data) + start;
      pairs_of_words(
          thread, count, pairs, valid, to,
          [&](int t, int column) {
            const float* const two = from + t * v.row + column;
            return Raw{bits_of_float(two[0]), bits_of_float(two[1])};
          },
          [](Raw raw) { return Two{float_of_bits(raw.low), float_of_bits(raw.high)}; });
    } else if (v.element != Element::float64 && (start | v.row) % 2 == 0 && is_aligned(v.data, 4)) {
      const std::uint16_t* const from = static_cast<const std::uint16_t*>(v.data) + start;
      const bool brain = v.element == Element::bfloat16;
      pairs_of_words(
          thread, count, pairs, valid, to,
          [&](int t, int column) {
            return Raw{*reinterpret_cast<const std::uint32_t*>(from + t * v.row + column), 0};
          },
          [=](Raw raw) {
            const std::uint16_t x = std::uint16_t(raw.low), y = std::uint16_t(raw.low >> 16);
            return brain ? Two{from_bfloat16(x), from_bfloat16(y)}
                         : Two{from_float16(x), from_float16(y)};
          });
    } else {
      pairs = 0;
    }
    if (pairs == kPairs) return;
    for (int item = thread; item < kValues; item += kStagers) {
      const int t = item / kPairs, pair = item % kPairs;
      if (pair < pairs) continue;
      const bool taken = t < count && (!valid || valid[t]);
      const auto element = [&](index_t column) {
        return !taken || first_column + column >= a.columns() ? 0.0f
               : first_column + column >= a.n_values
                   ? 1.0f
                   : load_element<float>(v.data, start + t * v.row + column, v.element);
      };
      to[pair * kValueStep + t] = {element(2 * pair), element(2 * pair + 1)};
    }
  }

 private:
  struct Raw {
    std::uint32_t low, high;
  };
  template <class Load, class Convert>
  __device__ void pairs_of_words(int thread, int count, int pairs, const std::uint8_t* valid,
                                 Two* to, const Load& load, const Convert& convert) const {
    constexpr int kEach = (kValues + kStagers - 1) / kStagers;
    Raw raw[kEach];
    std::uint8_t taken[kEach];
    LSHKIT_UNROLL
    for (int n = 0; n < kEach; ++n) {
      const int t = (n * kStagers + thread) / kPairs, pair = (n * kStagers + thread) % kPairs;
      raw[n] = {0, 0};
      taken[n] = t < count;
      if (t < count && pair < pairs) {
        raw[n] = load(t, 2 * pair);
        if (valid) taken[n] = valid[t];
      }
    }
    LSHKIT_UNROLL
    for (int n = 0; n < kEach; ++n) {
      const int t = (n * kStagers + thread) / kPairs, pair = (n * kStagers + thread) % kPairs;
      if (t < Chunk && pair < pairs)
        to[pair * kValueStep + t] = taken[n] ? convert(raw[n]) : Two{0, 0};
    }
  }
};

}  // namespace lshkit::cuda

// Random numbers of hash functions: of 8 heads of 64 columns, 8 bits and 32 hashes 112 blocks of
// the counter and 768 angles. A call of attention makes them anew.
#include <cstring>

#include "kernels.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

class Words {
 public:
  explicit Words(RandomKey key) : key_(key) {}
  std::uint64_t next() {
    if (used_ == 4) {
      philox_block(key_, block_++, words_);
      used_ = 0;
    }
    return words_[used_++];
  }

 private:
  const RandomKey key_;
  std::uint64_t block_ = 0, words_[4];
  int used_ = 4;
};

}  // namespace

void random_numbers(RandomKey key, const RandomNumbers& a) {
  constexpr index_t kAngles = 32;  // columns / 2 is a multiple of it
  Words words(key);
  const index_t half = a.columns / 2;
  float* out = a.out;
  for (index_t set = 0; set < a.n_sets; ++set) {
    for (index_t row = 0; row < a.n_angle_rows; ++row, out += a.columns)
      for (index_t first = 0; first < half; first += kAngles) {
        float angle[kAngles], cosine[kAngles], sine[kAngles];
        for (index_t i = 0; i < kAngles; i += 2) {
          const std::uint64_t bits = words.next();
          angle[i] = random_angle(std::uint32_t(bits));
          angle[i + 1] = random_angle(std::uint32_t(bits >> 32));
        }
        for (index_t i = 0; i < kAngles; ++i) cosine_and_sine(angle[i], cosine + i, sine + i);
        std::memcpy(out + first, cosine, sizeof cosine);
        std::memcpy(out + half + first, sine, sizeof sine);
      }
    for (index_t row = 0; row < a.n_sign_rows; ++row, out += a.columns)
      for (index_t first = 0; first < a.columns; first += 64) {
        const std::uint64_t bits = words.next();
        for (int i = 0; i < 64; ++i) out[first + i] = bits >> i & 1 ? -1.0f : 1.0f;
      }
  }
}

void random_normals(RandomKey key, const RandomNormals& a) {
  Words words(key);
  for (index_t set = 0; set < a.n_sets; ++set)
    for (index_t i = 0; i < a.n_numbers; i += 2) {
      float normals[2];
      two_normals(words.next(), normals);
      float* const out = a.out + set * a.n_numbers + i;
      out[0] = normals[0];
      if (i + 1 < a.n_numbers) out[1] = normals[1];
    }
}

}  // namespace LSHKIT_ISA
}  // namespace lshkit

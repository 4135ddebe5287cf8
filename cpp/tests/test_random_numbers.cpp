// Random numbers of hash functions from the words that make them.
#include "check.hpp"
#include "lshkit/random_numbers.hpp"

namespace {

using namespace lshkit;

const RandomKey kKey{3, 7};

std::uint64_t word(index_t i) {
  std::uint64_t words[4];
  philox_block(kKey, i / 4, words);
  return words[i % 4];
}

TEST(words_are_those_of_numpy) {  // numpy.random.Philox(key=(7 << 64) + 3)
  CHECK(word(0) == 0x2931a6a40e9c6ddcu && word(1) == 0xd2ad30bbe8008548u);
  CHECK(word(2) == 0xbb8985d0dca44813u && word(3) == 0xbc747304c50f8b17u);
  CHECK(word(4) == 0x8c3d9ba749ce970eu && word(7) == 0x87d8b7bc5a54e9f7u);
}

TEST(cosines_and_sines_are_rounded_once) {
  for (int i = 0; i <= 1000000; ++i) {
    const float angle = float(i) * (6.2831853f / 1000000);
    float c, s;
    cosine_and_sine(angle, &c, &s);
    CHECK(c == float(std::cos(double(angle))) && s == float(std::sin(double(angle))));
  }
}

TEST(angles_and_signs_are_those_of_the_words) {
  for (const index_t sets : {0, 1, 3})
    for (const index_t columns : {64, 256}) {
      RandomNumbers a;
      a.n_sets = sets;
      a.n_angle_rows = 3;
      a.n_sign_rows = 5;
      a.columns = columns;
      const index_t rows = 8, half = columns / 2;
      std::vector<float> out(sets * rows * columns + 1, 7.0f);
      a.out = out.data();
      random_numbers(kKey, a);
      CHECK(out.back() == 7.0f);
      index_t next = 0, wrong = 0;
      for (index_t set = 0; set < sets; ++set)
        for (index_t row = 0; row < rows; ++row) {
          const float* numbers = &out[(set * rows + row) * columns];
          for (index_t i = 0; row < 3 && i < half; ++i) {
            const float angle = random_angle(std::uint32_t(word(next) >> (i % 2 ? 32 : 0)));
            next += i % 2;
            wrong += numbers[i] != float(std::cos(double(angle)));
            wrong += numbers[half + i] != float(std::sin(double(angle)));
          }
          for (index_t i = 0; row >= 3 && i < columns; ++i) {
            wrong += numbers[i] != (word(next) >> i % 64 & 1 ? -1.0f : 1.0f);
            next += i % 64 == 63;
          }
        }
      CHECK(wrong == 0);
    }
}

TEST(normals_are_those_of_the_words) {
  for (const index_t sets : {0, 1, 3})
    for (const index_t numbers : {1, 64, 129, 10001}) {
      RandomNormals a;
      a.n_sets = sets;
      a.n_numbers = numbers;
      std::vector<float> out(sets * numbers + 1, 7.0f);
      a.out = out.data();
      random_normals(kKey, a);
      CHECK(out.back() == 7.0f);
      index_t next = 0, wrong = 0;
      for (index_t set = 0; set < sets; ++set)
        for (index_t i = 0; i < numbers; ++i) {
          float normals[2];
          two_normals(word(next), normals);
          wrong += out[set * numbers + i] != normals[i % 2];
          next += i % 2 || i + 1 == numbers;
        }
      CHECK(wrong == 0);
    }
}

}  // namespace

LSHKIT_TEST_MAIN

// Random numbers of hash functions. tests/cuda/test_cuda_parameters.py has all of them against
// those of the CPU.
#include "check.hpp"
#include "lshkit/cuda/parameters.cuh"

namespace {

using namespace lshkit;

TEST(philox_words_are_those_of_numpy) {  // numpy.random.Philox(key=seed)
  const auto word = cuda::philox_word;
  CHECK(word(3, 0) == 0xef2d1b42dcafdccbu && word(3, 1) == 0x1443ed404530344du);
  CHECK(word(3, 2) == 0x620103df808f8227u && word(3, 3) == 0xcc88f3a558ec7d9au);
  CHECK(word(3, 4) == 0xc21223475fc1c27du && word(3, 1099) == 0xcb37a8bcaad8f426u);
  CHECK(word(0x7fffffffffffffffu, 4) == 0xe341e7d9887dfe44u);
}

TEST(numbers_fill_their_rows_and_nothing_else) {
  for (const index_t sets : {1, 3}) {
    for (const index_t columns : {64, 256}) {
      cuda::RandomNumbers a;
      const std::int64_t seed = 5;
      a.seed = &seed;
      a.n_sets = sets;
      a.n_angle_rows = 3;
      a.n_sign_rows = 5;
      a.columns = columns;
      const index_t rows = a.n_angle_rows + a.n_sign_rows, half = columns / 2;
      std::vector<float> out(sets * rows * columns + 1, 7.0f);
      a.out = out.data();
      cuda::random_numbers(cuda::Queue{}, a);
      CHECK(out.back() == 7.0f);
      for (index_t i = 0; i < sets * rows; ++i)
        for (index_t j = 0; j < columns; ++j) {
          const float x = out[i * columns + j];
          if (i % rows >= 3) CHECK(x == 1 || x == -1);
          if (i % rows >= 3 || j >= half) continue;
          const float y = out[i * columns + half + j];
          CHECK_CLOSE(x * x + y * y, 1, 1e-6, 0);
        }
    }
  }
}

TEST(normals_fill_their_rows_and_nothing_else) {
  for (const index_t sets : {1, 3}) {
    for (const index_t numbers : {1, 64, 129, 10001}) {
      cuda::RandomNormals a;
      const std::int64_t seed = 5;
      a.seed = &seed;
      a.n_sets = sets;
      a.n_numbers = numbers;
      std::vector<float> out(sets * numbers + 1, 7.0f);
      a.out = out.data();
      cuda::random_normals(cuda::Queue{}, a);
      CHECK(out.back() == 7.0f);
      double sum = 0, squares = 0;
      for (index_t i = 0; i < sets * numbers; ++i) {
        CHECK(std::fabs(out[i]) < 6.8f);
        sum += out[i];
        squares += double(out[i]) * out[i];
      }
      const double n = double(sets * numbers);  // within 4 standard errors
      CHECK(std::fabs(sum) < 4 * std::sqrt(n) && std::fabs(squares - n) < 4 * std::sqrt(2 * n));
    }
  }
}

}  // namespace

// Hash codes of every layout that the kernels tell apart.
#include "check_hash.hpp"
#include "quick.hpp"

namespace {

TEST(codes_of_rotations_in_registers) {
  for (const index_t columns : {64, 128, 256, 512, 1024, 2048}) {
    if (kQuick && columns != 128 && columns != 2048) continue;
    check_hash(Family::hadamard, 3, columns, kQuick ? 2 : 8, 32);
    check_hash(Family::hadamard, 5, columns - 3, 3, 9, Element::bfloat16, 1, 1);
    if (kQuick) continue;
    check_hash(Family::hadamard, 135, columns, 2, 64, Element::bfloat16);
    check_hash(Family::hadamard, 3, columns, 9, 33);
    check_hash(Family::hadamard, 3, columns / 2 + 1, 16, 16, Element::float16, 2);
    check_hash(Family::hadamard, 2, columns, 2, columns + 5);
  }
  if (!kQuick) check_hash(Family::hadamard, 3, 2049, 2, 40);  // in shared memory
}

TEST(codes_of_hyperplanes) {
  check_hash(Family::hyperplane, 3, 66, 9, kQuick ? 15 : 130, Element::bfloat16);
  if (kQuick) return;
  check_hash(Family::hyperplane, 130, 64, 8, 32, Element::bfloat16);
  check_hash(Family::hyperplane, 129, 136, 16, 70);
  check_hash(Family::hyperplane, 5, 1, 1, 1);
  check_hash(Family::hyperplane, 5, 130, 11, 3, Element::float16, 6);
  check_hash(Family::hyperplane, 2, 20, 7, 300);
}

TEST(codes_of_rows_at_any_address) {
  for (const Element element : {Element::float32, Element::bfloat16, Element::float16})
    for (const index_t gap : {0, 1, 8})
      for (const index_t offset : {0, 1}) {
        if (kQuick && (gap == 8 || element == Element::float16)) continue;
        check_hash(Family::hadamard, 4, 64, 3, 32, element, gap, offset);
        check_hash(Family::hadamard, 4, 64, 3, 31, element, gap, offset);
        if (!kQuick) check_hash(Family::hadamard, 4, 64, 10, 64, element, gap, offset);
        check_hash(Family::hyperplane, 4, 24, 3, 5, element, gap, offset);
      }
}

}  // namespace

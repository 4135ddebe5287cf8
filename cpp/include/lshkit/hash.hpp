#pragma once
// Angular hash families: a code's bit is 1 where a random projection is > 0 (zero and NaN give 0).
#include "lshkit/anywhere.hpp"
#include "lshkit/tensor.hpp"

namespace lshkit {

enum class Family : int { hyperplane = 0, hadamard = 1 };
// fast: shorter numbers where they gain time. In hash(), hadamard with up to 128 columns: rotations
// of 16-bit integers, or their product in bfloat16. A bit differs from the full precision's where
// the projection is within rounding of zero: in about 1 of 10^4, or 5.
enum class Precision : int { full = 0, fast = 1 };

// The random numbers that make one hash function set, as float32 (rows, columns) per head:
//   hyperplane  rows = n_hashes * n_bits, columns = n_features. Row j * n_bits + b is the normal of
//               bit b of hash j (Charikar 2002).
//   hadamard    columns = D, a power of two >= max(64, n_features). With groups = ceil(n_hashes /
//   D),
//               rows = 3 + groups * n_bits. Rows 0 to 2: D/2 cosines, then D/2 sines, of the plane
//               rotations G0, G1 and G2, of (x_i, x_{i + D/2}) by angles uniform in [0, 2 pi). Row
//               3 + group * n_bits + b: the signs (+1 or -1) S of rotation b. With
//               z = G2 H G1 H G0 x, shared by all rotations, row j % D of H P S z is the projection
//               of bit b of hash j; element i of P v is v's element rotation_column(i, b).
// The rows of one rotation are orthogonal, so that codes made of them would collide too rarely: no
// two bits of a code share a rotation. Signs alone leave sparse vectors on a lattice, which moves
// the collision probability of axis-aligned pairs by up to 5 % (measured, D = 64); after the angles
// one transform a rotation has no bias that 4 million codes could show (0.1 %).
//
// Without P, bits j and j' of a rotation would be correlated by sum_i H[j ^ j', i] z_i^2, whatever
// the signs, and so in all bits of both codes alike: sums over rows in all directions had up to
// twice the variance that independent functions have. P changes j ^ j' from bit to bit, but where j
// and j' differ by a multiple of 8.
struct HashFunctions {
  Family family = Family::hadamard;
  const float* parameters = nullptr;
  index_t head_stride = 0;  // elements from one head's set to the next; 0: one set for all heads
  index_t columns = 0;
  int n_bits = 8;  // 1 to 64; in Precision::fast and for soft codes up to 16
  index_t n_hashes = 32;
  index_t heads_per_set = 1;  // heads in a row that share a set
};

// Takes the lowest three bits of i `bit` times through a linear map, a symmetric matrix over GF(2)
// of order 7: bits b and b + 7 have the same order.
LSHKIT_ANYWHERE constexpr index_t rotation_column(index_t i, int bit) {
  unsigned three = unsigned(i & 7);
  for (int times = bit % 7; times > 0; --times) three = 013467520u >> 3 * three & 7;
  return (i & ~index_t(7)) | index_t(three);
}
// Since H[j, a i] = H[a j, i] for such a map a of three bits of both, P permutes the rows of H too:
// row j of H P is row rotation_row(j, b) of H.
LSHKIT_ANYWHERE constexpr index_t rotation_row(index_t hash, int bit) {
  return rotation_column(hash, 6 * bit);
}

constexpr int hash_code_bytes(int n_bits) {
  return n_bits <= 8 ? 1 : n_bits <= 16 ? 2 : n_bits <= 32 ? 4 : 8;
}

// codes: contiguous (batch, heads, rows, n_hashes), unsigned integers of hash_code_bytes(n_bits).
// Only a row's direction matters, whatever its size. Returns true when x has no NaN or infinity.
bool hash(const HashFunctions& functions, Input<float> x, index_t batch, index_t heads,
          index_t rows, index_t n_features, void* codes, int threads,
          Precision precision = Precision::full);

}  // namespace lshkit

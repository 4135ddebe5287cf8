#pragma once
// What the kernels of a cache of codes are given (code_cache.cpp).
#include "kernel_arguments.hpp"
#include "lshkit/code_cache.hpp"

namespace lshkit {

struct CodeRows {
  const void *key, *value;
  Element element;  // not float64
  index_t key_stride, value_stride, rows, n_features, n_values, n_bits;
  const float *planes, *centre, *value_centre;  // (n_features, n_bits), (n_features), (n_values)
  float norm, value_norm;
  std::uint8_t* codes;  // of the block that key 0 is the `first` of
  index_t first;
  float* centred;  // scratch: (n_features), rounded up to whole cache lines
};
// The estimate of a key whose norm or size its byte may not hold, so that both are 255: above every
// threshold.
constexpr std::int16_t kSureEstimate = 32000;

// Estimates are from -kMostEstimate to kMostEstimate before half of the variance and a value's size
// are added.
constexpr std::int16_t kMostEstimate = 16000;

// Estimates of scores, in blocks of codes: 4 bits of a key choose one of 16 entries of a table.
struct CodeScan {
  const std::uint8_t* codes;
  index_t n_blocks, n_bits;
  const std::uint8_t* table;  // (n_bits / 4, 16), entries <= 63
  int zero, factor, shift;    // of a sum of entries, and of its product with the norm
  int half_variance;          // of the norm's square
  int size_factor;            // see estimated_scores.hpp
  std::int16_t* estimates;    // (n_blocks * kCodeBlock)
};
// Positions from first to last (not itself) with estimate + noise >= threshold or noise >= floor.
// Both arrays may be read kSelectPadding beyond.
struct CodeSelect {
  const std::int16_t *estimates, *noise;
  index_t first, last;
  int threshold, floor;
  std::int32_t offset, *rows;  // gets position + offset, and a register's junk behind the last
};
constexpr index_t kSelectPadding = 64;
// Sums over keys that were read, in units of exp(largest): of weights w = exp(score) / probability,
// of w v and w |v|^2, and of u = w^2 (1 - probability), u v and u |v|^2.
struct CodeSums {
  float largest, denominator, variance;
  double squares, variance_squares;
  float *numerator, *variance_values;  // (n_values), to whole registers
};
struct CodeRead {
  const float* query;  // times the scale, zeros behind it up to a whole register
  const void *key, *value;
  Element element;  // not float64
  index_t key_stride, value_stride, n_features, n_values;
  const std::int32_t* rows;
  const float* probability;  // null: 1
  index_t count;
  CodeSums* sums;
  float* scores;  // (count), or null: not wanted
};
constexpr index_t kRegisterFloats = 16;  // at most

}  // namespace lshkit

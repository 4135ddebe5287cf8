#pragma once
// The sum verb with weights on one table: what its kernels take.
#include "lshkit/tensor.hpp"

namespace lshkit {

// Rows that belong to n_probes table rows each, with weights.
template <class T>
struct WeightedRows {
  index_t count = 0;
  int n_probes = 1;
  const std::uint16_t* slots = nullptr;  // (count, n_probes): rows of the table
  const T* weights = nullptr;            // (count, n_probes)
  const T* rows = nullptr;               // the slice's first column
  index_t stride = 0;
  const std::uint8_t* valid = nullptr;  // of those that are added; null: all
};
// add's rows go into the table, weight * row to each of its slots; read's rows take from it sum_i =
// scale * the weighted sum of its table rows, and dots_ik = scale * the dot product of row i with
// the table row of its probe k. Before the first rows the table is zeros, or none of its rows is
// used. In the orders causal and reversed, row i is added before row i reads.
template <class T>
struct WeightedPass {
  T* table;             // rows of slices * kSliceBytes, aligned to 64
  std::uint16_t* used;  // of each of its rows: see used_rows.hpp; null: all are, cleared
  int slices, width;    // 1 or 2, and their columns: at most slices * kSliceBytes / sizeof(T)
  Order order;
  WeightedRows<T> add, read;  // read.rows only for the dots
  T scale;
  T* sum = nullptr;  // null: not wanted
  index_t sum_stride = 0;
  bool accumulate_sum = false;
  T* dots = nullptr;  // (read.count, n_probes); null: not wanted
  bool accumulate_dots = false;
};
// The same for a single column, whose table has one number a row. No rows: a column of ones. Sums
// (contiguous) and dots are always added to.
template <class T>
struct WeightedColumn {
  T* table;
  Order order;
  WeightedRows<T> add, read;
  T scale;
  T *sum = nullptr, *dots = nullptr;
};

// The same in tables of 16-bit integers, for numbers that have been rounded to them.
struct FastWeightedRows {
  index_t count = 0;
  int n_probes = 1;
  const std::uint16_t* slots = nullptr;    // (count, n_probes): rows of the table
  const std::uint32_t* weights = nullptr;  // (count, n_probes): of fast_weights
  const std::int16_t* rows = nullptr;      // of fast_values where added, of fast_factors where read
  index_t stride = 0;
  const std::uint8_t* valid = nullptr;  // of those that are added; null: all
};
// A row's weights are at least 0 and add up to at most 1. Dots of row i are times dot_scale_i.
struct FastWeightedPass {
  std::int16_t* table;         // rows of slices * kSliceBytes, aligned to 64
  std::uint16_t* used;         // of each of its rows; null: all are, cleared
  index_t table_rows;          // cleared once all rows have been added, if not used until then
  int slices, width;           // 1 or 2, and their columns
  FastWeightedRows add, read;  // read.rows only for the dots
  const float* sum_scale;      // of each column of whole slices
  float* sum = nullptr;        // null: not wanted
  index_t sum_stride = 0;
  bool accumulate_sum = false;
  const float* dot_scale = nullptr;
  float* dots = nullptr;  // (read.count, n_probes); null: not wanted
  bool accumulate_dots = false;
};

}  // namespace lshkit

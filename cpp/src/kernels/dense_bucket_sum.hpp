#pragma once
// Weighted sums of rows that belong to all table rows: what the kernels take. The weights of a
// chunk of rows are a matrix with a row for each table row, so the columns are the chunk's rows.
#include "kernels.hpp"

namespace lshkit {

// Table rows, and beside them a column of its own (null: not wanted).
struct DenseTable {
  float* rows;  // (count, stride); stride a multiple of 16
  index_t count, stride, columns;
  float* column;  // (count)
};
// (the table's count, rows), each row at a multiple of weight_stride, itself one of 16.
struct DenseWeights {
  float* data;
  index_t stride, rows;
};

}  // namespace lshkit

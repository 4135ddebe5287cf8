#pragma once
// Rows of a tensor as the kernels take them: in float or double, converted where they are shorter.
#include "kernels/kernels.hpp"

namespace lshkit {

struct RowPosition {
  index_t batch, head, row;
};

// What rows_as needs to convert to: so many T, none where the tensor's elements are T already.
template <class T, class Void>
index_t conversion_size(const FloatTensor<T, Void>& x, index_t rows, index_t columns) {
  return x.converted() ? rows * columns : 0;
}

// run(row, elements) for the stretches of rows that follow each other in memory.
template <class T, class Void, class Run>
void each_run(const FloatTensor<T, Void>& x, index_t rows, index_t columns, const Run& run) {
  if (x.row_stride == columns) return run(0, rows * columns);
  for (index_t i = 0; i < rows; ++i) run(i, columns);
}

template <class T>
Matrix<const T> rows_as(const Input<T>& x, RowPosition at, index_t rows, index_t columns,
                        T* converted) {
  if (!x.converted())
    return {static_cast<const T*>(x.row(at.batch, at.head, at.row)), x.row_stride, rows, columns};
  if constexpr (sizeof(T) == sizeof(float))
    each_run(x, rows, columns, [&](index_t i, index_t count) {
      kernels().widen(x.row(at.batch, at.head, at.row + i), x.element, count,
                      converted + i * columns);
    });
  return {converted, columns, rows, columns};
}

// Where to write such rows: the tensor's own, or `converted`, for store_rows to bring home.
template <class T>
Matrix<T> rows_to(const Output<T>& x, RowPosition at, index_t rows, index_t columns, T* converted) {
  if (x.converted()) return {converted, columns, rows, columns};
  return {static_cast<T*>(x.row(at.batch, at.head, at.row)), x.row_stride, rows, columns};
}
template <class T>  // contiguous where they were converted: as rows_to gives them
void store_rows(const Output<T>& x, RowPosition at, Matrix<T> rows) {
  if (!x.converted()) return;
  if constexpr (sizeof(T) == sizeof(float))
    each_run(x, rows.rows, rows.columns, [&](index_t i, index_t count) {
      kernels().narrow(rows.row(i), count, x.element, x.row(at.batch, at.head, at.row + i));
    });
}

}  // namespace lshkit

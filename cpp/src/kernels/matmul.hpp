#pragma once
// Small matrix products in registers: the building block of every dense part of a kernel. Not
// inlined: one copy an object serves all uses.
#include "kernels.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// Rows of a matrix, all in turn or those that an index list names.
template <class T>
struct Rows {
  T* data;
  index_t stride;
  const std::int32_t* order = nullptr;

  LSHKIT_INLINE index_t index(index_t r) const { return order ? order[r] : r; }
  LSHKIT_INLINE T* operator()(index_t r) const { return data + index(r) * stride; }
};

// Of a row, hidden from the compiler, which would else compute an address for each register of it.
LSHKIT_INLINE index_t row_offset(index_t row, index_t stride) {
  index_t at = row * stride;
  asm("" : "+r"(at));
  return at;
}

// Register tile: Rows x Columns accumulators, Columns vectors of b and one broadcast of a.
template <int Columns>
constexpr int kTileRows = kRegisters >= 32 ? (Columns == 4   ? 6
                                              : Columns == 3 ? 8
                                                             : 12)
                                           : (Columns == 2 ? (kVectorBytes == 32 ? 6 : 4) : 8);
constexpr int kTileColumns = kRegisters >= 32 ? 4 : 2;

template <class T>
LSHKIT_NOINLINE void write_part(const T* row, index_t count, T* out, bool add) {
  for (index_t i = 0; i < count; ++i) out[i] = add ? out[i] + row[i] : row[i];
}

template <class T, int kRows, int Columns>
LSHKIT_INLINE void matmul_tile(index_t first, index_t rows, index_t columns, index_t depth,
                               Rows<const T> a, index_t a_stride, const T* b, index_t b_stride,
                               Rows<T> c, index_t column, bool add) {
  constexpr int n = kLanes<T>;
  const T* row[kRows];
  LSHKIT_UNROLL
  for (int r = 0; r < kRows; ++r) row[r] = a(smaller(first + r, rows - 1));
  Vec<T> sum[kRows][Columns] = {};
  for (index_t k = 0; k < depth; ++k) {
    Vec<T> v[Columns];
    LSHKIT_UNROLL
    for (int i = 0; i < Columns; ++i) v[i] = load(b + k * b_stride + column + i * n);
    LSHKIT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const T s = row[r][k * a_stride];
      LSHKIT_UNROLL
      for (int i = 0; i < Columns; ++i) sum[r][i] += s * v[i];
    }
  }
  if (column + Columns * n > columns) {
    T tile[kRows * Columns * n];
    LSHKIT_UNROLL
    for (int r = 0; r < kRows; ++r) LSHKIT_UNROLL
    for (int i = 0; i < Columns; ++i) store(tile + (r * Columns + i) * n, sum[r][i]);
    for (index_t r = 0; r < smaller(kRows, rows - first); ++r)
      write_part(tile + r * Columns * n, columns - column, c(first + r) + column, add);
    return;
  }
  LSHKIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    if (first + r >= rows) break;
    T* out = c(first + r) + column;
    LSHKIT_UNROLL
    for (int i = 0; i < Columns; ++i)
      store(out + i * n, add ? load(out + i * n) + sum[r][i] : sum[r][i]);
  }
}

struct Nothing {
  LSHKIT_INLINE void operator()() const {}
};

// The last rows in tiles of four where these fit better: 128 rows are 20 tiles of six and two.
template <class T, int Columns, class Between>
LSHKIT_INLINE void matmul_panel(index_t rows, index_t columns, index_t depth, Rows<const T> a,
                                index_t a_stride, const T* b, index_t b_stride, Rows<T> c,
                                index_t column, bool add, const Between& between) {
  constexpr int kRows = kTileRows<Columns>;
  for (index_t first = 0; first < rows;) {
    between();
    const index_t left = rows - first;
    if (kRows > 4 && (left <= 4 || (left == 8 && kRows != 8))) {
      matmul_tile<T, 4, Columns>(first, rows, columns, depth, a, a_stride, b, b_stride, c, column,
                                 add);
      first += 4;
    } else {
      matmul_tile<T, kRows, Columns>(first, rows, columns, depth, a, a_stride, b, b_stride, c,
                                     column, add);
      first += kRows;
    }
  }
}

// c(r)[i] = sum over k < depth of a(r)[k * a_stride] * b[k * b_stride + i], or added to it, for r <
// rows and i < columns. b is read up to a multiple of the lanes; what lies there reaches nothing.
// between() is called before each tile.
template <class T, class Between = Nothing>
LSHKIT_NOINLINE void matmul(index_t rows, index_t columns, index_t depth, Rows<const T> a,
                            index_t a_stride, const T* b, index_t b_stride, Rows<T> c, bool add,
                            const Between& between = {}) {
  constexpr int n = kLanes<T>;
  index_t i = 0;
  for (; columns - i > (kTileColumns - 1) * n; i += kTileColumns * n)
    matmul_panel<T, kTileColumns>(rows, columns, depth, a, a_stride, b, b_stride, c, i, add,
                                  between);
  for (; kTileColumns > 2 && columns - i > n; i += 2 * n)
    matmul_panel<T, 2>(rows, columns, depth, a, a_stride, b, b_stride, c, i, add, between);
  for (; i < columns; i += n)
    matmul_panel<T, 1>(rows, columns, depth, a, a_stride, b, b_stride, c, i, add, between);
}

// to[r] = scale * factor[index of r] * from(r), zeros up to `padded` columns. No factor: 1.
template <class T>
LSHKIT_NOINLINE void pack(index_t rows, index_t columns, index_t padded, Rows<const T> from,
                          T scale, const T* factor, T* to) {
  constexpr int n = kLanes<T>;
  for (index_t r = 0; r < rows; ++r) {
    const T* x = from(r);
    const T f = factor ? scale * factor[from.index(r)] : scale;
    index_t c = 0;
    for (; c + n <= columns; c += n) store(to + r * padded + c, load(x + c) * f);
    for (; c < padded; c += n) store(to + r * padded + c, load_first(x + c, int(columns - c)) * f);
  }
}

// to[c][r] = scale * factor[index of r] * from(r)[c]; rows up to `padded` are zero.
template <class T>
LSHKIT_NOINLINE void pack_transposed(index_t rows, index_t columns, index_t padded,
                                     Rows<const T> from, T scale, const T* factor, T* to) {
  constexpr int n = kLanes<T>;
  for (index_t r0 = 0; r0 < padded; r0 += n)
    for (index_t c0 = 0; c0 < columns; c0 += n) {
      const index_t width = columns - c0;
      Vec<T> v[n];
      LSHKIT_UNROLL
      for (int i = 0; i < n; ++i) {
        v[i] = Vec<T>{};
        if (r0 + i >= rows) continue;
        const T* x = from(r0 + i) + c0;
        const T f = factor ? scale * factor[from.index(r0 + i)] : scale;
        v[i] = (width >= n ? load(x) : load_first(x, int(width))) * f;
      }
      transpose<T>(v);
      LSHKIT_UNROLL
      for (int i = 0; i < n; ++i)
        if (i < width) store(to + (c0 + i) * padded + r0, v[i]);
    }
}

template <class T>
void clear(Matrix<T> m) {
  for (index_t i = 0; i < m.rows; ++i) std::memset(m.row(i), 0, sizeof(T) * m.columns);
}

}  // namespace
}  // namespace LSHKIT_ISA
}  // namespace lshkit

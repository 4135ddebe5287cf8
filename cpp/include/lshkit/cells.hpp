#pragma once
// Rows in cells: each belongs to the nearest of some centres (a Voronoi partition, an inverted file
// index). Sums of a kernel over the cells around a query read each cell's rows as they lie.
#include "lshkit/kernel_sums.hpp"

namespace lshkit {

// probes (n_queries, n_probes) = the centres nearest to each query, the nearest first; of two as
// far, that of the smaller index. centre_blocks: (n_blocks, n_features, kKeyBlock), the last filled
// up with any finite numbers. 1 <= n_probes <= n_cells. Distances are Euclidean. Same bits at any
// number of threads, and a query's do not depend on the others.
template <class T>
void nearest_cells(const T* queries, index_t n_queries, index_t n_features, const T* centre_blocks,
                   index_t n_cells, std::int32_t* probes, index_t n_probes, int threads);

template <class T>
struct CellSumProblem {
  DensityKernel kernel = DensityKernel::gaussian;  // to angular
  int n_bits = 1;                                  // of angular
  index_t n_queries = 0, n_features = 0, n_cells = 0, n_probes = 0;
  const T* queries = nullptr;            // scaled as the rows; of norm 1 for angular
  const std::int32_t* probes = nullptr;  // (n_queries, n_probes), of [0, n_cells)
};

// The rows of the cells in blocks; each cell begins a block.
template <class T>
struct CellBlocks {
  const T* blocks = nullptr;        // (n_blocks, n_features, kKeyBlock), filled up likewise
  const index_t* first = nullptr;   // (n_cells), of its blocks
  const index_t* begin = nullptr;   // (n_cells), the rows of the cell that count: from begin
  const index_t* end = nullptr;     // (n_cells), to end
  const double* weights = nullptr;  // (n_blocks, kKeyBlock) >= 0, or null: 1
};

// sums (n_queries): weight * k over the rows of each query's cells.
template <class T>
void cell_kernel_sums(const CellSumProblem<T>& problem, const CellBlocks<T>& cells, KernelSum* sums,
                      int threads);

// The same rows one by one.
template <class T>
struct CellRows {
  const T* rows = nullptr;              // (n_rows, n_features)
  const double* weights = nullptr;      // (n_rows) >= 0, or null: 1
  const std::int32_t* order = nullptr;  // the rows of each cell, ascending
  const index_t* indptr = nullptr;      // (n_cells + 1), where those of a cell are
};

// exp(shift) * total is the sum of weight * k over `count` rows; shift -inf where there is none.
struct CountedSum {
  double shift, total, squares, count;
};

// sums (n_queries): over those rows of each query's cells that are in [low, high), few.
template <class T>
void listed_kernel_sums(const CellSumProblem<T>& problem, const CellRows<T>& cells, index_t low,
                        index_t high, CountedSum* sums, int threads);

}  // namespace lshkit

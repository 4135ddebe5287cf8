#pragma once
// Exact sums of a kernel over rows: what a kernel density is made of. Every query against every
// key, blocked, with nothing of size n_queries * n_keys kept.
#include "lshkit/tensor.hpp"

namespace lshkit {

// With r the distance of scaled rows (L1 for laplacian, the angle for angular, else L2):
enum class DensityKernel : int {
  gaussian = 0,      // exp(-r^2 / 2)
  exponential = 1,   // exp(-r)
  laplacian = 2,     // exp(-r)
  angular = 3,       // (1 - r / pi)^n_bits
  tophat = 4,        // 1 for r < 1, and so the others: 0 beyond
  epanechnikov = 5,  // 1 - r^2
  linear = 6,        // 1 - r
  cosine = 7         // cos(pi r / 2)
};

// A sum as exp(shift) * total, so that nothing underflows: shift is the largest log kernel met.
struct KernelSum {
  double shift, total, squares;  // squares: exp(2 shift) * squares is the sum of the squared terms
};

struct KernelSumShape {
  index_t n_queries = 0, n_keys = 0, n_features = 0;
  DensityKernel kernel = DensityKernel::gaussian;
  int n_bits = 1;  // of angular
};

constexpr index_t kKeyBlock = 64;

// The keys as the caller has them, float or double. Scaled rows are (key - centre) * inverse_scale.
struct DensityKeys {
  const void* rows = nullptr;  // (n_keys, n_features), contiguous
  // Or blocks of kKeyBlock keys (n_blocks, n_features, kKeyBlock), the last filled up with any
  // finite numbers: nothing has to be transposed, which is most of the work of a few queries.
  bool blocked = false;
  Element element = Element::float32;
  const double* centre = nullptr;         // (n_features), or null: 0
  const double* inverse_scale = nullptr;  // (n_features), or null: 1
  const double* weights = nullptr;        // (n_keys) >= 0, or null: 1
};

// Where the kernels of which nothing is left from r = 1 on end, for rows as given: a key counts
// where
//   sqrt(sum over c of ((key_c - query_c) / widths_c)^2) < edge,
// in double, each operation rounded, the features in order. Without widths that is, bit for bit,
// what scikit-learn's KernelDensity asks of the bandwidth `edge`. Squared distances from products
// only decide pairs that are farther from the edge than their error.
struct KernelEdge {
  const double* queries = nullptr;  // (n_queries, n_features), of the same units as the keys' rows
  const double* widths = nullptr;   // (n_features), or null: 1
  double edge = 1;
};

// sums[i] = sum over j of weight_j k(r_ij), for queries that are scaled already (for
// angular: of norm 1) and contiguous. T: what distances are computed in, float or double; what is
// summed has the precision of float, the sums themselves are double. Same bits at any number of
// threads, and a query's do not depend on the others. No keys: shift -inf, sums 0.
// edge: may be left out where the keys are scaled already, and for kernels without an end.
template <class T>
void kernel_sums(const KernelSumShape& shape, const T* queries, const DensityKeys& keys,
                 KernelSum* sums, int threads, KernelEdge edge = {});

}  // namespace lshkit

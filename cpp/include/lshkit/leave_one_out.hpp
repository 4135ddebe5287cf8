#pragma once
// Sums of a kernel over all rows but one, at many bandwidths from one pass over the distances: what
// leave-one-out likelihoods of a density are made of.
#include "lshkit/kernel_sums.hpp"

namespace lshkit {

struct LeaveOneOutShape {
  index_t n_queries = 0, n_keys = 0, n_features = 0, n_scales = 0;
  DensityKernel kernel = DensityKernel::gaussian;  // or exponential, laplacian
};

struct LeftOutSum {
  double log_sum;        // of weight_j exp(-s u_j)
  double mean_exponent;  // of s u_j, weighted by these terms
};

// For query i and scale s: the sums over the keys j that are not own[i] of weight_j exp(-s u_ij),
// with u = r^2 / 2 (gaussian), the distance r (exponential) or the L1 distance (laplacian). With
// s = 1 / bandwidth^2 (gaussian) or 1 / bandwidth the term is the kernel. nearest[i] is the least
// u_ij. T: what distances are computed in; what is summed has the precision of float, relative to
// the nearest key's term, the sums are double. Same bits at any number of threads; a query's do not
// depend on the others. A query without another key: log_sum -inf, mean_exponent 0, nearest inf.
template <class T>
struct LeaveOneOutProblem {
  LeaveOneOutShape shape;
  const T* queries;       // (n_queries, n_features)
  const index_t* own;     // (n_queries): the key that is the query itself, or -1
  const T* keys;          // (n_keys, n_features)
  const double* weights;  // (n_keys) > 0, or null: 1
  const double* scales;   // (n_scales) > 0
  double* nearest;        // (n_queries)
  LeftOutSum* sums;       // (n_queries, n_scales)
};
template <class T>
void leave_one_out(const LeaveOneOutProblem<T>& problem, int threads);

}  // namespace lshkit

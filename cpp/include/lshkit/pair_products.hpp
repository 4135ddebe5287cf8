#pragma once
// A sampled product of two matrices: dot products or distances of listed pairs of rows.
#include "lshkit/tensor.hpp"

namespace lshkit {

enum class PairMeasure : int { product = 0, squared_distance = 1, l1_distance = 2 };

// The pairs in CSR form: query i with the keys indices[indptr[i]] to indices[indptr[i + 1] - 1].
template <class T>
struct PairProducts {
  const T* queries = nullptr;  // rows of n_features at their strides
  const T* keys = nullptr;
  index_t query_stride = 0, key_stride = 0;
  index_t n_queries = 0, n_features = 0;
  const std::int64_t* indptr = nullptr;  // (n_queries + 1), from 0 on and not decreasing
  const void* indices = nullptr;
  int index_bytes = 4;  // 4 or 8 an index
  PairMeasure measure = PairMeasure::product;
  T* out = nullptr;  // one for each pair; each is computed alike wherever it is listed
};

template <class T>
void pair_products(const PairProducts<T>& pairs, int threads);

}  // namespace lshkit

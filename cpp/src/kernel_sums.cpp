#include "kernels/kernel_sums.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/kernels.hpp"
#include "parallel.hpp"

namespace lshkit {
namespace {

// A task is a run of queries against a run of keys. The cuts depend on nothing but the key, so that
// a query's sum does not either.
constexpr index_t kQueryRun = 512, kKeyRun = 4096;
static_assert(kKeyRun % kKeyBlock == 0);

}  // namespace

template <class T>
void kernel_sums(const KernelSumShape& shape, const T* queries, const DensityKeys& keys,
                 KernelSum* sums, int threads, KernelEdge edge) {
  const double lowest =
      shape.kernel <= DensityKernel::laplacian ? -std::numeric_limits<double>::infinity() : 0;
  const index_t query_runs = (shape.n_queries + kQueryRun - 1) / kQueryRun;
  const index_t key_runs = (shape.n_keys + kKeyRun - 1) / kKeyRun;
  if (key_runs == 0) {
    std::fill_n(sums, shape.n_queries, KernelSum{-std::numeric_limits<double>::infinity(), 0, 0});
    return;
  }
  std::vector<T> norms(shape.n_queries);
  for (index_t i = 0; i < shape.n_queries; ++i) {
    double sum = 0;
    const T* q = queries + i * shape.n_features;
    for (index_t c = 0; c < shape.n_features; ++c) sum += double(q[c]) * double(q[c]);
    norms[i] = T(sum / 2);
  }
  std::vector<double> given;
  if (shape.kernel >= DensityKernel::tophat && !edge.queries) {
    given.assign(queries, queries + shape.n_queries * shape.n_features);
    edge.queries = given.data();
  }
  std::vector<KernelSum> parts(key_runs * shape.n_queries, KernelSum{lowest, 0, 0});
  parallel_for(query_runs * key_runs, threads, [&](index_t task) {
    const index_t query = task % query_runs * kQueryRun, key = task / query_runs * kKeyRun;
    KernelSumPass<T> pass;
    pass.shape = shape;
    pass.shape.n_queries = std::min(kQueryRun, shape.n_queries - query);
    pass.shape.n_keys = std::min(kKeyRun, shape.n_keys - key);
    pass.queries = queries + query * shape.n_features;
    pass.query_norms = norms.data() + query;
    pass.keys = keys;
    pass.keys.rows =
        static_cast<const char*>(keys.rows) + key * shape.n_features * element_bytes(keys.element);
    pass.edge = edge;
    if (edge.queries) pass.edge.queries += query * shape.n_features;
    if (keys.weights) pass.keys.weights = keys.weights + key;
    pass.sums = parts.data() + task / query_runs * shape.n_queries + query;
    pass.scratch = thread_scratch(kernels().typed<T>().kernel_sums_scratch(pass));
    kernels().typed<T>().kernel_sums(pass);
  });
  for (index_t i = 0; i < shape.n_queries; ++i) {
    sums[i] = parts[i];
    for (index_t run = 1; run < key_runs; ++run) add(sums[i], parts[run * shape.n_queries + i]);
  }
}

#define LSHKIT_INSTANTIATE(T)                                                                     \
  template void kernel_sums(const KernelSumShape&, const T*, const DensityKeys&, KernelSum*, int, \
                            KernelEdge);
LSHKIT_INSTANTIATE(float)
LSHKIT_INSTANTIATE(double)

}  // namespace lshkit

#include "kernels/leave_one_out.hpp"

#include <algorithm>

#include "kernels/kernels.hpp"
#include "parallel.hpp"

namespace lshkit {

template <class T>
void leave_one_out(const LeaveOneOutProblem<T>& problem, int threads) {
  const LeaveOneOutShape& shape = problem.shape;
  const index_t runs = (shape.n_queries + kLeftOutQueries - 1) / kLeftOutQueries;
  parallel_for(runs, threads, [&](index_t run) {
    const index_t first = run * kLeftOutQueries;
    LeaveOneOutPass<T> pass{problem, nullptr};
    pass.problem.shape.n_queries = std::min(kLeftOutQueries, shape.n_queries - first);
    pass.problem.queries += first * shape.n_features;
    pass.problem.own += first;
    pass.problem.nearest += first;
    pass.problem.sums += first * shape.n_scales;
    pass.scratch = thread_scratch(kernels().typed<T>().leave_one_out_scratch(pass));
    kernels().typed<T>().leave_one_out(pass);
  });
}

template void leave_one_out(const LeaveOneOutProblem<float>&, int);
template void leave_one_out(const LeaveOneOutProblem<double>&, int);

}  // namespace lshkit

#pragma once
// What each file of bindings adds to the module.
#include <pybind11/pybind11.h>

#include <chrono>
#include <thread>

namespace lshkit {

namespace py = pybind11;

// Lets other Python threads run while it lives. When the interpreter exits, Python before 3.14 ends
// a daemon thread that asks for the lock by unwinding its stack, which would call std::terminate
// here. That thread stays here instead, as in Python 3.14, until the process has ended.
class WithoutGil {
 public:
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }

 private:
  PyThreadState* state_ = PyEval_SaveThread();
};

void bind_hash(py::module_& module);
void bind_kernel_sums(py::module_& module);
void bind_leave_one_out(py::module_& module);
void bind_binned_hash(py::module_& module);
void bind_buckets(py::module_& module);
void bind_collisions(py::module_& module);
void bind_attention(py::module_& module);
void bind_lsh_attention(py::module_& module);
void bind_soft_hash(py::module_& module);
void bind_soft(py::module_& module);
void bind_weighted_buckets(py::module_& module);
void bind_decoding(py::module_& module);
void bind_code_cache(py::module_& module);
void bind_partition_sums(py::module_& module);
void bind_draw(py::module_& module);
void bind_cells(py::module_& module);
void bind_pair_products(py::module_& module);
void bind_parameters(py::module_& module);

}  // namespace lshkit

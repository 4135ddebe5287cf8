#pragma once
// What each file of bindings adds to the module.
#include <pybind11/pybind11.h>

namespace lshkit {

namespace py = pybind11;

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
void bind_partition_sums(py::module_& module);
void bind_draw(py::module_& module);
void bind_near_kernel_sums(py::module_& module);
void bind_pair_products(py::module_& module);
void bind_parameters(py::module_& module);

}  // namespace lshkit

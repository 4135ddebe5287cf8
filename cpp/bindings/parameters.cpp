// lshkit._C: random numbers of hash functions.
#include "lshkit/cuda/parameters.hpp"

#include "bindings.hpp"
#include "checks.hpp"
#include "cuda_call.hpp"

namespace lshkit {
namespace {

// The seed is an int64 >= 0, on a GPU any 64 bits, or on the CPU two uint64, the lower half first.
class Request {
 public:
  Request(py::handle seed, py::handle out)
      : seed_("seed", seed, kAnyPlace), out_("out", out, kAnyPlace), gpu_({&seed_, &out_}) {
    seed_.require_type({kInt64, kUint64}).require_contiguous();
    const index_t wanted = seed_.type() == kInt64 ? 1 : 2;
    if (seed_.size() != wanted)
      seed_.wrong_value(std::string(wanted == 1 ? "one element of int64 is" : "two of uint64 are") +
                        " wanted, was " + seed_.describe_shape());
    out_.require_type({kFloat32}).require_dims(3, "(sets, rows, columns)");
    out_.require_contiguous().require_writable();
  }
  const TensorView& out() const { return out_; }

  template <class Numbers, class OnCpu, class OnGpu>
  void fill(const Numbers& numbers, const OnCpu& on_cpu, const OnGpu& on_gpu) const {
    if (gpu_.run([&](const auto& queue, void*) {
          seed_.require_type({kInt64});
          on_gpu(queue, seed_.data<const std::int64_t>());
          return index_t(0);
        }))
      return;
    if (numbers.n_sets == 0) return;
    RandomKey key;
    const auto* words = static_cast<const std::uint64_t*>(seed_.data<const void>());
    key.low = words[0];
    if (seed_.type() == kUint64)
      key.high = words[1];
    else if (std::int64_t(words[0]) < 0)
      throw py::value_error("seed must be an integer >= 0, got " +
                            std::to_string(std::int64_t(words[0])));
    WithoutGil without_gil;
    on_cpu(key);
  }

 private:
  TensorView seed_, out_;
  CudaCall gpu_;
};

void make_numbers(py::handle seed, index_t n_angle_rows, py::handle to) {
  const Request request(seed, to);
  const TensorView& out = request.out();
  cuda::RandomNumbers numbers;
  numbers.columns = out.shape(2);
  numbers.n_sets = out.shape(0);
  numbers.n_angle_rows = check_range("n_angle_rows", n_angle_rows, 0, out.shape(1));
  numbers.n_sign_rows = out.shape(1) - numbers.n_angle_rows;
  numbers.out = out.data<float>();
  if (numbers.columns < 64 || (numbers.columns & (numbers.columns - 1)) != 0)
    out.wrong_value("columns as many as a power of two that is at least 64 are wanted, was " +
                    out.describe_shape());
  request.fill(
      numbers, [&](RandomKey key) { random_numbers(key, numbers); },
      [&](const auto& queue, const std::int64_t* seed_there) {
        if (reinterpret_cast<std::uintptr_t>(numbers.out) % 16 != 0)
          out.wrong_value("must be aligned to 16 bytes");
        numbers.seed = seed_there;
        cuda::random_numbers(queue, numbers);
      });
}

void make_normals(py::handle seed, py::handle to) {
  const Request request(seed, to);
  const TensorView& out = request.out();
  cuda::RandomNormals normals;
  normals.n_sets = out.shape(0);
  normals.n_numbers = out.shape(1) * out.shape(2);
  normals.out = out.data<float>();
  request.fill(
      normals, [&](RandomKey key) { random_normals(key, normals); },
      [&](const auto& queue, const std::int64_t* seed_there) {
        normals.seed = seed_there;
        cuda::random_normals(queue, normals);
      });
}

}  // namespace

void bind_parameters(py::module_& module) {
  using namespace pybind11::literals;
  module.def("random_numbers", &make_numbers, "seed"_a, "n_angle_rows"_a, "out"_a);
  module.def("random_normals", &make_normals, "seed"_a, "out"_a);
}

}  // namespace lshkit

#pragma once
// Calls on CUDA tensors: all on one device that the kernels run on, on the current stream, with
// scratch from the allocator of the library that owns the tensors. A build with the emulated
// kernels takes CPU tensors this way where LSHKIT_EMULATE_CUDA=1 is set: the tests of all of it but
// the GPU.
#include <vector>

#include "bindings.hpp"
#include "lshkit/cuda/attention.hpp"
#include "tensor_view.hpp"

namespace lshkit {

bool emulates_cuda();  // in module.cpp

inline const char* cuda_architectures() {
#ifdef LSHKIT_WITH_CUDA
  return cuda::architectures();
#else
  return "";
#endif
}

class CudaCall {
 public:
  // Null views are arguments that were not given.
  explicit CudaCall(const std::vector<const TensorView*>& views) : first_(*views.front()) {
    // Arrays of numpy stay on the CPU, as they do beside a GPU.
    on_ = first_.on_cuda() || (emulates_cuda() && first_.exchange_api());
    for (const TensorView* view : views)
      if (view && (view->device().type != first_.device().type ||
                   (view->on_cuda() && view->device().id != first_.device().id)))
        view->wrong_value("must be on the same device as the first argument, which is on " +
                          describe(first_) + ", was on " + describe(*view));
  }

  // call(queue, scratch) returns how many bytes of scratch it needs; it is called with null first,
  // and only again where it needs some, without the GIL: a launch waits where very many are queued.
  // False: not a call for a GPU.
  template <class Call>
  bool run([[maybe_unused]] const Call& call) const {
#ifdef LSHKIT_WITH_CUDA
    if (!on_) return false;
    cuda::Queue queue;
    queue.device = first_.device().id;
    if (const char* reason = cuda::refusal(queue.device)) first_.wrong_value(reason);
    if (first_.on_cuda()) queue.stream = current_stream();
    const auto queue_work = [&](void* scratch) {
      WithoutGil without_gil;
      return call(queue, scratch);
    };
    const index_t bytes = queue_work(nullptr);
    if (bytes == 0) return true;
    const Scratch scratch(first_, bytes);
    queue_work(scratch.data());
    return true;
#else
    return false;
#endif
  }

 private:
  static std::string describe(const TensorView& view) {
    return view.on_cuda() ? "cuda:" + std::to_string(view.device().id) : "the CPU";
  }

  // Of the library that owns the tensor. Without it there is no telling which stream is current,
  // nor whose memory scratch could be.
  static const dlpack::ExchangeApi& api_of(const TensorView& view) {
    const dlpack::ExchangeApi* api = view.exchange_api();
    if (!api || !api->allocate || !api->current_stream)
      view.wrong_type(
          "a tensor of a library with DLPack's C exchange API is wanted, such as torch 2.10 or "
          "newer");
    return *api;
  }

  void* current_stream() const {
    void* stream = nullptr;
    if (api_of(first_).current_stream(first_.device().type, first_.device().id, &stream) != 0)
      throw py::error_already_set();
    return stream;
  }

  // Memory on the tensors' device. What is queued before it is given back may go on using it: the
  // allocator hands it to later work of the same stream.
  class Scratch {
   public:
    Scratch(const TensorView& like, index_t bytes) {
      dlpack::Tensor prototype{};
      prototype.device = like.device();
      prototype.n_dims = 1;
      prototype.dtype = {dlpack::unsigned_integer, 8, 1};
      prototype.shape = &bytes;
      std::string error;
      if (api_of(like).allocate(&prototype, &memory_, &error,
                                [](void* to, const char*, const char* what) {
                                  *static_cast<std::string*>(to) = what ? what : "";
                                }) != 0)
        throw std::runtime_error("lshkit: " + std::to_string(bytes) +
                                 " bytes of scratch: " + error);
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() {
      if (memory_ && memory_->deleter) memory_->deleter(memory_);
    }
    void* data() const {
      return static_cast<char*>(memory_->tensor.data) + memory_->tensor.byte_offset;
    }

   private:
    dlpack::ManagedTensorVersioned* memory_ = nullptr;
  };

  const TensorView& first_;
  bool on_ = false;
};

}  // namespace lshkit

#pragma once
// The device that work is queued on.
#include "lshkit/cuda/portable.cuh"

namespace lshkit::cuda {

#ifdef __CUDACC__
// The queue's device is the current one while this lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Queue& queue) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != queue.device) check(cudaSetDevice(queue.device), "cudaSetDevice");
    after_ = queue.device;
  }
  ~DeviceGuard() {
    if (before_ != after_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0, after_ = 0;
};
#else
struct DeviceGuard {
  explicit DeviceGuard(const Queue&) {}
};
#endif

}  // namespace lshkit::cuda

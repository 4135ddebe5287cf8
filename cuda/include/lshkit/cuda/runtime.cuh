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
// Of a block, beyond the 48 KB that need no asking.
inline index_t shared_limit(const Queue& queue) {
  int bytes = 0;
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, queue.device),
        "cudaDeviceGetAttribute");
  return bytes;
}
#else
struct DeviceGuard {
  explicit DeviceGuard(const Queue&) {}
};
inline index_t emulated_shared_limit = 227 * 1024;  // a test may have less
inline index_t shared_limit(const Queue&) { return emulated_shared_limit; }
#endif

}  // namespace lshkit::cuda

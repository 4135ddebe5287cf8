// Which GPUs the kernels run on.
#include "lshkit/cuda/attention.hpp"
#include "lshkit/cuda/runtime.cuh"

namespace lshkit::cuda {

#ifdef __CUDACC__

const char* architectures() { return LSHKIT_CUDA_ARCHITECTURES; }

const char* refusal(int device) {
  int major = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
    cudaGetLastError();  // or the next launch would report it
    return "the CUDA driver does not know this device";
  }
  return major < 8 ? "lshkit's CUDA kernels need compute capability 8.0 (sm_80) or newer" : nullptr;
}

#else

const char* architectures() { return "emulated on the CPU"; }
const char* refusal(int) { return nullptr; }

#endif

}  // namespace lshkit::cuda

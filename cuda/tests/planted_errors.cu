// What compute-sanitizer has to find in a kernel of lshkit's name, before it is believed to find
// nothing in the others: a store beyond an array (memcheck), a race in shared memory (racecheck).
//
//   nvcc -o planted planted_errors.cu && compute-sanitizer --tool memcheck ./planted memcheck
#include <cstdio>
#include <cstring>

namespace lshkit::cuda {

constexpr int kThreads = 64;

__global__ void planted_access_kernel(int* x) { x[threadIdx.x] = int(threadIdx.x); }

__global__ void planted_race_kernel(int* x) {
  __shared__ int shared[kThreads];
  shared[threadIdx.x] = int(threadIdx.x);
  // A barrier is missing here: the other half is another warp's.
  x[threadIdx.x] = shared[(threadIdx.x + kThreads / 2) % kThreads];
}

}  // namespace lshkit::cuda

int main(int count, char** arguments) {
  using namespace lshkit::cuda;
  const bool race = count > 1 && std::strcmp(arguments[1], "racecheck") == 0;
  int* x = nullptr;
  const std::size_t room = sizeof(int) * (race ? kThreads : kThreads - 1);
  cudaError_t status = cudaMalloc(&x, room);
  if (status == cudaSuccess) {
    if (race)
      planted_race_kernel<<<1, kThreads>>>(x);
    else
      planted_access_kernel<<<1, kThreads>>>(x);
    status = cudaDeviceSynchronize();
  }
  std::puts(cudaGetErrorString(status));
  return status != cudaSuccess;
}

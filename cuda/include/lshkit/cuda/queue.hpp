#pragma once

namespace lshkit::cuda {

// Where work is queued: a device and a stream of it (a cudaStream_t; null: the default stream).
struct Queue {
  int device = 0;
  void* stream = nullptr;
};

}  // namespace lshkit::cuda

#pragma once
// lshkit/decoding.hpp on a GPU: all pointers are of the device, work is queued on the stream,
// nothing is waited for. Rows are read in whatever floats they are. Outputs are the CPU's up to
// rounding, and the same bits however the rows are divided among calls.
#include "lshkit/cuda/queue.hpp"
#include "lshkit/decoding.hpp"

namespace lshkit::cuda {

struct DecodingRows {
  index_t n_queries = 0, n_keys = 0, n_features = 0;
  Input<float> query, key, value;  // see DecodingInputs
  Mask key_mask;
  bool causal = false;
};

// Returns the bytes of scratch, all that it does where scratch is null.
index_t decode(const Queue& queue, const DecodingTables& tables, const HashFunctions& functions,
               const DecodingProbes& probes, Normalize normalize, const DecodingRows& in,
               Output<float> out, void* scratch);

}  // namespace lshkit::cuda

// The kernels and what queues them, as C++.
#include "../../src/attention.cu"
#include "../../src/bucket_sum.cu"
#include "../../src/bucket_table.cu"
#include "../../src/decoding.cu"
#include "../../src/parameters.cu"
#include "../../src/runtime.cu"

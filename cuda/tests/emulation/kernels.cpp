// The kernels and what queues them, as C++.
#include "../../src/attention.cu"
#include "../../src/bucket_sum.cu"
#include "../../src/runtime.cu"
#include "../../src/soft_attention.cu"
#include "../../src/soft_hash.cu"
#include "../../src/weighted_bucket_sum.cu"

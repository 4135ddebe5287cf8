#pragma once
// The probes of soft codes: from margins to weights, and from the gradient of weights to that of
// margins and of the sharpness. Bound: device memory, each number read and written once.
#include "lshkit/cuda/elements.cuh"
#include "lshkit/soft_hash.hpp"

namespace lshkit::cuda {

constexpr int kProbeThreads = 256, kProbesOfThread = 4;
constexpr int kProbesOfBlock = kProbeThreads * kProbesOfThread;

// Of some heads of queries, each with the rows of its side; soft codes by row of that side's heads
// in turn. Probe arrays in any layout whose probes are side by side.
struct SoftProbes {
  Side side;
  index_t query_heads = 1;
  index_t first_head = 0, heads = 0;  // of queries, of all sequences of a batch in turn
  SoftCodes soft;
  index_t n_hashes = 1, n_probes = 1;
  int n_selected = 0;
  const float* sharpness = nullptr;
  index_t sharpness_stride = 0, heads_per_sharpness = 1;  // heads of queries
  const std::uint8_t* valid = nullptr;  // by row of this side; others have weights 0, null: all
  index_t head_stride = 0, row_stride = 0, hash_stride = 0;
  void* codes = nullptr;  // as wide as the own codes
  float* weights = nullptr;
  const float* weight_grads = nullptr;
  float* margin_grads = nullptr;  // (heads of queries from 0 on, rows, n_hashes, n_selected)

  // Rows of this side's heads in turn.
  __device__ index_t source_row(index_t head, index_t row) const {
    const index_t flat = head / query_heads * side.heads + head % query_heads / side.group;
    return flat * side.n_rows + row;
  }
  __device__ float sharpness_of(index_t head) const {
    return sharpness[head % query_heads / heads_per_sharpness * sharpness_stride];
  }
};

// Weight of probe a of n, from r margins: the product of the exponentials of its flips over the sum
// of those products, which for a power of two is a product too.
__device__ inline float probe_weight(const float* margins, float sharpness, std::uint32_t a,
                                     std::uint32_t n, int r) {
  float own = 1, sum = 0, all = 1;
  const bool every = n == 1u << r;
  for (int k = 0; k < r; ++k) {
    const float e = expf(-2 * sharpness * margins[k]), flipped = a >> k & 1 ? e : 1;
    if (every) {
      own *= flipped / (1 + e);
      continue;
    }
    own *= flipped;
    if (n >> k & 1) sum = all + e * sum;  // of the probes below the k + 1 lowest bits of n
    all *= 1 + e;
  }
  return every ? own : own / sum;
}

LSHKIT_KERNEL void __launch_bounds__(kProbeThreads) expand_probes_kernel(SoftProbes p) {
  const index_t probes = p.side.n_rows * p.n_probes;
  const index_t blocks = ceil_div(probes, kProbesOfBlock);
  const index_t first = block_index() % blocks * kProbesOfBlock;
  const index_t hash = block_index() / blocks % p.n_hashes;
  const index_t local = block_index() / blocks / p.n_hashes, head = p.first_head + local;
  const index_t first_row = first / p.n_probes;
  const std::uint32_t first_probe = std::uint32_t(first % p.n_probes);
  const std::uint32_t n = std::uint32_t(p.n_probes);
  const float sharpness = p.sharpness_of(head);
  for (int u = thread_index(); u < kProbesOfBlock && first + u < probes; u += kProbeThreads) {
    const std::uint32_t step = (first_probe + u) / n, a = first_probe + u - step * n;
    const index_t row = first_row + step, source = p.source_row(head, row);
    const index_t at = source * p.n_hashes + hash;
    const std::uint8_t* const bits = p.soft.bits + at * p.n_selected;
    std::uint32_t code = load_code(p.soft.codes, p.soft.bytes, at);
    for (int k = 0; k < p.n_selected; ++k) code ^= (a >> k & 1) << (bits[k] & 15);
    const index_t to = local * p.head_stride + row * p.row_stride + hash * p.hash_stride + a;
    if (p.soft.bytes == 1)
      static_cast<std::uint8_t*>(p.codes)[to] = std::uint8_t(code);
    else
      static_cast<std::uint16_t*>(p.codes)[to] = std::uint16_t(code);
    p.weights[to] = p.valid && !p.valid[source] ? 0
                                                : probe_weight(p.soft.margins + at * p.n_selected,
                                                               sharpness, a, n, p.n_selected);
  }
}

// d loss / d u_k, u = 2 sharpness margin, is the sum over the probes a with bit k of w_a (s - g_a),
// s = sum of w g. `lanes` lanes a row and hash, a power of two.
LSHKIT_KERNEL void __launch_bounds__(kProbeThreads) reduce_probes_kernel(SoftProbes p, int lanes) {
  const int rows = kProbeThreads / lanes;
  const index_t blocks = ceil_div(p.side.n_rows, rows);
  const index_t row = block_index() % blocks * rows + thread_index() / lanes;
  const index_t hash = block_index() / blocks % p.n_hashes;
  const index_t local = block_index() / blocks / p.n_hashes, head = p.first_head + local;
  const int first = lane_index() % lanes;
  const bool has = row < p.side.n_rows;
  const bool valid = has && (!p.valid || p.valid[p.source_row(head, row)]);
  const index_t from = local * p.head_stride + row * p.row_stride + hash * p.hash_stride;
  const auto total = [&](float x) {
    for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
    return x;
  };
  float s = 0;
  for (index_t a = first; valid && a < p.n_probes; a += lanes)
    s += p.weights[from + a] * p.weight_grads[from + a];
  s = total(s);
  const float twice = 2 * p.sharpness_of(head);
  float* const to =
      p.margin_grads + ((head * p.side.n_rows + row) * p.n_hashes + hash) * p.n_selected;
  for (int k = 0; k < p.n_selected; ++k) {
    float sum = 0;
    for (index_t a = first; valid && a < p.n_probes; a += lanes)
      if (a >> k & 1) sum += p.weights[from + a] * (s - p.weight_grads[from + a]);
    sum = total(sum);
    if (has && first == 0) to[k] = sum * twice;
  }
}

// The gradient of the sharpness of every head of queries of every sequence: the sum of margin times
// gradient of both sides over the sharpness. A block each, in the same order at every run.
constexpr int kSharpnessThreads = 512;
struct SharpnessGradient {
  SoftProbes sides[2];   // n_selected = 0: nothing
  float* out = nullptr;  // (sequences, heads of queries)
};
LSHKIT_KERNEL void __launch_bounds__(kSharpnessThreads) sharpness_kernel(SharpnessGradient g) {
  LSHKIT_SHARED_MEMORY(memory);
  double* const sums = reinterpret_cast<double*>(memory);  // (warps)
  double sum = 0;
  for (int i = 0; i < 2; ++i) {
    const SoftProbes& p = g.sides[i];
    if (p.n_selected == 0) continue;
    const Span span = span_of(p.side, p.query_heads, block_index());
    const index_t of_row = p.n_hashes * p.n_selected, count = span.count * of_row;
    const float* const grads = p.margin_grads + span.owned * of_row;
    const float* const margins = p.soft.margins + span.flat * of_row;
    for (index_t at = thread_index(); at < count; at += kSharpnessThreads)
      if (grads[at] != 0) sum += double(grads[at]) * margins[at];  // no NaN of an invalid row
  }
  sum = warp_sum(sum);
  if (lane_index() == 0) sums[warp_index()] = sum;
  __syncthreads();
  if (thread_index() != 0) return;
  for (int w = 1; w < kSharpnessThreads / kWarp; ++w) sum += sums[w];
  const SoftProbes& p = g.sides[0];
  g.out[block_index()] = float(sum / p.sharpness_of(block_index()));
}

inline void expand_probes(const Queue& queue, const SoftProbes& p) {
  launch(queue, "expand_probes", expand_probes_kernel,
         p.heads * p.n_hashes * ceil_div(p.side.n_rows * p.n_probes, kProbesOfBlock), kProbeThreads,
         0, p);
}
inline void reduce_probes(const Queue& queue, const SoftProbes& p) {
  int lanes = 1;
  while (lanes < kWarp && lanes < p.n_probes) lanes *= 2;
  launch(queue, "reduce_probes", reduce_probes_kernel,
         p.heads * p.n_hashes * ceil_div(p.side.n_rows, kProbeThreads / lanes), kProbeThreads, 0, p,
         lanes);
}
inline void sharpness_gradient(const Queue& queue, const SharpnessGradient& g, index_t tasks) {
  launch(queue, "sharpness_gradient", sharpness_kernel, tasks, kSharpnessThreads,
         sizeof(double) * (kSharpnessThreads / kWarp), g);
}

}  // namespace lshkit::cuda

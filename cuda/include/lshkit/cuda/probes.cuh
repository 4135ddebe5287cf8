#pragma once
// The probes of soft codes: from margins to weights, and from the gradient of weights to that of
// margins and of the sharpness. Bound: device memory, each number read and written once.
//
// Soft codes lie row by row, 32 hashes side by side, their probes hash by hash: a block takes some
// rows of some hashes through shared memory, so that both are read and written in whole sectors.
// Of up to 16 probes a thread makes all of a row and hash: 2^R - 1 products and a division.
#include "lshkit/cuda/margins.cuh"

namespace lshkit::cuda {

constexpr int kProbeThreads = 256, kProbeRows = 32, kProbeMargins = 128;
constexpr int kProbeWarps = kProbeThreads / kWarp;
constexpr int kMostInThread = 4;  // selected bits

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

  // Rows of this side's heads in turn. Heads are fewer than 2^31: each has blocks of its own.
  __device__ index_t source_row(index_t head, index_t row) const {
    const std::uint32_t sequence = std::uint32_t(head) / std::uint32_t(query_heads);
    const std::uint32_t own = std::uint32_t(head) - sequence * std::uint32_t(query_heads);
    return (sequence * side.heads + own / std::uint32_t(side.group)) * side.n_rows + row;
  }
  __device__ float sharpness_of(index_t head) const {
    if (sharpness_stride == 0) return *sharpness;
    const std::uint32_t own = std::uint32_t(head) % std::uint32_t(query_heads);
    return sharpness[own / std::uint32_t(heads_per_sharpness) * sharpness_stride];
  }
};

// Weight of probe a of n, from r margins: the product of the exponentials of its flips over the sum
// of those products, which for a power of two is a product too.
__device__ inline float probe_weight(const float* margins, float sharpness, std::uint32_t a,
                                     std::uint32_t n, int r) {
  float own = 1, sum = 0, all = 1;
  const bool every = n == 1u << r;
  for (int k = 0; k < r; ++k) {
    const float e = expf(-2 * sharpness * size_of_margin(margins[k])), flipped = a >> k & 1 ? e : 1;
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

// A block's share: kProbeRows rows of a head and some of their hashes, margins in rows of an odd
// number.
struct ProbeTile {
  index_t local, head, first_row, first_hash;
  int rows, hashes, margins, margin_stride;

  __device__ ProbeTile(const SoftProbes& p, int most_hashes) {
    const std::uint32_t block = std::uint32_t(block_index());
    const std::uint32_t tiles = std::uint32_t(ceil_div(p.side.n_rows, kProbeRows));
    const std::uint32_t rest = block / tiles;
    first_row = index_t(block - rest * tiles) * kProbeRows;
    local = rest;
    first_hash = 0;
    if (p.n_hashes > most_hashes) {
      const auto chunks = std::uint32_t(p.n_hashes - 1) / std::uint32_t(most_hashes) + 1;
      local = rest / chunks;
      first_hash = (rest - local * chunks) * most_hashes;
    }
    head = p.first_head + local;
    rows = int(least(kProbeRows, p.side.n_rows - first_row));
    hashes = int(least(most_hashes, p.n_hashes - first_hash));
    margins = hashes * p.n_selected;
    margin_stride = margins | 1;
  }
  // body(row, i) for the `count` numbers of each row that are side by side.
  template <class Body>
  __device__ void each(int count, const Body& body) const {
    for (int i = thread_index(); i < rows * count; i += kProbeThreads)
      body(i / count, i - i / count * count);
  }
  __device__ index_t probe_at(const SoftProbes& p, int row, int hash) const {
    return local * p.head_stride + (first_row + row) * p.row_stride +
           (first_hash + hash) * p.hash_stride;
  }
};
// So many hashes that their margins have room, and the bytes of a block.
inline int hashes_of_probe_tile(const SoftProbes& p) {
  const index_t room = kProbeMargins / (p.n_selected > 0 ? p.n_selected : 1);
  return int(least(least(room, 32), p.n_hashes > 0 ? p.n_hashes : 1));
}
inline std::size_t probe_tile_bytes(const SoftProbes& p, int hashes) {
  const index_t margins = index_t(hashes) * p.n_selected;
  return std::size_t(kProbeRows * ((margins | 1) * sizeof(float) + hashes * sizeof(std::uint16_t)));
}

// What a pair of a row and hash has R of, side by side.
template <int R, class Word>
__device__ __forceinline__ void load_selected(const Word* from, Word* to) {
  if constexpr ((R & (R - 1)) == 0) {
    Words<Word, R> words;
    load_words(from, words);
    LSHKIT_UNROLL
    for (int k = 0; k < R; ++k) to[k] = words.word[k];
  } else {
    LSHKIT_UNROLL
    for (int k = 0; k < R; ++k) to[k] = from[k];
  }
}
// Numbers of the probes of a pair, n <= 2^R of them; `whole`: 2^R, 16 bytes at a time if so many.
template <int R>
__device__ __forceinline__ void load_probes(const float* from, std::uint32_t n, bool whole,
                                            float* to) {
  constexpr int kEach = R < 2 ? 2 : 4;
  LSHKIT_UNROLL
  for (int a = 0; a < 1 << R; a += kEach) {
    if (whole) {
      load_selected<kEach>(from + a, to + a);
      continue;
    }
    LSHKIT_UNROLL
    for (int i = a; i < a + kEach; ++i) to[i] = i < int(n) ? from[i] : 0;
  }
}
template <int R, class Word>
__device__ __forceinline__ void store_probes(const Word* from, std::uint32_t n, bool whole,
                                             Word* to) {
  constexpr int kEach = R < 2 ? 2 : 4;
  LSHKIT_UNROLL
  for (int a = 0; a < 1 << R; a += kEach) {
    if (whole) {
      Words<Word, kEach> words;
      LSHKIT_UNROLL
      for (int i = 0; i < kEach; ++i) words.word[i] = from[a + i];
      store_words(to + a, words);
      continue;
    }
    LSHKIT_UNROLL
    for (int i = a; i < a + kEach; ++i)
      if (i < int(n)) to[i] = from[i];
  }
}

// Rows of hashes in a lane each to hashes of rows in a lane each.
template <int R>
__global__ void __launch_bounds__(kProbeThreads, 5)
    expand_few_probes_kernel(SoftProbes p, int most_hashes, bool whole) {
  LSHKIT_SHARED_MEMORY(memory);
  constexpr int kProbes = 1 << R, kSteps = kProbeRows / kProbeWarps;
  static_assert(kProbeRows == kWarp, "a lane has a row");
  const ProbeTile t(p, most_hashes);
  const int lane = lane_index(), warp = warp_index(), words_stride = t.hashes | 1;
  float* const margins = reinterpret_cast<float*>(memory);  // (rows, margin_stride)
  // (rows, words_stride): the code, and four bits for each selected one.
  std::uint32_t* const words =
      reinterpret_cast<std::uint32_t*>(margins + kProbeRows * t.margin_stride);
  const index_t source = p.source_row(t.head, t.first_row);
  float margin[kSteps][R];
  std::uint32_t word[kSteps];
  LSHKIT_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    const int row = warp + step * kProbeWarps;
    if (row >= t.rows || lane >= t.hashes) continue;
    const index_t pair = (source + row) * p.n_hashes + t.first_hash + lane;
    load_selected<R>(p.soft.margins + pair * R, margin[step]);
    word[step] = load_code(p.soft.codes, p.soft.bytes, pair);
    LSHKIT_UNROLL
    for (int k = 0; k < R; ++k) {
      word[step] |= std::uint32_t(bit_of_margin(margin[step][k])) << (16 + 4 * k);
      margin[step][k] = size_of_margin(margin[step][k]);
    }
  }
  LSHKIT_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    const int row = warp + step * kProbeWarps;
    if (row >= t.rows || lane >= t.hashes) continue;
    words[row * words_stride + lane] = word[step];
    LSHKIT_UNROLL
    for (int k = 0; k < R; ++k) margins[row * t.margin_stride + lane * R + k] = margin[step][k];
  }
  __syncthreads();
  if (lane >= t.rows) return;
  const bool valid = !p.valid || p.valid[source + lane];
  const float steepness = -2 * p.sharpness_of(t.head);
  const std::uint32_t n = std::uint32_t(p.n_probes);
  for (int hash = warp; hash < t.hashes; hash += kProbeWarps) {
    const std::uint32_t own = words[lane * words_stride + hash];
    float weight[kProbes], all = 1, sum = 0;
    std::uint32_t code[kProbes];
    weight[0] = 1;
    code[0] = own & 0xffff;
    LSHKIT_UNROLL
    for (int k = 0; k < R; ++k) {
      const float e = expf(steepness * margins[lane * t.margin_stride + hash * R + k]);
      if (n >> k & 1) sum = all + e * sum;  // of the probes below the k + 1 lowest bits of n
      all *= 1 + e;
      LSHKIT_UNROLL
      for (int a = 1; a < kProbes; ++a)
        if (a >> k == 1) {
          weight[a] = weight[a ^ 1 << k] * e;
          code[a] = code[a ^ 1 << k] ^ 1u << (own >> (16 + 4 * k) & 15);
        }
    }
    const float scale = valid ? 1 / (n == kProbes ? all : sum) : 0;
    LSHKIT_UNROLL
    for (int a = 0; a < kProbes; ++a) weight[a] = valid ? weight[a] * scale : 0;
    const index_t to = t.probe_at(p, lane, hash);
    store_probes<R>(weight, n, whole, p.weights + to);
    if (p.soft.bytes == 1) {
      std::uint8_t bytes[kProbes];
      LSHKIT_UNROLL
      for (int a = 0; a < kProbes; ++a) bytes[a] = std::uint8_t(code[a]);
      store_probes<R>(bytes, n, whole, static_cast<std::uint8_t*>(p.codes) + to);
    } else {
      std::uint16_t shorts[kProbes];
      LSHKIT_UNROLL
      for (int a = 0; a < kProbes; ++a) shorts[a] = std::uint16_t(code[a]);
      store_probes<R>(shorts, n, whole, static_cast<std::uint16_t*>(p.codes) + to);
    }
  }
}

// Of more probes, or one.
LSHKIT_KERNEL void __launch_bounds__(kProbeThreads)
    expand_probes_kernel(SoftProbes p, int most_hashes) {
  LSHKIT_SHARED_MEMORY(memory);
  const ProbeTile t(p, most_hashes);
  float* const margins = reinterpret_cast<float*>(memory);  // (rows, margin_stride)
  std::uint16_t* const codes =
      reinterpret_cast<std::uint16_t*>(margins + kProbeRows * t.margin_stride);  // (rows, hashes)
  const index_t source = p.source_row(t.head, t.first_row);
  const index_t from = source * p.n_hashes + t.first_hash;
  t.each(t.hashes, [&](int row, int i) {
    codes[row * t.hashes + i] =
        std::uint16_t(load_code(p.soft.codes, p.soft.bytes, from + row * p.n_hashes + i));
  });
  t.each(t.margins, [&](int row, int i) {
    margins[row * t.margin_stride + i] =
        p.soft.margins[(from + row * p.n_hashes) * p.n_selected + i];
  });
  __syncthreads();
  const std::uint32_t n = std::uint32_t(p.n_probes);
  const float sharpness = p.sharpness_of(t.head);
  for (int hash = warp_index(); hash < t.hashes; hash += kProbeThreads / kWarp)
    for (index_t e = lane_index(); e < t.rows * p.n_probes; e += kWarp) {
      const int row = int(e / n);
      const std::uint32_t a = std::uint32_t(e - index_t(row) * n);
      std::uint32_t code = codes[row * t.hashes + hash];
      const float* const own = margins + row * t.margin_stride + hash * p.n_selected;
      for (int k = 0; k < p.n_selected; ++k) code ^= (a >> k & 1) << bit_of_margin(own[k]);
      const index_t to = t.probe_at(p, row, hash) + a;
      if (p.soft.bytes == 1)
        static_cast<std::uint8_t*>(p.codes)[to] = std::uint8_t(code);
      else
        static_cast<std::uint16_t*>(p.codes)[to] = std::uint16_t(code);
      p.weights[to] =
          p.valid && !p.valid[source + row] ? 0 : probe_weight(own, sharpness, a, n, p.n_selected);
    }
}

// d loss / d u_k, u = 2 sharpness margin, is the sum over the probes a with bit k of w_a (s - g_a),
// s = sum of w g.
template <int R>
__global__ void __launch_bounds__(kProbeThreads, 5)
    reduce_few_probes_kernel(SoftProbes p, int most_hashes, bool whole) {
  LSHKIT_SHARED_MEMORY(memory);
  constexpr int kProbes = 1 << R;
  const ProbeTile t(p, most_hashes);
  float* const margins = reinterpret_cast<float*>(memory);  // (rows, margin_stride)
  const int lane = lane_index();
  const bool valid =
      lane < t.rows && (!p.valid || p.valid[p.source_row(t.head, t.first_row + lane)]);
  const float twice = 2 * p.sharpness_of(t.head);
  const std::uint32_t n = std::uint32_t(p.n_probes);
  for (int hash = warp_index(); hash < t.hashes; hash += kProbeWarps) {
    float weight[kProbes] = {}, grad[kProbes] = {}, s = 0;
    if (valid) {
      const index_t from = t.probe_at(p, lane, hash);
      load_probes<R>(p.weights + from, n, whole, weight);
      load_probes<R>(p.weight_grads + from, n, whole, grad);
    }
    LSHKIT_UNROLL
    for (int a = 0; a < kProbes; ++a) s += weight[a] * grad[a];
    LSHKIT_UNROLL
    for (int a = 0; a < kProbes; ++a) weight[a] *= s - grad[a];
    LSHKIT_UNROLL
    for (int k = 0; k < R; ++k) {
      float sum = 0;
      LSHKIT_UNROLL
      for (int a = 0; a < kProbes; ++a)
        if (a >> k & 1) sum += weight[a];
      margins[lane * t.margin_stride + hash * R + k] = sum * twice;
    }
  }
  __syncthreads();
  const index_t row_stride = p.n_hashes * R;
  float* const to =
      p.margin_grads + (t.head * p.side.n_rows + t.first_row) * row_stride + t.first_hash * R;
  for (int row = warp_index(); row < t.rows; row += kProbeWarps)
    for (int i = lane; i < t.margins; i += kWarp)
      to[row * row_stride + i] = margins[row * t.margin_stride + i];
}

// Of more probes: `lanes` lanes a row and hash, a power of two.
LSHKIT_KERNEL void __launch_bounds__(kProbeThreads, 4)
    reduce_probes_kernel(SoftProbes p, int most_hashes, int lanes) {
  LSHKIT_SHARED_MEMORY(memory);
  const ProbeTile t(p, most_hashes);
  float* const margins = reinterpret_cast<float*>(memory);  // (rows, margin_stride)
  const int first = lane_index() % lanes;
  const float twice = 2 * p.sharpness_of(t.head);
  const auto total = [&](float x) {
    for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
    return x;
  };
  for (int hash = warp_index(); hash < t.hashes; hash += kProbeThreads / kWarp)
    for (int pass = 0; pass < t.rows; pass += kWarp / lanes) {
      const int row = pass + lane_index() / lanes;
      const bool has = row < t.rows;
      const bool valid = has && (!p.valid || p.valid[p.source_row(t.head, t.first_row + row)]);
      const index_t from = t.probe_at(p, row, hash);
      float s = 0;
      for (index_t a = first; valid && a < p.n_probes; a += lanes)
        s += p.weights[from + a] * p.weight_grads[from + a];
      s = total(s);
      for (int k = 0; k < p.n_selected; ++k) {
        float sum = 0;
        for (index_t a = first; valid && a < p.n_probes; a += lanes)
          if (a >> k & 1) sum += p.weights[from + a] * (s - p.weight_grads[from + a]);
        sum = total(sum);
        if (has && first == 0)
          margins[row * t.margin_stride + hash * p.n_selected + k] = sum * twice;
      }
    }
  __syncthreads();
  float* const to =
      p.margin_grads +
      ((t.head * p.side.n_rows + t.first_row) * p.n_hashes + t.first_hash) * p.n_selected;
  t.each(t.margins, [&](int row, int i) {
    to[row * p.n_hashes * p.n_selected + i] = margins[row * t.margin_stride + i];
  });
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
      if (grads[at] != 0)  // no NaN of an invalid row
        sum += double(grads[at]) * size_of_margin(margins[at]);
  }
  sum = warp_sum(sum);
  if (lane_index() == 0) sums[warp_index()] = sum;
  __syncthreads();
  if (thread_index() != 0) return;
  for (int w = 1; w < kSharpnessThreads / kWarp; ++w) sum += sums[w];
  const SoftProbes& p = g.sides[0];
  g.out[block_index()] = float(sum / p.sharpness_of(block_index()));
}

inline index_t probe_blocks(const SoftProbes& p, int hashes) {
  return p.heads * ceil_div(p.n_hashes, hashes) * ceil_div(p.side.n_rows, kProbeRows);
}
// call(std::integral_constant of the selected bits) where a thread makes the probes of a pair.
template <class Call>
bool with_few_probes(const SoftProbes& p, const Call& call) {
  const int r = p.n_selected;
  if (r < 1 || r > kMostInThread || !is_aligned(p.soft.margins, r == 3 ? 4 : 4 * r)) return false;
  if (r == 1) call(std::integral_constant<int, 1>{});
  if (r == 2) call(std::integral_constant<int, 2>{});
  if (r == 3) call(std::integral_constant<int, 3>{});
  if (r == 4) call(std::integral_constant<int, 4>{});
  return true;
}
// Are a pair's probes 2^R, and all of them where they can be moved together?
inline bool whole_probes(const SoftProbes& p) {
  const index_t n = p.n_probes;
  return n == index_t(1) << p.n_selected && p.head_stride % n == 0 && p.row_stride % n == 0 &&
         p.hash_stride % n == 0 && is_aligned(p.weights, 16) && is_aligned(p.weight_grads, 16) &&
         is_aligned(p.codes, 8);
}
inline void expand_probes(const Queue& queue, const SoftProbes& p) {
  const int hashes = hashes_of_probe_tile(p);
  const bool few = with_few_probes(p, [&](auto r) {
    constexpr int R = decltype(r)::value;
    const std::size_t bytes = sizeof(float) * kProbeRows * (((hashes * R) | 1) + (hashes | 1));
    launch(queue, "expand_probes", expand_few_probes_kernel<R>, probe_blocks(p, hashes),
           kProbeThreads, bytes, p, hashes, whole_probes(p));
  });
  if (few) return;
  launch(queue, "expand_probes", expand_probes_kernel, probe_blocks(p, hashes), kProbeThreads,
         probe_tile_bytes(p, hashes), p, hashes);
}
inline void reduce_probes(const Queue& queue, const SoftProbes& p) {
  const int hashes = hashes_of_probe_tile(p);
  const bool few = with_few_probes(p, [&](auto r) {
    constexpr int R = decltype(r)::value;
    const std::size_t bytes = sizeof(float) * kProbeRows * ((hashes * R) | 1);
    launch(queue, "reduce_probes", reduce_few_probes_kernel<R>, probe_blocks(p, hashes),
           kProbeThreads, bytes, p, hashes, whole_probes(p));
  });
  if (few) return;
  int lanes = 1;
  while (lanes < kWarp && lanes < p.n_probes) lanes *= 2;
  launch(queue, "reduce_probes", reduce_probes_kernel, probe_blocks(p, hashes), kProbeThreads,
         probe_tile_bytes(p, hashes), p, hashes, lanes);
}
inline void sharpness_gradient(const Queue& queue, const SharpnessGradient& g, index_t tasks) {
  launch(queue, "sharpness_gradient", sharpness_kernel, tasks, kSharpnessThreads,
         sizeof(double) * (kSharpnessThreads / kWarp), g);
}

}  // namespace lshkit::cuda

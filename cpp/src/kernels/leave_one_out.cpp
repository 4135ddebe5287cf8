// Leave-one-out sums, a panel of keys at a time: the distances of a run of queries are one matrix
// product (L1: a loop of absolute differences), and go through the exponential once for every
// bandwidth. Terms are relative to the nearest key so far, which is nearest at every bandwidth: one
// shift serves all. A bandwidth takes some 20 instructions a register of pairs, as long as the
// product takes for about 20 features. A panel none of whose terms float32 would hold
// beside the nearest key's is left out for that bandwidth. That pairs are symmetric is not used: a
// pair would then write to sums of two queries, which belong to different threads.
#include "leave_one_out.hpp"

#include "collision_probability.hpp"
#include "exponential.hpp"
#include "kernels.hpp"
#include "matmul.hpp"
#include "simd.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

constexpr index_t kPanelKeys = 128;
constexpr float kInfinity = __builtin_inff();
constexpr float kLargestExponent = 86.6f;  // of exp_minus: below, nothing is left of a term
constexpr float kLeastScale = 1e-30f, kLargestScale = 1e30f;  // kept from 0 and infinity

template <class T>
struct Buffers {
  T *values, *norms, *tile;    // (n_features, kPanelKeys), (kPanelKeys), (queries, kPanelKeys)
  T *query_norms, *exponents;  // (queries), (kPanelKeys)
  float *weights, *above;      // (kPanelKeys) both
  float* scales;               // (n_scales)
  index_t bytes;

  Buffers(void* memory, const LeaveOneOutShape& shape) {
    Cut cut{memory};
    values = cut.take<T>(kPanelKeys * shape.n_features);
    norms = cut.take<T>(kPanelKeys);
    tile = cut.take<T>(shape.n_queries * kPanelKeys);
    query_norms = cut.take<T>(shape.n_queries);
    exponents = cut.take<T>(kPanelKeys);
    weights = cut.take<float>(kPanelKeys);
    above = cut.take<float>(kPanelKeys);
    scales = cut.take<float>(shape.n_scales);
    bytes = cut.used;
  }
};

// The keys [first, first + count) with keys in lanes, half their squared norms, and their weights.
template <class T>
LSHKIT_NOINLINE void pack_keys(const LeaveOneOutProblem<T>& p, index_t first, index_t count,
                               const Buffers<T>& buffers) {
  const index_t d = p.shape.n_features;
  pack_transposed<T>(count, d, kPanelKeys, {p.keys + first * d, d}, T(1), nullptr, buffers.values);
  for (index_t j = 0; j < kPanelKeys; j += kLanes<T>) {
    Vec<T> sum{};
    for (index_t c = 0; c < d; ++c) {
      const Vec<T> v = load(buffers.values + c * kPanelKeys + j);
      sum += v * v;
    }
    store(buffers.norms + j, sum * T(0.5));
  }
  for (index_t j = 0; j < kPanelKeys; ++j)
    buffers.weights[j] = j >= count ? 0 : p.weights ? float(p.weights[first + j]) : 1;
}

// tile(q, j) = L1 distance of query q and key j, four queries by two registers at a time.
template <class T>
LSHKIT_NOINLINE void absolute_differences(const LeaveOneOutProblem<T>& p,
                                          const Buffers<T>& buffers) {
  constexpr int n = kLanes<T>, kRows = 4, kColumns = 2;
  const index_t d = p.shape.n_features;
  for (index_t first = 0; first < p.shape.n_queries; first += kRows) {
    const T* row[kRows];
    LSHKIT_UNROLL
    for (int q = 0; q < kRows; ++q)
      row[q] = p.queries + smaller(first + q, p.shape.n_queries - 1) * d;
    for (index_t j = 0; j < kPanelKeys; j += kColumns * n) {
      Vec<T> sum[kRows][kColumns] = {};
      for (index_t c = 0; c < d; ++c) {
        const T* v = buffers.values + c * kPanelKeys + j;
        LSHKIT_UNROLL
        for (int q = 0; q < kRows; ++q) LSHKIT_UNROLL
        for (int i = 0; i < kColumns; ++i) {
          const Vec<T> difference = load(v + i * n) - row[q][c];
          sum[q][i] += select(difference < T(0), -difference, difference);
        }
      }
      for (int q = 0; q < smaller(kRows, p.shape.n_queries - first); ++q) LSHKIT_UNROLL
      for (int i = 0; i < kColumns; ++i)
        store(buffers.tile + (first + q) * kPanelKeys + j + i * n, sum[q][i]);
    }
  }
}

// The exponents u of query q and the panel's keys; the least of them.
template <class T>
LSHKIT_NOINLINE T find_exponents(const LeaveOneOutProblem<T>& p, index_t q, index_t first,
                                 index_t count, const Buffers<T>& buffers) {
  constexpr int n = kLanes<T>;
  const T* tile = buffers.tile + q * kPanelKeys;
  T* u = buffers.exponents;
  for (index_t j = 0; j < kPanelKeys; j += n) {
    Vec<T> v = load(tile + j);
    if (p.shape.kernel != DensityKernel::laplacian) {
      v = buffers.query_norms[q] + load(buffers.norms + j) - v;
      v = select(v > T(0), v, Vec<T>{});
      if (p.shape.kernel == DensityKernel::exponential) v = root(v + v);
    }
    store(u + j, v);
  }
  for (index_t j = count; j < kPanelKeys; ++j) u[j] = T(kInfinity);
  const index_t own = p.own[q] - first;
  if (own >= 0 && own < count) u[own] = T(kInfinity);
  Vec<T> least = load(u);
  for (index_t j = n; j < kPanelKeys; j += n) {
    const Vec<T> v = load(u + j);
    least = select(v < least, v, least);
  }
  T smallest = least[0];
  for (int i = 1; i < n; ++i) smallest = least[i] < smallest ? least[i] : smallest;
  return smallest;
}

// Until the last panel a sum holds total and total of s (u - nearest), both over terms relative to
// the nearest key: where a nearer one comes, (t, e) becomes f (t, e + s change t).
template <class T>
LSHKIT_NOINLINE void move_to(double nearer, const LeaveOneOutProblem<T>& p, index_t q) {
  const double change = p.nearest[q] - nearer;
  p.nearest[q] = nearer;
  LeftOutSum* sums = p.sums + q * p.shape.n_scales;
  for (index_t b = 0; b < p.shape.n_scales; ++b) {
    double &total = sums[b].log_sum, &exponents = sums[b].mean_exponent;
    if (total == 0) continue;
    const double moved = p.scales[b] * change, factor = __builtin_exp(-moved);
    exponents = factor > 0 ? factor * (exponents + moved * total) : 0;
    total *= factor;
  }
}

template <class T>
LSHKIT_NOINLINE void add_terms(const LeaveOneOutProblem<T>& p, index_t q, T least,
                               const Buffers<T>& buffers) {
  constexpr int n = kLanes<float>;
  const T nearest = T(p.nearest[q]);
  float* above = buffers.above;
  for (index_t j = 0; j < kPanelKeys; ++j) above[j] = float(buffers.exponents[j] - nearest);
  const float nearest_above = float(least - nearest);
  LeftOutSum* sums = p.sums + q * p.shape.n_scales;
  for (index_t b = 0; b < p.shape.n_scales; ++b) {
    const float scale = buffers.scales[b];
    if (scale * nearest_above > kLargestExponent) continue;
    const Vec<float> largest = broadcast(kLargestExponent);
    Vec<float> total{}, exponents{};
    LSHKIT_UNROLL
    for (index_t j = 0; j < kPanelKeys; j += n) {
      Vec<float> x = load(above + j) * scale;
      x = select(x > largest, largest, x);
      const Vec<float> term = exp_minus(x) * load(buffers.weights + j);
      total += term;
      exponents += term * x;
    }
    sums[b].log_sum += sum_lanes(total);
    sums[b].mean_exponent += sum_lanes(exponents);
  }
}

template <class T>
void finish(const LeaveOneOutProblem<T>& p) {
  for (index_t q = 0; q < p.shape.n_queries; ++q)
    for (index_t b = 0; b < p.shape.n_scales; ++b) {
      LeftOutSum& sum = p.sums[q * p.shape.n_scales + b];
      const double total = sum.log_sum, shift = p.scales[b] * p.nearest[q];
      const bool some = total > 0;
      sum.log_sum = some ? __builtin_log(total) - shift : -__builtin_inf();
      sum.mean_exponent = some ? sum.mean_exponent / total + shift : 0;
    }
}

template <class T>
void run(const LeaveOneOutPass<T>& pass) {
  const LeaveOneOutProblem<T>& p = pass.problem;
  const LeaveOneOutShape& shape = p.shape;
  const index_t d = shape.n_features;
  const Buffers<T> buffers(pass.scratch, shape);
  for (index_t b = 0; b < shape.n_scales; ++b) {
    const float scale = float(p.scales[b]);
    buffers.scales[b] = scale < kLeastScale     ? kLeastScale
                        : scale > kLargestScale ? kLargestScale
                                                : scale;
  }
  for (index_t q = 0; q < shape.n_queries; ++q) {
    T sum = 0;
    for (index_t c = 0; c < d; ++c) sum += p.queries[q * d + c] * p.queries[q * d + c];
    buffers.query_norms[q] = sum / 2;
    p.nearest[q] = __builtin_inf();
  }
  for (index_t i = 0; i < shape.n_queries * shape.n_scales; ++i) p.sums[i] = {0, 0};
  for (index_t first = 0; first < shape.n_keys; first += kPanelKeys) {
    const index_t count = smaller(kPanelKeys, shape.n_keys - first);
    pack_keys(p, first, count, buffers);
    if (shape.kernel == DensityKernel::laplacian)
      absolute_differences(p, buffers);
    else
      matmul<T>(shape.n_queries, kPanelKeys, d, Rows<const T>{p.queries, d}, 1, buffers.values,
                kPanelKeys, Rows<T>{buffers.tile, kPanelKeys}, false);
    for (index_t q = 0; q < shape.n_queries; ++q) {
      const T least = find_exponents(p, q, first, count, buffers);
      if (least == T(kInfinity)) continue;
      if (double(least) < p.nearest[q]) move_to(double(least), p, q);
      add_terms(p, q, least, buffers);
    }
  }
  finish(p);
}

}  // namespace

#define LSHKIT_DEFINE(T)                                       \
  index_t leave_one_out_scratch(const LeaveOneOutPass<T>& p) { \
    return Buffers<T>(nullptr, p.problem.shape).bytes;         \
  }                                                            \
  void leave_one_out(const LeaveOneOutPass<T>& p) { run(p); }
LSHKIT_DEFINE(float)
LSHKIT_DEFINE(double)
#undef LSHKIT_DEFINE

}  // namespace LSHKIT_ISA
}  // namespace lshkit

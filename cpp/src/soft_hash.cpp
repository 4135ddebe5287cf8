#include "soft_hash.hpp"

#include <algorithm>
#include <atomic>
#include <vector>

#include "parallel.hpp"
#include "rows.hpp"

namespace lshkit {
namespace {

// Long enough to amortise a task, short enough to share one long sequence among threads.
constexpr index_t kRows = 256;

// The rows of every head, cut into tasks.
struct RowTasks {
  index_t heads, rows, per_head = (rows + kRows - 1) / kRows;

  index_t count() const { return heads * per_head; }
  index_t head(index_t task) const { return task / per_head; }
  index_t first(index_t task) const { return task % per_head * kRows; }
  index_t size(index_t task) const { return std::min(kRows, rows - first(task)); }
};

Matrix<const float> rows_at(Tensor<const float> x, index_t heads, index_t head, index_t first,
                            index_t rows, index_t n_features) {
  return {x.matrix(head / heads, head % heads) + first * x.row_stride, x.row_stride, rows,
          n_features};
}

}  // namespace

ProbeRows probe_rows(SoftCodes soft, index_t rows, index_t n_hashes, index_t first, index_t group,
                     index_t n_probes, float sharpness, const std::uint8_t* valid) {
  ProbeRows p;
  p.codes = soft.codes;
  p.code_bytes = soft.bytes;
  p.margins = soft.margins;
  p.rows = rows;
  p.n_hashes = n_hashes;
  p.first_hash = first;
  p.group = group;
  p.part = group;
  p.n_probes = n_probes;
  p.probe_stride = group * n_probes;
  p.n_selected = selected_bits(n_probes);
  p.last_bit = kBitOfMargin;
  p.valid = valid;
  p.sharpness = sharpness;
  return p;
}

bool soft_hash(const HashFunctions& functions, Input<float> x, index_t batch, index_t heads,
               index_t rows, index_t n_features, index_t n_probes, void* codes, float* margins,
               int threads) {
  if (batch * heads * rows == 0) return true;
  const RowTasks tasks{batch * heads, rows};
  const int n_selected = selected_bits(n_probes), code_bytes = functions.n_bits <= 8 ? 1 : 2;
  std::atomic<bool> finite{true};
  parallel_for(tasks.count(), threads, [&](index_t task) {
    const index_t head = tasks.head(task), first = tasks.first(task), size = tasks.size(task);
    std::vector<float> converted(conversion_size(x, size, n_features));
    const Matrix<const float> part =
        rows_as<float>(x, {head / heads, head % heads, first}, size, n_features, converted.data());
    float inverse[kRows];
    std::uint8_t valid[kRows];
    kernels().f32.inverse_norms(part, nullptr, inverse, valid);
    if (std::count(valid, valid + size, 0)) finite = false;
    SoftHashRows h;
    h.family = functions.family;
    h.parameters =
        functions.parameters + head % heads / functions.heads_per_set * functions.head_stride;
    h.columns = functions.columns;
    h.n_bits = functions.n_bits;
    h.n_hashes = functions.n_hashes;
    h.x = part.data;
    h.row_stride = part.stride;
    h.rows = size;
    h.n_features = n_features;
    h.inverse_norm = inverse;
    h.n_selected = n_selected;
    const index_t pair = (head * rows + first) * functions.n_hashes;
    h.codes = static_cast<char*>(codes) + pair * code_bytes;
    h.margins = margins + pair * n_selected;
    h.scratch = static_cast<float*>(thread_scratch(kernels().soft_hash_scratch(h)));
    kernels().soft_hash(h);
  });
  return finite;
}

void soft_probes(SoftCodes soft, index_t batch, index_t heads, index_t rows, index_t n_hashes,
                 index_t n_probes, const float* sharpness, index_t sharpness_stride,
                 void* probe_codes, float* weights, int threads) {
  const RowTasks tasks{batch * heads, rows};
  const int n_selected = selected_bits(n_probes);
  parallel_for(tasks.count(), threads, [&](index_t task) {
    const index_t head = tasks.head(task), row = head * rows + tasks.first(task);
    const ProbeRows p =
        probe_rows(soft.rows(row, n_hashes, n_selected), tasks.size(task), n_hashes, 0, n_hashes,
                   n_probes, sharpness[head % heads * sharpness_stride], nullptr);
    const index_t at = row * n_hashes * n_probes;
    kernels().expand_probes(p, soft.bytes, static_cast<char*>(probe_codes) + at * soft.bytes,
                            weights + at);
  });
}

void soft_hash_rows_backward(const HashFunctions& functions, Matrix<const float> x,
                             const float* inverse_norm, SoftCodes soft, int n_selected,
                             const float* margin_grads, Matrix<float> grad) {
  SoftHashGradient g;
  g.family = functions.family;
  g.parameters = functions.parameters;
  g.columns = functions.columns;
  g.n_bits = functions.n_bits;
  g.n_hashes = functions.n_hashes;
  g.n_selected = n_selected;
  g.codes = soft.codes;
  g.code_bytes = soft.bytes;
  g.margin_grads = margin_grads;
  g.grad = grad;
  g.scratch = static_cast<float*>(thread_scratch(kernels().soft_hash_gradient_scratch(g)));
  kernels().soft_hash_gradient(g);
  kernels().f32.unit_norm_backward(x, inverse_norm, grad);
}

void soft_hash_backward(const HashFunctions& functions, Tensor<const float> x, index_t batch,
                        index_t heads, index_t rows, index_t n_features, index_t n_probes,
                        const float* sharpness, index_t sharpness_stride, SoftCodes soft,
                        const float* weights, const float* weight_grads,
                        SoftHashGradients gradients, int threads) {
  const RowTasks tasks{batch * heads, rows};
  const index_t n_hashes = functions.n_hashes, row_probes = n_hashes * n_probes;
  const int n_selected = selected_bits(n_probes);
  const index_t row_margins = n_hashes * n_selected;
  // What a block of rows gets from the gradient of its weights, for the hashes [first, last).
  struct Block {
    Matrix<const float> x;
    SoftCodes soft;
    float inverse[kRows];
    float* margin_grads;
    double sharpness;
  };
  const auto reduce = [&](index_t task, index_t first, index_t last, Block& block) {
    const index_t head = tasks.head(task), row = head * rows + tasks.first(task);
    const index_t size = tasks.size(task);
    block.x = rows_at(x, heads, head, tasks.first(task), size, n_features);
    block.soft = soft.rows(row, n_hashes, n_selected);
    std::uint8_t valid[kRows];
    kernels().f32.inverse_norms(block.x, nullptr, block.inverse, valid);
    ProbeRows p = probe_rows(block.soft, size, n_hashes, first, last - first, n_probes,
                             sharpness[head % heads * sharpness_stride], valid);
    p.probe_stride = row_probes;
    const index_t at = row * row_probes + first * n_probes;
    block.margin_grads = static_cast<float*>(
        thread_scratch(sizeof(float) * std::max<index_t>(size * row_margins, 1), Scratch::head));
    block.sharpness = kernels().reduce_probes(p, weights + at, weight_grads + at,
                                              block.margin_grads + first * n_selected, row_margins);
  };

  std::vector<double> parts(tasks.count());
  parallel_for(tasks.count(), threads, [&](index_t task) {
    const index_t head = tasks.head(task);
    Block block;
    reduce(task, 0, n_hashes, block);
    parts[task] = block.sharpness;
    float* grad = gradients.x.matrix(head / heads, head % heads);
    soft_hash_rows_backward(functions_of_head(functions, head % heads), block.x, block.inverse,
                            block.soft, n_selected, block.margin_grads,
                            {grad + tasks.first(task) * gradients.x.row_stride,
                             gradients.x.row_stride, block.x.rows, n_features});
  });
  for (index_t head = 0; head < tasks.heads; ++head) {
    double sum = 0;
    for (index_t i = 0; i < tasks.per_head; ++i) sum += parts[head * tasks.per_head + i];
    gradients.sharpness[head] = float(sum);
  }
  if (!gradients.parameters) return;

  // A task for some of the hashes of one set of functions: it meets every row that used them.
  constexpr index_t kHashes = 4;
  const index_t sets = functions.head_stride ? heads : 1, parts_of_set = (n_hashes + 3) / kHashes;
  const index_t set_size = n_hashes * functions.n_bits * n_features;
  parallel_for(sets * parts_of_set, threads, [&](index_t job) {
    const index_t set = job / parts_of_set, first = job % parts_of_set * kHashes;
    const index_t last = std::min(first + kHashes, n_hashes);
    PlaneGradient g;
    g.n_bits = functions.n_bits;
    g.n_hashes = n_hashes;
    g.n_selected = n_selected;
    g.plane_grads = gradients.parameters + set * set_size;
    const index_t plane = functions.n_bits * n_features;
    std::fill(g.plane_grads + first * plane, g.plane_grads + last * plane, 0.0f);
    for (index_t task = 0; task < tasks.count(); ++task) {
      if (sets > 1 && tasks.head(task) % heads != set) continue;
      Block block;
      reduce(task, first, last, block);
      g.codes = block.soft.codes;
      g.code_bytes = block.soft.bytes;
      g.margin_grads = block.margin_grads;
      g.x = block.x;
      g.inverse_norm = block.inverse;
      kernels().plane_gradient(g, first, last);
    }
  });
}

}  // namespace lshkit

// Soft codes and their gradient.
#include "lshkit/cuda/probes.cuh"
#include "lshkit/cuda/rows.cuh"
#include "lshkit/cuda/runtime.cuh"
#include "lshkit/cuda/soft.hpp"
#include "lshkit/cuda/soft_hash_gradient.cuh"

namespace lshkit::cuda {
namespace {

// Probe arrays as the verb has them: a row's hashes in turn.
SoftProbes probes_of(const Hash& h, SoftCodes soft, index_t n_probes, const float* sharpness,
                     index_t sharpness_stride) {
  SoftProbes p;
  p.side = {h.n_rows, h.heads, 1, nullptr};
  p.query_heads = h.heads;
  p.heads = h.batch * h.heads;
  p.soft = soft;
  p.n_hashes = h.n_hashes;
  p.n_probes = n_probes;
  p.n_selected = selected_bits(n_probes);
  p.sharpness = sharpness;
  p.sharpness_stride = sharpness_stride;
  p.hash_stride = n_probes;
  p.row_stride = h.n_hashes * n_probes;
  p.head_stride = h.n_rows * p.row_stride;
  return p;
}

}  // namespace

index_t soft_hash(const Queue& queue, const HashFunctions& functions, Input<float> x, index_t batch,
                  index_t heads, index_t rows, index_t n_features, index_t n_probes,
                  const float* sharpness, index_t sharpness_stride, SoftCodesOut soft,
                  void* probe_codes, float* weights, void* scratch) {
  SoftHash s;
  s.hash = hash_of(functions, x, batch, heads, rows, n_features);
  Cut cut(scratch);
  const RowNorms norms(cut, batch * heads * rows);
  if (!scratch) return cut.used();
  const DeviceGuard guard(queue);
  norms.fill(queue, s.hash);
  s.hash.codes = soft.codes;
  s.inverse = norms.inverse;
  s.n_selected = selected_bits(n_probes);
  s.margins = soft.margins;
  soft_hash(queue, functions.family, s, shared_limit(queue));
  SoftProbes p = probes_of(s.hash, {soft.codes, s.hash.code_bytes, soft.margins}, n_probes,
                           sharpness, sharpness_stride);
  p.codes = probe_codes;
  p.weights = weights;
  expand_probes(queue, p);
  return cut.used();
}

index_t soft_hash_backward(const Queue& queue, const HashFunctions& functions, Input<float> x,
                           index_t batch, index_t heads, index_t rows, index_t n_features,
                           index_t n_probes, const float* sharpness, index_t sharpness_stride,
                           SoftCodes soft, const float* weights, const float* weight_grads,
                           SoftHashGradients gradients, void* scratch) {
  const index_t all_rows = batch * heads * rows;
  const int n_selected = selected_bits(n_probes);
  PlaneGrads planes;
  SoftHashBack& back = planes.back;
  back.hash = hash_of(functions, x, batch, heads, rows, n_features);
  planes.sets = functions.head_stride ? heads : 1;
  planes.parts = kPlaneGradParts;
  Cut cut(scratch);
  const RowNorms norms(cut, all_rows);
  float* const margin_grads = cut.take<float>(all_rows * functions.n_hashes * n_selected);
  back.out = cut.take<float>(all_rows * n_features);
  const index_t size = planes.sets * planes.set_size();
  if (gradients.parameters) planes.partial = cut.take<float>(planes.parts * size);
  if (!scratch) return cut.used();

  const DeviceGuard guard(queue);
  norms.fill(queue, back.hash);
  SoftProbes p = probes_of(back.hash, soft, n_probes, sharpness, sharpness_stride);
  p.valid = norms.valid;
  p.weights = const_cast<float*>(weights);
  p.weight_grads = weight_grads;
  p.margin_grads = margin_grads;
  if (n_selected > 0) reduce_probes(queue, p);
  SharpnessGradient g;
  g.sides[0] = p;
  g.out = gradients.sharpness;
  sharpness_gradient(queue, g, p.heads);
  back.soft = soft;
  back.n_selected = n_selected;
  back.margin_grads = margin_grads;
  soft_hash_back(queue, functions.family, back, shared_limit(queue));
  FinishGradient f;
  f.own = back.out;
  f.batch = batch;
  f.heads = heads;
  f.n_rows = rows;
  f.columns = n_features;
  f.x = Elements(x);
  f.inverse = norms.inverse;
  f.out = Elements(FloatTensor<float, const void>(
      Tensor<const float>{gradients.x.data, gradients.x.batch_stride, gradients.x.head_stride,
                          gradients.x.row_stride}));
  f.data = gradients.x.data;
  finish_gradient(queue, f);
  if (gradients.parameters) {
    planes.x = Elements(x);
    planes.inverse = norms.inverse;
    plane_grads(queue, planes);
    add_parts(queue, planes.partial, planes.parts, size, gradients.parameters);
  }
  return cut.used();
}

}  // namespace lshkit::cuda

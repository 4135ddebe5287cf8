// Attention with soft codes: the steps of cpp/src/soft_attention.cpp, some heads at a time. Their
// probes are made when they are needed and go again; saved in between are codes and margins.
//
// Scratch of the forward: n_q (d_v + 1) floats a head, tables (16 MB; in order as much as the sums)
// and the probes of some heads (256 MB, or those of one head), in no order as much again to sort
// them. Of the backward besides: the gradient of values and the larger of those of the unit
// vectors, and of the margins.
#include "lshkit/cuda/attention_problem.cuh"
#include "lshkit/cuda/probes.cuh"
#include "lshkit/cuda/runtime.cuh"
#include "lshkit/cuda/soft.hpp"
#include "lshkit/cuda/soft_hash_gradient.cuh"
#include "lshkit/cuda/weighted_bucket_sum.cuh"

namespace lshkit::cuda {
namespace {

struct SoftProblem : AttentionProblem<SoftOptions> {
  const HashFunctions& functions;

  index_t sequences() const { return s.query_starts ? s.sequences : 1; }
  index_t n_hashes() const { return functions.n_hashes; }
  index_t probes(bool query) const { return query ? options.query_probes : options.key_probes; }
  index_t rows(bool query) const { return query ? s.n_queries : s.n_keys; }
  Side side(bool query) const { return query ? query_side() : key_side(); }
  index_t margin_count(bool query) const {
    return heads() * rows(query) * n_hashes() * selected_bits(probes(query));
  }
  // Queries or keys as they are hashed.
  Hash hash(bool query) const {
    HashFunctions f = functions;
    f.heads_per_set = query ? group() : 1;
    return hash_of(f, query ? in.query : in.key, s.batch, query ? s.heads : key_heads(),
                   rows(query), s.n_features);
  }
};

// The probes of one side of some heads of queries.
struct ProbeScratch {
  void* codes;
  float *weights, *grads;
  static index_t of_head(const SoftProblem& p, bool query) {
    return p.rows(query) * p.n_hashes() * p.probes(query);
  }
  ProbeScratch(Cut& cut, const SoftProblem& p, bool query, index_t heads, bool backward)
      : codes(cut.take<std::uint16_t>(heads * of_head(p, query))),
        weights(cut.take<float>(heads * of_head(p, query))),
        grads(cut.take<float>(backward ? heads * of_head(p, query) : 0)) {}
};
index_t heads_at_once(const SoftProblem& p) {
  const index_t bytes = 10 * (ProbeScratch::of_head(p, true) + ProbeScratch::of_head(p, false));
  const index_t heads = bytes > 0 ? 16 * table_cache() / bytes : p.heads();
  return least(p.heads(), heads > 1 ? heads : 1);
}

SoftProbes soft_probes_of(const SoftProblem& p, bool query, SoftCodes soft,
                          const std::uint8_t* valid, const ProbeScratch& to) {
  SoftProbes a;
  a.side = p.side(query);
  a.query_heads = p.s.heads;
  a.soft = soft;
  a.n_hashes = p.n_hashes();
  a.n_probes = p.probes(query);
  a.n_selected = selected_bits(a.n_probes);
  a.sharpness = p.options.sharpness;
  a.sharpness_stride = p.options.sharpness_stride;
  a.heads_per_sharpness = p.group();
  a.valid = valid;
  // Hash by hash: a table's probes are side by side.
  a.row_stride = a.n_probes;
  a.hash_stride = a.side.n_rows * a.row_stride;
  a.head_stride = a.n_hashes * a.hash_stride;
  a.codes = to.codes;
  a.weights = to.weights;
  a.weight_grads = to.grads;
  return a;
}
// The same as a side of the sum, without vectors.
WeightedSide<float> weighted_side(const SoftProblem& p, bool query, const SoftProbes& probes) {
  WeightedSide<float> w;
  w.side = p.side(query);
  w.codes = probes.codes;
  w.code_bytes = probes.soft.bytes;
  w.weights = probes.weights;
  w.n_probes = probes.n_probes;
  w.head_stride = probes.head_stride;
  w.row_stride = probes.row_stride;
  w.hash_stride = probes.hash_stride;
  w.valid = probes.valid;
  w.valid_batch = w.side.heads * w.side.n_rows;
  w.valid_head = w.side.n_rows;
  return w;
}

// Keys add their values, queries read.
WeightedPass<float> forward_pass(const SoftProblem& p, const SoftProbes& query,
                                 const SoftProbes& key) {
  WeightedPass<float> a;
  a.add = weighted_side(p, false, key);
  a.add.x = Elements(p.in.value);
  a.read = weighted_side(p, true, query);
  a.query_heads = p.s.heads;
  a.sequences = p.sequences();
  a.heads = p.heads();
  a.n_hashes = p.n_hashes();
  a.n_buckets = index_t(1) << p.functions.n_bits;
  a.n_values = p.s.n_values;
  a.extra = p.counts();
  a.short_tables = p.in.value.element == Element::bfloat16;  // of all rows, then
  a.order = p.options.causal ? Order::causal : Order::all;
  a.scale = 1.0f / float(p.n_hashes());
  return a;
}
// Queries add the gradients of the sums, keys read.
WeightedPass<float> backward_pass(const WeightedPass<float>& forwards) {
  WeightedPass<float> a = forwards;
  std::swap(a.add, a.read);
  a.order = transposed_order(a.order);
  return a;
}
void set_heads(WeightedPass<float>& a, index_t first, index_t heads) {
  a.first_head = a.add.first_head = a.read.first_head = first;
  a.heads = heads;
}
float* take_tables(Cut& cut, WeightedPass<float>& a, index_t bytes) {
  a.table_bytes = bytes;
  return cut.take<float>(ceil_div(bytes, index_t(sizeof(float))));
}

void soft_codes(const SoftProblem& p, bool query, const RowNorms& norms, const SoftCodesOut& out) {
  SoftHash s;
  s.hash = p.hash(query);
  s.hash.codes = out.codes;
  s.inverse = norms.inverse;
  s.n_selected = selected_bits(p.probes(query));
  s.margins = out.margins;
  soft_hash(p.queue, p.functions.family, s, shared_limit(p.queue));
}

SoftHashBack hash_back(const SoftProblem& p, bool query, const SoftProbes& probes, float* out) {
  SoftHashBack b;
  b.hash = p.hash(query);
  b.soft = probes.soft;
  b.n_selected = probes.n_selected;
  b.margin_grads = probes.margin_grads;
  b.group = query ? 1 : p.group();
  b.out = out;
  return b;
}
// From the gradient of the margins to that of queries or of keys.
void finish_rows(const SoftProblem& p, bool query, const SoftHashBack& back, const float* inverse,
                 const Output<float>& to) {
  soft_hash_back(p.queue, p.functions.family, back, shared_limit(p.queue));
  p.finish_rows(query, back.out, 1, inverse, to);
}

}  // namespace

index_t soft_attention_forward(const Queue& queue, const AttentionShape& shape,
                               const SoftOptions& options, const HashFunctions& functions,
                               AttentionInputs<float> in, Output<float> out, float* divisors,
                               SoftCodesOut queries, SoftCodesOut keys, void* scratch) {
  const SoftProblem p{{queue, shape, options, in}, functions};
  Cut cut(scratch);
  const RowNorms query(cut, p.queries()), key(cut, p.keys());
  const index_t at_once = heads_at_once(p);
  float* const sums = cut.take<float>(p.queries() * p.sum_columns());
  const ProbeScratch query_memory(cut, p, true, at_once, false),
      key_memory(cut, p, false, at_once, false);
  const int code_bytes = hash_code_bytes(functions.n_bits);
  SoftProbes query_probes = soft_probes_of(p, true, {queries.codes, code_bytes, queries.margins},
                                           query.valid, query_memory);
  SoftProbes key_probes =
      soft_probes_of(p, false, {keys.codes, code_bytes, keys.margins}, key.valid, key_memory);
  WeightedPass<float> pass = forward_pass(p, query_probes, key_probes);
  pass.tables = take_tables(cut, pass, weighted_table_scratch(pass));
  take_sorted(cut, {&pass});
  if (!scratch) return cut.used();

  const DeviceGuard guard(queue);
  query.fill(queue, p.hash(true));
  key.fill(queue, p.hash(false));
  soft_codes(p, true, query, queries);
  soft_codes(p, false, key, keys);
  if (in.key_mask.data) key.fill(queue, p.hash(false), in.key_mask);
  pass.read.sum = sums;
  pass.read.sum_columns = p.sum_columns();
  const index_t limit = shared_limit(queue);
  for (index_t first = 0; first < p.heads(); first += at_once) {
    query_probes.first_head = key_probes.first_head = first;
    query_probes.heads = key_probes.heads = least(at_once, p.heads() - first);
    expand_probes(queue, query_probes);
    expand_probes(queue, key_probes);
    set_heads(pass, first, query_probes.heads);
    weighted_sum(queue, pass, limit);
  }
  p.finish_output(sums, query.valid, out, divisors);
  return cut.used();
}

index_t soft_attention_backward(const Queue& queue, const AttentionShape& shape,
                                const SoftOptions& options, const HashFunctions& functions,
                                AttentionInputs<float> in, Input<float> out, const float* divisors,
                                SoftCodes queries, SoftCodes keys,
                                AttentionGradients<float> gradients, float* sharpness_grads,
                                float* parameter_grads, void* scratch) {
  const SoftProblem p{{queue, shape, options, in}, functions};
  Cut cut(scratch);
  const RowNorms query(cut, p.queries()), key(cut, p.keys());
  const index_t at_once = heads_at_once(p);
  float* const sums = cut.take<float>(p.queries() * p.sum_columns());
  float* const bias = p.counts() ? cut.take<float>(p.queries()) : nullptr;
  float* const value_grad = cut.take<float>(p.keys_of_queries() * shape.n_values);
  const index_t most_rows = p.queries() > p.keys() ? p.queries() : p.keys();
  float* const unit_grad = cut.take<float>(most_rows * shape.n_features);
  const ProbeScratch query_memory(cut, p, true, at_once, true),
      key_memory(cut, p, false, at_once, true);
  SoftProbes query_probes = soft_probes_of(p, true, queries, query.valid, query_memory);
  SoftProbes key_probes = soft_probes_of(p, false, keys, key.valid, key_memory);
  query_probes.margin_grads = cut.take<float>(p.margin_count(true));
  key_probes.margin_grads = cut.take<float>(p.margin_count(false));
  WeightedPass<float> forwards = forward_pass(p, query_probes, key_probes);
  WeightedPass<float> back = backward_pass(forwards);
  const index_t bytes = most(weighted_table_scratch(forwards), weighted_table_scratch(back));
  back.tables = forwards.tables = take_tables(cut, back, bytes);
  forwards.table_bytes = bytes;
  take_sorted(cut, {&forwards, &back});
  PlaneGrads planes;
  planes.sets = functions.head_stride ? p.key_heads() : 1;
  planes.parts = kPlaneGradParts;
  planes.back.hash = p.hash(true);
  const index_t plane_size = planes.sets * planes.set_size();
  if (parameter_grads) planes.partial = cut.take<float>(2 * planes.parts * plane_size);
  if (!scratch) return cut.used();

  const DeviceGuard guard(queue);
  query.fill(queue, p.hash(true));
  key.fill(queue, p.hash(false), in.key_mask);
  const bool divided = options.normalize != Normalize::none;
  p.sums_backward(sums, out, divided ? divisors : nullptr, query.valid, gradients.out, bias);
  Elements grad;
  grad.data = sums;
  grad.row = p.sum_columns();
  forwards.read.x = back.add.x = grad;
  forwards.read.own_x = back.add.own_x = true;
  forwards.read.extra = back.add.extra = bias;
  // The margins' gradient leads to these three.
  const auto margins_wanted = [&](const SoftProbes& of, const Output<float>& rows) {
    return of.n_selected > 0 && (rows.data || sharpness_grads || parameter_grads);
  };
  const bool of_queries_wanted = margins_wanted(query_probes, gradients.query),
             of_keys_wanted = margins_wanted(key_probes, gradients.key);
  forwards.read.weight_grads = query_memory.grads;
  back.read.sum = value_grad;
  back.read.sum_columns = shape.n_values;
  if (of_keys_wanted) back.read.weight_grads = key_memory.grads;
  const index_t limit = shared_limit(queue);
  for (index_t first = 0; first < p.heads(); first += at_once) {
    query_probes.first_head = key_probes.first_head = first;
    query_probes.heads = key_probes.heads = least(at_once, p.heads() - first);
    expand_probes(queue, query_probes);
    expand_probes(queue, key_probes);
    set_heads(forwards, first, query_probes.heads);
    set_heads(back, first, query_probes.heads);
    if (of_queries_wanted) {
      weighted_sum(queue, forwards, limit);
      reduce_probes(queue, query_probes);
    }
    if (gradients.value.data || of_keys_wanted) weighted_sum(queue, back, limit);
    if (of_keys_wanted) reduce_probes(queue, key_probes);
  }
  SharpnessGradient g;
  g.sides[0] = query_probes;
  g.sides[1] = key_probes;
  g.out = sharpness_grads;
  if (sharpness_grads) sharpness_gradient(queue, g, p.sequences() * p.heads());

  if (gradients.value.data) p.finish_values(value_grad, key.valid, gradients.value);
  const SoftHashBack of_queries = hash_back(p, true, query_probes, unit_grad),
                     of_keys = hash_back(p, false, key_probes, unit_grad);
  if (gradients.query.data) finish_rows(p, true, of_queries, query.inverse, gradients.query);
  if (gradients.key.data) finish_rows(p, false, of_keys, key.inverse, gradients.key);
  if (!parameter_grads) return cut.used();
  for (const bool of_query : {true, false}) {
    planes.back = of_query ? of_queries : of_keys;
    planes.x = planes.back.hash.x;
    planes.inverse = of_query ? query.inverse : key.inverse;
    plane_grads(queue, planes);
    planes.partial += planes.parts * plane_size;
  }
  add_parts(queue, planes.partial - 2 * planes.parts * plane_size, 2 * planes.parts, plane_size,
            parameter_grads);
  return cut.used();
}

}  // namespace lshkit::cuda

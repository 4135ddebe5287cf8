#include "lshkit/soft_attention.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "attention_head.hpp"
#include "bucket_sum.hpp"
#include "soft_hash.hpp"
#include "weighted_bucket_sum.hpp"

namespace lshkit {
namespace {

// The soft codes of one side of a head.
struct SoftSide {
  SoftCodes soft;
  index_t rows, n_hashes, n_probes;
  int n_bits;
  float sharpness;
  int n_selected = selected_bits(n_probes);

  // In parts of `group` hashes.
  ProbeRows probe_rows_of(const ProbeRun& run, index_t group, const std::uint8_t* valid) const {
    ProbeRows p =
        probe_rows(soft.matrix(run.first, 1, n_hashes, n_selected), run.rows, n_hashes, run.hash,
                   run.group, n_probes, sharpness, valid ? valid + run.first : nullptr);
    p.part = std::min(group, run.group);
    p.last_bit = n_bits - 1;  // within the tables, whatever a caller's margins hold
    return p;
  }
  WeightedSide<float> weighted(const std::uint8_t* valid) const {
    WeightedSide<float> side{rows, n_probes, valid, nullptr, nullptr};
    side.probes = [this](const ProbeRun& run, index_t group, std::uint16_t* codes, float* weights) {
      kernels().expand_probes(probe_rows_of(run, group, nullptr), 2, codes, weights);
    };
    // Hashes whose margins fill whole registers when their exponentials are taken.
    if (n_probes <= 8) side.batch = n_selected == 1 ? 16 : 8;
    return side;
  }
  // From the gradient of the weights of a run to that of its margins, in an array of all hashes;
  // returns the gradient of the sharpness.
  double reduce(const ProbeRun& run, const std::uint8_t* valid, index_t group, const float* weights,
                const float* weight_grads, float* margin_grads) const {
    const index_t stride = n_hashes * n_selected;
    return kernels().reduce_probes(probe_rows_of(run, group, valid), weights, weight_grads,
                                   margin_grads + run.first * stride + run.hash * n_selected,
                                   stride);
  }
};

WeightedHead<float> weighted_head(const AttentionHead<float>& head, const SoftSide& query,
                                  const SoftSide& key, const std::uint8_t* query_valid, int n_bits,
                                  bool causal, bool fast) {
  const index_t n_buckets = index_t(1) << n_bits;
  return {query.weighted(query_valid),
          key.weighted(head.key_mask),
          query.n_hashes,
          n_buckets,
          head.value,
          causal ? Order::causal : Order::all,
          1.0f / float(query.n_hashes),
          fast};
}

struct Sides {
  SoftSide query, key;

  Sides(const SoftOptions& options, SoftCodes queries, SoftCodes keys, const HashFunctions& f,
        const HeadRange& r)
      : query(side(queries, r.query_row, r.n_queries, f, options.query_probes, options, r)),
        key(side(keys, r.key_row, r.n_keys, f, options.key_probes, options, r)) {}

 private:
  static SoftSide side(SoftCodes soft, index_t first, index_t rows, const HashFunctions& f,
                       index_t n_probes, const SoftOptions& options, const HeadRange& r) {
    return {soft.rows(first, f.n_hashes, selected_bits(n_probes)),
            rows,
            f.n_hashes,
            n_probes,
            f.n_bits,
            options.sharpness[r.keys.head * options.sharpness_stride]};
  }
};

// Sums of the gradient of the hyperplanes that are kept apart, at least.
constexpr index_t kPlaneSums = 64;

void add_plane_gradient(const HashFunctions& functions, Matrix<const float> x, const float* inverse,
                        const SoftSide& side, const float* margin_grads, float* plane_grads) {
  if (side.n_probes == 1) return;
  PlaneGradient g{};
  g.n_bits = functions.n_bits;
  g.n_hashes = functions.n_hashes;
  g.n_selected = side.n_selected;
  g.codes = side.soft.codes;
  g.code_bytes = side.soft.bytes;
  g.margin_grads = margin_grads;
  g.x = x;
  g.inverse_norm = inverse;
  g.plane_grads = plane_grads;
  kernels().plane_gradient(g, 0, functions.n_hashes);
}

}  // namespace

void soft_attention_forward(const AttentionShape& shape, const SoftOptions& options,
                            const HashFunctions& functions, AttentionInputs<float> in,
                            Output<float> out, float* divisors, SoftCodesOut queries,
                            SoftCodesOut keys, int threads) {
  const index_t heads = head_count(shape);
  const int code_bytes = functions.n_bits <= 8 ? 1 : 2;
  HashFunctions query_functions = functions;
  query_functions.heads_per_set = shape.heads / key_heads(shape);
  const bool finite_queries =
      soft_hash(query_functions, in.query, shape.batch, shape.heads, shape.n_queries,
                shape.n_features, options.query_probes, queries.codes, queries.margins, threads);
  const bool finite_keys =
      soft_hash(functions, in.key, shape.batch, key_heads(shape), shape.n_keys, shape.n_features,
                options.key_probes, keys.codes, keys.margins, threads);
  const SoftCodes query_codes{queries.codes, code_bytes, queries.margins};
  const SoftCodes key_codes{keys.codes, code_bytes, keys.margins};
  // Rows that are not finite are looked for only when there are some.
  std::optional<ValidRows> valid;
  if (!finite_queries || !finite_keys) valid.emplace(shape, in, threads);

  const bool sums_wanted = options.normalize == Normalize::sum;
  const index_t slices = slice_count<float>(shape.n_values);
  // Slices [first, last) of a head's sums; at the end of a head its normalisation.
  const auto run = [&](index_t index, index_t first, index_t last, bool finish) {
    const HeadRange r = head_range(shape, index);
    const index_t value_size = conversion_size(in.value, r.n_keys, shape.n_values);
    const index_t out_size = conversion_size(out, r.n_queries, shape.n_values);
    Arena arena(thread_scratch(sizeof(float) * (value_size + out_size) + 128, Scratch::rows));
    AttentionHead<float> head;
    head.value =
        rows_as<float>(in.value, r.keys, r.n_keys, shape.n_values, arena.take<float>(value_size));
    head.key_mask = valid ? valid->keys.data() + r.key_row : mask_of(in.key_mask, r);
    const Matrix<float> to =
        rows_to<float>(out, r.queries, r.n_queries, shape.n_values, arena.take<float>(out_size));
    float* divisor = divisors ? divisors + r.query_row : nullptr;
    const Sides sides(options, query_codes, key_codes, functions, r);
    if (last > first)
      weighted_sum(weighted_head(head, sides.query, sides.key, nullptr, functions.n_bits,
                                 options.causal, in.query.converted()),
                   to, sums_wanted && first == 0 ? divisor : nullptr, first, last);
    if (!finish) return;
    finish_output(options.normalize, out, r.queries, to, divisor,
                  valid ? valid->queries.data() + r.query_row : nullptr);
  };
  for_each_slice(heads, slices, in.value.converted() || out.converted(), threads, run);
}

void soft_attention_backward(const AttentionShape& shape, const SoftOptions& options,
                             const HashFunctions& functions, AttentionInputs<float> in,
                             Input<float> out, const float* divisors, SoftCodes query_codes,
                             SoftCodes key_codes, AttentionGradients<float> gradients,
                             float* sharpness_grads, float* parameter_grads, int threads) {
  const index_t n_hashes = functions.n_hashes;
  if (sharpness_grads)
    std::fill_n(sharpness_grads, head_count(shape), 0.0f);  // of sequences without a row
  const auto head_backward = [&](const HeadBackward<float>& b, float* plane_grads) {
    AttentionHead<float> head = b.head;
    const Sides sides(options, query_codes, key_codes, functions, b.range);
    // Gradients of the margins, of all hashes: the way back through a rotation takes them together.
    const std::size_t begin = BackwardScratch<float>(Arena(), head, options.normalize).bytes;
    const auto margins_of = [&](const SoftSide& side) {
      return side.rows * n_hashes * side.n_selected;
    };
    Arena size;
    size.take<float>(margins_of(sides.query));
    size.take<float>(margins_of(sides.key));
    char* memory = static_cast<char*>(thread_scratch(begin + size.used(), Scratch::head));
    const BackwardScratch<float> s(Arena(memory), head, options.normalize);
    Arena arena(memory + begin);
    float* query_margins = arena.take<float>(margins_of(sides.query));
    float* key_margins = arena.take<float>(margins_of(sides.key));

    s.norms.fill(head);
    head.key_mask = s.norms.key_valid;
    WeightedHead<float> weighted =
        weighted_head(head, sides.query, sides.key, s.norms.query_valid, functions.n_bits,
                      options.causal, in.query.converted());
    const float* bias;
    const Matrix<const float> grad = output_backward<float>(
        options.normalize, b.grad, s, &bias, [&](Matrix<float> raw, float* sums) {
          restore_sums(options.normalize, out, divisors, b.range, raw, sums);
        });

    double sharpness = 0;
    const auto take_grads = [&](WeightedSide<float>& to, const SoftSide& side, float* margin_grads,
                                const Matrix<float>& rows_grad) {
      if (side.n_probes == 1) return;  // a weight of 1, whatever the row
      if (!rows_grad.data && !sharpness_grads && !plane_grads) return;
      to.take_grads = [&sharpness, &side, &to, margin_grads](const ProbeRun& run, index_t group,
                                                             const float* weights,
                                                             const float* weight_grads) {
        sharpness += side.reduce(run, to.valid, group, weights, weight_grads, margin_grads);
      };
    };
    take_grads(weighted.query, sides.query, query_margins, b.query_grad);
    take_grads(weighted.key, sides.key, key_margins, b.key_grad);
    weighted_sum_backward(weighted, grad, bias, b.value_grad);
    clear_invalid_rows(b.value_grad, s.norms.key_valid);
    if (sharpness_grads) sharpness_grads[b.range.index] = float(sharpness);

    const HashFunctions of_head = functions_of_head(functions, b.range.keys.head);
    const auto rows_backward = [&](Matrix<const float> x, const float* inverse,
                                   const SoftSide& side, const float* margin_grads,
                                   Matrix<float> to) {
      if (!to.data) return;
      if (side.n_probes > 1)
        return soft_hash_rows_backward(of_head, x, inverse, side.soft, side.n_selected,
                                       margin_grads, to);
      for (index_t i = 0; i < to.rows; ++i) std::memset(to.row(i), 0, sizeof(float) * to.columns);
      kernels().f32.unit_norm_backward(x, inverse, to);  // NaN where the row is not finite
    };
    rows_backward(head.query, s.norms.query, sides.query, query_margins, b.query_grad);
    rows_backward(head.key, s.norms.key, sides.key, key_margins, b.key_grad);
    if (!plane_grads) return;
    add_plane_gradient(functions, head.query, s.norms.query, sides.query, query_margins,
                       plane_grads);
    add_plane_gradient(functions, head.key, s.norms.key, sides.key, key_margins, plane_grads);
  };
  if (!parameter_grads)
    return for_each_head_backward(shape, in, gradients, threads,
                                  [&](const HeadBackward<float>& b) { head_backward(b, nullptr); });

  // A task for some sequences of one head of keys, with a sum of its own: how many tasks there are
  // depends on the shape alone.
  const index_t n_sets = key_heads(shape), sequences = sequence_count(shape);
  if (n_sets == 0) return;
  const index_t parts = std::min(sequences, (kPlaneSums + n_sets - 1) / n_sets);
  const index_t size = n_hashes * functions.n_bits * shape.n_features;
  std::vector<float> sums(parts * n_sets * size);
  parallel_for(parts * n_sets, threads, [&](index_t task) {
    const index_t part = task / n_sets, set = task % n_sets;
    float* sum = &sums[task * size];
    for (index_t i = sequences * part / parts; i < sequences * (part + 1) / parts; ++i)
      key_head_backward(shape, in, gradients, i * n_sets + set,
                        [&](const HeadBackward<float>& b) { head_backward(b, sum); });
  });
  const index_t own = functions.head_stride ? n_sets : 1;
  std::fill_n(parameter_grads, own * size, 0.0f);
  for (index_t task = 0; task < parts * n_sets; ++task) {
    float* to = parameter_grads + task % own * size;
    for (index_t i = 0; i < size; ++i) to[i] += sums[task * size + i];
  }
}

}  // namespace lshkit

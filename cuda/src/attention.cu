// YOSO attention from the kernels of hashing, sums, pairs and rows: the same steps as
// cpp/src/yoso_attention.cpp and expected_attention.cpp, all heads at once.
//
// Scratch of the forward: n_q (d_v + 1) floats a head. Of the backward: besides, unit vectors and
// the gradients of every head of queries, (n_q + n_k) (2 d + d_v + 2) floats. Saved in between: the
// codes, the output and a number a row.
#include "lshkit/cuda/attention_problem.cuh"
#include "lshkit/cuda/bucket_gradient.cuh"
#include "lshkit/cuda/bucket_gradient_matrix.cuh"
#include "lshkit/cuda/bucket_sum.cuh"
#include "lshkit/cuda/pairs.cuh"
#include "lshkit/cuda/runtime.cuh"

namespace lshkit::cuda {
namespace {

struct Problem : AttentionProblem<AttentionOptions> {
  index_t sequences() const { return s.query_starts ? s.sequences : s.batch; }
};

// Of queries or of keys. unit: with the unit vectors themselves.
struct UnitVectors {
  float *inverse, *unit;
  std::uint8_t* valid;
  UnitVectors(Cut& cut, index_t rows, index_t columns)
      : inverse(cut.take<float>(rows)),
        unit(cut.take<float>(rows * columns)),
        valid(cut.take<std::uint8_t>(rows)) {}
};
void fill(const Problem& p, const UnitVectors& to, bool queries, bool with_unit) {
  UnitRows a;
  a.x = Elements(queries ? p.in.query : p.in.key);
  a.batch = p.s.batch;
  a.heads = queries ? p.s.heads : p.key_heads();
  a.n_rows = queries ? p.s.n_queries : p.s.n_keys;
  a.columns = p.s.n_features;
  if (!queries) {
    a.mask = p.in.key_mask.data;
    a.mask_stride = p.in.key_mask.batch_stride;
  }
  a.unit = with_unit ? to.unit : nullptr;
  a.inverse = to.inverse;
  a.valid = to.valid;
  unit_rows(p.queue, a);
}

BucketSum<float> sum_of(const Problem& p, Codes query_codes, Codes key_codes, int n_bits,
                        index_t n_hashes, const UnitVectors& key, float* sums) {
  BucketSum<float> a;
  a.query = p.query_side();
  a.key = p.key_side();
  a.query_heads = p.s.heads;
  a.query_codes = query_codes.data;
  a.key_codes = key_codes.data;
  a.code_bytes = query_codes.bytes;
  a.n_hashes = n_hashes;
  a.n_buckets = index_t(1) << n_bits;
  a.values = Elements(p.in.value);
  a.n_values = p.s.n_values;
  a.counts = p.counts();
  a.key_valid = key.valid;
  a.valid_batch = p.key_heads() * p.s.n_keys;
  a.valid_head = p.s.n_keys;
  a.order = p.options.causal ? Order::causal : Order::all;
  a.scale = 1.0f / float(n_hashes);
  a.out = sums;
  return a;
}

// The gradient of the values: the transpose of the sum, of the gradient of the sums.
BucketSum<float> transposed(const Problem& p, BucketSum<float> a, const UnitVectors& query,
                            float* sums, float* value_grad) {
  std::swap(a.query, a.key);
  std::swap(a.query_codes, a.key_codes);
  a.values = Elements();
  a.values.data = sums;
  a.values.row = p.sum_columns();
  a.own_values = true;
  a.counts = false;
  a.key_valid = query.valid;
  a.valid_batch = p.s.heads * p.s.n_queries;
  a.valid_head = p.s.n_queries;
  a.order = transposed_order(a.order);
  a.out = value_grad;
  return a;
}

void finish_output(const Problem& p, const float* sums, const UnitVectors& query,
                   const Output<float>& out, float* divisors) {
  p.finish_output(sums, query.valid, out,
                  p.options.normalize == Normalize::none ? nullptr : divisors);
}

// What both estimators' backward passes keep.
struct BackwardScratch {
  UnitVectors query, key;
  float *sums, *bias, *query_grad, *key_grad, *value_grad;
  BackwardScratch(Cut& cut, const Problem& p, bool with_unit = true)
      : query(cut, p.queries(), with_unit ? p.s.n_features : 0),
        key(cut, p.keys(), with_unit ? p.s.n_features : 0),
        sums(cut.take<float>(p.queries() * p.sum_columns())),
        bias(cut.take<float>(p.counts() ? p.queries() : 0)),
        query_grad(cut.take<float>(p.queries() * p.s.n_features)),
        key_grad(cut.take<float>(p.keys_of_queries() * p.s.n_features)),
        value_grad(cut.take<float>(p.keys_of_queries() * p.s.n_values)) {}
};

void sums_backward(const Problem& p, const BackwardScratch& b, const Input<float>& grad,
                   int significand = 24) {
  const auto& kept = p.options.kept;
  p.sums_backward(b.sums, kept.out, kept.divisors, b.query.valid, grad,
                  p.counts() ? b.bias : nullptr, p.counts() ? significand : 24);
}

// Everything of a sum over pairs but its weight, y and out.
Pairs pairs_of(const Problem& p, const UnitVectors& query, const UnitVectors& key, int n_bits,
               bool owner_is_query) {
  Pairs a;
  PairSide queries, keys;
  queries.side = p.query_side();
  queries.unit = query.unit;
  queries.valid = query.valid;
  keys.side = p.key_side();
  keys.unit = key.unit;
  keys.valid = key.valid;
  keys.factor = Elements(p.in.value);
  a.owner = owner_is_query ? queries : keys;
  a.other = owner_is_query ? keys : queries;
  a.owner_is_query = owner_is_query;
  a.query_heads = p.s.heads;
  a.n_features = p.s.n_features;
  a.n_values = p.s.n_values;
  a.causal = p.options.causal;
  a.n_bits = n_bits;
  return a;
}
Elements rows_of(const float* rows, index_t heads, index_t n_rows, index_t columns) {
  return Elements(rows, heads, n_rows, columns);
}
// g: the gradient of the sums, rows of every head of queries.
Elements sums_as_elements(const Problem& p, const float* sums) {
  return rows_of(sums, p.s.heads, p.s.n_queries, p.sum_columns());
}

void expected_sums(const Problem& p, const UnitVectors& query, const UnitVectors& key, int n_bits,
                   float* sums) {
  Pairs a = pairs_of(p, query, key, n_bits, true);
  a.weight = PairWeight::probability;
  a.y = Elements(p.in.value);
  a.y_columns = p.s.n_values;
  a.counts = p.counts();
  a.out = sums;
  sum_pairs(p.queue, a, p.sequences());
}

// What the sorted buckets of a backward pass take.
struct SortScratch {
  struct OfSide {
    std::uint16_t* buckets = nullptr;
    std::int32_t *order = nullptr, *starts = nullptr;
  } query, key;
  SortScratch() = default;
  SortScratch(Cut& cut, const Problem& p, int bits) {
    const index_t starts = kSortHashes * p.sequences() * p.s.heads * ((index_t(1) << bits) + 1);
    const auto take = [&](index_t rows) {
      OfSide to;
      to.buckets = cut.take<std::uint16_t>(kSortHashes * rows);
      to.order = cut.take<std::int32_t>(kSortHashes * rows);
      to.starts = cut.take<std::int32_t>(starts);
      return to;
    };
    query = take(p.queries());
    key = take(p.keys_of_queries());
  }
};

// The lower bound of the collisions: of the unit vectors.
void lower_bound(const Problem& p, const BackwardScratch& b, const SortScratch& scratch, int n_bits,
                 int sort_bits, Codes query_codes, Codes key_codes, index_t n_hashes) {
  BucketGradient a;
  const auto side = [](const Side& of, const UnitVectors& rows, Codes codes,
                       const SortScratch::OfSide& to) {
    return SortSide{of, rows.valid, codes.data, to.buckets, to.order, to.starts};
  };
  a.sort.queries = side(p.query_side(), b.query, query_codes, scratch.query);
  a.sort.keys = side(p.key_side(), b.key, key_codes, scratch.key);
  a.sort.query_heads = p.s.heads;
  a.sort.sequences = p.s.query_starts ? p.s.sequences : 1;
  a.sort.units = p.s.batch * p.s.heads;
  a.sort.n_hashes = n_hashes;
  a.sort.code_bytes = query_codes.bytes;
  a.sort.bits = sort_bits;
  a.query_unit = b.query.unit;
  a.key_unit = b.key.unit;
  a.n_features = p.s.n_features;
  a.n_values = p.s.n_values;
  a.grad = sums_as_elements(p, b.sums);
  a.value = Elements(p.in.value);
  a.bias = p.counts() ? b.bias : nullptr;
  a.causal = p.options.causal;
  a.scale = 0.5f * float(n_bits) / float(n_hashes);
  a.exact_buckets = sort_bits == n_bits;
  a.query_grad = b.query_grad;
  a.key_grad = b.key_grad;
  bucket_gradient(p.queue, a);
}

// Whether the tensor cores do that: 16-bit inputs, and buckets that are sorted by whole codes.
bool by_matrices(const Problem& p, int n_bits) {
  const Element e = p.in.query.element;
  return p.options.gradient == Gradient::lower_bound &&
         (e == Element::bfloat16 || e == Element::float16) && p.in.key.element == e &&
         p.in.value.element == e && n_bits <= kSortBits;
}
MatrixProblem matrix_problem(const Problem& p, const BackwardScratch& b, int n_bits,
                             Codes query_codes, Codes key_codes, index_t n_hashes) {
  MatrixProblem a;
  a.queries = {p.query_side(),
               p.s.batch,
               b.query.valid,
               query_codes.data,
               Elements(p.in.query),
               b.query.inverse,
               sums_as_elements(p, b.sums),
               b.query_grad};
  a.keys = {p.key_side(),       p.s.batch,     b.key.valid,          key_codes.data,
            Elements(p.in.key), b.key.inverse, Elements(p.in.value), b.key_grad};
  a.query_heads = p.s.heads;
  a.sequences = p.s.query_starts ? p.s.sequences : 1;
  a.n_features = p.s.n_features;
  a.n_values = p.s.n_values;
  a.n_hashes = n_hashes;
  a.code_bytes = query_codes.bytes;
  a.bits = n_bits;
  a.biased = p.counts();
  a.bias = p.counts() ? b.bias : nullptr;
  a.causal = p.options.causal;
  a.scale = 0.5f * float(n_bits) / float(n_hashes);
  a.element = p.in.query.element;
  return a;
}

// Gradients of the unit vectors by all pairs, of those that are wanted. codes may be null.
void pair_gradients(const Problem& p, const BackwardScratch& b,
                    const AttentionGradients<float>& wanted, PairWeight weight, int n_bits,
                    Codes query_codes, Codes key_codes, index_t n_hashes) {
  for (const bool of_query : {true, false}) {
    if (!(of_query ? wanted.query : wanted.key).data) continue;
    Pairs a = pairs_of(p, b.query, b.key, n_bits, of_query);
    PairSide& queries = of_query ? a.owner : a.other;
    PairSide& keys = of_query ? a.other : a.owner;
    queries.factor = sums_as_elements(p, b.sums);
    queries.codes = query_codes.data;
    keys.codes = key_codes.data;
    a.code_bytes = query_codes.bytes;
    a.n_hashes = n_hashes;
    a.weight = weight;
    a.bias = p.counts() ? b.bias : nullptr;
    a.y = of_query ? rows_of(b.key.unit, p.key_heads(), p.s.n_keys, p.s.n_features)
                   : rows_of(b.query.unit, p.s.heads, p.s.n_queries, p.s.n_features);
    a.y_columns = p.s.n_features;
    a.out = of_query ? b.query_grad : b.key_grad;
    sum_pairs(p.queue, a, p.sequences());
  }
}

// From those of the unit vectors.
void finish_queries_and_keys(const Problem& p, const BackwardScratch& b,
                             const AttentionGradients<float>& to) {
  if (to.query.data) p.finish_rows(true, b.query_grad, 1, b.query.inverse, to.query);
  if (to.key.data) p.finish_rows(false, b.key_grad, p.group(), b.key.inverse, to.key);
}

}  // namespace

index_t yoso_forward(const Queue& queue, const AttentionShape& shape,
                     const AttentionOptions& options, const HashFunctions& functions,
                     AttentionInputs<float> in, Output<float> out, void* query_codes,
                     void* key_codes, void* scratch, float* divisors) {
  const Problem p{{queue, shape, options, in}};
  Cut cut(scratch);
  const UnitVectors query(cut, p.queries(), 0), key(cut, p.keys(), 0);
  float* const sums = cut.take<float>(p.queries() * p.sum_columns());
  if (!scratch) return cut.used();

  const DeviceGuard guard(queue);
  HashFunctions query_functions = functions;
  query_functions.heads_per_set = p.group();
  // Of the rows' norms only whether they are finite is asked for.
  const bool queries_done = hash(queue, query_functions, in.query, shape.batch, shape.heads,
                                 shape.n_queries, shape.n_features, query_codes, query.valid);
  const bool keys_done = hash(queue, functions, in.key, shape.batch, p.key_heads(), shape.n_keys,
                              shape.n_features, key_codes, key.valid, in.key_mask);
  if (!queries_done) fill(p, query, true, false);
  if (!keys_done) fill(p, key, false, false);
  const int code_bytes = functions.n_bits <= 8 ? 1 : 2;
  const BucketSum<float> sum = sum_of(p, {query_codes, code_bytes}, {key_codes, code_bytes},
                                      functions.n_bits, functions.n_hashes, key, sums);
  bucket_sum(queue, sum, p.sequences(), shared_limit(queue));
  finish_output(p, sums, query, out, divisors);
  return cut.used();
}

index_t yoso_backward(const Queue& queue, const AttentionShape& shape,
                      const AttentionOptions& options, int n_bits, index_t n_hashes,
                      AttentionInputs<float> in, Codes query_codes, Codes key_codes,
                      AttentionGradients<float> gradients, void* scratch) {
  const Problem p{{queue, shape, options, in}};
  Cut cut(scratch);
  const bool matrices = by_matrices(p, n_bits);
  const BackwardScratch b(cut, p, !matrices);
  const bool by_buckets = options.gradient == Gradient::lower_bound && !matrices;
  const int sort_bits = n_bits < kSortBits ? n_bits : kSortBits;
  const SortScratch sort = by_buckets ? SortScratch(cut, p, sort_bits) : SortScratch{};
  // Of queries and keys: all hashes, or a subset.
  const GradientCodes codes = options.gradient_codes.n_hashes > 0
                                  ? options.gradient_codes
                                  : GradientCodes{query_codes, key_codes, n_hashes};
  const MatrixProblem matrix =
      matrix_problem(p, b, n_bits, codes.queries, codes.keys, codes.n_hashes);
  const MatrixScratch matrix_scratch = matrices ? MatrixScratch(cut, matrix) : MatrixScratch{};
  if (!scratch) return cut.used();

  const DeviceGuard guard(queue);
  fill(p, b.query, true, !matrices);
  fill(p, b.key, false, !matrices);
  const BucketSum<float> sum = sum_of(p, query_codes, key_codes, n_bits, n_hashes, b.key, b.sums);
  const index_t limit = shared_limit(queue);
  if (!options.kept.divisors && options.normalize != Normalize::none)
    bucket_sum(queue, sum, p.sequences(), limit);
  sums_backward(p, b, gradients.out, matrices ? significand_bits(p.in.query.element) : 24);
  if (gradients.value.data) {
    bucket_sum(queue, transposed(p, sum, b.query, b.sums, b.value_grad), p.sequences(), limit);
    p.finish_values(b.value_grad, b.key.valid, gradients.value);
  }
  if (!gradients.query.data && !gradients.key.data) return cut.used();
  if (matrices) {
    bucket_gradient(queue, matrix, matrix_scratch);
  } else if (by_buckets) {
    lower_bound(p, b, sort, n_bits, sort_bits, codes.queries, codes.keys, codes.n_hashes);
  } else {
    const PairWeight weight =
        options.gradient == Gradient::collided ? PairWeight::collided : PairWeight::unbiased;
    pair_gradients(p, b, gradients, weight, n_bits, codes.queries, codes.keys, codes.n_hashes);
  }
  finish_queries_and_keys(p, b, gradients);
  return cut.used();
}

index_t expected_forward(const Queue& queue, const AttentionShape& shape,
                         const AttentionOptions& options, int n_bits, AttentionInputs<float> in,
                         Output<float> out, void* scratch, float* divisors) {
  const Problem p{{queue, shape, options, in}};
  Cut cut(scratch);
  const UnitVectors query(cut, p.queries(), shape.n_features), key(cut, p.keys(), shape.n_features);
  float* const sums = cut.take<float>(p.queries() * p.sum_columns());
  if (!scratch) return cut.used();

  const DeviceGuard guard(queue);
  fill(p, query, true, true);
  fill(p, key, false, true);
  expected_sums(p, query, key, n_bits, sums);
  finish_output(p, sums, query, out, divisors);
  return cut.used();
}

index_t expected_backward(const Queue& queue, const AttentionShape& shape,
                          const AttentionOptions& options, int n_bits, AttentionInputs<float> in,
                          AttentionGradients<float> gradients, void* scratch) {
  const Problem p{{queue, shape, options, in}};
  Cut cut(scratch);
  const BackwardScratch b(cut, p);
  if (!scratch) return cut.used();

  const DeviceGuard guard(queue);
  fill(p, b.query, true, true);
  fill(p, b.key, false, true);
  if (!options.kept.divisors && options.normalize != Normalize::none)
    expected_sums(p, b.query, b.key, n_bits, b.sums);
  sums_backward(p, b, gradients.out);
  if (gradients.value.data) {
    Pairs values = pairs_of(p, b.query, b.key, n_bits, false);
    values.weight = PairWeight::probability;
    values.y = sums_as_elements(p, b.sums);
    values.y_columns = shape.n_values;
    values.out = b.value_grad;
    sum_pairs(queue, values, p.sequences());
    p.finish_values(b.value_grad, b.key.valid, gradients.value);
  }
  const bool exact = options.gradient != Gradient::lower_bound;
  pair_gradients(p, b, gradients, exact ? PairWeight::exact : PairWeight::lower_bound, n_bits, {},
                 {}, 1);
  finish_queries_and_keys(p, b, gradients);
  return cut.used();
}

}  // namespace lshkit::cuda

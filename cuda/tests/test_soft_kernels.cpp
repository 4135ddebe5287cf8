// Soft codes on a GPU against the CPU's functions on the same arrays.
#include "bytes.hpp"
#include "check_hash.hpp"
#include "lshkit/cuda/runtime.cuh"
#include "lshkit/cuda/soft.hpp"
#include "lshkit/cuda/weighted_bucket_sum.cuh"
#include "quick.hpp"

namespace {

using cuda::Queue;

struct TableCache {  // as with less room for tables
  explicit TableCache(index_t bytes) {
    if (bytes) cuda::emulated_table_cache = bytes;
  }
  ~TableCache() { cuda::emulated_table_cache = 16 << 20; }
};

template <class T>
std::vector<T> numbers(std::size_t count, unsigned seed) {
  const std::vector<float> x = normal(count, seed);
  return std::vector<T>(x.begin(), x.end());
}
// Up to the rounding of sums in another order, relative to the root mean square.
template <class T>
void check_close(const std::vector<T>& got, const std::vector<T>& wanted, double tolerance) {
  double square = 0;
  for (const T x : wanted)
    if (std::isfinite(x)) square += double(x) * x;
  const double size = std::sqrt(square / double(wanted.size() + 1)) + 1e-30;
  for (std::size_t i = 0; i < wanted.size(); ++i)
    CHECK_CLOSE(got[i], wanted[i], tolerance, tolerance * size);
}

// In the norm of all of them.
void check_norm(const std::vector<float>& got, const std::vector<float>& wanted, double tolerance) {
  double square = 0, wrong = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    CHECK(std::isfinite(got[i]) == std::isfinite(wanted[i]));
    if (!std::isfinite(wanted[i]) || !std::isfinite(got[i])) continue;
    square += double(wanted[i]) * wanted[i];
    wrong += (double(got[i]) - wanted[i]) * (double(got[i]) - wanted[i]);
  }
  CHECK_CLOSE(std::sqrt(wrong), 0, 0, tolerance * std::sqrt(square));
}

struct SumCase {
  index_t nq, nk, m, dv;
  int n_bits;
  index_t query_probes, key_probes;
  Order order = Order::all;
  index_t cache = 0;
  index_t gap = 0;  // numbers before the rows of values and gradients, and between them
};
// Rows in the middle of others' numbers: the first and the next at no address of more than one.
template <class T>
struct SparseRows {
  std::vector<T> numbers;
  Tensor<const T> rows;
  SparseRows(const std::vector<T>& x, index_t n, index_t columns, index_t gap)
      : numbers(gap + x.size() / columns * (columns + gap), T(NAN)) {
    for (std::size_t i = 0; i < x.size(); ++i)
      numbers[gap + i / columns * (columns + gap) + i % columns] = x[i];
    rows = view<const T>(numbers, n, columns + gap);
    rows.data += gap;
  }
};

template <class T, class Code>
void check_weighted_sum(const SumCase& c) {
  const index_t heads = 2, n_buckets = index_t(1) << c.n_bits;
  const auto query = random_codes<Code>(heads * c.nq * c.m * c.query_probes, int(n_buckets), 1);
  const auto key = random_codes<Code>(heads * c.nk * c.m * c.key_probes, int(n_buckets), 2);
  const auto query_weights = numbers<T>(query.size(), 3), key_weights = numbers<T>(key.size(), 4);
  auto values = numbers<T>(heads * c.nk * c.dv, 5);
  const auto grad = numbers<T>(heads * c.nq * c.dv, 6);
  std::vector<std::uint8_t> mask(c.nk);
  for (index_t j = 0; j < c.nk; ++j) mask[j] = j % 3 != 1;
  if (c.nk > 1) values[c.dv] = T(NAN);  // of a key that takes no part
  const BucketSumShape shape{1, heads, c.nq, c.nk, c.m, c.dv, n_buckets};
  const Probes<T> queries{{query.data(), sizeof(Code)}, query_weights.data(), c.query_probes};
  const Probes<T> keys{{key.data(), sizeof(Code)}, key_weights.data(), c.key_probes};
  const Mask taken{mask.data(), 0};
  const T scale = T(1) / T(c.m);
  std::vector<std::vector<T>> results[2];
  for (int on_gpu = 0; on_gpu < 2; ++on_gpu) {
    auto out = unwritten<T>(grad.size()), dv = unwritten<T>(values.size());
    auto dwq = unwritten<T>(query.size()), dwk = unwritten<T>(key.size());
    const SparseRows<T> value_rows(values, c.nk, c.dv, c.gap), grad_rows(grad, c.nq, c.dv, c.gap);
    const auto v = value_rows.rows;
    const WeightedSumGradients<T> gradients{grad_rows.rows, view<T>(dv, c.nk, c.dv), dwq.data(),
                                            dwk.data()};
    const auto to = view<T>(out, c.nq, c.dv);
    if (on_gpu) {
      const TableCache cache(c.cache);
      with_scratch([&](void* scratch) {
        return cuda::weighted_bucket_sum<T>(Queue{}, shape, queries, keys, v, taken, c.order, scale,
                                            to, scratch);
      });
      with_scratch([&](void* scratch) {
        return cuda::weighted_bucket_sum_backward<T>(Queue{}, shape, queries, keys, v, taken,
                                                     c.order, scale, gradients, scratch);
      });
    } else {
      weighted_bucket_sum<T>(shape, queries, keys, v, taken, c.order, scale, to, 1);
      weighted_bucket_sum_backward<T>(shape, queries, keys, v, taken, c.order, scale, gradients, 1);
    }
    results[on_gpu] = {out, dv, dwq, dwk};
  }
  for (int i = 0; i < 4; ++i)
    check_close(results[1][i], results[0][i], sizeof(T) == 4 ? 1e-5 : 1e-13);
}

TEST(weighted_sums_equal_the_cpus) {
  if (!kQuick) check_weighted_sum<float, std::uint8_t>({70, 130, 5, 9, 4, 4, 4});
  // A pass for every hash and head, and several ranges of buckets.
  check_weighted_sum<float, std::uint16_t>(
      {kQuick ? 12 : 30, 41, kQuick ? 2 : 3, 33, 6, 2, 3, Order::all, 10 * 1024});
  // Sorted by one hash of one head at a time.
  check_weighted_sum<float, std::uint16_t>({12, 41, 3, 9, 6, 2, 3, Order::all, 1});
  for (const index_t cache : {60, 100, 200, 400, 2000})  // by groups of hashes, then of heads
    check_weighted_sum<float, std::uint16_t>(
        {12, 41, kQuick ? 2 : 5, 9, 6, 2, 2, Order::all, cache});
  // Many ranges of buckets, for codes side by side and not; more than are sorted by.
  check_weighted_sum<float, std::uint16_t>({9, 20, 1, 5, kQuick ? 11 : 14, 1, 4});
  check_weighted_sum<float, std::uint16_t>({9, 20, 2, 5, kQuick ? 13 : 14, 2, 3});
  if (!kQuick) check_weighted_sum<float, std::uint16_t>({9, 20, 1, 2, 17, 2, 3});
  // Every bucket of every row; more than one chunk of probes.
  check_weighted_sum<float, std::uint8_t>({9, kQuick ? 40 : 300, kQuick ? 1 : 2, 5, 5, 32, 32});
  // A bucket of more rows than are sorted, or summed, at once; of a block's warps all have a share.
  check_weighted_sum<float, std::uint16_t>({5, kQuick ? 300 : 2600, 1, 3, 1, 1, 2});
  check_weighted_sum<float, std::uint16_t>({5, kQuick ? 300 : 2600, 1, 64, 7, 3, 2});
  if (kQuick) return;
  for (const index_t columns : {20, 21, 50, 64, 70, 71})
    check_weighted_sum<double, std::uint8_t>({50, 61, 2, columns, 4, 1, 5});
  check_weighted_sum<float, std::uint8_t>({40, 500, 1, 3, 1, 1, 1});  // many rows of a bucket
  check_weighted_sum<float, std::uint16_t>({1, 1, 1, 1, 9, 1, 1});
}

// Columns of one to three loads of a lane and of two slices, those that every lane has and those
// that some lack, in pairs and single; a warp of probes and some more.
TEST(weighted_sums_of_any_columns_equal_the_cpus) {
  for (const index_t columns : {2, 31, 32, 33, 34, 36, 64, 65, 66, 96, 97, 128, 130, 132}) {
    if (kQuick && columns != 64 && columns != 130) continue;
    for (const index_t gap : {0, 1}) {
      const Order order = columns % 4 == gap ? Order::causal : Order::all;
      check_weighted_sum<float, std::uint16_t>({12, 21, 9, columns, 5, 4, 4, order, 0, gap});
      if (kQuick) continue;
      check_weighted_sum<double, std::uint16_t>({12, 21, 9, columns, 5, 4, 4, order, 0, gap});
    }
  }
  // Codes that are no bucket's, among others: an error on the CPU, no row here.
  const index_t n = 3, m = 16, columns = 64;
  const auto key = random_codes<std::uint16_t>(n * m, 8, 1);
  auto query = random_codes<std::uint16_t>(n * m * 2, 8, 2);
  auto weights = numbers<float>(query.size(), 3);
  const auto values = numbers<float>(n * columns, 4);
  const BucketSumShape shape{1, 1, n, n, m, columns, 8};
  const Probes<float> keys{{key.data(), 2}, nullptr, 1};
  auto out = unwritten<float>(n * columns), wanted = out;
  weights[40] = weights[41] = 0;
  weighted_bucket_sum<float>(shape, {{query.data(), 2}, weights.data(), 2}, keys,
                             view<const float>(values, n, columns), {}, Order::all, 1.0f,
                             view<float>(wanted, n, columns), 1);
  query[40] = 8;
  query[41] = 0xffff;
  weights[40] = weights[41] = 1;
  with_scratch([&](void* scratch) {
    return cuda::weighted_bucket_sum<float>(Queue{}, shape, {{query.data(), 2}, weights.data(), 2},
                                            keys, view<const float>(values, n, columns), {},
                                            Order::all, 1.0f, view<float>(out, n, columns),
                                            scratch);
  });
  check_close(out, wanted, 1e-5);
}

TEST(weighted_sums_refuse_more_rows_than_a_record_has_bits_for) {
  const auto scratch_of = [](index_t rows, index_t probes) {  // no number is touched
    const Probes<float> some{{nullptr, 2}, nullptr, probes};
    return cuda::weighted_bucket_sum<float>(Queue{}, {1, 1, 2, rows, 1, 3, 16}, some, some, {}, {},
                                            Order::causal, 1.0f, {}, nullptr);
  };
  const index_t most = (index_t(1) << 25) - 1;
  CHECK(scratch_of(most, 1) > 0);
  for (const auto& [rows, probes] : {std::pair<index_t, index_t>{most + 1, 1}, {most, 64}}) {
    std::string message;
    try {
      scratch_of(rows, probes);
    } catch (const std::runtime_error& error) {
      message = error.what();
    }
    CHECK(message.find("got " + std::to_string(rows) + " rows") != std::string::npos);
  }
}

TEST(weighted_sums_in_order_equal_the_cpus) {
  for (const Order order : {Order::causal, Order::reversed}) {
    check_weighted_sum<float, std::uint16_t>(
        {kQuick ? 20 : 33, kQuick ? 13 : 50, 2, 70, 5, 1, 8, order, 1});
    if (kQuick) continue;
    check_weighted_sum<float, std::uint8_t>({60, 45, 3, 9, 4, 3, 4, order});
    check_weighted_sum<float, std::uint8_t>({300, 350, 1, 5, 3, 8, 8, order});
    for (const index_t columns : {20, 50, 130})
      check_weighted_sum<double, std::uint8_t>({45, 60, 2, columns, 4, 4, 4, order});
  }
}

Parameters parameters_of(Family family, index_t d, int n_bits, index_t n_hashes, index_t heads) {
  return family == Family::hyperplane ? hyperplane(d, n_bits, n_hashes, heads, 3)
                                      : hadamard(d, n_bits, n_hashes, heads, 3);
}

// Arrays of soft codes, and those that the CPU's and the GPU's functions write.
struct SoftArrays {
  int bytes;
  std::vector<std::uint8_t> codes;
  std::vector<float> margins;
  SoftArrays(int n_bits, index_t pairs, index_t n_probes)
      : bytes(hash_code_bytes(n_bits)),
        codes(pairs * bytes),
        margins(unwritten<float>(pairs * selected_bits(n_probes))) {}
  SoftCodesOut output() { return {codes.data(), margins.data()}; }
  SoftCodes soft() const { return {codes.data(), bytes, margins.data()}; }
  std::vector<int> bits() const {
    std::vector<int> numbers;
    for (const float margin : margins) numbers.push_back(bit_of(margin));
    return numbers;
  }
};

void check_soft_hash(Family family, index_t n, index_t d, int n_bits, index_t m, index_t n_probes) {
  const index_t heads = 2, pairs = heads * n * m;
  const Parameters p = parameters_of(family, d, n_bits, m, heads);
  const HashFunctions f = functions_of(p, family, n_bits, m, heads);
  std::vector<float> x = normal(heads * n * d, 1);
  if (n > 1) x[d] = std::nanf("");
  if (n > 2)
    for (index_t c = 0; c < d; ++c) x[2 * d + c] = 0;
  const float sharpness[] = {1.5f, 2.5f};
  const Tensor<const float> rows = view<const float>(x, n, d);
  SoftArrays wanted(n_bits, pairs, n_probes), got(n_bits, pairs, n_probes);
  std::vector<std::uint8_t> wanted_probes(pairs * n_probes * wanted.bytes), probes(wanted_probes);
  auto wanted_weights = unwritten<float>(pairs * n_probes), weights = wanted_weights;
  soft_hash(f, rows, 1, heads, n, d, n_probes, wanted.codes.data(), wanted.margins.data(), 1);
  soft_probes(wanted.soft(), 1, heads, n, m, n_probes, sharpness, 1, wanted_probes.data(),
              wanted_weights.data(), 1);
  with_scratch([&](void* scratch) {
    return cuda::soft_hash(Queue{}, f, rows, 1, heads, n, d, n_probes, sharpness, 1, got.output(),
                           probes.data(), weights.data(), scratch);
  });
  CHECK(got.codes == wanted.codes);  // of these numbers
  CHECK(got.bits() == wanted.bits());
  CHECK(probes == wanted_probes);
  check_close(got.margins, wanted.margins, 1e-5);
  check_close(weights, wanted_weights, 1e-5);

  const auto grads = normal(weights.size(), 7);
  const bool planes = family == Family::hyperplane;
  std::vector<std::vector<float>> results[2];
  for (int on_gpu = 0; on_gpu < 2; ++on_gpu) {
    auto dx = unwritten<float>(x.size()), dp = unwritten<float>(p.numbers.size());
    auto ds = unwritten<float>(heads);
    const SoftHashGradients to{view<float>(dx, n, d), ds.data(), planes ? dp.data() : nullptr};
    if (on_gpu)
      with_scratch([&](void* scratch) {
        return cuda::soft_hash_backward(Queue{}, f, rows, 1, heads, n, d, n_probes, sharpness, 1,
                                        wanted.soft(), wanted_weights.data(), grads.data(), to,
                                        scratch);
      });
    else
      soft_hash_backward(f, rows, 1, heads, n, d, n_probes, sharpness, 1, wanted.soft(),
                         wanted_weights.data(), grads.data(), to, 1);
    results[on_gpu] = {dx, ds};
    if (planes) results[on_gpu].push_back(dp);
  }
  for (std::size_t i = 0; i < results[0].size(); ++i)
    check_close(results[1][i], results[0][i], 2e-5);
}

TEST(soft_codes_equal_the_cpus) {
  for (const Family family : {Family::hadamard, Family::hyperplane}) {
    check_soft_hash(family, 35, 64, 12, 10, 4);
    check_soft_hash(family, 9, 70, 5, 3, 20);
    check_soft_hash(family, 9, 40, 5, 3, 2);
    check_soft_hash(family, 5, 9, 16, 2, 1);
    check_soft_hash(family, 5, 64, 12, 16, 5);  // eight hashes at a time, of an odd number of bits
    if (kQuick) continue;
    check_soft_hash(family, 20, 64, 12, 32, 4);
    check_soft_hash(family, 20, 64, 8, 32, 2);
    check_soft_hash(family, 20, 64, 12, 32, 8);
    check_soft_hash(family, 20, 64, 12, 16, 16);
    check_soft_hash(family, 140, 60, 8, 70, 3);
    check_soft_hash(family, 20, 130, 9, 40, 16);
    check_soft_hash(family, 3, 33, 7, 9, 128);
  }
}

struct SoftCase {
  index_t heads, key_heads, nq, nk, d, dv;
  int n_bits;
  index_t m, query_probes, key_probes;
  bool causal, masked, packed;
  Normalize normalize;
  Family family;
  index_t cache = 0;
  Element element = Element::float32;
};

void check_soft_attention(const SoftCase& c) {
  AttentionShape shape{1, c.heads, c.nq, c.nk, c.d, c.dv, c.key_heads, 0, nullptr, nullptr};
  const std::vector<index_t> query_starts{0, c.nq / 3, c.nq / 3, c.nq},
      key_starts{0, c.nk / 2, c.nk - 1, c.nk};
  if (c.packed) {
    shape.sequences = 3;
    shape.query_starts = query_starts.data();
    shape.key_starts = key_starts.data();
  }
  auto q = normal(c.heads * c.nq * c.d, 1), k = normal(c.key_heads * c.nk * c.d, 2);
  for (std::size_t i = 0; i < k.size() && i < q.size(); ++i) k[i] += q[i];  // some collide
  q[3 * c.d] = std::nanf("");
  k[2 * c.d + 1] = std::numeric_limits<float>::infinity();
  const auto v = normal(c.key_heads * c.nk * c.dv, 3), g = normal(c.heads * c.nq * c.dv, 4);
  std::vector<std::uint8_t> mask(c.nk);
  for (index_t j = 0; j < c.nk; ++j) mask[j] = j % 4 != 3;
  const Bytes query(q, c.element), key(k, c.element), value(v, c.element), grad(g, c.element);
  const AttentionInputs<float> in{
      query.input(c.heads, c.nq, c.d), key.input(c.key_heads, c.nk, c.d),
      value.input(c.key_heads, c.nk, c.dv), c.masked ? Mask{mask.data(), c.nk} : Mask{}};
  const Parameters p = parameters_of(c.family, c.d, c.n_bits, c.m, c.key_heads);
  const HashFunctions f = functions_of(p, c.family, c.n_bits, c.m, c.key_heads);
  std::vector<float> sharpness(c.key_heads, 2.0f);
  sharpness[0] = 1.5f;
  const SoftOptions options{c.causal,     c.normalize,      c.query_probes,
                            c.key_probes, sharpness.data(), c.key_heads > 1};
  SoftArrays queries(c.n_bits, c.heads * c.nq * c.m, c.query_probes), other_queries = queries;
  SoftArrays keys(c.n_bits, c.key_heads * c.nk * c.m, c.key_probes), other_keys = keys;
  auto divisors = unwritten<float>(c.heads * c.nq), other_divisors = divisors;
  float* const to_divisors = c.normalize == Normalize::none ? nullptr : divisors.data();
  Bytes out(unwritten<float>(g.size()), c.element), other_out = out;
  soft_attention_forward(shape, options, f, in, out.output(c.heads, c.nq, c.dv), to_divisors,
                         queries.output(), keys.output(), 1);
  const TableCache cache(c.cache);
  with_scratch([&](void* scratch) {
    return cuda::soft_attention_forward(Queue{}, shape, options, f, in,
                                        other_out.output(c.heads, c.nq, c.dv),
                                        to_divisors ? other_divisors.data() : nullptr,
                                        other_queries.output(), other_keys.output(), scratch);
  });
  CHECK(other_queries.codes == queries.codes && other_queries.bits() == queries.bits());
  CHECK(other_keys.codes == keys.codes && other_keys.bits() == keys.bits());
  // 16 bits: their last one, of a result that both round.
  const double rounding = c.element == Element::float32   ? 0
                          : c.element == Element::float16 ? 1.0 / 1024
                                                          : 1.0 / 128;
  // Tables of bfloat16: each of their numbers is rounded, by 2^-9 at most, besides the result.
  const bool short_tables = c.element == Element::bfloat16;
  const auto check = [&](const Bytes& got, const Bytes& wanted, double tolerance) {
    if (short_tables) return check_norm(got.floats(), wanted.floats(), rounding);
    check_close(got, wanted, tolerance + rounding);
  };
  check(other_out, out, 2e-5);

  // 0: the CPU's, 1: the kernels', 2: theirs of one input alone, another in each case.
  std::vector<Bytes> rows[3];
  std::vector<std::vector<float>> numbers[3];
  const int which = int(c.nq + c.nk + c.d) % 3;
  for (int on_gpu = 0; on_gpu < 3; ++on_gpu) {
    Bytes dq(unwritten<float>(q.size()), c.element), dk(unwritten<float>(k.size()), c.element);
    Bytes dv(unwritten<float>(v.size()), c.element);
    auto ds = unwritten<float>((c.packed ? 3 : 1) * c.heads);
    auto dp = unwritten<float>(p.numbers.size());
    AttentionGradients<float> to{grad.input(c.heads, c.nq, c.dv), dq.output(c.heads, c.nq, c.d),
                                 dk.output(c.key_heads, c.nk, c.d),
                                 dv.output(c.key_heads, c.nk, c.dv)};
    const Input<float> given = out.input(c.heads, c.nq, c.dv);
    const bool alone = on_gpu == 2;
    if (alone && which != 0) to.query = {};
    if (alone && which != 1) to.key = {};
    if (alone && which != 2) to.value = {};
    float* const planes = c.family == Family::hyperplane && !alone ? dp.data() : nullptr;
    if (on_gpu)
      with_scratch([&](void* scratch) {
        return cuda::soft_attention_backward(Queue{}, shape, options, f, in, given, to_divisors,
                                             queries.soft(), keys.soft(), to,
                                             alone ? nullptr : ds.data(), planes, scratch);
      });
    else
      soft_attention_backward(shape, options, f, in, given, to_divisors, queries.soft(),
                              keys.soft(), to, ds.data(), planes, 1);
    rows[on_gpu] = {dq, dk, dv};
    numbers[on_gpu] = {ds};
    if (planes) numbers[on_gpu].push_back(dp);
  }
  for (std::size_t i = 0; i < rows[0].size(); ++i) check(rows[1][i], rows[0][i], 5e-5);
  CHECK(rows[2][which].bytes == rows[1][which].bytes);
  for (std::size_t i = 0; i < numbers[0].size(); ++i)
    if (short_tables)
      check_norm(numbers[1][i], numbers[0][i], rounding);
    else
      check_close(numbers[1][i], numbers[0][i], 5e-5);
}

TEST(soft_attention_equals_the_cpus) {
  constexpr Family fast = Family::hadamard, planes = Family::hyperplane;
  check_soft_attention(
      {4, 2, 20, 23, 16, 9, 5, 3, 4, 4, false, true, false, Normalize::l2, fast, 6000});
  check_soft_attention(
      {2, 1, 20, 20, 9, 33, 4, 2, 4, 2, true, true, true, Normalize::sum, planes, 1});
  // Copies of an odd number of 16-bit numbers, the last of which begins 256 bytes.
  check_soft_attention({1, 1, 43, 43, 9, 3, 5, 1, 1, 2, true, false, false, Normalize::l2, fast, 0,
                        Element::bfloat16});
  if (kQuick) return;
  check_soft_attention(
      {2, 2, 33, 40, 64, 64, 12, 9, 4, 4, false, false, false, Normalize::sum, fast});
  check_soft_attention(
      {2, 2, 20, 23, 12, 9, 4, 3, 16, 16, true, false, false, Normalize::none, fast});
  check_soft_attention({2, 2, 20, 23, 12, 9, 5, 3, 1, 7, false, true, true, Normalize::l2, fast});
  check_soft_attention({2, 2, 20, 23, 12, 9, 5, 3, 5, 1, false, true, true, Normalize::l2, planes});
  for (const index_t cache : {1, 400, 2000, 6000})
    check_soft_attention(
        {6, 3, 40, 41, 12, 9, 5, 5, 4, 4, false, true, true, Normalize::sum, fast, cache});
  // One to three columns of a lane, of vectors and of values, in pairs and single.
  for (const Element element : {Element::float32, Element::bfloat16, Element::float16})
    for (const index_t columns : {20, 21, 50, 64, 80, 81})
      for (const bool causal : {false, true})
        check_soft_attention({2, 2, 20, 23, columns, columns, 5, columns == 64 ? 9 : 3, 4, 4,
                              causal, true, false, Normalize::l2, fast, 0, element});
}

}  // namespace

// Kept tables and attention step by step, against the CPU's functions.
#include <utility>

#include "check.hpp"
#include "check_hash.hpp"
#include "lshkit/bucket_sum.hpp"
#include "lshkit/cuda/bucket_table.hpp"
#include "lshkit/cuda/collisions.hpp"
#include "lshkit/cuda/decoding.hpp"
#include "lshkit/cuda/elements.cuh"
#include "lshkit/cuda/runtime.cuh"
#include "quick.hpp"

namespace {

using cuda::Queue;

// To the last bit: rows are added in their order.
template <class T, class Code>
void check_table(index_t rows, index_t m, index_t n_buckets, index_t dv, int most_codes) {
  const auto codes = random_codes<Code>(rows * m, most_codes, 1);
  const auto floats = normal(rows * (dv + 2), 2);
  const std::vector<T> values(floats.begin(), floats.end());
  std::vector<T> wanted(m * n_buckets * dv);
  for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] = T(i % 7) / 8;
  std::vector<T> table(wanted);
  const Codes all{codes.data(), int(sizeof(Code))};
  for (const T sign : {T(1), T(-1)}) {
    bucket_table_add<T>(wanted.data(), m, n_buckets, dv, all, values.data(), dv + 2, rows, sign, 1);
    const index_t taken = sign > 0 ? rows / 3 : rows;  // in two calls and in one
    cuda::bucket_table_add<T>(Queue{}, table.data(), m, n_buckets, dv, all, values.data(), dv + 2,
                              taken, sign);
    cuda::bucket_table_add<T>(Queue{}, table.data(), m, n_buckets, dv,
                              Codes{codes.data() + taken * m, int(sizeof(Code))},
                              values.data() + taken * (dv + 2), dv + 2, rows - taken, sign);
    CHECK(table == wanted);
    std::vector<T> out = unwritten<T>(rows * dv), expected = out;
    const T scale = T(1) / T(m);
    bucket_table_query<T>(wanted.data(), m, n_buckets, dv, all, rows, scale, expected.data(), 1);
    cuda::bucket_table_query<T>(Queue{}, table.data(), m, n_buckets, dv, all, rows, scale,
                                out.data());
    for (std::size_t i = 0; i < out.size(); ++i) CHECK_CLOSE(out[i], expected[i], 1e-5, 1e-5);
  }
}

template <class Code>
void check_collisions(index_t nq, index_t nk, index_t m, int n_buckets, bool causal) {
  const auto query = random_codes<Code>(nq * m, n_buckets, 1);
  const auto key = random_codes<Code>(nk * m, n_buckets, 2);
  std::vector<std::uint8_t> mask(nk);
  for (index_t j = 0; j < nk; ++j) mask[j] = j % 5 != 3;
  const CollisionShape shape{nq, nk, m};
  const Codes q{query.data(), int(sizeof(Code))}, k{key.data(), int(sizeof(Code))};
  const Order order = causal ? Order::causal : Order::all;
  std::vector<std::int64_t> indptr(nq + 1, -1), wanted(indptr);
  collision_indptr(shape, q, k, mask.data(), order, wanted.data(), 1);
  cuda::collision_indptr(Queue{}, shape, q, k, mask.data(), order, indptr.data());
  CHECK(indptr == wanted);
  const index_t size = wanted.back();
  std::vector<std::int32_t> indices(size, -1), counts(size, -1);
  std::vector<std::int32_t> wanted_indices(size), wanted_counts(size);
  collisions(shape, q, k, mask.data(), order, wanted.data(), wanted_indices.data(),
             wanted_counts.data(), 1);
  cuda::collisions(Queue{}, shape, q, k, mask.data(), order, wanted.data(), size, indices.data(),
                   counts.data());
  CHECK(indices == wanted_indices && counts == wanted_counts);
}

struct Case {
  index_t batch = 2, key_heads = 2, group = 1, n = 5, d = 6, dv = 7;
  int n_bits = 3;
  index_t m = 5;
  TableType type = TableType::float32;
  Normalize normalize = Normalize::l2;
  bool masked = false, bad_rows = false, causal = true;
  DecodingProbes probes;
};

// A state on the CPU, and one for the kernels, which must hold the same numbers.
struct State {
  const Case& c;
  Parameters p;
  std::vector<std::uint8_t> sums;
  std::vector<float> counts;
  explicit State(const Case& options) : c(options) {
    p = hadamard(c.d, c.n_bits, c.m, c.key_heads, 5);
    const index_t rows = c.batch * c.key_heads * c.m << c.n_bits;
    sums.resize(rows * c.dv * (c.type == TableType::float16 ? 2 : 4));
    counts.resize(rows);
  }
  DecodingTables tables() {
    DecodingTables t;
    t.batch = c.batch;
    t.key_heads = c.key_heads;
    t.group = c.group;
    t.n_values = c.dv;
    t.type = c.type;
    t.sums = sums.data();
    if (c.normalize == Normalize::sum) t.counts = counts.data();
    return t;
  }
  HashFunctions functions() const {
    return functions_of(p, Family::hadamard, c.n_bits, c.m, c.key_heads);
  }
};

struct Inputs {
  std::vector<float> query, key, value;
  std::vector<std::uint8_t> mask;
  explicit Inputs(const Case& c)
      : query(normal(c.batch * c.key_heads * c.group * c.n * c.d, 1)),
        key(normal(c.batch * c.key_heads * c.n * c.d, 2)),
        value(normal(c.batch * c.key_heads * c.n * c.dv, 3)),
        mask(c.batch * c.n, 1) {
    for (std::size_t i = 0; i < query.size(); ++i) query[i] += 2 * key[i % key.size()];
    for (std::size_t i = 0; c.masked && i < mask.size(); ++i) mask[i] = i % 3 != 1;
    if (!c.bad_rows) return;
    query[c.d + 1] = std::nanf("");
    key[2 * c.d] = std::numeric_limits<float>::infinity();
    for (index_t i = 0; i < c.d; ++i) query[3 * c.d + i] = key[i] = 0;
  }
  Tensor<const float> rows(const std::vector<float>& x, index_t heads, index_t n,
                           index_t columns) const {
    return {x.data(), heads * n * columns, n * columns, columns};
  }
};

// Positions [first, first + n) of the inputs on the CPU, or by the kernels.
void step(State& s, const Inputs& in, index_t first, index_t n, bool keys, bool queries, bool gpu,
          std::vector<float>& out) {
  const Case& c = s.c;
  const index_t heads = c.key_heads * c.group;
  DecodingInputs i;
  i.n_features = c.d;
  i.causal = c.causal && keys && queries;
  if (queries) {
    i.n_queries = n;
    i.query = in.rows(in.query, heads, c.n, c.d);
    i.query.data += first * c.d;
  }
  if (keys) {
    i.n_keys = n;
    i.key = in.rows(in.key, c.key_heads, c.n, c.d);
    i.value = in.rows(in.value, c.key_heads, c.n, c.dv);
    i.key.data += first * c.d;
    i.value.data += first * c.dv;
    if (c.masked) i.key_mask = {in.mask.data() + first, c.n};
  }
  const Tensor<float> to{out.data() + first * c.dv, heads * c.n * c.dv, c.n * c.dv, c.dv};
  if (!gpu) return decode(s.tables(), s.functions(), c.probes, c.normalize, i, to, 1);
  const cuda::DecodingRows rows{i.n_queries, i.n_keys, i.n_features, i.query,
                                i.key,       i.value,  i.key_mask,   i.causal};
  with_scratch([&](void* scratch) {
    return cuda::decode(Queue{}, s.tables(), s.functions(), c.probes, c.normalize, rows, to,
                        scratch);
  });
}

void check_decoding(const Case& c) {
  const Inputs in(c);
  State cpu(c), gpu(c), parts(c);
  const std::size_t size = c.batch * c.key_heads * c.group * c.n * c.dv;
  std::vector<float> wanted = unwritten<float>(size), out = wanted, again = wanted;
  step(cpu, in, 0, c.n, true, true, false, wanted);
  step(gpu, in, 0, c.n, true, true, true, out);
  const double tolerance = c.probes.sharpness ? 1e-4 : 1e-5;  // margins carry 20 bits
  if (!c.probes.sharpness) CHECK(gpu.sums == cpu.sums && gpu.counts == cpu.counts);
  for (std::size_t i = 0; i < size; ++i) CHECK_CLOSE(out[i], wanted[i], tolerance, tolerance);
  // Divided in another way, to the last bit.
  if (c.causal) {
    step(parts, in, 0, 1, true, true, true, again);
    step(parts, in, 1, c.n / 2, true, true, true, again);
    for (index_t i = 1 + c.n / 2; i < c.n; ++i) step(parts, in, i, 1, true, true, true, again);
  } else {
    step(parts, in, 0, c.n, true, false, true, again);
    step(parts, in, 0, c.n, false, true, true, again);
  }
  CHECK(parts.sums == gpu.sums && parts.counts == gpu.counts);
  CHECK(std::memcmp(again.data(), out.data(), sizeof(float) * size) == 0);
  // Queries after all of it.
  step(cpu, in, 0, c.n, false, true, false, wanted);
  step(gpu, in, 0, c.n, false, true, true, out);
  for (std::size_t i = 0; i < size; ++i) CHECK_CLOSE(out[i], wanted[i], tolerance, tolerance);
}

}  // namespace

TEST(pairs_that_collide) {
  for (const index_t nq : {1, 21, kQuick ? 40 : 700})
    for (const bool causal : {false, true}) {
      check_collisions<std::uint8_t>(nq, 33, 5, 8, causal);
      check_collisions<std::uint16_t>(nq, kQuick ? 70 : 300, 17, 300, causal);
    }
}

TEST(kept_tables) {
  check_table<float, std::uint8_t>(70, 2, 3, 33, 3);
  check_table<double, std::uint16_t>(9, 3, 300, 2, 300);
  if (kQuick) return;
  check_table<float, std::uint8_t>(2100, 35, 256, 5, 256);
  check_table<float, std::uint16_t>(40, 1, 65536, 70, 65536);
  check_table<double, std::uint8_t>(1, 1, 1, 1, 1);
  // Codes beyond the buckets are in none.
  std::vector<std::uint8_t> codes{0, 200, 1};
  std::vector<float> values{1, 2, 4}, table(2), out(3, 9);
  cuda::bucket_table_add<float>(Queue{}, table.data(), 1, 2, 1, {codes.data(), 1}, values.data(), 1,
                                3, 1);
  CHECK(table == std::vector<float>{1, 4});
  cuda::bucket_table_query<float>(Queue{}, table.data(), 1, 2, 1, {codes.data(), 1}, 3, 1,
                                  out.data());
  CHECK(out == std::vector<float>{1, 0, 4});
}

TEST(attention_step_by_step) {
  for (const Normalize normalize : {Normalize::none, Normalize::sum, Normalize::l2})
    for (const TableType type : {TableType::float32, TableType::float16})
      for (const bool causal : {false, true}) {
        if (kQuick && (type == TableType::float16) != (normalize == Normalize::sum)) continue;
        Case c;
        if (kQuick) c.batch = c.key_heads = 1;
        c.normalize = normalize;
        c.type = type;
        c.causal = c.masked = causal;
        c.bad_rows = true;
        c.n = kQuick ? 4 : 11;
        check_decoding(c);
      }
  Case c;  // entries of a warp that go together and more, columns of two blocks
  c.batch = c.key_heads = 1;
  c.n = 3;
  c.m = kQuick ? 17 : 90;
  c.n_bits = 9;
  c.dv = 130;
  c.normalize = Normalize::sum;
  check_decoding(c);
  c.type = TableType::float16;
  c.dv = 40;
  check_decoding(c);
  c.type = TableType::float32;
  if (kQuick) return;
  c.normalize = Normalize::l2;
  c.m = 33;
  for (const index_t group : {3, 8, 11})
    for (const index_t dv : {33, 64, 100}) {
      c.group = group;
      c.dv = dv;
      c.key_heads = 2;
      c.n = 10;
      check_decoding(c);
    }
}

TEST(soft_attention_step_by_step) {
  const float sharpness[] = {2.0f, 0.5f};
  for (const auto& [queries, keys] : {std::pair<index_t, index_t>{2, 7}, {4, 4}, {6, 1}}) {
    Case c;
    c.m = 10;
    c.probes = {queries, keys, sharpness, 1};
    c.normalize = queries == 4 ? Normalize::l2 : Normalize::sum;
    c.group = kQuick ? 1 : 3;
    c.n = 4;
    c.bad_rows = c.masked = queries == 2;
    if (kQuick) c.batch = 1;
    check_decoding(c);
  }
}

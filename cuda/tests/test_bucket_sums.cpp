// Sums of codes of one byte, of every layout that the kernel tells apart, against their definition.
#include "check.hpp"
#include "lshkit/cuda/bucket_sum.cuh"
#include "lshkit/cuda/runtime.cuh"
#include "problem.hpp"
#include "quick.hpp"

namespace {

using namespace lshkit;

struct SumCase {
  index_t batch = 1, heads = 1, key_heads = 1, nq, nk, n_hashes, n_buckets, n_values;
  index_t row = 0;     // elements from one row of values to the next, 0: n_values
  index_t offset = 0;  // of codes, values and sums from where they are aligned
  Element element = Element::float32;
  bool masked = false, counts = false, packed = false, own_values = false;
  Order order = Order::all;
};
SumCase sized(index_t nq, index_t nk, index_t n_hashes, index_t n_buckets, index_t n_values) {
  SumCase c;
  c.nq = nq;
  c.nk = nk;
  c.n_hashes = n_hashes;
  c.n_buckets = n_buckets;
  c.n_values = n_values;
  return c;
}

void check_sum(const SumCase& c, index_t shared_limit = 227 * 1024) {
  const index_t row = c.row ? c.row : c.n_values, columns = c.n_values + c.counts;
  const index_t rows_of_queries = c.batch * c.heads * c.nq;
  const index_t rows_of_keys = c.batch * c.key_heads * c.nk;
  const index_t rows_of_values = c.own_values ? c.batch * c.heads * c.nk : rows_of_keys;
  const int beyond = int(c.n_buckets < 250 ? c.n_buckets + 5 : 256);  // some are in no bucket
  const auto query = random_codes<std::uint8_t>(c.offset + rows_of_queries * c.n_hashes, beyond, 1);
  const auto key = random_codes<std::uint8_t>(c.offset + rows_of_keys * c.n_hashes, beyond, 2);
  const auto numbers = normal(c.offset + rows_of_values * row, 3);
  std::vector<unsigned char> values(numbers.size() * element_bytes(c.element));
  for (std::size_t i = 0; i < numbers.size(); ++i)
    cuda::store_element<float>(values.data(), index_t(i), c.element, numbers[i]);
  std::vector<std::uint8_t> valid(rows_of_keys);
  for (std::size_t j = 0; j < valid.size(); ++j) valid[j] = j % 3 != 1;
  if (c.masked && c.n_values > 0 && rows_of_values > 1)  // never looked at
    cuda::store_element<float>(values.data(), c.offset + row, c.element, std::nanf(""));
  const std::vector<index_t> query_starts{0, c.nq / 3, c.nq / 3, c.nq},
      key_starts{0, c.nk / 2, c.nk, c.nk};

  cuda::BucketSum<float> a;
  const index_t group = c.heads / c.key_heads;
  a.query = {c.nq, c.heads, 1, c.packed ? query_starts.data() : nullptr};
  a.key = {c.nk, c.key_heads, group, c.packed ? key_starts.data() : nullptr};
  a.query_heads = c.heads;
  a.query_codes = query.data() + c.offset;
  a.key_codes = key.data() + c.offset;
  a.n_hashes = c.n_hashes;
  a.n_buckets = c.n_buckets;
  a.values.data = values.data() + c.offset * element_bytes(c.element);
  a.values.element = c.element;
  a.values.row = row;
  a.values.head = c.nk * row;
  a.values.batch = c.key_heads * c.nk * row;
  a.own_values = c.own_values;
  a.n_values = c.n_values;
  a.counts = c.counts;
  a.key_valid = c.masked ? valid.data() : nullptr;
  a.valid_batch = c.key_heads * c.nk;
  a.valid_head = c.nk;
  a.order = c.order;
  a.scale = 1.0f / float(c.n_hashes);
  auto out = unwritten<float>(c.offset + rows_of_queries * columns);
  a.out = out.data() + c.offset;
  const index_t sequences = c.packed ? 3 : c.batch;
  cuda::bucket_sum(cuda::Queue{}, a, sequences, shared_limit);

  for (index_t task = 0; task < sequences * c.heads; ++task) {
    const cuda::Span q = cuda::span_of(a.query, c.heads, task);
    const cuda::Span k = cuda::span_of(a.key, c.heads, task);
    for (index_t i = 0; i < q.count; ++i) {
      std::vector<double> sum(columns), size(columns);
      for (index_t j = 0; j < k.count; ++j) {
        if (c.order == Order::causal ? j > i : c.order == Order::reversed ? j < i : false) continue;
        if (c.masked && !valid[k.flat + j]) continue;
        int equal = 0;
        for (index_t h = 0; h < c.n_hashes; ++h) {
          const int code = query[c.offset + (q.flat + i) * c.n_hashes + h];
          equal += code < c.n_buckets && code == key[c.offset + (k.flat + j) * c.n_hashes + h];
        }
        const index_t from = c.offset + (c.own_values ? k.owned + j : k.flat + j) * row;
        for (index_t x = 0; x < columns && equal > 0; ++x) {
          const double v =
              x < c.n_values ? cuda::load_element<double>(values.data(), from + x, c.element) : 1;
          sum[x] += equal * v / double(c.n_hashes);
          size[x] += equal * std::fabs(v) / double(c.n_hashes);
        }
      }
      for (index_t x = 0; x < columns; ++x)
        CHECK_CLOSE(a.out[(q.owned + i) * columns + x], sum[x], 0, 1e-6 * size[x]);
    }
  }
}

TEST(sums_of_bytes_in_order) {
  for (const Order order : {Order::causal, Order::reversed}) {
    SumCase c = sized(130, 125, 17, 2, 3);  // two chunks, two slices
    c.order = order;
    check_sum(c);
    c = sized(9, 11, 5, 8, 13);  // 16 hashes a table
    c.offset = 1;
    c.order = order;
    c.masked = c.counts = true;
    check_sum(c);
    if (kQuick) continue;
    for (const index_t n_hashes : {1, 4, 16, 17, 32, 33, 70})
      for (const index_t n_buckets : {1, 3, 200, 254, 255, 256}) {
        c = sized(33, 37, n_hashes, n_buckets, 12);
        c.order = order;
        c.masked = n_buckets > 3;
        check_sum(c);
      }
    for (const index_t keys : {0, 1, 8, 119, 120, 121, 245, 400}) {
      c = sized(245, keys, 32, 30, 6);
      c.order = order;
      check_sum(c);
    }
    for (const index_t limit : {90, 163})
      for (const index_t n_hashes : {16, 32}) {
        c = sized(130, 130, n_hashes, 9, 20);
        c.order = order;
        check_sum(c, limit * 1024);
      }
  }
}

TEST(sums_of_bytes) {
  check_sum(sized(3, 5, 32, 4, 6));
  check_sum(sized(40, 250, 17, 2, 7));  // two chunks, two slices
  {
    SumCase c = sized(9, 11, 5, 8, 13);  // 16 hashes a table
    c.offset = 1;
    c.masked = c.counts = true;
    check_sum(c);
  }
  if (kQuick) return;
  for (const index_t n_hashes : {1, 4, 15, 16, 17, 24, 32, 33, 64, 70})
    for (const index_t n_buckets : {1, 3, 200, 256}) {
      SumCase c = sized(33, 37, n_hashes, n_buckets, 12);
      c.masked = n_buckets > 3;
      check_sum(c);
    }
  for (const index_t keys : {1, 7, 8, 9, 239, 240, 241, 488})
    check_sum(sized(270, keys, 32, 30, 4));
  for (const index_t limit : {70, 99, 163})  // one table, one, two
    for (const index_t n_hashes : {16, 32})
      check_sum(sized(30, 290, n_hashes, 9, 20), (limit > 70 ? limit : 90) * 1024);
  check_sum(sized(30, 290, 32, 9, 20), 48 * 1024);  // none: the other kernel
}

TEST(sums_of_bytes_of_every_layout) {
  for (const Element element :
       {Element::bfloat16, Element::float16, Element::float32, Element::float64})
    for (const index_t odd : {0, 1}) {
      SumCase c = sized(5, 9, 20, 3, 6 + odd);
      c.element = element;
      c.row = c.n_values + 2;
      c.offset = odd * 3;
      c.counts = odd;
      check_sum(c);
      if (element == Element::bfloat16) {
        c.packed = c.masked = true;
        c.heads = 4;
        c.key_heads = 2;
        check_sum(c);
        c.own_values = true;
        check_sum(c);
        c.order = Order::reversed;
        check_sum(c);
        c.order = Order::causal;
        check_sum(c);
      }
    }
  SumCase c = sized(6, 8, 3, 2, 5);
  c.batch = 2;
  c.heads = 4;
  c.key_heads = 2;
  for (const Order order : {Order::all, Order::causal, Order::reversed}) {
    c.order = order;
    c.masked = order != Order::all;
    check_sum(c);
  }
  check_sum(sized(4, 0, 32, 256, 3));  // no key: zeros
  check_sum(sized(0, 4, 32, 256, 3));
}

}  // namespace

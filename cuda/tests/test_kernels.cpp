// The CUDA kernels' own source on the host, against the CPU's functions on the same hash arrays.
#include "bytes.hpp"
#include "check.hpp"
#include "check_hash.hpp"
#include "lshkit/attention.hpp"
#include "lshkit/bucket_sum.hpp"
#include "lshkit/cuda/attention.hpp"
#include "lshkit/cuda/elements.cuh"
#include "lshkit/cuda/runtime.cuh"
#include "quick.hpp"

namespace {

using cuda::Queue;

struct SharedLimit {  // as on a GPU with less
  explicit SharedLimit(index_t bytes) { cuda::emulated_shared_limit = bytes; }
  ~SharedLimit() { cuda::emulated_shared_limit = 227 * 1024; }
};

// Sums agree up to the rounding of each, which is relative to the sum of the sizes.
template <class T>
void check_bucket_sum(index_t nq, index_t nk, index_t m, int n_bits, index_t dv, Order order,
                      bool masked) {
  const index_t heads = 2, n_buckets = index_t(1) << n_bits;
  const auto query = random_codes<std::uint16_t>(heads * nq * m, int(n_buckets), 1);
  const auto key = random_codes<std::uint16_t>(heads * nk * m, int(n_buckets), 2);
  const auto floats = normal(heads * nk * dv, 3);
  std::vector<T> values(floats.begin(), floats.end()), sizes(values);
  for (T& x : sizes) x = std::fabs(x);
  std::vector<std::uint8_t> mask(nk);
  for (index_t j = 0; j < nk; ++j) mask[j] = j % 3 != 1;
  BucketSumShape shape;
  shape.heads = heads;
  shape.n_queries = nq;
  shape.n_keys = nk;
  shape.n_hashes = m;
  shape.n_values = dv;
  shape.n_buckets = n_buckets;
  auto out = unwritten<T>(heads * nq * dv), wanted = out, size = out;
  const Codes q{query.data(), 2}, k{key.data(), 2};
  const Mask taken{masked ? mask.data() : nullptr, 0};
  const T scale = T(1) / T(m);
  bucket_sum<T>(shape, q, k, view<const T>(values, nk, dv), taken, order, scale,
                view<T>(wanted, nq, dv), 1);
  bucket_sum<T>(shape, q, k, view<const T>(sizes, nk, dv), taken, order, scale,
                view<T>(size, nq, dv), 1);
  cuda::bucket_sum<T>(Queue{}, shape, q, k, view<const T>(values, nk, dv), taken, order, scale,
                      view<T>(out, nq, dv));
  const double rounding = sizeof(T) == 4 ? 1e-6 : 1e-14;
  for (std::size_t i = 0; i < out.size(); ++i)
    CHECK_CLOSE(out[i], wanted[i], 0, rounding * size[i]);
}

struct AttentionCase {
  index_t batch = 1, heads = 2, key_heads = 2, nq, nk, d, dv;
  int n_bits = 5;
  index_t n_hashes = 6;
  bool causal = false, masked = false, packed = false, bad_rows = false, expectation = true;
  Normalize normalize = Normalize::l2;
  Gradient gradient = Gradient::lower_bound;
  Element element = Element::float32;
};

void check_attention(const AttentionCase& c) {
  AttentionShape shape{c.batch, c.heads, c.nq, c.nk, c.d, c.dv, c.key_heads, 0, nullptr, nullptr};
  const std::vector<index_t> query_starts{0, c.nq / 3, c.nq / 3, c.nq},
      key_starts{0, c.nk / 2, c.nk - 1, c.nk};
  if (c.packed) {
    shape.sequences = 3;
    shape.query_starts = query_starts.data();
    shape.key_starts = key_starts.data();
  }
  auto q = normal(c.batch * c.heads * c.nq * c.d, 1),
       k = normal(c.batch * c.key_heads * c.nk * c.d, 2);
  const auto v = normal(c.batch * c.key_heads * c.nk * c.dv, 3),
             g = normal(c.batch * c.heads * c.nq * c.dv, 4);
  for (std::size_t i = 0; i < k.size() && i < q.size(); ++i) k[i] += q[i];  // some collide
  if (c.bad_rows) {
    q[3 * c.d] = std::nanf("");
    k[2 * c.d + 1] = std::numeric_limits<float>::infinity();
    for (index_t x = 0; x < c.d; ++x) q[5 * c.d + x] = k[4 * c.d + x] = 0;
  }
  const Bytes query(q, c.element), key(k, c.element), value(v, c.element), grad(g, c.element);
  std::vector<std::uint8_t> mask(c.batch * c.nk);
  for (std::size_t j = 0; j < mask.size(); ++j) mask[j] = j % 4 != 2;
  const AttentionInputs<float> in{
      query.input(c.heads, c.nq, c.d), key.input(c.key_heads, c.nk, c.d),
      value.input(c.key_heads, c.nk, c.dv), c.masked ? Mask{mask.data(), c.nk} : Mask{}};
  AttentionOptions options;
  options.causal = c.causal;
  options.normalize = c.normalize;
  options.gradient = c.gradient;
  const Parameters p = hadamard(c.d, c.n_bits, c.n_hashes, c.key_heads, 5);
  const HashFunctions f = functions_of(p, Family::hadamard, c.n_bits, c.n_hashes, c.key_heads);

  // 0: the CPU's sampled attention, 1: the kernels', 2 and 3: expected; 4: one gradient alone, 5:
  // unwritten.
  const int bytes = hash_code_bytes(c.n_bits);
  std::vector<std::uint8_t> query_codes(c.batch * c.heads * c.nq * c.n_hashes * bytes),
      key_codes(c.batch * c.key_heads * c.nk * c.n_hashes * bytes), query_again(query_codes),
      key_again(key_codes);
  std::vector<Bytes> out, dq, dk, dv;
  for (int i = 0; i < 6; ++i) {
    out.emplace_back(unwritten<float>(g.size()), c.element);
    dq.emplace_back(unwritten<float>(q.size()), c.element);
    dk.emplace_back(unwritten<float>(k.size()), c.element);
    dv.emplace_back(unwritten<float>(v.size()), c.element);
  }
  const auto output = [&](int i) { return out[i].output(c.heads, c.nq, c.dv); };
  const auto gradients = [&](int i) {
    return AttentionGradients<float>{
        grad.input(c.heads, c.nq, c.dv), dq[i].output(c.heads, c.nq, c.d),
        dk[i].output(c.key_heads, c.nk, c.d), dv[i].output(c.key_heads, c.nk, c.dv)};
  };
  const Codes queries{query_codes.data(), bytes}, keys{key_codes.data(), bytes};
  const Queue queue;
  // Of the same rows in 32 bits: the CPU hashes and sums those of 16 in 16 bits.
  const Bytes query_32(query.floats(), Element::float32), key_32(key.floats(), Element::float32),
      value_32(value.floats(), Element::float32);
  yoso_forward(shape, options, f,
               {query_32.input(c.heads, c.nq, c.d), key_32.input(c.key_heads, c.nk, c.d),
                value_32.input(c.key_heads, c.nk, c.dv), in.key_mask},
               output(0), query_codes.data(), key_codes.data(), 1);
  with_scratch([&](void* s) {
    return cuda::yoso_forward(queue, shape, options, f, in, output(1), query_again.data(),
                              key_again.data(), s);
  });
  CHECK(query_again == query_codes && key_again == key_codes);
  const double tolerance = c.element == Element::float32   ? 2e-4
                           : c.element == Element::float16 ? 2e-3
                                                           : 1e-2;
  check_close(out[1], out[0], tolerance);

  yoso_backward(shape, options, c.n_bits, c.n_hashes, in, queries, keys, gradients(0), 1);
  with_scratch([&](void* s) {
    return cuda::yoso_backward(queue, shape, options, c.n_bits, c.n_hashes, in, queries, keys,
                               gradients(1), s);
  });
  // On the tensor cores terms are rounded to 16 bits; the limits are those of test_cuda.py.
  const double of_terms = c.element == Element::float32 || c.gradient != Gradient::lower_bound
                              ? tolerance
                          : c.element == Element::float16 ? 3e-3
                                                          : 2e-2;
  check_close(dq[1], dq[0], of_terms);
  check_close(dk[1], dk[0], of_terms);
  check_close(dv[1], dv[0], tolerance);
  // One gradient alone, another in each case: the same bits.
  std::vector<Bytes>* const all[] = {&dq, &dk, &dv};
  const int which = int(c.nq + c.nk + c.d) % 3;
  const auto alone = [&] {
    AttentionGradients<float> to = gradients(4);
    if (which != 0) to.query = {};
    if (which != 1) to.key = {};
    if (which != 2) to.value = {};
    return to;
  };
  const auto check_alone = [&](int whole) {
    for (int k = 0; k < 3; ++k) {
      std::vector<Bytes>& grads = *all[k];
      CHECK(grads[4].bytes == (k == which ? grads[whole] : grads[5]).bytes);
      grads[4] = grads[5];
    }
  };
  with_scratch([&](void* s) {
    return cuda::yoso_backward(queue, shape, options, c.n_bits, c.n_hashes, in, queries, keys,
                               alone(), s);
  });
  check_alone(1);

  if (!c.expectation) return;
  if (c.gradient != Gradient::lower_bound) options.gradient = Gradient::exact;
  expected_forward<float>(shape, options, c.n_bits, in, output(2), 1);
  with_scratch([&](void* s) {
    return cuda::expected_forward(queue, shape, options, c.n_bits, in, output(3), s);
  });
  check_close(out[3], out[2], tolerance);
  expected_backward<float>(shape, options, c.n_bits, in, gradients(2), 1);
  with_scratch([&](void* s) {
    return cuda::expected_backward(queue, shape, options, c.n_bits, in, gradients(3), s);
  });
  check_close(dq[3], dq[2], tolerance);
  check_close(dk[3], dk[2], tolerance);
  check_close(dv[3], dv[2], tolerance);
  with_scratch([&](void* s) {
    return cuda::expected_backward(queue, shape, options, c.n_bits, in, alone(), s);
  });
  check_alone(3);
}

AttentionCase sized(index_t nq, index_t nk, index_t d, index_t dv) {
  AttentionCase c;
  c.nq = nq;
  c.nk = nk;
  c.d = d;
  c.dv = dv;
  return c;
}

}  // namespace

TEST(hash_codes) {
  check_hash(Family::hadamard, 5, 60, 8, 32);
  check_hash(Family::hadamard, 5, 3, 9, 33);
  check_hash(Family::hyperplane, 5, 7, 5, 9);
  check_hash(Family::hadamard, 2, 100, 3, 4);  // in shared memory
  if (kQuick) return;
  check_hash(Family::hadamard, 130, 64, 8, 33);
  check_hash(Family::hadamard, 7, 64, 12, 70);
  check_hash(Family::hadamard, 1, 1, 16, 31);
  check_hash(Family::hadamard, 4, 130, 9, 300);
  check_hash(Family::hyperplane, 131, 64, 8, 5);
  check_hash(Family::hyperplane, 2, 33, 16, 1);
}

TEST(bucket_sums) {
  for (const Order order : {Order::all, Order::causal, Order::reversed}) {
    check_bucket_sum<float>(140, 133, 3, 2, 5, order, true);
    {
      const SharedLimit small(48 * 1024);  // buckets by ranges, hashes by groups
      check_bucket_sum<float>(10, 130, 33, 9, 3, order, true);
    }
    if (kQuick) continue;
    check_bucket_sum<float>(1, 1, 1, 0, 1, order, false);
    check_bucket_sum<float>(300, 129, 32, 8, 64, order, false);
    check_bucket_sum<float>(17, 270, 37, 5, 9, order, true);
    check_bucket_sum<double>(130, 131, 9, 8, 6, order, true);
    check_bucket_sum<double>(20, 9, 5, 4, 1, order, true);
    check_bucket_sum<float>(9, 9, 5, 16, 3, order, false);
    check_bucket_sum<float>(9, 20, 5, 10, 2, order, true);
  }
}

TEST(attention) {
  AttentionCase c = sized(6, 7, 3, 2);
  for (const Normalize normalize : {Normalize::none, Normalize::sum, Normalize::l2})
    for (const bool causal : {false, true})
      for (const Gradient gradient :
           {Gradient::lower_bound, Gradient::collided, Gradient::unbiased}) {
        if (kQuick && causal != (gradient == Gradient::collided)) continue;
        if (kQuick && (int(normalize) + int(gradient)) % 3 != 0) continue;
        if (!kQuick) c = sized(67, 70, 20, 9);
        c.batch = 2;
        c.heads = c.key_heads = kQuick ? 1 : 2;
        c.normalize = normalize;
        c.causal = causal;
        c.gradient = gradient;
        c.masked = causal != (gradient == Gradient::collided);
        c.bad_rows = true;
        check_attention(c);
      }
  c = sized(70, 67, 34, 5);  // several tiles
  c.heads = c.key_heads = 1;
  c.causal = c.masked = true;
  check_attention(c);
  if (kQuick) return;
  check_attention(sized(1, 1, 1, 1));
  check_attention(sized(65, 17, 60, 64));
  check_attention(sized(17, 65, 64, 7));
  check_attention(sized(130, 131, 80, 70));
}

TEST(lower_bound_by_buckets) {
  for (const bool causal : {false, true})
    for (const Normalize normalize : {Normalize::sum, Normalize::l2}) {
      if (kQuick && causal != (normalize == Normalize::sum)) continue;
      AttentionCase c = sized(150, 140, 3, 4);  // a bucket of many rows: through the products
      c.heads = c.key_heads = 1;
      c.n_bits = 1;
      c.n_hashes = kQuick ? 1 : 5;
      c.expectation = false;
      c.causal = causal;
      c.masked = true;
      c.normalize = normalize;
      check_attention(c);
      if (kQuick || normalize == Normalize::l2) continue;
      c = sized(260, 300, 70, 66);
      c.heads = c.key_heads = 1;
      c.n_bits = 1;
      c.n_hashes = 2;
      c.expectation = false;
      c.causal = causal;
      c.normalize = normalize;
      check_attention(c);
    }
  AttentionCase c = sized(kQuick ? 20 : 90, 30, 4, 3);  // more bits than are sorted by
  c.n_bits = 13;
  c.n_hashes = kQuick ? 1 : 5;
  if (kQuick) c.heads = c.key_heads = 1;
  c.expectation = false;
  check_attention(c);
}

TEST(grouped_heads_packed_sequences_and_short_floats) {
  AttentionCase c = sized(50, 41, 12, 10);
  if (kQuick) {
    c = sized(9, 8, 3, 2);
    c.n_bits = c.n_hashes = 2;
  }
  c.packed = c.causal = true;
  c.heads = 4;
  check_attention(c);
  c.causal = false;
  c.normalize = Normalize::sum;
  if (!kQuick) check_attention(c);
  c.packed = false;
  c.batch = 2;
  for (const Element element : {Element::bfloat16, Element::float16}) {
    if (kQuick && element == Element::float16) break;
    c.element = element;
    check_attention(c);
  }
}

TEST(short_floats_round_as_the_cpu) {
  for (std::uint32_t x = 0; x < 65536; x += kQuick ? 37 : 1) {
    const float half = cuda::from_float16(std::uint16_t(x));
    const float brain = cuda::from_bfloat16(std::uint16_t(x));
    if (half == half) CHECK(cuda::to_float16(half) == x);
    if (brain == brain) CHECK(cuda::to_bfloat16(brain) == x);
  }
  CHECK(cuda::to_float16(1.0f + 1.0f / 2048) == 0x3c00);  // a tie goes to even
  CHECK(cuda::to_float16(1.0f + 3.0f / 2048) == 0x3c02);
  CHECK(cuda::to_float16(65520.0f) == 0x7c00);
  CHECK(cuda::to_float16(2.98e-8f) == 0x0000 && cuda::to_float16(3.0e-8f) == 0x0001);
  CHECK(cuda::to_bfloat16(1.0f + 1.0f / 256) == 0x3f80);
}

void waits_alone() {
  if (threadIdx.x < 5) __syncthreads();
}
TEST(a_barrier_that_some_do_not_reach_is_reported) {
  bool thrown = false;
  try {
    cuda::launch(Queue{}, "waits_alone", waits_alone, 1, 32, 0);
  } catch (const std::exception&) {
    thrown = true;
  }
  CHECK(thrown);
}

// What a missing barrier looks like to ThreadSanitizer: the build has a test that it says so.
// Thread t + 1 reads what thread t, which always runs before it, has written since the last
// barrier.
void reads_too_early(int* out) {
  LSHKIT_SHARED_MEMORY(memory);
  int* const shared = reinterpret_cast<int*>(memory);
  __syncthreads();
  shared[threadIdx.x] = int(threadIdx.x);
  out[threadIdx.x] = threadIdx.x > 0 ? shared[threadIdx.x - 1] : 0;
  __syncthreads();
}

// A vote in the place of __syncwarp.
void reads_after_a_vote(int* out) {
  LSHKIT_SHARED_MEMORY(memory);
  int* const shared = reinterpret_cast<int*>(memory);
  shared[threadIdx.x] = int(threadIdx.x);
  __ballot_sync(cuda::kAllLanes, 1);
  out[threadIdx.x] = shared[threadIdx.x ^ 1];
}

int main(int argc, char** argv) {
  if (argc > 1 && !std::strncmp(argv[1], "planted_race", 12)) {
    std::vector<int> out(64);
    const auto kernel = argv[1][12] ? reads_after_a_vote : reads_too_early;
    cuda::launch(Queue{}, "planted", kernel, 1, 64, 64 * sizeof(int), out.data());
    return 0;
  }
  return check::main(argc > 1 ? argv[1] : nullptr);
}

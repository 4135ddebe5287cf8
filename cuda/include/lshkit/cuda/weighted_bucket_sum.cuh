#pragma once
// The weighted sum verb in one direction: rows are added to the buckets of their probes, and rows
// of the other side read theirs. Forwards keys add their values and queries read; backwards, for
// the weights of queries the same, and for values and for the weights of keys queries add their
// gradients and keys read.
//
// Kernels take a few heads at a time, so that tables stay in the L2 cache. No atomics: the same
// bits at every run.
//
// In no order, weighted_segment.cuh: the probes of many heads and hashes are sorted by ranges of 64
// buckets, then a block sorts those of a range and sums the rows of its buckets, in their order.
//
// In order ("causal", "reversed"), weighted_ordered.cuh: the probes that read are sorted among
// those that add, by position; a group of lanes goes through those of a bucket, adds rows to its
// sum and gives those that read a copy of it as it is then, or its product with their own vector.
//
// weighted_gather: a warp takes a row, reads the row of the table of each of its probes (where the
// columns are even, of two at a time), sums them and takes their products with the row's own
// vector: the gradients of the weights, whole at once.
//
// Bytes, per row, hash and probe of 64 columns: 128 (bfloat16) or 256 of L2 to add, and 22 of
// device memory to sort; to read 128 from the tables of bfloat16 that sorted bfloat16 rows get,
// else 256: the bound, 11 cycles of a multiprocessor if L2 gives it 23 bytes a cycle. Three of each
// for forward and backward. In order copies are written and read besides where sums are wanted, 256
// bytes (bfloat16) or 512 that leave L2 where rows are many. Instructions of a warp per
// row, hash and probe (SASS of sm_90): to read 10 from tables of bfloat16 and 8 from others, 15 and
// 13 with the products (odd columns: 20, 18, 28 and 26); to add 23 where a bucket has 16 rows, of
// which 7 a row, and 4 to sort by ranges (counted on an H100 when batches had 8 rows).
#include <initializer_list>
#include <string>

#include "lshkit/cuda/elements.cuh"

namespace lshkit::cuda {

#if defined(__CUDACC__) || defined(LSHKIT_EMULATED_PTX)
constexpr int kSortThreads = 256, kSegmentThreads = 256;
template <class T>
constexpr index_t kSortPart = sizeof(T) == 4 ? 4096 : 2048;  // probes that a block sorts
constexpr int kSegmentTile = 2048;                           // and whose rows it sums at once
#else  // fewer fibres, and chunks that small tests fill
constexpr int kSortThreads = 64, kSegmentThreads = 64;
template <class T>
constexpr index_t kSortPart = sizeof(T) == 4 ? 512 : 256;
constexpr int kSegmentTile = 96;
#endif
constexpr int kSegmentBatch = 4;  // loads of rows in flight of a warp
constexpr int kOrderedBatch = 8;  // at most in order; a power of two
static_assert(kSegmentTile % kOrderedBatch == 0 && kOrderedBatch <= kSegmentThreads, "");
constexpr int kGatherBatch = 8;
constexpr int kRangeBits = 6, kRangeBuckets = 1 << kRangeBits, kRowShift = kRangeBits + 1;
// Bytes of tables in global memory, that L2 is to keep. In order copies, which are made once and
// read once, have four times as many, or as many as the sums.
#ifdef __CUDACC__
constexpr index_t kTableCache = 16 << 20;
inline index_t table_cache() { return kTableCache; }
#else
inline index_t emulated_table_cache = 16 << 20;  // a test may have less
inline index_t table_cache() { return emulated_table_cache; }
#endif
constexpr int kGatherThreads = 256, kGatherRows = kGatherThreads / kWarp;
// That a launch has at least, if there are rows for them: of 132 multiprocessors 16 each.
constexpr index_t kGatherBlocks = 2112;
constexpr int kLaneColumns = 3;  // of a lane at most
constexpr std::uint32_t kNoRow = 0xffffffffu;

inline int log2_or_none(index_t x) {
  int bits = 0;
  while ((index_t(1) << bits) < x) ++bits;
  return (index_t(1) << bits) == x ? bits : -1;
}
// x / by, by = 2^shift where shift >= 0.
__device__ inline std::uint32_t divided(std::uint32_t x, std::uint32_t by, int shift) {
  return shift >= 0 ? x >> shift : x / by;
}

// Probes (heads of queries, rows, hashes, probes) in any layout whose probes are side by side, and
// a vector a row.
template <class T>
struct WeightedSide {
  Side side;
  const void* codes = nullptr;
  int code_bytes = 2;
  const T* weights = nullptr;  // null: ones
  index_t n_probes = 1;
  index_t head_stride = 0, row_stride = 0, hash_stride = 0;
  index_t first_head = 0;  // of queries: where the arrays begin
  const std::uint8_t* valid = nullptr;
  index_t valid_batch = 0, valid_head = 0;
  Elements x;
  bool own_x = false;        // of every head of queries, not of every head of this side
  const T* extra = nullptr;  // the last column, by row of every head of queries; null: ones
  // Of the side that reads; null: not wanted.
  T* sum = nullptr;  // (heads of queries, rows, sum_columns)
  index_t sum_columns = 0;
  T* weight_grads = nullptr;  // laid out as the weights
};

// A row that is added to a bucket, or in order reads one: then `weight` is the number of the probe,
// and in a block that sums holds that of the copy (float32 its bits). One load.
template <class T>
struct alignas(2 * sizeof(T)) Added {
  T weight;
  std::uint32_t bits;

  __device__ static Added of(T weight, std::uint32_t row, bool reads, std::uint32_t bucket) {
    return {weight, row << kRowShift | std::uint32_t(reads) << kRangeBits | bucket % kRangeBuckets};
  }
  __device__ std::uint32_t row() const { return bits >> kRowShift; }  // its number in the batch
  __device__ bool reads() const { return bits >> kRangeBits & 1; }
  __device__ void set_number(std::uint32_t number) {
    if constexpr (sizeof(T) == 4)
      weight = float_of_bits(number);
    else
      weight = T(number);
  }
  __device__ std::uint32_t number() const {
    if constexpr (sizeof(T) == 4)
      return bits_of_float(weight);
    else
      return std::uint32_t(weight);
  }
  __device__ int bucket() const { return int(bits % kRangeBuckets); }  // of the range's
};
// Rows of a table, or of vectors, that a warp reads at once: where a lane has columns next to each
// other, by one load, each half of the warp reads one.
template <int Columns>
constexpr int kRowsAtOnce = Columns > 1 ? 2 : 1;

// What a launch does: some tasks and hashes.
template <class T>
struct WeightedPass {
  WeightedSide<T> add, read;
  index_t query_heads = 1, sequences = 1;  // of packed sequences, else 1
  index_t first_head = 0, heads = 0;       // of queries, of all sequences of a batch in turn
  index_t n_hashes = 1, n_buckets = 1, n_values = 0;
  bool extra = false;  // one more column
  Order order = Order::all;
  T scale = 1;
  // (tasks, hashes, n_buckets, columns), in order (heads, hashes, rows * n_probes, columns).
  T* tables = nullptr;
  index_t table_bytes = 0;
  // Of some heads and hashes what is added, in order also what is read, part by part sorted
  // by ranges, (heads, hashes, sort_rows * entries), and where those begin, (heads, hashes, parts,
  // ranges + 1).
  Added<T>* sorted = nullptr;
  std::int32_t* starts = nullptr;
  // Tables made of what is sorted hold bfloat16, as always if such rows are added, or in order
  // multiplied: sums in fp32, rounded once.
  bool short_tables = false;
  // Set by weighted_sum.
  index_t sort_first_head = 0, sort_first_hash = 0, sort_hashes = 0;
  index_t first_task = 0, tasks = 0, first_hash = 0, hashes = 0;
  index_t table_rows = 0, slice = 0, slices = 0, gather_blocks = 0;
  int entry_shift = -1, probe_shift = -1, range_bits = 0;
  bool side_by_side = false;  // all probes of a hash that are added, codes of 16 bits

  __host__ __device__ index_t columns() const { return n_values + (extra ? 1 : 0); }
  __host__ __device__ index_t sort_ranges() const { return ceil_div(n_buckets, kRangeBuckets); }
  // Of a head, places for what is sorted: in order positions, of which each sequence has as many as
  // the longer of its two sides.
  __host__ __device__ index_t sort_rows() const {
    const index_t adds = add.side.n_rows, reads = read.side.n_rows;
    if (order == Order::all) return adds;
    return sequences > 1 ? adds + reads : adds > reads ? adds : reads;
  }
  __host__ __device__ index_t sort_parts() const {  // at most, of a head's sequences together
    return sort_rows() * entries() / kSortPart<T> + sequences;
  }
  __host__ __device__ index_t table_of(index_t local) const {
    return order == Order::all ? local : std::uint32_t(local) / std::uint32_t(sequences);
  }
  // Probes of a position: those that add, then those that read.
  __host__ __device__ index_t entries() const {
    return add.n_probes + (order == Order::all ? 0 : read.n_probes);
  }
};

// One head of one sequence.
template <class T>
struct WeightedTask {
  index_t head;  // of queries, of all sequences of a batch in turn
  Span add, read;

  __device__ WeightedTask(const WeightedPass<T>& a, index_t local) {
    // Tasks are fewer than 2^31: each has blocks of its own.
    const std::uint32_t index = std::uint32_t(a.first_task + local);
    const std::uint32_t sequences = std::uint32_t(a.sequences);
    const std::uint32_t of_head = sequences == 1 ? index : index / sequences;
    head = a.first_head + of_head;
    const index_t task =
        a.add.side.starts ? (index - of_head * sequences) * a.query_heads + head : head;
    add = span_of(a.add.side, a.query_heads, task);
    read = span_of(a.read.side, a.query_heads, task);
  }
  // Of what is sorted: where it begins in that of its head, and how much it is; see sort_rows().
  __device__ index_t sort_first(const WeightedPass<T>& a) const {
    if (a.order == Order::all) return add.first;
    return a.sequences > 1 ? add.first + read.first : 0;
  }
  __device__ index_t sort_count(const WeightedPass<T>& a) const {
    return a.order != Order::all && read.count > add.count ? read.count : add.count;
  }
};
// A block's number, taken apart: take(parts) is its part of so many, the fastest first.
struct BlockParts {
  std::uint32_t rest;

  __device__ BlockParts() : rest(std::uint32_t(block_index())) {}
  __device__ index_t take(index_t parts) {
    if (parts == 1) return 0;
    const std::uint32_t all = rest;
    rest = all / std::uint32_t(parts);
    return index_t(all - rest * std::uint32_t(parts));
  }
};
// Where the probes of row i of a span begin, of one hash.
template <class T>
__device__ inline index_t probes_at(const WeightedSide<T>& s, const Span& span, index_t head,
                                    index_t i, index_t hash) {
  return (head - s.first_head) * s.head_stride + (span.first + i) * s.row_stride +
         hash * s.hash_stride;
}
template <class T>
__device__ inline bool is_valid(const WeightedSide<T>& s, const Span& span, index_t i) {
  return !s.valid ||
         s.valid[span.batch * s.valid_batch + span.head * s.valid_head + span.first + i];
}
template <class T>
__device__ inline index_t vector_at(const WeightedSide<T>& s, const Span& span, index_t i) {
  return s.own_x ? (span.owned + i) * s.x.row : offset_of(s.x, span, i);
}
// A column of a row's vector, its elements of kind E.
template <class T, Element E>
__device__ inline T vector_column(const WeightedPass<T>& a, const WeightedSide<T>& s,
                                  const Span& span, index_t i, index_t at, index_t column) {
  if (column < a.n_values) return load_element<T>(s.x.data, at + column, E);
  return s.extra ? s.extra[span.owned + i] : T(1);
}

// Bytes of tables that one task and hash takes, and those that weighted_sum is given.
template <class T>
index_t weighted_tables_of_one(const WeightedPass<T>& a) {
  const index_t rows = a.order == Order::all ? a.n_buckets : a.read.side.n_rows * a.read.n_probes;
  return rows * a.columns() * (a.short_tables ? 2 : index_t(sizeof(T)));
}
template <class T>
index_t weighted_table_scratch(const WeightedPass<T>& a) {
  const index_t one = weighted_tables_of_one(a);
  if (a.order == Order::all) {
    const index_t all = a.heads * a.sequences * a.n_hashes * one;
    return least(all, one > table_cache() ? one : table_cache());
  }
  const index_t sums = a.heads * one / a.read.n_probes;
  const index_t wanted = sums > 4 * table_cache() ? sums : 4 * table_cache();
  return least(a.heads * a.n_hashes * one, one > wanted ? one : wanted);
}

// The heads and hashes whose probes are sorted at once.
struct SortGroup {
  index_t heads = 0, hashes = 0;
};
template <class T>
SortGroup weighted_sort_group(const WeightedPass<T>& a) {
  const index_t rows = a.sort_rows() * a.entries();
  const index_t starts = a.sort_parts() * (a.sort_ranges() + 1) * index_t(sizeof(std::int32_t));
  const index_t one = rows * index_t(sizeof(Added<T>)) + starts;
  const index_t room = 16 * table_cache(), at_once = room > one ? room / one : 1;
  if (at_once < a.n_hashes) return {least(a.heads, 1), at_once};
  return {least(a.heads, at_once / a.n_hashes), a.n_hashes};
}
// What a record has bits for.
template <class T>
void check_rows(const WeightedPass<T>& a) {
  const index_t rows = most(a.add.side.n_rows, a.read.side.n_rows);
  if (rows >> (32 - kRowShift) > 0 || a.sort_rows() * a.entries() > INT32_MAX)
    throw std::runtime_error("lshkit: weighted sums on a GPU take fewer than " +
                             std::to_string(index_t(1) << (32 - kRowShift)) +
                             " rows of a head, and 2^31 probes, got " + std::to_string(rows) +
                             " rows of " + std::to_string(a.entries()) + " probes");
}
// Memory for passes one after the other.
template <class T>
void take_sorted(Cut& cut, std::initializer_list<WeightedPass<T>*> passes) {
  index_t rows = 0, starts = 0;
  for (const WeightedPass<T>* a : passes) {
    check_rows(*a);
    const SortGroup group = weighted_sort_group(*a);
    const index_t count = group.heads * group.hashes;
    rows = most(rows, count * a->sort_rows() * a->entries());
    starts = most(starts, count * a->sort_parts() * (a->sort_ranges() + 1));
  }
  Added<T>* const sorted = cut.take<Added<T>>(rows);
  std::int32_t* const to_starts = cut.take<std::int32_t>(starts);
  for (WeightedPass<T>* a : passes) {
    a->sorted = sorted;
    a->starts = to_starts;
  }
}

// In weighted_bucket_sum.cu, for float and double. table_bytes: weighted_table_scratch, or more.
template <class T>
void weighted_sum(const Queue& queue, WeightedPass<T> a, index_t shared_limit);

}  // namespace lshkit::cuda

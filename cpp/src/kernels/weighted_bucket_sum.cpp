// The sum verb with weights, and its gradients: rows with explicit probes (the table rows that a
// row belongs to, each with a weight) against one table, one or two slices of 64 bytes of columns
// at a time. A row that is added goes to all of its probes, its columns staying in registers; a
// row that reads takes a weighted sum, dot products with itself, or both, in one visit.
//
// The bound is the traffic of table rows, for a probe and slice 192 bytes forward (add: load and
// store; read: load), against the L2 cache that holds the table: 768 bytes a probe, token and hash
// for 64 float columns. The gradients take 1280 more, and 768 to have the output again. Measured at
// 4 probes, 4096 buckets and two slices of a pass (a table of 512 KB, Zen 5): forward 25 ns a token
// and hash, or 120 bytes a nanosecond; backward 90 ns with the output again.
#include "weighted_bucket_sum.hpp"

#include "kernels.hpp"
#include "order.hpp"
#include "simd.hpp"
#include "used_rows.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

#if defined(LSHKIT_ISA_AVX512) || defined(LSHKIT_ISA_AVX2)
#define LSHKIT_UNROLL_PROBES _Pragma("GCC unroll 8")
constexpr bool kUnrollsProbes = true;
#else  // a table row is a loop's worth of registers
#define LSHKIT_UNROLL_PROBES _Pragma("GCC unroll 1")
constexpr bool kUnrollsProbes = false;
#endif

constexpr index_t kAhead = 12;      // rows to prefetch ahead
constexpr index_t kSlotsAhead = 4;  // rows whose table rows are prefetched: some are not in L2

// The table rows of a row with Probes of them, or any number (0). Four in a load: passes are bound
// by loads and stores.
template <int Probes>
struct Slots {
  const std::uint16_t* slots;
  LSHKIT_INLINE explicit Slots(const std::uint16_t* of_row) : slots(of_row) {}
  LSHKIT_INLINE index_t operator[](int a) const { return slots[a]; }
};
template <>
struct Slots<4> {
  std::uint64_t all;
  LSHKIT_INLINE explicit Slots(const std::uint16_t* of_row) {
    std::memcpy(&all, of_row, sizeof(all));
  }
  LSHKIT_INLINE index_t operator[](int a) const { return index_t(all >> 16 * a & 0xffff); }
};
template <>
struct Slots<8> {
  Slots<4> first, second;
  LSHKIT_INLINE explicit Slots(const std::uint16_t* of_row) : first(of_row), second(of_row + 4) {}
  LSHKIT_INLINE index_t operator[](int a) const { return a < 4 ? first[a] : second[a - 4]; }
};

template <class T, int Summed>
LSHKIT_NOINLINE void reduce_dots(const Vec<T>* partial, T scale, bool accumulate, T* to,
                                 int count) {
  Vec<T> sums = sum_each<kLanes<T> / Summed, T, Summed>(partial) * scale;
  if (accumulate) sums += load_first(to, count);
  store_first(to, sums, count);
}

// Cleared: all of the table is used, and there are no masks.
template <class T, int Slices, bool Cleared, int AddProbes, int ReadProbes, bool Full>
struct Run {
  static constexpr int kColumns = Slices * kSliceBytes / int(sizeof(T));
  static constexpr int kVectors = Slices * kSliceBytes / kVectorBytes, n = kLanes<T>;
  // Dot products of a row that are summed into one register straight away: stores take two cycles.
  static constexpr int kSummed = ReadProbes == 2 ? 2 : ReadProbes == 4 || ReadProbes == 8 ? 4 : 1;
  // A copy, which stays in registers: stores to tables might change what a reference points to.
  const WeightedPass<T> p;
  // n / kSummed, of the dot products of rows that share a register. Elsewhere: functions take its
  // address.
  Vec<T>* partial;

  LSHKIT_INLINE int add_probes() const { return AddProbes ? AddProbes : p.add.n_probes; }
  LSHKIT_INLINE int read_probes() const { return ReadProbes ? ReadProbes : p.read.n_probes; }
  LSHKIT_INLINE static Vec<T> from_table(const T* row, RowMask used) {
    return Cleared ? load(row) : load_used(row, used);
  }
  LSHKIT_INLINE void load_row(const T* x, Vec<T>* v) const {
    LSHKIT_UNROLL
    for (int i = 0; i < kVectors; ++i)
      v[i] = Full ? load(x + i * n) : load_first(x + i * n, p.width - i * n);
  }
  LSHKIT_INLINE void prefetch_ahead(const T* x, index_t stride) const {
    LSHKIT_UNROLL
    for (int i = 0; i < Slices; ++i)
      prefetch(x + kAhead * stride + i * (kSliceBytes / int(sizeof(T))));
  }

  // The table rows of a row that comes soon.
  template <int Probes>
  LSHKIT_INLINE void prefetch_slots(const std::uint16_t* of_row, int probes) const {
    const Slots<Probes> slot(of_row);
    LSHKIT_UNROLL_PROBES
    for (int a = 0; a < probes; ++a) {
      const T* row = p.table + slot[a] * kColumns;
      LSHKIT_UNROLL
      for (int i = 0; i < Slices; ++i) prefetch(row + i * (kSliceBytes / int(sizeof(T))));
    }
  }

  LSHKIT_INLINE void add(index_t row) const {
    if (p.add.valid && !p.add.valid[row]) return;
    const T* x = p.add.rows + row * p.add.stride;
    if (row + kAhead < p.add.count) prefetch_ahead(x, p.add.stride);
    Vec<T> v[kVectors];
    load_row(x, v);
    const int probes = add_probes();
    const std::uint16_t* slots = p.add.slots + row * probes;
    const Slots<AddProbes> slot(slots);
    const T* weight = p.add.weights + row * probes;
    if (AddProbes && row + kSlotsAhead < p.add.count)
      prefetch_slots<AddProbes>(slots + kSlotsAhead * probes, probes);
    LSHKIT_UNROLL_PROBES
    for (int a = 0; a < probes; ++a) {
      T* to = p.table + slot[a] * kColumns;
      const RowMask used = Cleared ? kAllUsed : use_row(p.used + slot[a]);
      const Vec<T> w = broadcast(weight[a]);
      LSHKIT_UNROLL
      for (int i = 0; i < kVectors; ++i) store(to + i * n, from_table(to + i * n, used) + w * v[i]);
    }
  }

  template <bool Sum, bool Dots>
  LSHKIT_INLINE void read(index_t row) {
    const int probes = read_probes();
    const std::uint16_t* slots = p.read.slots + row * probes;
    const Slots<ReadProbes> slot(slots);
    const T* weight = p.read.weights + row * probes;
    if (ReadProbes && row + kSlotsAhead < p.read.count)
      prefetch_slots<ReadProbes>(slots + kSlotsAhead * probes, probes);
    const bool ahead = row + kAhead < p.read.count;
    Vec<T> x[kVectors], sum[kVectors] = {};
    if (Dots) {
      const T* from = p.read.rows + row * p.read.stride;
      if (ahead) prefetch_ahead(from, p.read.stride);
      load_row(from, x);
    }
    T* out = Sum ? p.sum + row * p.sum_stride : nullptr;
    if (Sum && ahead) prefetch_ahead(out, p.sum_stride);
    const int shared = probes < n ? n / probes : 1;  // rows whose dots are reduced together
    const int place = int(std::size_t(row) % std::size_t(shared));
    int k = place * probes;
    Vec<T> own[kSummed > 1 ? ReadProbes : 1];
    LSHKIT_UNROLL_PROBES
    for (int a = 0; a < probes; ++a) {
      const T* from = p.table + slot[a] * kColumns;
      const RowMask used = Cleared ? kAllUsed : p.used[slot[a]];
      Vec<T> v[kVectors];
      LSHKIT_UNROLL
      for (int i = 0; i < kVectors; ++i) v[i] = from_table(from + i * n, used);
      if (Sum) {
        const Vec<T> w = broadcast(weight[a]);
        LSHKIT_UNROLL
        for (int i = 0; i < kVectors; ++i) sum[i] += w * v[i];
      }
      if (Dots) {
        Vec<T> dot = v[0] * x[0];
        LSHKIT_UNROLL
        for (int i = 1; i < kVectors; ++i) dot += v[i] * x[i];
        if (kSummed > 1) {
          own[a] = dot;
        } else {
          if (k == n) {  // only rows of more probes than a register has lanes
            reduce(p.dots + row * probes + a - n, n);
            k = 0;
          }
          partial[k++] = dot;
        }
      }
    }
    if (Dots && kSummed > 1) {
      constexpr int parts = ReadProbes / kSummed;
      LSHKIT_UNROLL
      for (int i = 0; i < parts; ++i)
        partial[place * parts + i] = sum_each<kSummed, T>(own + i * kSummed);
    }
    if (Sum) {
      LSHKIT_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        sum[i] = rounded(sum[i] * p.scale);
        if (p.accumulate_sum)
          sum[i] += Full ? load(out + i * n) : load_first(out + i * n, p.width - i * n);
        if (Full)
          store(out + i * n, sum[i]);
        else
          store_first(out + i * n, sum[i], p.width - i * n);
      }
    }
    if (Dots) {
      const bool up = p.order != Order::reversed;
      if (probes > n) {
        reduce(p.dots + (row + 1) * probes - k, k);
      } else if (place == (up ? shared - 1 : 0) || (up && row + 1 == p.read.count)) {
        const index_t first = row - place;
        reduce(p.dots + first * probes, int(smaller(shared, p.read.count - first)) * probes);
      }
    }
  }
  LSHKIT_INLINE void reduce(T* to, int count) const {
    reduce_dots<T, kSummed>(partial, p.scale, p.accumulate_dots, to, count);
  }

  // One function for any Sum and Dots.
  LSHKIT_NOINLINE static void add_all(const WeightedPass<T>& p) {
    const Run run{p, nullptr};
    for (index_t j = 0; j < p.add.count; ++j) run.add(j);
  }
  template <bool Sum, bool Dots>
  LSHKIT_INLINE void rows() {
    if (p.order != Order::all)
      return take_turns(
          p.order, p.add.count, p.read.count, [&](index_t j) LSHKIT_ALWAYS_INLINE { add(j); },
          [&](index_t i) LSHKIT_ALWAYS_INLINE { read<Sum, Dots>(i); });
    add_all(p);
    for (index_t i = 0; i < p.read.count; ++i) read<Sum, Dots>(i);
  }
  LSHKIT_INLINE static void all(const WeightedPass<T>& p) {
    Vec<T> partial[n / kSummed] = {};
    Run run{p, partial};
    if (!p.dots) return run.template rows<true, false>();
    if (!p.sum) return run.template rows<false, true>();
    run.template rows<true, true>();
  }
};

template <class T, int Slices, bool Cleared>
void run(const WeightedPass<T>& p) {
  const bool full = p.width == Slices * kSliceBytes / int(sizeof(T));
  // A side without rows has no number of probes to look at.
  const int a = p.add.count ? p.add.n_probes : p.read.n_probes;
  const int r = p.read.count ? p.read.n_probes : a;
  if constexpr (kUnrollsProbes && sizeof(T) == sizeof(float)) {  // else nothing is gained
    if (full && a == 8 && r == 8) return Run<T, Slices, Cleared, 8, 8, true>::all(p);
    if (full && a == 4 && r == 4) return Run<T, Slices, Cleared, 4, 4, true>::all(p);
    if (full && a == 3 && r == 3) return Run<T, Slices, Cleared, 3, 3, true>::all(p);
    if (full && a == 2 && r == 2) return Run<T, Slices, Cleared, 2, 2, true>::all(p);
  }
  if (full) return Run<T, Slices, Cleared, 0, 0, true>::all(p);
  Run<T, Slices, Cleared, 0, 0, false>::all(p);
}

template <class T>
void run_slices(const WeightedPass<T>& p) {
  // A function for each: in one for both the compiler takes products before it looks whether there
  // are masks, and so rounds them where the other fuses them with the addition.
  if constexpr (kMasksRows)
    if (p.used) return p.slices == 1 ? run<T, 1, false>(p) : run<T, 2, false>(p);
  p.slices == 1 ? run<T, 1, true>(p) : run<T, 2, true>(p);
}

// A single column of which the table has one number a row.
template <class T>
void run_column(const WeightedColumn<T>& p) {
  const auto add = [&](index_t row) {
    if (p.add.valid && !p.add.valid[row]) return;
    const T x = p.add.rows ? p.add.rows[row] : T(1);
    for (index_t k = row * p.add.n_probes; k < (row + 1) * p.add.n_probes; ++k)
      p.table[p.add.slots[k]] += p.add.weights[k] * x;
  };
  const auto read = [&](index_t row) {
    T sum = 0;
    const T x = p.scale * (p.read.rows ? p.read.rows[row] : T(1));
    for (index_t k = row * p.read.n_probes; k < (row + 1) * p.read.n_probes; ++k) {
      const T value = p.table[p.read.slots[k]];
      sum += p.read.weights[k] * value;
      if (p.dots) p.dots[k] += x * value;
    }
    if (p.sum) p.sum[row] += p.scale * sum;
  };
  in_order(p.order, p.add.count, p.read.count, add, read);
}

}  // namespace

bool masks_rows() { return kMasksRows; }

#define LSHKIT_DEFINE(T)                                                \
  void weighted_bucket_sum(const WeightedPass<T>& p) { run_slices(p); } \
  void weighted_column_sum(const WeightedColumn<T>& p) { run_column(p); }
LSHKIT_DEFINE(float)
LSHKIT_DEFINE(double)
#undef LSHKIT_DEFINE

}  // namespace LSHKIT_ISA
}  // namespace lshkit

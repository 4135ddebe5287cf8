// The nearest of a few thousand keys: a tile of products at a time, of which few pairs are nearer
// than what a query has found already.
#include "kernel_panel.hpp"

namespace lshkit {
namespace LSHKIT_ISA {
namespace {

// The nearest keys of one query so far, by half the squared distance less half the query's own.
template <class T>
struct Found {
  T* distances;  // (n), ascending
  std::int32_t* keys;
  index_t n;

  LSHKIT_INLINE void insert(T distance, std::int32_t key) const {
    index_t at = n - 1;
    for (; at > 0 && distance < distances[at - 1]; --at) {
      distances[at] = distances[at - 1];
      keys[at] = keys[at - 1];
    }
    distances[at] = distance;
    keys[at] = key;
  }
};

template <class T>
struct Distances {  // of the nearest keys, (n_queries, n_nearest)
  T* values;
  index_t bytes;

  explicit Distances(const NearestPass<T>& p) {
    Cut cut{p.rows.scratch};
    values = cut.take<T>(p.rows.shape.n_queries * p.n_nearest);
    bytes = cut.used;
  }
};

template <class T>
void run(const NearestPass<T>& p) {
  constexpr int n = kLanes<T>;
  const KernelSumShape& shape = p.rows.shape;
  const Distances<T> distances(p);
  for (index_t i = 0; i < shape.n_queries * p.n_nearest; ++i) {
    distances.values[i] = T(__builtin_inf());
    p.nearest[i] = std::int32_t(i % p.n_nearest);
  }
  Panel<T> panel(static_cast<char*>(p.rows.scratch) + distances.bytes, shape.n_features);
  for (index_t first = 0; first < shape.n_keys; first += kPanel<T>) {
    const index_t keys = smaller(kPanel<T>, shape.n_keys - first);
    pack_panel(p.rows, first, keys, panel);
    for (index_t query = 0, last; query < shape.n_queries; query = last) {
      const index_t count = queries_at_once(shape.n_queries - query);
      last = smaller(query + count, shape.n_queries);
      multiply_some<T, true>(p.rows, query, count, panel);
      for (index_t q = query; q < last; ++q) {
        const Found<T> found{distances.values + q * p.n_nearest, p.nearest + q * p.n_nearest,
                             p.n_nearest};
        const T* tile = panel.tile + (q - query) * kPanel<T>;
        for (index_t j = 0; j < keys; j += n) {
          const Vec<T> distance = load(panel.norms + j) - load(tile + j);
          unsigned lanes = lanes_below<T>(distance, found.distances[found.n - 1]);
          for (; lanes; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            if (j + lane < keys && distance[lane] < found.distances[found.n - 1])
              found.insert(distance[lane], std::int32_t(first + j + lane));
          }
        }
      }
    }
  }
}

}  // namespace

#define LSHKIT_DEFINE(T)                                                             \
  index_t nearest_rows_scratch(const NearestPass<T>& p) {                            \
    return Distances<T>(p).bytes + Panel<T>(nullptr, p.rows.shape.n_features).bytes; \
  }                                                                                  \
  void nearest_rows(const NearestPass<T>& p) { run(p); }
LSHKIT_DEFINE(float)
LSHKIT_DEFINE(double)
#undef LSHKIT_DEFINE

}  // namespace LSHKIT_ISA
}  // namespace lshkit

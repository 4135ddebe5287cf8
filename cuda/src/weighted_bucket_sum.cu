// The sum verb with weights and its gradients.
#include "lshkit/cuda/runtime.cuh"
#include "lshkit/cuda/soft.hpp"
#include "lshkit/cuda/weighted_gather.cuh"
#include "lshkit/cuda/weighted_ordered.cuh"

namespace lshkit::cuda {
namespace {

// call(std::integral_constant of a kind of elements)
template <class T, class Call>
void with_element(Element element, const Call& call) {
  if constexpr (sizeof(T) == 8) {
    call(std::integral_constant<Element, Element::float64>{});
  } else {
    if (element == Element::bfloat16)
      return call(std::integral_constant<Element, Element::bfloat16>{});
    if (element == Element::float16)
      return call(std::integral_constant<Element, Element::float16>{});
    call(std::integral_constant<Element, Element::float32>{});
  }
}
// Columns of a lane. float64, which is for checking, has the most general kernels alone.
template <class T, class Call>
void with_columns(index_t slice, const Call& call) {
  if constexpr (sizeof(T) == 4) {
    if (slice <= kWarp) return call(std::integral_constant<int, 1>{});
    if (slice <= 2 * kWarp) return call(std::integral_constant<int, 2>{});
  }
  call(std::integral_constant<int, 3>{});
}
// How many of them come by one load, where all rows allow it.
template <class T, int C>
constexpr int kTogether = sizeof(T) == 8 ? 1 : (C == 2 ? 4 : 2);

template <class T>
void launch_sort(const Queue& queue, const WeightedPass<T>& a) {
  // Blocks of a task for its own parts, or twice a sequence's share.
  const index_t blocks =
      ceil_div(a.sequences > 1 ? 2 * a.sort_parts() : a.sort_parts(), a.sequences);
  launch(queue, "weighted_sort",
         a.order == Order::all ? weighted_sort_kernel<T, false> : weighted_sort_kernel<T, true>,
         a.tasks * a.sort_hashes * blocks, kSortThreads, std::size_t(weighted_sort_bytes(a)), a,
         blocks);
}

// Columns next to each other, by one load, where all rows begin at a multiple of so many bytes.
template <class T>
bool loads_together(const WeightedPass<T>& a, const WeightedSide<T>& side, int columns) {
  const Elements& x = side.x;
  const index_t bytes = columns * element_bytes(x.element);
  const auto whole = [&](index_t stride) { return stride % columns == 0; };
  return !a.extra && a.columns() % columns == 0 && whole(x.row) &&
         (side.own_x || (whole(x.batch) && whole(x.head))) &&
         is_aligned(x.data, int(least(bytes, 16)));
}
template <class T>
void launch_segments(const Queue& queue, const WeightedPass<T>& a) {
  const index_t blocks = a.tasks * a.hashes * a.sort_ranges() * a.slices;
  const std::size_t bytes = SegmentMemory<T>::bytes(a.slice);
  const auto run = [&](auto kernel) {
    launch(queue, "weighted_segment", kernel, blocks, kSegmentThreads, bytes, a);
  };
  with_columns<T>(a.slice, [&](auto columns) {
    constexpr int C = decltype(columns)::value, kLoad = kTogether<T, C>;
    with_element<T>(a.add.x.element, [&](auto element) {
      constexpr Element E = decltype(element)::value;
      loads_together(a, a.add, kLoad) ? run(weighted_segment_kernel<T, E, C, kLoad>)
                                      : run(weighted_segment_kernel<T, E, C, 1>);
    });
  });
}

template <class T>
void launch_ordered(const Queue& queue, const WeightedPass<T>& a) {
  const index_t blocks = a.tasks * a.hashes * a.sort_ranges() * a.slices;
  const std::size_t bytes = SegmentMemory<T>::bytes(a.slice);
  constexpr Element kOwn = kElement<T>;
  const bool products = has_products(a);
  const auto run = [&](auto kernel) {
    launch(queue, "weighted_ordered", kernel, blocks, kSegmentThreads, bytes, a);
  };
  with_columns<T>(a.slice, [&](auto columns) {
    constexpr int C = decltype(columns)::value, kLoad = kTogether<T, C>;
    if constexpr (C < 3) {
      const Element added = a.add.x.element, own = products ? a.read.x.element : kOwn;
      // One of the two is made by this library, in float32.
      if (loads_together(a, a.add, kLoad) && (added == kOwn || own == kOwn) &&
          (!products || loads_together(a, a.read, kLoad)))
        return with_element<T>(added == kOwn ? own : added, [&](auto element) {
          constexpr Element E = decltype(element)::value;
          if (!products)
            run(weighted_ordered_kernel<T, E, kOwn, C, kLoad, false>);
          else if (added == kOwn)
            run(weighted_ordered_kernel<T, kOwn, E, C, kLoad, true>);
          else
            run(weighted_ordered_kernel<T, E, kOwn, C, kLoad, true>);
        });
    }
    products ? run(weighted_ordered_kernel<T, kOwn, kOwn, C, 1, true>)
             : run(weighted_ordered_kernel<T, kOwn, kOwn, C, 1, false>);
  });
}

template <class T, int C, int Columns>
void launch_gather(const Queue& queue, const WeightedPass<T>& a) {
  const index_t blocks = a.tasks * a.gather_blocks;
  const auto run = [&](auto kernel) {
    launch(queue, "weighted_gather", kernel, blocks, kGatherThreads, 0, a);
  };
  constexpr Element kOwn = kElement<T>;
  // For the weights of queries alone: with the gradient of the sums, which has T's elements.
  const bool dots = a.read.weight_grads, sum = a.read.sum;
  if constexpr (sizeof(T) == 4) {
    constexpr Element kShort = Element::bfloat16;
    if (a.short_tables) {
      if (!dots) return run(weighted_gather_kernel<T, kOwn, kShort, C, Columns, true, false>);
      if (!sum) return run(weighted_gather_kernel<T, kOwn, kShort, C, Columns, false, true>);
      return run(weighted_gather_kernel<T, kShort, kShort, C, Columns, true, true>);
    }
  }
  if (!dots) return run(weighted_gather_kernel<T, kOwn, kOwn, C, Columns, true, false>);
  if (!sum) return run(weighted_gather_kernel<T, kOwn, kOwn, C, Columns, false, true>);
  // Rows of bfloat16 have read tables of it above.
  if constexpr (sizeof(T) == 4) {
    constexpr Element kHalf = Element::float16;
    if (a.read.x.element == kHalf)
      return run(weighted_gather_kernel<T, kHalf, kOwn, C, Columns, true, true>);
  }
  run(weighted_gather_kernel<T, kOwn, kOwn, C, Columns, true, true>);
}
template <class T>
void launch_gather(const Queue& queue, const WeightedPass<T>& a) {
  with_columns<T>(a.slice, [&](auto columns) {
    constexpr int C = decltype(columns)::value, kLoad = kTogether<T, C>;
    if (a.columns() % kLoad == 0)  // slices are
      launch_gather<T, C, kLoad>(queue, a);
    else
      launch_gather<T, C, 1>(queue, a);
  });
}

// Everything of both directions but what they give.
template <class T>
WeightedSide<T> side_of(const Probes<T>& probes, index_t n_hashes, index_t n_rows, index_t heads) {
  WeightedSide<T> s;
  s.side = {n_rows, heads, 1, nullptr};
  s.codes = probes.codes.data;
  s.code_bytes = probes.codes.bytes;
  s.weights = probes.weights;
  s.n_probes = probes.n_probes;
  s.row_stride = n_hashes * s.n_probes;
  s.head_stride = n_rows * s.row_stride;
  s.hash_stride = s.n_probes;
  return s;
}
template <class T>
WeightedPass<T> pass_of(const BucketSumShape& shape, const Probes<T>& queries,
                        const Probes<T>& keys, Tensor<const T> values, Mask key_mask, Order order,
                        T scale) {
  WeightedPass<T> a;
  a.add = side_of(keys, shape.n_hashes, shape.n_keys, shape.heads);
  a.add.x = Elements(FloatTensor<T, const void>(values));
  a.add.valid = key_mask.data;
  a.add.valid_batch = key_mask.batch_stride;
  a.read = side_of(queries, shape.n_hashes, shape.n_queries, shape.heads);
  a.query_heads = shape.heads;
  a.heads = shape.batch * shape.heads;
  a.n_hashes = shape.n_hashes;
  a.n_buckets = least(shape.n_buckets, index_t(1) << 8 * keys.codes.bytes);  // no code is above
  a.n_values = shape.n_values;
  a.order = order;
  a.scale = scale;
  return a;
}

}  // namespace

template <class T>
void weighted_sum(const Queue& queue, WeightedPass<T> a, index_t shared_limit) {
  const index_t columns = a.columns();
  if (a.heads == 0 || a.sequences == 0 || a.read.side.n_rows == 0 || columns == 0) return;
  const bool ordered = a.order != Order::all;
  const auto check_step = [](index_t step) {
    if (step < 0 || step > INT32_MAX / 8)  // of 32 bits in kernels, in bytes
      throw std::runtime_error("lshkit: weighted sums on a GPU take rows that are fewer than " +
                               std::to_string(INT32_MAX / 8) + " numbers apart, got " +
                               std::to_string(step));
  };
  check_step(a.add.x.row);
  if (a.read.weight_grads) check_step(a.read.x.row);
  const bool multiplied = ordered && a.read.weight_grads;
  a.short_tables = a.short_tables || a.add.x.element == Element::bfloat16 ||
                   (multiplied && a.read.x.element == Element::bfloat16);
  const index_t of_four = ceil_div(columns, 4 * ceil_div(columns, index_t(kLaneColumns) * kWarp));
  a.slice = least(columns, 4 * of_four);
  a.slices = ceil_div(columns, a.slice);
  const index_t bytes = most(weighted_sort_bytes(a), index_t(SegmentMemory<T>::bytes(a.slice)));
  if (bytes > shared_limit)
    throw std::runtime_error("lshkit: weighted sums take " + std::to_string(bytes) +
                             " bytes of shared memory, this GPU has " +
                             std::to_string(shared_limit));
  a.table_rows = ordered ? a.read.side.n_rows * a.read.n_probes : a.n_buckets;
  a.entry_shift = log2_or_none(a.entries());
  a.probe_shift = log2_or_none(a.read.n_probes);
  while (index_t(1) << a.range_bits < a.sort_ranges()) ++a.range_bits;
  a.side_by_side = !ordered && a.add.code_bytes == 2 && a.add.row_stride == a.add.n_probes;
  // Tasks that share tables: in order, all sequences of a head.
  const index_t together = ordered ? a.sequences : 1;
  const index_t tables = a.table_bytes / weighted_tables_of_one(a);
  const SortGroup group = weighted_sort_group(a);
  const index_t hashes = least(group.hashes, most(tables, 1));
  const index_t tasks = together * most(tables / hashes, 1);
  for (a.sort_first_head = 0; a.sort_first_head < a.heads; a.sort_first_head += group.heads)
    for (a.sort_first_hash = 0; a.sort_first_hash < a.n_hashes; a.sort_first_hash += group.hashes) {
      a.first_task = a.sort_first_head * a.sequences;
      a.tasks = least(group.heads, a.heads - a.sort_first_head) * a.sequences;
      a.sort_hashes = least(group.hashes, a.n_hashes - a.sort_first_hash);
      launch_sort(queue, a);
      const index_t last_task = a.first_task + a.tasks,
                    last_hash = a.sort_first_hash + a.sort_hashes;
      for (; a.first_task < last_task; a.first_task += tasks) {
        a.tasks = least(tasks, last_task - a.first_task);
        const index_t wanted = ceil_div(kGatherBlocks, a.tasks);
        a.gather_blocks = least(wanted, ceil_div(a.read.side.n_rows, kGatherRows));
        for (a.first_hash = a.sort_first_hash; a.first_hash < last_hash; a.first_hash += hashes) {
          a.hashes = least(hashes, last_hash - a.first_hash);
          ordered ? launch_ordered(queue, a) : launch_segments(queue, a);
          WeightedPass<T> rest = a;
          if (ordered && has_products(a)) rest.read.weight_grads = nullptr;
          if (!ordered || has_copies(a)) launch_gather(queue, rest);
        }
      }
    }
}
template void weighted_sum(const Queue&, WeightedPass<float>, index_t);
template void weighted_sum(const Queue&, WeightedPass<double>, index_t);

template <class T>
index_t weighted_bucket_sum(const Queue& queue, const BucketSumShape& shape, Probes<T> queries,
                            Probes<T> keys, Tensor<const T> values, Mask key_mask, Order order,
                            T scale, Tensor<T> out, void* scratch) {
  WeightedPass<T> a = pass_of(shape, queries, keys, values, key_mask, order, scale);
  a.read.sum = out.data;
  a.read.sum_columns = shape.n_values;
  Cut cut(scratch);
  a.table_bytes = weighted_table_scratch(a);
  a.tables = cut.take<T>(ceil_div(a.table_bytes, index_t(sizeof(T))));
  take_sorted(cut, {&a});
  if (!scratch) return cut.used();
  const DeviceGuard guard(queue);
  weighted_sum(queue, a, shared_limit(queue));
  return cut.used();
}

template <class T>
index_t weighted_bucket_sum_backward(const Queue& queue, const BucketSumShape& shape,
                                     Probes<T> queries, Probes<T> keys, Tensor<const T> values,
                                     Mask key_mask, Order order, T scale,
                                     WeightedSumGradients<T> gradients, void* scratch) {
  WeightedPass<T> forwards = pass_of(shape, queries, keys, values, key_mask, order, scale);
  forwards.read.x = Elements(FloatTensor<T, const void>(gradients.out));
  WeightedPass<T> back = forwards;
  std::swap(back.add, back.read);
  back.order = transposed_order(order);
  forwards.read.weight_grads = gradients.query_weights;
  back.read.weight_grads = gradients.key_weights;
  back.read.sum = gradients.values.data;
  back.read.sum_columns = shape.n_values;
  Cut cut(scratch);
  back.table_bytes = weighted_table_scratch(back);
  if (gradients.query_weights)
    back.table_bytes = most(back.table_bytes, weighted_table_scratch(forwards));
  back.tables = cut.take<T>(ceil_div(back.table_bytes, index_t(sizeof(T))));
  forwards.tables = back.tables;
  forwards.table_bytes = back.table_bytes;
  if (gradients.query_weights)
    take_sorted(cut, {&forwards, &back});
  else
    take_sorted(cut, {&back});
  if (!scratch) return cut.used();
  const DeviceGuard guard(queue);
  const index_t limit = shared_limit(queue);
  if (gradients.query_weights) weighted_sum(queue, forwards, limit);
  weighted_sum(queue, back, limit);
  return cut.used();
}

#define LSHKIT_INSTANTIATE(T)                                                                     \
  template index_t weighted_bucket_sum(const Queue&, const BucketSumShape&, Probes<T>, Probes<T>, \
                                       Tensor<const T>, Mask, Order, T, Tensor<T>, void*);        \
  template index_t weighted_bucket_sum_backward(const Queue&, const BucketSumShape&, Probes<T>,   \
                                                Probes<T>, Tensor<const T>, Mask, Order, T,       \
                                                WeightedSumGradients<T>, void*);
LSHKIT_INSTANTIATE(float)
LSHKIT_INSTANTIATE(double)
#undef LSHKIT_INSTANTIATE

}  // namespace lshkit::cuda

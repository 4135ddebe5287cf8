"""The pairs verb: pairs that collide, and products or distances of listed pairs."""

from typing import Any

import numpy as np

from lshkit import _C, checks
from lshkit.buckets.codes import MAX_BUCKETS, as_codes, like, threads_of, wide_codes
from lshkit.buckets.draw import HashTables
from lshkit.hash_functions import MAX_HASHES
from lshkit.typing import ArrayOrTensor

MAX_INT64 = 2**63 - 1


def collisions(
    query_codes: ArrayOrTensor,
    key_codes: ArrayOrTensor,
    *,
    causal: bool = False,
    key_mask: ArrayOrTensor | None = None,
) -> tuple[ArrayOrTensor, ArrayOrTensor, ArrayOrTensor]:
    """Every pair of a query and a key that collide in at least one hash, with the number of hashes.

    All arrays or all tensors. One set of codes at a time: ValueError for leading dimensions.

    Parameters
    ----------
    query_codes : integer array or tensor `(n_q, n_hashes)`, n_hashes 1 to 65535
    key_codes : integer array or tensor `(n_k, n_hashes)`
        Codes >= 0 of any width. uint8 and uint16, the same for both, are used as they are.
    causal : bool
        Query i sees the keys j <= i only.
    key_mask : boolean array or tensor `(n_k,)`, optional
        False (or 0) excludes a key.

    Returns
    -------
    indptr, indices, counts : arrays or tensors `(n_q + 1,)` int64, `(nnz,)` int32, `(nnz,)` int32
        The pairs in CSR form: query i collides with the keys
        `indices[indptr[i]:indptr[i + 1]]`, ascending, in `counts[...]` of the hashes.
        `scipy.sparse.csr_array((counts, indices, indptr), (n_q, n_k))` is the matrix of counts.

    Notes
    -----
    For codes below 65536 the time is that of comparing all codes, n_q n_k n_hashes bytes (twice
    that for uint16) through the vector unit, or, where that costs less, of traversing the buckets:
    the sum of the counts, and a few lookups for each query and hash. Each is done twice, once for
    the size of the result. Wider codes use `HashTables` of the keys: the time is that of sorting
    the keys by their codes, and the sum of the counts. The memory is the result's and, for buckets
    and tables, up to 20 bytes per key and hash.

    CUDA tensors, in a build with CUDA kernels, must have codes below 65536 and are compared pair by
    pair; results are on the same device. The call synchronises with the GPU once, for the number of
    pairs.

    Examples
    --------
    >>> query_codes, key_codes = np.array([[3, 5], [3, 3]]), np.array([[3, 5], [1, 5]])
    >>> indptr, indices, counts = collisions(query_codes, key_codes)
    >>> indptr.tolist(), indices.tolist(), counts.tolist()
    ([0, 2, 3], [0, 1, 0], [2, 1, 1])
    """
    torch = checks.torch_of(query_codes=query_codes, key_codes=key_codes, key_mask=key_mask)
    causal = checks.boolean("causal", causal)
    given: dict[str, Any] = {"query_codes": query_codes, "key_codes": key_codes}
    on_gpu = torch is not None and given["query_codes"].is_cuda and _C.with_cuda
    if on_gpu:
        small = all(x.dtype == torch.uint8 for x in given.values())
        n_buckets = 256 if small else MAX_BUCKETS
        codes = [as_codes(name, x, n_buckets, torch) for name, x in given.items()]
        for name, x in zip(given, codes, strict=True):
            if x.ndim != 2 or x.shape[1] > MAX_HASHES:
                wanted = f"(n, n_hashes), n_hashes 1 to {MAX_HASHES}"
                raise ValueError(f"{name} must have shape {wanted}, got {tuple(x.shape)}")
    else:
        codes = [wide_codes(name, x)[0] for name, x in given.items()]
    if codes[0].shape[1] != codes[1].shape[1]:
        raise ValueError(
            f"key_codes must have the {codes[0].shape[1]} hashes of query_codes, "
            f"got shape {tuple(codes[1].shape)}"
        )
    mask: Any = None
    if key_mask is not None:
        mask = checks.array(
            "key_mask", key_mask, torch, kinds="biu", wanted="booleans", cuda=on_gpu
        )
        wanted = (len(codes[1]),)
        if tuple(mask.shape) != wanted:
            raise ValueError(f"key_mask must have shape {wanted}, got {tuple(mask.shape)}")
        mask = mask != 0
    if on_gpu:
        return _cuda_collisions(codes, mask, causal, torch)
    mask = None if mask is None else np.ascontiguousarray(mask)
    if any(x.dtype != np.uint8 for x in codes):  # of one type, the narrowest that holds both
        largest = max(int(x.max(initial=0)) for x in codes)
        dtype = np.result_type(np.uint16, np.min_scalar_type(largest))
        codes = [x.astype(dtype, copy=False) for x in codes]
    find = _by_table_of_all if codes[0].itemsize <= 2 else _by_hash_tables
    found = find(codes[0], codes[1], mask, causal, torch)
    return like(torch, *found)


def _by_table_of_all(
    query_codes: np.ndarray,
    key_codes: np.ndarray,
    key_mask: np.ndarray | None,
    causal: bool,
    torch: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes of up to 16 bits, in the core."""
    problem, threads = (query_codes, key_codes, key_mask, causal), threads_of(torch)
    indptr = np.empty(len(query_codes) + 1, np.int64)
    _C.collision_indptr(*problem, indptr, threads)
    indices, counts = np.empty(indptr[-1], np.int32), np.empty(indptr[-1], np.int32)
    _C.collisions(*problem, indptr, indices, counts, threads)
    return indptr, indices, counts


def _by_hash_tables(
    query_codes: np.ndarray,
    key_codes: np.ndarray,
    key_mask: np.ndarray | None,
    causal: bool,
    torch: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes of any width: hash tables of the keys that take part."""
    kept = None if key_mask is None else np.flatnonzero(key_mask).astype(np.int32)
    if kept is not None:
        key_codes = key_codes[kept]
    query_codes, key_codes = like(torch, query_codes, key_codes)  # by torch's threads
    found = HashTables(key_codes).union(query_codes)
    indptr, indices, counts = (np.asarray(x) for x in found)
    if kept is not None:
        indices = kept[indices]
    if causal:
        seen = indices <= np.repeat(np.arange(len(query_codes)), np.diff(indptr))
        indptr = np.concatenate([[0], np.cumsum(seen)])[indptr]
        indices, counts = indices[seen], counts[seen]
    return indptr, indices, counts


def _cuda_collisions(codes: Any, key_mask: Any, causal: bool, torch: Any) -> tuple[Any, Any, Any]:
    mask = None if key_mask is None else key_mask.contiguous()
    tensors = codes[0].contiguous(), codes[1].contiguous(), mask
    place = {"device": codes[0].device}
    indptr = torch.empty(len(codes[0]) + 1, dtype=torch.int64, **place)
    _C.collision_indptr(*tensors, causal, indptr)
    pairs = int(indptr[-1])
    indices, counts = (torch.empty(pairs, dtype=torch.int32, **place) for _ in range(2))
    _C.collisions(*tensors, causal, indptr, indices, counts)
    return indptr, indices, counts


def pair_products(
    queries: ArrayOrTensor, keys: ArrayOrTensor, indptr: ArrayOrTensor, indices: ArrayOrTensor
) -> ArrayOrTensor:
    """Dot products of the pairs that a CSR structure lists: query i with `keys[indices[k]]`.

    Parameters
    ----------
    queries : array or tensor `(n_q, d)`
    keys : array or tensor `(n_k, d)`
        Computed in float64 where both are float64, else in float32.
    indptr : integer array or tensor `(n_q + 1,)`
    indices : integer array or tensor `(nnz,)`, each from 0 to n_k - 1

    Returns
    -------
    products : float32 or float64 array or tensor `(nnz,)`
        Not differentiable.

    Raises
    ------
    TypeError, ValueError
        No real numbers, or no integers; shapes that do not fit; indices of rows that keys lacks.
    """
    return _pairs(queries, keys, indptr, indices, 0)


def pair_distances(
    queries: ArrayOrTensor,
    keys: ArrayOrTensor,
    indptr: ArrayOrTensor,
    indices: ArrayOrTensor,
    *,
    p: int = 2,
) -> ArrayOrTensor:
    """Squared L2 distances (p=2) or L1 distances (p=1) of the pairs that a CSR structure lists.

    See `pair_products` for the other arguments.
    """
    measure = 2 if checks.integer("p", p, 1, 2) == 1 else 1
    return _pairs(queries, keys, indptr, indices, measure)


def _pairs(queries: Any, keys: Any, indptr: Any, indices: Any, measure: int) -> Any:
    torch = checks.torch_of(queries=queries, keys=keys, indptr=indptr, indices=indices)
    rows = {"queries": queries, "keys": keys}
    rows = {name: checks.array(name, x, torch) for name, x in rows.items()}
    for name, x in rows.items():
        if x.ndim != 2:
            raise ValueError(f"{name} must have shape (n, d), got {tuple(x.shape)}")
    queries, keys = (checks.to_numpy(x, torch) for x in rows.values())
    if queries.shape[1] != keys.shape[1]:
        shapes = f"queries {queries.shape} and keys {keys.shape}"
        raise ValueError(f"queries and keys must have equal numbers of columns, got {shapes}")
    both_double = all(x.dtype.newbyteorder("=") == np.float64 for x in (queries, keys))
    dtype = np.float64 if both_double else np.float32
    with np.errstate(over="ignore"):  # beyond float32 is infinity
        queries, keys = (_contiguous_rows(x, dtype) for x in (queries, keys))
    indptr, indices = as_pair_lists(indptr, indices, len(queries), torch)
    out = np.empty(len(indices), dtype)
    _C.pair_products(queries, keys, indptr, indices, measure, out, threads_of(torch))
    return like(torch, out)[0]


def as_pair_lists(
    indptr: Any, indices: Any, n_queries: int, torch: Any
) -> tuple[np.ndarray, np.ndarray]:
    """A CSR structure as the core takes it, which checks the rest: see `check_pair_lists`."""
    lists = {"indptr": indptr, "indices": indices}
    for name, x in lists.items():
        x = checks.array(name, x, torch, kinds="iu", wanted="integers")
        if x.ndim != 1:
            raise ValueError(f"{name} must have one dimension, got shape {tuple(x.shape)}")
        lists[name] = checks.to_numpy(x, torch)
    indptr, indices = lists.values()
    if len(indptr) != n_queries + 1:
        raise ValueError(f"indptr must have shape {(n_queries + 1,)}, got {indptr.shape}")
    for name, x in lists.items():
        if x.dtype.kind == "u" and int(x.max(initial=0)) > MAX_INT64:
            raise ValueError(f"{name} must be below 2**63, got {x.max()}")
    indptr = np.ascontiguousarray(indptr, np.int64)
    narrow = indices.dtype == np.int32
    return indptr, np.ascontiguousarray(indices, np.int32 if narrow else np.int64)


def check_pair_lists(indptr: np.ndarray, indices: np.ndarray, n_keys: int) -> None:
    """The core's checks of `as_pair_lists`, for what does not call it; ValueError."""
    falls = np.flatnonzero(indptr[1:] < indptr[:-1])
    if len(falls):
        before, after = indptr[falls[0] :][:2]
        raise ValueError(f"indptr: must not decrease, got {before} before {after}")
    if indptr[0] != 0 or indptr[-1] != len(indices):
        raise ValueError(
            f"indptr: must start with 0 and end with the number of indices, {len(indices)}, got "
            f"{indptr[0]} and {indptr[-1]}"
        )
    outside = indices[(indices < 0) | (indices >= n_keys)]
    if len(outside):
        raise ValueError(f"indices: rows from 0 to {n_keys - 1} are wanted, was {outside[0]}")


def _contiguous_rows(x: np.ndarray, dtype: type) -> np.ndarray:
    x = np.asarray(x, dtype)
    step = x.strides[1] == x.itemsize and x.strides[0] % x.itemsize == 0
    return x if step and x.flags.aligned else np.ascontiguousarray(x)

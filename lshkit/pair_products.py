"""A sampled product of two matrices: dot products or distances of listed pairs of rows."""

import numpy as np

from lshkit import _C, checks


def pair_products(queries, keys, indptr, indices):
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
    """
    return _pairs(queries, keys, indptr, indices, 0)


def pair_distances(queries, keys, indptr, indices, *, p=2):
    """Distances of the pairs that a CSR structure lists: |x - y|_2 ** 2 for p=2, |x - y|_1 for p=1.

    See `pair_products` for the other arguments.
    """
    measure = 2 if checks.integer("p", p, 1, 2) == 1 else 1
    return _pairs(queries, keys, indptr, indices, measure)


def _pairs(queries, keys, indptr, indices, measure):
    torch = checks.torch_of(queries=queries, keys=keys, indptr=indptr, indices=indices)
    rows = {"queries": queries, "keys": keys}
    rows = {name: checks.array(name, x, torch) for name, x in rows.items()}
    for name, x in rows.items():
        if x.ndim != 2:
            raise ValueError(f"{name} must have shape (n, d), got {tuple(x.shape)}")
    queries, keys = (_as_rows(x, torch) for x in rows.values())
    if queries.shape[1] != keys.shape[1]:
        shapes = f"queries {queries.shape} and keys {keys.shape}"
        raise ValueError(f"queries and keys must have as many columns, got {shapes}")
    dtype = np.float64 if queries.dtype == keys.dtype == np.float64 else np.float32
    with np.errstate(over="ignore"):  # beyond float32 is infinity
        queries, keys = (_contiguous_rows(x, dtype) for x in (queries, keys))
    lists = {"indptr": indptr, "indices": indices}
    for name, x in lists.items():
        x = checks.array(name, x, torch, kinds="iu", wanted="integers")
        if x.ndim != 1:
            raise ValueError(f"{name} must have one dimension, got shape {tuple(x.shape)}")
        lists[name] = x if torch is None else x.numpy()
    indptr, indices = lists.values()
    if len(indptr) != len(queries) + 1:
        wanted = (len(queries) + 1,)
        raise ValueError(f"indptr must have shape {wanted}, got {indptr.shape}")
    indptr = np.ascontiguousarray(indptr, np.int64)
    narrow = indices.dtype == np.int32
    indices = np.ascontiguousarray(indices, np.int32 if narrow else np.int64)
    out = np.empty(len(indices), dtype)
    threads = 0 if torch is None else torch.get_num_threads()
    _C.pair_products(queries, keys, indptr, indices, measure, out, threads)
    return out if torch is None else torch.from_numpy(out)


def _as_rows(x, torch):
    if torch is None:
        return x
    return (x.float() if x.dtype == torch.bfloat16 else x).detach().numpy()


def _contiguous_rows(x, dtype):
    x = np.asarray(x, dtype)
    step = x.strides[1] == x.itemsize and x.strides[0] % x.itemsize == 0
    return x if step and x.flags.aligned else np.ascontiguousarray(x)

"""A sampled product of two matrices: dot products or distances of listed pairs of rows."""

import numpy as np

from lshkit import checks


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
    queries, keys, rows, indices, torch = _pairs(queries, keys, indptr, indices)
    out = np.einsum("pd,pd->p", queries[rows], keys[indices])
    return out if torch is None else torch.from_numpy(out)


def pair_distances(queries, keys, indptr, indices, *, p=2):
    """Distances of the pairs that a CSR structure lists: |x - y|_2 ** 2 for p=2, |x - y|_1 for p=1.

    See `pair_products` for the other arguments.
    """
    queries, keys, rows, indices, torch = _pairs(queries, keys, indptr, indices)
    out = (np.abs(queries[rows] - keys[indices]) ** checks.integer("p", p, 1, 2)).sum(-1)
    return out if torch is None else torch.from_numpy(out)


def _pairs(queries, keys, indptr, indices):
    torch = checks.torch_of(queries=queries, keys=keys, indptr=indptr, indices=indices)
    if torch is not None:
        queries, keys = queries.detach(), keys.detach()
    queries, keys, indptr, indices = map(np.asarray, (queries, keys, indptr, indices))
    dtype = np.float64 if queries.dtype == keys.dtype == np.float64 else np.float32
    rows = np.repeat(np.arange(len(queries)), np.diff(indptr))
    return queries.astype(dtype), keys.astype(dtype), rows, indices, torch

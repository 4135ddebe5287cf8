"""Rows and queries as the samplers take them, and the collision probabilities of listed pairs."""

import numpy as np

from lshkit import checks
from lshkit.pair_products import pair_distances, pair_products

_CHUNK = 2**16  # numbers of gathered rows at a time: they stay in cache
_CLOSE = 0.99  # cosine beyond which float32 products would not give the angle


def as_numpy(name, x):
    """A numpy array of an array or tensor of real numbers, and torch if it was a tensor.

    float32 and float64 are kept, shorter floats become float32 and all others float64.
    """
    torch = checks.torch_of(**{name: x})
    x = checks.array(name, x, torch)
    if torch is not None:
        if x.dtype in (torch.bfloat16, torch.float16):
            x = x.float()
        x = x.detach().numpy()
    if x.dtype not in (np.float32, np.float64):
        x = x.astype(np.float32 if x.dtype == np.float16 else np.float64)
    return np.ascontiguousarray(x, x.dtype.newbyteorder("=")), torch


def check_rows(name, x, *, direction=False):
    """ValueError naming the first row that is not finite; with direction, or that is zero."""
    sums = _squares(x)
    for row in np.flatnonzero(~np.isfinite(sums)):  # or with squares that are beyond the type
        if not np.isfinite(x[row]).all():
            raise ValueError(f"{name} must be finite, row {row} has a NaN or infinity")
    if direction and not sums.all():
        for row in np.flatnonzero(sums == 0):
            if not x[row].any():
                raise ValueError(f"{name} must have no row of zeros, which has no angle: row {row}")


@np.errstate(over="ignore", invalid="ignore", under="ignore")
def _squares(x):
    return np.einsum("nd,nd->n", x, x)


def is_angular(hasher):
    """Whether the hasher's probabilities are of the angle alone, which rows of zeros have not."""
    return hasattr(hasher, "probability_of_cosine")


def row_norms(hasher, rows):
    """Lengths of the rows, float64 `(n,)`, if `pair_probability` needs them; else None.

    NaN where the type of the rows does not hold a length or products well.
    """
    if not is_angular(hasher):
        return None
    sums, limits = _squares(rows), np.finfo(rows.dtype)
    holds = (sums > limits.tiny / limits.eps**1.5) & (sums < limits.max)
    return np.sqrt(np.where(holds, sums, np.nan)).astype(np.float64)


def pair_probability(hasher, queries, rows, norms, indptr, indices):
    """Probabilities that the listed pairs share a code: float64 `(nnz,)`.

    Pairs in CSR form, query i with `rows[indices[k]]`; norms: `row_norms` of the rows. In the
    precision of the rows, and in float64 where float32 would lose the angle between nearly parallel
    rows.
    """
    if is_angular(hasher):
        q_norm = row_norms(hasher, queries)
        of_pair = np.repeat(np.arange(len(queries)), np.diff(indptr))
        products = pair_products(queries, rows, indptr, indices)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            cosine = products / (q_norm[of_pair] * norms[indices])
        probability = hasher.probability_of_cosine(cosine)
        exact = np.flatnonzero(~(np.abs(cosine) <= _CLOSE))  # also where lengths are NaN
        _exactly(hasher, queries, rows, of_pair, indices, exact, probability)
        return probability
    if getattr(hasher, "p", None) is not None:  # EuclideanLSH
        distance = pair_distances(queries, rows, indptr, indices, p=hasher.p).astype(np.float64)
        distance = np.sqrt(distance) if hasher.p == 2 else distance
        return hasher.probability_of_distance(distance)
    of_pair = np.repeat(np.arange(len(queries)), np.diff(indptr))
    probability = np.empty(len(indices))
    _exactly(hasher, queries, rows, of_pair, indices, np.arange(len(indices)), probability)
    return probability


def _exactly(hasher, queries, rows, of_pair, indices, pairs, probability):
    step = max(1, _CHUNK // rows.shape[1])
    for first in range(0, len(pairs), step):
        some = pairs[first : first + step]
        probability[some] = hasher.collision_probability(
            queries[of_pair[some]], rows[indices[some]]
        )

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
    """ValueError naming the first row that is not finite; with direction, or that is zero.

    Returns the rows' sums of squares, for `within_float32`.
    """
    sums = _squares(x)
    for row in np.flatnonzero(~np.isfinite(sums)):  # or with squares that are beyond the type
        if not np.isfinite(x[row]).all():
            raise ValueError(f"{name} must be finite, row {row} has a NaN or infinity")
    if direction and not sums.all():
        for row in np.flatnonzero(sums == 0):
            if not x[row].any():
                raise ValueError(f"{name} must have no row of zeros, which has no angle: row {row}")
    return sums


@np.errstate(over="ignore", invalid="ignore", under="ignore")
def _squares(x):
    return np.einsum("nd,nd->n", x, x)


def is_angular(hasher):
    """Whether the hasher's probabilities are of the angle alone, which rows of zeros have not."""
    return hasattr(hasher, "probability_of_cosine")


def within_float32(hasher, rows, squares=None):
    """The rows at lengths that float32 holds, in which angles are hashed, by powers of two.

    Changes no row of a length near 1, nor any where the hasher is not of the angle.
    """
    if not is_angular(hasher):
        return rows
    squares = _squares(rows) if squares is None else squares
    beyond = ~((squares > 1e-30) & (squares < 1e30))
    if not beyond.any():
        return rows
    rows = rows.copy()
    largest = np.abs(rows[beyond]).max(1, keepdims=True)
    rows[beyond] = np.ldexp(rows[beyond], -np.frexp(largest)[1])
    return rows


def row_norms(hasher, rows):
    """Lengths of the rows, float64 `(n,)`, if `pair_probability` needs them; else None.

    NaN where the type of the rows does not hold a length or products well.
    """
    if not is_angular(hasher):
        return None
    sums = _squares(rows)
    return np.sqrt(np.where(_holds(sums), sums, np.nan)).astype(np.float64)


def _holds(sums):
    """Whether sums of squares are neither near the smallest nor beyond the largest numbers."""
    limits = np.finfo(sums.dtype)
    return (sums > limits.tiny / limits.eps**1.5) & (sums < limits.max)


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
        distance = pair_distances(queries, rows, indptr, indices, p=hasher.p)
        exact = np.flatnonzero(~_holds(distance))
        distance = np.sqrt(distance, dtype=np.float64) if hasher.p == 2 else distance
        probability = hasher.probability_of_distance(distance)
    else:
        exact = np.arange(len(indices))
        probability = np.empty(len(indices))
    of_pair = np.repeat(np.arange(len(queries)), np.diff(indptr))
    _exactly(hasher, queries, rows, of_pair, indices, exact, probability)
    # A code is a hash of the bins: else far rows that do share one would weigh without bound.
    return probability + (1 - probability) * getattr(hasher, "_chance", 0.0)


def _exactly(hasher, queries, rows, of_pair, indices, pairs, probability):
    step = max(1, _CHUNK // rows.shape[1])
    for first in range(0, len(pairs), step):
        some = pairs[first : first + step]
        probability[some] = hasher.collision_probability(
            queries[of_pair[some]], rows[indices[some]]
        )

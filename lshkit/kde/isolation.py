"""How isolated rows are: about the distance of each from its nearest other row."""

import numpy as np

from lshkit.kde import kernels
from lshkit.kde.leave_one_out import LeaveOneOut

LEAF = 32  # rows at most, and half of them at least
AT_ONCE = 2**20  # numbers in memory, of leaves


@np.errstate(over="ignore")  # projections of rows that float32 does not hold
def isolation(left_out: LeaveOneOut, rng: np.random.Generator) -> np.ndarray:
    """r^2 (laplacian, exponential: r) of each row `(n,)`, in units of the largest.

    r is the Euclidean distance to the nearest row of the same leaf of a random projection tree
    (Dasgupta and Freund 2008), so never too small. Each level halves all nodes at the medians of
    one random projection, which seldom parts rows that are much nearer to each other than others.
    """
    n, n_features = left_out.X.shape
    n_levels = max(0, (n // LEAF).bit_length())
    projections = np.empty((n_levels, n), np.float32)
    directions = rng.normal(size=(n_features, n_levels))
    for first, rows in left_out.scaled_parts():
        part = slice(first, first + len(rows))
        projections[:, part] = np.einsum("ij,jk->ki", rows, directions)
    # All leaves have the same size: some rows are in two.
    leaves = np.resize(rng.permutation(n), (1, -(-n // 2**n_levels) * 2**n_levels))
    for projection in projections:
        halves = np.argpartition(projection[leaves], leaves.shape[1] // 2, axis=1)
        leaves = np.take_along_axis(leaves, halves, axis=1).reshape(2 * len(leaves), -1)
    squares, size = np.full(n, np.inf), leaves.shape[1]
    step = max(1, AT_ONCE // (size * max(size, n_features)))
    for first in range(0, len(leaves), step):
        some = leaves[first : first + step]
        rows = left_out.scaled(left_out.X[some.ravel()]).reshape(*some.shape, n_features)
        rows -= rows.mean(axis=1, keepdims=True)
        terms = np.einsum("bij,bij->bi", rows, rows)[:, None, :] / 2
        terms = terms - np.einsum("bij,bkj->bik", rows, rows)  # r^2 / 2, but for the row's own
        terms[some[:, :, None] == some[:, None, :]] = np.inf
        nearest = np.take_along_axis(rows, terms.argmin(axis=2)[..., None], axis=1)
        np.minimum.at(squares, some, np.einsum("bij,bij->bi", rows - nearest, rows - nearest))
    power = 1.0 if left_out.kernel in ("gaussian", *kernels.COMPACT) else 0.5
    return np.power(squares / (squares.max() or 1.0), power)

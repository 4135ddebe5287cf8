"""Exact kernel sums over rows, blocked, in log space: the core's `kernel_sums` and what adds up."""

import numpy as np

from lshkit import _C
from lshkit.kde import kernels

ROUNDING = 2.0**-24  # of float32
FARTHEST = 1e150


class Sums:
    """Sums of terms and of their squares for every query: exp(shift) * total, exp(2 shift) * ..."""

    __slots__ = ("shift", "squares", "total")

    def __init__(self, shift, total, squares):
        self.shift, self.total, self.squares = shift, total, squares

    @classmethod
    def zeros(cls, n):
        return cls(np.full(n, -np.inf), np.zeros(n), np.zeros(n))

    def __add__(self, other):
        shift = np.maximum(self.shift, other.shift)
        a, b = (_factor(x.shift, shift) for x in (self, other))
        squares = self.squares * a**2 + other.squares * b**2
        return Sums(shift, self.total * a + other.total * b, squares)

    def __getitem__(self, index):
        return Sums(self.shift[index], self.total[index], self.squares[index])


def _factor(shift, new):
    with np.errstate(invalid="ignore"):
        return np.where(shift == -np.inf, 0.0, np.exp(shift - new))


class Geometry:
    """A kernel, and how rows are brought to bandwidth 1: (x - centre) / bandwidth.

    The centre keeps squared distances from cancelling; it changes no distance.
    """

    def __init__(self, kernel, n_bits, centre, bandwidth):
        self.kernel, self.n_bits = kernel, n_bits
        self.centre, self.bandwidth = centre, bandwidth
        if kernel == "angular":
            self.centre = np.zeros_like(centre)

    def scale(self, X):
        """Rows at bandwidth 1, float64; of length 1 for the angular kernel (rows of 0 stay)."""
        X = (np.asarray(X, np.float64) - self.centre) / self.bandwidth
        if self.kernel == "angular":
            X = unit_rows(X)
        return np.ascontiguousarray(X)

    def rounding(self, norms):
        """About the error of a log kernel (for compact kernels, of the kernel) in float32."""
        if self.kernel == "angular":
            return np.full(np.shape(norms), np.sqrt(ROUNDING))
        if self.kernel == "gaussian":
            return ROUNDING * norms**2
        if self.kernel == "laplacian":  # norms are Euclidean here too
            return ROUNDING * norms
        return np.sqrt(ROUNDING) * norms

    def sums(self, queries, keys, weights=None, *, scaled, tolerance, reach, threads, radial=None):
        """Sums over the keys of weight * k for queries that are scaled (float64).

        keys: as they were given, or scaled=True: scaled. tolerance: the error of a log kernel that
        may come from computing distances in float32; queries that would exceed it are computed in
        float64. reach: the largest norm of a scaled key. radial: (table, inverse_step) of the core.
        """
        with np.errstate(over="ignore"):
            norms = np.sqrt(np.einsum("ij,ij->i", queries, queries))
        single = self.rounding(np.maximum(norms, reach)) <= tolerance
        sums = np.empty((len(queries), 3))
        for mask, dtype in ((single, np.float32), (~single, np.float64)):
            count = np.count_nonzero(mask)
            if count == 0:
                continue
            part = queries if count == len(queries) else queries[mask]
            out = sums if count == len(queries) else np.empty((count, 3))
            keep = scaled or self.kernel == "angular"
            _C.kernel_sums(
                kernels.CODES[self.kernel],
                self.n_bits,
                np.ascontiguousarray(part, dtype),
                keys,
                None if keep else self.centre,
                None if keep else 1 / self.bandwidth,
                weights,
                None if radial is None else radial[0],
                0.0 if radial is None else radial[1],
                out,
                threads,
            )
            if out is not sums:
                sums[mask] = out
        if self.kernel != "angular":  # squares that overflow: nothing of a kernel is left there
            sums[~(norms < FARTHEST)] = -np.inf, 0, 0
        return Sums(sums[:, 0].copy(), sums[:, 1].copy(), sums[:, 2].copy())


def unit_rows(X):
    """Rows divided by their lengths; rows of 0 stay."""
    largest = np.abs(X).max(axis=1, keepdims=True, initial=0)
    X = X / np.where(largest > 0, largest, 1)
    norms = np.sqrt(np.einsum("ij,ij->i", X, X))[:, None]
    return X / np.where(norms > 0, norms, 1)


def has_zero_row(X):
    squares = np.einsum("ij,ij->i", X, X)  # a few times faster than any()
    small = squares < 1e-30
    return bool(small.any()) and not np.any(X[small], axis=1).all()


def in_range_of_hashing(X):
    """Whether rows may be hashed by their angle as they are, in float32."""
    squares = np.einsum("ij,ij->i", X, X)
    return len(X) == 0 or (squares.min() > 1e-30 and squares.max() < 1e30)

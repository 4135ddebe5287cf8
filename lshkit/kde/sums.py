"""Exact kernel sums over rows, blocked, in log space: the core's `kernel_sums` and what adds up."""

import numpy as np

from lshkit import _C
from lshkit.kde import kernels

ROUNDING, DOUBLE_ROUNDING = 2.0**-24, 2.0**-53  # of float32, float64
FARTHEST = 1e150
BLOCK = 64  # rows of a block, lshkit::kKeyBlock of the C++ core
TINY = 1e-20  # the mean kernel below which the squares of the angular one leave float32


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

    def without(self, part):
        """The sums without those of a part of the rows; what rounding leaves below 0 is 0."""
        rest = self + Sums(part.shift, -part.total, -part.squares)
        return Sums(rest.shift, np.maximum(rest.total, 0), np.maximum(rest.squares, 0))

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
        many = max(1.0, len(self.bandwidth) / 256)  # features: each adds its own
        if self.kernel == "gaussian":
            return many * ROUNDING * norms**2
        if self.kernel == "laplacian":  # norms are Euclidean here too
            return many * ROUNDING * norms
        return np.sqrt(ROUNDING) * norms

    def sums(
        self,
        queries,
        keys,
        weights=None,
        *,
        scaled,
        tolerance,
        reach,
        threads,
        radial=None,
        blocks=None,
    ):
        """Sums over the keys of weight * k for queries that are scaled (float64).

        keys: as they were given, or scaled=True: scaled. tolerance: the error of a log kernel that
        may come from computing distances in float32; queries that would exceed it are computed in
        float64. reach: the largest norm of a scaled key. radial: (table, inverse_step) of the core.
        blocks: the keys in `blocks_of` too, which is quicker for few queries and gives equal bits.
        """
        with np.errstate(over="ignore"):
            norms = np.sqrt(np.einsum("ij,ij->i", queries, queries))
        sums = np.empty((len(queries), 3))
        keep = scaled or self.kernel == "angular"
        options = (
            None if keep else self.centre,
            None if keep else 1 / self.bandwidth,
            weights,
            None if radial is None else radial[0],
            0.0 if radial is None else radial[1],
        )
        rows, n_keys = (keys, -1) if blocks is None else (blocks, len(keys))

        def add_up(some, dtype, out):
            code, some = kernels.CODES[self.kernel], np.ascontiguousarray(some, dtype)
            _C.kernel_sums(code, self.n_bits, some, rows, *options, out, threads, n_keys)

        largest = norms.max(initial=reach)
        if np.all(self.rounding(largest) <= tolerance):
            add_up(queries, np.float32, sums)
            if self.kernel != "angular" or sums[:, 1].min(initial=1) >= TINY * len(keys):
                return Sums(sums[:, 0], sums[:, 1], sums[:, 2])  # the usual case
        single = self.rounding(np.maximum(norms, reach)) <= tolerance
        for mask, dtype in ((single, np.float32), (~single, np.float64)):
            count = np.count_nonzero(mask)
            if count == len(queries):
                add_up(queries, dtype, sums)
            elif count:
                out = np.empty((count, 3))
                add_up(queries[mask], dtype, out)
                sums[mask] = out
        if self.kernel == "angular":
            small = np.flatnonzero(sums[:, 1] < TINY * len(keys))
            if len(small):
                sums[small] = self._sums_of_logs(queries[small], keys, weights, scaled, radial)
        around = np.flatnonzero(self._cancel(norms, sums[:, 0], tolerance, reach))
        if len(around):
            size = self._cell_size(tolerance)
            cells = size * np.rint(queries[around] / size)
            for cell, members in _groups(cells):
                some = around[members]
                offsets = queries[some] - cell
                sums[some] = self._sums_around(
                    cell, offsets, keys, weights, scaled, radial, threads
                )
        if self.kernel != "angular":  # squares that overflow: nothing of a kernel is left there
            sums[~(norms < FARTHEST)] = -np.inf, 0, 0
        return Sums(sums[:, 0], sums[:, 1], sums[:, 2])

    def _cancel(self, norms, shift, tolerance, reach):
        """Queries so far from the centre that float64 loses their distances from rows near them.

        Squared distances come from products, with an error of DOUBLE_ROUNDING * norms^2.
        """
        if self.kernel in ("laplacian", "angular"):
            return np.zeros(len(norms), bool)
        with np.errstate(over="ignore", invalid="ignore"):
            lost = DOUBLE_ROUNDING * norms**2
            wanted = 2 * tolerance * np.maximum(np.abs(shift), 1)
            if self.kernel == "exponential":  # shift is the least distance
                lost = lost / np.maximum(np.abs(shift), np.sqrt(lost))
            elif self.kernel == "linear":
                lost = np.sqrt(lost)
            if self.kernel in kernels.COMPACT:  # farther out there is nothing
                lost = np.where(norms > 1.001 * reach + 2, 0, lost)
        return (lost > wanted) & (norms < FARTHEST)

    def _sums_of_logs(self, queries, keys, weights, scaled, radial):
        """The angular kernel where its powers, or their squares, leave float32."""
        sums = Sums.zeros(len(queries))
        for first in range(0, len(keys), 1024):
            rows = np.asarray(keys[first : first + 1024], np.float64)
            cosines = queries @ (rows if scaled else unit_rows(rows)).T
            agreement = np.arccos(np.clip(-cosines, -1, 1)) / np.pi
            terms = np.ones(cosines.shape) if weights is None else weights[first : first + 1024]
            if radial is not None:
                at = np.pi * (1 - agreement) * radial[1]
                terms = terms * np.interp(at, np.arange(len(radial[0])), radial[0])
            logs = self.n_bits * np.log(np.maximum(agreement, 1e-300))
            shift = logs.max(axis=1)
            terms = terms * np.exp(logs - shift[:, None])
            sums += Sums(shift, terms.sum(axis=1), (terms**2).sum(axis=1))
        return np.stack([sums.shift, sums.total, sums.squares], axis=1)

    def _cell_size(self, tolerance):
        """The side of cubes, a power of 2, in which nothing cancels that matters."""
        lost = tolerance**2 if self.kernel in ("linear", "exponential") else 0.5 * tolerance
        return 2.0 ** np.floor(0.5 * np.log2(lost / DOUBLE_ROUNDING / len(self.bandwidth)))

    def _sums_around(self, cell, offsets, keys, weights, scaled, radial, threads):
        """The sums of queries cell + offset, with the rows centred at the cell."""
        centre = cell if scaled else self.centre + cell * self.bandwidth
        out = np.empty((len(offsets), 3))
        _C.kernel_sums(
            kernels.CODES[self.kernel],
            self.n_bits,
            np.ascontiguousarray(offsets),
            keys,
            np.ascontiguousarray(centre),
            np.ones(len(cell)) if scaled else 1 / self.bandwidth,
            weights,
            None if radial is None else radial[0],
            0.0 if radial is None else radial[1],
            out,
            threads,
        )
        return out


def _groups(rows):
    """Each distinct row, and where it is."""
    distinct, inverse = np.unique(rows, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    order = np.argsort(inverse, kind="stable")
    ends = np.cumsum(np.bincount(inverse, minlength=len(distinct)))
    return zip(distinct, np.split(order, ends[:-1]), strict=True)


def blocks_of(rows):
    """Rows in blocks of 64 with features first, `(n_blocks, n_features, 64)`: 0 past the last."""
    n, d = rows.shape
    blocks = np.zeros((-(-n // BLOCK), d, BLOCK), rows.dtype)
    whole = n // BLOCK
    blocks[:whole] = rows[: whole * BLOCK].reshape(whole, BLOCK, d).transpose(0, 2, 1)
    if whole < len(blocks):
        blocks[whole, :, : n - whole * BLOCK] = rows[whole * BLOCK :].T
    return blocks


def unit_rows(X):
    """Rows divided by their lengths; rows of 0 stay."""
    if in_range_of_hashing(X):
        return X / np.sqrt(np.einsum("ij,ij->i", X, X))[:, None]
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

"""How rows are scaled for a kernel, and its exact sums over them: the core's `kernel_sums`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

from lshkit import _C
from lshkit.kde import kernels
from lshkit.kde.sums import Sums

ROUNDING, DOUBLE_ROUNDING = 2.0**-24, 2.0**-53  # of float32, float64
FARTHEST = 1e150
LOST, FAR = 1e-9, 1e-5  # bandwidths
SIZES_AT_ONCE = 32  # features of an L1 distance that the core adds up one after another
EVERY = slice(None)  # query
TINY = 1e-20  # the mean kernel below which the squares of the angular one leave float32


class Geometry:
    """A kernel, and how rows are brought to bandwidth 1: (x - centre) * inverse, of the bandwidth.

    The centre keeps squared distances from cancelling; it changes no distance. All that scales rows
    multiplies, as the core does: else a far row would not be where its own query is.

    Compact kernels end for rows as given, in float64: at a distance of one bandwidth,
    sqrt(sum (x - y)^2) < bandwidth, as in scikit-learn; with several bandwidths at
    sqrt(sum ((x - y) / bandwidth)^2) < 1. `widths` (None: 1) and `edge` say it for both.
    """

    def __init__(self, kernel: str, n_bits: int, centre: np.ndarray, bandwidth: np.ndarray) -> None:
        self.kernel, self.n_bits = kernel, n_bits
        self.centre, self.bandwidth, self.inverse = centre, bandwidth, 1 / bandwidth
        if kernel == "angular":
            self.centre = np.zeros_like(centre)
        self.widths, self.edge = edge_of(bandwidth)
        self.log_volume = float(np.log(bandwidth).sum())  # by which a density is less

    def scale(self, X: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Rows at bandwidth 1, float64; of norm 1 for the angular kernel (rows of 0 stay).

        out: memory for them, float64 of the shape of X.
        """
        X = np.subtract(X, self.centre, dtype=np.float64, out=out)
        with np.errstate(over="ignore"):  # infinitely far: no density
            X *= self.inverse
        if self.kernel == "angular":
            X = unit_rows(X)
        return np.ascontiguousarray(X)

    def log_kernel(self, distances: np.ndarray) -> np.ndarray:
        """log k of distances at bandwidth 1, for kernels that do not end."""
        if self.kernel == "gaussian":
            return -0.5 * distances**2
        if self.kernel == "angular":
            return self.n_bits * np.log(np.maximum(1 - distances / np.pi, 1e-300))
        return -distances

    def rounding(self, norms: Any, unit: float = ROUNDING) -> Any:
        """About the error of a log kernel (for compact kernels, of the kernel) in float32.

        unit: the rounding of the type, where it is another.
        """
        if self.kernel == "angular":
            return np.full(np.shape(norms), np.sqrt(unit))
        if self.kernel == "laplacian":  # of the rows alone, by Euclidean norms
            return unit * norms
        many = max(1.0, len(self.bandwidth) / 256)  # features: each adds its own to squares
        if self.kernel in ("gaussian", "tophat"):  # of tophat it is decided again what that changes
            return many * unit * norms * norms
        return np.sqrt(many * unit) * norms

    def _rounding_of_sizes(self, shift: np.ndarray) -> np.ndarray:
        """The root mean square error of L1 distances from adding up their terms in float32.

        shift: of the sums, minus the distance of the nearest key, which most of a sum is about.
        """
        d = len(self.bandwidth)
        at_once = min(d, SIZES_AT_ONCE)
        return ROUNDING / 3 * np.sqrt(at_once**2 / d + (d - at_once) / SIZES_AT_ONCE) * -shift

    def sums(
        self,
        queries: np.ndarray,
        keys: np.ndarray,
        weights: np.ndarray | None = None,
        *,
        scaled: bool,
        tolerance: float,
        reach: float,
        threads: int,
        blocks: np.ndarray | None = None,
        given: np.ndarray | None = None,
    ) -> Sums:
        """Sums over the keys of weight * k for queries that are scaled (float64).

        keys: as they were given, or scaled=True: scaled. tolerance: the error of a log kernel that
        may come from computing distances in float32; queries that would exceed it are computed in
        float64. reach: the largest norm of a scaled key.
        blocks: the keys in `blocks_of` too, which is quicker for few queries and gives equal bits.
        given: the queries as given; not wanted where the keys are scaled. Compact kernels need
        them, others where scaled rows far from the centre are rounded by what matters.
        """
        as_they_are = scaled or self.kernel == "angular"
        centre, inverse = (None, None) if as_they_are else (self.centre, self.inverse)
        rows, n_keys = (keys, -1) if blocks is None else (blocks, len(keys))
        options = rows, weights, centre, inverse, threads, n_keys
        compact = self.kernel in kernels.COMPACT and not scaled

        def core_sums(some: slice | np.ndarray, dtype: type) -> np.ndarray:
            as_given = None
            if compact:
                assert given is not None
                as_given = given[some]
            return self._core_sums(queries[some], dtype, *options, as_given)

        if self.kernel == "angular":  # whose rounding does not depend on norms
            dtype = np.float32 if self.rounding(1.0) <= tolerance else np.float64
            sums = Sums.of(core_sums(EVERY, dtype))
            tiny = np.flatnonzero(sums.total < TINY * len(keys))
            if len(tiny):
                sums[tiny] = self._sums_of_logs(queries[tiny], keys, weights, scaled)
            return sums
        norms = np.sqrt(np.einsum("ij,ij->i", queries, queries))
        by_norms = self.kernel != "laplacian"  # whose rounding is known from its sums alone
        if by_norms and self.rounding(float(norms.max(initial=reach))) <= tolerance:
            return Sums.of(core_sums(EVERY, np.float32))  # the usual case
        single = self.rounding(np.maximum(norms, reach)) <= tolerance
        sums = Sums.of(self._in_two_types(core_sums, single, tolerance))
        lost = np.flatnonzero(self._cancel(norms, sums.shift, tolerance, scaled))
        if len(lost):
            beside = self._cell_size(tolerance), keys, weights, threads
            if given is None or scaled:
                sums[lost] = self._sums_in_cells(queries[lost], *beside, scaled)
            else:
                sums[lost] = self._sums_as_given(given[lost], *beside)
        nothing = np.flatnonzero(~(norms < FARTHEST))  # squares that overflow: no kernel is left
        if len(nothing):
            sums[nothing] = Sums.zeros(len(nothing))
        return sums

    def _in_two_types(
        self, core_sums: Callable[[Any, type], np.ndarray], single: np.ndarray, tolerance: float
    ) -> np.ndarray:
        """`core_sums` of all queries, in float32 where they are single and keep the tolerance."""
        sums = np.empty((len(single), 3))

        def fill(mask: np.ndarray, dtype: type) -> None:
            count = np.count_nonzero(mask)
            if count == len(mask):
                sums[:] = core_sums(EVERY, dtype)
            elif count:
                sums[mask] = core_sums(mask, dtype)

        fill(single, np.float32)
        if self.kernel == "laplacian":
            single[single] = self._rounding_of_sizes(sums[single, 0]) <= tolerance
        fill(~single, np.float64)
        return sums

    def _core_sums(
        self,
        queries: np.ndarray,
        dtype: type,
        keys: np.ndarray,
        weights: np.ndarray | None,
        centre: np.ndarray | None,
        inverse: np.ndarray | None,
        threads: int,
        n_keys: int = -1,
        given: np.ndarray | None = None,
    ) -> np.ndarray:
        """The core's sums: shift, total and squares of each query, `(n_queries, 3)`.

        dtype: of the distances. centre, inverse: what scales the keys, None where they are scaled.
        n_keys: of keys in blocks. given: the queries as given, where compact kernels end for them.
        """
        out = np.empty((len(queries), 3))
        ends: dict[str, Any] = {}
        if given is not None:
            given = np.require(given, np.float64, ["C", "A"])
            ends = {"given": given, "widths": self.widths, "edge": self.edge}
        kernel = kernels.CODES[self.kernel], self.n_bits
        queries = np.ascontiguousarray(queries, dtype)
        _C.kernel_sums(
            *kernel, queries, keys, centre, inverse, weights, out, threads, n_keys, **ends
        )
        return out

    def _cancel(
        self, norms: np.ndarray, shift: np.ndarray, tolerance: float, scaled: bool
    ) -> np.ndarray:
        """Queries so far from the centre that float64 loses their distances from rows near them.

        Squared distances come from products, with an error of DOUBLE_ROUNDING * norms^2. Of sizes
        it is the rounding of the scaled rows, which is in them already where these are the keys.
        """
        if self.kernel in kernels.COMPACT or (scaled and self.kernel == "laplacian"):
            return np.zeros(len(norms), bool)  # of compact kernels the core subtracts
        with np.errstate(over="ignore", invalid="ignore"):
            lost = DOUBLE_ROUNDING * norms**2
            if self.kernel == "laplacian":
                lost = 2 * DOUBLE_ROUNDING * np.sqrt(len(self.bandwidth)) * norms
            wanted = 2 * tolerance * np.maximum(np.abs(shift), 1)
            if self.kernel == "exponential":  # shift is the least distance
                lost = lost / np.maximum(np.abs(shift), np.sqrt(lost))
        return (lost > wanted) & (norms < FARTHEST)

    def _sums_of_logs(
        self, queries: np.ndarray, keys: np.ndarray, weights: np.ndarray | None, scaled: bool
    ) -> Sums:
        """The angular kernel where its powers, or their squares, leave float32."""
        sums = Sums.zeros(len(queries))
        for first in range(0, len(keys), 1024):
            rows = np.asarray(keys[first : first + 1024], np.float64)
            rows = rows if scaled else unit_rows(rows)
            cosines = queries @ rows.T
            agreement = np.arccos(np.clip(-cosines, -1, 1)) / np.pi
            opposite = cosines < -1 + 1e-6  # where the arccosine loses digits
            if opposite.any():
                agreement[opposite] = angles_of(cdist(-queries, rows)[opposite]) / np.pi
            terms = np.ones(agreement.shape) if weights is None else weights[first : first + 1024]
            logs = self.n_bits * np.log(np.maximum(agreement, 1e-300))
            shift = logs.max(axis=1)
            terms = np.where(agreement > 0, terms * np.exp(logs - shift[:, None]), 0)
            sums += Sums(shift, terms.sum(axis=1), (terms**2).sum(axis=1))
        return sums

    def rounds(self, rows: np.ndarray) -> bool:
        """Whether some scaled rows are rounded by more than LOST bandwidths."""
        if self.kernel == "angular" or self.kernel in kernels.COMPACT:
            return False
        return bool(DOUBLE_ROUNDING * np.abs(rows).max(initial=0) > LOST)

    def far(self, queries: np.ndarray) -> np.ndarray:
        """Scaled queries that are rounded by more than FAR bandwidths: near rows would be one."""
        if self.kernel == "angular":
            return np.zeros(len(queries), bool)
        with np.errstate(over="ignore"):
            return ~(DOUBLE_ROUNDING * np.sqrt(np.einsum("ij,ij->i", queries, queries)) <= FAR)

    def _cell_size(self, tolerance: float) -> float:
        """The side of cubes, a power of 2, in which nothing cancels that matters."""
        lost = tolerance**2 if self.kernel == "exponential" else 0.5 * tolerance
        return 2.0 ** np.floor(0.5 * np.log2(lost / DOUBLE_ROUNDING / len(self.bandwidth)))

    def _sums_in_cells(
        self,
        queries: np.ndarray,
        size: float,
        keys: np.ndarray,
        weights: np.ndarray | None,
        threads: int,
        scaled: bool,
    ) -> Sums:
        """The sums of scaled queries, each with the rows centred in its cell, a cube of a size."""
        groups = list(_groups(size * np.rint(queries / size)))
        sums, ones = Sums.zeros(len(queries)), np.ones(queries.shape[1])
        for first in range(0, len(keys), 8192):
            part = slice(first, first + 8192)
            rows = keys[part] if scaled else self.scale(keys[part])
            own, some = None if weights is None else weights[part], np.empty((len(queries), 3))
            for cell, members in groups:
                centre = np.ascontiguousarray(cell)
                moved = queries[members] - cell
                some[members] = self._core_sums(moved, np.float64, rows, own, centre, ones, threads)
            sums += Sums.of(some)
        return sums

    def _sums_as_given(
        self,
        given: np.ndarray,
        size: float,
        keys: np.ndarray,
        weights: np.ndarray | None,
        threads: int,
    ) -> Sums:
        """`_sums_in_cells` of queries as given, as the keys are.

        The centre of a cell is one of its queries: no row near it is rounded by being scaled.
        """
        cells = size * np.rint(given * self.inverse / size)
        # Where scaled rows would be rounded to one another, each query has a cell of its own.
        cells = np.where(np.abs(cells) * DOUBLE_ROUNDING > size / 4, given, cells)
        sums = np.empty((len(given), 3))
        for _, members in _groups(cells):
            centre = np.array(given[members[0]], np.float64)
            moved = (given[members] - centre) * self.inverse
            options = keys, weights, centre, self.inverse, threads
            sums[members] = self._core_sums(moved, np.float64, *options)
        return Sums.of(sums)


def angles_of(chords: np.ndarray, others: Callable[[], np.ndarray] | None = None) -> np.ndarray:
    """Angles between unit vectors x and y from their distances.

    others: the distances of -x and y, which have the angles of opposite vectors: they lose them.
    """
    angles = 2 * np.arcsin(np.minimum(chords / 2, 1))
    opposite = chords > 2 - 1e-7
    if others is not None and opposite.any():
        angles[opposite] = np.pi - angles_of(others()[opposite])
    return angles


def edge_of(bandwidth: np.ndarray) -> tuple[np.ndarray | None, float]:
    """What compact kernels divide differences by (None: 1), and the distance where they end."""
    width = bandwidth[0]  # which must not take squares out of float64
    one = (bandwidth == width).all() and 1e-140 < width < 1e140
    return (None, float(width)) if one else (bandwidth, 1.0)


def distances_to_end(
    columns: Iterable[tuple[np.ndarray, np.ndarray]], widths: np.ndarray | None
) -> np.ndarray:
    """Distances by which compact kernels end, `Geometry`, from both rows' columns as given."""
    squares = np.zeros(1)
    for c, (a, b) in enumerate(columns):
        differences = a.astype(np.float64) - b
        with np.errstate(over="ignore"):
            squares = squares + (differences if widths is None else differences / widths[c]) ** 2
    return np.sqrt(squares)


def centre_of(X: np.ndarray) -> np.ndarray:
    """The mean, but for features where a few far rows take it away from the others."""
    low, high = np.quantile(X[:: -(-len(X) // 1024)], (0.05, 0.95), axis=0, method="nearest")
    with np.errstate(over="ignore", invalid="ignore"):
        return np.clip(X.mean(axis=0, dtype=np.float64), low, high)


def without_loss(X: np.ndarray, centre: np.ndarray, bandwidth: np.ndarray) -> np.ndarray:
    """The centre, 0 in features where some row less it is rounded by more than LOST bandwidths.

    A few rows beside many far ones are much nearer to 0 than to the centre: they would become one.
    """
    far = np.flatnonzero(np.abs(centre) * DOUBLE_ROUNDING > LOST * bandwidth)
    for c in far:
        a, b = X[:, c].astype(np.float64), centre[c]
        with np.errstate(over="ignore", invalid="ignore"):
            difference = a - b
            of_b = difference - a  # -b as the difference has it (Knuth's exact error of a sum)
            lost = (a - (difference - of_b)) - (b + of_b)
        if not (np.abs(lost) <= LOST * bandwidth[c]).all():
            centre = centre.copy()
            centre[c] = 0
    return centre


def _groups(rows: np.ndarray) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Each distinct row, and where it is."""
    distinct, inverse = np.unique(rows, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    order = np.argsort(inverse, kind="stable")
    ends = np.cumsum(np.bincount(inverse, minlength=len(distinct)))
    return zip(distinct, np.split(order, ends[:-1]), strict=True)


def unit_rows(X: np.ndarray) -> np.ndarray:
    """Rows divided by their norms; rows of 0 stay."""
    if in_range_of_hashing(X):
        return X / np.sqrt(np.einsum("ij,ij->i", X, X))[:, None]
    largest = np.abs(X).max(axis=1, keepdims=True, initial=0)
    X = X / np.where(largest > 0, largest, 1)
    norms = np.sqrt(np.einsum("ij,ij->i", X, X))[:, None]
    return X / np.where(norms > 0, norms, 1)


def in_range_of_squares(X: np.ndarray) -> np.ndarray:
    """Rows whose squares leave float64 times a power of 2 each; a copy where there are any."""
    if X.dtype == np.float32:  # whose squares are computed in float64
        return X
    largest = np.maximum(X.max(axis=1), -X.min(axis=1))
    out = (largest > 1e140) | (largest < 1e-140)
    if not out.any():
        return X
    exponents = np.frexp(largest[out])[1]
    X = X.copy()
    X[out] = np.ldexp(X[out], -exponents[:, None])
    return X


def has_zero_row(X: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        squares = np.einsum("ij,ij->i", X, X)  # a few times faster than any()
    small = squares < 1e-30
    return bool(small.any()) and not np.any(X[small], axis=1).all()


def in_range_of_hashing(X: np.ndarray) -> bool:
    """Whether rows may be hashed by their angle as they are, in float32."""
    with np.errstate(over="ignore"):
        squares = np.einsum("ij,ij->i", X, X)
    return len(X) == 0 or (squares.min() > 1e-30 and squares.max() < 1e30)

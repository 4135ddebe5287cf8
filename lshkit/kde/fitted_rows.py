"""Kernel means of the rows that were fitted, each without itself.

A row's own kernel is 1, in high dimensions more than that of all others together: taking it out of
a sum leaves rounding. So it is never added. Rows are treated in blocks: what lies outside a block
is left to the method (a sample of it, or its near rows and a sample), what lies inside is summed
exactly, by halves, down to leaves of 32 rows of which every pair but a row with itself is listed.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from lshkit.buckets import pair_distances
from lshkit.kde import kernels
from lshkit.kde.cells import Cells
from lshkit.kde.geometry import angles_of, distances_to_end
from lshkit.kde.method import Method
from lshkit.kde.near_far import NearFar
from lshkit.kde.random_sampling import RandomSampling
from lshkit.kde.sketch import SketchedRows
from lshkit.kde.sums import EXACT, Sums, sums_of_pairs
from lshkit.kde.training import BLOCK, PermutedRows, Training

LEAF, LEAVES = 32, 64  # rows of a leaf; leaves whose pairs are listed at once
QUERIES = 8192  # of a call, at most
PAIRS = 2**33  # of a call, at most: the core needs 24 bytes for each query and 4096 rows, 50 MB
N_BLOCKS = 256  # of the rows of a sampled method


def log_means_of_rows(method: Method, threads: int) -> np.ndarray:
    """log of the kernel mean of every row of `method.training` over the others, `(n_rows,)`.

    As accurate as the method; exact for those that cannot leave a row out ("hbe"), for rows of a
    large weight and, as queries are, for rows far from the centre. -inf where the others add up to
    0.
    """
    training = method.training
    n, weights = len(training.X), training.weights
    own = np.ones(n) if weights is None else weights
    rest = _log_rest(training.total, own)
    if isinstance(method, SketchedRows):
        rows, order = method.permuted.rows, method.permuted.order
        mean = method.sampled(rows, threads, with_error=False).mean
        logs = np.empty(n)
        logs[order] = log_without_own(mean, training.total, own[order])
        exact = training.far()
    elif isinstance(method, (RandomSampling, NearFar)):
        logs = np.empty(n)
        logs[method.permuted.order] = _sampled(method, threads).log()
        logs -= rest
        exact = training.far() | method.permuted.split  # which are beside themselves there
    else:
        logs, exact = np.empty(n), np.ones(n, bool)
    if exact.any():
        logs[exact] = _exact(training, exact, threads).log() - rest[exact]
    return logs


def log_without_own(mean: np.ndarray, total: float, own: np.ndarray) -> np.ndarray:
    """log of means over rows of weight `total` without the rows' own weights, whose kernel is 1.

    For sketches; -inf where nothing is left. With equal weights their sums have no rounding. Other
    weights are rounded (to 2^-24 of the mean one, with a half-life to float64), and so is what is
    left of a row without neighbors.
    """
    rest = mean * total - own
    rest[rest < 1e-9 * total * mean] = 0
    with np.errstate(divide="ignore"):
        return np.log(rest) - _log_rest(total, own)


def _log_rest(total: float, own: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(total - own, 0))


# --- Sampled methods ----------------------------------------------------------------------------


def _sampled(method: RandomSampling | NearFar, threads: int) -> Sums:
    """`Sums` over the other rows for each of the permuted rows."""
    permuted = method.permuted
    n = len(permuted)
    size = -(-n // (N_BLOCKS * BLOCK)) * BLOCK
    keys, parts = _PermutedRows(permuted), []
    for first in range(0, n, size):
        last = min(first + size, n)
        outside = _without(method, first, last)
        got = outside.sampled(keys.queries(first, last), threads, with_error=False)
        rest = Sums(got.shift, got.mean * method.training.total, np.zeros(last - first))
        parts.append(rest + _within(keys, first, last, threads))
    return Sums.joined(parts)


def _without(method: RandomSampling | NearFar, first: int, last: int) -> RandomSampling | NearFar:
    """The method as of the permuted rows without those from `first` to `last`."""
    rows = _WithoutBlock(method.permuted, first, last)
    without: Any = copy.copy(method)
    without.permuted = rows
    without.beside = None  # the rows equal to one of them are among all
    if isinstance(method, NearFar):
        without.cells = _CellsWithoutBlock(without.cells, rows)
    return without


class _WithoutBlock:
    """`PermutedRows` without those from `first` to `last`: later ones move up."""

    def __init__(self, permuted: PermutedRows, first: int, last: int) -> None:
        self.permuted, self.first, self.last = permuted, first, last
        self.hold = permuted.hold

    def __len__(self) -> int:
        return len(self.permuted) - (self.last - self.first)

    def parts(self, first: int, last: int) -> list[tuple[int, int]]:
        """Where the rows from `first` to `last` are among all."""
        size, parts = self.last - self.first, []
        if first < self.first or first == last:
            parts.append((first, min(last, self.first)))
        if last > self.first:
            parts.append((max(first, self.first) + size, last + size))
        return parts

    def sums(self, queries: np.ndarray, first: int, last: int, threads: int) -> Sums:
        parts = self.parts(first, last)
        return functools.reduce(
            operator.add, (self.permuted.sums(queries, *part, threads) for part in parts)
        )


class _CellsWithoutBlock:
    """`Cells` of a `_WithoutBlock`."""

    def __init__(self, cells: Cells, permuted: _WithoutBlock) -> None:
        self.cells, self.permuted = cells, permuted
        self.nearest, self.n_cells = cells.nearest, cells.n_cells

    def sums(
        self,
        queries: np.ndarray,
        probes: np.ndarray,
        threads: int,
        first: int = 0,
        last: int | None = None,
    ) -> tuple[Sums, np.ndarray]:
        last = len(self.permuted) if last is None else last
        return self._of_parts(self.cells.sums, queries, probes, threads, first, last)

    def few_sums(
        self, queries: np.ndarray, probes: np.ndarray, threads: int, first: int, last: int
    ) -> tuple[Sums, np.ndarray]:
        return self._of_parts(self.cells.few_sums, queries, probes, threads, first, last)

    def _of_parts(
        self,
        sums_of: Callable[..., tuple[Sums, np.ndarray]],
        queries: np.ndarray,
        probes: np.ndarray,
        threads: int,
        first: int,
        last: int,
    ) -> tuple[Sums, np.ndarray]:
        parts = self.permuted.parts(first, last)
        found = [sums_of(queries, probes, threads, *part) for part in parts]
        return functools.reduce(lambda a, b: (a[0] + b[0], a[1] + b[1]), found)


# --- Exact sums ---------------------------------------------------------------------------------


def _exact(training: Training, some: np.ndarray, threads: int) -> Sums:
    """`Sums` for each of some rows (a mask) over all others."""
    rows, others = _RowsAsGiven(training, some), _RowsAsGiven(training, ~some)
    n, n_others = len(rows.X), len(others.X)
    sums = _within(rows, 0, n, threads)
    step = min(QUERIES, max(PAIRS // max(n_others, 1), 1))
    for first in range(0, n if n_others else 0, step):
        part = slice(first, min(first + step, n))
        sums[part] += others.sums(rows.X[part], 0, n_others, threads)
    return sums


class _RowsAsGiven:
    """Some rows of a training (a mask) in their order."""

    def __init__(self, training: Training, some: np.ndarray) -> None:
        self.geometry, self.reach = training.geometry, training.reach
        self.X, self.weights = training.X, training.weights
        if not some.all():
            self.X = self.X[some]
            self.weights = None if self.weights is None else self.weights[some]

    def queries(self, first: int, last: int) -> np.ndarray:
        return self.geometry.scale(self.X[first:last])

    def sums(self, given: np.ndarray, first: int, last: int, threads: int) -> Sums:
        """Sums of queries as given over the rows from first to last."""
        weights = None if self.weights is None else self.weights[first:last]
        options: dict[str, Any] = dict(
            scaled=False, tolerance=EXACT, reach=self.reach, threads=threads
        )
        rows, scaled = self.X[first:last], self.geometry.scale(given)
        return self.geometry.sums(scaled, rows, weights, given=given, **options)

    def sums_of(self, start: int, stop: int, first: int, last: int, threads: int) -> Sums:
        """Sums of the rows from start to stop over those from first to last."""
        return self.sums(self.X[start:stop], first, last, threads)


class _PermutedRows:
    """Rows of a `PermutedRows`."""

    def __init__(self, permuted: PermutedRows) -> None:
        self.geometry, self.weights = permuted.training.geometry, permuted.weights
        self.permuted = permuted

    def queries(self, first: int, last: int) -> np.ndarray:
        return np.asarray(self.permuted.rows[first:last], np.float64)

    def sums_of(self, start: int, stop: int, first: int, last: int, threads: int) -> Sums:
        return self.permuted.sums(self.queries(start, stop), first, last, threads)


def _within(keys: _RowsAsGiven | _PermutedRows, first: int, last: int, threads: int) -> Sums:
    """`Sums` for each of the rows from `first` to `last` over the others of them."""
    parts = [
        _leaves(keys, low, min(low + LEAF * LEAVES, last))
        for low in range(first, last, LEAF * LEAVES)
    ]
    sums = Sums.joined(parts)
    size = LEAF
    while size < last - first:
        for low in range(first, last - size, 2 * size):
            middle, high = low + size, min(low + 2 * size, last)
            for a, b, c, d in ((low, middle, middle, high), (middle, high, low, middle)):
                step = min(QUERIES, max(PAIRS // (d - c), 1))
                for start in range(a, b, step):
                    stop = min(start + step, b)
                    some = slice(start - first, stop - first)
                    sums[some] += keys.sums_of(start, stop, c, d, threads)
        size *= 2
    return sums


def _leaves(keys: _RowsAsGiven | _PermutedRows, first: int, last: int) -> Sums:
    """`Sums` for each row over the others of its leaf."""
    n = last - first
    ends = np.minimum((np.arange(n) // LEAF + 1) * LEAF, n)
    starts = np.arange(n) // LEAF * LEAF
    indptr = np.concatenate([[0], np.cumsum(ends - starts)])
    rows = np.repeat(np.arange(n), ends - starts)
    others = np.arange(indptr[-1]) - indptr[rows] + starts[rows]
    kept = others != rows
    indptr, others = indptr - np.concatenate([[0], np.cumsum(~kept)])[indptr], others[kept]
    weights = np.ones(len(others)) if keys.weights is None else keys.weights[first:last][others]
    kernel, geometry = keys.geometry.kernel, keys.geometry
    if kernel in kernels.COMPACT:  # their edge is decided by rows as given
        assert isinstance(keys, _RowsAsGiven)
        columns = ((x[rows[kept]], x[others]) for x in keys.X[first:last].T)
        distances = distances_to_end(columns, geometry.widths)
        with np.errstate(divide="ignore"):
            logs = np.log(kernels.compact(kernel, distances, geometry.edge))
    else:
        logs = geometry.log_kernel(_distances(keys, first, last, indptr, rows[kept], others))
    return sums_of_pairs(indptr, logs, weights)


def _distances(
    keys: _RowsAsGiven | _PermutedRows,
    first: int,
    last: int,
    indptr: np.ndarray,
    rows: np.ndarray,
    others: np.ndarray,
) -> np.ndarray:
    """What kernels that do not end are functions of, at bandwidth 1: of listed pairs."""
    scaled, kernel = keys.queries(first, last), keys.geometry.kernel
    p = 1 if kernel == "laplacian" else 2
    if isinstance(keys, _RowsAsGiven) and keys.geometry.rounds(scaled):
        distances = np.zeros(len(others))
        for column, inverse in zip(keys.X[first:last].T, keys.geometry.inverse, strict=True):
            given = column.astype(np.float64)
            distances += np.abs((given[rows] - given[others]) * inverse) ** p
    else:
        distances = pair_distances(scaled, scaled, indptr, others, p=p)
    if kernel == "angular":
        return angles_of(
            np.sqrt(distances), lambda: np.sqrt(pair_distances(-scaled, scaled, indptr, others))
        )
    return distances if kernel == "laplacian" else np.sqrt(distances)

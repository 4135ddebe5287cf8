"""Leave-one-out log-densities of rows at many bandwidths, and their slopes in the bandwidth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.distance import cdist

from lshkit import _C
from lshkit.kde import kernels
from lshkit.kde.geometry import (
    DOUBLE_ROUNDING,
    FARTHEST,
    ROUNDING,
    centre_of,
    distances_to_end,
    edge_of,
)
from lshkit.kde.known_rows import hashes_of_rows
from lshkit.kde.training import LEAST

ROWS_AT_ONCE = 2**15  # that are scaled in one piece
TOLERANCE = 1e-4  # of a log-density: what computing distances in float32 may change
LARGEST_FLOAT = 1e18  # reach of the rows in units: beyond, squares may leave float32
COMPACT_QUERIES = 32  # whose distances are kept, of the compact kernels


class LeaveOneOut:
    """log f_-i(x_i) for rows i that are held out; f_-i is the density of the distinct rows but i.

    Rows that are equal count as one row with the sum of their weights: a row's copies are left out
    with it, which `lshkit.reference.leave_one_out` does not do. Otherwise each would predict its
    copies, and the narrowest bandwidth would always win.

    Parameters
    ----------
    X, weights : the rows, distinct as `distinct_rows` gives them
    kernel : str
    scale : array (n_features,)
        What every feature is divided by; bandwidths multiply it.
    threads : int

    Notes
    -----
    Rows are (x - centre) / (scale * unit) inside, with a unit, a power of 2, in which nothing
    overflows. Bandwidths and distances that go in and come out are multiples of scale * unit.
    """

    held_out: np.ndarray
    counts: np.ndarray
    _queries: np.ndarray
    _nearest: np.ndarray | None  # as soon as it is asked for

    def __init__(
        self,
        X: np.ndarray,
        weights: np.ndarray | None,
        kernel: str,
        scale: np.ndarray,
        threads: int,
    ) -> None:
        self.X, self.weights, self.kernel, self.scale = X, weights, kernel, scale
        self.threads = threads
        self.centre = centre_of(X)
        some = np.abs(X[:: -(-len(X) // 1024)] / scale - self.centre / scale).max(axis=1)
        some = some[some > 0]
        self.unit = math.ldexp(1.0, math.frexp(np.median(some))[1]) if len(some) else 1.0
        self._inverse = 1 / scale / self.unit
        with np.errstate(over="ignore", invalid="ignore"):
            parts = (np.einsum("ij,ij->i", rows, rows) for _, rows in self.scaled_parts())
            reach = np.sqrt(max(squares.max() for squares in parts))
        if not reach < FARTHEST:
            raise ValueError(f"X must lie within {FARTHEST:g} times its spread, got {reach:.2g}")
        self._float_fits = reach < LARGEST_FLOAT
        self._log_scales = np.log(scale).sum() + X.shape[1] * np.log(self.unit)

    def holding_out(self, held_out: np.ndarray, counts: np.ndarray) -> LeaveOneOut:
        """A copy that leaves out these rows in turn, which count so much in means over them."""
        part = object.__new__(LeaveOneOut)
        vars(part).update(vars(self))
        part.held_out, part.counts = held_out, counts
        part._queries, part._nearest = self.scaled(self.X[held_out]), None
        return part

    def mean(self, values: np.ndarray) -> tuple[Any, Any]:
        """Mean over the rows left out and its standard error, of values `(n_queries, ...)`."""
        shares = self.counts / self.counts.sum()
        with np.errstate(invalid="ignore", over="ignore"):  # -inf, and nearly
            mean = np.tensordot(shares, values, 1)
            n = len(shares)
            squares = np.tensordot(shares**2, (values - mean) ** 2, 1) * n / max(n - 1, 1)
        return mean, np.sqrt(squares)

    def variance(self) -> np.ndarray:
        """Of every feature, over all distinct rows."""
        shares: Any = 1 / len(self.X) if self.weights is None else self.weights / self.weights.sum()
        mean = squares = 0.0
        for first, rows in self.scaled_parts():
            some = shares if self.weights is None else shares[first : first + len(rows), None]
            mean = mean + (some * rows).sum(axis=0)
            squares = squares + (some * rows**2).sum(axis=0)
        return np.maximum(squares - mean**2, 0)

    def nearest(self) -> np.ndarray:
        """The least distance of each row left out from another row."""
        if self._nearest is None:
            if self.kernel in kernels.COMPACT:
                least = np.concatenate([part.min(axis=1) for part, _ in self._distances()])
            else:
                least, _ = self._sums(self._queries, self.held_out, np.empty(0), np.float64)
                least = np.sqrt(2 * least) if self.kernel == "gaussian" else least
            self._nearest = least
        return self._nearest

    @np.errstate(over="ignore")
    def log_densities(self, bandwidths: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """log f_-i(x_i), and its derivative in the logarithm of the bandwidth.

        bandwidths: `(n_bandwidths,)`. Returns two arrays `(n_queries, n_bandwidths)`: densities of
        the rows as given. Derivatives are NaN for the compact kernels.
        """
        n_features = self.X.shape[1]
        widths = np.asarray(bandwidths, np.float64)
        norms = kernels.log_normalizer(self.kernel, n_features) + self._log_scales
        norms = norms + n_features * np.log(widths)
        if self.weights is None:
            others = np.full(len(self.held_out), len(self.X) - 1.0)
        else:
            before = np.cumsum(self.weights[:-1])  # sums: a difference may be all rounding
            after = np.cumsum(self.weights[:0:-1])[::-1]
            others = (np.append(0, before) + np.append(after, 0))[self.held_out]
        norms = norms + np.log(others)[:, None]
        if self.kernel in kernels.COMPACT:
            logs = np.concatenate([self._log_sums(*part, widths) for part in self._distances()])
            return logs - norms, np.full(logs.shape, np.nan)
        power = 2 if self.kernel == "gaussian" else 1
        sums = np.empty((len(self.held_out), len(widths), 2))
        scales = widths**-power
        beyond = np.isinf(scales)
        scales[beyond] = 1.0
        single = self._lost_in_float32(widths.min()) <= TOLERANCE
        for mask, dtype in ((single, np.float32), (~single, np.float64)):
            if mask.any():
                some = self._queries[mask], self.held_out[mask]
                sums[mask] = self._sums(*some, scales, dtype)[1]
        sums[:, beyond] = -np.inf, np.nan  # less than float64 holds
        return sums[..., 0] - norms, power * sums[..., 1] - n_features

    def scaled(self, X: np.ndarray) -> np.ndarray:
        """Rows in float64 as they are inside: see the notes of the class."""
        rows = np.asarray(X, np.float64) - self.centre
        rows *= self._inverse
        return np.ascontiguousarray(rows)

    def scaled_parts(self, dtype: type = np.float64) -> Iterator[tuple[int, np.ndarray]]:
        """All of them, as places of the first and arrays."""
        for first in range(0, len(self.X), ROWS_AT_ONCE):
            rows = self.scaled(self.X[first : first + ROWS_AT_ONCE])
            yield first, np.ascontiguousarray(rows, dtype)

    def _lost_in_float32(self, width: float) -> np.ndarray:
        """About what float32 loses of the logarithms of kernels that count, of each query."""
        if not self._float_fits:
            return np.full(len(self.held_out), np.inf)
        norms = np.linalg.norm(self._queries, axis=1) / width
        many = max(1.0, self.X.shape[1] / 256)
        if self.kernel == "laplacian":
            return many * ROUNDING * norms
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            lost = 2 * many * ROUNDING * norms**2  # of squared distances
            # Of a root of these: the nearer a row, the more.
            return lost if self.kernel == "gaussian" else lost / (self.nearest() / width)

    def _sums(
        self, queries: np.ndarray, held_out: np.ndarray, scales: np.ndarray, dtype: type
    ) -> tuple[np.ndarray, np.ndarray]:
        """The core's, over all rows, part by part: nearest exponents, and sums of terms."""
        queries = np.ascontiguousarray(queries, dtype)
        nearest = np.full(len(queries), np.inf)
        log_sums = np.full((len(queries), len(scales)), -np.inf)
        exponents = np.zeros(log_sums.shape)
        for first, rows in self.scaled_parts(dtype):
            weights = None if self.weights is None else self.weights[first : first + len(rows)]
            own = held_out - first
            own[own >= len(rows)] = -1  # as those before this part are
            least, out = np.empty(len(queries)), np.empty((*log_sums.shape, 2))
            code = kernels.CODES[self.kernel]
            _C.leave_one_out(code, queries, own, rows, weights, scales, least, out, self.threads)
            nearest = np.minimum(nearest, least)
            both = np.logaddexp(log_sums, out[..., 0])
            with np.errstate(invalid="ignore"):
                shares = [np.exp(x - both) for x in (log_sums, out[..., 0])]
            mixed = shares[0] * exponents + shares[1] * out[..., 1]
            exponents = np.where(both > -np.inf, mixed, 0)
            log_sums = both
        return nearest, np.stack([log_sums, exponents], axis=-1)

    def _distances(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of the compact kernels: distances of some rows left out from all, own: inf."""
        mantissas, exponents = np.frexp(self.scale)
        scaling = dict(metric="seuclidean", V=mantissas**2)
        if (mantissas == 0.5).all():  # powers of 2
            exponents, scaling = exponents - 1, dict(metric="euclidean")
        exponents = exponents + math.frexp(self.unit)[1] - 1
        # Features that do not vary, however large: to 0.
        exponents[(self.X == self.X[0]).all(axis=0)] = 4096

        def as_given(
            rows: np.ndarray,
        ) -> np.ndarray:  # but for powers of 2, which keep squares in float64
            return np.ldexp(np.asarray(rows, np.float64), -exponents)

        for first in range(0, len(self.held_out), COMPACT_QUERIES):
            held_out = self.held_out[first : first + COMPACT_QUERIES]
            queries = as_given(self.X[held_out])
            distances = np.empty((len(held_out), len(self.X)))
            for start in range(0, len(self.X), ROWS_AT_ONCE):
                part = slice(start, start + ROWS_AT_ONCE)
                rows = as_given(self.X[part])
                distances[:, part] = cdist(queries, rows, **scaling)
            distances[np.arange(len(held_out)), held_out] = np.inf
            yield distances, held_out

    def _log_sums(
        self, distances: np.ndarray, held_out: np.ndarray, widths: np.ndarray
    ) -> np.ndarray:
        weights = np.ones(len(self.X)) if self.weights is None else self.weights
        rounding = 4 * (8 + self.X.shape[1]) * DOUBLE_ROUNDING
        logs = np.empty((len(distances), len(widths)))
        for column, width in enumerate(widths):
            values = kernels.compact(self.kernel, distances, width)
            low, high = (distances < width * (1 + sign * rounding) for sign in (-1, 1))
            if np.count_nonzero(low) < np.count_nonzero(high):
                pairs = np.nonzero(low != high)
                values[pairs] = self._at_edge(held_out[pairs[0]], pairs[1], width)
            with np.errstate(divide="ignore"):
                logs[:, column] = np.log(values @ weights)
        return logs

    def _at_edge(self, i: np.ndarray, j: np.ndarray, width: float) -> np.ndarray:
        """Kernels of pairs of rows, by the rule by which the density's kernels end: `Geometry`."""
        divisors, edge = edge_of(width * self.unit * self.scale)
        distances = distances_to_end(((column[i], column[j]) for column in self.X.T), divisors)
        return kernels.compact(self.kernel, distances, edge)


def distinct_rows(
    X: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows that differ from each other, with the sums of their weights; X itself where all do.

    Rows whose weight is below LEAST of the largest are left out.
    """
    if weights is not None and weights.min() < LEAST * weights.max():
        kept = weights >= LEAST * weights.max()
        X, weights = X[kept], weights[kept]
    _, inverse, counts = np.unique(hashes_of_rows(X), return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(counts[inverse.reshape(-1)] > 1)
    if len(repeated) == 0:
        return X, weights
    candidates = X[repeated] + X.dtype.type(0)
    _, first, which = np.unique(candidates, axis=0, return_index=True, return_inverse=True)
    if len(first) == len(repeated):
        return X, weights
    totals = np.ones(len(X)) if weights is None else weights.copy()
    totals[repeated[first]] = np.bincount(which.reshape(-1), totals[repeated])
    kept = np.ones(len(X), bool)
    kept[repeated] = False
    kept[repeated[first]] = True
    return X[kept], totals[kept]

"""Kernel sums of rows with values, numerator and denominator of a regression.

The core sums weights >= 0. Values are therefore counted from a number in their middle and split by
sign; weights w |y| give the sums of a sign, w sqrt |y| those of squares that an error takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

from lshkit.kde import kernels
from lshkit.kde.geometry import DOUBLE_ROUNDING, Geometry, angles_of, distances_to_end
from lshkit.kde.sums import EXACT, Sums
from lshkit.kde.training import Training

LOG_2 = float(np.log(2))
SINGLE = 1e-5  # error of a log kernel for rows in float32, whose own rounding moves it as much
FEW = 256  # rows, up to which all is float64: some microseconds a query, and right to 1e-15
LEAST_SQUARE = 1e-34  # sum of squares in which float32's least numbers, 1e-38, do not count
LEAST_VALUE = 2.0**-60  # over the largest of its pass, so that float32 holds its square


class Moments:
    """For each query sums over rows of t = weight * kernel and of t times the values z.

    first `(n_queries, 1 + n_outputs)`: sum t, sum t z, times exp(-shift). second
    `(n_queries, 3, n_outputs)`: sum t^2, sum t^2 z, sum t^2 z^2, times exp(-2 shift).
    """

    __slots__ = ("first", "second", "shift")

    def __init__(self, shift: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
        self.shift, self.first, self.second = shift, first, second

    @classmethod
    def zeros(cls, n: int, n_outputs: int) -> Moments:
        return cls(np.full(n, -np.inf), np.zeros((n, 1 + n_outputs)), np.zeros((n, 3, n_outputs)))

    def __getitem__(self, index: Any) -> Moments:
        return Moments(self.shift[index], self.first[index], self.second[index])

    def __setitem__(self, index: Any, part: Moments) -> None:
        self.shift[index], self.first[index] = part.shift, part.first
        self.second[index] = part.second

    def __add__(self, other: Moments) -> Moments:
        shift = np.maximum(self.shift, other.shift)
        a, b = (factor(x.shift, shift)[:, None] for x in (self, other))
        second = self.second * a[..., None] ** 2 + other.second * b[..., None] ** 2
        return Moments(shift, self.first * a + other.first * b, second)

    def times(self, factors: np.ndarray | float) -> Moments:
        """Of rows of as many times the weight."""
        factors = np.broadcast_to(factors, self.shift.shape)
        second = self.second * factors[:, None, None] ** 2
        return Moments(self.shift, self.first * factors[:, None], second)

    def ratio(self) -> np.ndarray:
        """The weighted means `(n_queries, n_outputs)`; NaN where nothing was summed."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.first[:, 1:] / self.first[:, :1]

    def squared_residuals(self, means: np.ndarray) -> np.ndarray:
        """Sums of t^2 (z - mean)^2, `(n_queries, n_outputs)`."""
        zeroth, one, two = np.moveaxis(self.second, 1, 0)
        return np.maximum(two - 2 * means * one + means**2 * zeroth, 0)

    def effective(self) -> np.ndarray:
        """Rows of equal weight that would have the same error."""
        with np.errstate(invalid="ignore", divide="ignore"):
            rows = self.first[:, 0] ** 2 / self.second[:, 0, 0]
        # Of smaller squares, of weights far below the largest, float32 lost what tells.
        return np.where(self.second[:, 0, 0] > LEAST_SQUARE, rows, 0.0)


def factor(shift: np.ndarray, new: np.ndarray) -> np.ndarray:
    """exp(shift - new), 0 for a shift of -inf."""
    with np.errstate(invalid="ignore"):
        return np.where(shift == -np.inf, 0.0, np.exp(shift - new))


class ValueRows:
    """Rows with values `(n, n_outputs)` and their kernel sums.

    Rows are sorted by the sign of the first output, so that each sign of it is a run of rows: with
    one output the sums of values cost as much as those of weights, with more twice that for each
    of the others.
    """

    def __init__(
        self,
        geometry: Geometry,
        rows: np.ndarray,
        weights: np.ndarray | None,
        values: np.ndarray,
        *,
        scaled: bool,
        reach: float,
        tolerance: float,
    ) -> None:
        order = np.argsort(values[:, 0] < 0, kind="stable")
        self.geometry, self.rows = geometry, np.ascontiguousarray(rows[order])
        self.weights, self.log_unit = None, 0.0
        if weights is not None:  # in a unit of about the largest, whose squares float32 holds
            exponent = int(np.frexp(weights.max(initial=1e-300))[1])
            self.weights, self.log_unit = np.ldexp(weights[order], -exponent), exponent * LOG_2
        self.options: dict[str, Any] = {"scaled": scaled, "reach": reach, "tolerance": tolerance}
        self.n_outputs, self.parts = values.shape[1], []
        for output, column in enumerate(values[order].T):
            for sign in (1, -1):
                size = np.maximum(sign * column, 0)
                while size.any():  # once, but for values that leave float32 beside the largest
                    unit = 2.0 ** (np.frexp(size.max())[1] - 1)
                    here = np.where(size >= LEAST_VALUE * unit, size / unit, 0)
                    size[here > 0] = 0
                    where = np.flatnonzero(here)
                    part = slice(where[0], where[-1] + 1)
                    weights = 1.0 if self.weights is None else self.weights[part]
                    self.parts.append((output, sign * unit, part, weights, here[part]))

    def __len__(self) -> int:
        return len(self.rows)

    def moments(
        self,
        queries: np.ndarray,
        threads: int,
        second: bool = False,
        given: np.ndarray | None = None,
    ) -> Moments:
        """`Moments` for queries that are scaled; those of squares are 0 unless asked for.

        given: the queries as given, which compact kernels want.
        """
        out = Moments.zeros(len(queries), self.n_outputs)

        def sums(part: slice, weights: np.ndarray | None) -> Sums:
            return self.geometry.sums(
                queries, self.rows[part], weights, threads=threads, given=given, **self.options
            )

        whole = sums(slice(None), self.weights)
        out.shift, out.first[:, 0] = whole.shift, whole.total
        out.second[:, 0] = whole.squares[:, None]
        for output, unit, part, weights, size in self.parts:
            of_values = sums(part, weights * size)
            scale = factor(of_values.shift, out.shift)
            out.first[:, 1 + output] += unit * scale * of_values.total
            if second:
                of_roots = sums(part, weights * np.sqrt(size))
                out.second[:, 1, output] += (
                    unit * factor(of_roots.shift, out.shift) ** 2 * of_roots.squares
                )
                out.second[:, 2, output] += (unit * scale) ** 2 * of_values.squares
        out.shift = out.shift + self.log_unit
        return out

    @property
    def nbytes(self) -> int:
        # The parts have views of the weights.
        weights = 0 if self.weights is None else self.weights.nbytes
        return self.rows.nbytes + weights + sum(size.nbytes for *_, size in self.parts)


def distances(
    geometry: Geometry, queries: np.ndarray, rows: np.ndarray, width: float = 1.0
) -> np.ndarray:
    """What the kernel is a function of, between all queries and rows scaled up to the width."""
    r = cdist(queries, rows, "cityblock" if geometry.kernel == "laplacian" else "euclidean") / width
    if geometry.kernel == "angular":
        return angles_of(r, lambda: cdist(-queries, rows))
    return r


def log_kernels(geometry: Geometry, r: np.ndarray) -> np.ndarray:
    """log k of `distances`, float64: -inf for 0."""
    if geometry.kernel not in kernels.COMPACT:
        with np.errstate(over="ignore"):
            return geometry.log_kernel(r)
    with np.errstate(divide="ignore"):
        return np.log(kernels.compact(geometry.kernel, r, 1))


class FewRows:
    """`ValueRows` of few rows, whose sums are float64 throughout.

    With one bandwidth distances are those of rows as given: of gridded rows that are exactly one
    apart, which is where compact kernels end, no scaling rounds them. With several, pairs within
    rounding of there are computed again.
    """

    def __init__(
        self, geometry: Geometry, rows: np.ndarray, weights: np.ndarray | None, values: np.ndarray
    ) -> None:
        self.given = geometry.widths is None and geometry.kernel != "angular"
        self.width = geometry.edge if self.given else 1.0
        self.geometry = geometry
        self.rows, self.rows_given = self._as_kept(rows), rows
        self.ends = geometry.kernel in kernels.COMPACT and not self.given
        weights = np.ones(len(rows)) if weights is None else weights
        self.columns = np.column_stack([weights, weights[:, None] * values])

    def _as_kept(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(rows, np.float64) if self.given else self.geometry.scale(rows)

    def moments(self, X: np.ndarray, threads: int) -> Moments:
        """`Moments` of rows as given."""
        queries = self._as_kept(X)
        r = distances(self.geometry, queries, self.rows, self.width)
        if self.ends:
            self._decide_edge(r, queries, X)
        logs = log_kernels(self.geometry, r)
        out = Moments.zeros(len(X), self.columns.shape[1] - 1)
        out.shift = logs.max(axis=1)
        some = out.shift > -np.inf
        kernel = np.exp(logs[some] - out.shift[some, None])
        # A matrix product would add in an order that depends on the number of queries.
        out.first[some] = np.einsum("ij,jk->ik", kernel, self.columns, optimize=False)
        return out

    def _decide_edge(self, r: np.ndarray, queries: np.ndarray, given: np.ndarray) -> None:
        """Distances as densities have them, of pairs within rounding of one bandwidth."""
        with np.errstate(over="ignore"):
            norms = (np.linalg.norm(x, axis=1) for x in (queries, self.rows))
            rounding = 4 * (8 + queries.shape[1]) * DOUBLE_ROUNDING * np.add.outer(*norms)
        i, j = np.nonzero(np.abs(r - 1) <= rounding)
        if len(i) == 0:
            return
        columns = ((a[i], b[j]) for a, b in zip(given.T, self.rows_given.T, strict=True))
        r[i, j] = distances_to_end(columns, self.geometry.widths)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.columns.nbytes


class ExactMeans:
    """algorithm="brute": the weighted mean of the values of all rows."""

    name = "brute"

    def __init__(self, training: Training, values: np.ndarray) -> None:
        self.geometry = training.geometry
        rows = training.geometry, training.X, training.weights, values
        self.values: FewRows | ValueRows
        if len(training.X) <= FEW:
            self.values = FewRows(*rows)
        else:
            tolerance = SINGLE if training.X.dtype == np.float32 else EXACT
            options: dict[str, Any] = {
                "scaled": False,
                "reach": training.reach,
                "tolerance": tolerance,
            }
            self.values = ValueRows(*rows, **options)

    def estimate(
        self, X: np.ndarray, threads: int, with_error: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Means `(n, n_outputs)` of rows as given and their standard errors; NaN without a row."""
        if isinstance(self.values, FewRows):
            moments = self.values.moments(X, threads)
        else:
            moments = self.values.moments(self.geometry.scale(X), threads, given=X)
        means = moments.ratio()
        return means, np.zeros(means.shape)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

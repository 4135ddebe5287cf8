"""Kernel sums of rows with values, numerator and denominator of a regression: exact or sampled.

The core sums weights >= 0. Values are therefore counted from a number in their middle and split by
sign; weights w |y| give the sums of a sign, w sqrt |y| those of squares that an error takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

from lshkit.kde import kernels
from lshkit.kde.geometry import ROUNDING, Geometry
from lshkit.kde.sums import EXACT, SAMPLED, Sums
from lshkit.kde.training import Training

SINGLE = 1e-5  # error of a log kernel for rows in float32, whose own rounding moves it as much
FEW = 256  # rows, up to which all is float64: some microseconds a query, and right to 1e-15
FIRST, GROWTH = 2048, 2  # rows of the first segment of a sample; where the next one ends, over that
MIN_EFFECTIVE = 96  # rows, (sum t)^2 / sum t^2, below which a sample says little of its error
LEAST_VALUE = 2.0**-60  # over the largest of its pass, so that float32 holds its square
OUTLYING = 512  # rows with the largest weights or most outlying values, which every query reads
SAFETY = 1.25  # times the rows that a history foretells


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

    def times(self, factors: np.ndarray) -> Moments:
        """Of as many copies of the rows: squares are not meant."""
        return Moments(self.shift, self.first * factors[:, None], self.second)

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
        return np.where(self.first[:, 0] > 0, rows, 0.0)


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
        self.weights = None if weights is None else weights[order]
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
        return out

    @property
    def nbytes(self) -> int:
        # The parts have views of the weights.
        weights = 0 if self.weights is None else self.weights.nbytes
        return self.rows.nbytes + weights + sum(size.nbytes for *_, size in self.parts)


def log_kernels(
    geometry: Geometry, queries: np.ndarray, rows: np.ndarray, width: float = 1.0
) -> np.ndarray:
    """log k between all queries and rows in float64, scaled up to the width: -inf for 0."""
    r = cdist(queries, rows, "cityblock" if geometry.kernel == "laplacian" else "euclidean") / width
    if geometry.kernel == "angular":
        r = 2 * np.arcsin(np.minimum(r / 2, 1))  # the angle
    if geometry.kernel not in kernels.COMPACT:
        with np.errstate(over="ignore"):
            return geometry.log_kernel(r)
    with np.errstate(divide="ignore"):
        return np.log(kernels.compact(geometry.kernel, r, 1))


class FewRows:
    """`ValueRows` of few rows, whose sums are float64 throughout.

    With one bandwidth distances are those of rows as given: of gridded rows that are exactly one
    apart, which is where compact kernels end, no scaling rounds them.
    """

    def __init__(
        self, geometry: Geometry, rows: np.ndarray, weights: np.ndarray | None, values: np.ndarray
    ) -> None:
        widths = geometry.bandwidth
        self.given = geometry.kernel != "angular" and (widths == widths[0]).all()
        self.given &= 1e-140 < widths[0] < 1e140  # whose squares float64 holds
        self.width = widths[0] if self.given else 1.0
        self.geometry = geometry
        self.rows = self._as_kept(rows)
        weights = np.ones(len(rows)) if weights is None else weights
        self.columns = np.column_stack([weights, weights[:, None] * values])

    def _as_kept(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(rows, np.float64) if self.given else self.geometry.scale(rows)

    def moments(self, X: np.ndarray, threads: int) -> Moments:
        """`Moments` of rows as given."""
        logs = log_kernels(self.geometry, self._as_kept(X), self.rows, self.width)
        out = Moments.zeros(len(X), self.columns.shape[1] - 1)
        out.shift = logs.max(axis=1)
        some = out.shift > -np.inf
        kernel = np.exp(logs[some] - out.shift[some, None])
        # A matrix product would add in an order that depends on the number of queries.
        out.first[some] = np.einsum("ij,jk->ik", kernel, self.columns, optimize=False)
        return out

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

    def estimate(self, X: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray]:
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


class SampledMeans:
    """algorithm="random": uniform samples without replacement, as large as each query needs.

    The rows are permuted once and read in segments that double. The first segments of a query are
    its history: as soon as MIN_EFFECTIVE rows carry its weight, the error that they show foretells
    how many more rows it needs. Those are the sample that is extrapolated to all other rows, of a
    size that was fixed before it was read. Queries that would read more than half of the rows are
    computed exactly.

    A sample knows nothing of the few rows of another kind that it has missed, as of a rare class.
    So the rows with the most weight or the most outlying values are no part of it: every query
    reads them all. And no error is less than the standard deviation of the other values over the
    root of the rows that were met, or than their range over that number (what was not met has about
    one row's mass), whichever is less, times the share of the weight that is not of outlying rows.
    Values count by their weights there.

    spread `(n_outputs,)`: standard deviation of the values. rtol: times it, the standard error
    wanted.
    """

    name = "random"

    def __init__(
        self, training: Training, values: np.ndarray, spread: np.ndarray, rtol: float
    ) -> None:
        self.exact, self.limit = ExactMeans(training, values), rtol * spread
        self.geometry, n_rows = training.geometry, len(training.X)
        single = self.geometry.rounding(training.reach) <= SAMPLED

        def rows_of(part: np.ndarray) -> ValueRows:
            rows = self.geometry.scale(training.X[part])
            return ValueRows(
                self.geometry,
                rows.astype(np.float32 if single else np.float64),
                None if training.weights is None else training.weights[part],
                values[part],
                scaled=True,
                reach=training.reach * (1 + 4 * ROUNDING),
                tolerance=SAMPLED,
            )

        order = np.random.default_rng([training.seed, 1]).permutation(n_rows)
        weights = np.ones(n_rows) if training.weights is None else training.weights
        changes = weights[:, None] * (values - np.average(values, axis=0, weights=weights))
        outlying = _outlying(changes, weights, spread, min(OUTLYING, n_rows // 8))
        self.outlying = rows_of(np.flatnonzero(outlying))
        order = order[~outlying[order]]
        self.n, others, own = len(order), changes[order], weights[order]  # of what is sampled
        self.spread = others.std(axis=0) / np.sqrt(np.mean(own**2))
        self.range = np.ptp(others, axis=0) / own.mean()
        self.segments, self.ends, first, last = [], [], 0, FIRST
        while last <= self.n // 2:
            self.segments.append(rows_of(order[first:last]))
            self.ends.append(last)
            first, last = last, GROWTH * last

    def estimate(self, X: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray]:
        """Means `(n, n_outputs)` of rows as given and their standard errors; NaN without a row."""
        scaled = self.geometry.scale(X)
        means, errors, rest, _ = self._sampled(scaled, threads)
        rest = np.union1d(rest, np.flatnonzero(self.geometry.far(scaled)))
        if len(rest):
            means[rest], errors[rest] = self.exact.estimate(X[rest], threads)
        return means, errors

    def cost(self, X: np.ndarray, threads: int) -> float:
        """Of queries like the rows X, over that of the exact method."""
        *_, rest, read = self._sampled(self.geometry.scale(X), threads)
        # Of the rows that are read, the sums of three weights instead of two.
        n_rows = self.n + len(self.outlying)
        return 1.5 * read / (len(X) * n_rows) + len(rest) / len(X)

    def _sampled(
        self, queries: np.ndarray, threads: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Means and errors, the queries that need all rows instead, and pairs that were read."""
        n, n_outputs, read = len(queries), len(self.limit), len(queries) * len(self.outlying)
        outlying = self.outlying.moments(queries, threads)
        known, sample = Moments.zeros(n, n_outputs), Moments.zeros(n, n_outputs)
        seen = np.zeros(n, np.int64)  # rows of the history; 0: not decided yet
        stop = np.zeros(n, np.int64)
        means, errors = np.empty((n, n_outputs)), np.zeros((n, n_outputs))
        left, rest = np.arange(n), []
        for segment, last in zip(self.segments, self.ends, strict=True):
            moments = segment.moments(queries[left], threads, second=True)
            read += len(left) * len(segment)
            decided = seen[left] > 0
            old, new = left[decided], left[~decided]
            sample[old] = sample[old] + moments[decided]
            known[new] = known[new] + moments[~decided]
            stop[new] = self._stop(known[new], last)
            seen[new[stop[new] > 0]] = last
            done = old[stop[old] == last]
            parts = outlying[done], known[done], sample[done], seen[done]
            means[done], errors[done] = self._combined(*parts, last)
            too_many = stop[left] > self.ends[-1]
            rest.append(left[too_many])
            left = left[~too_many & (~decided | (stop[left] > last))]
            if len(left) == 0:
                break
        return means, errors, np.concatenate([*rest, left]), read

    def _stop(self, known: Moments, count: int) -> np.ndarray:
        """Where the sample of a query ends, 0 as long as too few rows carry its weight."""
        with np.errstate(invalid="ignore", divide="ignore"):
            errors = np.sqrt(known.squared_residuals(known.ratio())) / known.first[:, :1]
            wanted = SAFETY * count * (errors / self.limit) ** 2
        wanted = np.where(errors > 0, wanted, 0).max(axis=1)  # a limit of 0, of values all equal
        stop = np.full(len(wanted), 2 * self.ends[-1])
        for end in self.ends[::-1]:
            stop[(end > count) & (count + wanted <= end)] = end
        return np.where(known.effective() >= MIN_EFFECTIVE, stop, 0)

    def _combined(
        self, outlying: Moments, known: Moments, sample: Moments, seen: np.ndarray, last: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Outlying rows, the history and the sample, extrapolated to the rows that are not history.

        The variance of a ratio's error by the delta method: that of the sum of w k (z - mean) over
        a sample without replacement, over the square of the sum of w k.
        """
        size, population = last - seen, self.n - seen
        whole = outlying + known + sample.times(population / size)
        means = whole.ratio()
        total = sample.first[:, 1:] - means * sample.first[:, :1]
        squares = sample.squared_residuals(means) - total**2 / size[:, None]
        variance = (population**2 * (1 - size / population) / (size * (size - 1)))[:, None]
        deviation = np.sqrt(np.maximum(squares, 0) * variance)
        scale = factor(sample.shift, whole.shift)[:, None]
        met = (known + sample).effective()[:, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            least = np.minimum(self.spread / np.sqrt(met), self.range / met)
            share = outlying.first[:, :1] / whole.first[:, :1]  # of the weight, known exactly
            share = share * factor(outlying.shift, whole.shift)[:, None]
            least = least * (1 - share) * np.sqrt(1 - last / self.n)
            errors = deviation * scale / whole.first[:, :1]
            return means, np.maximum(errors, least)

    @property
    def nbytes(self) -> int:
        rows = self.outlying, *self.segments
        return self.exact.nbytes + sum(part.nbytes for part in rows)


def _outlying(changes: np.ndarray, weights: np.ndarray, spread: np.ndarray, n: int) -> np.ndarray:
    """Which `(n_rows,)` are the n that change a mean most: those with the largest weights, and
    products `(n_rows, n_outputs)` of weights with distances from the mean, in spreads."""
    found = np.zeros(len(weights), bool)
    far = np.abs(changes / np.where(spread > 0, spread, 1)).max(axis=1)
    if n:
        found[np.argpartition(np.hypot(far, weights), -n)[-n:]] = True
    return found

"""Means of values by stratified samples of the rows, as large as each query needs."""

from __future__ import annotations

import itertools

import numpy as np

from lshkit.kde.geometry import ROUNDING
from lshkit.kde.sums import SAMPLED
from lshkit.kde.training import Training
from lshkit.kde.value_sums import ExactMeans, Moments, ValueRows, factor

FIRST, GROWTH = 2048, 2  # rows of the first segment of a sample; where the next one ends, over that
MIN_EFFECTIVE = 96  # rows, (sum t)^2 / sum t^2, below which a sample says little of its error
OUTLYING = 512  # rows that change a mean most, which every query reads
RATIO = 4  # of the sizes of rows of a stratum, and of the rates at which two strata are sampled
LEAST_SAMPLE = 32  # rows of a stratum in the first segment
SAFETY = 1.25  # times the rows that a history foretells


class SampledMeans:
    """algorithm="random": stratified samples without replacement, as large as each query needs.

    How much a row may change a mean, its size, is its weight times sqrt(1 + d^2), d the distance of
    its values from their mean in standard deviations (the largest of its outputs). Rows of about
    the same size are a stratum (the first, up to twice the median), and strata are sampled at rates
    that grow with their sizes: no row that a sample misses stands for much more than another. The
    largest rows, and strata of which the first segment would be half, are outlying: every query
    reads them.

    The rows of a stratum are permuted once and read in segments that double. The first segments of
    a query are its history: as soon as MIN_EFFECTIVE rows carry its weight, the error that they
    show foretells how many more rows it needs. Those are the sample that is extrapolated to all
    other rows, of a size that was fixed before it was read. Queries that would read more than half
    of the sampled rows are computed exactly.

    A sample knows nothing of rows of another kind that it has missed. So no error is less than the
    standard deviation of the sampled rows' values over the root of the rows that were met, or than
    their range over that number (what was not met has about one row's mass), whichever is less,
    times the share of the weight that is sampled. Rows count as many times as they stand for there.

    spread `(n_outputs,)`: standard deviation of the values. rtol: times it, the standard error
    wanted.
    """

    name = "random"

    def __init__(
        self, training: Training, values: np.ndarray, spread: np.ndarray, rtol: float
    ) -> None:
        self.exact, self.limit = ExactMeans(training, values), rtol * spread
        self.geometry, self.n_rows = training.geometry, len(training.X)
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

        order = np.random.default_rng([training.seed, 1]).permutation(self.n_rows)
        weights = np.ones(self.n_rows) if training.weights is None else training.weights
        changes = weights[:, None] * (values - np.average(values, axis=0, weights=weights))
        far = np.abs(changes / np.where(spread > 0, spread, 1)).max(axis=1)
        outlying, strata, first = _strata(np.hypot(far, weights), order)
        self.outlying, self.sizes = rows_of(outlying), np.array([len(rows) for rows in strata])
        ends: list[np.ndarray] = []
        while True:
            last = np.minimum(np.round(first * GROWTH ** len(ends)).astype(np.int64), self.sizes)
            if last.sum() > self.sizes.sum() // 2:
                break
            ends.append(last)
        self.ends = np.array(ends, np.int64).reshape(-1, len(strata))  # rows of each, by segment
        self.segments = [
            [(k, rows_of(strata[k][a[k] : b[k]])) for k in np.flatnonzero(b > a)]
            for a, b in itertools.pairwise([0 * self.sizes, *ends])
        ]
        self.spread, self.range = _missed(strata, self.sizes / self.ends, weights, values)

    def estimate(
        self, X: np.ndarray, threads: int, with_error: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Means `(n, n_outputs)` of rows as given and their standard errors; NaN without a row.

        with_error is not read: the errors say when to end.
        """
        if len(self.segments) < 2:  # a history and a sample
            return self.exact.estimate(X, threads)
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
        return 1.5 * read / (len(X) * self.n_rows) + len(rest) / len(X)

    def _sampled(
        self, queries: np.ndarray, threads: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Means and errors, the queries that need all rows instead, and pairs that were read."""
        n, n_outputs, read = len(queries), len(self.limit), len(queries) * len(self.outlying)
        outlying = self.outlying.moments(queries, threads)
        known, sample = ([Moments.zeros(n, n_outputs) for _ in self.sizes] for _ in range(2))
        seen = np.full(n, -1)  # the last segment of the history; -1: not decided yet
        stop = np.full(n, -1)  # that of the sample
        means, errors = np.empty((n, n_outputs)), np.zeros((n, n_outputs))
        left, rest = np.arange(n), []
        for last, segment in enumerate(self.segments):
            if last == len(self.segments) - 1:  # no sample would be left
                rest.append(left[seen[left] < 0])
                left = left[seen[left] >= 0]
            if len(left) == 0:
                break
            decided = seen[left] >= 0
            old, new = left[decided], left[~decided]
            for k, rows in segment:
                moments = rows.moments(queries[left], threads, second=True)
                read += len(left) * len(rows)
                sample[k][old] = sample[k][old] + moments[decided]
                known[k][new] = known[k][new] + moments[~decided]
            if len(new):
                stop[new] = self._stop(outlying[new], [x[new] for x in known], last)
                seen[new[stop[new] >= 0]] = last
            if len(done := old[stop[old] == last]):
                parts = outlying[done], [x[done] for x in known], [x[done] for x in sample]
                means[done], errors[done] = self._combined(*parts, seen[done], last)
            too_many = stop[left] >= len(self.segments)
            rest.append(left[too_many])
            left = left[~too_many & (~decided | (stop[left] > last))]
        return means, errors, np.concatenate([*rest, left]), read

    def _stop(self, outlying: Moments, known: list[Moments], last: int) -> np.ndarray:
        """The last segment of the sample, behind that of the history; -1 where too few rows carry
        the weight of a query, and one too many where it needs more than there are."""
        copies = self.sizes / self.ends[last]
        known = [x.times(c) for x, c in zip(known, copies, strict=True)]
        met = sum(known[1:], known[0])
        whole = outlying + met
        means, squares = whole.ratio(), 0.0
        for part, c in zip(known, copies, strict=True):
            scale = factor(part.shift, whole.shift)[:, None] ** 2
            squares = squares + scale * part.squared_residuals(means) * (1 - 1 / c)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            errors = np.sqrt(squares) / whole.first[:, :1]
            wanted = SAFETY * GROWTH**last * (errors / self.limit) ** 2
        wanted = np.where(errors > 0, wanted, 0).max(axis=1)  # a limit of 0, of values all equal
        stop = np.full(len(wanted), len(self.segments))
        for end in range(len(self.segments) - 1, last, -1):
            stop[GROWTH**last + wanted <= GROWTH**end] = end
        return np.where(met.effective() >= MIN_EFFECTIVE, stop, -1)

    def _combined(
        self,
        outlying: Moments,
        known: list[Moments],
        sample: list[Moments],
        seen: np.ndarray,
        last: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Outlying rows, the history and the sample, extrapolated to the rows that are not history.

        The variance of a ratio's error by the delta method: that of the sum of w k (z - mean) over
        a stratified sample without replacement, over the square of the sum of w k.
        """
        population = self.sizes - self.ends[seen]  # (n_queries, n_strata)
        size = self.ends[last] - self.ends[seen]
        copies = population / np.maximum(size, 1)
        whole, met = outlying, Moments.zeros(len(seen), len(self.limit))
        for k, (a, b) in enumerate(zip(known, sample, strict=True)):
            whole = whole + a + b.times(copies[:, k])
            met = met + (a + b).times(self.sizes[k] / self.ends[last, k])
        means, variance = whole.ratio(), 0.0
        for k, part in enumerate(sample):
            scale = factor(part.shift, whole.shift)[:, None] ** 2
            total = part.first[:, 1:] - means * part.first[:, :1]
            n = np.maximum(size[:, k], 2)[:, None]
            squares = np.maximum(part.squared_residuals(means) - total**2 / n, 0) * n / (n - 1)
            c = copies[:, k, None]
            variance = variance + scale * squares * c * (c - 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            rows = met.effective()[:, None]
            least = np.minimum(self.spread[last] / np.sqrt(rows), self.range[last] / rows)
            share = outlying.first[:, :1] / whole.first[:, :1]  # of the weight, known exactly
            share = share * factor(outlying.shift, whole.shift)[:, None]
            errors = np.sqrt(variance) / whole.first[:, :1]
            return means, np.maximum(errors, least * (1 - share))

    @property
    def nbytes(self) -> int:
        rows = self.outlying, *(part for segment in self.segments for _, part in segment)
        return self.exact.nbytes + sum(part.nbytes for part in rows)


def _strata(
    sizes: np.ndarray, order: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """The outlying rows, those of each stratum in a given order, and how many of them the first
    segment has. A stratum of which that would be half is outlying."""
    outlying = np.zeros(len(sizes), bool)
    n = min(OUTLYING, len(sizes) // 8)
    outlying[np.argpartition(sizes, -n)[len(sizes) - n :]] = True
    order = order[~outlying[order]]
    relative = np.maximum(sizes[order] / np.median(sizes[order]), 1)
    level = np.maximum(np.floor(np.log(relative / 2) / np.log(RATIO)) + 1, 0).astype(np.int64)
    numbers = np.bincount(level)
    wanted = float(RATIO) ** np.arange(len(numbers)) * numbers
    sampled = (numbers > 0) & (wanted * (FIRST / wanted.sum()) < numbers / 2)
    sampled[0] = True
    first = np.maximum(wanted * (FIRST / wanted[sampled].sum()), LEAST_SAMPLE)
    outlying[order[~sampled[level]]] = True
    strata = [order[level == k] for k in np.flatnonzero(sampled)]
    return np.flatnonzero(outlying), strata, first[sampled]


def _missed(
    strata: list[np.ndarray], copies: np.ndarray, weights: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What the rows may be like that a sample has missed: the standard deviation of values and
    their range, each `(n_segments, n_outputs)`, over rows that count `copies` `(n_segments,
    n_strata)` times, by their weights."""
    rows = np.concatenate(strata)
    mean = np.average(values[rows], axis=0, weights=weights[rows])
    changes = [weights[k, None] * (values[k] - mean) for k in strata]
    squares, low, high = (
        np.array([f(x) for x in changes])
        for f in (
            lambda x: np.einsum("ij,ij->j", x, x),
            lambda x: x.min(axis=0),
            lambda x: x.max(axis=0),
        )
    )
    own = np.array([weights[k] @ weights[k] for k in strata])
    deviation = np.sqrt((copies - 1) @ squares / (copies @ own)[:, None])
    each = weights[rows].sum() / (np.array([len(k) for k in strata]) / copies).sum(axis=1)
    spans = np.sqrt(copies * (copies - 1))[..., None]  # of what is left
    span = (spans * high).max(axis=1) - (spans * low).min(axis=1)
    return deviation, span / each[:, None]

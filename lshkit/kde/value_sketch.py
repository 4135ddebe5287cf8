"""A sketch of rows with values: algorithm="bucket_sum" of a regression, of constant size."""

import itertools

import numpy as np

from lshkit.buckets import BucketTable
from lshkit.kde.geometry import Geometry
from lshkit.kde.sketch import Sketch

LEAST = 1e-12  # share of the weight that float64's rounding leaves in a query's buckets
NOISE = 2.0
CACHED = 2**15  # numbers of the table that are read at once
MOST_NUMBERS = 2**21  # of queries, hashes and outputs, in memory at once


class ValueSketch(Sketch):
    """Sums of the weights w and of w y by bucket, for kernels that are collision probabilities.

    Their ratio is the regression. For the laplacian kernel, the share of all rows that folding
    brings to a bucket, 2^-n_bits, is subtracted from both. Values are counted from the mean of the
    first rows, so that little cancels, and in units of the largest of them, weights in units of
    the first rows' largest: powers of 2, which round nothing and keep squares within float64.
    """

    def __init__(
        self,
        geometry: Geometry,
        n_bits: int,
        n_hashes: int,
        seed: int,
        weights: np.ndarray | None,
        values: np.ndarray,
    ) -> None:
        super().__init__(geometry, n_bits, n_hashes, seed)
        self.n_outputs = values.shape[1]
        self.table = BucketTable(n_hashes, 2**n_bits, 1 + self.n_outputs, dtype=np.float64)
        counted = values if weights is None else values[weights > 0]
        self.exponents = np.frexp(np.abs(counted).max(axis=0))[1]
        self.weight_exponent = 0 if weights is None else np.frexp(weights.max())[1]
        self.offset = np.ldexp(counted, -self.exponents).mean(axis=0)
        self.totals = np.zeros(1 + self.n_outputs)
        self.squared_values, self.squared_weights = np.zeros(self.n_outputs), 0.0
        self.low = np.full(self.n_outputs, np.inf)
        self.high = -self.low

    def add(  # type: ignore[override]  # rows have values here
        self, X: np.ndarray, weights: np.ndarray | None, values: np.ndarray
    ) -> None:
        with self.changes.alone():
            self._add_values(X, np.ones(len(X)) if weights is None else weights, values)

    def _add_values(self, X: np.ndarray, weights: np.ndarray, values: np.ndarray) -> None:
        counted = weights > 0
        if not counted.all():
            X, weights, values = X[counted], weights[counted], values[counted]
        if len(X) == 0:
            return
        weights = self._in_units("sample_weight", weights, self.weight_exponent, 400)
        values = self._in_units("y", values, self.exponents, 250)
        columns = np.column_stack([weights, weights[:, None] * (values - self.offset)])
        for part, codes in self.codes_by_chunk(X):
            self.changes.begin()
            self.table.add(codes, columns[part])
        self.low = np.minimum(self.low, values.min(axis=0))
        self.high = np.maximum(self.high, values.max(axis=0))
        self.totals = self.totals + columns.sum(axis=0)
        # Not products of matrices, whose last bits depend on the number of threads.
        squares = np.einsum("i,ij->j", weights, (values - self.offset) ** 2)
        self.squared_values = self.squared_values + squares
        self.squared_weights += float(np.einsum("i,i->", weights, weights))
        self.total = float(self.totals[0])

    @staticmethod
    @np.errstate(over="ignore")
    def _in_units(name: str, x: np.ndarray, exponents: int | np.ndarray, most: int) -> np.ndarray:
        """x in units of 2^exponents; ValueError from 2^most on: float64 has to hold squares."""
        units = np.ldexp(x, -exponents)
        if not np.abs(units).max(initial=0) < 2.0**most:
            raise ValueError(
                f"{name} must be less than 2^{most} times as large as in the first rows of a "
                f"sketch, got {np.abs(x).max():g}: use fit"
            )
        return units

    def estimate(  # type: ignore[override]  # of several outputs
        self, X: np.ndarray, threads: int | None = None, with_error: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Means `(n, n_outputs)` of rows as given and their standard errors; NaN without a row.

        The error is the jackknife's, by what each hash changes: with A and B its sums of values and
        of weights, a mean without it differs by (A - mean B) over the other hashes' B. Means are
        clipped to the range of the values, in which all weighted means lie. What folding leaves of
        B is noise around 0: a laplacian query has rows near only if B is NOISE of its standard
        errors above it.

        Hashes that agree, because they all met the same row or equal values, know nothing of the
        rows that they did not meet: no error is less than the standard deviation of the values
        over the root of the number of rows that were met, with repetition, nor than what rows of
        other cells bring by chance. Nor is one larger than the way to the farther end of the range
        of the values. with_error=False skips the errors, which are then inf.
        """
        self.check_range(X)
        step = max(1, MOST_NUMBERS // (self.n_hashes * (1 + self.n_outputs)))
        with_error = with_error and self.n_hashes > 1
        moments = self._of_table(self._moments) if with_error else None
        parts = [self._means(X[i : i + step], moments) for i in range(0, len(X), step)]
        means, errors = (np.concatenate(x) for x in zip(*parts, strict=True))
        return means, errors

    def _means(
        self, X: np.ndarray, moments: tuple[np.ndarray, ...] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        codes = self.codes(X).astype(np.intp)
        own = self.table.table[np.arange(self.n_hashes), codes]  # (n, n_hashes, 1 + n_outputs)
        each, least = own - self._chance * self.totals, LEAST * self.total
        if self._chance and self.n_hashes > 1:
            least = np.maximum(least, NOISE * each[..., :1].std(1, ddof=1) / self.n_hashes**0.5)
        sums = each.mean(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = np.where(sums[:, :1] > least, sums[:, 1:] / sums[:, :1], np.nan)
            errors = np.full(means.shape, np.inf)
            low, high = self.low - self.offset, self.high - self.offset
            if moments is not None:
                others = self.n_hashes * sums[:, None, :1] - each[..., :1]
                changes = each[..., 1:] - means[:, None] * each[..., :1]
                changes /= np.maximum(others, self.n_hashes * LEAST * self.total)
                errors = np.sqrt((1 - 1 / self.n_hashes) * (changes**2).sum(axis=1))
                met = self.n_hashes * sums[:, :1] * self.total / self.squared_weights
                errors = np.maximum(errors, self._spread() / np.sqrt(met))
                errors = np.maximum(errors, self._of_others(own, means, *moments))
            means = np.clip(means, low, high)
            if moments is not None:
                errors = np.minimum(errors, np.maximum(means - low, high - means))
        return means, errors

    def _spread(self) -> np.ndarray:
        """Standard deviation of the values `(n_outputs,)`."""
        mean, square = self.totals[1:] / self.total, self.squared_values / self.total
        return np.sqrt(np.maximum(square - mean**2, 0))

    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Sums over the buckets of B X and X^2 `(1 + n_outputs,)`, means of the hashes.

        X are B and A of a bucket, as shares of the weight.
        """
        products, squares = np.zeros((2, 1 + self.n_outputs))
        step = max(1, CACHED // len(squares))
        firsts = range(0, 2**self.n_bits, step)
        for of_hash, first in itertools.product(range(self.n_hashes), firsts):
            numbers = self.table.table[of_hash, first : first + step]
            shares = np.ascontiguousarray(numbers.T) / self.total
            products += np.einsum("ib,b->i", shares, shares[0]) / self.n_hashes
            squares += np.einsum("ib,ib->i", shares, shares) / self.n_hashes
        return products, squares

    def _of_others(
        self, own: np.ndarray, means: np.ndarray, products: np.ndarray, squares: np.ndarray
    ) -> np.ndarray:
        """Of the sums of A - means B, the least standard error by what other buckets hold."""
        own = own / self.total
        differences = own[..., 1:] - means[:, None] * own[..., :1]
        of_buckets = squares[1:] - 2 * means * products[1:] + means**2 * squares[0]
        rest = self.totals[1:] / self.total - means - differences.mean(axis=1)
        met = own[..., :1].mean(axis=1)
        near = (met - self._chance) / (1 - self._chance)
        return self._by_chance(of_buckets - (differences**2).mean(axis=1), rest, met, near)

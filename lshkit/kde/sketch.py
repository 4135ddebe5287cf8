"""algorithm="bucket_sum": a sketch of constant size, for kernels that are collision probabilities.

Every row adds its weight to one bucket of each hash; the mean over the hashes of a query's buckets
is the kernel sum, unbiased (Coleman and Shrivastava 2020, RACE). No row is kept.
"""

import numpy as np

from lshkit import hashing
from lshkit.buckets import BucketTable
from lshkit.kde.exact import Estimate
from lshkit.kde.random_sampling import MOST
from lshkit.kde.sums import Geometry, Sums, in_range_of_hashing, unit_rows

# Weights are rounded to multiples of it, so that sums of weights are exact in float64: the same
# bits in whatever order rows come, are merged and go.
WEIGHT_UNIT = 2.0**-24
MAX_WEIGHT = 2.0**53 * WEIGHT_UNIT
CHUNK = 8192  # rows whose codes are in memory at once


class Sketch:
    """Counts by bucket.

    angular: FastHadamard's codes are the buckets. laplacian: RandomBinning's codes (32 bits) are
    folded into 2^n_bits buckets by (a c + b) >> (64 - n_bits), a and b random 64-bit numbers:
    different codes meet with probability 2^-n_bits exactly (Dietzfelbinger 1996), which
    `estimate` takes out again.
    """

    name = "bucket_sum"

    def __init__(self, geometry, n_bits, n_hashes, seed, window=None, hasher=None):
        self.geometry, self.n_bits, self.n_hashes, self.seed = geometry, n_bits, n_hashes, seed
        d = len(geometry.bandwidth)
        if geometry.kernel == "angular":
            self.hasher = hasher or hashing.FastHadamard(d, n_bits, n_hashes, seed=seed)
        else:
            self.hasher = hasher or hashing.RandomBinning(d, n_hashes, bandwidth=1.0, seed=seed)
            rng = np.random.default_rng([seed, 2])
            self.fold = rng.integers(2**64, size=(2, n_hashes), dtype=np.uint64)
        self.table = BucketTable(n_hashes, 2**n_bits, 1, dtype=np.float64)
        self.total = 0.0
        self.window = None if window is None else Window(window, n_hashes)

    def codes(self, X):
        if self.geometry.kernel == "angular":
            if not in_range_of_hashing(X):
                X = unit_rows(np.asarray(X, np.float64))
            return self.hasher.hash(X)
        codes = self.hasher.hash(self.geometry.scale(X)).astype(np.uint64)
        return ((self.fold[0] * codes + self.fold[1]) >> np.uint64(64 - self.n_bits)).astype(
            np.uint8 if self.n_bits <= 8 else np.uint16
        )

    def add(self, X, weights, sign=1):
        """Adds (or takes out) rows; ValueError when less than nothing would be left."""
        if weights is None:
            rounded = np.ones(len(X))
        else:
            rounded = np.round(weights / WEIGHT_UNIT) * WEIGHT_UNIT
            if (np.abs(rounded - weights) > 1e-3 * weights).any():
                raise ValueError(
                    f"sample_weight must be 0 or at least {500 * WEIGHT_UNIT:.1e} for "
                    "algorithm='bucket_sum' (weights are rounded to multiples of 2^-24): scale "
                    "them up"
                )
        total = self.total + sign * float(rounded.sum())
        if total > MAX_WEIGHT:
            raise ValueError(f"the sum of sample_weight must stay below 2^29, would be {total}")
        if total < 0 or self.table.count + sign * len(X) < 0:
            raise ValueError("more rows or weight to take out than the sketch holds")
        for first in range(0, len(X), CHUNK):
            rows = slice(first, first + CHUNK)
            codes, values = self.codes(X[rows]), rounded[rows, None]
            if sign > 0:
                self.table.add(codes, values)
                if self.window is not None:
                    self.window.push(codes, values[:, 0], self._drop)
            else:
                self.table.remove(codes, values)
        self.total = float(total) if self.window is None else float(self.window.weights.sum())

    def _drop(self, codes, values):
        self.table.remove(codes, values[:, None])

    def merge(self, other):
        if self.window is not None or other.window is not None:
            raise ValueError("sketches with a window cannot be merged: their rows have no order")
        if self.hasher != other.hasher or self.n_bits != other.n_bits:
            raise ValueError(
                "sketches with different hash functions cannot be merged: fit both with the same "
                "integer random_state, n_bits, n_hashes and bandwidth"
            )
        if self.total + other.total > MAX_WEIGHT:
            raise ValueError("the sum of sample_weight of both must stay below 2^29")
        self.table.merge(other.table)
        self.total += other.total

    def estimate(self, X, threads=None, with_error=True):
        """with_error=False leaves the error 0, in less time; threads: the verb uses the core's."""
        parts = [self._estimate(X[i : i + CHUNK], with_error) for i in range(0, len(X), CHUNK)]
        return parts[0] if len(parts) == 1 else Estimate.joined(parts)

    def _estimate(self, X, with_error):
        codes = self.codes(X)
        mean = self._corrected(self.table.query(codes)[:, 0])
        error = np.zeros(len(X))
        if with_error and self.n_hashes == 1:
            error = np.full(len(X), np.inf)  # nobody knows
        elif with_error:
            error = self._of_each(codes).std(axis=1, ddof=1) / np.sqrt(self.n_hashes)
        return Estimate(np.zeros(len(X)), mean, error)

    def of_each_hash(self, X):
        """The estimate of each hash alone, `(len(X), n_hashes)`."""
        return self._of_each(self.codes(X))

    def _of_each(self, codes):
        single = self.table.table[np.arange(self.n_hashes), codes.astype(np.intp), 0]
        return self._corrected(single)

    def _corrected(self, sums):
        if self.total == 0:
            return 0 * sums
        mean = sums / self.total
        if self.geometry.kernel == "angular":
            return mean
        chance = 2.0**-self.n_bits
        return (mean - chance) / (1 - chance)

    @property
    def nbytes(self):
        kept = 0 if self.window is None else self.window.codes.nbytes
        return self.table.table.nbytes + kept


class SketchedRows:
    """A sketch of the permuted rows from `start` on, those before exactly: for "auto"."""

    name = "bucket_sum"

    def __init__(self, permuted, n_bits, n_hashes, start=0):
        self.permuted, self.training = permuted, permuted.training
        self.start = start
        d, kernel = permuted.rows.shape[1], self.training.geometry.kernel
        scaled = Geometry(kernel, n_bits, np.zeros(d), np.ones(d))
        seed = int(np.random.default_rng([self.training.seed, 5]).integers(2**31))
        self.sketch = Sketch(scaled, n_bits, n_hashes, seed)
        weights = permuted.weights
        self.unit = 1.0 if weights is None else weights.mean()
        rest = None if weights is None else weights[self.start :] / self.unit
        self.sketch.add(permuted.rows[self.start :], rest)

    @property
    def most(self):
        """Relative error that may be expected of a query.

        No bound for the laplacian kernel: where far rows alone are folded into a query's buckets,
        what is left after the correction is noise, of any multiple of the density.
        """
        return MOST if self.training.geometry.kernel == "angular" else 1e100

    def estimate(self, X, threads, with_error=True):
        if self.training.geometry.kernel != "angular":  # whose codes need no scaling
            X = self.training.geometry.scale(X)
        return self.estimate_scaled(X, threads, with_error)

    def estimate_scaled(self, queries, threads, with_error=True):
        got = self.sketch.estimate(queries, with_error=with_error)
        scale = self.sketch.total * self.unit
        whole = Sums(got.shift, got.mean * scale, np.zeros(len(queries)))
        if self.start:
            whole = self.permuted.sums(queries, 0, self.start, threads) + whole
        error = got.error * scale * np.exp(got.shift - whole.shift)
        total = self.training.total
        return Estimate(whole.shift, whole.total / total, error / total)

    @property
    def nbytes(self):
        return self.permuted.nbytes + self.sketch.nbytes


class Window:
    """The codes of the last rows, in a ring: what a sketch forgets when new rows come."""

    def __init__(self, size, n_hashes):
        self.size, self.at, self.filled = size, 0, 0
        self.codes = np.zeros((size, n_hashes), np.uint16)
        self.weights = np.zeros(size)

    def push(self, codes, values, drop):
        if len(codes) > self.size:  # what would go again at once
            drop(codes[: -self.size], values[: -self.size])
            codes, values = codes[-self.size :], values[-self.size :]
        slots = (self.at + np.arange(len(codes))) % self.size
        old = slots[len(slots) - max(0, self.filled + len(slots) - self.size) :]
        if self.filled + len(slots) > self.size:
            # The oldest lie in the slots that are written past the end of the filled part.
            drop(self.codes[old], self.weights[old])
        self.codes[slots], self.weights[slots] = codes, values
        self.at = int((self.at + len(slots)) % self.size)
        self.filled = min(self.size, self.filled + len(slots))

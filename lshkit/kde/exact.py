"""algorithm="brute": every row, exactly."""

import numpy as np

from lshkit.kde.sums import Geometry, blocks_of

EXACT = 1e-6  # error of a log kernel that float32 may bring
LEAST = 1e-37  # weight, of the largest, that float32 still holds
FEW = 8  # queries in a call, for which the rows are worth a copy in blocks


class Estimate:
    """Kernel means: exp(shift) * mean with standard error exp(shift) * error (0: exact)."""

    __slots__ = ("error", "mean", "shift")

    def __init__(self, shift, mean, error):
        self.shift, self.mean, self.error = shift, mean, error

    @classmethod
    def joined(cls, parts):
        return cls(*(np.concatenate([getattr(p, a) for p in parts]) for a in ESTIMATE))


ESTIMATE = "shift", "mean", "error"


class Training:
    """The rows of an estimator: as given, with their weights and geometry."""

    def __init__(self, X, weights, geometry, seed):
        self.X, self.weights, self.geometry, self.seed = X, weights, geometry, seed
        self.total = float(len(X)) if weights is None else float(np.sum(weights))
        self.reach, self.blocks = 0.0, None
        for first in range(0, len(X), 4096):
            scaled = geometry.scale(X[first : first + 4096])
            norms = np.einsum("ij,ij->i", scaled, scaled)
            self.reach = max(self.reach, float(np.sqrt(norms.max())))

    def sums(self, queries, threads):
        if self.blocks is None and len(queries) <= FEW:
            self.blocks = blocks_of(self.X)
        return self.geometry.sums(
            queries,
            self.X,
            self.weights,
            scaled=False,
            tolerance=EXACT,
            reach=self.reach,
            threads=threads,
            blocks=self.blocks,
        )


def training_of(kernel, n_bits, bandwidth, X, weights, seed):
    """The `Training` of rows, centred for their distances; without rows that do not count."""
    if weights is not None and weights.min() < LEAST:
        X, weights = X[weights >= LEAST], weights[weights >= LEAST]
    # The mean, but for features where a few far rows take it away from the others.
    low, high = np.quantile(X[:: -(-len(X) // 1024)], (0.05, 0.95), axis=0, method="nearest")
    centre = np.clip(X.mean(axis=0, dtype=np.float64), low, high)
    return Training(X, weights, Geometry(kernel, n_bits, centre, bandwidth), seed)


class BruteForce:
    name = "brute"

    def __init__(self, training):
        self.training = training

    def estimate(self, X, threads, with_error=True):
        return self.estimate_scaled(self.training.geometry.scale(X), threads)

    def estimate_scaled(self, queries, threads):
        sums = self.training.sums(queries, threads)
        return Estimate(sums.shift, sums.total / self.training.total, np.zeros(len(queries)))

    @property
    def nbytes(self):
        return 0 if self.training.blocks is None else self.training.blocks.nbytes

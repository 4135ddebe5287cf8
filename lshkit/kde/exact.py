"""algorithm="brute": every row, exactly."""

import numpy as np

from lshkit.kde.sums import blocks_of

EXACT = 1e-6  # error of a log kernel that float32 may bring
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

"""algorithm="brute": every row, exactly."""

import functools

import numpy as np

from lshkit.kde import kernels
from lshkit.kde.method import Estimate, Method, Tuned


class BruteForce(Method):
    name = "brute"
    kernels = tuple(kernels.CODES)
    exact = True
    uses_rtol = False

    def __init__(self, training):
        self.training = training

    @classmethod
    def tune(cls, pilot, rtol):
        settings = {"cost": float(len(pilot.training.X)), "error": 0.0}
        return Tuned(settings, functools.partial(cls, pilot.training))

    @classmethod
    def from_settings(cls, settings, training, permuted=None):
        return cls(training)

    def estimate(self, X, threads, with_error=True):
        return self._exact(self.scaled(X), threads, X)

    def sampled(self, queries, threads, stop=None, with_error=True):
        if stop is not None:
            raise ValueError(f"stop must be None, got {stop}: brute force has no permuted rows")
        return self._exact(queries, threads, None)

    def _exact(self, queries, threads, given):
        sums = self.training.sums(queries, threads, given=given)
        rows = np.full(len(queries), len(self.training.X))
        mean = sums.total / self.training.total
        return Estimate(sums.shift, mean, np.zeros(len(queries)), rows)

    @property
    def nbytes(self):
        return self.training.nbytes_of_blocks

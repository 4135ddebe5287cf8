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

    def estimate(self, X, threads, with_error=True, scaled=False):
        queries = X if scaled else self.geometry.scale(X)
        sums = self.training.sums(queries, threads, given=None if scaled else X)
        return Estimate(sums.shift, sums.total / self.training.total, np.zeros(len(queries)))

    @property
    def nbytes(self):
        return self.training.nbytes_of_blocks

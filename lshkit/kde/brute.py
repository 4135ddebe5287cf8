"""algorithm="brute": every row, exactly."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from lshkit.kde import kernels
from lshkit.kde.method import Estimate, Method, Tuned

if TYPE_CHECKING:
    from typing_extensions import Self

    from lshkit.kde.pilot import Pilot
    from lshkit.kde.training import PermutedRows, Training


class BruteForce(Method):
    name = "brute"
    kernels = tuple(kernels.CODES)
    exact = True
    uses_rtol = False

    def __init__(self, training: Training) -> None:
        self.training = training

    @classmethod
    def tune(cls, pilot: Pilot, rtol: float) -> Tuned:
        settings = {"cost": float(len(pilot.training.X)), "error": 0.0}
        return Tuned(settings, functools.partial(cls, pilot.training))

    @classmethod
    def from_settings(
        cls, settings: dict[str, Any], training: Training, permuted: PermutedRows | None = None
    ) -> Self:
        return cls(training)

    def estimate(self, X: np.ndarray, threads: int, with_error: bool = True) -> Estimate:
        sums = self.training.sums(self.scaled(X), threads, given=X)
        return Estimate.exact(sums, self.training.total, len(self.training.X))

    @property
    def nbytes(self) -> int:
        return self.training.nbytes_of_blocks

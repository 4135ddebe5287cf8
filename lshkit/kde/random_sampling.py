"""algorithm="random": a uniform sample without replacement, read in order from a permuted copy.

The queries of a call share the sample, so that its rows are multiplied with all of them at once:
per row it costs what brute force does, and no other simple method is faster (Karppa et al. 2022,
DEANN, call it RSP).
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from lshkit.kde.equal_rows import EqualRows
from lshkit.kde.method import Estimate, Method, Tuned
from lshkit.kde.near_far import NearFar
from lshkit.kde.samples import (
    CALL,
    Answers,
    Level,
    Stages,
    cheapest_sample,
    expected,
    relative_spread,
    stages_of,
)
from lshkit.kde.sums import Sums
from lshkit.kde.training import PermutedRows

if TYPE_CHECKING:
    from typing_extensions import Self

    from lshkit.kde.pilot import Pilot
    from lshkit.kde.training import Training


class RandomSampling(Method):
    """Estimates from a history of rows that are summed exactly and a sample of the others.

    Which queries need a larger sample is read off the history alone; what was seen before the last
    sample counts as history. So the choice of the size depends on no row of the sample
    that is weighed up, and the estimate is unbiased.
    """

    name = "random"
    permuted: PermutedRows

    def __init__(self, permuted: PermutedRows, stages: Stages) -> None:
        self.permuted, self.stages, self.training = permuted, stages, permuted.training

    @classmethod
    def tune(cls, pilot: Pilot, rtol: float) -> Tuned:
        def known(count: int) -> np.ndarray:
            history = pilot.history(count)
            log = history.log() + np.log(pilot.population / count)
            return relative_spread(history, count) * pilot.counted(log)

        spread = pilot.spread * pilot.counted(pilot.sums.log())
        level = Level(spread, known, np.full(len(spread), CALL))
        settings = cheapest_sample([level], pilot.population, rtol)
        settings |= pilot.thresholds
        make = functools.partial(cls.from_settings, settings, pilot.training, pilot.permuted)
        return Tuned(settings, make)

    @classmethod
    def from_settings(
        cls, settings: dict[str, Any], training: Training, permuted: PermutedRows | None = None
    ) -> Self:
        permuted = PermutedRows(training) if permuted is None else permuted
        return cls(permuted, stages_of(settings))

    @functools.cached_property
    def beside(self) -> NearFar | None:
        """The same with rows that equal a query summed exactly: a sample may miss what they are."""
        return NearFar(EqualRows(self.permuted), 1, self.stages)

    def sampled(
        self, queries: np.ndarray, threads: int, stop: int | None = None, with_error: bool = True
    ) -> Estimate:
        if self.beside is None:
            return self._alone(queries, threads, stop)
        equal = self.beside.cells
        assert isinstance(equal, EqualRows)
        groups = equal.nearest(queries, 1, threads)
        known = equal.before(groups[:, 0], stop)
        if not known.any():
            return self._alone(queries, threads, stop)
        out = Estimate.exact(Sums.zeros(len(queries)), self.training.total, len(self.permuted))
        if not known.all():
            out[~known] = self._alone(queries[~known], threads, stop)
        out[known] = self.beside.sampled(queries[known], threads, stop)
        return out

    def _alone(self, queries: np.ndarray, threads: int, stop: int | None) -> Estimate:
        permuted = self.permuted
        n = len(permuted) if stop is None else stop
        stops = self.stages.stops(len(permuted), n)
        left, history = np.arange(len(queries)), permuted.sums(queries, 0, stops[0], threads)
        answers = Answers(history, n)
        for seen, last in itertools.pairwise(stops):
            some = queries if len(left) == len(queries) else queries[left]
            sample = permuted.sums(some, seen, last, threads)
            final = np.ones(len(left), bool)
            if last < n:
                log = history.log() + np.log(n / seen)
                final = self.stages.enough(relative_spread(history, seen), log, last - seen)
            got = expected(sample[final], last - seen, n - seen)
            answers.put(left[final], history[final], got, last, last - seen)
            if final.all():
                break
            left, history = left[~final], (history + sample)[~final]
        answers.cost = answers.rows + CALL
        return answers.estimate(self.training.total)

    @property
    def nbytes(self) -> int:
        equal = 0 if self.beside is None else self.beside.cells.nbytes
        return self.permuted.nbytes + equal

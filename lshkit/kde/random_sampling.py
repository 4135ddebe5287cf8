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
    Level,
    Stages,
    cheapest_sample,
    expand,
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
        permuted, n_queries = self.permuted, len(queries)
        n = len(permuted) if stop is None else stop
        stops = self.stages.stops(len(permuted), n)
        history = permuted.sums(queries, 0, stops[0], threads)
        shift, mean, error = history.shift, history.total, np.zeros(n_queries)
        rows, open_ = np.full(n_queries, n), np.arange(n_queries)
        sampled = np.full(n_queries, n)
        for seen, last in itertools.pairwise(stops):
            some = queries if len(open_) == n_queries else queries[open_]
            sample = permuted.sums(some, seen, last, threads)
            final = np.ones(len(open_), bool)
            if last < n:
                log = history.log() + np.log(n / seen)
                spread = relative_spread(history, seen)
                final = self.stages.enough(spread, log, last - seen)
            done, known, got = open_[final], history[final], sample[final]
            total, variance = expand(got, last - seen, n - seen)
            # Of the history only the sum is wanted: its squares would add to the variance.
            whole = known + Sums(got.shift, total, variance)
            scale = np.where(got.shift > -np.inf, np.exp(got.shift - whole.shift), 0)
            shift[done], mean[done], rows[done] = whole.shift, whole.total, last
            sampled[done] = last - seen
            error[done] = np.sqrt(variance) * scale
            if final.all():
                break
            history = (history + sample)[~final]
            open_ = open_[~final]
        weight = self.training.total
        mean, error = mean / weight, error / weight
        return Estimate(shift, mean, error, rows, cost=rows + CALL, sampled=sampled)

    @property
    def nbytes(self) -> int:
        equal = 0 if self.beside is None else self.beside.cells.nbytes
        return self.permuted.nbytes + equal

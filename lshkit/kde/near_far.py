"""algorithm="near_far": the rows of the cells around a query exactly, the others by a sample.

Which rows are near does not depend on the permutation, so the rows that are not near are a uniform
sample of their kind wherever the permutation put them: the estimate is unbiased (DEANN, Karppa et
al. 2022, with all rows of some cells for the neighbours, and no row counted twice).
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lshkit import checks
from lshkit.kde.cells import Cells
from lshkit.kde.method import Estimate, ExactFarQueries, Tuned
from lshkit.kde.samples import (
    CALL,
    LEAST_AT_RISK,
    N_PILOT,
    Answers,
    Level,
    cheapest_sample,
    expected,
    relative,
    stages_of,
)
from lshkit.kde.sums import Sums
from lshkit.kde.training import BLOCK, PermutedRows

if TYPE_CHECKING:
    from typing_extensions import Self

    from lshkit.kde.equal_rows import EqualRows
    from lshkit.kde.pilot import Pilot
    from lshkit.kde.samples import Stages
    from lshkit.kde.training import Training

N_PROBES = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64
# For queries whose far rows foretell too large an error: times as many cells, and the part of the
# rows that is summed to see what even those do not hold.
MORE, MORE_HISTORY = 4, 1 / 8
# Costs in rows of a sample: of a centre, of a cell that is read, of a row of it, and of a row that
# comes from memory, for the first query of a batch that reads its cell.
CENTRE, PROBE, NEAR, FETCHED = 1.2, 30.0, 4.0, 12.0


class NearFar(ExactFarQueries):
    """`RandomSampling` with the near rows taken out of history and samples.

    cells: of all rows. n_probes: the rows of so many cells, those nearest to a query, are near.
    """

    name = "near_far"
    min_rows, worth = 4000, 1500

    def __init__(self, cells: Cells | EqualRows, n_probes: int, stages: Stages) -> None:
        self.cells, self.n_probes, self.stages = cells, n_probes, stages
        self.permuted, self.training = cells.permuted, cells.permuted.training

    @classmethod
    def tune(cls, pilot: Pilot, rtol: float) -> Tuned:
        settings = cheapest_probes(pilot, pilot.cells, rtol) | pilot.thresholds
        return Tuned(settings, lambda: cls._of(settings, pilot.cells))

    @classmethod
    def from_settings(
        cls, settings: dict[str, Any], training: Training, permuted: PermutedRows | None = None
    ) -> Self:
        permuted = PermutedRows(training) if permuted is None else permuted
        return cls._of(settings, Cells(permuted, 0))

    @classmethod
    def _of(cls, settings: dict[str, Any], cells: Cells) -> Self:
        n_probes = checks.integer("n_probes", settings["n_probes"], 1, cells.n_cells)
        return cls(cells, n_probes, stages_of(settings))

    def _sampled(self, queries: np.ndarray, threads: int, stop: int | None) -> Estimate:
        out, open_ = self._of_cells(queries, threads, stop)
        if len(open_) > 0:
            spent = out.cost[open_]
            out[open_], _ = self._of_cells(queries[open_], threads, stop, more=True)
            out.cost[open_] += spent
        return out

    def _of_cells(
        self, queries: np.ndarray, threads: int, stop: int | None, more: bool = False
    ) -> tuple[Estimate, np.ndarray]:
        """`Estimate`, and the queries for which a sample is not enough, and which want `more`.

        more: MORE cells, a longer history, and larger samples until they are enough.
        """
        permuted, cells, n_probes = self.permuted, self.cells, self.n_probes
        n = len(permuted) if stop is None else stop
        if more:
            n_probes = min(MORE * n_probes, cells.n_cells)
            stops = self.stages.stops(len(permuted), n, history_of_more(len(permuted)))
        else:
            stops = self.stages.stops(len(permuted), n)[:2]
        probes = cells.nearest(queries, n_probes, threads)
        half = n_probes - n_probes // 2
        inner, n_inner = cells.sums(queries, probes[:, :half], threads, last=n)
        outer, n_outer = cells.sums(queries, probes[:, half:], threads, last=n)
        near, n_near = inner + outer, n_inner + n_outer
        read = permuted.sums(queries, 0, stops[0], threads)
        inside, n_inside = cells.few_sums(queries, probes, threads, 0, stops[0])
        places, sums = np.arange(len(queries)), (near, read, read.without(inside))
        left = Unanswered(places, queries, probes, *sums, stops[0] - n_inside, n_near - n_inside)
        answers = Answers(read, n)
        answers.cost = cost_of_cells(cells.n_cells, n_probes, n_near) + stops[0]
        open_ = self._answer(answers, left, n, stops, threads, more)
        at_risk = answers.sums.total
        if n_probes > 1:
            reached = relative(outer.shift, answers.sums.shift)
            at_risk = outer.total * reached + LEAST_AT_RISK * at_risk
        return answers.estimate(self.training.total, at_risk), open_

    def _answer(
        self, answers: Answers, left: Unanswered, n: int, stops: list[int], threads: int, more: bool
    ) -> np.ndarray:
        """Puts the answers that samples give; returns the queries for which none was enough."""
        for seen, last in itertools.pairwise(stops):
            answers.cost[left.places] += last - seen
            sample = self.permuted.sums(left.queries, seen, last, threads)
            if last == n:
                answers.sums[left.places] = left.read + sample
                return left.places[:0]
            inside, n_inside = self.cells.few_sums(left.queries, left.probes, threads, seen, last)
            far, n_far = sample.without(inside), np.maximum(last - seen - n_inside, 1)
            population = n - seen - left.n_later
            foretold = foretell(left.history, left.n_history, left.near, population)
            final = self.stages.enough(*foretold, n_far)
            n_sampled, history = n_far[final], left.history[final]
            got = far[final], n_sampled, np.maximum(population[final], 1)
            got = pooled(*got, history, left.n_history[final]) if more else expected(*got)
            known, rows = left.near[final] + history, np.minimum(last + left.n_later[final], n - 1)
            answers.put(left.places[final], known, got, rows, n_sampled)
            if final.all():
                return left.places[:0]
            left = left.after(sample, far, n_far, n_inside).of(~final)
        return left.places

    @property
    def nbytes(self) -> int:
        return self.cells.nbytes


class Unanswered(NamedTuple):
    """Queries for which no sample was enough so far, and what was read for each.

    places: of the queries in their batch. probes: cells around each; near: sums over their rows.
    read: over the permuted rows so far; history: over the n_history of them that are not near.
    n_later: near rows that are still to come.
    """

    places: np.ndarray
    queries: np.ndarray
    probes: np.ndarray
    near: Sums
    read: Sums
    history: Sums
    n_history: np.ndarray
    n_later: np.ndarray

    def of(self, mask: np.ndarray) -> Unanswered:
        fields: Any = self
        return Unanswered(*(x[mask] for x in fields))

    def after(self, sample: Sums, far: Sums, n_far: np.ndarray, n_near: np.ndarray) -> Unanswered:
        """With a sample read besides, of which `far` are the n_far far rows."""
        return self._replace(
            read=self.read + sample,
            history=self.history + far,
            n_history=self.n_history + n_far,
            n_later=self.n_later - n_near,
        )


def pooled(sample: Sums, n_sampled: Any, population: Any, history: Sums, n_history: Any) -> Sums:
    """`expected`, where a history of more rows than the sample may have seen what that did not."""
    alone = expected(sample, n_sampled, population)
    both, n_both = history + sample, n_history + n_sampled
    scale = relative(sample.shift, both.shift)
    variance = expected(both, n_both, population).squares * n_both / n_sampled
    return Sums(both.shift, alone.total * scale, np.maximum(alone.squares * scale**2, variance))


def foretell(
    history: Sums, n_history: Any, near: Sums, population: Any
) -> tuple[np.ndarray, np.ndarray]:
    """What a history of `n_history` far rows tells, with `population` of them still to come.

    Standard deviation of the far rows' sum over the whole, for a sample of one row, and the log of
    the whole.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        n_history = np.maximum(n_history, 1)
        mean = history.total / n_history
        spread = np.sqrt(np.maximum(history.squares / n_history - mean**2, 0))
        close = near.total * np.exp(near.shift - history.shift)
        whole = np.where(near.shift > -np.inf, close, 0) + history.total + population * mean
        foretold = np.where(history.total > 0, population * spread / whole, 0)
        log = np.logaddexp(near.log(), history.log() + np.log1p(population / n_history))
    return np.where((history.total > 0) | (near.total > 0), foretold, np.inf), log


def cost_of_cells(n_cells: int, n_probes: int, n_near: np.ndarray) -> np.ndarray:
    """In rows of a sample: of finding n_probes of n_cells, and of summing the rows in them.

    For a query of a batch of 256 which find all cells equally often.
    """
    read = 256 * n_probes
    first = n_cells * (1 - (1 - 1 / n_cells) ** read) / read  # share that no query has read before
    return CALL + CENTRE * n_cells + PROBE * n_probes + (NEAR + FETCHED * first) * n_near


def cheapest_probes(pilot: Pilot, cells: Cells, rtol: float) -> dict[str, Any]:
    """The cheapest number of cells to read, with its sample's settings."""
    most = min(MORE * N_PROBES[-1], cells.n_cells)
    probes = cells.nearest(pilot.queries, most, pilot.threads)
    level = functools.lru_cache(maxsize=None)(lambda n: NearRows(pilot, cells, probes[:, :n]).level)
    history = history_of_more(len(pilot.permuted))
    best: dict[str, Any] | None = None
    for n_probes in (n for n in N_PROBES if n <= cells.n_cells):
        if best is not None and level(n_probes).cost.mean() > best["cost"]:
            break
        more = level(min(MORE * n_probes, most))._replace(history=history)
        found = cheapest_sample([level(n_probes), more], pilot.population, rtol)
        if best is None or found["cost"] < best["cost"]:
            best = {"n_probes": n_probes} | found
    assert best is not None
    return best


def history_of_more(n_rows: int) -> int:
    """Rows that are summed where more cells are read."""
    return max(N_PILOT, int(MORE_HISTORY * n_rows) // BLOCK * BLOCK)


class NearRows:
    """Near rows of a pilot's queries, and what is left for a sample of the others."""

    def __init__(self, pilot: Pilot, cells: Cells, probes: np.ndarray) -> None:
        self.pilot, self.cells, self.probes = pilot, cells, probes
        self.near, self.count = cells.sums(pilot.queries, probes, pilot.threads, pilot.n_pilot)
        self.n_far = pilot.population - self.count

    @property
    def level(self) -> Level:
        cost = cost_of_cells(self.cells.n_cells, self.probes.shape[1], self.count)
        return Level(self.spread, self.known, cost)

    @property
    def spread(self) -> np.ndarray:
        """Standard deviation of a far term over the mean of all, for a sample of one row."""
        pilot = self.pilot
        far = pilot.sums.without(self.near)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            spread = np.sqrt(np.maximum(self.n_far * far.squares - far.total**2, 0))
            scale = np.exp(far.shift - pilot.sums.shift) * pilot.counted(pilot.sums.log())
            return np.where(pilot.sums.total > 0, spread * scale / pilot.sums.total, np.inf)

    def known(self, count: int) -> np.ndarray:
        """What a history of so many rows foretells of it."""
        pilot = self.pilot
        inside, n_inside = self.cells.few_sums(
            pilot.queries, self.probes, pilot.threads, pilot.n_pilot, pilot.n_pilot + count
        )
        history = pilot.history(count).without(inside)
        foretold, log = foretell(history, count - n_inside, self.near, self.n_far)
        return foretold * pilot.counted(log)

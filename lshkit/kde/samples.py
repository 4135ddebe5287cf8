"""Samples of the permuted rows: what they estimate, of what size, and which queries need more."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lshkit import checks
from lshkit.kde.method import MEAN_ABSOLUTE, MOST, Estimate, finite_or_none
from lshkit.kde.sums import LOWEST, Sums
from lshkit.kde.training import BLOCK

N_PILOT = 256  # rows of the permutation's head: in every history, and the pilot's queries
N_PILOT_QUERIES = 128
SAFETY = 0.9
LIMITS = 1.0, 1.4, 1.8  # in rtol, of the error from which on a query gets more rows
MAX_LIMIT = 0.18  # of it: below what a history of 1/16 predicts for a query dominated by one row
UNLIKELY = 4  # standard errors that a mean is off by
LEAST_AT_RISK = 0.01  # share of a density that is at risk even where nothing unread is near
SHARED = 1 / 32  # of a batch of 256 queries: for fewer a sample is read at the pace of memory
CALL = 500.0  # cost of a query's share in what a call does once for a batch of 256


def expected(sums: Sums, sample: Any, population: Any) -> Sums:
    """Sums over a population from those of a uniform sample of it: squares are the variance."""
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums.total / sample
        spread = np.maximum(sums.squares / sample - mean**2, 0) * (
            sample / np.maximum(sample - 1, 1)
        )
        variance = population**2 * (1 - sample / population) * spread / sample
    return Sums(sums.shift, population * mean, variance)


def relative(shift: np.ndarray, to: np.ndarray) -> np.ndarray:
    """exp(shift - to), 0 where there is nothing; of a part to the whole, no more than 1."""
    return np.exp(np.minimum(shift - np.maximum(to, LOWEST), 0))


def relative_spread(sums: Sums, count: int) -> np.ndarray:
    """Standard deviation of a term over its mean; inf where nothing was seen."""
    with np.errstate(invalid="ignore", divide="ignore"):
        c = np.sqrt(np.maximum(count * sums.squares / sums.total**2 - 1, 0))
    return np.where(sums.total > 0, c, np.inf)


def spread_of_trials(terms: np.ndarray, expected: float) -> np.ndarray:
    """Standard deviation of independent estimates `(queries, estimates)` of a known number.

    Where single huge terms dominate the number, most trials miss them: their spread is small, but
    the error of their mean is larger than it explains.
    """
    count = terms.shape[1]
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(terms.mean(axis=1) - expected) * np.sqrt(count)
        spread = np.sqrt(np.mean((terms - expected) ** 2, axis=1))
        spread = np.where(off > UNLIKELY * terms.std(axis=1, ddof=1), off / MEAN_ABSOLUTE, spread)
    return np.where(np.isfinite(spread), spread, np.inf)


def mean_error(
    spread: np.ndarray, sample: int, population: int, most: float
) -> tuple[float, float]:
    """Mean over the queries of the expected relative error at a sample size, and its error.

    spread: `relative_spread` of each query. The error of a query is taken for normal, and at most
    `most`.
    """
    rest = max(0.0, 1 - sample / population)
    errors = MEAN_ABSOLUTE * spread * np.sqrt(rest / sample)
    errors = np.minimum(errors, most if rest > 0 else 0.0)
    return errors.mean(), errors.std() / np.sqrt(len(errors))


def sample_size(spread: np.ndarray, population: int, rtol: float, most: float = MOST) -> int:
    """The smallest sample of mean relative error rtol, one standard error on the safe side.

    And a tenth: queries share the sample, so that their errors do not average out as theirs do.
    """
    low, high = 1, population
    while low < high:
        middle = (low + high) // 2
        mean, error = mean_error(spread, middle, population, most)
        low, high = (low, middle) if mean + error <= SAFETY * rtol else (middle + 1, high)
    return low


def history_of(n_samples: float, least: int = N_PILOT) -> int:
    """Rows that are summed exactly before a sample, to predict whether it is enough."""
    size = least
    while size < n_samples // 16:
        size *= 2
    return size


def stages(history: float, n_samples: int, population: Any) -> list[Any]:
    """Where the history and the samples end: each sample is four times the one before.

    Where more than half of the rows would have been read, the rest costs about as much.
    """
    stops, size = [min(history, population)], n_samples
    while stops[-1] < population:
        last = stops[-1] + size
        stops.append(population if last > population // 2 else last)
        size *= 4
    return stops


class Level(NamedTuple):
    """What a pilot knows of its queries where a method has read some near rows of each.

    spread: standard deviation of a far term over the mean. known(count): what a history of so many
    rows predicts of it. cost: of the near rows and all else but samples, in rows. history: the
    least number of rows that are summed exactly before a sample.
    """

    spread: np.ndarray
    known: Callable[[int], np.ndarray]
    cost: np.ndarray
    history: int = N_PILOT


def cheapest_sample(levels: Sequence[Level], population: float, rtol: float) -> dict[str, Any]:
    """Size and limit of the cheapest sampling that keeps rtol on a pilot's queries, as a report.

    Each size is tried with the rule that the methods have: what a history of the rows predicts for
    a query decides whether it gets more. The mean error is that of the queries for which not all
    rows are read in the end, so that it holds for others that are not so many.

    levels: a query for which the first sample is not enough goes on to the next, and at the last to
    larger samples.
    """
    least = float(levels[0].cost.mean())
    best: dict[str, Any] = {
        "n_samples": population,
        "limit": MAX_LIMIT,
        "cost": float(population + N_PILOT) + least,
    }
    best["error"] = 0.0
    sizes, size = [], 64.0
    while size < population / 2:
        sizes.append(int(-(-size // BLOCK) * BLOCK))
        size *= 1.25
    levels = [x._replace(known=functools.lru_cache(maxsize=None)(x.known)) for x in levels]
    limits = sorted({min(x * rtol, MAX_LIMIT) for x in LIMITS})
    for n_samples in sorted(set(sizes)):
        if least + n_samples >= best["cost"]:
            break
        for limit in limits:
            cost, error = _staged(levels, limit / MEAN_ABSOLUTE, n_samples, population)
            if error <= SAFETY * rtol and cost < best["cost"]:
                best = {"n_samples": n_samples, "limit": float(limit), "cost": float(cost)}
                best["error"] = float(error)
    return best


def _staged(
    levels: Sequence[Level], limit: float, n_samples: int, population: Any
) -> tuple[float, float]:
    """Mean of the cost, and of the errors, one standard error on the safe side."""
    n_queries = len(levels[0].spread)
    left, before, rows, errors = np.arange(n_queries), n_queries, 0.0, []
    for level in levels:
        stops = stages(history_of(n_samples, level.history), n_samples, population)
        if level is not levels[-1]:
            stops = stops[:2]
        rows += level.cost[left].sum()
        for seen, last in itertools.pairwise(stops):
            if before == 0:  # else some of many queries come here, though none of the pilot's
                break
            size, before = last - seen, len(left)
            rows += max(before, SHARED * n_queries) * (last if seen == stops[0] else size)
            if last == population:
                rows += before * N_PILOT
                left = left[:0]
                break
            final = level.known(_known_of(seen))[left] <= limit * np.sqrt(size)
            done, left = left[final], left[~final]
            rest = np.sqrt((1 - size / (population - seen)) / size)
            errors.append(np.minimum(MEAN_ABSOLUTE * rest * level.spread[done], 2))
    every = np.concatenate(errors) if errors else np.zeros(0)
    if len(every) == 0:
        return rows / n_queries, 0.0
    mean = every.sum() / len(every)
    return rows / n_queries, mean + np.sqrt(((every - mean) ** 2).sum()) / len(every)


def _known_of(seen: int) -> int:
    """A history of about as many rows, one of few sizes."""
    return seen if seen < 2 * N_PILOT else 1 << (int(seen).bit_length() - 1)


def counted(log: np.ndarray, negligible: float) -> np.ndarray:
    """What share of a relative error counts, of sums whose logs are given.

    negligible: log of the sum below which an error relative to that sum is enough.
    """
    return np.exp(np.minimum(log - negligible, 0))


class Answers:
    """Sums for queries: over all rows, of which there are n_rows, until a sample takes their place.

    cost: in rows, of what was read for each.
    """

    cost: np.ndarray

    def __init__(self, sums: Sums, n_rows: int) -> None:
        n = len(sums.total)
        self.sums, self.error = sums, np.zeros(n)
        self.rows, self.sampled = np.full(n, n_rows), np.full(n, n_rows)

    def put(self, places: np.ndarray, known: Sums, sample: Sums, rows: Any, sampled: Any) -> None:
        """Of some queries known sums, and the `expected` one of the rows that a sample stands for.

        Of known sums the squares, which are no variances, are not wanted.
        """
        whole = known + sample
        self.sums[places] = whole
        self.error[places] = np.sqrt(sample.squares) * relative(sample.shift, whole.shift)
        self.rows[places], self.sampled[places] = rows, sampled

    def estimate(self, weight: float, at_risk: np.ndarray | None = None) -> Estimate:
        """Means over rows of that weight."""
        mean, error = self.sums.total / weight, self.error / weight
        at_risk = None if at_risk is None else at_risk / weight
        of_rows = self.rows, at_risk, self.cost, self.sampled
        return Estimate(self.sums.shift, mean, error, *of_rows)


def stages_of(settings: dict[str, Any]) -> Stages:
    """`Stages` from a method's settings."""
    n_samples = checks.integer("n_samples", settings["n_samples"], 1)
    limit = checks.positive("limit", settings["limit"])
    logs = {}
    for name in ("least", "negligible", "unseen"):
        value = finite_or_none(name, settings.get(name))
        logs[name] = -np.inf if value is None else value
    return Stages(n_samples, limit, **logs)


class Stages:
    """Which queries need a larger sample, read off a history of rows that are summed exactly.

    n_samples: of the first sample. limit: the relative error, as the history foretells it, from
    which on a query needs more. least: the log of the sum, as foretold, below which it does: less
    than all of the pilot's queries have, about which tuning found nothing out. negligible: as of
    `counted`. unseen: log of a variance, for a sample of one row and over the sum, that a history
    may not show; set where rtol is a bound.
    """

    def __init__(
        self,
        n_samples: int,
        limit: float,
        least: float = -np.inf,
        negligible: float = -np.inf,
        unseen: float = -np.inf,
    ) -> None:
        self.n_samples, self.limit, self.least = n_samples, limit, least
        self.negligible, self.unseen = negligible, unseen

    def stops(self, n_rows: int, stop: int, least: int = N_PILOT) -> list[int]:
        """Where the history and the samples of n_rows end, of which those up to `stop` count.

        `stop` takes the place of n_rows alone: other samples are the same with and without it.
        least: of the rows of the history.
        """
        stops = stages(history_of(self.n_samples, least), min(self.n_samples, n_rows), n_rows)
        return [x for x in stops[:-1] if x < stop] + [stop]

    def enough(self, foretold: np.ndarray, log: np.ndarray, n_sampled: Any) -> np.ndarray:
        """For which queries a sample does.

        foretold: their relative error of a sample of one row. log: of their sums, as foretold.
        """
        if self.unseen > -np.inf:
            foretold = np.maximum(foretold, np.exp(np.minimum(0.5 * (self.unseen - log), 700)))
        error = MEAN_ABSOLUTE * foretold * counted(log, self.negligible)
        enough = error <= self.limit * np.sqrt(np.maximum(n_sampled, 1))
        return enough & (np.maximum(log, self.negligible) >= self.least)

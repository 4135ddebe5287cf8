"""Calibration: a method's errors on queries that it was not tuned on, and what follows from them.

The last rows of the permutation are the queries, and the method estimates as if they had never
been (or queries that the user gave are). They are like the queries to come, so the share of
failures among them bounds the share to come (split conformal prediction, Vovk et al. 2005; with a
probability, risk-controlling prediction sets, Bates et al. 2021), whatever the data.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import binom

if TYPE_CHECKING:
    from lshkit.kde.method import Accuracy, Estimate, Method, Tuned
    from lshkit.kde.sums import Sums
    from lshkit.kde.training import PermutedRows

N_HELD_OUT = 1024
WITHIN, BEYOND = 3.0, 0.015  # errors within so many stated ones, but for this share of the queries
RISK = 0.05  # probability that a share that is too large passes
CLEAR = 1 + 1e-5  # of WITHIN: else rounding decides where queries repeat the held-out ones
STATED_RISK = 0.01  # the same of BEYOND
MOVED = 3.1  # standard deviations that the errors of near queries move by; 1 / 1,000 go further
MARGIN = np.log(2)  # by which a query's sum is less than the least that was seen
INFLATED, LARGEST = 1.5, 1.0  # stated errors over those observed, and over the density
TOLERATED = 1.3  # times rtol: what a few queries of a mean error of rtol may show
STEP, N_STEPS = 0.5**0.5, 16  # from a limit to the next smaller one


def most_failures(n: int, share: float, risk: float = RISK) -> int:
    """The most failures among n by which the share is below `share`; -1 where none shows it.

    A larger share would show so few with a probability of at most `risk`.
    """
    most = int(binom.ppf(risk, n, share))
    return most if binom.cdf(most, n, share) <= risk else most - 1


def of_logarithm(ratio: np.ndarray) -> np.ndarray:
    """log(ratio) / (ratio - 1) of ratios up to 1, at most what it is at 1/2, 1.39.

    So of estimates that are more than twice the density, logarithms do not count in full.
    """
    ratio = np.clip(ratio, 0.5, 1 - 1e-9)
    return np.log(ratio) / (ratio - 1)


def least_of(sums: Sums) -> float:
    """Log of a sum that is below those of some queries: one of less is unlike them all."""
    return float(np.nan_to_num(sums.log().min() - MARGIN))


class HeldOut:
    """Queries and their exact sums over the permuted rows before `stop`.

    Without queries given, the rows from `stop` on are the queries: of a sample that is a head of
    the permutation they see what all queries see.
    """

    def __init__(
        self,
        permuted: PermutedRows,
        threads: int,
        given: np.ndarray | None = None,
        stop: int | None = None,
    ) -> None:
        self.permuted, self.threads = permuted, threads
        n = len(permuted)
        self.stop: int | None = n - min(N_HELD_OUT, n // 8) if stop is None else stop
        if given is None:
            self.queries = np.asarray(permuted.rows[self.stop :], np.float64)
        else:
            self.queries, self.stop = given, None

    def __len__(self) -> int:
        return len(self.queries)

    def of(self, method: Method) -> HeldOut:
        """The same with queries that are unknown to the method."""
        if self.stop is None or self.stop >= method.looked_up:
            return self
        return HeldOut(self.permuted, self.threads, stop=method.looked_up)

    @functools.cached_property
    def sums(self) -> Sums:
        stop = len(self.permuted) if self.stop is None else self.stop
        return self.permuted.sums(self.queries, 0, stop, self.threads)

    @functools.cached_property
    def share(self) -> float:
        """Of the weights of all rows, those before `stop`."""
        if self.stop is None:
            return 1.0
        weights = self.permuted.weights
        if weights is None:
            return self.stop / len(self.permuted)
        return float(weights[: self.stop].sum() / self.permuted.training.total)

    @functools.cached_property
    def repeated(self) -> np.ndarray:
        """Which queries are equal to another one."""
        _, of_query, counts = np.unique(
            self.queries, axis=0, return_inverse=True, return_counts=True
        )
        return (counts > 1)[of_query.reshape(-1)]

    @functools.cached_property
    def to_come(self) -> HeldOut:
        """The repeated queries where all rows count: as queries to come that equal them will be."""
        return HeldOut(self.permuted, self.threads, given=self.queries[self.repeated])

    def run(self, method: Method) -> Run:
        return Run(self, method, method.sampled(self.queries, self.threads, self.stop))


class Run:
    """Estimates of the held-out queries and their errors, and the exact ones: times exp(shift).

    All are means over the rows before `stop`: what is stated of them grows with the root of a
    mean, and would be too small were they relative to more rows.
    """

    to_come: Run | None = None  # of the repeated queries

    def __init__(self, held_out: HeldOut, method: Method, got: Estimate) -> None:
        sums, training = held_out.sums, held_out.permuted.training
        n = len(held_out.permuted)
        n_rows = held_out.stop or n
        self.cost, self.read_all = got.cost, got.rows >= n_rows
        # The variance that the rows add which queries to come see besides, over the sample's own.
        unread = np.maximum(n_rows - got.rows, 1)
        more = (n - n_rows) * got.sampled
        self.added = np.minimum(more / (unread * (unread + got.sampled)), 1)
        self.repeated = held_out.repeated
        mine = np.where(got.mean == 0, -np.inf, got.shift)  # an estimate of 0 has any
        self.shift = np.maximum(mine, sums.shift)
        with np.errstate(invalid="ignore", divide="ignore"):
            mine, exact = (
                np.where(x > -np.inf, np.exp(x - self.shift), 0) for x in (mine, sums.shift)
            )
            # In logs: of an estimate that missed what dominates, it is below any float64.
            self.log_at_risk = got.shift - self.shift + np.log(np.maximum(got.at_risk, 0))
        self.mean = got.mean * mine
        self.error = got.error * np.where(got.error == np.inf, 1, mine)
        self.exact = sums.total / training.total * exact
        if 0 < (share := held_out.share) < 1:  # methods know the weight of all rows alone
            self.mean, self.error, self.exact = (
                x / share for x in (self.mean, self.error, self.exact)
            )
            self.log_at_risk = self.log_at_risk - np.log(share)
        self.log_at_risk = np.maximum(self.log_at_risk, method.least_at_risk - self.shift)
        self.off = np.where(self.read_all, 0, np.abs(self.mean - self.exact))

    def relative_errors(self, most: float, negligible: float) -> np.ndarray:
        """Of the larger of the exact density and the negligible one, at most `most`."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            wanted = np.maximum(self.exact, self._scaled(negligible))
            return np.where(self.off > 0, np.fmin(self.off / wanted, most), 0)

    def _scaled(self, mean: float) -> np.ndarray:
        """A mean over exp(shift)."""
        with np.errstate(over="ignore", divide="ignore"):
            return np.exp(np.log(np.float64(mean)) - self.shift)

    def failures(self, accuracy: Accuracy) -> int:
        """How many errors are larger than rtol."""
        return int((self.relative_errors(np.inf, accuracy.negligible) > accuracy.rtol).sum())

    def inflation(self, floor: float | None, most: float, negligible: float) -> tuple[float, float]:
        """The median error that is stated with the floor, and over those observed.

        As `relative_errors`.
        """
        if floor is None:
            return 0.0, 0.0
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            least = np.exp((floor - self.shift + self.log_at_risk) / 2)
            stated = np.where(self.read_all, 0, np.maximum(least, self.error))
            stated = stated / np.maximum(self.mean, self._scaled(negligible))
            observed = self.relative_errors(most, negligible)
            median = float(np.nanmedian(stated))
            return median, float(median / np.sqrt((observed**2).mean()))

    def error_floor(self, *, moved: bool = True) -> float | None:
        """The least that leaves few enough estimates off by more than WITHIN stated errors.

        In densities, and in their logarithms, where estimates that are too large are farther off.
        Of those that are not exact. Queries to come see the held-out rows as well, which moves
        their errors. moved: with what that may add; of repeated queries it is known.
        """
        wanted = self._floors(moved)
        if moved and self.to_come is not None:
            wanted[self.repeated] = self.to_come._floors(False)
        wanted = np.sort(wanted)[::-1]
        least = wanted[max(most_failures(int(np.sum(~self.read_all)), BEYOND, STATED_RISK), 0)]
        return float(least) if np.isfinite(least) else None

    def _floors(self, moved: bool) -> np.ndarray:
        """The floor that each query needs, -inf for none.

        The errors of near queries move together: were they just within what is stated here, they
        might all be beyond it there. moved: with MOVED deviations of the stated errors more, and
        at least one of the error.
        """
        off = self.off
        if moved:
            stated = np.where(self.error < np.inf, self.error, 0)  # of inf none is short
            off = off + np.sqrt(self.added) * np.maximum(off, MOVED * stated)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            off = off * of_logarithm(np.where(self.mean > self.exact, self.exact / self.mean, 1))
            wanted = self.shift + 2 * np.log(CLEAR * off / WITHIN) - self.log_at_risk
        short = (off > WITHIN * self.error) & (self.log_at_risk > -np.inf)
        return np.where(short, wanted, -np.inf)


def calibrate(
    tuned: Tuned, held_out: HeldOut, accuracy: Accuracy
) -> tuple[Method, bool, float, float]:
    """A tuned method with its error floor, whether it keeps the accuracy, and its inflation.

    That is the median stated relative error (of negligible densities, of the largest such), and
    this over the root mean square of the errors, both of the queries as they were held out. Where
    the median is more than LARGEST it says nothing, and the accuracy does not count as kept.

    The settings get what was found out: "error" on the held-out queries, "error_floor", and with a
    confidence all that `_bound` says.
    """
    method, settings = tuned.make(), tuned.settings
    held_out = held_out.of(method)
    if len(held_out) == 0:
        return method, accuracy.confidence is None, 0.0, 0.0
    if accuracy.at_risk > 0:
        settings["least_at_risk"] = method.least_at_risk = math.log(accuracy.at_risk)
    stages = getattr(method, "stages", None)
    if stages is not None:  # what is seen here is not unlike all queries
        stages.least = min(stages.least, least_of(held_out.sums))
        settings["least"] = stages.least
    run = held_out.run(method)
    if accuracy.confidence is not None:
        run, kept = _bound(method, settings, held_out, run, accuracy)
    settings["error"] = float(run.relative_errors(method.most, accuracy.negligible).mean())
    if accuracy.confidence is None:
        kept = settings["error"] <= TOLERATED * accuracy.rtol
    if held_out.stop is not None and held_out.repeated.any():
        run.to_come = held_out.to_come.run(method)
    settings["error_floor"] = method.error_floor = run.error_floor()
    stated, ratio = run.inflation(run.error_floor(moved=False), method.most, accuracy.negligible)
    return method, kept and stated <= LARGEST, stated, ratio


def _bound(
    method: Method, settings: dict[str, Any], held_out: HeldOut, run: Run, accuracy: Accuracy
) -> tuple[Run, bool]:
    """Sets the stages of a method to the cheapest that keep its errors below rtol.

    The run with them, and whether they do. Tried are falling limits, the larger the cheaper, for
    errors as histories foretell them and with what these may not show. In the settings: "unseen"
    and "limit" of `Stages`, "cost" as far as they change it, and the share of the queries that are
    "read_in_full".
    """
    assert accuracy.confidence is not None
    share, stages = 1 - accuracy.confidence, getattr(method, "stages", None)
    if stages is None:
        settings["read_in_full"] = 0.0
        return run, run.failures(accuracy) <= most_failures(len(held_out), share)
    floor = run.error_floor(moved=False)
    unseen = [-np.inf]
    if floor is not None:
        unseen.append(floor + np.log(method.training.total * stages.n_samples))
    most = most_failures(len(held_out), share, RISK / len(unseen))  # of each row of limits
    best, kept = (float(len(method.training.X)), stages.limit, stages.unseen, run), False
    for stages.unseen in unseen:
        for step in range(N_STEPS):
            stages.limit = accuracy.rtol * STEP**step
            run = held_out.run(method)
            cost = float(run.cost.mean())
            if cost >= best[0]:
                break
            if run.failures(accuracy) <= most:
                best, kept = (cost, stages.limit, stages.unseen, run), True
                break
    cost, stages.limit, stages.unseen, run = best
    if kept:
        settings["cost"] = float(cost)
    settings["limit"] = stages.limit
    settings["unseen"] = float(stages.unseen) if stages.unseen > -np.inf else None
    settings["read_in_full"] = float(run.read_all.mean())
    return run, kept

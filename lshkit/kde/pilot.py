"""Choice of the method: what each would cost at the requested error, from a few queries."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from lshkit import checks
from lshkit.kde.calibration import (
    INFLATED,
    LARGEST,
    N_HELD_OUT,
    STEP,
    HeldOut,
    calibrate,
    least_of,
)
from lshkit.kde.cells import Cells
from lshkit.kde.method import Accuracy, Method, Tuned
from lshkit.kde.methods import METHODS
from lshkit.kde.samples import N_PILOT, N_PILOT_QUERIES, counted, relative_spread
from lshkit.kde.sums import Sums
from lshkit.kde.training import PermutedRows, Training

logger = logging.getLogger("lshkit.kde")

REACHED = 1.05  # times rtol: an expected error that is taken for rtol
N_TRIES = 4  # to tune a method for smaller errors
AWAY = 1e15  # that a query is taken to be off, so that float32 holds its distances


class Pilot:
    """Queries, and their sums over the permuted rows after the first `n_pilot`.

    Without queries, those first rows are the queries. All is made when it is first asked for.
    """

    def __init__(
        self,
        training: Training,
        accuracy: Accuracy,
        threads: int,
        queries: np.ndarray | None = None,
        permuted: PermutedRows | None = None,
    ) -> None:
        self.training, self.accuracy, self.threads = training, accuracy, threads
        self.given = queries
        with np.errstate(divide="ignore"):  # log of the sum
            self.negligible = np.log(np.float64(accuracy.negligible)) + np.log(training.total)
        self._histories: dict[int, Sums] = {}
        self._permuted = permuted

    @functools.cached_property
    def permuted(self) -> PermutedRows:
        return PermutedRows(self.training) if self._permuted is None else self._permuted

    @functools.cached_property
    def n_pilot(self) -> int:
        """The pilot's own rows."""
        return min(N_PILOT, len(self.permuted) // 2)

    @property
    def population(self) -> int:
        """Permuted rows behind these."""
        return len(self.permuted) - self.n_pilot

    @functools.cached_property
    def cells(self) -> Cells:
        return Cells(self.permuted, self.threads)

    @functools.cached_property
    def queries(self) -> np.ndarray:
        if self.given is None:
            rows = self.permuted.rows[: min(self.n_pilot, N_PILOT_QUERIES)]
            return np.asarray(rows, np.float64)
        return self.some_given(N_PILOT_QUERIES)

    def some_given(self, most: int) -> np.ndarray:
        """Of the queries given, evenly spaced, scaled."""
        assert self.given is not None
        some = np.linspace(0, len(self.given) - 1, min(len(self.given), most)).astype(int)
        return np.clip(self.training.geometry.scale(self.given[some]), -AWAY, AWAY)

    @functools.cached_property
    def sums(self) -> Sums:
        return self._sums(self.n_pilot, len(self.permuted))

    @property
    def thresholds(self) -> dict[str, float | None]:
        """Logs of sums, for `Stages`: below those of the queries, one is unlike them all."""
        return {
            "least": least_of(self.sums),
            "negligible": None if self.negligible == -np.inf else float(self.negligible),
        }

    def counted(self, log: np.ndarray) -> np.ndarray:
        """What share of a relative error counts, of sums whose logs are given."""
        return counted(log, self.negligible)

    @functools.cached_property
    def spread(self) -> np.ndarray:
        return relative_spread(self.sums, self.population)

    def history(self, count: int) -> Sums:
        """Sums over the first rows after the pilot's own: what a method would know of it."""
        if count not in self._histories:
            self._histories[count] = self._sums(self.n_pilot, self.n_pilot + count)
        return self._histories[count]

    def _sums(self, first: int, last: int) -> Sums:
        return self.permuted.sums(self.queries, first, last, self.threads)


def choose(
    training: Training,
    algorithm: str,
    accuracy: Accuracy,
    threads: int,
    queries: np.ndarray | None = None,
    permuted: PermutedRows | None = None,
) -> tuple[Method, dict[str, Any]]:
    """The method of an algorithm and a report: `pick`, with a warning of what falls short.

    queries: rows as given, for the pilot; without, it takes rows of the data.
    """
    pilot = Pilot(training, accuracy, threads, queries, permuted)
    method, report, shortfall = pick(pilot, algorithm)
    if shortfall is not None:
        warnings.warn(
            f"algorithm={algorithm!r} {shortfall} on this data: 'auto' would choose another",
            stacklevel=checks.outside(),
        )
    return method, report


def pick(pilot: Pilot, algorithm: str) -> tuple[Method, dict[str, Any], str | None]:
    """The method of an algorithm ("auto": the cheapest that keeps the accuracy), and a report.

    Third, how an algorithm asked for by name falls short of the accuracy, None where it does not.
    Costs are in rows: what one row costs an exact sum or a sample. They are counted, not timed: the
    same data and seed always give the same method.
    """
    training, accuracy, auto = pilot.training, pilot.accuracy, algorithm == "auto"
    able = [m for m in METHODS.values() if training.geometry.kernel in m.kernels]
    exact = next(m for m in able if m.exact)
    asked = able if auto else [exact, METHODS[algorithm]]
    report = {"asked": algorithm, "n_samples": len(training.X), "queries": "rows"}
    report |= accuracy._asdict()
    why = _why_exact(asked, auto, len(training.X), accuracy.mean)
    if why is not None:
        tuned = _tuned([exact], pilot, auto)
        return tuned[exact.name].make(), _reported(report, tuned, exact.name, why), None
    tuned = _tuned(asked, pilot, auto)
    report["queries"] = "rows" if pilot.given is None else "given"
    means = np.exp(pilot.sums.shift) * pilot.sums.total / training.total
    report["median_kernel_mean"] = float(np.median(means))
    given = None if pilot.given is None else pilot.some_given(N_HELD_OUT)
    held_out = HeldOut(pilot.permuted, pilot.threads, given)
    if auto:
        name, method, why = _cheapest(tuned, pilot, held_out, accuracy)
        return method, _reported(report, tuned, name, why), None
    expected = tuned[algorithm].settings["error"]  # of the pilot's queries
    method, kept, stated = _calibrated(algorithm, tuned, pilot, held_out, accuracy)
    report = _reported(report, tuned, algorithm, "asked for")
    return method, report, _shortfall(expected, kept, stated, accuracy)


def _why_exact(asked: Sequence[type[Method]], auto: bool, n: int, rtol: float) -> str | None:
    """Why the exact method is taken without a pilot; None where it is not."""
    if all(m.exact for m in asked):
        return "the only method for this kernel" if auto else "asked for"
    if auto and rtol == 0:
        return "rtol is 0"
    return "few rows" if n < (4 * N_PILOT if auto else 4) else None


def _tuned(methods: Sequence[type[Method]], pilot: Pilot, auto: bool) -> dict[str, Tuned]:
    """By name the methods that can be used; for "auto", the first and those that may be cheaper."""
    tuned: dict[str, Tuned] = {}
    n, rtol = len(pilot.training.X), pilot.accuracy.mean
    for method in methods:
        if auto and tuned and not _is_worthwhile(method, n, tuned, rtol):
            continue
        if (found := method.tune(pilot, rtol)) is not None:
            tuned[method.name] = found
    return tuned


def _reported(
    report: dict[str, Any], tuned: dict[str, Tuned], name: str, why: str
) -> dict[str, Any]:
    """The report with all methods and the one that is taken, which are logged too."""
    methods = {k: found.settings for k, found in tuned.items()}
    costs = ", ".join(f"{k} {v['cost']:.0f}" for k, v in methods.items())
    logger.info("algorithm %s (%s); cost of a query in rows: %s", name, why, costs)
    return report | {"methods": methods, "algorithm": name, "reason": why}


def _shortfall(expected: float, kept: bool, stated: float, accuracy: Accuracy) -> str | None:
    """How an algorithm that was asked for does not keep the accuracy, or says nothing about it by
    the errors that it states; None where it does."""
    if accuracy.confidence is not None and not kept:
        wanted = f"rtol={accuracy.rtol:g} with a probability of {accuracy.confidence:g}"
        return f"cannot be shown to keep {wanted}"
    if accuracy.confidence is None and expected > REACHED * accuracy.rtol:
        error = f"an expected mean relative error of {expected:.2g}"
        return f"has {error}, more than rtol={accuracy.rtol:g}"
    if stated > LARGEST:
        error = f"a median relative error of {stated:.2g}"
        return f"states {error} (some estimates are off by as much, it cannot tell which)"
    return None


def _is_worthwhile(method: type[Method], n: int, tuned: dict[str, Tuned], rtol: float) -> bool:
    """Whether "auto" tunes a method after others: that may need cells or tables of all rows."""
    cheapest = min(found.settings["cost"] for found in tuned.values() if _reaches(found, rtol))
    return n >= method.min_rows and cheapest > method.worth


def _reaches(found: Tuned, rtol: float) -> bool:
    return found.settings["error"] <= REACHED * rtol


def _calibrated(
    name: str, tuned: dict[str, Tuned], pilot: Pilot, held_out: HeldOut, accuracy: Accuracy
) -> tuple[Method, bool, float]:
    """The method as it was calibrated, whether it keeps the accuracy on the held-out queries, and
    the median relative error that it states.

    Where it does not, or where the errors are so rare and large that those stated would have to
    exceed them for most queries, it is tuned for smaller ones. Where that is so of all trials, the
    one that states the least variance for its cost is taken, of those that keep the accuracy.
    """
    rtol, best = accuracy.mean, (False, -np.inf)
    for i in range(N_TRIES + 1):
        trial = tuned[name] if i == 0 else METHODS[name].tune(pilot, rtol)
        if trial is None or (i > 0 and trial.settings["cost"] >= pilot.population):
            break
        method, kept, stated, inflation = calibrate(trial, held_out, accuracy)
        worth = kept, -trial.settings["cost"] * stated * stated  # of floats ** would overflow
        accepted = kept and inflation <= INFLATED
        if i == 0 or accepted or worth > best:
            best, chosen = worth, (trial, method, stated)
        if accepted:
            break
        rtol *= STEP
    tuned[name], method, stated = chosen
    return method, best[0], stated


def _cheapest(
    tuned: dict[str, Tuned], pilot: Pilot, held_out: HeldOut, accuracy: Accuracy
) -> tuple[str, Method, str]:
    """Of the methods that reach rtol the name, the method and the reason.

    It is tried on the held-out queries, where it must keep the accuracy: if it does not, or costs
    more there than the next would, that is tried too.
    """
    able = [name for name in tuned if _reaches(tuned[name], accuracy.mean)]
    able.sort(key=lambda name: tuned[name].settings["cost"])
    best: tuple[float, str, Method] | None = None
    failed = []
    for name in able:
        if best is not None and best[0] <= tuned[name].settings["cost"]:
            break
        if METHODS[name].exact:
            method, kept = tuned[name].make(), True
        else:
            method, kept, _ = _calibrated(name, tuned, pilot, held_out, accuracy)
        cost = tuned[name].settings["cost"]
        if not kept:
            failed.append(name)
        elif best is None or cost < best[0]:
            best = cost, name, method
    why = "the cheapest of " + ", ".join(able)
    if failed:
        why = "the cheapest that kept rtol on held-out queries (not " + ", ".join(failed) + ")"
    assert best is not None  # brute force keeps all
    return best[1], best[2], why

"""Choice of the method: what each would cost at the requested error, from a few queries."""

from __future__ import annotations

import functools
import logging
import warnings
from typing import Any

import numpy as np

from lshkit import checks
from lshkit.kde.calibration import INFLATED, N_HELD_OUT, STEP, HeldOut, calibrate, least_of
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
        threads: int,
        negligible: float = -np.inf,
        queries: np.ndarray | None = None,
        permuted: PermutedRows | None = None,
    ) -> None:
        self.training, self.threads, self.given = training, threads, queries
        self.negligible = negligible  # log of the sum
        self.n_pilot = min(N_PILOT, len(training.X) // 2)
        self.population = len(training.X) - self.n_pilot
        self._histories: dict[int, Sums] = {}
        self._permuted = permuted

    @functools.cached_property
    def permuted(self) -> PermutedRows:
        return PermutedRows(self.training) if self._permuted is None else self._permuted

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
        return self._sums(self.n_pilot, len(self.training.X))

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
    *,
    warn: bool = True,
) -> tuple[Method, dict[str, Any]]:
    """The method of an algorithm ("auto": the cheapest that keeps an `Accuracy`), and a report.

    queries: rows as given, for the pilot; without, it takes rows of the data. warn: where the
    algorithm does not keep the accuracy.

    Costs are in rows: what one row costs an exact sum or a sample. They are counted, not timed: the
    same data and seed always give the same method.
    """
    n, auto, rtol = len(training.X), algorithm == "auto", accuracy.mean
    able = [m for m in METHODS.values() if training.geometry.kernel in m.kernels]
    exact = next(m for m in able if m.exact)
    asked = able if auto else [exact, METHODS[algorithm]]
    why = None
    if all(m.exact for m in asked):
        why = "the only method for this kernel" if auto else "asked for"
    elif auto and rtol == 0:
        why = "rtol is 0"
    elif n < (4 * N_PILOT if auto else 4):
        why = "few rows"
    with np.errstate(divide="ignore"):
        negligible = np.log(np.float64(accuracy.negligible)) + np.log(training.total)
    pilot = Pilot(training, threads, negligible, queries, permuted)
    tuned: dict[str, Tuned] = {}
    if (found := exact.tune(pilot, rtol)) is not None:
        tuned[exact.name] = found
    report: dict[str, Any] = {
        "asked": algorithm,
        "n_samples": n,
        "queries": "rows",
        **accuracy._asdict(),
    }
    if why is None:
        for method in asked[1:]:
            if auto and not _is_worthwhile(method, n, tuned, rtol):
                continue
            found = method.tune(pilot, rtol)
            if found is not None:
                tuned[method.name] = found
        report["queries"] = "rows" if queries is None else "given"
        means = np.exp(pilot.sums.shift) * pilot.sums.total / training.total
        report["median_kernel_mean"] = float(np.median(means))
    if why is not None:
        name, method = exact.name, tuned[exact.name].make()
    else:
        given = None if queries is None else pilot.some_given(N_HELD_OUT)
        held_out = HeldOut(pilot.permuted, threads, given)
        if auto:
            name, method, why = _cheapest(tuned, pilot, held_out, accuracy)
        else:
            name, why, expected = algorithm, "asked for", tuned[algorithm].settings["error"]
            method, kept = _calibrated(name, tuned, pilot, held_out, accuracy)
            if warn:
                _warn(name, expected, kept, accuracy)
    report["methods"] = methods = {name: found.settings for name, found in tuned.items()}
    report |= {"algorithm": name, "reason": why}
    costs = ", ".join(f"{k} {v['cost']:.0f}" for k, v in methods.items())
    logger.info("algorithm %s (%s); cost of a query in rows: %s", name, why, costs)
    return method, report


def _warn(name: str, expected: float, kept: bool, accuracy: Accuracy) -> None:
    """Where the algorithm that was asked for does not keep the accuracy."""
    if accuracy.confidence is not None and not kept:
        off = f"cannot be shown to keep rtol={accuracy.rtol:g} with a probability of " + (
            f"{accuracy.confidence:g}"
        )
    elif accuracy.confidence is None and expected > REACHED * accuracy.rtol:
        off = f"has an expected mean relative error of {expected:.2g}"
        off += f", more than rtol={accuracy.rtol:g}"
    else:
        return
    warnings.warn(
        f"algorithm={name!r} {off} on this data: 'auto' would choose another",
        stacklevel=checks.outside(),
    )


def _is_worthwhile(method: type[Method], n: int, tuned: dict[str, Tuned], rtol: float) -> bool:
    """Whether "auto" tunes a method after others: that may need cells or tables of all rows."""
    cheapest = min(found.settings["cost"] for found in tuned.values() if _reaches(found, rtol))
    return n >= method.min_rows and cheapest > method.worth


def _reaches(found: Tuned, rtol: float) -> bool:
    return found.settings["error"] <= REACHED * rtol


def _calibrated(
    name: str, tuned: dict[str, Tuned], pilot: Pilot, held_out: HeldOut, accuracy: Accuracy
) -> tuple[Method, bool]:
    """The method as it was calibrated, and whether it keeps the accuracy on the held-out queries.

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
            best, chosen = worth, (trial, method)
        if accepted:
            break
        rtol *= STEP
    tuned[name], method = chosen
    return method, best[0]


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
            method, kept = _calibrated(name, tuned, pilot, held_out, accuracy)
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

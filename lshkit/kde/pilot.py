"""Choice of the method: what each would cost at the requested error, from a few queries."""

import functools
import logging
import warnings

import numpy as np

from lshkit.kde.methods import METHODS
from lshkit.kde.random_sampling import N_PILOT, N_PILOT_QUERIES, relative_spread
from lshkit.kde.sums import PermutedRows

logger = logging.getLogger("lshkit.kde")

REACHED = 1.05  # times rtol: an expected error that is taken for rtol
MARGIN = np.log(2)  # by which a query's sum is less than the least of the pilot's
AWAY = 1e15  # that a query is taken to be off, so that float32 holds its distances
TOLERATED = 1.3  # times rtol: what a few queries of a mean error of rtol may show


class Pilot:
    """Queries, and their sums over the permuted rows after the first `n_pilot`, up to `stop`.

    Without queries, those first rows are the queries. All is made when it is first asked for.
    """

    def __init__(self, training, threads, queries=None, permuted=None, stop=None):
        self.training, self.threads, self.given = training, threads, queries
        self.stop = len(training.X) if stop is None else min(stop, len(training.X))
        self.n_pilot = min(N_PILOT, len(training.X) // 2)
        self.population = self.stop - self.n_pilot
        self._histories = {}
        if permuted is not None:
            self.permuted = permuted

    @functools.cached_property
    def permuted(self):
        return PermutedRows(self.training)

    @functools.cached_property
    def queries(self):
        if self.given is None:
            rows = self.permuted.rows[: min(self.n_pilot, N_PILOT_QUERIES)]
            return np.asarray(rows, np.float64)
        n = len(self.given)
        some = np.linspace(0, n - 1, min(n, N_PILOT_QUERIES)).astype(int)
        return np.clip(self.training.geometry.scale(self.given[some]), -AWAY, AWAY)

    @functools.cached_property
    def sums(self):
        return self._sums(self.n_pilot, self.stop)

    @functools.cached_property
    def least(self):
        """log of a sum that is below those of the queries: one of less is unlike them all."""
        return float(np.nan_to_num(self.sums.log().min() - MARGIN))

    @functools.cached_property
    def spread(self):
        return relative_spread(self.sums, self.population)

    def history(self, count):
        """Sums over the first rows after the pilot's own: what a method would know of it."""
        if count not in self._histories:
            self._histories[count] = self._sums(self.n_pilot, self.n_pilot + count)
        return self._histories[count]

    def among(self, count):
        """The same with only so many rows after the pilot's own."""
        stop = self.n_pilot + count
        return Pilot(self.training, self.threads, self.given, self.permuted, stop)

    def error_of(self, method):
        """Mean relative error of a method on the queries, which are no rows."""
        exact = self._sums(0, self.n_pilot) + self.sums
        got = method.estimate(self.queries, self.threads, scaled=True)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            ratio = np.exp(got.shift - exact.shift) * got.mean * self.training.total / exact.total
        return float(np.minimum(np.abs(ratio - 1), method.most).mean())

    def _sums(self, first, last):
        return self.permuted.sums(self.queries, first, last, self.threads)


def choose(training, algorithm, rtol, threads, queries=None, permuted=None):
    """The method of an algorithm ("auto": the cheapest that reaches rtol), and a report.

    queries: rows as given, for the pilot; without, it takes rows of the data.

    Costs are in rows: what one row costs an exact sum. They are counted, not timed: the same data
    and seed always give the same method.
    """
    n, auto = len(training.X), algorithm == "auto"
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
    pilot = Pilot(training, threads, queries, permuted)
    tuned = {exact.name: exact.tune(pilot, rtol)}
    report = {"asked": algorithm, "rtol": float(rtol), "n_samples": n, "queries": "rows"}
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
    report["methods"] = methods = {name: found.settings for name, found in tuned.items()}
    if why is not None:
        name, method = exact.name, tuned[exact.name].make()
    elif auto:
        name, method, why = _cheapest(pilot, tuned, rtol)
    else:
        name, method, why = algorithm, tuned[algorithm].make(), "asked for"
        error = methods[algorithm]["error"]
        if error > REACHED * rtol:
            warnings.warn(
                f"algorithm={algorithm!r} has an expected mean relative error of {error:.2g} on "
                f"this data, more than rtol={rtol:g}: 'auto' would choose another",
                stacklevel=5,
            )
    report |= {"algorithm": name, "reason": why}
    costs = ", ".join(f"{k} {v['cost']:.0f}" for k, v in methods.items())
    logger.info("algorithm %s (%s); cost of a query in rows: %s", name, why, costs)
    return method, report


def _is_worthwhile(method, n, tuned, rtol):
    """Whether "auto" tunes a method after others: it takes hash tables of all rows to do so."""
    cheapest = min(found.settings["cost"] for found in tuned.values() if _reaches(found, rtol))
    return n >= method.min_rows and cheapest > method.worth


def _reaches(found, rtol):
    return found.settings["error"] <= REACHED * rtol


def _cheapest(pilot, tuned, rtol):
    """Of the methods that can reach rtol the name, the method and the reason.

    On given queries it is tried (rows of the data would find themselves), and must keep rtol.
    """
    able = [name for name in tuned if _reaches(tuned[name], rtol)]
    able.sort(key=lambda name: tuned[name].settings["cost"])
    why = "the cheapest of " + ", ".join(able)
    for name in able:
        method = tuned[name].make()
        if pilot.given is None or method.exact:
            break
        tuned[name].settings["error"] = error = pilot.error_of(method)
        if error <= TOLERATED * rtol:
            break
        why = "the cheapest that kept rtol on the queries"
    return name, method, why

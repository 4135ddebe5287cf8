"""What each method would cost at the wanted error, from a few rows of the data itself."""

import copy
import logging
import warnings

import numpy as np

from lshkit.kde import trials as trials_
from lshkit.kde.exact import BruteForce
from lshkit.kde.hashed import Buckets
from lshkit.kde.kernels import COMPACT
from lshkit.kde.methods import make, near_hasher
from lshkit.kde.random_sampling import (
    MOST,
    N_PILOT,
    N_PILOT_QUERIES,
    PermutedRows,
    cheapest_sample,
    relative_spread,
)

logger = logging.getLogger("lshkit.kde")

HASHED = ("near_far", "split", "hbe")
CALL = 100.0  # cost of a query's share in what `RandomSampling` does once for a batch of 256
MIN_HASHED = 20_000  # rows from which on auto tries hash tables
TOLERATED = 1.3  # times rtol: what a few queries of a mean error of rtol may show
WORTH_A_TRIAL = 4000  # cost of random sampling from which on it does
WORTH_TABLES = 3.0  # times the cost of the pick: near_far is tried again on the first queries


class Pilot:
    """Sums of the pilot's queries over the rows after its own.

    Its own rows are the first of the permutation; they are the queries too where none are given.
    """

    def __init__(self, training, threads, queries=None, permuted=None):
        self.training, self.threads = training, threads
        self.permuted = PermutedRows(training) if permuted is None else permuted
        self.stop = len(self.permuted)
        self.n_pilot = min(N_PILOT, self.stop // 2)
        if queries is None:
            queries = self.permuted.rows[: min(self.n_pilot, N_PILOT_QUERIES)]
            self.queries = np.asarray(queries, np.float64)
        else:
            self.queries = training.geometry.scale(queries[:N_PILOT_QUERIES])
        self.buckets = None  # of near_far
        self._sum_up()

    def _sum_up(self):
        self.population = self.stop - self.n_pilot
        self.sums = self.sums_of(self.n_pilot, self.stop)
        self.spread = relative_spread(self.sums, self.population)
        self._histories = {}

    def sums_of(self, first, last):
        return self.permuted.sums(self.queries, first, last, self.threads)

    def history(self, count):
        """Sums over the first rows after the pilot's own: what a method would know of a query."""
        if count not in self._histories:
            self._histories[count] = self.sums_of(self.n_pilot, self.n_pilot + count)
        return self._histories[count]

    def among(self, count):
        """The same with only so many rows after the pilot's own."""
        few = copy.copy(self)
        few.stop = min(self.n_pilot + count, self.stop)
        few._sum_up()
        return few


def random_sampling(pilot, rtol):
    """The cheapest settings of `RandomSampling` that keep rtol on the pilot's queries: a report."""

    def known(count):
        return relative_spread(pilot.history(count), count)

    return cheapest_sample(pilot.spread, known, pilot.population, CALL, rtol)


def choose(training, algorithm, rtol, threads, queries=None):
    """The method of an algorithm ("auto": the cheapest), and a report.

    queries: for the pilot; without, rows of the data.

    Costs are in rows: what one row costs brute force. They are counted, not timed: the same data
    and seed always give the same method.
    """
    n = len(training.X)
    exact = {"cost": float(n), "error": 0.0}
    report = {"n_samples": n, "rtol": float(rtol), "methods": {"brute": exact}}
    why = None
    if algorithm == "brute":
        why = "asked for"
    elif training.geometry.kernel in COMPACT:
        why = "the only one for a kernel that ends"
    elif algorithm == "auto" and (rtol == 0 or n < 4 * N_PILOT):
        why = "rtol is 0" if rtol == 0 else "few rows"
    elif n < 4:
        why = "too few rows to sample"
    if why is not None:
        return BruteForce(training), _finish(report, "brute", why)
    pilot = Pilot(training, threads, queries)
    report["median_kernel_mean"] = float(
        np.median(np.exp(pilot.sums.shift) * pilot.sums.total) / training.total
    )
    reports = report["methods"]
    reports["random"] = random_sampling(pilot, rtol)
    trials = {algorithm} & set(HASHED)
    if algorithm == "auto" and n >= MIN_HASHED:
        trials = {"bucket_sum"}  # None where the kernel is no collision probability
        if reports["random"]["cost"] > WORTH_A_TRIAL:
            trials |= set(HASHED)
    if "near_far" in trials:
        reports["near_far"], pilot.buckets = trials_.near_far(pilot, rtol)
    sketch = trials_.bucket_sum(pilot, rtol) if "bucket_sum" in trials else None
    if sketch is not None:
        reports["bucket_sum"] = sketch
    if trials & {"hbe", "split"}:
        reports |= trials_.hashed_draws(pilot, rtol, trials)
    if algorithm != "auto":
        error = reports[algorithm]["error"]
        if error > 1.05 * rtol:
            warnings.warn(
                f"algorithm={algorithm!r} has an expected mean relative error of {error:.2g} on "
                f"this data, more than rtol={rtol:g}: 'auto' would take another",
                stacklevel=5,
            )
        return _make(pilot, algorithm, reports), _finish(report, algorithm, "asked for")
    return _cheapest(pilot, report, rtol, queries is not None)


def _make(pilot, name, reports):
    buckets = pilot.buckets if name == "near_far" else None
    return make(name, reports[name], pilot.training, pilot.permuted, buckets)


def _cheapest(pilot, report, rtol, verify, ready=None):
    """The cheapest method of those that can reach rtol; verify: if it keeps it on the queries.

    ready: methods by name that need not be made.
    """
    reports = report["methods"]
    able = [name for name in reports if reports[name]["error"] <= 1.05 * rtol]
    able.sort(key=lambda name: reports[name]["cost"])
    why = "the cheapest of " + ", ".join(able)
    for name in able:
        method = (ready or {}).get(name) or _make(pilot, name, reports)
        if not verify or name == "brute":
            break
        reports[name]["error"] = measured_error(method, pilot)
        if reports[name]["error"] <= TOLERATED * rtol:
            break
        why = "the cheapest that kept rtol on the first queries"
    return method, _finish(report, name, why)


def choose_again(method, report, algorithm, rtol, threads, queries):
    """The pilot on the first queries: method and report, which says under "first_queries" how.

    What is sampled gets the sizes that these queries ask for, and "auto" the cheapest of the
    methods whose tables are there or pay. Where the pick misses rtol on them, unlike the rows as
    they are, "auto" chooses anew from all.
    """
    name, training = method.name, method.training
    permuted = None if name == "brute" else method.permuted
    pilot = Pilot(training, threads, queries, permuted)
    error = 0.0 if name == "brute" else measured_error(method, pilot)
    found = {"n": len(pilot.queries), "error": error, "algorithm": name}
    report = report | {"methods": {k: dict(v) for k, v in report["methods"].items()}}
    reports = report["methods"]
    tried = {"random", "near_far"} & set(reports)
    if algorithm != "auto":
        tried &= {name}
    elif "near_far" in tried and reports["near_far"]["cost"] > WORTH_TABLES * reports[name]["cost"]:
        tried.remove("near_far")
    _fit_sizes(pilot, method, reports, tried, rtol)
    if algorithm == "auto":
        again, report = _cheapest_again(pilot, method, report, tried, error, rtol)
        failed = again.name == "brute" and name != "brute"
    elif tried:
        again, failed = _make(pilot, name, reports), False
    else:
        again, failed = method, error > TOLERATED * rtol
    if failed:
        again, report = choose(training, algorithm, rtol, threads, queries)
    return again, report | {"first_queries": found}


def _fit_sizes(pilot, method, reports, tried, rtol):
    """Sizes of random and near_far, where they are tried, for the pilot's queries: into reports."""
    if "random" in tried:
        reports["random"] |= random_sampling(pilot, rtol)
    if "near_far" not in tried:
        return
    settings = reports["near_far"]
    if method.name == "near_far":
        pilot.buckets = method.buckets
    else:
        pilot.buckets = Buckets(pilot.permuted, near_hasher(pilot.training, settings), 0)
    settings |= trials_.near_far_with(pilot, pilot.buckets, rtol)
    if WORTH_A_TRIAL < min(x["cost"] for x in reports.values()):  # other tables may do better
        fitting, buckets = trials_.near_far(pilot, rtol)
        if fitting["cost"] < settings["cost"]:
            reports["near_far"], pilot.buckets = fitting, buckets


def _cheapest_again(pilot, method, report, tried, error, rtol):
    """The cheapest of brute force, the method in use and those that were tried; and a report."""
    name, reports = method.name, report["methods"]
    if name not in tried and name != "brute":
        # It was measured, not expected: an error that TOLERATED lets pass is no reason against it.
        reports[name]["error"] = error if error > TOLERATED * rtol else min(error, rtol)
    kept = tried | {name, "brute"}
    some = report | {"methods": {k: v for k, v in reports.items() if k in kept}}
    again, some = _cheapest(pilot, some, rtol, True, {} if name in tried else {name: method})
    return again, report | {"algorithm": some["algorithm"], "reason": some["reason"]}


def measured_error(method, pilot):
    """Mean relative error of a method on the pilot's queries, which are no rows."""
    exact = pilot.permuted.sums(pilot.queries, 0, pilot.n_pilot, pilot.threads) + pilot.sums
    got = method.estimate_scaled(pilot.queries, pilot.threads)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        ratio = np.exp(got.shift - exact.shift) * got.mean * pilot.training.total / exact.total
    return float(np.minimum(np.abs(ratio - 1), getattr(method, "most", MOST)).mean())


def _finish(report, name, why):
    report["algorithm"], report["reason"] = name, why
    costs = ", ".join(f"{k} {v['cost']:.0f}" for k, v in report["methods"].items())
    logger.info("algorithm %s (%s); cost of a query in rows: %s", name, why, costs)
    return report

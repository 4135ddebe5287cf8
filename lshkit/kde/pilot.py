"""What each method would cost at the wanted error, from a few rows of the data itself."""

import logging

import numpy as np

from lshkit.kde import trials as trials_
from lshkit.kde.exact import BruteForce
from lshkit.kde.kernels import COMPACT
from lshkit.kde.random_sampling import (
    MEAN_ABSOLUTE,
    N_PILOT,
    N_PILOT_QUERIES,
    SAFETY,
    PermutedRows,
    RandomSampling,
    history_of,
    relative_spread,
)
from lshkit.kde.sums import Sums

logger = logging.getLogger("lshkit.kde")

HASHED = ("near_far", "split", "hbe")
MIN_HASHED = 20_000  # rows from which on auto tries hash tables
TOLERATED = 1.3  # times rtol: what a few queries of a mean error of rtol may show
LIMITS = 1.0, 1.4, 1.8  # in rtol, of the error from which on a query gets more rows
MAX_LIMIT = 0.18  # of it: below what a history of 1/16 tells of a query that one row makes up
WORTH_A_TRIAL = 4000  # cost of random sampling from which on it does


class Pilot:
    """Sums of the pilot's queries over the rows after its own.

    Its own rows are the first of the permutation; they are the queries too where none are given.
    """

    def __init__(self, training, threads, queries=None):
        self.training = training
        self.permuted = PermutedRows(training)
        n = len(self.permuted)
        self.n_pilot = min(N_PILOT, n // 2)
        if queries is None:
            queries = self.permuted.rows[: min(self.n_pilot, N_PILOT_QUERIES)]
            self.queries = np.asarray(queries, np.float64)
        else:
            self.queries = training.geometry.scale(queries[:N_PILOT_QUERIES])
        self.population = n - self.n_pilot
        self.sums = self.permuted.sums(self.queries, self.n_pilot, n, threads)
        self.spread = relative_spread(self.sums, self.population)


def random_sampling(pilot, rtol, threads):
    """The cheapest `RandomSampling` that keeps rtol on the pilot's queries, and its report.

    Each size is tried with the rule that the method has: what a history of the rows tells of a
    query decides whether it gets more, which is reckoned as all rows.
    """
    n = pilot.population
    best = None
    history, seen = Sums.zeros(len(pilot.queries)), pilot.n_pilot
    for size in _sizes(n):
        last = min(pilot.n_pilot + history_of(size), len(pilot.permuted))
        history, seen = history + pilot.permuted.sums(pilot.queries, seen, last, threads), last
        known = relative_spread(history, seen - pilot.n_pilot)
        rest = 1 - size / n
        errors = np.minimum(MEAN_ABSOLUTE * pilot.spread * np.sqrt(rest / size), 2)
        for limit in {min(x * rtol, MAX_LIMIT) for x in LIMITS}:
            more = MEAN_ABSOLUTE * known > limit * np.sqrt(size)
            left = np.where(more, 0.7 * limit, errors)
            error = left.mean() + left.std() / np.sqrt(len(left))
            cost = size + history_of(size) + more.mean() * n
            if error <= SAFETY * rtol and (best is None or cost < best[0]):
                best = cost, size, limit, left.mean()
    if best is None:  # nothing short of all rows
        best = float(n + pilot.n_pilot), n, MAX_LIMIT, 0.0
    cost, size, limit, error = best
    report = {"n_samples": int(size), "limit": float(limit), "cost": float(cost)}
    return RandomSampling(pilot.permuted, size, limit), report | {"error": float(error)}


def _sizes(population):
    size = 64.0
    while size < population / 2:
        yield int(size)
        size *= 1.15


def choose(training, algorithm, rtol, threads, queries=None):
    """The method of an algorithm ("auto": the cheapest), and a report.

    queries: for the pilot; without, rows of the data.

    Costs are in rows: what one row costs brute force. They are counted, not timed: the same data
    and seed always give the same method.
    """
    n = len(training.X)
    report = {"n_samples": n, "rtol": rtol, "methods": {"brute": {"cost": float(n), "error": 0.0}}}
    brute = BruteForce(training)
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
        return brute, _finish(report, "brute", why)
    pilot = Pilot(training, threads, queries)
    report["median_kernel_mean"] = float(
        np.median(np.exp(pilot.sums.shift) * pilot.sums.total) / training.total
    )
    reports, makers = report["methods"], {"brute": lambda: brute}
    sampling, reports["random"] = random_sampling(pilot, rtol, threads)
    makers["random"] = lambda: sampling
    trials = {algorithm} & set(HASHED)
    if algorithm == "auto" and n >= MIN_HASHED:
        trials = {"bucket_sum"}  # None where the kernel is no collision probability
        if reports["random"]["cost"] > WORTH_A_TRIAL:
            trials |= set(HASHED)
    if "near_far" in trials:
        near_far, reports["near_far"] = trials_.near_far(pilot, rtol)
        makers["near_far"] = lambda: near_far
    sketch = trials_.bucket_sum(pilot, rtol) if "bucket_sum" in trials else None
    if sketch is not None:
        makers["bucket_sum"], reports["bucket_sum"] = sketch
    if trials & {"hbe", "split"}:
        drawn = trials_.hashed_draws(pilot, rtol, threads, trials)
        for name, (make, found) in drawn.items():
            makers[name], reports[name] = make, found
    if algorithm != "auto":
        return makers[algorithm](), _finish(report, algorithm, "asked for")
    # A method that cannot reach rtol with the tables it may have is no candidate.
    able = [name for name in makers if reports[name]["error"] <= 1.05 * rtol]
    able.sort(key=lambda name: reports[name]["cost"])
    why = "the cheapest of " + ", ".join(able)
    for name in able:
        method = makers[name]()
        if queries is None or name == "brute":
            break
        reports[name]["error"] = measured_error(method, training, queries, threads)
        if reports[name]["error"] <= TOLERATED * rtol:
            break
        why = "the cheapest that kept rtol on the first queries"
    return method, _finish(report, name, why)


def measured_error(method, training, queries, threads):
    """Mean relative error of a method on some queries."""
    exact = training.sums(training.geometry.scale(queries), threads)
    got = method.estimate(queries, threads)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        ratio = np.exp(got.shift - exact.shift) * got.mean * training.total / exact.total
    return float(np.minimum(np.abs(ratio - 1), 2).mean())


def _finish(report, name, why):
    report["algorithm"], report["reason"] = name, why
    costs = ", ".join(f"{k} {v['cost']:.0f}" for k, v in report["methods"].items())
    logger.info("algorithm %s (%s); cost of a query in rows: %s", name, why, costs)
    return report

"""What each method would cost at the wanted error, from a few rows of the data itself."""

import logging

import numpy as np

from lshkit.kde.exact import BruteForce
from lshkit.kde.random_sampling import (
    MEAN_ABSOLUTE,
    N_PILOT,
    N_PILOT_QUERIES,
    PermutedRows,
    RandomSampling,
    mean_error,
    relative_spread,
    sample_size,
)

logger = logging.getLogger("lshkit.kde")


class Pilot:
    """Sums of the first rows of the permutation, as queries, over those after the pilot's."""

    def __init__(self, training, threads):
        self.training = training
        self.permuted = PermutedRows(training)
        n = len(self.permuted)
        self.n_pilot = min(N_PILOT, n // 2)
        self.queries = self.permuted.rows[: min(self.n_pilot, N_PILOT_QUERIES)]
        self.queries = np.asarray(self.queries, np.float64)
        self.population = n - self.n_pilot
        self.sums = self.permuted.sums(self.queries, self.n_pilot, n, threads)
        self.spread = relative_spread(self.sums, self.population)


def random_sampling(pilot, rtol, threads):
    """`RandomSampling` of the size that the pilot asks for, and the report of it."""
    size = sample_size(pilot.spread, pilot.population, rtol)
    size = max(size, 64)
    method = RandomSampling(pilot.permuted, size, rtol, np.inf)
    # A query needs more only where it looks worse than all of the pilot's.
    seen = min(pilot.n_pilot + method.history, len(pilot.permuted))
    part = pilot.permuted.sums(pilot.queries, pilot.n_pilot, seen, threads)
    worst = relative_spread(part, max(seen - pilot.n_pilot, 1))
    worst = worst[np.isfinite(worst)].max(initial=0)
    method.limit = max(4 * rtol, MEAN_ABSOLUTE * worst / np.sqrt(size))
    error = mean_error(pilot.spread, size, pilot.population)[0]
    return method, {"n_samples": size, "cost": float(size + method.history), "error": float(error)}


def choose(training, algorithm, rtol, threads):
    """The method of an algorithm ("auto": the cheapest), and a report.

    Costs are in rows: what one row costs brute force. They are counted, not timed: the same data
    and seed always give the same method.
    """
    n = len(training.X)
    report = {"n_samples": n, "rtol": rtol, "methods": {"brute": {"cost": float(n), "error": 0.0}}}
    brute = BruteForce(training)
    if algorithm == "brute" or (algorithm == "auto" and (rtol == 0 or n < 4 * N_PILOT)):
        why = "asked for" if algorithm == "brute" else "rtol is 0" if rtol == 0 else "few rows"
        return brute, _finish(report, "brute", why)
    pilot = Pilot(training, threads)
    methods = {"brute": brute}
    methods["random"], report["methods"]["random"] = random_sampling(pilot, rtol, threads)
    report["median_kernel_mean"] = float(
        np.median(np.exp(pilot.sums.shift) * pilot.sums.total) / pilot.population
    )
    if algorithm != "auto":
        return methods[algorithm], _finish(report, algorithm, "asked for")
    best = min(methods, key=lambda name: report["methods"][name]["cost"])
    return methods[best], _finish(report, best, "the cheapest of " + ", ".join(methods))


def _finish(report, name, why):
    report["algorithm"], report["reason"] = name, why
    costs = ", ".join(f"{k} {v['cost']:.0f}" for k, v in report["methods"].items())
    logger.info("algorithm %s (%s); cost of a query in rows: %s", name, why, costs)
    return report

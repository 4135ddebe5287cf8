"""algorithm="hbe": hashing-based estimators, one row drawn from the query's bucket of each table.

Z = w_j k(q, x_j) / (p(q, x_j) P(drawing j | bucket)), 0 for an empty bucket, is unbiased for the
sum (Charikar and Siminelakis 2017).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from lshkit import checks, hashing
from lshkit.buckets import HashTables, pair_distances
from lshkit.hashing.family import HashFamily
from lshkit.kde.equal_rows import EqualRows
from lshkit.kde.geometry import angles_of
from lshkit.kde.method import MEAN_ABSOLUTE, MOST, MOST_TUNED, Estimate, ExactFarQueries, Tuned
from lshkit.kde.samples import N_PILOT, sample_size, spread_of_trials
from lshkit.kde.sums import Sums, sums_of_pairs
from lshkit.kde.training import PermutedRows
from lshkit.kde.value_sums import distances

if TYPE_CHECKING:
    from typing_extensions import Self

    from lshkit.kde.pilot import Pilot
    from lshkit.kde.training import Training

# At least: fewer draws tell too little of their own variance, and one tells nothing.
MIN_DRAWS, MAX_DRAWS = 4, 256
MOST_DISTANCE = 1e30  # for which families have widths: of rows that no kernel reaches
TRIAL_DRAWS = 64
# Costs in rows (what brute force spends on one): of a draw, of hashing a query by one hash.
# Measured at d = 64.
DRAW, HASH = 40.0, 4.0


class HashedDraws(ExactFarQueries):
    """buckets: hash tables of all rows but the first, a draw from each.

    The first rows, the pilot's, and the last, those of calibration, are summed.
    """

    name = "hbe"
    min_rows, worth = 20_000, 4000

    def __init__(self, buckets: Buckets) -> None:
        self.buckets, self.permuted = buckets, buckets.permuted
        self.training = buckets.permuted.training
        self.looked_up = buckets.stop

    @classmethod
    def tune(cls, pilot: Pilot, rtol: float) -> Tuned:
        training = pilot.training
        equal = EqualRows(pilot.permuted)
        distance, n_projections = max(typical_distance(pilot, equal), 1e-9), 4
        if training.geometry.kernel == "angular":
            one = np.log(0.5) / np.log(max(1 - distance / np.pi, 1e-3))
            n_projections = int(np.clip(round(one), 1, 16))
        hasher = family(training, distance, TRIAL_DRAWS, n_projections)
        trial = cls(tables(pilot.permuted, hasher))
        trial.equal = equal
        logs, factors, drawn = trial.draws(pilot.queries)
        factors = trial.without_equal(
            factors, drawn, trial.equal.nearest(pilot.queries, 1, pilot.threads)
        )
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            terms = factors * np.exp(logs - pilot.sums.shift[:, None]) / pilot.sums.total[:, None]
        spread = spread_of_trials(terms, 1.0) * pilot.counted(pilot.sums.log())
        n_draws = min(max(sample_size(spread, MAX_DRAWS * 64, rtol), MIN_DRAWS), MAX_DRAWS)
        settings = {
            "n_projections": n_projections,
            "distance": distance,
            "n_hashes": n_draws,
            "cost": float(2 * N_PILOT + n_draws * (DRAW + HASH * n_projections)),
            "error": float(np.minimum(MEAN_ABSOLUTE * spread / np.sqrt(n_draws), MOST).mean()),
        }
        return Tuned(
            settings, functools.partial(cls.from_settings, settings, training, pilot.permuted)
        )

    @classmethod
    def from_settings(
        cls, settings: dict[str, Any], training: Training, permuted: PermutedRows | None = None
    ) -> Self:
        n_hashes = checks.integer("n_hashes", settings["n_hashes"], 1, MOST_TUNED)
        distance = checks.positive("distance", settings["distance"])
        n_projections = checks.integer("n_projections", settings["n_projections"], 1, 64)
        permuted = PermutedRows(training) if permuted is None else permuted
        return cls(tables(permuted, family(training, distance, n_hashes, n_projections)))

    @functools.cached_property
    def equal(self) -> EqualRows:
        return EqualRows(self.permuted)

    def draws(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each query and table log k of the row drawn, its factor in the estimate, and where
        it is among the permuted rows (-1: none was drawn)."""
        buckets = self.buckets
        indices, chance, _ = buckets.tables.draw(buckets.codes(queries), seed=self.training.seed)
        found = indices >= 0
        indptr = np.concatenate([[0], np.cumsum(found.sum(axis=1))])
        flat = indices[found]
        distances = buckets.distances(queries, indptr, flat)
        p = buckets.hasher.probability_of_distance(distances)
        factors = np.zeros(indices.shape)
        # Rows that met do so with positive probability; one that rounds to 0 is not to be met.
        factors[found] = buckets.weights_of(flat) / (np.maximum(p, 1e-12) * chance[found])
        logs = np.full(indices.shape, -np.inf)
        logs[found] = self.geometry.log_kernel(distances)
        return logs, factors, np.where(found, indices + buckets.start, -1)

    def without_equal(
        self, factors: np.ndarray, drawn_rows: np.ndarray, groups: np.ndarray
    ) -> np.ndarray:
        """The factors with 0 for rows that equal their query, which are summed exactly."""
        equal = (groups >= 0) & (drawn_rows >= 0) & (self.equal.of_row[drawn_rows] == groups)
        return np.where(equal, 0.0, factors)

    def _sampled(self, queries: np.ndarray, threads: int, stop: int | None) -> Estimate:
        buckets, n = self.buckets, len(self.permuted) if stop is None else stop
        logs, factors, drawn_rows = self.draws(queries)
        n_queries, n_draws = logs.shape
        finite = np.isfinite(logs)
        groups, own = self.equal.nearest(queries, 1, threads), Sums.zeros(n_queries)
        if (known := groups[:, 0] >= 0).any():  # rows that equal a query are summed exactly
            within = buckets.start, min(buckets.stop, n)
            own[known] = self.equal.few_sums(queries[known], groups[known], threads, *within)[0]
            factors = self.without_equal(factors, drawn_rows, groups)
        indptr = np.arange(n_queries + 1) * n_draws
        logs = np.where(factors > 0, logs, -np.inf)
        drawn = sums_of_pairs(indptr, logs.ravel(), factors.ravel())
        mean, spread = drawn.total / n_draws, drawn.squares / n_draws
        variance = np.maximum(spread - mean**2, 0) / max(n_draws - 1, 1)
        rest = self.permuted.sums(queries, 0, buckets.start, threads)
        rest += self.permuted.sums(queries, buckets.stop, n, threads)
        whole = rest + own + Sums(drawn.shift, mean, variance)
        error = np.sqrt(variance) * np.exp(drawn.shift - whole.shift)
        # Empty buckets alone, or a single draw, tell nothing of the rows outside them.
        error = np.where(finite.any(axis=1) & (n_draws > 1), error, np.inf)
        weight = self.training.total
        rows = np.full(n_queries, min(n - len(buckets) + n_draws, n - 1))
        return Estimate(whole.shift, whole.total / weight, error / weight, rows)

    @property
    def nbytes(self) -> int:
        return self.buckets.nbytes + self.equal.nbytes


def tables(permuted: PermutedRows, hasher: HashFamily) -> Buckets:
    """`Buckets` without the rows that pilot and calibration ask for."""
    head = min(N_PILOT, len(permuted) // 2)
    return Buckets(permuted, hasher, head, len(permuted) - min(N_PILOT, len(permuted) // 8))


def typical_distance(pilot: Pilot, equal: EqualRows) -> float:
    """Mean distance of rows weighted by their kernel: where the sums come from.

    Without rows that equal a query, which are summed exactly: at a distance of 0, which these would
    give, no draw would meet another row.
    """
    queries = pilot.queries[:16]
    rows = np.asarray(pilot.permuted.rows[pilot.n_pilot : pilot.n_pilot + 20_000], np.float64)
    geometry = pilot.training.geometry
    r = distances(geometry, queries, rows)
    of_rows = equal.of_row[pilot.n_pilot : pilot.n_pilot + len(rows)]
    apart = of_rows != equal.nearest(queries, 1, pilot.threads)
    logs = np.where(apart, geometry.log_kernel(r), -np.inf)
    weights = np.exp(logs - np.maximum(logs.max(axis=1, keepdims=True), -1e300))
    means = (weights * r).sum(axis=1) / np.maximum(weights.sum(axis=1), 1e-300)
    return float(min(np.median(means), MOST_DISTANCE))


def family(training: Training, distance: float, n_hashes: int, n_projections: int) -> HashFamily:
    """A family for the kernel's distance: rows at `distance` collide with probability about 1/2.

    n_projections: how many a code joins; for angular, the number of bits.
    """
    geometry, d = training.geometry, training.X.shape[1]
    seed = [training.seed, 3, n_projections]
    seed = int(np.random.default_rng(seed).integers(2**31))
    if geometry.kernel == "angular":
        return hashing.FastHadamard(d, min(n_projections, 16), n_hashes, seed=seed)
    if geometry.kernel == "laplacian":
        width = max(distance, 1e-6) / np.log(2)
        return hashing.RandomBinning(d, n_hashes, bandwidth=width, seed=seed)
    low, high = 1e-3 * distance + 1e-9, 1e4 * distance + 1e-6
    for _ in range(60):  # the width, by bisection of the family's own formula
        width = np.sqrt(low * high)
        one = hashing.EuclideanLSH(1, n_projections, 1, width=width, seed=0)
        found = one.probability_of_distance(np.asarray(distance))
        low, high = (low, width) if found > 0.5 else (width, high)
    return hashing.EuclideanLSH(d, n_projections, n_hashes, width=high, seed=seed)


class Buckets:
    """Hash tables of the permuted rows from `start` to `stop`."""

    def __init__(self, permuted: PermutedRows, hasher: HashFamily, start: int, stop: int) -> None:
        self.permuted, self.hasher, self.start, self.stop = permuted, hasher, start, stop
        self.rows = permuted.rows[start:stop]
        self.weights = None if permuted.weights is None else permuted.weights[start:stop]
        # Rows that are too far for bins share buckets with any: their kernels there are nothing.
        codes = hasher.hash(self.rows, check_finite=False)
        self.tables = HashTables(codes, weights=self.weights)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def kernel(self) -> str:
        return self.permuted.training.geometry.kernel

    def codes(self, queries: np.ndarray) -> np.ndarray:
        return self.hasher.hash(queries.astype(self.rows.dtype), check_finite=False)

    def weights_of(self, indices: np.ndarray) -> np.ndarray:
        return np.ones(len(indices)) if self.weights is None else self.weights[indices]

    def distances(self, queries: np.ndarray, indptr: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Of listed pairs: what the kernel is a function of, the angle for the angular one."""
        queries = queries.astype(self.rows.dtype)
        p = 1 if self.kernel == "laplacian" else 2
        distances = pair_distances(queries, self.rows, indptr, indices, p=p).astype(np.float64)
        distances = distances if p == 1 else np.sqrt(distances)
        return angles_of(distances) if self.kernel == "angular" else distances

    @property
    def nbytes(self) -> int:
        return self.permuted.nbytes + self.tables.nbytes

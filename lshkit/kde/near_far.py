"""algorithm="near_far": rows that collide often exactly, the others by a random sample.

Which rows are near depends on the hash functions alone, so the rows that are not near are a uniform
sample of their kind wherever the permutation put them: the estimate is unbiased (DEANN, Karppa et
al. 2022, with collisions for the neighbours and no row counted twice). Buckets of more than
max_bucket_size rows are passed over: where rows lie so densely, a sample does.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from lshkit import _C, checks, hashing
from lshkit.hashing.family import HashFamily
from lshkit.kde import kernels
from lshkit.kde.hashed import ENTRY, HASH, LOOK_UP, Buckets, HashedMethod, sums_of_pairs
from lshkit.kde.method import MOST_TUNED, Estimate, Tuned
from lshkit.kde.random_sampling import (
    cheapest_sample,
    expand,
    stages_of,
)
from lshkit.kde.sums import PermutedRows, Sums

if TYPE_CHECKING:
    from typing_extensions import Self

    from lshkit.kde.pilot import Pilot
    from lshkit.kde.random_sampling import Stages
    from lshkit.kde.sums import Training

N_HASHES = 16
N_SEARCHED, N_COMPARED = 2**15, 3  # rows among which families are compared, and the best of them
WIDTHS = (4, 4.0), (4, 12.0), (8, 8.0), (16, 8.0)  # of EuclideanLSH: n_bits, bins in near distances
MIN_COUNTS = 1, 2, 4
MAX_BUCKET_SIZES = 100, 300, 1000, 3000, 2**31 - 1


class NearFar(HashedMethod):
    """`RandomSampling` with the near rows taken out of history and samples.

    buckets: hash tables of all rows. min_count: of collisions that make a row near.
    """

    name = "near_far"
    min_rows, worth = 20_000, 4000

    def __init__(
        self, buckets: Buckets, min_count: int, max_bucket_size: int, stages: Stages
    ) -> None:
        self.buckets, self.min_count, self.max_bucket_size = buckets, min_count, max_bucket_size
        self.permuted, self.training = buckets.permuted, buckets.permuted.training
        self.stages = stages

    @classmethod
    def tune(cls, pilot: Pilot, rtol: float) -> Tuned:
        settings, buckets = cheapest_tables(pilot, rtol)
        settings |= pilot.thresholds
        make = functools.partial(cls.from_settings, settings, pilot.training, buckets=buckets)
        return Tuned(settings, make)

    @classmethod
    def from_settings(
        cls,
        settings: dict[str, Any],
        training: Training,
        permuted: PermutedRows | None = None,
        buckets: Buckets | None = None,
    ) -> Self:
        checks.integer("n_hashes", settings["n_hashes"], 1, MOST_TUNED)
        counts = (
            checks.integer("min_count", settings["min_count"], 1, 255),
            checks.integer("max_bucket_size", settings["max_bucket_size"], 0, 2**31 - 1),
        )
        stages = stages_of(settings)
        if buckets is None:
            permuted = PermutedRows(training) if permuted is None else permuted
            buckets = Buckets(permuted, hasher_of(training, settings))
        return cls(buckets, *counts, stages)

    def near(
        self, queries: np.ndarray, stops: list[int], threads: int
    ) -> tuple[list[Sums], np.ndarray]:
        """Sums over the near rows up to each stop from the one before, and their numbers."""
        buckets, tables = self.buckets, self.buckets.tables
        geometry = self.training.geometry
        out = np.empty((len(queries), len(stops), 4))
        _C.near_kernel_sums(
            kernels.CODES[geometry.kernel],
            geometry.n_bits,
            np.ascontiguousarray(queries, buckets.rows.dtype),
            buckets.rows,
            buckets.weights,
            *tables.look_up(buckets.codes(queries)),
            self.min_count,
            self.max_bucket_size,
            np.array(stops),
            out,
            threads,
        )
        return [Sums(*(out[:, k, i].copy() for i in range(3))) for k in range(len(stops))], (
            out[:, :, 3]
        )

    def _sampled(self, queries: np.ndarray, threads: int, stop: int | None) -> Estimate:
        permuted = self.permuted
        n, n_queries = len(permuted) if stop is None else stop, len(queries)
        stops = self.stages.stops(len(permuted), n)
        near, counts = self.near(
            queries, stops if stop is None else [*stops, len(permuted)], threads
        )
        near, counts = near[: len(stops)], counts[:, : len(stops)]
        whole_near = functools.reduce(operator.add, near)
        history = permuted.sums(queries, 0, stops[0], threads).without(near[0])
        known = whole_near + history  # of few rows it is all
        shift, mean, error = known.shift, known.total, np.zeros(n_queries)
        rows, open_ = np.full(n_queries, n), np.arange(n_queries)
        for k, (seen, last) in enumerate(itertools.pairwise(stops), 1):
            sample = permuted.sums(queries[open_], seen, last, threads).without(near[k][open_])
            n_sampled = last - seen - counts[open_, k]
            population = n - seen - counts[open_, k:].sum(axis=1)
            n_history = seen - counts[open_, :k].sum(axis=1)
            close = whole_near[open_]
            final = np.ones(len(open_), bool)
            if last < n:
                foretold, log = foretell(history, n_history, close, population)
                final = self.stages.enough(foretold, log, n_sampled)
            done, got = open_[final], sample[final]
            n_sampled = np.maximum(n_sampled[final], 1)
            total, variance = expand(got, n_sampled, np.maximum(population[final], 1))
            # Of near rows and history only the sums are wanted.
            whole = close[final] + history[final] + Sums(got.shift, total, variance)
            shift[done], mean[done] = whole.shift, whole.total
            error[done] = np.sqrt(variance) * relative(got.shift, whole.shift)
            rows[done] = n if last == n else np.minimum(last + counts[done, k:].sum(axis=1), n - 1)
            if final.all():
                break
            history = (history + sample)[~final]
            open_ = open_[~final]
        weight = self.training.total
        return Estimate(shift, mean / weight, error / weight, rows)


def relative(shift: np.ndarray, to: np.ndarray) -> np.ndarray:
    """exp(shift - to), 0 where there is nothing; of a part to the whole, no more than 1."""
    with np.errstate(invalid="ignore"):
        return np.where(shift > -np.inf, np.exp(np.minimum(shift - to, 0)), 0)


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


def cheapest_tables(pilot: Pilot, rtol: float) -> tuple[dict[str, Any], Buckets]:
    """The cheapest settings and their tables.

    Hash families are compared among the first rows, where that takes less time, and the best of
    them with all rows.
    """
    few = pilot.among(N_SEARCHED)
    part = few.population / pilot.population
    found = []
    for settings in families(few):
        buckets = Buckets(few.permuted, hasher_of(few.training, settings), stop=few.stop)
        found.append((settings_for(few, buckets, rtol, part, True)["cost"], settings, buckets))
    found.sort(key=lambda x: x[0])
    best: tuple[dict[str, Any], Buckets] | None = None
    for _, settings, buckets in found[: 1 if part == 1 else N_COMPARED]:
        if part < 1:
            buckets = Buckets(pilot.permuted, buckets.hasher)
        report = settings | settings_for(pilot, buckets, rtol)
        if best is None or report["cost"] < best[0]["cost"]:
            best = report, buckets
    assert best is not None
    return best


def hasher_of(training: Training, settings: dict[str, Any]) -> HashFamily:
    """FastHadamard, or EuclideanLSH where there is a width."""
    seed = int(np.random.default_rng([training.seed, 4]).integers(2**31))
    sizes = len(training.geometry.bandwidth), settings["n_bits"], settings["n_hashes"]
    if settings.get("width") is None:
        return hashing.FastHadamard(*sizes, seed=seed)
    return hashing.EuclideanLSH(*sizes, width=settings["width"], seed=seed)


def families(pilot: Pilot) -> list[dict[str, Any]]:
    """Settings of hash functions that might find the rows near a query, from blunt to sharp."""
    kernel = pilot.training.geometry.kernel
    widest = int(np.clip(np.log2(max(len(pilot.permuted) / 8, 4)), 4, 16))
    families: list[dict[str, Any]] = [
        {"n_bits": n_bits} for n_bits in sorted({widest, min(widest + 3, 16)})
    ]
    if kernel in ("gaussian", "exponential"):
        distance = near_distance(pilot)
        families += [{"n_bits": n_bits, "width": width * distance} for n_bits, width in WIDTHS]
    return [{"n_hashes": N_HASHES} | settings for settings in families]


def near_distance(pilot: Pilot) -> float:
    """Median, over the pilot's queries, of the distance of their tenth nearest row."""
    rows = np.asarray(pilot.permuted.rows[pilot.n_pilot : pilot.n_pilot + 8192], np.float64)
    queries = pilot.queries[:64]
    squares = (queries**2).sum(1)[:, None] + (rows**2).sum(1) - 2 * queries @ rows.T
    nearest = min(9, len(rows) - 1)
    tenth = np.partition(squares, nearest, axis=1)[:, nearest]
    return max(float(np.sqrt(max(np.median(tenth), 0))), 1e-6)


def settings_for(
    pilot: Pilot, buckets: Buckets, rtol: float, part: float = 1.0, coarse: bool = False
) -> dict[str, Any]:
    """The best settings for some tables. part: of all rows, those that the pilot and they have."""
    whole = pilot.population / part
    codes = buckets.codes(pilot.queries)
    sizes = buckets.tables.bucket_sizes(codes)
    best: dict[str, Any] | None = None
    before = -1.0
    for most in MAX_BUCKET_SIZES:
        most = max(1, int(most * part))
        entries = np.where(sizes <= most, sizes, 0).sum() / len(codes) / part
        other = HASH * buckets.hasher.n_hashes + ENTRY * entries
        if entries == before or (best is not None and other > best["cost"]):
            continue
        before = entries
        indptr, indices, counts = buckets.tables.union(codes, max_bucket_size=most)
        keep = indices >= pilot.n_pilot  # the pilot's own rows may be its queries
        indptr = np.concatenate([[0], np.cumsum(keep)])[indptr]
        indices, counts = indices[keep], counts[keep]
        distances = buckets.distances(pilot.queries, indptr, indices)
        logs = pilot.training.geometry.log_kernel(distances)
        for min_count in MIN_COUNTS:
            near = NearRows(buckets, indptr, indices, logs, counts >= min_count)
            cost = other + LOOK_UP * near.counts.mean() / part
            if best is not None and cost > best["cost"]:
                continue
            spread, known = near.far_of(pilot)
            found = cheapest_sample(spread, known, whole, cost, rtol, coarse)
            if best is None or found["cost"] < best["cost"]:
                largest = {"min_count": min_count, "max_bucket_size": int(most / part)}
                best = largest | found | {"n_samples": int(found["n_samples"])}
    assert best is not None
    return best


class NearRows:
    """Near rows of a pilot's queries, and what is left for a sample of the others."""

    def __init__(
        self,
        buckets: Buckets,
        indptr: np.ndarray,
        indices: np.ndarray,
        logs: np.ndarray,
        keep: np.ndarray,
    ) -> None:
        self.buckets = buckets
        self.indptr = np.concatenate([[0], np.cumsum(keep)])[indptr]
        self.indices, self.logs = indices[keep], logs[keep]
        self.weights = buckets.weights_of(self.indices)
        self.counts = np.diff(self.indptr)

    def sums(self, stop: int | None = None) -> tuple[Sums, np.ndarray]:
        """Over the near rows, or those of them below `stop`, and their numbers."""
        if stop is None:
            return sums_of_pairs(self.indptr, self.logs, self.weights), self.counts
        inside = self.indices < stop
        indptr = np.concatenate([[0], np.cumsum(inside)])[self.indptr]
        return sums_of_pairs(indptr, self.logs[inside], self.weights[inside]), np.diff(indptr)

    def far_of(self, pilot: Pilot) -> tuple[np.ndarray, Callable[[int], np.ndarray]]:
        """What `cheapest_sample` wants of the far rows: their spread over the whole sum."""
        near, counts = self.sums()
        far, n_far = pilot.sums.without(near), pilot.population - counts
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            spread = np.sqrt(np.maximum(n_far * far.squares - far.total**2, 0))
            scale = np.exp(far.shift - pilot.sums.shift) * pilot.counted(pilot.sums.log())
            spread = np.where(pilot.sums.total > 0, spread * scale / pilot.sums.total, np.inf)

        def known(count: int) -> np.ndarray:
            inside, n_inside = self.sums(pilot.n_pilot + count)
            history = pilot.history(count).without(inside)
            foretold, log = foretell(history, count - n_inside, near, n_far)
            return foretold * pilot.counted(log)

        return spread, known

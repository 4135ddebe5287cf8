"""Trials of the hashed methods on the pilot's queries: their settings, cost and expected error."""

import numpy as np

from lshkit import hashing
from lshkit.kde.hashed import (
    DRAW,
    ENTRY,
    HASH,
    LOOK_UP,
    SHARED,
    Buckets,
    family,
    sums_of_pairs,
)
from lshkit.kde.hbe import HashedDraws, Share
from lshkit.kde.kernels import COLLISION
from lshkit.kde.near_far import NearFar
from lshkit.kde.random_sampling import (
    MEAN_ABSOLUTE,
    N_PILOT,
    SAFETY,
    mean_error,
    sample_size,
)
from lshkit.kde.sketch import SketchedRows

N_TRIED, MAX_SKETCH_BYTES = 32, 2**26  # of bucket_sum
LOOKED_INTO = 25.0  # cost of a hash of it: hashing and the look-up
MAX_DRAWS = 256
TRIAL_DRAWS = 64
N_HASHES = 16  # of near_far
SHARES = (1e-2, 1.0, 1e1, 1e2, 1e3, 1e4)


def near_far(pilot, rtol):
    """The cheapest `NearFar` of a few widths and all numbers of collisions, and its report."""
    permuted, n = pilot.permuted, pilot.population
    d = permuted.rows.shape[1]
    widest = int(np.clip(np.log2(max(n / 8, 4)), 4, 16))
    best = None
    for n_bits in sorted({widest, min(widest + 3, 16)}):
        seed = int(np.random.default_rng([permuted.training.seed, 4]).integers(2**31))
        buckets = Buckets(permuted, hashing.FastHadamard(d, n_bits, N_HASHES, seed=seed))
        codes = buckets.codes(pilot.queries)
        indptr, indices, counts = buckets.tables.union(codes)
        logs = buckets.log_kernel(buckets.distances(pilot.queries, indptr, indices))
        weights = buckets.weights_of(indices)
        entries = counts.sum() / len(codes)
        for min_count in range(1, N_HASHES + 1):
            keep = counts >= min_count
            kept = np.concatenate([[0], np.cumsum(keep)])[indptr]
            near = sums_of_pairs(kept, logs[keep], weights[keep])
            found = np.diff(kept)
            with np.errstate(invalid="ignore", divide="ignore"):
                scale = np.where(near.shift > -np.inf, np.exp(near.shift - pilot.sums.shift), 0)
                total = np.maximum(pilot.sums.total - near.total * scale, 0)
                squares = np.maximum(pilot.sums.squares - near.squares * scale**2, 0)
                spread = np.sqrt(np.maximum((n - found) * squares - total**2, 0))
                spread = np.where(pilot.sums.total > 0, spread / pilot.sums.total, np.inf)
            size = max(64, sample_size(spread, n, rtol))
            cost = N_PILOT + HASH * N_HASHES + ENTRY * entries + LOOK_UP * found.mean() + size
            if best is None or cost < best[1]["cost"]:
                error = float(mean_error(spread, size, n)[0])
                report = {
                    "n_bits": n_bits,
                    "n_hashes": N_HASHES,
                    "min_count": min_count,
                    "n_samples": int(size),
                    "cost": float(cost),
                    "error": error,
                }
                best = NearFar(buckets, min_count, size), report
    return best


def bucket_sum(pilot, rtol):
    """`SketchedRows` of as many hashes as rtol asks for, and its report; or None."""
    training = pilot.training
    kernel, n_bits = training.geometry.kernel, training.geometry.n_bits
    weights = training.weights
    narrow = weights is not None and weights.min() < 1e-3 * weights.mean()
    if kernel not in COLLISION or n_bits > 16 or narrow:
        return None
    # Without the pilot's rows, which are its queries: each would meet itself in every hash.
    trial = SketchedRows(pilot.permuted, n_bits, N_TRIED, pilot.n_pilot)
    sums = trial.sketch.of_each_hash(pilot.queries) * trial.sketch.total * trial.unit
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        exact = np.exp(pilot.sums.shift) * pilot.sums.total
        spread = _spread(sums / exact[:, None], 1.0)
    n_hashes = sample_size(spread, 10**6, rtol)
    used = int(min(n_hashes, MAX_SKETCH_BYTES // (8 * 2**n_bits)))
    error = np.minimum(MEAN_ABSOLUTE * spread / np.sqrt(used), 2).mean()
    cost = float(LOOKED_INTO * used)
    report = {"n_bits": n_bits, "n_hashes": used, "cost": cost, "error": float(error)}
    return (lambda: SketchedRows(pilot.permuted, n_bits, used)), report


def _spread(terms, expected):
    """Standard deviation of independent estimates `(queries, estimates)` of a known number.

    Where single huge terms make up the number, most trials see none of them: their spread is small,
    but their mean is off, and tells.
    """
    count = terms.shape[1]
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(terms.mean(axis=1) - expected) * np.sqrt(count) / MEAN_ABSOLUTE
        spread = np.maximum(terms.std(axis=1, ddof=1), off)
    return np.where(np.isfinite(spread), spread, np.inf)


def typical_distance(pilot):
    """Mean distance of rows weighted by their kernel: where the sums come from."""
    permuted = pilot.permuted
    queries = pilot.queries[:16]
    rows = np.asarray(permuted.rows[pilot.n_pilot : pilot.n_pilot + 100_000], np.float64)
    kernel = permuted.training.geometry.kernel
    if kernel == "laplacian":
        distances = np.stack([np.abs(rows - q).sum(axis=1) for q in queries])
        logs = -distances
    else:
        products = queries @ rows.T
        if kernel == "angular":
            distances = np.arccos(np.clip(products, -1, 1))
            agreement = np.maximum(1 - distances / np.pi, 1e-300)
            logs = permuted.training.geometry.n_bits * np.log(agreement)
        else:
            squares = (queries**2).sum(1)[:, None] + (rows**2).sum(1) - 2 * products
            distances = np.sqrt(np.maximum(squares, 0))
            logs = -0.5 * distances**2 if kernel == "gaussian" else -distances
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    return float(np.median((weights * distances).sum(axis=1) / weights.sum(axis=1)))


def hashed_draws(pilot, rtol, threads, names):
    """`HashedDraws` of those of "hbe" and "split" that are asked for, and their reports."""
    permuted = pilot.permuted
    training = permuted.training
    distance = max(typical_distance(pilot), 1e-9)
    sharpness = 4
    if training.geometry.kernel == "angular":
        one = np.log(0.5) / np.log(max(1 - distance / np.pi, 1e-3))
        sharpness = int(np.clip(round(one), 1, 16))

    def buckets_of(n_hashes):
        return Buckets(permuted, family(training, distance, n_hashes, sharpness))

    trial = HashedDraws(buckets_of(TRIAL_DRAWS))
    logs, factors, distances = trial.draws(pilot.queries)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        terms = factors * np.exp(logs - pilot.sums.shift[:, None]) / pilot.sums.total[:, None]
    cost_of_draw = DRAW + HASH * sharpness
    settings = {"sharpness": sharpness, "distance": distance}
    results = {}
    if "hbe" in names:
        spread = _spread(terms, 1.0)
        n_draws = sample_size(spread, MAX_DRAWS * 64, rtol)
        used = min(n_draws, MAX_DRAWS)
        error = np.minimum(MEAN_ABSOLUTE * spread / np.sqrt(used), 2).mean()
        report = {"n_hashes": used, "cost": float(N_PILOT + used * cost_of_draw)}
        report["error"] = float(error)
        results["hbe"] = (lambda: HashedDraws(buckets_of(used))), settings | report
    if "split" in names:
        results["split"] = _split(pilot, rtol, threads, trial, terms, distances, cost_of_draw)
        make, report = results["split"]
        results["split"] = (lambda: make(buckets_of)), settings | report
    return results


def _split(pilot, rtol, threads, trial, terms, distances, cost_of_draw):
    permuted, n = pilot.permuted, pilot.population
    few = slice(0, 48)
    angular = permuted.training.geometry.kernel == "angular"
    largest = np.pi if angular else 4 * float(np.max(distances, initial=1.0)) + 1
    best = None
    for a in SHARES:
        share = Share(trial.buckets.hasher, a, largest)
        sums = permuted.sums(
            pilot.queries[few], pilot.n_pilot, len(permuted), threads, share.radial
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            scale = np.exp(sums.shift - pilot.sums.shift[few]) / pilot.sums.total[few]
            sampled = np.maximum(n * sums.squares - sums.total**2, 0) * scale**2
            left = 1 - sums.total * scale  # of the sum, for the draws
        drawn = _spread((terms * (1 - share(distances)))[few], left) ** 2
        for n_draws in (4, 8, 16, 32, 64, 128):
            size = _size_beside(drawn / n_draws, np.nan_to_num(sampled, nan=np.inf), n, rtol)
            error = float(_error(drawn / n_draws, sampled, size, n)[0])
            found = {
                "a": a,
                "n_hashes": n_draws,
                "n_samples": int(size),
                "cost": float(N_PILOT + n_draws * cost_of_draw + SHARED * size),
                "error": error,
            }
            # The cheapest that reaches rtol, else the one that comes nearest to it.
            order = (False, found["cost"]) if error <= rtol else (True, error)
            if best is None or order < best[0]:
                best = order, found
    report = best[1]

    def make(buckets_of):
        buckets = buckets_of(report["n_hashes"])
        return HashedDraws(buckets, Share(buckets.hasher, report["a"], largest), size_of(report))

    def size_of(report):
        return max(64, report["n_samples"])

    return make, report


def _error(drawn, sampled, size, population):
    rest = max(0.0, 1 - size / population)
    variance = drawn + (sampled * rest / size if rest else 0.0)
    errors = np.minimum(MEAN_ABSOLUTE * np.sqrt(variance), 2.0)
    return errors.mean(), errors.std() / np.sqrt(len(errors))


def _size_beside(drawn, sampled, population, rtol):
    low, high = 64, population
    while low < high:
        middle = (low + high) // 2
        mean, error = _error(drawn, sampled, middle, population)
        low, high = (low, middle) if mean + error <= SAFETY * rtol else (middle + 1, high)
    return low

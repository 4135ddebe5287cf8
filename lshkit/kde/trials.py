"""Trials of the hashed methods on the pilot's queries: their settings, cost and expected error."""

import numpy as np

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
from lshkit.kde.methods import MAX_HASHES, near_hasher
from lshkit.kde.near_far import far_error, relative
from lshkit.kde.random_sampling import (
    MEAN_ABSOLUTE,
    N_PILOT,
    SAFETY,
    cheapest_sample,
    history_of,
    sample_size,
)
from lshkit.kde.sketch import SketchedRows
from lshkit.kde.sums import Sums

N_TRIED, MAX_SKETCH_BYTES = 32, 2**26  # of bucket_sum
LOOKED_INTO = {"angular": 3.0, "laplacian": 25.0}  # cost of a hash of it and of the look-up
UNLIKELY = 4  # standard errors that a mean is off by
MAX_DRAWS = 256
TRIAL_DRAWS = 64
N_HASHES = 16  # of near_far
N_SEARCHED, N_COMPARED = 2**15, 3  # rows among which its families are compared, and the best
WIDTHS = (4, 4.0), (4, 12.0), (8, 8.0), (16, 8.0)  # of EuclideanLSH: n_bits, bins in near distances
MIN_COUNTS = 1, 2, 4
MAX_BUCKET_SIZES = 100, 300, 1000, 3000, 2**31 - 1
SHARES = (1e-2, 1.0, 1e1, 1e2, 1e3, 1e4)


def near_far(pilot, rtol):
    """The cheapest settings of `NearFar`, as a report, and its tables.

    Hash families are compared among the first rows, where that takes less time, and the best of
    them with all rows.
    """
    few = pilot.among(N_SEARCHED)
    part = few.population / pilot.population
    found = []
    for settings in near_families(few):
        buckets = Buckets(few.permuted, near_hasher(few.training, settings), 0, few.stop)
        found.append((near_far_with(few, buckets, rtol, part, True)["cost"], settings, buckets))
    found.sort(key=lambda x: x[0])
    best = None
    for _, settings, buckets in found[: 1 if part == 1 else N_COMPARED]:
        if part < 1:
            buckets = Buckets(pilot.permuted, buckets.hasher, 0)
        report = settings | near_far_with(pilot, buckets, rtol)
        if best is None or report["cost"] < best[0]["cost"]:
            best = report, buckets
    return best


def near_families(pilot):
    """Settings of hash functions that might find the rows near a query, from blunt to sharp."""
    kernel = pilot.training.geometry.kernel
    widest = int(np.clip(np.log2(max(len(pilot.permuted) / 8, 4)), 4, 16))
    families = [{"n_bits": n_bits} for n_bits in sorted({widest, min(widest + 3, 16)})]
    if kernel in ("gaussian", "exponential"):
        distance = near_distance(pilot)
        families += [{"n_bits": n_bits, "width": width * distance} for n_bits, width in WIDTHS]
    return [{"n_hashes": N_HASHES} | settings for settings in families]


def near_distance(pilot):
    """Median, over the pilot's queries, of the distance of their tenth nearest row."""
    rows = np.asarray(pilot.permuted.rows[pilot.n_pilot : pilot.n_pilot + 8192], np.float64)
    queries = pilot.queries[:64]
    squares = (queries**2).sum(1)[:, None] + (rows**2).sum(1) - 2 * queries @ rows.T
    nearest = min(9, len(rows) - 1)
    tenth = np.partition(squares, nearest, axis=1)[:, nearest]
    return max(float(np.sqrt(max(np.median(tenth), 0))), 1e-6)


def near_far_with(pilot, buckets, rtol, part=1.0, coarse=False):
    """The best settings for some tables. part: of all rows, those that the pilot and they have."""
    whole = pilot.population / part
    codes = buckets.codes(pilot.queries)
    sizes = buckets.tables.bucket_sizes(codes)
    best, before = None, -1.0
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
        logs = buckets.log_kernel(buckets.distances(pilot.queries, indptr, indices))
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
                best["unseen"] = near.unseen(pilot, best["n_samples"], best["limit"])
    return best


class NearRows:
    """Near rows of a pilot's queries, and what is left for a sample of the others."""

    def __init__(self, buckets, indptr, indices, logs, keep):
        self.buckets = buckets
        self.indptr = np.concatenate([[0], np.cumsum(keep)])[indptr]
        self.indices, self.logs = indices[keep], logs[keep]
        self.weights = buckets.weights_of(self.indices)
        self.counts = np.diff(self.indptr)

    def sums(self, stop=None):
        """Over the near rows, or those of them below `stop`, and their numbers."""
        if stop is None:
            return sums_of_pairs(self.indptr, self.logs, self.weights), self.counts
        inside = self.indices < stop
        indptr = np.concatenate([[0], np.cumsum(inside)])[self.indptr]
        return sums_of_pairs(indptr, self.logs[inside], self.weights[inside]), np.diff(indptr)

    def unseen(self, pilot, n_samples, limit):
        """What `NearFar` wants to know of the rows that its samples do not show."""
        near, counts = self.sums()
        n_far = pilot.population - counts
        count = min(history_of(n_samples), pilot.population)
        inside, n_inside = self.sums(pilot.n_pilot + count)
        history, n_history = pilot.history(count).without(inside), count - n_inside
        # Of the queries for which the first sample does.
        foretold = far_error(history, n_history, near, n_far)
        final = MEAN_ABSOLUTE * foretold <= limit * np.sqrt(n_samples)
        final &= pilot.sums.total > 0
        if not final.any():
            return 0.0
        squares = history.squares * n_far / np.maximum(n_history, 1)
        whole = pilot.sums[final]
        far, foretold = (
            x.squares[final] * (relative(x.shift[final], whole.shift) / whole.total) ** 2
            for x in (pilot.sums.without(near), Sums(history.shift, history.total, squares))
        )
        return float(np.sqrt(max(np.mean(n_far[final] * (far - foretold)), 0)))

    def far_of(self, pilot):
        """What `cheapest_sample` wants of the far rows: their spread over the whole sum."""
        near, counts = self.sums()
        far, n_far = pilot.sums.without(near), pilot.population - counts
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            spread = np.sqrt(np.maximum(n_far * far.squares - far.total**2, 0))
            scale = np.exp(far.shift - pilot.sums.shift)
            spread = np.where(pilot.sums.total > 0, spread * scale / pilot.sums.total, np.inf)

        def known(count):
            inside, n_inside = self.sums(pilot.n_pilot + count)
            history = pilot.history(count).without(inside)
            return far_error(history, count - n_inside, near, n_far)

        return spread, known


def bucket_sum(pilot, rtol):
    """A report of the `SketchedRows` of as many hashes as rtol asks for; or None."""
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
    most = trial.most
    n_hashes = sample_size(spread, 10**6, rtol, most)
    used = int(min(n_hashes, MAX_SKETCH_BYTES // (8 * 2**n_bits), MAX_HASHES))
    error = np.minimum(MEAN_ABSOLUTE * spread / np.sqrt(used), most).mean()
    cost = float(LOOKED_INTO[kernel] * used)
    return {"n_bits": n_bits, "n_hashes": used, "cost": cost, "error": float(error)}


def _spread(terms, expected):
    """Standard deviation of independent estimates `(queries, estimates)` of a known number.

    Where single huge terms make up the number, most trials see none of them: their spread is small,
    but their mean is off by more than it explains, and tells.
    """
    count = terms.shape[1]
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(terms.mean(axis=1) - expected) * np.sqrt(count)
        spread = np.sqrt(np.mean((terms - np.reshape(expected, (-1, 1))) ** 2, axis=1))
        spread = np.where(off > UNLIKELY * terms.std(axis=1, ddof=1), off / MEAN_ABSOLUTE, spread)
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


def hashed_draws(pilot, rtol, names):
    """Reports of the `HashedDraws` of those of "hbe" and "split" that are asked for."""
    permuted = pilot.permuted
    training = permuted.training
    distance = max(typical_distance(pilot), 1e-9)
    sharpness = 4
    if training.geometry.kernel == "angular":
        one = np.log(0.5) / np.log(max(1 - distance / np.pi, 1e-3))
        sharpness = int(np.clip(round(one), 1, 16))

    hasher = family(training, distance, TRIAL_DRAWS, sharpness)
    trial = HashedDraws(Buckets(permuted, hasher))
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
        results["hbe"] = settings | report
    if "split" in names:
        results["split"] = settings | _split(pilot, rtol, trial, terms, distances, cost_of_draw)
    return results


def _split(pilot, rtol, trial, terms, distances, cost_of_draw):
    permuted, n = pilot.permuted, pilot.population
    few = slice(0, 48)
    angular = permuted.training.geometry.kernel == "angular"
    largest = np.pi if angular else 4 * float(np.max(distances, initial=1.0)) + 1
    best = None
    for a in SHARES:
        share = Share(trial.buckets.hasher, a, largest)
        sums = permuted.sums(
            pilot.queries[few], pilot.n_pilot, len(permuted), pilot.threads, share.radial
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
                "largest": float(largest),
                "n_hashes": n_draws,
                "n_samples": max(64, int(size)),
                "cost": float(N_PILOT + n_draws * cost_of_draw + SHARED * size),
                "error": error,
            }
            # The cheapest that reaches rtol, else the one that comes nearest to it.
            order = (False, found["cost"]) if error <= rtol else (True, error)
            if best is None or order < best[0]:
                best = order, found
    return best[1]


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

"""algorithm="hbe": hashing-based estimators, one row drawn from the query's bucket of each table.

Z = w_j k(q, x_j) / (p(q, x_j) P(drawing j | bucket)), 0 for an empty bucket, is unbiased for the
sum (Charikar and Siminelakis 2017). With a sampled part beside it this is algorithm="split": k is
cut into k g and k (1 - g), g = a p / (a p + 1), the first for the draws, the second for a random
sample of all rows; unbiased whatever a.
"""

import numpy as np

from lshkit.kde.exact import Estimate
from lshkit.kde.hashed import sums_of_pairs
from lshkit.kde.random_sampling import expand
from lshkit.kde.sums import Sums

POINTS = 8192  # of the tabulated share


class Share:
    """1 / (1 + a p) of the distance, as a table with straight lines in between.

    The lines are the definition: both parts use them, so nothing of k is lost or counted twice.
    """

    def __init__(self, hasher, a, largest):
        self.step = largest / (POINTS - 1)
        p = hasher.probability_of_distance(np.arange(POINTS) * self.step)
        self.table = (1 / (1 + a * p)).astype(np.float32)

    @property
    def radial(self):
        return self.table, 1 / self.step

    def __call__(self, distances):
        return np.interp(distances / self.step, np.arange(POINTS), self.table.astype(np.float64))


class HashedDraws:
    """buckets: hash tables, a draw from each. share: of the sampled part, or None: "hbe"."""

    def __init__(self, buckets, share=None, n_samples=0):
        self.buckets, self.share = buckets, share
        self.training = buckets.permuted.training
        self.n_samples = min(n_samples, len(buckets))
        self.name = "hbe" if share is None else "split"

    @property
    def permuted(self):
        return self.buckets.permuted

    def draws(self, queries):
        """For each query and table log k, the factor of it in the estimate, and the distance."""
        buckets = self.buckets
        n_queries, n_hashes = len(queries), buckets.tables.n_hashes
        seed = buckets.permuted.training.seed
        indices, chance, _ = buckets.tables.draw(buckets.codes(queries), seed=seed)
        found = indices >= 0
        indptr = np.concatenate([[0], np.cumsum(found.sum(axis=1))])
        flat = indices[found]
        distances = buckets.distances(queries, indptr, flat)
        p = buckets.hasher.probability_of_distance(distances)
        factors = np.zeros((n_queries, n_hashes))
        # Rows that met do so with positive probability; one that rounds to 0 is not to be met.
        factors[found] = buckets.weights_of(flat) / (np.maximum(p, 1e-12) * chance[found])
        logs = np.full((n_queries, n_hashes), -np.inf)
        logs[found] = buckets.log_kernel(distances)
        spread = np.zeros((n_queries, n_hashes))
        spread[found] = distances
        return logs, factors, spread

    def estimate(self, X, threads, with_error=True):
        return self.estimate_scaled(self.training.geometry.scale(X), threads)

    def estimate_scaled(self, queries, threads):
        buckets, permuted = self.buckets, self.buckets.permuted
        logs, factors, distances = self.draws(queries)
        n_queries, n_draws = logs.shape
        if self.share is not None:
            factors = factors * (1 - self.share(distances))
        indptr = np.arange(n_queries + 1) * n_draws
        finite = np.where(np.isfinite(logs), logs, -745.0)
        drawn = sums_of_pairs(indptr, finite.ravel(), (factors * np.isfinite(logs)).ravel())
        mean, spread = drawn.total / n_draws, drawn.squares / n_draws
        variance = np.maximum(spread - mean**2, 0) / max(n_draws - 1, 1)
        head = permuted.sums(queries, 0, buckets.start, threads)
        whole = head + Sums(drawn.shift, mean, variance)
        scale = np.exp(drawn.shift - whole.shift)
        squared = variance * scale**2
        if self.n_samples:
            last = buckets.start + self.n_samples
            sample = permuted.sums(queries, buckets.start, last, threads, self.share.radial)
            total, variance = expand(sample, self.n_samples, len(buckets))
            old = whole
            whole = old + Sums(sample.shift, total, variance)
            squared = squared * np.exp(2 * (old.shift - whole.shift))
            squared = squared + variance * np.exp(2 * (sample.shift - whole.shift))
        if self.share is None:  # empty buckets alone tell nothing of the rows outside them
            squared = np.where(np.isfinite(logs).any(axis=1), squared, np.inf)
        weight = permuted.training.total
        return Estimate(whole.shift, whole.total / weight, np.sqrt(squared) / weight)

    @property
    def nbytes(self):
        return self.buckets.nbytes

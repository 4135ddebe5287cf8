"""algorithm="near_far": rows that collide often exactly, the others by a random sample.

Which rows are near depends on the hash functions alone, so the rows that are not near are a uniform
sample of their kind wherever the permutation put them: the estimate is unbiased (DEANN, Karppa et
al. 2022, with collisions for the neighbours and no row counted twice).
"""

import numpy as np

from lshkit.kde.exact import Estimate
from lshkit.kde.hashed import sums_of_pairs
from lshkit.kde.random_sampling import expand
from lshkit.kde.sums import Sums


class NearFar:
    """buckets: hash tables; min_count: of collisions that make a row near; n_samples: of others."""

    name = "near_far"

    def __init__(self, buckets, min_count, n_samples):
        self.buckets, self.min_count = buckets, min_count
        self.training = buckets.permuted.training
        self.n_samples = min(n_samples, len(buckets))

    def near(self, queries):
        """The near rows of each query: indptr, indices."""
        indptr, indices, counts = self.buckets.tables.union(self.buckets.codes(queries))
        if self.min_count > 1:
            keep = counts >= self.min_count
            indptr = np.concatenate([[0], np.cumsum(keep)])[indptr]
            indices = indices[keep]
        return indptr, indices

    def estimate(self, X, threads):
        buckets, permuted = self.buckets, self.buckets.permuted
        queries = permuted.training.geometry.scale(X)
        indptr, indices = self.near(queries)
        log_terms = buckets.log_kernel(buckets.distances(queries, indptr, indices))
        weights = buckets.weights_of(indices)
        near = sums_of_pairs(indptr, log_terms, weights)
        inside = indices < self.n_samples  # near rows that are in the sample too
        in_sample = np.concatenate([[0], np.cumsum(inside)])[indptr]
        double = sums_of_pairs(in_sample, log_terms[inside], weights[inside])
        start = buckets.start
        head = permuted.sums(queries, 0, start, threads)
        sample = permuted.sums(queries, start, start + self.n_samples, threads)
        # The sample without its near rows: both at the larger shift.
        negative = Sums(double.shift, -double.total, -double.squares)
        far = sample + negative
        far = Sums(far.shift, np.maximum(far.total, 0), np.maximum(far.squares, 0))
        n_far = len(buckets) - np.diff(indptr)
        n_sampled = self.n_samples - np.diff(in_sample)
        total, variance = expand(far, np.maximum(n_sampled, 1), np.maximum(n_far, 1))
        whole = head + near + Sums(far.shift, total, variance)
        scale = np.where(far.shift > -np.inf, np.exp(far.shift - whole.shift), 0)
        weight = permuted.training.total
        error = np.sqrt(np.maximum(variance, 0)) * scale
        return Estimate(whole.shift, whole.total / weight, error / weight)

    @property
    def nbytes(self):
        return self.buckets.nbytes

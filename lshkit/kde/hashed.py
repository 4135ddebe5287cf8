"""What the methods share that find rows by hashing: hash families for a kernel, pairs, trials."""

import numpy as np

from lshkit import hashing
from lshkit.buckets import HashTables, pair_distances, pair_products
from lshkit.kde.random_sampling import N_PILOT
from lshkit.kde.sums import Sums

# Costs in rows (what brute force spends on one): of a row that is looked up, of a bucket's entry
# that is counted, of a draw, of hashing a query by one hash, of a row with a tabulated share.
# Measured at d = 64.
LOOK_UP, ENTRY, DRAW, HASH, SHARED = 30.0, 1.5, 150.0, 5.0, 2.0


class Buckets:
    """Hash tables of the permuted rows from `start` on; without it of those after the pilot's."""

    def __init__(self, permuted, hasher, start=None, stop=None):
        self.permuted, self.hasher = permuted, hasher
        self.start = min(N_PILOT, len(permuted) // 2) if start is None else start
        self.rows = permuted.rows[self.start : stop]
        self.weights = None if permuted.weights is None else permuted.weights[self.start : stop]
        self.tables = HashTables(hasher.hash(self.rows), weights=self.weights)

    def __len__(self):
        return len(self.rows)

    @property
    def kernel(self):
        return self.permuted.training.geometry.kernel

    def codes(self, queries):
        return self.hasher.hash(queries.astype(self.rows.dtype))

    def weights_of(self, indices):
        return np.ones(len(indices)) if self.weights is None else self.weights[indices]

    def distances(self, queries, indptr, indices):
        """Of listed pairs: what the kernel is a function of, the angle for the angular one."""
        queries = queries.astype(self.rows.dtype)
        if self.kernel == "angular":
            cosines = pair_products(queries, self.rows, indptr, indices).astype(np.float64)
            return np.arccos(np.clip(cosines, -1, 1))
        p = 1 if self.kernel == "laplacian" else 2
        distances = pair_distances(queries, self.rows, indptr, indices, p=p).astype(np.float64)
        return distances if p == 1 else np.sqrt(distances)

    def log_kernel(self, distances):
        if self.kernel == "gaussian":
            return -0.5 * distances**2
        if self.kernel == "angular":
            n_bits = self.permuted.training.geometry.n_bits
            return n_bits * np.log(np.maximum(1 - distances / np.pi, 1e-300))
        return -distances

    @property
    def nbytes(self):
        return self.permuted.nbytes + self.tables.nbytes


def sums_of_pairs(indptr, log_terms, factors):
    """`Sums` over each query's listed pairs of factor * exp(log_term)."""
    n = len(indptr) - 1
    sums = Sums.zeros(n)
    full = np.flatnonzero(np.diff(indptr))
    if len(full) == 0:
        return sums
    starts = indptr[full]
    sums.shift[full] = np.maximum.reduceat(log_terms, starts)
    rows = np.repeat(np.arange(n), np.diff(indptr))
    terms = factors * np.exp(log_terms - sums.shift[rows])
    sums.total[full] = np.add.reduceat(terms, starts)
    sums.squares[full] = np.add.reduceat(terms**2, starts)
    return sums


def family(training, distance, n_hashes, sharpness):
    """A family for the kernel's distance: rows at `distance` collide with probability 1/2 or so.

    sharpness: how many projections a code joins; for angular, the number of bits.
    """
    geometry, d = training.geometry, training.X.shape[1]
    seed = [training.seed, 3, sharpness]
    seed = int(np.random.default_rng(seed).integers(2**31))
    if geometry.kernel == "angular":
        return hashing.FastHadamard(d, min(sharpness, 16), n_hashes, seed=seed)
    if geometry.kernel == "laplacian":
        width = max(distance, 1e-6) / np.log(2)
        return hashing.RandomBinning(d, n_hashes, bandwidth=width, seed=seed)
    low, high = 1e-3 * distance + 1e-9, 1e4 * distance + 1e-6
    for _ in range(60):  # the width, by bisection of the family's own formula
        width = np.sqrt(low * high)
        one = hashing.EuclideanLSH(1, sharpness, 1, width=width, seed=0)
        low, high = (low, width) if one.probability_of_distance(distance) > 0.5 else (width, high)
    return hashing.EuclideanLSH(d, sharpness, n_hashes, width=high, seed=seed)

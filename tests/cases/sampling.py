"""Rows, hash families and comparisons for the tests of LSHSampler."""

import numpy as np

from lshkit.hashing import EuclideanLSH, FastHadamard, Hyperplane, RandomBinning

METHODS = "horvitz_thompson", "hbe", "full_bucket"


def clustered(n, d, spread, seed=0, clusters=4):
    """Rows around a few unit vectors, and some of them as queries."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(clusters, d))
    centers /= np.linalg.norm(centers, axis=1, keepdims=True)
    noise = spread / np.sqrt(d) * rng.normal(size=(n + 3, d))
    rows = centers[rng.integers(clusters, size=n + 3)] + noise
    return rows[:n], rows[n:]


FAMILIES = {
    "hadamard": lambda seed: FastHadamard(6, 5, 4, seed=seed),
    "hyperplane": lambda seed: Hyperplane(6, 4, 4, seed=seed),
    "mostly empty": lambda seed: FastHadamard(6, 14, 4, seed=seed),
    "L2": lambda seed: EuclideanLSH(6, 2, 4, width=2.0, seed=seed),
    "L1": lambda seed: EuclideanLSH(6, 2, 4, width=4.0, p=1, seed=seed),
    "binning": lambda seed: RandomBinning(6, 4, bandwidth=2.0, seed=seed),
}


def assert_same(a, b, queries, rename=lambda j: j):
    """Same draws, unions and estimates, with indices renamed."""
    for seed in (0, 1):
        got, expected = a.sample(queries, 9, seed=seed), b.sample(queries, 9, seed=seed)
        np.testing.assert_array_equal(got[0], rename(expected[0]))
        np.testing.assert_array_equal(got[1], expected[1])
    got, expected = a.union(queries), b.union(queries)
    np.testing.assert_array_equal(got[1], rename(expected[1]))
    for k in (0, 2):
        np.testing.assert_array_equal(got[k], expected[k])
    assert a.n_rows == b.n_rows

"""Rows with targets, the plain mean they are compared with, and sketches of regression."""

import numpy as np
from cases.kde import clustered

from lshkit.kde import LSHKernelRegressor
from lshkit.reference import log_kernel

rng = np.random.default_rng(0)
ROWS, QUERIES = rng.normal(size=(700, 4)), rng.normal(size=(30, 4))
VALUES = np.sin(ROWS[:, :2]) + 0.1 * rng.normal(size=(700, 2)) + [5.0, -3.0]
WEIGHTS = rng.uniform(0.1, 1, 700)
SKETCHES = {
    "angular": dict(kernel="angular", n_bits=4),
    "laplacian": dict(kernel="laplacian", n_bits=8, bandwidth=3.0),
}


def plain(kernel, queries, rows, values, bandwidth=1.0, n_bits=8, weights=None):
    """The weighted mean in float64, `(n_queries, n_outputs)`."""
    logs = log_kernel(kernel, queries, rows, bandwidth, n_bits)
    terms = np.exp(logs - logs.max(axis=1, keepdims=True))
    terms = terms if weights is None else terms * weights
    return terms @ values / terms.sum(axis=1, keepdims=True)


def problem(name, n=16384, d=4, n_queries=40):
    """Rows and queries alike, with their values."""
    rng = np.random.default_rng(5)
    if name == "clusters":
        rows, queries = clustered(n, d, 60, n_queries=n_queries)
    else:
        draw = rng.standard_normal if name != "heavy" else lambda size: rng.standard_t(2, size)
        rows, queries = draw(size=(n, d)), draw(size=(n_queries, d))
        if name == "copies":
            rows, queries = (rows[rng.integers(300, size=k)] for k in (n, n_queries))
    values = np.stack([np.sin(2 * rows[:, 0]), rows[:, 1]], axis=1)
    noise = rng.standard_t(2, size=values.shape) if name == "heavy" else rng.normal(size=(n, 2))
    return rows, values + 0.3 * noise, queries


def sketch(name, **options):
    settings = dict(algorithm="bucket_sum", random_state=0, n_hashes=64)
    return LSHKernelRegressor(**settings | SKETCHES[name] | options)

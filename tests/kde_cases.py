"""Plain float64 densities, the oracle of the density tests."""

import math

import numpy as np
from scipy.special import logsumexp

KERNELS = "gaussian exponential laplacian tophat epanechnikov linear cosine angular".split()


def log_kernel(kernel, queries, rows, bandwidth=1.0, n_bits=8):
    """log k of all pairs `(n_q, n)`; -inf where the kernel is 0."""
    queries, rows = (np.asarray(x, np.float64) / bandwidth for x in (queries, rows))
    difference = queries[:, None] - rows
    if kernel == "laplacian":
        return -np.abs(difference).sum(-1)
    if kernel == "angular":
        unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, rows)]
        half = np.linalg.norm(unit[0][:, None] - unit[1], axis=-1) / 2
        angle = 2 * np.arcsin(np.minimum(half, 1))
        with np.errstate(divide="ignore"):
            return n_bits * np.log(np.maximum(1 - angle / np.pi, 0))
    r = np.sqrt((difference**2).sum(-1))
    if kernel == "gaussian":
        return -0.5 * r**2
    if kernel == "exponential":
        return -r
    values = {
        "tophat": np.ones_like(r),
        "epanechnikov": 1 - r**2,
        "linear": 1 - r,
        "cosine": np.cos(np.pi / 2 * r),
    }[kernel]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(r < 1, np.log(np.where(r < 1, values, 1)), -np.inf)


def log_mean(kernel, queries, rows, bandwidth=1.0, n_bits=8, weights=None):
    logs = log_kernel(kernel, queries, rows, bandwidth, n_bits)
    weights = np.ones(len(rows)) if weights is None else np.asarray(weights, np.float64)
    with np.errstate(divide="ignore"):
        return logsumexp(logs, b=weights, axis=1) - math.log(weights.sum())


def clustered(n, d, n_clusters, scale=0.1, seed=0, n_queries=64):
    """Rows and queries of gaussian clusters around points of unit variance."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(n_clusters, d))
    rows, queries = (
        centres[rng.integers(n_clusters, size=k)] + scale * rng.normal(size=(k, d))
        for k in (n, n_queries)
    )
    return rows, queries

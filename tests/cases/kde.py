"""Plain float64 densities, the oracle of the density tests, and sketches of one size."""

import math
import pickle

import numpy as np
from scipy.special import logsumexp

from lshkit.kde import LSHKernelDensity
from lshkit.reference import log_kernel

KERNELS = "gaussian exponential laplacian tophat epanechnikov linear cosine angular".split()
SKETCHES = {"angular": dict(n_bits=6), "laplacian": dict(n_bits=5, bandwidth=1.5)}


def rows_of(n, d, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=(n, d)).astype(dtype)


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


def reloaded(estimator, way, folder):
    """A copy by way of a "file" in that folder, or of a "pickle"."""
    if way == "pickle":
        return pickle.loads(pickle.dumps(estimator))
    estimator.save(folder / "saved")
    return type(estimator).load(folder / "saved")


def sketch(kernel="angular", **options):
    settings = SKETCHES[kernel] | dict(random_state=0, n_hashes=24) | options
    return LSHKernelDensity(kernel, algorithm="bucket_sum", normalize=False, **settings)


def exact(kernel, queries, rows, weights=None):
    """What a sketch of that kernel estimates."""
    options = SKETCHES[kernel]
    args = options.get("bandwidth", 1.0), options["n_bits"], weights
    return np.exp(log_mean(kernel, queries, rows, *args))

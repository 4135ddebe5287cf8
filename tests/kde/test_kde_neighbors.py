"""bandwidth="neighbors": units, dimensions, copies, kernels."""

import numpy as np
import pytest

from lshkit.kde import LSHKernelDensity
from lshkit.kde.kernels import CODES
from lshkit.reference.kernel_sums import log_kernel

rng = np.random.default_rng(0)


def width(X, kernel="gaussian", weights=None):
    density = LSHKernelDensity(kernel, "neighbors", algorithm="brute")
    return np.broadcast_to(density.fit(X, None, weights).bandwidth_, X.shape[1])


@pytest.mark.parametrize("kernel", ["gaussian", "exponential", "laplacian"])
@pytest.mark.parametrize("n_features", [2, 20, 500])
def test_five_effective_neighbors(kernel, n_features):
    X = rng.normal(size=(100, n_features)) * np.geomspace(1e-3, 1e3, n_features)
    logs = np.stack([log_kernel(kernel, row[None], X, width(X, kernel))[0] for row in X])
    np.fill_diagonal(logs, -np.inf)
    k = np.exp(logs - logs.max(axis=1, keepdims=True))
    effective = k.sum(axis=1) ** 2 / (k**2).sum(axis=1)
    assert np.median(effective) == pytest.approx(5, rel=0.02)


def test_width_of_a_sketch():
    X = rng.normal(size=(300, 20)) * np.geomspace(1e-3, 1e3, 20)
    density = LSHKernelDensity("laplacian", "neighbors", algorithm="bucket_sum").fit(X)
    means = LSHKernelDensity("laplacian", density.bandwidth_, algorithm="brute").fit(X)
    assert np.median(means.kernel_mean(X)) - 1 / 300 == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("share", [0.5, 0.93, 0.96, 0.999])
def test_width_of_a_sketch_counts_equal_rows_once(share):
    """Of the median row all others but its copies may be fewer than a twentieth."""
    X = np.zeros((4000, 2))
    others = round(4000 * (1 - share))
    X[:others] = rng.normal(size=(others, 2))
    density = LSHKernelDensity("laplacian", "neighbors", algorithm="bucket_sum").fit(X)
    assert (density.bandwidth_ > 0.02).all() and (density.bandwidth_ < 2).all()
    once = LSHKernelDensity("laplacian", density.bandwidth_, algorithm="brute")
    mean = once.fit(X[: others + 1]).kernel_mean(np.zeros((1, 2)))
    assert mean - 1 / (others + 1) == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("kernel", ["tophat", "linear", "cosine", "epanechnikov"])
def test_compact_kernels_reach_the_fifth(kernel):
    X = rng.normal(size=(100, 3)) * [1, 10, 100]
    distances = np.sqrt((((X[:, None] - X) / width(X, kernel)) ** 2).sum(axis=-1))
    assert np.median(np.sort(distances, axis=1)[:, 5]) == pytest.approx(1)


def test_copies_are_no_neighbors():
    X = rng.normal(size=(100, 4))
    once, often = width(X), width(np.repeat(X, 30, axis=0))
    assert np.allclose(often, once, rtol=0.2)


def test_units_and_offsets_do_not_matter():
    X = rng.normal(size=(300, 4))
    scale, offset = np.array([1e-100, 1e-3, 1, 1e100]), np.array([0, 1e3, -1e6, 0])
    assert np.allclose(width(X * scale + offset), width(X) * scale, rtol=1e-3)


def test_degenerate_rows():
    assert (width(np.ones((5, 3))) == 1).all()  # all equal
    assert np.isfinite(width(rng.normal(size=(2, 3)))).all()
    constant = width(np.c_[rng.normal(size=50), np.full(50, 7.0)])
    assert constant[1] > 0
    outlier = np.r_[rng.normal(size=(50, 2)), [[1e200, 0]]]
    assert np.isfinite(width(outlier)).all()
    outlier[50] = 1e6
    weights = np.r_[np.ones(50), 0.0]
    assert np.allclose(width(outlier, weights=weights), width(outlier[:50]))
    with pytest.raises(ValueError, match="at least 2 rows"):
        width(np.ones((1, 3)))
    with pytest.raises(ValueError, match="angular"):
        LSHKernelDensity("angular", "neighbors").fit(rng.normal(size=(9, 3)))
    assert set(CODES) > {"angular"}


def test_many_rows():
    X = rng.normal(size=(40_000, 3)).astype(np.float32)
    assert np.allclose(width(X), width(X[:32_768]), rtol=0.2)

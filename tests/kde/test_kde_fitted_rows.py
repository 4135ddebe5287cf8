"""Kernel means of fitted rows over the other rows."""

import numpy as np
import pytest

from lshkit.kde import LSHKernelDensity, fitted_rows
from lshkit.kde.fitted_rows import log_means_of_rows
from lshkit.kde.kernels import CODES
from lshkit.reference.kernel_sums import log_kernel

rng = np.random.default_rng(0)
CENTRES = 4 * rng.normal(size=(50, 8))


def plain(density, X, weights=None):
    """The same from all pairs but those of a row with itself."""
    weights = np.ones(len(X)) if weights is None else weights
    with np.errstate(divide="ignore"):
        logs = log_kernel(density.kernel, X, X, density.bandwidth_) + np.log(weights)
    np.fill_diagonal(logs, -np.inf)
    with np.errstate(divide="ignore"):
        total = np.logaddexp.reduce(logs, axis=1)
        return total - np.log(weights.sum() - weights)


def of_rows(density):
    return log_means_of_rows(density._method, 1)


def clustered(n=4000, n_far=100):
    rng = np.random.default_rng(n)  # the same in whatever order tests run
    rows = CENTRES[rng.integers(50, size=n)] + 0.3 * rng.normal(size=(n, 8))
    return np.r_[rows, rng.uniform(-8, 8, (n_far, 8))]


@pytest.mark.parametrize("kernel", CODES)
@pytest.mark.parametrize("n", [2, 33, 301])
@pytest.mark.parametrize("weighted", [False, True])
def test_exact(kernel, n, weighted):
    X, weights = rng.normal(size=(n, 3)), rng.uniform(0.1, 1, n) if weighted else None
    width = 1.0 if kernel == "angular" else 0.7
    density = LSHKernelDensity(kernel, width, algorithm="brute").fit(X, sample_weight=weights)
    got, want = of_rows(density), plain(density, X, weights)
    assert np.array_equal(np.isinf(got), np.isinf(want))
    finite = np.isfinite(want)
    assert np.abs(got[finite] - want[finite]).max(initial=0) < 2e-6  # as exact sums in float32


@pytest.mark.parametrize("bandwidth", [0.3, np.array([0.3, 0.4])])
def test_rows_at_the_edge_of_a_kernel(bandwidth):
    """At exactly one bandwidth tophat is 0, wherever in the rows the pair is."""
    X = np.stack(np.meshgrid(*[0.1 * np.arange(12)] * 2), axis=-1).reshape(-1, 2)
    density = LSHKernelDensity("tophat", bandwidth, algorithm="brute").fit(X)
    if np.ndim(bandwidth):
        inside = np.sqrt((((X[:, None] - X) / bandwidth) ** 2).sum(axis=-1)) < 1
    else:
        inside = np.sqrt(((X[:, None] - X) ** 2).sum(axis=-1)) < bandwidth
    assert np.allclose(np.exp(of_rows(density)) * 143, inside.sum(axis=1) - 1, atol=1e-6)


def test_rows_far_from_all_others_keep_their_order():
    """Their own kernel is 1 and that of all others together 1e-300: nothing cancels."""
    X = np.r_[rng.normal(size=(200, 3)), [[30.0, 0, 0], [40.0, 0, 0], [0, 60.0, 0]]]
    density = LSHKernelDensity(algorithm="brute").fit(X)
    got, want = of_rows(density), plain(density, X)
    assert want[-1] < -1500
    assert np.abs(got / want - 1).max() < 1e-6


def exactly(kernel, bandwidth, X, weights=None):
    return of_rows(LSHKernelDensity(kernel, bandwidth, algorithm="brute").fit(X, None, weights))


@pytest.mark.parametrize("algorithm", ["random", "near_far", "hbe"])
@pytest.mark.parametrize("kernel", ["gaussian", "laplacian", "angular"])
@pytest.mark.parametrize("weighted", [False, "evenly", "unevenly"])
def test_sampled(algorithm, kernel, weighted):
    X, rng = clustered(), np.random.default_rng(1)
    weights = rng.uniform(0.1, 1, len(X)) if weighted == "evenly" else None
    if weighted == "unevenly":
        weights = rng.pareto(1, len(X)) + 0.1
    density = LSHKernelDensity(kernel, 1.0, algorithm=algorithm, random_state=0)
    off = np.expm1(of_rows(density.fit(X, None, weights)) - exactly(kernel, 1.0, X, weights))
    assert np.abs(off).mean() < 0.1  # rtol
    assert density.algorithm_ == algorithm


def test_a_row_too_far_away_for_the_type_of_the_rows():
    """It is answered exactly, and without itself too: its own kernel would make it an inlier."""
    rows = np.random.default_rng(0).normal(size=(3000, 8))
    X = np.r_[rows, np.full((1, 8), 1e9)]
    logs = of_rows(LSHKernelDensity(algorithm="near_far", random_state=0).fit(X))
    assert logs[-1] == pytest.approx(exactly("gaussian", 1.0, X)[-1], rel=1e-6)
    assert logs[-1] < -1e17 and logs[:-1].min() > -100


@pytest.mark.parametrize("algorithm", ["random", "near_far"])
@pytest.mark.parametrize("n_far", [5, 1000])
def test_rows_that_scaling_would_make_one(algorithm, n_far):
    """Far from the centre: those 5, or, where the 1,000 have the centre, the others."""
    X = np.random.default_rng(0).normal(size=(2000, 2))
    X[:n_far] += 1e17
    density = LSHKernelDensity(algorithm=algorithm, random_state=0).fit(X)
    got, wanted = of_rows(density), exactly("gaussian", 1.0, X)
    far = density._method.training.far()
    assert far.sum() >= n_far
    np.testing.assert_allclose(got[far], wanted[far], rtol=0, atol=1e-6)
    assert np.abs(np.expm1(got - wanted)).mean() < 0.2


@pytest.mark.parametrize(("algorithm", "bandwidth"), [("random", 6.0), ("near_far", 2.0)])
def test_unbiased(algorithm, bandwidth):
    """Over seeds: the row's block that is no part of the sample brings no bias."""
    X, means = clustered(1500, 20), []
    want = exactly("gaussian", bandwidth, X)
    for seed in range(40):
        density = LSHKernelDensity(bandwidth=bandwidth, algorithm=algorithm, random_state=seed)
        means.append(np.exp(of_rows(density.fit(X)) - want).mean() - 1)
    error = np.std(means, ddof=1) / np.sqrt(40)
    assert 1e-5 < error < 0.01  # sampled
    assert abs(np.mean(means)) < 4 * error


def test_sketched():
    X = clustered(22_000, 100).astype(np.float32)
    density = LSHKernelDensity("angular", algorithm="auto", n_bits=8, random_state=0).fit(X)
    assert density.algorithm_ == "bucket_sum"
    some = np.linspace(0, len(X) - 1, 300).astype(int)
    want = exactly("angular", 1.0, X)[some]
    assert np.abs(np.expm1(of_rows(density)[some] - want)).mean() < 0.15


@pytest.mark.parametrize("algorithm", ["brute", "near_far"])
def test_few_queries_a_call_for_many_rows(algorithm, monkeypatch):
    """The core's memory grows with their product."""
    density = LSHKernelDensity(algorithm=algorithm, random_state=0).fit(clustered(2000))
    want, pairs = of_rows(density), []
    for kind in (fitted_rows._RowsAsGiven, fitted_rows._PermutedRows):

        def recorded(keys, start, stop, first, last, threads, sums_of=kind.sums_of):
            pairs.append((stop - start) * (last - first))
            return sums_of(keys, start, stop, first, last, threads)

        monkeypatch.setattr(kind, "sums_of", recorded)
    monkeypatch.setattr(fitted_rows, "PAIRS", 2**12)
    assert np.array_equal(of_rows(density), want)
    assert max(pairs) <= 2**12


def test_same_bits_at_any_number_of_threads():
    X = clustered(2000)
    for algorithm in ("brute", "near_far"):
        density = LSHKernelDensity(algorithm=algorithm, random_state=0).fit(X)
        assert np.array_equal(*(log_means_of_rows(density._method, t) for t in (1, 2)))


@pytest.mark.parametrize("kernel", ["gaussian", "exponential", "laplacian"])
@pytest.mark.parametrize("far", [1e9, 1e12, 1e15])
def test_exact_of_rows_in_two_far_places(kernel, far):
    X = np.random.default_rng(1).normal(size=(150, 3))
    X[75:, 0] += far
    density = LSHKernelDensity(kernel, 0.7, algorithm="brute", normalize=False).fit(X)
    differences = (X[:, None] - X) / 0.7
    p = 1 if kernel == "laplacian" else 2
    distances = np.linalg.norm(differences, p, axis=-1)
    logs = -0.5 * distances**2 if kernel == "gaussian" else -distances
    np.fill_diagonal(logs, -np.inf)
    wanted = np.logaddexp.reduce(logs, axis=1) - np.log(149)
    assert np.allclose(of_rows(density), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("angle", [1e-3, 1e-7, 1e-10])
def test_rows_nearly_opposite_to_all_others(angle):
    rows = [[-1.0, 0.0], [-2.0, 0.0], [np.cos(angle), np.sin(angle)]]
    density = LSHKernelDensity("angular", n_bits=8, algorithm="brute", normalize=False).fit(rows)
    assert of_rows(density)[2] == pytest.approx(8 * np.log(angle / np.pi), rel=1e-6)

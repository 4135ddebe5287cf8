"""Collision probability: the formula, and how closely the families keep to it."""

import numpy as np
import pytest

from lshkit import _C
from lshkit.hash_functions import FAMILY, code_dtype, make_parameters
from lshkit.hashing import FastHadamard, Hyperplane

FAMILIES = {"hyperplane": Hyperplane, "hadamard": FastHadamard}
both_families = pytest.mark.parametrize("family", FAMILIES)
ANGLES = np.array([0.2, 0.6, 0.9, 1.2])


def rows_at_angles(d, n_pairs, kind, rng):
    """Unit vectors `(n_pairs, 1 + len(ANGLES), d)`: x, then a y at each angle from it.

    y lies in the plane of x and a direction orthogonal to it. kind: "random", or x is an axis and
    the direction is the "next" axis or the one "half" the axes away.
    """
    x, direction = np.zeros((2, n_pairs, d))
    if kind == "random":
        x, direction = rng.standard_normal((2, n_pairs, d))
        x /= np.linalg.norm(x, axis=-1, keepdims=True)
        direction -= (x * direction).sum(-1, keepdims=True) * x
        direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    else:
        pair, axis = np.arange(n_pairs), rng.permutation(d)[:n_pairs]
        x[pair, axis] = 1
        direction[pair, (axis + {"next": 1, "half": d // 2}[kind]) % d] = 1
    rows = [x, *(np.cos(angle) * x + np.sin(angle) * direction for angle in ANGLES)]
    return np.stack(rows, 1).astype(np.float32)


def collision_frequencies(family, rows, n_bits, n_hashes, n_sets, seed):
    """`(n_sets, n_angles)`: share of codes in common, over the pairs and hashes of each set."""
    parameters = make_parameters(family, rows.shape[-1], n_bits, n_hashes, n_sets, seed)
    x = rows.reshape(-1, rows.shape[-1])
    x = np.broadcast_to(x, (1, n_sets, *x.shape))  # a set of functions for each "head"
    codes = np.empty((*x.shape[:-1], n_hashes), code_dtype(2**n_bits))
    _C.hash(x, parameters, FAMILY[family], n_bits, n_hashes, codes, 0)
    codes = codes.reshape(n_sets, *rows.shape[:2], n_hashes)
    return (codes[:, :, :1] == codes[:, :, 1:]).mean((1, 3))


@both_families
@pytest.mark.parametrize("n_bits", [1, 8])
@pytest.mark.parametrize("d", [2, 7, 64])
def test_collisions_are_unbiased(family, d, n_bits):
    rows = rows_at_angles(d, 4, "random", np.random.default_rng(d))
    frequencies = [collision_frequencies(family, rows, n_bits, 32, 1, seed) for seed in range(200)]
    standard_error = np.std(frequencies, axis=0) / np.sqrt(len(frequencies))
    error = np.mean(frequencies, axis=0) - (1 - ANGLES / np.pi) ** n_bits
    assert (np.abs(error) < 4 * standard_error).all()


@pytest.mark.parametrize(
    ("d", "kind", "n_bits", "n_pairs", "n_blocks"),
    [
        (64, "random", 4, 3, 24),
        (64, "next", 4, 3, 24),
        (64, "half", 4, 3, 24),  # axes that share a plane of the first rotation
        (32, "half", 4, 3, 24),
        (128, "half", 4, 3, 24),
        (3, "random", 4, 12, 24),
        (7, "half", 4, 3, 24),
        (2, "next", 2, 1, 36),
        (64, "random", 8, 12, 48),
        (64, "next", 8, 12, 72),
        (64, "half", 8, 12, 120),
    ],
)
def test_hadamard_collision_probability(d, kind, n_bits, n_pairs, n_blocks):
    """Rotations are pseudo-random only: within 0.5 %, which is at least 4 standard errors."""
    rows = rows_at_angles(d, n_pairs, kind, np.random.default_rng(0))
    frequencies = [
        collision_frequencies("hadamard", rows, n_bits, 64, 1000, seed) for seed in range(n_blocks)
    ]
    frequencies = np.concatenate(frequencies) / (1 - ANGLES / np.pi) ** n_bits
    standard_error = frequencies.std(0) / np.sqrt(len(frequencies))
    assert (standard_error < 0.005 / 4).all()
    assert (np.abs(frequencies.mean(0) - 1) < 0.005).all()


@both_families
@pytest.mark.parametrize("n_bits", [1, 8])
def test_variance_of_the_collision_frequency(family, n_bits):
    """p (1 - p) / n_hashes for independent hashes; the rows of a rotation do a little better."""
    n_sets, n_hashes = 4000, 32
    rows = rows_at_angles(60, 1, "random", np.random.default_rng(0))
    frequencies = collision_frequencies(family, rows, n_bits, n_hashes, n_sets, seed=0)
    p = (1 - ANGLES / np.pi) ** n_bits
    ratio = frequencies.var(0) / (p * (1 - p) / n_hashes)
    noise = 4 * np.sqrt(2 / n_sets)  # of the variance of a nearly normal number
    assert (ratio < 1 + noise).all()
    assert (ratio > {"hyperplane": 1, "hadamard": 0.7}[family] - noise).all()


@both_families
@pytest.mark.parametrize(("d", "n_bits", "n_hashes"), [(64, 4, 64), (64, 8, 32), (30, 4, 32)])
def test_variance_of_a_count_of_rows_in_all_directions(family, d, n_bits, n_hashes):
    """That of independent hashes, though all bits of `FastHadamard` share a first stage.

    The variance between the hashes of a set over n_hashes is what standard errors state. Without
    permuted columns it was 0.46, 0.70 and 0.79 times the variance between sets.
    """
    rng = np.random.default_rng(0)
    rows, queries = (rng.normal(size=(n, d)).astype(np.float32) for n in (4000, 64))
    counts = []
    for seed in range(60):
        hasher = FAMILIES[family](d, n_bits, n_hashes, seed=seed)
        of_rows, of_queries = hasher.hash(rows), hasher.hash(queries)
        counts.append(
            [
                np.bincount(of_row, minlength=hasher.n_buckets)[of_query]
                for of_row, of_query in zip(of_rows.T, of_queries.T, strict=True)
            ]
        )
    counts = np.array(counts, float)  # (set, hash, query)
    stated = counts.var(1, ddof=1).mean(0) / n_hashes
    ratio = stated / counts.mean(1).var(0, ddof=1)
    # Ratios of queries that are at right angles to each other, each over 59 degrees of freedom.
    noise = 4 * ratio.std(ddof=1) / np.sqrt(len(ratio))
    assert noise < 0.13
    assert abs(ratio.mean() - 59 / 57) < noise + {"hyperplane": 0, "hadamard": 0.06}[family]


@both_families
def test_collision_probability(family):
    hasher = FAMILIES[family](2, 8, 1, seed=0)
    angles = np.linspace(0, np.pi, 7)
    y = 3 * np.stack([np.cos(angles), np.sin(angles)], -1)
    x = np.array([0.5, 0])
    got = hasher.collision_probability(x, y)
    np.testing.assert_allclose(got, (1 - angles / np.pi) ** 8, rtol=1e-12, atol=1e-30)
    assert got.dtype == np.float64
    assert (got <= 1).all()
    assert hasher.collision_probability(y[:, None], y[None]).shape == (7, 7)
    assert np.isnan(hasher.collision_probability(np.zeros(2), y)).all()
    assert np.isnan(hasher.collision_probability([np.inf, 1], y)).all()


@pytest.mark.parametrize("length", [1e-200, 1, 1e200])
def test_collision_probability_of_equal_and_opposite_rows(length):
    hasher = Hyperplane(60, 16, 1, seed=0)
    x = np.random.default_rng(0).standard_normal((1000, 60))
    assert (hasher.collision_probability(x, x * length) <= 1).all()
    np.testing.assert_allclose(hasher.collision_probability(x, x * length), 1, rtol=1e-14)
    x *= length
    assert (hasher.collision_probability(x, x) == 1).all()
    assert (hasher.collision_probability(x, -x) == 0).all()


@pytest.mark.parametrize("angle", [1e-12, 1e-9, 1e-6])
def test_collision_probability_of_nearly_equal_and_opposite_rows(angle):
    hasher = Hyperplane(2, 1, 1, seed=0)
    y = [np.cos(angle), np.sin(angle)]
    far = 1 - hasher.collision_probability([1, 0], y)
    np.testing.assert_allclose(far, angle / np.pi, rtol=1e-3)  # 1 - p is rounded to 1e-16
    np.testing.assert_allclose(hasher.collision_probability([-1, 0], y), angle / np.pi, rtol=1e-3)


@pytest.mark.parametrize(
    "norms, error, message",
    [
        (np.ones(3), ValueError, r"y_norms must have shape \(4,\), got \(3,\)"),
        (np.ones((4, 1)), ValueError, "y_norms must have shape"),
        ("norms", TypeError, "y_norms must hold the norms of y"),
    ],
)
def test_norms_that_are_none(norms, error, message):
    x, family = np.ones((4, 5)), FastHadamard(5, 4, 3, seed=0)
    with pytest.raises(error, match=message):
        family.pair_probability(x[:1], x, np.array([0, 4]), np.arange(4), y_norms=norms)

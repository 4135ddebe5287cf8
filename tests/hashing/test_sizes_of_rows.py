"""Rows of any size: codes are those of the direction; NaN and infinity are refused."""

import numpy as np
import pytest

from lshkit import reference
from lshkit.hashing import EuclideanLSH, FastHadamard, Hyperplane, RandomBinning

FAMILIES = {"hyperplane": Hyperplane, "hadamard": FastHadamard}
both_families = pytest.mark.parametrize("family", FAMILIES)
EVERY = {
    **{name: lambda d, m, make=make: make(d, 9, m, seed=0) for name, make in FAMILIES.items()},
    "euclidean": lambda d, m: EuclideanLSH(d, 3, m, width=2.0, seed=0),
    "binning": lambda d, m: RandomBinning(d, m, bandwidth=2.0, seed=0),
}
every_family = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)


def whole_numbers(shape):
    """float32 that stay exact when they are scaled by any power of two that float32 holds."""
    return np.random.default_rng(0).integers(-500, 500, shape).astype(np.float32)


@both_families
@pytest.mark.parametrize("d", [20, 64, 300])
@pytest.mark.parametrize("exponent", [-149, -135, -120, -80, -50, 50, 80, 110, 118])
def test_codes_are_those_of_the_direction(family, d, exponent):
    """118: numbers of 1.6e38, whose transforms leave float32; -149: subnormal ones."""
    hasher = FAMILIES[family](d, 12, 33, seed=0)
    x = whole_numbers((40, d))
    wanted = hasher.hash(x)
    scaled = np.ldexp(x, exponent)
    assert np.isfinite(scaled).all()
    np.testing.assert_array_equal(hasher.hash(scaled), wanted)
    scaled[::3] = x[::3]  # beside rows that need nothing
    np.testing.assert_array_equal(hasher.hash(scaled), wanted)
    projected = reference.projections(x, hasher.parameters, family, 12, 33)
    bits = wanted[..., None] >> np.arange(12) & 1
    certain = np.abs(projected) > 1e-4 * np.abs(projected).max()
    assert certain.mean() > 0.99
    np.testing.assert_array_equal(bits[certain], projected[certain] > 0)


@both_families
@pytest.mark.parametrize("exponent", [-1074, -1000, -200, 200, 1000])
def test_codes_of_float64_rows_beyond_float32(family, exponent):
    hasher = FAMILIES[family](20, 12, 33, seed=0)
    x = whole_numbers((40, 20))
    scaled = np.ldexp(x.astype(np.float64), exponent)
    wanted = hasher.hash(x)
    np.testing.assert_array_equal(hasher.hash(scaled), wanted)
    codes, weights = hasher.soft_hash(scaled, 4, 2.0)
    np.testing.assert_array_equal(codes, hasher.soft_hash(x, 4, 2.0)[0])
    torch = pytest.importorskip("torch")
    np.testing.assert_array_equal(hasher.hash(torch.from_numpy(scaled)).numpy(), wanted)


@both_families
@pytest.mark.parametrize("n_probes", [1, 4])
@pytest.mark.parametrize("exponent", [-149, -135, -120, -80, 80, 110, 118])
def test_soft_codes_are_those_of_the_direction(family, n_probes, exponent):
    hasher = FAMILIES[family](64, 12, 33, seed=0)
    x = whole_numbers((40, 64))
    wanted_codes, wanted = hasher.soft_hash(x, n_probes, 2.0)
    scaled = np.ldexp(x, exponent)
    scaled[::3] = x[::3]
    codes, weights = hasher.soft_hash(scaled, n_probes, 2.0)
    # Norms are rounded, and margins keep 20 bits: probes change where two margins are as good as
    # equal, and weights with margins of up to 5 by 2 * 2 * 5 * 2^-20.
    same = (codes == wanted_codes).all(-1)
    assert same.mean() > 0.999
    np.testing.assert_array_equal(codes[..., 0], wanted_codes[..., 0])
    np.testing.assert_allclose(weights[same], wanted[same], rtol=2e-5)


@every_family
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_refused(make, bad):
    hasher = make(20, 5)
    x = np.random.default_rng(0).standard_normal((30, 20))
    wanted = hasher.hash(x)
    x[17, 3] = x[21, 0] = bad
    for rows in (x, x.astype(np.float32)):
        with pytest.raises(ValueError, match="x must be finite, row 17 has a NaN or infinity"):
            hasher.hash(rows)
        codes = hasher.hash(rows, check_finite=False)
        others = np.delete(np.arange(30), [17, 21])
        np.testing.assert_array_equal(codes[others], wanted[others])
    with pytest.raises(ValueError, match=r"row \(1, 2\) has a NaN"):
        hasher.hash(x.reshape(2, 15, 20))
    with pytest.raises(ValueError, match="it has a NaN"):
        hasher.hash(x[17])
    torch = pytest.importorskip("torch")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match="row 17 has a NaN"):
            hasher.hash(torch.from_numpy(x).to(dtype))
    assert hasher.hash(torch.from_numpy(x), check_finite=False).shape == (30, 5)
    assert hasher.hash(torch.ones(0, 20)).shape == (0, 5)


@both_families
def test_soft_codes_of_rows_that_are_not_finite_are_refused(family):
    hasher = FAMILIES[family](20, 9, 5, seed=0)
    x = np.ones((4, 20), np.float32)
    x[2, 3] = np.nan
    with pytest.raises(ValueError, match="x must be finite, row 2 has a NaN or infinity"):
        hasher.soft_hash(x, 4, 2.0)
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="x must be finite, row 2 has a NaN or infinity"):
        hasher.soft_hash(torch.from_numpy(x), 4, 2.0)
    assert np.isnan(hasher.soft_hash(x, 4, 2.0, check_finite=False)[1][2]).all()

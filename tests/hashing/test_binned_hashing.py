"""The families of the distance: codes against the reference, collisions against the formulas."""

import warnings

import numpy as np
import pytest
from scipy import integrate, stats

from lshkit import _C, reference
from lshkit.hashing import EuclideanLSH, RandomBinning


def normal_projections(d, n_hashes, seed=0, **options):
    return EuclideanLSH(d, 3, n_hashes, seed=seed, **{"width": 2.0} | options)


def cauchy_projections(d, n_hashes, seed=0, **options):
    return EuclideanLSH(d, 2, n_hashes, p=1, seed=seed, **{"width": 4.0} | options)


def grids(d, n_hashes, seed=0, **options):
    return RandomBinning(d, n_hashes, seed=seed, **{"bandwidth": 2.0} | options)


def uneven_grids(d, n_hashes, seed=0):
    return RandomBinning(d, n_hashes, bandwidth=np.linspace(1, 3, d), seed=seed)


MAKERS = [normal_projections, cauchy_projections, grids, uneven_grids]
every_family = pytest.mark.parametrize("make", MAKERS)


def positions(hasher, x):
    """Where the rows lie in units of the bins, whose floor is the bin."""
    x = np.asarray(x, np.float64)
    if isinstance(hasher, EuclideanLSH):
        return np.einsum("...d,hbd->...hb", x, hasher.directions) + hasher.shifts
    return x[..., None, :] * hasher.scales + hasher.shifts


def expected_codes(hasher, x):
    if isinstance(hasher, EuclideanLSH):
        bins = reference.projection_bins(x, hasher.directions, hasher.shifts)
    else:
        bins = reference.feature_bins(x, hasher.scales, hasher.shifts)
    return reference.bin_codes(bins, hasher.multipliers)


def assert_equal_to_reference(hasher, x):
    """But for rows within rounding of the edge of a bin: 2^-52 of the terms, for each of them."""
    codes = hasher.hash(x)
    assert codes.dtype == np.uint32
    assert codes.shape == x.shape[:-1] + (hasher.n_hashes,)
    at = positions(hasher, x)
    magnitude = np.abs(at)
    if isinstance(hasher, EuclideanLSH):
        magnitude = np.einsum("...d,hbd->...hb", np.abs(x).astype(float), np.abs(hasher.directions))
    near = np.abs(at - np.rint(at)) <= 2.0**-52 * (hasher.n_features + 2) * (magnitude + 1)
    equal = codes == expected_codes(hasher, x)
    assert (equal | near.any(-1)).all()
    assert equal.mean() > 0.99


@every_family
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("n", "d", "n_hashes"), [(1, 1, 1), (2, 7, 5), (9, 64, 33), (33, 65, 8), (300, 3, 17)]
)
def test_equal_to_reference(make, dtype, n, d, n_hashes):
    x = 10 * np.random.default_rng(n).standard_normal((n, d))
    assert_equal_to_reference(make(d, n_hashes), x.astype(dtype))


@every_family
@pytest.mark.parametrize("offset", [1e6, -1e9])
def test_far_from_the_origin(make, offset):
    """Bins have numbers beyond 2^31 here, and rows must still be told apart."""
    x = offset + np.random.default_rng(0).standard_normal((200, 8))
    assert_equal_to_reference(make(8, 16), x)


@pytest.mark.parametrize("n_bits", [1, 4, 5, 9, 32])
def test_any_number_of_projections(n_bits):
    x = np.random.default_rng(0).standard_normal((37, 11))
    assert_equal_to_reference(EuclideanLSH(11, n_bits, 7, width=1.0, seed=0), x)


@every_family
@pytest.mark.parametrize("d", [1, 5])
def test_bins_are_exact_as_far_as_rows_are_accepted(make, d):
    """x, 2x and -x lie 1e14 bins apart: a code in common by chance is one of 2^32."""
    hasher = make(d, 500)
    unit = getattr(hasher, hasher._settings[0])
    x = np.random.default_rng(0).standard_normal((1, d)) * unit
    x *= 0.49 * hasher._reach * np.min(unit) / np.linalg.norm(x)
    codes = hasher.hash(np.concatenate([x, 2 * x, -x, x.astype(np.float32)]))
    assert not (codes[:1] == codes[1:3]).any()


@every_family
@pytest.mark.parametrize("far", [2.0**60, 1e30, -1e300])
def test_rows_beyond_exact_bins_are_refused(make, far):
    hasher = make(2, 500)
    x = np.zeros((2, 3, 2))
    x[1, 2, 1] = far
    unit = hasher._settings[0]
    stated = f"{0.995 * hasher._reach:.3g}"
    assert 0.98 * hasher._reach < float(stated) < hasher._reach
    wanted = f"less than 2^51 = 2.3e15 bins .* within {stated} {unit}s of it"
    wanted = wanted.replace("^", r"\^").replace("+", r"\+")
    for dtype in (np.float64, np.float32)[: 1 + (abs(far) < 1e38)]:
        rows = x.astype(dtype)
        with pytest.raises(ValueError, match=rf"x must be {wanted} are, row \(1, 2\) is"):
            hasher.hash(rows)
        with pytest.raises(ValueError, match=rf"x must be {wanted} are, it is"):
            hasher.hash(rows[1, 2])
    codes = hasher.hash(x, check_finite=False)
    np.testing.assert_array_equal(codes[0], hasher.hash(x[0]))
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="x must be less than 2.51 .* bins from the origin"):
        hasher.hash(torch.from_numpy(x))


def test_a_feature_of_large_numbers_and_as_large_a_bandwidth():
    hasher = RandomBinning(2, 9, bandwidth=[1e-6, 1e20], seed=0)
    small = RandomBinning(2, 9, bandwidth=[1e-6, 1.0], seed=0)
    x = np.array([[1e-6, 2e20], [3e-6, -1e20]])
    np.testing.assert_array_equal(hasher.hash(x), small.hash(x / [1, 1e20]))


# ---------------------------------------------------------------- collisions

DISTANCES = np.array([0.0, 0.2, 0.7, 2.0, 6.0])


@every_family
@pytest.mark.parametrize("d", [1, 5])
def test_collisions_are_unbiased(make, d):
    """A million hash functions: a standard error of at most 0.0005, and 0.002 allowed for it."""
    rng = np.random.default_rng(d)
    direction = rng.standard_normal(d)
    x = rng.standard_normal(d)
    y = x + DISTANCES[:, None] * direction / np.linalg.norm(direction)
    seeds = range(16)
    frequencies = []
    for seed in seeds:
        hasher = make(d, 65535, seed=seed)
        frequencies.append((hasher.hash(x) == hasher.hash(y)).mean(-1))
    expected = hasher.collision_probability(x, y)
    frequency = np.mean(frequencies, 0)
    standard_error = np.sqrt(expected * (1 - expected) / (len(seeds) * 65535))
    assert expected[0] == frequency[0] == 1
    assert (np.abs(frequency - expected) <= 4 * standard_error).all()
    assert ((expected > 0.1) & (expected < 0.9)).any()  # not decided beforehand


def of_bins(p):
    """The probability of sharing bins: different ones share a code with probability 2^-32."""
    return (p - 2**-32) / (1 - 2**-32)


def test_formula_of_projections_is_the_integral():
    """Datar et al. 2004, section 3.2: the integral of f(t / c) / c (1 - t / w) over the bin."""
    for p, law in ((2, stats.norm), (1, stats.cauchy)):
        for width in (0.05, 1.0, 30.0):
            hasher = EuclideanLSH(3, 1, 1, width=width, p=p, seed=0)
            got = of_bins(hasher.probability_of_distance(1.0))
            wanted, error = integrate.quad(lambda t: 2 * law.pdf(t) * (1 - t / width), 0, width)  # noqa: B023
            assert error < 1e-8
            np.testing.assert_allclose(got, wanted, rtol=1e-9)


@pytest.mark.parametrize("p", [1, 2])
def test_formula_at_the_ends(p):
    hasher = EuclideanLSH(3, 1, 1, width=2.0, p=p, seed=0)
    far = np.array([1e5, 1e9, 1e100])
    slope = {1: 1 / np.pi, 2: 1 / np.sqrt(2 * np.pi)}[p]  # P(r) / r at r = 0
    got = of_bins(hasher.probability_of_distance(far))
    np.testing.assert_allclose(got, slope * 2 / far, rtol=1e-6, atol=1e-25)
    near = hasher.probability_of_distance([0.0, 1e-300, 1e-160, 1e-17])
    assert near[0] == 1
    np.testing.assert_allclose(near, 1, rtol=3e-16)
    ends = hasher.probability_of_distance([np.inf, 1e300, np.nan])
    np.testing.assert_array_equal(ends, [2**-32, 2**-32, np.nan])
    falling = hasher.probability_of_distance(np.logspace(-12, 12, 500))
    assert (np.diff(falling) <= 0).all()
    with pytest.raises(ValueError, match="distance must be >= 0, got -1.0"):
        hasher.probability_of_distance([2.0, -1.0])


def test_p_is_the_norm_of_the_distance():
    x, y = np.zeros(2), np.array([3.0, 4.0])
    for p, distance in ((2, 5.0), (1, 7.0)):
        hasher = EuclideanLSH(2, 3, 1, width=4.0, p=p, seed=0)
        expected = hasher.probability_of_distance(distance)
        assert hasher.collision_probability(x, y) == expected
        single = EuclideanLSH(2, 1, 1, width=4.0, p=p, seed=0).probability_of_distance(distance)
        np.testing.assert_allclose(of_bins(expected), of_bins(single) ** 3, rtol=1e-13)


def test_random_binning_is_the_laplacian_kernel():
    x, y = np.random.default_rng(0).standard_normal((2, 9, 4))
    one = RandomBinning(4, 3, bandwidth=1.5, seed=0)
    distance = np.abs(x - y).sum(-1)
    np.testing.assert_allclose(of_bins(one.collision_probability(x, y)), np.exp(-distance / 1.5))
    np.testing.assert_allclose(
        of_bins(one.probability_of_distance(distance)), np.exp(-distance / 1.5)
    )
    each = RandomBinning(4, 3, bandwidth=[1.0, 2.0, 0.5, 4.0], seed=0)
    distance = (np.abs(x - y) / [1.0, 2.0, 0.5, 4.0]).sum(-1)
    np.testing.assert_allclose(of_bins(each.collision_probability(x, y)), np.exp(-distance))
    np.testing.assert_allclose(of_bins(each.probability_of_distance(distance)), np.exp(-distance))


def test_bins_of_unequal_rows_rarely_share_a_code():
    """All 20,000 rows fall in cells of their own: 2^-32 for each of 2e8 pairs, 0.05 collisions."""
    hasher = RandomBinning(6, 4, bandwidth=1e-6, seed=0)
    codes = hasher.hash(np.random.default_rng(0).standard_normal((20000, 6)))
    for column in codes.T:
        assert len(np.unique(column)) >= 19998


def test_codes_use_all_their_bits():
    """Any 8 of the 32 bits are uniform: chi-square of 255 degrees, 4 standard deviations."""
    hasher = EuclideanLSH(6, 2, 1, width=1e-3, seed=0)
    codes = hasher.hash(np.random.default_rng(0).standard_normal((20000, 6)))[:, 0]
    for shift in (0, 12, 24):
        counts = np.bincount(codes >> shift & 255, minlength=256)
        chi_square = ((counts - 20000 / 256) ** 2).sum() / (20000 / 256)
        assert abs(chi_square - 255) < 4 * np.sqrt(2 * 255)


# ---------------------------------------------------------------- the random numbers


def test_laws_of_the_random_numbers():
    hasher = RandomBinning(50, 400, bandwidth=1.5, seed=0)
    assert stats.kstest((1 / hasher.scales).ravel(), stats.gamma(2, scale=1.5).cdf).pvalue > 1e-4
    assert stats.kstest(hasher.shifts.ravel(), stats.uniform.cdf).pvalue > 1e-4
    for p, law in ((1, stats.cauchy), (2, stats.norm)):
        hasher = EuclideanLSH(50, 4, 100, width=2.5, p=p, seed=0)
        assert stats.kstest((hasher.directions * 2.5).ravel(), law.cdf).pvalue > 1e-4
        assert stats.kstest(hasher.shifts.ravel(), stats.uniform.cdf).pvalue > 1e-4


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"width": 0}, ValueError, "width must be a finite number > 0, got 0"),
        ({"width": np.nan}, ValueError, "width must be a finite number > 0, got nan"),
        ({"width": "1"}, TypeError, "width must be a finite number > 0, got '1'"),
        ({"width": 1, "p": 3}, ValueError, "p must be an integer from 1 to 2, got 3"),
        ({"width": 1, "p": 1.0}, TypeError, "p must be an integer from 1 to 2, got 1.0"),
        ({"width": 1, "seed": -1}, ValueError, "seed must be an integer >= 0, got -1"),
    ],
)
def test_bad_projections(options, error, message):
    with pytest.raises(error, match=message):
        EuclideanLSH(4, 2, 3, **options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 2, 3), "n_features must be an integer >= 1, got 0"),
        ((4, 0, 3), "n_bits must be an integer from 1 to 65536, got 0"),
        ((4, 2, 65536), "n_hashes must be an integer from 1 to 65535, got 65536"),
    ],
)
def test_bad_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        EuclideanLSH(*sizes, width=1.0)


@pytest.mark.parametrize(
    ("bandwidth", "error", "message"),
    [
        (0.0, ValueError, "bandwidth must be a finite number > 0, got 0.0"),
        (np.inf, ValueError, "bandwidth must be a finite number > 0, got inf"),
        ([1, 2, 3], ValueError, r"bandwidth must be a number or an array of shape \(4,\), got"),
        ([1, 2, 3, -1], ValueError, "bandwidth must be a finite number > 0, got -1.0"),
        (np.ones((4, 1)), ValueError, r"array of shape \(4,\), got shape \(4, 1\)"),
        (None, TypeError, "bandwidth must be a finite number > 0, got None"),
        (["a"] * 4, TypeError, "bandwidth must hold real numbers"),
    ],
)
def test_bad_bandwidth(bandwidth, error, message):
    with pytest.raises(error, match=message):
        RandomBinning(4, 3, bandwidth=bandwidth)


def test_the_core_checks_its_arrays():
    x, codes = np.ones((3, 4)), np.empty((3, 2), np.uint32)
    factors, shifts, words = np.ones((2, 4)), np.ones((2, 4)), np.ones((2, 4), np.uint32)
    fold, short = np.ones((2, 2), np.uint64), codes.astype(np.uint16)
    for arguments, message in (
        ((x, factors, shifts, words, codes[:2]), r"codes: shape \(3, 2\)"),
        ((x[:, :3].copy(), factors, shifts, words, codes), r"scales: shape \(\*, 3\)"),
        ((x, factors, shifts[:1], words, codes), r"shifts: shape \(2, 4\)"),
        ((x, factors, shifts, words[:1], codes), r"multipliers: shape \(2, 4\)"),
        ((x, factors, shifts, words, short, 0, fold[:1], 12), r"fold: shape \(2, 2\)"),
        ((x, factors, shifts, words, short, 0, fold, 17), "fold_bits: 1 to 16 is wanted"),
    ):
        with pytest.raises(ValueError, match=message):
            _C.random_binning_hash(*arguments)
    with pytest.raises(TypeError, match="codes: dtype uint32"):
        _C.random_binning_hash(x, factors, shifts, words, codes.astype(np.int64))
    with pytest.raises(TypeError, match="codes: dtype uint16"):
        _C.random_binning_hash(x, factors, shifts, words, codes, 0, fold, 12)
    with pytest.raises(ValueError, match=r"directions: shape \(\*, \*, 4\)"):
        _C.euclidean_hash(x, np.ones((2, 3, 5)), np.ones((2, 3)), words, codes)


# ---------------------------------------------------------------- sizes and types


@pytest.mark.parametrize("size", [1e-200, 1e-160, 1.0, 1e160, 1e300])
def test_distances_of_any_size(size):
    family = EuclideanLSH(3, 2, 2, width=1.0, seed=0)
    x, y = np.array([[3.0, 0, 0], [1, 1, 1], [2, 0, 1]]) * size, np.array([0, 4.0, 0]) * size
    wanted = size * np.sqrt([25, 11, 21])
    assert np.allclose(family.distance(x, y), wanted, rtol=1e-14, atol=0)
    assert (family.distance(x, x) == 0).all()


def test_distances_beyond_float64_in_bandwidths_have_probability_zero():
    family = RandomBinning(3, 1, bandwidth=0.5, seed=0)
    assert family.probability_of_distance(np.array([1.7e308])) < 1e-9


def test_numpy_scalars_of_any_type_are_widths():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (np.float16, np.float32, np.int8):
            assert EuclideanLSH(4, 2, 3, width=dtype(2), seed=0).width == 2.0
            assert RandomBinning(4, 3, bandwidth=dtype(2), seed=0).bandwidth == 2.0

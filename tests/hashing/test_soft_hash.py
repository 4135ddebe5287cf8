"""Soft codes: against the reference, against a float64 torch formula, and their properties."""

import numpy as np
import pytest
from cases.hashing import soft_codes_of_core

from lshkit import reference
from lshkit.hash_functions import code_dtype, make_parameters
from lshkit.hashing import FastHadamard, Hyperplane

FAMILIES = {"hyperplane": Hyperplane, "hadamard": FastHadamard}
both_families = pytest.mark.parametrize("family", FAMILIES)
PROBES = [1, 2, 3, 4, 5, 8, 16]


def projections(hasher, x):
    sizes = hasher.family, hasher.n_bits, hasher.n_hashes
    return reference.unit_projections(np.float32(x), hasher.parameters, *sizes)


def rounding_bound(hasher):
    """How far float32 arithmetic may move a unit row's projection, which has unit variance.

    The norm and the scaling by it: d / 2 + 2 roundings at most. A dot product of d terms: d of
    |w|. A rotation: two sums of products by sines and cosines (3 roundings each) and 3 log2(D)
    stages, each moving the vector by at most 2^-24 of its length, D^(1/2) in the end.
    """
    d = hasher.n_features
    if isinstance(hasher, Hyperplane):
        return 2.0**-24 * (1.5 * d + 2) * np.linalg.norm(hasher.planes, axis=-1).max()
    columns = hasher.parameters.shape[-1]
    return 2.0**-24 * (8 + d / 2 + 3 * np.log2(columns)) * columns**0.5


def selected_bits(codes):
    """Numbers of the selected bits `(..., r)`: probe 2^k flips the k-th of them."""
    r = (codes.shape[-1] - 1).bit_length()
    flips = codes[..., 2 ** np.arange(r)] ^ codes[..., :1]
    assert (np.bitwise_count(flips) == 1).all() if hasattr(np, "bitwise_count") else True
    return np.log2(flips.astype(np.float64)).astype(int)


def flipped(n_probes):
    return np.arange(n_probes)[:, None] >> np.arange((n_probes - 1).bit_length()) & 1


def assert_equal_up_to_rounding(codes, weights, hasher, x, n_probes, sharpness):
    z = projections(hasher, x)
    shape = z.shape[:-1] + (n_probes,)
    assert codes.shape == weights.shape == shape
    assert codes.dtype == code_dtype(hasher.n_buckets)
    assert weights.dtype == np.float32
    bound = rounding_bound(hasher)
    own_bits = codes[..., :1] >> np.arange(hasher.n_bits) & 1 == 1
    assert (np.abs(z) <= bound)[own_bits != (z > 0)].all()

    bits = selected_bits(codes)
    expected = codes[..., :1] ^ (flipped(n_probes) << bits[..., None, :]).sum(-1)
    np.testing.assert_array_equal(codes, expected)
    # The smallest margins, ascending, but for those that rounding may exchange: margins have 20
    # bits, so one may be off by 2^-19 of itself before the choice.
    margins = np.take_along_axis(np.abs(z), bits, -1)
    smallest = np.sort(np.abs(z), -1)[..., : bits.shape[-1]]
    off = 2 * bound + 2.0**-18 * smallest
    assert (np.abs(margins - smallest) <= off).all()

    likelihood = np.exp(-2 * sharpness * (flipped(n_probes) * margins[..., None, :]).sum(-1))
    wanted = likelihood / likelihood.sum(-1, keepdims=True)
    # Where the sign of a projection was lost to rounding, so was that of its margin.
    log_error = 4 * sharpness * (2 * bound + 2.0**-20 * margins).sum(-1)[..., None]
    assert (np.abs(weights - wanted) <= wanted * (log_error + 2e-6) + 1e-30).all()
    np.testing.assert_allclose(weights.sum(-1, dtype=np.float64), 1, atol=1e-6)


@both_families
@pytest.mark.parametrize("n_bits", [1, 4, 8, 9, 12, 16])
@pytest.mark.parametrize("d", [1, 7, 60, 64, 80, 128, 200])
def test_equal_to_reference(family, d, n_bits):
    rng = np.random.default_rng(d * n_bits)
    for case, n_probes in enumerate(PROBES):
        if n_probes > 2**n_bits:
            continue
        n, n_hashes = (1, 3, 17, 33, 47)[(case + d) % 5], (1, 5, 32, 33, 70)[(case + n_bits) % 5]
        hasher = FAMILIES[family](d, n_bits, n_hashes, seed=case)
        x = rng.standard_normal((n, d)).astype(np.float32)
        codes, weights = hasher.soft_hash(x, n_probes, 2.0)
        assert_equal_up_to_rounding(codes, weights, hasher, x, n_probes, 2.0)


@both_families
def test_the_reference_itself(family):
    """Codes and weights of soft_codes, where no projection is near another or zero."""
    hasher = FAMILIES[family](60, 6, 5, seed=0)
    x = np.random.default_rng(0).standard_normal((4, 60)).astype(np.float32)
    for n_probes in (1, 2, 3, 4, 7, 64):
        codes, weights = hasher.soft_hash(x, n_probes, 1.5)
        wanted_codes, wanted = reference.soft_codes(projections(hasher, x), n_probes, 1.5)
        np.testing.assert_array_equal(codes, wanted_codes)
        assert codes.dtype == wanted_codes.dtype
        np.testing.assert_allclose(weights, wanted, rtol=1e-4)


@both_families
@pytest.mark.parametrize("n_bits", [1, 3, 5, 9])
def test_dense_is_the_softmax_over_all_buckets(family, n_bits):
    hasher = FAMILIES[family](20, n_bits, 6, seed=0)
    x = np.random.default_rng(0).standard_normal((5, 20)).astype(np.float32)
    codes, weights = hasher.soft_hash(x, 2**n_bits, 0.7)
    np.testing.assert_array_equal(
        np.sort(codes, -1), np.broadcast_to(np.arange(2**n_bits), codes.shape)
    )
    z = projections(hasher, x)
    signs = np.where(codes[..., None] >> np.arange(n_bits) & 1, 1, -1)
    wanted = np.prod(1 / (1 + np.exp(-2 * 0.7 * z[..., None, :] * signs)), -1)
    np.testing.assert_allclose(weights, wanted, rtol=1e-4)


@both_families
@pytest.mark.parametrize("n_probes", [1, 2, 3])
def test_few_probes_are_the_most_likely(family, n_probes):
    hasher = FAMILIES[family](20, 7, 6, seed=0)
    x = np.random.default_rng(0).standard_normal((30, 20)).astype(np.float32)
    every, likelihood = hasher.soft_hash(x, 128, 2.0)
    best = np.argsort(-likelihood, -1, kind="stable")[..., :n_probes]
    codes, weights = hasher.soft_hash(x, n_probes, 2.0)
    np.testing.assert_array_equal(codes, np.take_along_axis(every, best, -1))
    top = np.take_along_axis(likelihood, best, -1)
    np.testing.assert_allclose(weights, top / top.sum(-1, keepdims=True), rtol=1e-5)


@both_families
def test_probe_zero_is_the_code_of_hash(family):
    hasher = FAMILIES[family](60, 12, 32, seed=0)
    x = np.random.default_rng(0).standard_normal((100, 60)).astype(np.float32)
    codes, weights = hasher.soft_hash(x, 4, 2.0)
    np.testing.assert_array_equal(codes[..., 0], hasher.hash(x))
    assert (weights[..., :1] >= weights).all()
    codes, weights = hasher.soft_hash(x, 1, 2.0)
    np.testing.assert_array_equal(codes[..., 0], hasher.hash(x))
    assert (weights == 1).all()


@both_families
@pytest.mark.parametrize("n_probes", [2, 4, 5])
def test_rows_without_a_direction(family, n_probes):
    hasher = FAMILIES[family](60, 8, 33, seed=0)
    x = np.random.default_rng(0).standard_normal((40, 60)).astype(np.float32)
    clean_codes, clean_weights = hasher.soft_hash(x, n_probes, 2.0)
    x[3] = 0
    x[20] = -0.0
    x[7, 5], x[21, 59], x[33, 0] = np.nan, np.inf, -np.inf
    codes, weights = hasher.soft_hash(x, n_probes, 2.0, check_finite=False)
    wanted = (flipped(n_probes) << np.arange(flipped(n_probes).shape[-1])).sum(-1)
    for row in (3, 20):  # code 0, and flips of its lowest bits
        np.testing.assert_array_equal(codes[row], np.broadcast_to(wanted, codes[row].shape))
        np.testing.assert_allclose(weights[row], 1 / n_probes, rtol=1e-6)
    assert np.isnan(weights[[7, 21, 33]]).all()
    others = np.delete(np.arange(40), [3, 20, 7, 21, 33])
    np.testing.assert_array_equal(codes[others], clean_codes[others])
    np.testing.assert_array_equal(weights[others], clean_weights[others])


@both_families
@pytest.mark.parametrize("sharpness", [1e-30, 1e-3, 30.0, 1e4, 1e38])
@pytest.mark.parametrize("n_probes", [2, 3, 4, 8, 32])
def test_any_sharpness(family, sharpness, n_probes):
    hasher = FAMILIES[family](20, 8, 6, seed=0)
    x = np.random.default_rng(0).standard_normal((9, 20)).astype(np.float32)
    codes, weights = hasher.soft_hash(x, n_probes, sharpness)
    assert np.isfinite(weights).all()
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    _, wanted = reference.soft_codes(projections(hasher, x), n_probes, sharpness)
    np.testing.assert_allclose(
        weights, wanted, atol=1e-5 * max(1, sharpness if sharpness < 1e5 else 1)
    )


@both_families
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)])
def test_leading_dimensions(family, shape):
    hasher = FAMILIES[family](7, 9, 5, seed=0)
    x = np.random.default_rng(0).standard_normal((*shape, 7))
    codes, weights = hasher.soft_hash(x, 4, 2)
    assert codes.shape == weights.shape == (*shape, 5, 4)
    flat_codes, flat_weights = hasher.soft_hash(x.reshape(-1, 7), 4, 2)
    np.testing.assert_array_equal(codes, flat_codes.reshape(codes.shape))
    np.testing.assert_array_equal(weights, flat_weights.reshape(weights.shape))


@both_families
def test_the_core_says_whether_all_was_finite(family):
    parameters = make_parameters(family, 20, 5, 3, seed=0)
    x = np.random.default_rng(0).standard_normal((1, 1, 37, 20)).astype(np.float32)
    grad = np.ones((1, 1, 37, 3 * 4), np.float32)
    for bad in (0.0, np.nan, np.inf):
        x[0, 0, 20, 3] = bad
        *_, finite = soft_codes_of_core(
            x, parameters, family, 5, 3, 4, np.ones(1, np.float32), grad, 1
        )[:7]
        assert finite == np.isfinite(bad)


# ---------------------------------------------------------------- bad input


@both_families
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 2.0), ValueError, "n_probes must be an integer from 1 to 32, got 0"),
        ((33, 2.0), ValueError, "n_probes must be an integer from 1 to 32, got 33"),
        ((2.0, 2.0), TypeError, r"n_probes must be an integer from 1 to 32, got 2.0 \(float\)"),
        ((True, 2.0), TypeError, "n_probes must be an integer"),
        ((4, 0), ValueError, r"sharpness must be a finite number > 0, got 0 \(int\)"),
        ((4, -1.0), ValueError, "sharpness must be a finite number > 0, got -1.0"),
        ((4, np.nan), ValueError, "sharpness must be a finite number > 0, got nan"),
        ((4, np.inf), ValueError, "sharpness must be a finite number > 0, got inf"),
        ((4, 1e39), ValueError, "sharpness must be a finite number > 0"),
        ((4, "2"), TypeError, r"sharpness must be a finite number > 0, got '2' \(str\)"),
        ((4, None), TypeError, "sharpness must be a finite number > 0, got None"),
        ((4, True), TypeError, "sharpness must be a finite number > 0, got True"),
        ((4, np.ones(2)), TypeError, "sharpness must be a finite number > 0, got array"),
    ],
)
def test_bad_arguments(family, arguments, error, message):
    hasher = FAMILIES[family](7, 5, 3, seed=0)
    with pytest.raises(error, match=message):
        hasher.soft_hash(np.ones((3, 7)), *arguments)
    torch = pytest.importorskip("torch")
    with pytest.raises(error, match=message):
        hasher.soft_hash(torch.ones(3, 7), *arguments)


def test_bad_rows():
    hasher = Hyperplane(7, 5, 3, seed=0)
    with pytest.raises(ValueError, match=r"x must have shape \(..., 7\), .* got \(3, 6\)"):
        hasher.soft_hash(np.ones((3, 6)), 4, 2.0)
    with pytest.raises(TypeError, match="x must hold real numbers"):
        hasher.soft_hash(np.ones((3, 7), complex), 4, 2.0)


def test_bad_sharpness_tensors():
    torch = pytest.importorskip("torch")
    hasher = FastHadamard(7, 5, 3, seed=0)
    for bad, error, message in (
        (torch.tensor(0.0), ValueError, "sharpness must be a finite number > 0, got 0.0"),
        (torch.tensor(-2.0), ValueError, "sharpness must be a finite number > 0, got -2.0"),
        (torch.tensor(torch.nan), ValueError, "sharpness must be a finite number > 0, got nan"),
        (torch.ones(2), ValueError, r"sharpness must be one number, got a tensor of shape \(2,\)"),
        (torch.tensor(2), TypeError, "sharpness must hold a real number, got .* torch.int64"),
    ):
        with pytest.raises(error, match=message):
            hasher.soft_hash(torch.ones(3, 7), 4, bad)
    with pytest.raises(TypeError, match="sharpness must be a finite number > 0, got tensor"):
        hasher.soft_hash(np.ones((3, 7)), 4, torch.tensor(2.0))

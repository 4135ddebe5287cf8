"""Hash families against the reference and against their own collision probability."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lshkit import _C, reference
from lshkit.hash_functions import FAMILY, code_dtype, make_parameters
from lshkit.hashing import EuclideanLSH, FastHadamard, Hyperplane

FAMILIES = {"hyperplane": Hyperplane, "hadamard": FastHadamard}
both_families = pytest.mark.parametrize("family", FAMILIES)

LENGTHS = [1, 2, 3, 17, 65, 130, 257]
N_HASHES = [1, 5, 32, 33, 70]


def bits_of(codes, n_bits):
    return codes[..., None] >> np.arange(n_bits) & 1 == 1


def rounding_bound(x, hasher):
    """How far float32 arithmetic may move a projection, `(..., 1 or n_hashes, 1 or n_bits)`.

    A dot product of d terms: d roundings of at most |x| |w| each. A rotation: two sums of products
    by sines and cosines (3 roundings each) and 2 log2(D) stages, each moving the vector by at
    most 2^-24 of its length, which is D |x| in the end.
    """
    length = np.linalg.norm(np.asarray(x, np.float64), axis=-1)[..., None, None]
    if isinstance(hasher, Hyperplane):
        return 2.0**-24 * hasher.n_features * length * np.linalg.norm(hasher.planes, axis=-1)
    columns = hasher.parameters.shape[-1]
    return 2.0**-24 * (6 + 2 * np.log2(columns)) * columns * length


def assert_equal_up_to_rounding(codes, x, hasher):
    """Bits differ from the reference's only where the projection is within rounding of zero."""
    projected = reference.projections(
        x, hasher.parameters, hasher.family, hasher.n_bits, hasher.n_hashes
    )
    assert codes.dtype == code_dtype(hasher.n_buckets)
    assert codes.shape == projected.shape[:-1]
    differs = bits_of(codes, hasher.n_bits) != (projected > 0)
    assert (np.abs(projected) <= rounding_bound(x, hasher))[differs].all()


@both_families
@pytest.mark.parametrize("n_bits", [1, 8, 9, 16])
@pytest.mark.parametrize("d", [1, 7, 32, 60, 64, 80, 128, 200])
def test_equal_to_reference(family, d, n_bits):
    rng = np.random.default_rng(d * n_bits)
    for case, n_hashes in enumerate(N_HASHES):
        n = LENGTHS[(case + d + n_bits) % len(LENGTHS)]
        hasher = FAMILIES[family](d, n_bits, n_hashes, seed=case)
        x = rng.standard_normal((n, d)).astype(np.float32)
        assert_equal_up_to_rounding(hasher.hash(x), x, hasher)


@both_families
@pytest.mark.parametrize("n", LENGTHS)
def test_equal_to_reference_at_every_length(family, n):
    hasher = FAMILIES[family](60, 8, 33, seed=n)
    x = np.random.default_rng(n).standard_normal((n, 60)).astype(np.float32)
    assert_equal_up_to_rounding(hasher.hash(x), x, hasher)


@both_families
@pytest.mark.parametrize("d", [1, 2, 64, 128])
def test_equal_to_reference_on_axes(family, d):
    """Unit vectors: exact zeros and ties would show here first."""
    hasher = FAMILIES[family](d, 8, 70, seed=0)
    x = np.concatenate([np.eye(d), -np.eye(d)]).astype(np.float32)
    assert_equal_up_to_rounding(hasher.hash(x), x, hasher)


@both_families
def test_a_row_of_zeros_has_code_zero(family):
    hasher = FAMILIES[family](60, 8, 70, seed=0)
    x = np.random.default_rng(0).standard_normal((20, 60))
    x[[3, 19]] = 0
    x[19] = -0.0
    codes = hasher.hash(x)
    assert not codes[[3, 19]].any()
    assert codes[:3].any()


@both_families
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [2, 17, 130])
def test_non_finite_rows_leave_the_others_alone(family, bad, n):
    hasher = FAMILIES[family](60, 8, 33, seed=0)
    x = np.random.default_rng(0).standard_normal((n, 60))
    clean = hasher.hash(x)
    rows = np.arange(n) % 7 == 1
    x[rows, 5] = bad
    codes = hasher.hash(x, check_finite=False)
    np.testing.assert_array_equal(codes[~rows], clean[~rows])
    if np.isnan(bad) and family == "hadamard":  # it reaches every projection
        assert not codes[rows].any()


@both_families
def test_the_core_says_whether_all_was_finite(family):
    parameters = make_parameters(family, 60, 8, 33, seed=0)
    x = np.random.default_rng(0).standard_normal((1, 1, 37, 60)).astype(np.float32)
    codes = np.empty((1, 1, 37, 33), np.uint8)
    for bad in (0.0, np.nan, np.inf, -np.inf):
        for row in (0, 20, 36):
            for column in (0, 33, 59):
                spoiled = x.copy()
                spoiled[..., row, column] = bad
                finite = _C.hash(spoiled, parameters, FAMILY[family], 8, 33, codes, 0)
                assert finite == np.isfinite(bad)


# ---------------------------------------------------------------- the random numbers


@both_families
@pytest.mark.parametrize("sizes", [(64, 8, 32), (1, 1, 1), (200, 9, 70), (129, 16, 300)])
def test_parameters(family, sizes):
    three = make_parameters(family, *sizes, n_sets=3, seed=5)
    one = make_parameters(family, *sizes, seed=5)
    assert three.dtype == np.float32
    assert three.flags.c_contiguous
    np.testing.assert_array_equal(three[:1], one)
    assert not np.array_equal(three[1], three[0])
    np.testing.assert_array_equal(make_parameters(family, *sizes, seed=5), one)
    drawn = [make_parameters(family, *sizes, seed=np.random.default_rng(5)) for _ in range(2)]
    np.testing.assert_array_equal(*drawn)
    assert not np.array_equal(make_parameters(family, *sizes, seed=6), one)


@both_families
@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, 2**64 - 1, 2**127 + 5])
@pytest.mark.parametrize("sizes", [(64, 8, 32), (7, 1, 1), (300, 13, 70), (5, 3, 129)])
def test_parameters_are_those_of_the_reference(family, sizes, seed):
    got = make_parameters(family, *sizes, n_sets=3, seed=seed)
    wanted = reference.random_parameters(family, *sizes, n_sets=3, seed=seed)
    assert got.dtype == wanted.dtype == np.float32
    if family == "hadamard":
        np.testing.assert_array_equal(got, wanted)
    else:
        np.testing.assert_array_max_ulp(got, wanted, maxulp=2)  # of other logarithms


@both_families
@pytest.mark.parametrize(("n_bits", "dtype"), [(8, "u1"), (9, "u2"), (17, "u4"), (33, "u8")])
def test_codes_have_a_dtype_that_other_libraries_know(family, n_bits, dtype):
    codes = FAMILIES[family](5, n_bits, 2, seed=0).hash(np.ones((3, 5)))
    assert codes.dtype.char == np.dtype(dtype).char  # of two types of 8 bytes torch takes one


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (np.array([-1]), "seed must be an integer >= 0, got -1"),
        (np.zeros(2, np.int64), r"seed: one element of int64 is wanted, was \(2,\)"),
        (np.zeros(1, np.uint64), r"seed: two of uint64 are wanted, was \(1,\)"),
    ],
)
def test_seeds_of_the_core(seed, message):
    out = np.zeros((1, 4, 64), np.float32)
    for fill in (lambda: _C.random_numbers(seed, 3, out), lambda: _C.random_normals(seed, out)):
        with pytest.raises(ValueError, match=message):
            fill()
    assert not out.any()


def test_hadamard_parameters_are_angles_and_signs():
    hasher = FastHadamard(100, 9, 300, seed=0)
    angles, signs = hasher.angles, hasher.signs
    assert angles.shape == (3, 64)
    assert signs.shape == (3, 9, 128)
    np.testing.assert_allclose(np.cos(angles), hasher.parameters[0, :3, :64], atol=1e-6)
    np.testing.assert_allclose(np.sin(angles), hasher.parameters[0, :3, 64:], atol=1e-6)
    assert (np.abs(signs) == 1).all()
    # 3456 fair coins: standard error 1 / sqrt(3456); 128 angles on the circle: 1 / sqrt(256)
    assert abs(signs.mean()) < 4 / np.sqrt(signs.size)
    assert abs(np.exp(1j * angles).mean()) < 4 / np.sqrt(2 * angles.size)


def test_hyperplane_planes():
    hasher = Hyperplane(5, 3, 4, seed=0)
    assert hasher.planes.shape == (4, 3, 5)
    np.testing.assert_array_equal(hasher.planes[1, 2], hasher.parameters[0, 5])


# ---------------------------------------------------------------- properties


vectors = st.lists(
    st.floats(-100, 100, width=32, allow_subnormal=False), min_size=1, max_size=70
).map(lambda x: np.array(x, np.float32))


@both_families
@settings(deadline=None, max_examples=25)
@given(x=vectors, exponent=st.integers(-10, 10), n_bits=st.integers(1, 16), seed=st.integers(0, 99))
def test_length_does_not_matter_and_opposites_never_collide(family, x, exponent, n_bits, seed):
    hasher = FAMILIES[family](len(x), n_bits, 5, seed=seed)
    codes = hasher.hash(x)
    # a power of two scales every float exactly, unless it becomes subnormal
    if (np.abs(x[x != 0]) > 1e-20).all():
        np.testing.assert_array_equal(hasher.hash(np.float32(2.0**exponent) * x), codes)
    assert not (hasher.hash(-x) & codes).any()  # a projection and its opposite are not both > 0


# ---------------------------------------------------------------- bad input


@both_families
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 8, 32), ValueError, "n_features must be an integer >= 1, got 0"),
        ((64.0, 8, 32), TypeError, r"n_features must be an integer >= 1, got 64.0 \(float\)"),
        ((64, 0, 32), ValueError, "n_bits must be an integer from 1 to 64, got 0"),
        ((64, 65, 32), ValueError, "n_bits must be an integer from 1 to 64, got 65"),
        ((64, True, 32), TypeError, r"n_bits must be an integer from 1 to 64, got True \(bool\)"),
        ((64, "8", 32), TypeError, r"n_bits must be an integer from 1 to 64, got '8' \(str\)"),
        ((64, 8, 0), ValueError, "n_hashes must be an integer from 1 to 65535, got 0"),
        ((64, 8, 65536), ValueError, "n_hashes must be an integer from 1 to 65535, got 65536"),
        ((64, 8, None), TypeError, "n_hashes must be an integer from 1 to 65535, got None"),
        ((64, 8, 32, -1), ValueError, "seed must be an integer >= 0, got -1"),
        ((64, 8, 32, 2**128), ValueError, r"seed must be below 2\*\*128, got 3402"),
        ((64, 8, 32, 0.5), TypeError, "seed must be an integer >= 0, got 0.5"),
        ((64, 8, 32, np.random.RandomState(0)), TypeError, "seed must be an integer >= 0"),
    ],
)
def test_bad_arguments(family, arguments, error, message):
    *sizes, seed = (*arguments, None)[:4]
    with pytest.raises(error, match=message):
        FAMILIES[family](*sizes, seed=seed)


# ---------------------------------------------------------------- torch


def test_imaginary_part_of_a_conjugate():
    torch = pytest.importorskip("torch")
    x = torch.randn(3, 7, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    for hasher in (FastHadamard(7, 8, 5, seed=0), EuclideanLSH(7, 2, 5, width=1.0, seed=0)):
        assert torch.equal(hasher.hash(x), hasher.hash(x.resolve_neg()))
        assert (hasher.collision_probability(x, x.resolve_neg()) == 1).all()


def test_bad_tensors():
    torch = pytest.importorskip("torch")
    hasher = FastHadamard(7, 8, 5, seed=0)
    with pytest.raises(ValueError, match="x must be on the cpu, got a tensor on meta"):
        hasher.hash(torch.ones(3, 7, device="meta"))
    with pytest.raises(TypeError, match="x must be a dense tensor, got layout torch.sparse_coo"):
        hasher.hash(torch.ones(3, 7).to_sparse())
    with pytest.raises(TypeError, match="x must be a dense tensor, got a nested one"):
        hasher.hash(torch.nested.nested_tensor([torch.ones(3, 7)]))
    with pytest.raises(TypeError, match="y must be a tensor of real numbers, got NoneType"):
        hasher.collision_probability(torch.ones(3, 7), None)
    with pytest.raises(TypeError, match="x must hold real numbers, got a tensor of dtype"):
        hasher.hash(torch.ones(3, 7, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"x must have shape \(..., 7\), .* got \(3, 6\)"):
        hasher.hash(torch.ones(3, 6))
    with pytest.raises(TypeError, match="y is a ndarray but x is a torch tensor: give one kind"):
        hasher.collision_probability(torch.ones(7), np.ones(7))

"""What all families share: long codes, probabilities of one number, arrays and back."""

import copy
import io
import pickle

import numpy as np
import pytest

from lshkit import _C, buckets, hashing, reference
from lshkit.hash_functions import FAMILY, code_dtype
from lshkit.hashing import EuclideanLSH, FastHadamard, Hyperplane, RandomBinning

ANGULAR = {"hyperplane": Hyperplane, "hadamard": FastHadamard}
angular_families = pytest.mark.parametrize("family", ANGULAR)

MAKERS = {
    "Hyperplane": lambda d, m, **seed: Hyperplane(d, 20, m, **seed),
    "Hyperplane, short": lambda d, m, **seed: Hyperplane(d, 8, m, **seed),
    "FastHadamard": lambda d, m, **seed: FastHadamard(d, 40, m, **seed),
    "FastHadamard, short": lambda d, m, **seed: FastHadamard(d, 9, m, **seed),
    "Gaussian": lambda d, m, **seed: EuclideanLSH(d, 4, m, width=2.5, **seed),
    "Cauchy": lambda d, m, **seed: EuclideanLSH(d, 4, m, width=2.5, p=1, **seed),
    "RandomBinning": lambda d, m, **seed: RandomBinning(d, m, bandwidth=2.5, **seed),
    "RandomBinning, each": lambda d, m, **seed: RandomBinning(
        d, m, bandwidth=np.linspace(1, 2, d), **seed
    ),
}
EXAMPLES = {name: make(7, 5, seed=3) for name, make in MAKERS.items()}
every_family = pytest.mark.parametrize("name", EXAMPLES)


# ---------------------------------------------------------------- long codes


@angular_families
@pytest.mark.parametrize("n_bits", [16, 17, 24, 31, 32, 33, 40, 48, 49, 63, 64])
def test_long_codes_are_equal_to_the_reference(family, n_bits):
    rng = np.random.default_rng(n_bits)
    for n, d, n_hashes in ((1, 3, 1), (33, 60, 33), (530, 70, 5)):
        hasher = ANGULAR[family](d, n_bits, n_hashes, seed=n)
        x = rng.standard_normal((n, d)).astype(np.float32)
        codes = hasher.hash(x)
        projected = reference.projections(x, hasher.parameters, family, n_bits, n_hashes)
        expected = reference.codes(projected)
        size = next(bits for bits in (16, 32, 64) if n_bits <= bits)
        assert codes.dtype == expected.dtype == code_dtype(2**n_bits) == f"uint{size}"
        # Rounding moves a projection by 2^-24 of the sum of its terms' sizes, at most d + 14 times.
        columns = hasher.parameters.shape[-1] if family == "hadamard" else 1
        length = np.linalg.norm(x, axis=-1)[:, None, None] * columns * np.sqrt(d)
        near = np.abs(projected) <= 2.0**-24 * (d + 14) * 4 * length
        differs = (codes ^ expected)[..., None] >> np.arange(n_bits, dtype=codes.dtype) & 1 == 1
        assert not (differs & ~near).any()
        assert (codes >> codes.dtype.type(n_bits - 1)).max() <= 1


@angular_families
def test_long_codes_hold_the_short_ones(family):
    """Both words of a code are made of the same rows: 40 bits of hyperplanes begin with 32."""
    long = ANGULAR[family](20, 40, 9, seed=0)
    short = ANGULAR[family](20, 32, 9, seed=0)
    if family == "hyperplane":
        rows = long.parameters.reshape(9, 40, 20)[:, :32].reshape(1, -1, 20)
    else:
        rows = long.parameters[:, : 3 + 32]
    short.parameters = np.ascontiguousarray(rows)
    x = np.random.default_rng(0).standard_normal((70, 20)).astype(np.float32)
    low = (long.hash(x) & np.uint64(2**32 - 1)).astype(np.uint32)
    np.testing.assert_array_equal(short.hash(x), low)


@angular_families
@pytest.mark.parametrize("n_bits", [20, 50])
def test_long_codes_collide_as_they_should(family, n_bits):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(64)
    y = x + 0.06 * rng.standard_normal(64)
    hasher = ANGULAR[family](64, n_bits, 20000, seed=1)
    expected = hasher.collision_probability(x, y)
    assert 0.2 < expected < 0.8
    frequency = (hasher.hash(x) == hasher.hash(y)).mean()
    # Two rotations of 64 rows at a time share their angles: twice the standard error of fair draws.
    assert abs(frequency - expected) < 8 * np.sqrt(expected * (1 - expected) / 20000)


@angular_families
def test_long_codes_of_bad_rows(family):
    hasher = ANGULAR[family](20, 40, 9, seed=0)
    x = np.random.default_rng(0).standard_normal((1030, 20)).astype(np.float32)
    clean = hasher.hash(x)
    x[5] = 0
    x[6, 3] = np.nan
    codes = np.zeros((1, 1, 1030, 9), np.uint64)
    assert not _C.hash(x[None, None], hasher.parameters, FAMILY[family], 40, 9, codes, 1)
    np.testing.assert_array_equal(codes[0, 0, 7:], clean[7:])
    assert not codes[0, 0, 5].any()


def test_tables_of_all_buckets_refuse_long_codes():
    hasher = Hyperplane(7, 20, 5, seed=0)
    x = np.ones((3, 7))
    codes = hasher.hash(x)
    message = "n_buckets must be an integer from 1 to 65536, got 1048576"
    with pytest.raises(ValueError, match=message):
        buckets.bucket_sum(codes, codes, x, hasher.n_buckets)
    with pytest.raises(ValueError, match=message):
        buckets.BucketTable(5, hasher.n_buckets, 7)
    with pytest.raises(ValueError, match="soft_hash needs a family with n_bits <= 16, got 20"):
        hasher.soft_hash(x, 2, 2.0)
    pytest.importorskip("torch")
    from lshkit.attention import Sampled

    with pytest.raises(ValueError, match="n_bits must be an integer from 1 to 16, got 17"):
        Sampled(n_bits=17)


@every_family
def test_missing_sizes_name_the_family(name):
    family = type(EXAMPLES[name])
    with pytest.raises(TypeError, match=rf"^{family.__name__}.__init__\(\) missing"):
        family(8)


# ---------------------------------------------------------------- rows


@every_family
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3), (2, 1, 3, 2)])
def test_leading_dimensions(name, shape):
    hasher = EXAMPLES[name]
    x = np.random.default_rng(0).standard_normal((*shape, 7))
    codes = hasher.hash(x)
    assert codes.shape == (*shape, 5)
    np.testing.assert_array_equal(codes, hasher.hash(x.reshape(-1, 7)).reshape(codes.shape))


@every_family
def test_a_code_does_not_depend_on_strides_and_other_rows(name):
    hasher = MAKERS[name](20, 9, seed=0)
    x = np.random.default_rng(0).standard_normal((67, 20)).astype(np.float32)
    codes = hasher.hash(x)
    for n in (1, 2, 8, 9, 15, 31, 33):
        np.testing.assert_array_equal(hasher.hash(x[:n]), codes[:n])
    np.testing.assert_array_equal(hasher.hash(x[::-2]), codes[::-2])
    turned = np.asfortranarray(x)
    turned.flags.writeable = False
    np.testing.assert_array_equal(hasher.hash(turned), codes)
    one = np.broadcast_to(x[0], (3, 20))
    np.testing.assert_array_equal(hasher.hash(one), np.tile(codes[0], (3, 1)))


@every_family
@pytest.mark.parametrize(
    "dtype", ["float16", "float64", "int64", "uint8", "bool", ">f4", "longdouble"]
)
def test_other_numbers(name, dtype):
    hasher = EXAMPLES[name]
    x = (np.random.default_rng(0).standard_normal((9, 7)) * 3 + 4).astype(dtype)
    wide = np.float32 if hasher.directional else np.float64
    np.testing.assert_array_equal(hasher.hash(x), hasher.hash(x.astype(wide)))
    np.testing.assert_array_equal(hasher.hash(x.tolist()), hasher.hash(x))


@every_family
def test_hash_functions_are_data(name):
    """Equality, copies and pickles go by the random numbers, not by the seed's spelling."""
    make, hasher = MAKERS[name], EXAMPLES[name]
    x = np.random.default_rng(0).standard_normal((9, 7))
    for same in (
        make(7, 5, seed=np.int64(3)),
        pickle.loads(pickle.dumps(hasher)),
        copy.deepcopy(hasher),
    ):
        assert same == hasher
        assert hash(same) == hash(hasher)
        np.testing.assert_array_equal(same.hash(x), hasher.hash(x))
    others = make(7, 5, seed=4), make(7, 6, seed=3), make(8, 5, seed=3), make(7, 5, seed=None), 3
    for other in (*others, *(x for x in EXAMPLES.values() if x is not hasher)):
        assert other != hasher
    drawn = [make(7, 5, seed=np.random.default_rng(5)) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert hasher.n_buckets == 2 ** (hasher.n_bits if hasher.directional else 32)
    assert (hasher.n_features, hasher.n_hashes, hasher.seed) == (7, 5, 3)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("Hyperplane", "Hyperplane(7, 20, 5, seed=3)"),
        ("FastHadamard", "FastHadamard(7, 40, 5, seed=3)"),
        ("Gaussian", "EuclideanLSH(7, 4, 5, width=2.5, p=2, seed=3)"),
        ("RandomBinning", "RandomBinning(7, 5, bandwidth=2.5, seed=3)"),
    ],
)
def test_representation(name, wanted):
    assert repr(EXAMPLES[name]) == wanted


def test_settings_tell_families_apart():
    make = MAKERS["Hyperplane"]
    assert make(7, 5, seed=3) != Hyperplane(7, 8, 5, seed=3) != FastHadamard(7, 8, 5, seed=3)
    one, other = (RandomBinning(7, 5, bandwidth=h, seed=0) for h in (1.0, 2.0))
    assert one != other
    one, other = (EuclideanLSH(7, 3, 5, width=w, seed=0) for w in (1.0, 2.0))
    assert one != other


BAD_ROWS = [
    (np.ones((3, 6)), ValueError, r"have shape \(..., 7\), .* n_features, got \(3, 6\)"),
    (np.float64(1), ValueError, r"have shape \(..., 7\), .* got \(\)"),
    (np.ones(0), ValueError, r"got \(0,\)"),
    (np.ones((3, 7), object), TypeError, "hold real numbers, got a ndarray of dtype object"),
    (np.ones((3, 7), complex), TypeError, "hold real numbers, got a ndarray of dtype complex128"),
    (np.full((3, 7), "1"), TypeError, "hold real numbers, got a ndarray of dtype <U1"),
    ([[1, 2], [3]], TypeError, "an array of real numbers"),
    (None, TypeError, "hold real numbers, got a NoneType of dtype object"),
    (np.ma.ones((3, 7)), TypeError, "masked array"),
]


@every_family
@pytest.mark.parametrize(("x", "error", "message"), BAD_ROWS)
def test_bad_rows(name, x, error, message):
    hasher = EXAMPLES[name]
    for call in (lambda: hasher.hash(x), lambda: hasher.collision_probability(x, np.ones(7))):
        with pytest.raises(error, match="x (must|is a).*" + message):
            call()
    with pytest.raises(error, match="y (must|is a).*" + message):
        hasher.collision_probability(np.ones(7), x)


@every_family
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_torch_in_torch_out(name, shape):
    torch = pytest.importorskip("torch")
    hasher = EXAMPLES[name]
    x = torch.randn(*shape, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64):
        rows = x.to(dtype, copy=True)
        codes = hasher.hash(rows.requires_grad_(dtype.is_floating_point))
        expected = hasher.hash(rows.detach().double().numpy())
        assert codes.dtype == getattr(torch, str(expected.dtype))
        assert codes.shape == (*shape, 5) and not codes.requires_grad
        np.testing.assert_array_equal(codes.numpy(), expected)
    for call, tensors in (
        (hasher.collision_probability, (x, torch.ones(7))),
        (hasher.probability_of_distance, (torch.tensor([0.5, 2.0], requires_grad=True),)),
    ):
        probability = call(*tensors)
        assert probability.dtype == torch.float64 and not probability.requires_grad
        expected = call(*(tensor.detach().numpy() for tensor in tensors))
        np.testing.assert_array_equal(probability.numpy(), expected)


# ---------------------------------------------------------------- one number


@every_family
def test_probability_of_rows(name):
    hasher = EXAMPLES[name]
    x = np.random.default_rng(0).standard_normal((5, 7))
    probability = hasher.collision_probability(x[:, None], x[None])
    assert probability.dtype == np.float64
    assert probability.shape == (5, 5)
    np.testing.assert_array_equal(np.diag(probability), 1)
    np.testing.assert_array_equal(probability, probability.T)
    bad = np.r_[np.nan, np.zeros(6)]
    assert np.isnan(hasher.collision_probability(bad, x)).all()
    assert np.isnan(hasher.collision_probability(x, np.where(bad == 0, 0, np.inf))).all()
    with pytest.raises(ValueError, match=r"x \(3, 7\) and y \(2, 7\) do not broadcast"):
        hasher.collision_probability(np.ones((3, 7)), np.ones((2, 7)))


@angular_families
@pytest.mark.parametrize("n_bits", [1, 2, 7, 16, 64])
def test_probability_of_cosine(family, n_bits):
    hasher = ANGULAR[family](5, n_bits, 1, seed=0)
    x, y = np.random.default_rng(0).standard_normal((2, 50, 5))
    cosine = (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)
    got = hasher.probability_of_cosine(cosine)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, hasher.collision_probability(x, y), rtol=1e-14 * n_bits + 1e-13)
    np.testing.assert_allclose(got, reference.cosine_probability(cosine, n_bits), rtol=1e-12)
    ends = hasher.probability_of_cosine(np.float32([-1, 1, 1.0000002, -1.0000002, np.nan]))
    np.testing.assert_array_equal(ends, [0, 1, 1, 0, np.nan])
    assert hasher.probability_of_cosine(0.0) == 0.5**n_bits
    with pytest.raises(TypeError, match="cosine must hold real numbers"):
        hasher.probability_of_cosine(["a"])
    for beyond in (1.02, -np.inf):
        with pytest.raises(ValueError, match=f"cosine must be from -1 to 1, got {beyond}"):
            hasher.probability_of_cosine([0.5, beyond, np.nan])
    ends = hasher.probability_of_distance(np.float32([0, np.pi, np.nan]))  # 9e-8 above pi
    np.testing.assert_array_equal(ends, [1, 0, np.nan])
    for beyond in (3.16, np.inf):
        with pytest.raises(
            ValueError, match=f"distance must be an angle from 0 to pi, got {beyond}"
        ):
            hasher.probability_of_distance([1.0, beyond, np.nan])


def test_probability_of_cosine_of_tensors():
    torch = pytest.importorskip("torch")
    hasher = Hyperplane(5, 8, 1, seed=0)
    cosine = torch.linspace(-1, 1, 9, requires_grad=True)
    got = hasher.probability_of_cosine(cosine)
    assert got.dtype == torch.float64
    assert not got.requires_grad
    expected = hasher.probability_of_cosine(cosine.detach().numpy())
    np.testing.assert_array_equal(got.numpy(), expected)


@every_family
def test_listed_pairs_must_be_of_rows(name):
    hasher, rows = EXAMPLES[name], np.random.default_rng(0).normal(size=(200, 7))
    every = hasher.pair_probability(rows[:1], rows, [0, 200], np.arange(200))
    last = hasher.pair_probability(rows[:1], rows, [0, 1], np.array([199], np.uint64))
    assert last == every[199]
    for indptr, indices, error, message in (
        ([0, 1], [-1], ValueError, "indices: rows from 0 to 199 are wanted, was -1"),
        ([0, 1], [999], ValueError, "indices: rows from 0 to 199 are wanted, was 999"),
        ([0, 1], [1.5], TypeError, "indices must hold integers"),
        ([0, 2], [1], ValueError, "indptr: must start with 0 and end with the number of indices"),
        ([0, 1, 1], [1], ValueError, r"indptr must have shape \(2,\), got \(3,\)"),
    ):
        with pytest.raises(error, match=message):
            hasher.pair_probability(rows[:1], rows, indptr, indices)
    with pytest.raises(ValueError, match="indptr: must not decrease, got 2 before 1"):
        hasher.pair_probability(rows[:2], rows, [0, 2, 1], [1])


# ---------------------------------------------------------------- arrays


@every_family
def test_arrays_make_the_same_family(name):
    hasher = EXAMPLES[name]
    file = io.BytesIO()
    np.savez(file, **hasher.to_arrays())
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        again = hashing.from_arrays(arrays)
        assert type(hasher).from_arrays(arrays) == hasher
    assert again == hasher
    assert type(again) is type(hasher)
    assert again.seed == hasher.seed == 3
    assert repr(again) == repr(hasher)
    x = np.random.default_rng(0).standard_normal((9, 7))
    np.testing.assert_array_equal(again.hash(x), hasher.hash(x))
    np.testing.assert_array_equal(
        again.collision_probability(x[:1], x), hasher.collision_probability(x[:1], x)
    )


def test_arrays_are_copies():
    hasher = Hyperplane(7, 3, 5, seed=3)
    arrays = hasher.to_arrays()
    again = hashing.from_arrays(arrays)
    arrays["parameters"][:] = 0
    assert again == hasher == Hyperplane(7, 3, 5, seed=3)


@pytest.mark.parametrize("seed", [None, np.random.default_rng(0), 2**80])
def test_seeds_in_arrays(seed):
    again = hashing.from_arrays(Hyperplane(7, 3, 5, seed=seed).to_arrays())
    assert again.seed == (seed if isinstance(seed, int) else None)


@every_family
def test_damaged_arrays_are_refused(name):
    good = EXAMPLES[name].to_arrays()
    numbers = EXAMPLES[name]._numbers
    for missing in good:
        with pytest.raises(ValueError, match=f"must have '{missing}'"):
            hashing.from_arrays({key: good[key] for key in good if key != missing})
    numbers_or_bandwidth = f"({numbers[0]}|bandwidth)"
    for key, value, message in (
        ("family", np.array("Cosine"), "family must be one of .*RandomBinning, got 'Cosine'"),
        ("format", np.array(3), "format must be 1 to 2, got 3: use a newer lshkit"),
        ("format", np.array(0), "format must be 1 to 2, got 0"),
        ("format", np.array("1"), "format must be one integer"),
        ("n_features", np.array(8), f"{numbers_or_bandwidth} must be .* got .*7"),
        ("n_hashes", np.array(0), "n_hashes must be an integer from 1 to 65535, got 0"),
        ("seed", np.array(str(2**128)), r"seed must be below 2\*\*128"),
        ("seed", np.array("-1"), "seed must be an integer >= 0 or empty, got '-1'"),
        (numbers[0], good[numbers[0]][:0], f"{numbers[0]} must be"),
        (numbers[0], good[numbers[0]].astype(np.float16), f"{numbers[0]} must be"),
        (numbers[0], good[numbers[0]] * np.nan, f"{numbers[0]} must be finite"),
    ):
        if key == "n_features" and name.startswith("FastHadamard"):
            continue  # 8 features need the same rotations of 64
        with pytest.raises(ValueError, match=message):
            hashing.from_arrays(good | {key: value})


@pytest.mark.parametrize("factor", [0.0, 1e30, -1.0])
def test_numbers_that_no_family_has(factor):
    good = FastHadamard(5, 4, 3, seed=0).to_arrays()
    changed = good | {"parameters": good["parameters"] * np.float32(factor)}
    if factor == -1:  # signs the other way round
        assert hashing.from_arrays(changed).n_bits == 4
    else:
        with pytest.raises(ValueError, match="parameters must hold signs"):
            hashing.from_arrays(changed)
    for family in (EuclideanLSH(5, 4, 3, width=1.0), RandomBinning(5, 3, bandwidth=1.0)):
        good = family.to_arrays()
        with pytest.raises(ValueError, match="shifts must be in"):
            hashing.from_arrays(good | {"shifts": good["shifts"] + 1})
        with pytest.raises(ValueError, match="multipliers must not all be 0"):
            hashing.from_arrays(good | {"multipliers": 0 * good["multipliers"]})
        if "directions" in good:
            with pytest.raises(ValueError, match="directions must have no rows of zeros"):
                hashing.from_arrays(good | {"directions": 0 * good["directions"]})
    with pytest.raises(ValueError, match="scales must be > 0"):
        hashing.from_arrays(good | {"scales": -good["scales"]})


def test_arrays_of_another_family():
    arrays = Hyperplane(7, 3, 5, seed=3).to_arrays()
    for no_dict in (None, [1], np.zeros(3)):
        with pytest.raises(TypeError, match="arrays must be a dict of arrays.*, got"):
            hashing.from_arrays(no_dict)
    with pytest.raises(ValueError, match="family must be RandomBinning, got Hyperplane"):
        RandomBinning.from_arrays(arrays)


@pytest.mark.parametrize("name", ["int8", "uint8", "bool", "float16", "bfloat16", "float8_e4m3fn"])
def test_pairs_of_tensors_of_any_type(name):
    """Computed as if they had been given in float32 or float64."""
    torch = pytest.importorskip("torch")
    hasher = FastHadamard(8, 4, 2, seed=0)
    rows = torch.arange(48).reshape(6, 8).remainder(5).to(getattr(torch, name))
    pairs = torch.arange(0, 13, 2), torch.arange(12).remainder(6)
    wide = rows.float() if rows.is_floating_point() else rows.double()
    wanted = hasher.pair_probability(wide, wide, *pairs)
    torch.testing.assert_close(hasher.pair_probability(rows, rows, *pairs), wanted)


def test_an_older_lshkits_functions_are_refused_where_they_were_others():
    """Of `FastHadamard`, before columns were permuted, as arrays and pickled."""
    plane, fast = Hyperplane(5, 3, 2, seed=0), FastHadamard(5, 3, 2, seed=0)
    assert hashing.from_arrays(plane.to_arrays() | {"format": np.array(1)}) == plane
    with pytest.raises(ValueError, match="format of FastHadamard must be 2, got 1, of an older"):
        hashing.from_arrays(fast.to_arrays() | {"format": np.array(1)})
    for family in (plane, fast):
        assert pickle.loads(pickle.dumps(family)) == copy.deepcopy(family) == family
    older = fast.__getstate__()
    del older["format"]
    with pytest.raises(ValueError, match="format of FastHadamard must be 2, got 1, of an older"):
        FastHadamard.__new__(FastHadamard).__setstate__(older)

"""The sum verb against the reference."""

import re

import numpy as np
import pytest
from cases.buckets import assert_close, random_case
from hypothesis import given, settings
from hypothesis import strategies as st

from lshkit import _C, reference
from lshkit.buckets import bucket_sum, collisions
from lshkit.hashing import FastHadamard, Hyperplane

LENGTHS = [1, 2, 3, 17, 65, 130, 257]
N_HASHES = [1, 5, 32, 33, 70]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_bits", [1, 8, 9, 16])
@pytest.mark.parametrize("d_v", [1, 7, 32, 60, 64, 80, 128, 200])
def test_equal_to_reference(d_v, n_bits, causal):
    for case, n_hashes in enumerate(N_HASHES):
        n = LENGTHS[(case + d_v + n_bits) % len(LENGTHS)]
        arguments = random_case(n, n, n_hashes, min(2**n_bits, 4 * n), d_v, seed=case)
        got = bucket_sum(*arguments, 2**n_bits, causal=causal)
        assert_close(got, *arguments, causal=causal)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 257), (257, 1), (17, 130), (130, 17), (65, 65)])
def test_shapes_types_and_masks(n_q, n_k, dtype, causal, masked):
    arguments = random_case(n_q, n_k, 5, 16, 19, (2, 3), dtype=dtype)
    options = {"causal": causal}
    if masked:
        mask = np.random.default_rng(1).random((2, 3, n_k)) < 0.7
        options["key_mask"] = mask
        arguments[2][~mask] = np.nan  # padding may hold anything
    got = bucket_sum(*arguments, 16, **options)
    assert got.dtype == dtype
    swapped = bucket_sum(
        *arguments[:2], arguments[2].astype(got.dtype.newbyteorder()), 16, **options
    )
    assert swapped.dtype == dtype and np.array_equal(swapped, got, equal_nan=True)
    arguments[2][np.isnan(arguments[2])] = 0
    assert_close(got, *arguments, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n_buckets", [200, 256, 400, 4096])
@pytest.mark.parametrize("alike", ["none", "all", "last", "clusters"])
def test_few_and_many_keys_in_a_bucket(alike, n_buckets, dtype, causal):
    """Few are visited one by one, many are summed in tables."""
    n, n_hashes = 190, 21
    codes, _, values = random_case(n, n, n_hashes, n_buckets, 70, dtype=dtype)
    rng = np.random.default_rng(1)
    rows = np.arange(n)
    if alike == "clusters":
        rows = rng.integers(0, 9, n)
    elif alike != "none":
        rows[0 if alike == "all" else 150 :] = 0
    key_codes = codes[rows]
    query_codes = np.where(rng.random(codes.shape) < 0.5, key_codes, codes)
    arguments = query_codes, key_codes, values
    assert_close(bucket_sum(*arguments, n_buckets, causal=causal), *arguments, causal=causal)


def test_all_keys_masked():
    arguments = random_case(5, 7, 3, 4, 2)
    got = bucket_sum(*arguments, 4, key_mask=np.zeros(7, bool))
    np.testing.assert_array_equal(got, np.zeros((5, 2)))


@pytest.mark.parametrize("causal", [False, True])
def test_nan_reaches_the_sums_that_contain_it(causal):
    query_codes, key_codes, values = random_case(33, 40, 3, 16, 5)
    values[11, 2], values[25, 4] = np.nan, np.inf
    got = bucket_sum(query_codes, key_codes, values, 16, causal=causal)
    expected = reference.bucket_sum(query_codes, key_codes, values, causal=causal)
    assert np.isnan(expected).any()
    assert np.isinf(expected).any()
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n_buckets", [1, 3, 255, 256, 257, 65535, 65536])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64, np.uint64])
def test_code_types(n_buckets, dtype):
    query_codes, key_codes, values = random_case(20, 30, 5, min(n_buckets, 256), 3)
    key_codes[-1] = query_codes[-1] = min(n_buckets, 256) - 1
    got = bucket_sum(query_codes.astype(dtype), key_codes.astype(dtype), values, n_buckets)
    assert_close(got, query_codes, key_codes, values)
    if n_buckets > 256 and dtype != np.uint8:
        shift = n_buckets - 256
        query_codes, key_codes = (c.astype(dtype) + dtype(shift) for c in (query_codes, key_codes))
        shifted = bucket_sum(query_codes, key_codes, values, n_buckets)
        np.testing.assert_array_equal(shifted, got)


def test_values_of_other_types():
    query_codes, key_codes, _ = random_case(4, 5, 3, 4, 2)
    values = np.arange(10).reshape(5, 2)
    got = bucket_sum(query_codes.tolist(), key_codes.tolist(), values.tolist(), 4)
    assert got.dtype == np.float64
    assert_close(got, query_codes, key_codes, values)
    ones = bucket_sum(query_codes, key_codes, np.ones((5, 1), bool), 4)
    np.testing.assert_allclose(
        ones[:, 0], reference.collision_counts(query_codes, key_codes).sum(-1) / 3
    )


def test_strides_and_byte_order():
    query_codes, key_codes, values = random_case(6, 8, 5, 16, 7, (3,))
    expected = bucket_sum(query_codes, key_codes, values, 16)
    read_only = values.astype(">f4")
    read_only.flags.writeable = False
    for same in (np.asfortranarray(values), read_only, np.repeat(values, 2, -1)[..., ::2]):
        got = bucket_sum(np.asfortranarray(query_codes), key_codes, same, 16)
        np.testing.assert_array_equal(got, expected)


def test_fields_of_packed_records():
    records = np.zeros(9, [("tag", "u1"), ("row", "f4", 7), ("code", "u2", 5), ("value", "f8", 3)])
    rng = np.random.default_rng(0)
    records["row"], records["value"] = rng.normal(size=(9, 7)), rng.normal(size=(9, 3))
    assert not records["row"].flags.aligned
    hasher = FastHadamard(7, 9, 5, seed=0)
    codes, values = hasher.hash(records["row"].copy()), records["value"].copy()
    records["code"] = hasher.hash(records["row"])
    assert np.array_equal(records["code"], codes)
    given = records["code"], records["code"], records["value"]
    assert np.array_equal(bucket_sum(*given, 512), bucket_sum(codes, codes, values, 512))
    for ours, wanted in zip(collisions(*given[:2]), collisions(codes, codes), strict=True):
        assert np.array_equal(ours, wanted)


def test_leading_dimensions_broadcast():
    query_codes, key_codes, values = random_case(6, 8, 5, 16, 7, (2, 3))
    mask = np.random.default_rng(0).random((2, 1, 8)) < 0.7
    got = bucket_sum(query_codes, key_codes[:, :1], values[0, 0], 16, key_mask=mask)
    for i, j in np.ndindex(2, 3):
        one = bucket_sum(query_codes[i, j], key_codes[i, 0], values[0, 0], 16, key_mask=mask[i, 0])
        np.testing.assert_array_equal(got[i, j], one)


def test_one_argument_alone_has_a_leading_dimension():
    query_codes, key_codes, values = random_case(5, 5, 4, 4, 3, (2,))
    mask = np.asfortranarray(np.random.default_rng(0).random((2, 5)) < 0.7)
    for codes in ((query_codes[0], key_codes), (query_codes, key_codes[0])):
        by_rows = [np.broadcast_to(c, (2, 5, 4)) for c in codes]
        one = [bucket_sum(q, k, values[0], 4) for q, k in zip(*by_rows, strict=True)]
        np.testing.assert_array_equal(bucket_sum(*codes, values[0], 4), one)
    codes = query_codes[0], key_codes[0]
    one = [bucket_sum(*codes, v, 4, key_mask=m) for v, m in zip(values, mask, strict=True)]
    np.testing.assert_array_equal(bucket_sum(*codes, values, 4, key_mask=mask), one)


@pytest.mark.parametrize(
    ("leading", "n_q", "n_k", "d_v"),
    [
        ((), 0, 3, 2),
        ((), 3, 0, 2),
        ((), 3, 4, 0),
        ((0,), 3, 4, 2),
        ((2, 0), 3, 4, 2),
        ((), 0, 0, 0),
    ],
)
def test_empty(leading, n_q, n_k, d_v):
    arguments = random_case(n_q, n_k, 5, 16, d_v, leading)
    for mask in (None, np.ones((*leading, n_k), bool)):
        got = bucket_sum(*arguments, 16, key_mask=mask)
        assert got.shape == (*leading, n_q, d_v)
        assert got.dtype == np.float32
        assert not got.any()


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_orders_of_the_core(order, dtype):
    """The core's order 2 sees keys j >= i: the transpose of causal."""
    query_codes, key_codes, values = random_case(130, 70, 33, 256, 80, (2, 3), dtype=dtype)
    out = np.empty((2, 3, 130, 80), dtype)
    _C.bucket_sum(query_codes, key_codes, values, 256, order, None, 1 / 33, out, 1)
    counts = reference.collision_counts(query_codes, key_codes) / 33
    pairs = [np.ones((130, 70)), np.tri(130, 70), np.tri(70, 130).T][order]
    np.testing.assert_allclose(out, (counts * pairs) @ values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [Hyperplane, FastHadamard])
@pytest.mark.parametrize("causal", [False, True])
def test_unbiased(family, causal):
    """The mean over hash functions is sum_j p(q, k_j) v_j (YOSO, ICML 2021, section 3.1)."""
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((6, 12)), rng.standard_normal((40, 12))
    key[:6] += query  # some near pairs
    values = rng.standard_normal((40, 3))
    sums = []
    for seed in range(300):
        hasher = family(12, 4, 16, seed=seed)
        sums.append(bucket_sum(hasher.hash(query), hasher.hash(key), values, 16, causal=causal))
    weights = hasher.collision_probability(query[:, None], key[None])
    expected = (weights * reference.visible(6, 40, causal)) @ values
    standard_error = np.std(sums, axis=0) / np.sqrt(len(sums))
    assert (np.abs(np.mean(sums, axis=0) - expected) < 4 * standard_error).all()


cases = st.fixed_dictionaries(
    {
        "n_q": st.integers(0, 20),
        "n_k": st.integers(0, 20),
        "n_hashes": st.integers(1, 20),
        "n_buckets": st.integers(1, 300),
        "d_v": st.integers(0, 20),
        "seed": st.integers(0, 1000),
    }
)


@settings(deadline=None, max_examples=40)
@given(case=cases, causal=st.booleans(), masked=st.booleans())
def test_property_equal_to_reference(case, causal, masked):
    arguments = random_case(**case)
    mask = np.random.default_rng(case["seed"]).random(case["n_k"]) < 0.5 if masked else None
    options = {"causal": causal, "key_mask": mask}
    got = bucket_sum(*arguments, case["n_buckets"], **options)
    assert_close(got, *arguments, **options)


@settings(deadline=None, max_examples=25)
@given(case=cases)
def test_property_order_of_keys_and_hashes(case):
    query_codes, key_codes, values = random_case(**case, dtype=np.float64)
    rng = np.random.default_rng(case["seed"])
    keys, hashes = rng.permutation(case["n_k"]), rng.permutation(case["n_hashes"])
    got = bucket_sum(
        query_codes[:, hashes], key_codes[keys][:, hashes], values[keys], case["n_buckets"]
    )
    assert_close(got, query_codes, key_codes, values)


# ---------------------------------------------------------------- bad input

CODES, VALUES = np.zeros((4, 5), np.uint8), np.ones((4, 2), np.float32)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"n_buckets": 0}, ValueError, "n_buckets must be an integer from 1 to 65536, got 0"),
        ({"n_buckets": 65537}, ValueError, "n_buckets must be an integer from 1 to 65536"),
        ({"n_buckets": 16.0}, TypeError, "n_buckets must be an integer .* got 16.0 (float)"),
        ({"n_buckets": True}, TypeError, "n_buckets must be an integer .* got True (bool)"),
        ({"causal": 1}, TypeError, "causal must be a bool, got 1 (int)"),
        ({"causal": None}, TypeError, "causal must be a bool, got None"),
        ({"query_codes": CODES + 16}, ValueError, "query_codes .* 0 to n_buckets - 1 = 15, got 16"),
        ({"key_codes": CODES.astype(int) - 1}, ValueError, "key_codes .* = 15, got -1"),
        ({"key_codes": CODES.astype(np.int64) + 2**40}, ValueError, "got 1099511627776"),
        ({"query_codes": CODES * 1.0}, TypeError, "query_codes must hold integer codes, got a"),
        ({"query_codes": CODES == 0}, TypeError, "query_codes must hold integer codes, got a"),
        ({"query_codes": CODES[0]}, ValueError, "query_codes must have shape (..., n, n_hashes)"),
        ({"query_codes": CODES[:, :0]}, ValueError, "n_hashes >= 1, got (4, 0)"),
        ({"query_codes": CODES[:, :3]}, ValueError, "key_codes must have the 3 hashes of query_c"),
        ({"key_codes": CODES[:3]}, ValueError, "values must have a row for each of the 3 keys"),
        ({"values": VALUES[:3]}, ValueError, "values must have .* 4 keys, got shape (3, 2)"),
        ({"values": VALUES[:, 0]}, ValueError, "values must have shape (..., n_k, d_v), got (4,)"),
        ({"values": VALUES * 1j}, TypeError, "values must hold real numbers, got a ndarray of d"),
        ({"values": None}, TypeError, "values must hold real numbers"),
        ({"values": np.stack([VALUES] * 2), "key_codes": np.stack([CODES] * 3)}, ValueError,
         "the leading dimensions do not match: query_codes (4, 5), key_codes (3, 4, 5), val"),
        ({"key_mask": np.ones(3, bool)}, ValueError, "key_mask must have shape (..., 4), got s"),
        ({"key_mask": np.ones((4, 1), bool)}, ValueError, "key_mask must have shape (..., 4)"),
        ({"key_mask": np.ones(4)}, TypeError, "key_mask must hold booleans, got a ndarray"),
        ({"key_mask": np.True_}, ValueError, "key_mask must have shape (..., 4), got shape ()"),
    ],
)  # fmt: skip
def test_bad_input(changed, error, message):
    arguments = {"query_codes": CODES, "key_codes": CODES, "values": VALUES, "n_buckets": 16}
    pattern = re.escape(message).replace(r"\.\*", ".*").replace(r"\ ", " ")
    with pytest.raises(error, match=pattern):
        bucket_sum(**{**arguments, **changed})


# ---------------------------------------------------------------- torch


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n_buckets", [16, 300])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_in_torch_out(dtype, n_buckets, masked, causal):
    torch = pytest.importorskip("torch")
    arrays = random_case(17, 33, 5, n_buckets, 7, (2, 3))
    mask = np.random.default_rng(1).random((2, 1, 33)) < 0.7 if masked else None
    values = torch.from_numpy(arrays[2]).to(getattr(torch, dtype))
    got = bucket_sum(
        *map(torch.from_numpy, arrays[:2]),
        values,
        n_buckets,
        causal=causal,
        key_mask=None if mask is None else torch.from_numpy(mask),
    )
    assert got.dtype == values.dtype
    expected = bucket_sum(
        *arrays[:2], values.double().numpy(), n_buckets, causal=causal, key_mask=mask
    )
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(got.double().numpy(), expected, atol=tolerance, rtol=tolerance)


def test_torch_shapes():
    torch = pytest.importorskip("torch")
    for leading, n_q, n_k, d_v in (
        ((), 3, 4, 2),
        ((2, 3, 4), 3, 4, 2),
        ((), 0, 4, 2),
        ((), 3, 0, 2),
    ):
        arrays = random_case(n_q, n_k, 5, 16, d_v, leading)
        got = bucket_sum(*map(torch.from_numpy, arrays), 16)
        assert got.shape == (*leading, n_q, d_v)
        np.testing.assert_allclose(got.numpy(), bucket_sum(*arrays, 16), atol=1e-6)
    integers = bucket_sum(*map(torch.from_numpy, (CODES, CODES)), torch.ones(4, 2).int(), 16)
    assert integers.dtype == torch.float64


def test_bad_tensors():
    torch = pytest.importorskip("torch")
    codes, values = torch.from_numpy(CODES), torch.from_numpy(VALUES)
    with pytest.raises(TypeError, match="values is a ndarray but query_codes is a torch tensor"):
        bucket_sum(codes, codes, VALUES, 16)
    with pytest.raises(TypeError, match="key_mask is a ndarray but query_codes is a torch tensor"):
        bucket_sum(codes, codes, values, 16, key_mask=np.ones(4, bool))
    with pytest.raises(ValueError, match="values must be on the cpu, got a tensor on meta"):
        bucket_sum(codes, codes, values.to("meta"), 16)
    with pytest.raises(TypeError, match="key_codes must hold integer codes, got a tensor of dtype"):
        bucket_sum(codes, codes.float(), values, 16)
    with pytest.raises(ValueError, match="query_codes.* 16"):
        bucket_sum(codes + 16, codes, values, 16)
    with pytest.raises(ValueError, match="key_codes .* from 0 to n_buckets - 1 = 15, got -1"):
        bucket_sum(codes, codes.long() - 1, values, 16)
    with pytest.raises(ValueError, match="values must have a row for each of the 4 keys"):
        bucket_sum(codes, codes, values[:3], 16)

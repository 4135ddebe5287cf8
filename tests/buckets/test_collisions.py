"""The pairs verb against the reference."""

import re

import numpy as np
import pytest
from cases.buckets import random_codes
from hypothesis import given, settings
from hypothesis import strategies as st

from lshkit import _C, reference
from lshkit.buckets import bucket_sum, collisions
from lshkit.hashing import FastHadamard


def assert_equal_to_reference(codes, **options):
    got = collisions(*codes, **options)
    assert [x.dtype for x in got] == [np.int64, np.int32, np.int32]
    for a, e in zip(got, reference.collisions(*codes, **options), strict=True):
        np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("n_hashes", [1, 33, 255, 256, 300])  # beyond 255 a byte cannot count
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (1, 257), (130, 17), (65, 128), (127, 300)])
def test_equal_to_reference(n_q, n_k, n_hashes, dtype, causal):
    codes = random_codes(n_q, n_k, n_hashes, 60, dtype)
    mask = np.random.default_rng(1).random(n_k) < 0.7
    for key_mask in (None, mask):
        assert_equal_to_reference(codes, causal=causal, key_mask=key_mask)


def test_pairs_that_collide_in_every_hash():
    same = np.ones((3, 65535), np.uint8)
    _, _, counts = collisions(same, same)
    assert (counts == 65535).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_buckets", [40000, 3000])
def test_through_the_buckets(n_buckets, causal):
    """Lengths at which few collisions a hash are found through the buckets, not by comparison."""
    codes = random_codes(150, 17000, 3, n_buckets, np.uint16)
    codes[1][::7] = codes[0][0]  # some queries with many keys, in many hashes
    codes[0][5:9] = codes[0][0]
    mask = np.random.default_rng(1).random(17000) < 0.7
    for key_mask in (None, mask):
        assert_equal_to_reference(codes, causal=causal, key_mask=key_mask)


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 0), (0, 5), (5, 0)])
def test_empty(n_q, n_k):
    assert_equal_to_reference(random_codes(n_q, n_k, 3, 9, np.uint8))


def test_all_keys_masked():
    codes = random_codes(5, 7, 3, 2, np.uint8)
    indptr, indices, counts = collisions(*codes, key_mask=np.zeros(7, bool))
    assert not indptr.any() and indices.shape == counts.shape == (0,)


def test_code_types_and_strides():
    query, key = random_codes(20, 30, 5, 200, np.uint8)
    expected = reference.collisions(query, key)
    for same in (
        (query.astype(np.int64), key),
        (query, key.astype(np.uint16)),
        (query.tolist(), key.tolist()),
        (np.asfortranarray(query), np.repeat(key, 2, -1)[:, ::2]),
    ):
        for a, e in zip(collisions(*same), expected, strict=True):
            np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64, np.int64])
def test_wide_codes(dtype, causal):
    """Equal to the reference of the same codes renamed, which fit into 16 bits."""
    narrow = random_codes(150, 270, 33, 60, np.uint16)
    narrow[1][::9] = narrow[0][0]
    names = np.random.default_rng(0).integers(2**16, np.iinfo(dtype).max, 60, dtype, endpoint=True)
    codes = [names[x] for x in narrow]
    mask = np.random.default_rng(1).random(270) < 0.7
    for key_mask in (None, mask, np.zeros(270, bool)):
        options = {"causal": causal, "key_mask": key_mask}
        expected = reference.collisions(*narrow, **options)
        for got, wanted in zip(collisions(*codes, **options), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_wide_codes_beside_narrow_ones_and_none():
    query, key = random_codes(20, 30, 5, 200, np.uint8)
    key = key.astype(np.uint64)
    key[3] += np.uint64(2**40)
    expected = reference.collisions(query.astype(np.uint64), key)
    for got, wanted in zip(collisions(query, key), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    for sides in ((query[:0], key), (query, key[:0]), (key, key[:0])):
        indptr, indices, counts = collisions(*sides)
        assert len(indptr) == len(sides[0]) + 1 and not indptr.any()
        assert indices.shape == counts.shape == (0,)


def test_wide_codes_of_a_family():
    """Codes of 40 bits: near rows share some, others none (0.7 pairs are expected of all seeds)."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 16))
    codes = FastHadamard(16, 40, 64, seed=1).hash(np.concatenate([x, x + 1e-3]))
    indptr, indices, counts = collisions(codes[:500], codes[500:])
    np.testing.assert_array_equal(indices, np.arange(500))
    assert (np.diff(indptr) == 1).all() and counts.min() > 32


def test_the_sum_verb_is_the_matrix_of_counts():
    query, key = random_codes(40, 50, 9, 16, np.uint8)
    values = np.random.default_rng(0).standard_normal((50, 3))
    indptr, indices, counts = collisions(query, key)
    rows = np.repeat(np.arange(40), np.diff(indptr))
    sums = np.zeros((40, 3))
    np.add.at(sums, rows, counts[:, None] * values[indices] / 9)
    np.testing.assert_allclose(sums, bucket_sum(query, key, values, 16), rtol=1e-12)


@settings(deadline=None, max_examples=40)
@given(
    n_q=st.integers(0, 200),
    n_k=st.integers(0, 200),
    n_hashes=st.integers(1, 20),
    n_buckets=st.integers(1, 300),
    seed=st.integers(0, 1000),
    causal=st.booleans(),
    masked=st.booleans(),
)
def test_property_equal_to_reference(n_q, n_k, n_hashes, n_buckets, seed, causal, masked):
    dtype = np.uint8 if n_buckets <= 256 else np.uint16
    codes = random_codes(n_q, n_k, n_hashes, n_buckets, dtype, seed)
    mask = np.random.default_rng(seed).random(n_k) < 0.5 if masked else None
    assert_equal_to_reference(codes, causal=causal, key_mask=mask)


@pytest.mark.parametrize("added", [0, 2**40], ids=["16_bits", "40_bits"])
def test_tensors(added):
    torch = pytest.importorskip("torch")
    query, key = random_codes(20, 30, 5, 16, np.uint8)
    mask = np.arange(30) % 3 > 0
    expected = collisions(query, key, key_mask=mask, causal=True)
    tensors = torch.from_numpy(query), torch.from_numpy(key.astype(np.int64))
    codes = [x.to(torch.int64) + added for x in tensors] if added else tensors
    got = collisions(*codes, key_mask=torch.from_numpy(mask), causal=True)
    for a, e in zip(got, expected, strict=True):
        assert isinstance(a, torch.Tensor)
        np.testing.assert_array_equal(a.numpy(), e)
        assert a.numpy().dtype == e.dtype


CODES = np.zeros((4, 3), np.uint8)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((CODES[0], CODES), {}, ValueError, "query_codes must have shape (n, n_hashes)"),
        ((CODES, CODES[None]), {}, ValueError, "key_codes must have shape (n, n_hashes)"),
        ((CODES[:, :0], CODES[:, :0]), {}, ValueError, "query_codes must have shape (n, n_hashes)"),
        ((CODES, CODES[:, :2]), {}, ValueError, "key_codes must have the 3 hashes"),
        ((CODES.astype(float), CODES), {}, TypeError, "query_codes must hold integer codes"),
        ((CODES, CODES.astype(np.int64) - 1), {}, ValueError, "key_codes must be >= 0, got -1"),
        ((CODES, CODES), {"causal": 1}, TypeError, "causal must be a bool"),
        ((CODES, CODES), {"key_mask": np.ones(3, bool)}, ValueError, "key_mask must have shape"),
        ((CODES, CODES), {"key_mask": np.ones(4)}, TypeError, "key_mask must hold booleans"),
    ],
)
def test_bad_arguments(arguments, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        collisions(*arguments, **options)


def test_codes_that_change_between_the_two_passes():
    query, key = random_codes(20, 30, 5, 4, np.uint8)
    indptr = np.empty(21, np.int64)
    _C.collision_indptr(query, key, None, False, indptr)
    indices, counts = (np.empty(indptr[-1], np.int32) for _ in range(2))
    for changed in (key % 2, key + np.uint8(4)):
        with pytest.raises(RuntimeError, match="indptr does not belong to these codes"):
            _C.collisions(query, changed, None, False, indptr, indices, counts)
    with pytest.raises(ValueError, match=r"indptr: must start with 0 and not decrease"):
        _C.collisions(query, key, None, False, indptr[::-1] * 0 + indptr[-1], indices, counts)
    with pytest.raises(ValueError, match=r"indices: shape .* is wanted"):
        _C.collisions(query, key, None, False, indptr, indices[1:], counts)

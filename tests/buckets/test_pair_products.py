"""Sampled products of two matrices."""

import re

import numpy as np
import pytest

from lshkit import buckets
from lshkit.buckets import pair_distances, pair_products


def random_pairs(n_q, n_k, d, dtype, seed=0):
    rng = np.random.default_rng(seed)
    queries, keys = rng.standard_normal((n_q, d)), rng.standard_normal((n_k, d))
    codes = [rng.integers(0, 4, (n, 2)).astype(np.uint8) for n in (n_q, n_k)]
    indptr, indices, _ = buckets.collisions(*codes)
    return queries.astype(dtype), keys.astype(dtype), indptr, indices


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("d", [1, 17, 64, 100])
def test_equal_to_numpy(d, dtype):
    queries, keys, indptr, indices = random_pairs(13, 50, d, dtype)
    x, y = np.repeat(queries, np.diff(indptr), 0).astype(float), keys[indices].astype(float)
    rounding = 4 * np.sqrt(d) * np.finfo(dtype).eps  # of d products of size one, added up
    for index in (indices, indices.astype(np.int64)):
        got = pair_products(queries, keys, indptr, index)
        assert got.dtype == dtype
        np.testing.assert_allclose(got, (x * y).sum(1), rtol=0, atol=4 * rounding)
        for p in (1, 2):
            got = pair_distances(queries, keys, indptr, index, p=p)
            np.testing.assert_allclose(got, (np.abs(x - y) ** p).sum(1), rtol=4 * rounding)


def test_other_layouts_and_types():
    queries, keys, indptr, indices = random_pairs(13, 50, 30, np.float64)
    single = queries.astype(np.float32), keys.astype(np.float32)
    expected = pair_products(*single, indptr, indices)
    for q, k in (
        (queries, single[1]),
        (np.asfortranarray(single[0]), np.repeat(single[1], 2, 1)[:, ::2]),
        (np.hstack(single[:1] * 2)[:, :30], single[1]),
    ):
        np.testing.assert_array_equal(
            pair_products(q, k, indptr.astype(np.int32), indices), expected
        )
    wanted = pair_distances(1e9 + queries, 1e9 + keys, indptr, indices)
    for q, k in ((">f8", "<f8"), ("<f8", ">f8"), (">f8", ">f8")):  # float64, too
        got = pair_distances((1e9 + queries).astype(q), (1e9 + keys).astype(k), indptr, indices)
        np.testing.assert_array_equal(got, wanted, strict=True)
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(x) for x in (*single, indptr, indices)]
    tensors[0].requires_grad_()
    got = pair_products(*tensors)
    assert not got.requires_grad and got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy(), expected)


def test_nothing_to_do():
    queries, keys, indptr, indices = random_pairs(3, 5, 4, np.float32)
    assert pair_products(queries[:0], keys, [0], indices[:0]).shape == (0,)
    assert pair_products(queries, keys[:0], [0] * 4, indices[:0]).shape == (0,)
    assert (pair_products(queries[:, :0], keys[:, :0], indptr, indices) == 0).all()


X = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X[0], X, [0, 1], [0]), ValueError, "queries must have shape (n, d)"),
        ((X, X[:, :2], [0, 0, 1], [0]), ValueError, "must have equal numbers of columns"),
        ((X, X, [0, 1], [0]), ValueError, "indptr must have shape (3,)"),
        ((X, X, [0, 1, 2], [0]), ValueError, "end with the number of indices, 1"),
        ((X, X, [0, 2, 1], [0]), ValueError, "indptr: must not decrease, got 2 before 1"),
        ((X, X, [0, 0, 1], [2]), ValueError, "indices: rows from 0 to 1 are wanted, was 2"),
        ((X, X, [0, 0, 1], [-1]), ValueError, "indices: rows from 0 to 1 are wanted, was -1"),
        ((X, X, [0, 0, 1], [0.0]), TypeError, "indices must hold integers"),
        ((X, "a", [0, 0, 1], [0]), TypeError, "keys must hold real numbers"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        pair_products(*arguments)


def test_bad_power():
    with pytest.raises(ValueError, match="p must be an integer from 1 to 2, got 3"):
        pair_distances(X, X, [0, 0, 1], [0], p=3)


def test_numbers_that_no_index_is():
    x = np.ones((1, 2))
    with pytest.raises(ValueError, match=f"indices must be below 2\\*\\*63, got {2**64 - 1}"):
        pair_products(x, x, np.array([0, 1]), np.array([2**64 - 1], np.uint64))
    with pytest.raises(ValueError, match="indptr must be below"):
        pair_products(x, x, np.array([0, 2**63], np.uint64), np.array([0]))

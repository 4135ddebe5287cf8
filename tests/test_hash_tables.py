"""Hash tables and the draw verb against the reference, and its statistics."""

import numpy as np
import pytest

from lshkit import reference
from lshkit.buckets import HashTables, draw


def random_codes(n_q, n_k, n_hashes, n_buckets, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, n_buckets, (n, n_hashes)).astype(dtype) for n in (n_q, n_k)]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n_samples", [None, 1, 7])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_draws_equal_to_reference(dtype, n_samples, weighted):
    query, key = random_codes(20, 50, 3, 9, dtype)
    weights = np.random.default_rng(1).integers(0, 3, 50) * 0.7 if weighted else None
    got = draw(query, key, n_samples, weights=weights, seed=5)
    assert [x.dtype for x in got] == [np.int64, np.float64, np.int32]
    for a, e in zip(got, reference.draw(query, key, n_samples, weights, 5), strict=True):
        np.testing.assert_array_equal(a, e)


def test_union_equal_to_collisions():
    query, key = random_codes(20, 50, 3, 9, np.uint8)
    got = HashTables(key).union(query)
    assert [x.dtype for x in got] == [np.int64, np.int32, np.int32]
    for a, e in zip(got, reference.collisions(query, key), strict=True):
        np.testing.assert_array_equal(a, e)

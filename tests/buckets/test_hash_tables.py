"""Hash tables and the draw verb against the reference, and the statistics of the draws."""

import copy
import pickle
import re

import numpy as np
import pytest
from cases.buckets import random_codes
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from lshkit import _C, reference
from lshkit.buckets import HashTables, bucket_sum, collisions, draw
from lshkit.hashing import Hyperplane

WIDTHS = [np.uint8, np.uint16, np.uint32, np.uint64]


def same(got, expected):
    for a, e in zip(got, expected, strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n_samples", [None, 1, 70])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_draws_equal_to_reference(dtype, n_samples, weighted, spread):
    query, key = random_codes(20, 80, 3, 30, dtype, spread=spread)
    weights = np.random.default_rng(1).integers(0, 3, 80) * 0.7 if weighted else None
    got = draw(query, key, n_samples, weights=weights, seed=5)
    same(got, reference.draw(query, key, n_samples, weights, 5))
    assert (got[0] < 0).any() and (got[0] >= 0).any()


@settings(deadline=None, max_examples=40)
@given(
    n_q=st.integers(0, 40),
    n_k=st.integers(0, 500),
    n_hashes=st.integers(1, 67),
    n_buckets=st.integers(1, 2000),
    width=st.sampled_from(WIDTHS),
    spread=st.booleans(),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_property_of_tables(n_q, n_k, n_hashes, n_buckets, width, spread, weighted, seed):
    n_buckets = min(n_buckets, 200) if width == np.uint8 else n_buckets
    query, key = random_codes(n_q, n_k, n_hashes, n_buckets, width, seed, spread)
    weights = np.random.default_rng(seed).integers(0, 4, n_k) / 4 if weighted else None
    tables = HashTables(key, weights=weights)
    equal = query[:, None] == key
    np.testing.assert_array_equal(tables.bucket_sizes(query), equal.sum(1))
    sums = np.einsum("qkh,k->qh", equal, np.ones(n_k) if weights is None else weights)
    np.testing.assert_array_equal(tables.bucket_weights(query), sums)  # quarters add up exactly
    assert tables.bucket_weights(query).dtype == np.float64
    for got, expected in zip(tables.union(query), reference.collisions(query, key), strict=True):
        np.testing.assert_array_equal(got, expected)
    indices, probabilities, hashes = tables.draw(query, 3, seed=seed)
    i, t = np.nonzero(indices >= 0)
    assert equal[i, indices[i, t], hashes[i, t]].all()
    total = np.take_along_axis(sums, hashes.astype(int), 1)
    np.testing.assert_array_equal(indices < 0, total == 0)
    w = np.ones(len(i)) if weights is None else weights[indices[i, t]]
    np.testing.assert_array_equal(probabilities[i, t], w / total[i, t])
    assert (probabilities[indices < 0] == 0).all()


def chi_square(counts, probabilities):
    """Distance in standard deviations of the statistic from its mean under the probabilities."""
    expected = counts.sum() * probabilities[probabilities > 0]
    assert (counts[probabilities == 0] == 0).all()
    freedom = len(expected) - 1
    return (((counts[probabilities > 0] - expected) ** 2 / expected).sum() - freedom) / np.sqrt(
        2 * freedom
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("spread", [False, True])
def test_draw_frequencies(weighted, spread):
    """Rows, tables and their pairs come as often as stated; a query's draws in every table too."""
    query, key = random_codes(2, 60, 4, 3, np.uint32, spread=spread)
    weights = np.random.default_rng(1).integers(0, 5, 60) ** 2.0 if weighted else None
    n = 200_000
    tables = HashTables(key, weights=weights)
    indices, probabilities, hashes = tables.draw(query, n, seed=3)
    w = np.ones(60) if weights is None else weights
    for i in range(2):
        members = (query[i] == key).T * w  # (table, row)
        stated = members / members.sum(1, keepdims=True) / 4
        counts = np.zeros((4, 60))
        np.add.at(counts, (hashes[i], indices[i]), 1)
        # The tables come in turn, so that the pairs scatter less than independent draws would.
        assert chi_square(counts.ravel(), stated.ravel()) < 4
        for h in range(4):
            assert abs(chi_square(counts[h], 4 * stated[h])) < 4
        np.testing.assert_array_equal(probabilities[i], 4 * stated[hashes[i], indices[i]])


def test_offsets_are_uniform_over_queries_and_seeds():
    key = np.zeros((1, 7), np.uint8)
    query = np.zeros((70_000, 7), np.uint8)
    tables = HashTables(key)
    first = tables.draw(query, 2, seed=0)[2]
    assert abs(chi_square(np.bincount(first[:, 0]), np.full(7, 1 / 7))) < 4
    assert ((first[:, 0] + 1) % 7 == first[:, 1]).all()
    by_seed = np.array([tables.draw(query[:1], 1, seed=s)[2][0, 0] for s in range(7000)])
    assert abs(chi_square(np.bincount(by_seed), np.full(7, 1 / 7))) < 4
    # Neighbouring queries, and neighbouring seeds, know nothing of each other.
    for numbers in (first[:, 0], by_seed):
        pairs = np.bincount(numbers[:-1] * 7 + numbers[1:], minlength=49)
        assert abs(chi_square(pairs, np.full(49, 1 / 49))) < 4


@pytest.mark.parametrize("weighted", [False, True])
def test_estimate_of_a_sum_is_unbiased(weighted):
    """The mean of f / probability over draws estimates bucket_sum; empty buckets count as 0.

    Digits at 12 bits: many buckets are empty.
    """
    x = load_digits().data[:400] - 5.0
    f = np.linspace(0.5, 1.5, 350)
    weights = f**2 if weighted else None
    errors = []
    hasher = Hyperplane(64, 12, 4 * 300, seed=0)
    for seed, codes in enumerate(np.split(hasher.hash(x), 300, axis=1)):
        indices, probabilities, _ = draw(codes[350:], codes[:350], 6, weights=weights, seed=seed)
        found = indices >= 0
        values = np.where(found, f[indices] / np.where(found, probabilities, 1), 0)
        exact = bucket_sum(codes[350:], codes[:350], f[:, None], hasher.n_buckets)[:, 0]
        errors.append(values.mean(1) - exact)
    assert 0.1 < np.mean(~found) < 0.9
    z = np.mean(errors, 0) / (np.std(errors, 0, ddof=1) / np.sqrt(300))
    assert np.abs(z).max() < 4.5 and abs(z.mean()) < 4 / np.sqrt(50)  # 50 queries


def test_union_inclusion_frequencies():
    """A row is in the union of m tables with probability 1 - (1 - p)^m."""
    x = load_digits().data[:40] - 5.0
    z = []
    for seed in range(8):
        included = np.zeros((8, 32))
        hasher = Hyperplane(64, 6, 5 * 2000, seed=seed)
        for codes in np.split(hasher.hash(x), 2000, axis=1):
            indptr, indices, _ = HashTables(codes[8:]).union(codes[:8])
            included[np.repeat(np.arange(8), np.diff(indptr)), indices] += 1
        p = hasher.collision_probability(x[:8, None], x[8:])
        expected = 1 - (1 - p) ** 5
        z.append((included / 2000 - expected) / np.sqrt(expected * (1 - expected) / 2000))
    # 8 times 256 pairs, whose functions are the same: the mean square of 256 varies by 0.12.
    assert np.abs(z).max() < 5 and abs(np.mean(np.square(z)) - 1) < 4 * 0.12 / np.sqrt(8)


def test_seeds():
    query, key = random_codes(50, 500, 4, 9, np.uint8)
    tables = HashTables(key)
    first = tables.draw(query, 3, seed=7)[0]
    np.testing.assert_array_equal(first, tables.draw(query, 3, seed=7)[0])
    assert (first != tables.draw(query, 3, seed=8)[0]).any()
    assert (tables.draw(query)[0] != tables.draw(query)[0]).any()
    rng = [np.random.default_rng(4) for _ in range(2)]
    draws = [tables.draw(query, seed=r)[0] for r in rng]
    np.testing.assert_array_equal(*draws)
    assert (draws[0] != tables.draw(query, seed=rng[0])[0]).any()
    # A query's draws depend on its place and not on the others.
    np.testing.assert_array_equal(first[:20], tables.draw(query[:20], 3, seed=7)[0])


def test_seeds_of_more_than_64_bits():
    tables = HashTables(np.zeros((1000, 3), np.uint8))
    first, again, other = (
        tables.draw(CODES, 9, seed=seed)[0] for seed in (2**80, 2**80, 2**80 + 2**64)
    )
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_sizes_that_meet_nothing():
    query, key = random_codes(5, 8, 3, 4, np.uint16)
    for tables in (HashTables(key[:0]), HashTables(key[:0].astype(np.uint64)), HashTables(key)):
        far = query + np.uint16(4)
        indices, probabilities, _ = tables.draw(far, 4, seed=0)
        assert (indices == -1).all() and (probabilities == 0).all()
        assert tables.union(far)[0].tolist() == [0] * 6
        assert tables.union(far[:0])[0].tolist() == [0]
        assert tables.draw(far[:0])[0].shape == (0, 3)
        assert (tables.bucket_sizes(far) == 0).all()


def test_codes_of_other_types():
    query, key = random_codes(5, 40, 3, 4, np.uint8)
    expected = HashTables(key).draw(query, 4, seed=0)
    for dtype in (np.int8, np.int64, ">u2", np.uint64):
        same(HashTables(key.astype(dtype)).draw(query.astype(np.int32), 4, seed=0), expected)
    same(HashTables(key.tolist()).draw(query.tolist(), 4, seed=0), expected)
    same(HashTables(np.asfortranarray(key)).draw(query[:, ::-1][:, ::-1], 4, seed=0), expected)


def test_highest_codes():
    for dtype in WIDTHS:
        key = np.array([[np.iinfo(dtype).max], [0], [np.iinfo(dtype).max]], dtype)
        np.testing.assert_array_equal(HashTables(key).bucket_sizes(key), [[2], [1], [2]])


def test_weights_of_very_different_size():
    """A row of weight 0 never comes, whatever rounding does to the sums."""
    weights = np.array([0, 1e300, 0, 1e-300, 1, 0])
    tables = HashTables(np.zeros((6, 1), np.uint8), weights=weights)
    indices, probabilities, _ = tables.draw(np.zeros((1, 1), np.uint8), 10_000, seed=0)
    assert set(indices[0]) == {1} and (probabilities == 1).all()
    tiny = HashTables(np.zeros((3, 1), np.uint8), weights=[0, 5e-324, 0])
    assert set(tiny.draw(np.zeros((1, 1), np.uint8), 100, seed=0)[0][0]) == {1}


def test_copies():
    query, key = random_codes(5, 40, 3, 4000, np.uint16)
    tables = HashTables(key, weights=np.arange(40))
    for other in (copy.deepcopy(tables), pickle.loads(pickle.dumps(tables))):
        same(other.draw(query, 9, seed=0), tables.draw(query, 9, seed=0))
        same(other.union(query), tables.union(query))
    assert tables.nbytes >= 40 * 3 * 4
    assert repr(tables) == "HashTables(n_rows=40, n_hashes=3, weighted)"


def test_memory_is_linear_in_rows_and_hashes():
    rng = np.random.default_rng(0)
    for n, m in ((1, 50), (100, 50), (5000, 10)):
        codes = rng.integers(0, 2**63, (n, m)).astype(np.uint64)
        assert HashTables(codes).nbytes < 40 * m * (n + 1)


CODES = np.zeros((4, 3), np.uint8)
ABOVE, BELOW = CODES.astype(np.int64) + 300, CODES.astype(np.int64) - 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: HashTables(CODES[0]), ValueError, "codes must have shape (n, n_hashes)"),
        (lambda: HashTables(CODES[:, :0]), ValueError, "codes must have shape (n, n_hashes)"),
        (lambda: HashTables(CODES * 1.0), TypeError, "codes must hold integer codes"),
        (lambda: HashTables(BELOW), ValueError, "codes must be >= 0, got -1"),
        (lambda: HashTables(CODES, weights=np.ones(3)), ValueError, "weights must have shape (4,)"),
        (lambda: HashTables(CODES, weights=[1, 2, -1, 0]), ValueError, "got -1.0 in row 2"),
        (lambda: HashTables(CODES, weights=[1, np.nan, 1, 0]), ValueError, "got nan in row 1"),
        (lambda: HashTables(CODES, weights=[1, 1, 1, np.inf]), ValueError, "got inf in row 3"),
        (lambda: HashTables(CODES, weights=[1e308] * 4), ValueError, "weights must have a finite"),
        (lambda: HashTables(CODES, weights="abcd"), TypeError, "weights must hold real numbers"),
        (lambda: draw(CODES, BELOW), ValueError, "key_codes must be >= 0, got -1"),
        (lambda: HashTables(CODES).draw(CODES[:, :2]), ValueError, "must have shape (n_q, 3)"),
        (lambda: HashTables(CODES).draw(CODES, 0), ValueError, "n_samples must be an integer"),
        (lambda: HashTables(CODES).draw(CODES, 1.5), TypeError, "n_samples must be an integer"),
        (lambda: HashTables(CODES).draw(CODES, seed=-1), ValueError, "seed must be an integer"),
        (lambda: HashTables(CODES).draw(CODES, seed=2**128), ValueError, "must be below 2**128"),
        (
            lambda: HashTables(CODES).union(ABOVE),
            ValueError,
            "query_codes must be uint8",
        ),
        (
            lambda: HashTables(CODES).union(BELOW),
            ValueError,
            "query_codes must be >= 0",
        ),
        (lambda: HashTables(CODES).bucket_sizes(CODES[0]), ValueError, "query_codes must have"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_core_checks_the_arrays_of_tables():
    query, key = random_codes(5, 40, 3, 4, np.uint16)
    tables = HashTables(key)._tables
    sizes = np.empty((5, 3), np.int64)
    with pytest.raises(ValueError, match="order: 2 dimensions"):
        _C.bucket_sizes((tables[0][0], *tables[1:]), query, sizes)
    with pytest.raises(ValueError, match="bins: shape"):
        _C.bucket_sizes((tables[0], tables[1][:2], *tables[2:]), query, sizes)
    with pytest.raises(TypeError, match="the tables have no weights"):
        _C.bucket_sizes(tables, query, np.empty((5, 3)))
    with pytest.raises(TypeError, match="order: dtype int32"):
        _C.bucket_sizes((tables[0].astype(np.int64), *tables[1:]), query, sizes)


def test_union_equals_collisions():
    query, key = random_codes(70, 3000, 6, 40, np.uint8)
    same(HashTables(key).union(query), collisions(query, key))


def test_union_without_large_buckets():
    query, key = random_codes(30, 200, 5, 12, np.uint16)
    tables = HashTables(key)
    sizes = tables.bucket_sizes(query)
    assert (sizes > 16).any() and (sizes <= 16).any()
    # A code that no key has stands for a bucket that is left out.
    expected = reference.collisions(np.where(sizes > 16, 999, query), key)
    for got, wanted in zip(tables.union(query, max_bucket_size=16), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    with pytest.raises(ValueError, match="max_bucket_size must be an integer >= 0, got -1"):
        tables.union(query, max_bucket_size=-1)


def test_weights_of_buckets_of_tensors():
    torch = pytest.importorskip("torch")
    query, key = (torch.from_numpy(x) for x in random_codes(5, 40, 3, 4, np.uint8))
    for tables in (HashTables(key), HashTables(key, weights=torch.ones(40))):
        weights = tables.bucket_weights(query)
        assert weights.dtype is torch.float64
        assert torch.equal(weights, tables.bucket_sizes(query).double())


def test_weights_are_copied():
    codes, weights = np.zeros((200, 2), np.uint8), np.ones(200)
    tables = HashTables(codes, weights=weights)
    weights[:] = 0.5
    probabilities = tables.draw(codes[:1], 50, seed=1)[1]
    assert np.allclose(probabilities, 1 / 200, rtol=1e-12)

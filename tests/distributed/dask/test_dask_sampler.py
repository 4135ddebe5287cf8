"""Samplers on Dask: rows and probabilities as of one sampler of all rows."""

import pickle

import numpy as np
import pytest
from scipy.stats import chisquare
from sklearn.exceptions import NotFittedError

from lshkit.hashing import EuclideanLSH, FastHadamard
from lshkit.sampling import LSHSampler

pytest.importorskip("dask.array")
from cases.dask_arrays import blocks  # noqa: E402

from lshkit.distributed import DaskLSHSampler  # noqa: E402

RNG = np.random.default_rng(0)
X, WEIGHTS = RNG.normal(size=(1500, 6)), RNG.uniform(0, 2, size=1500)
WEIGHTS[WEIGHTS < 0.3] = 0
HASHER = FastHadamard(6, 3, 4, seed=0)
CHUNKS = 100, 700, 0, 690, 10


def pair_of(weighted, client, hasher=HASHER):
    weights = WEIGHTS if weighted else None
    sampler = DaskLSHSampler(hasher, seed=0, client=client)
    sampler.fit(blocks(X, CHUNKS), blocks(weights, 400) if weighted else None)
    return sampler, LSHSampler(hasher, seed=0).fit(X, weights)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_draws_have_exact_probabilities(weighted, client):
    sampler, local = pair_of(weighted, client)
    n = 8000
    query = X[:2]
    indices, probabilities = sampler.sample(query, n, seed=1)
    assert indices.shape == probabilities.shape == (2, n) and (indices >= 0).all()
    codes, row_codes = HASHER.hash(query), HASHER.hash(X)
    weights = WEIGHTS if weighted else np.ones(len(X))
    for q in range(2):
        # Of the tables that collide with the row one was drawn from; each is in turn.
        meets = row_codes == codes[q]
        chances = meets * weights[:, None] / (meets * weights[:, None]).sum(axis=0)
        p = HASHER.collision_probability(query[q], X)
        wanted = p[indices[q], None] * chances[indices[q]]
        np.testing.assert_allclose(
            np.abs(wanted / probabilities[q, :, None] - 1).min(axis=1), 0, atol=1e-5
        )
        counts = np.bincount(indices[q], minlength=len(X))
        expected = n * chances.mean(axis=1)
        assert not counts[expected == 0].any()
        # Rows in groups of at least 20 expected draws: one in 10^4 is worse.
        counts, expected = counts[expected > 0], expected[expected > 0]
        _, groups = np.unique((np.cumsum(expected) / 20).astype(int), return_inverse=True)
        groups = np.minimum(groups, groups.max() - 1)
        sums = (np.bincount(groups, weights=x) for x in (counts, expected))
        assert chisquare(*sums, sum_check=False).pvalue > 1e-4


def test_estimates_from_draws_are_unbiased(client):
    """The mean of f / probability over hash functions is the sum of f over all rows."""
    query, found = X[:1], []
    f = np.abs(X).sum(axis=1)
    for seed in range(20):
        hasher = FastHadamard(6, 2, 8, seed=seed)
        sampler = DaskLSHSampler(hasher, client=client).fit(blocks(X, 500))
        indices, p = sampler.sample(query, 64, seed=seed)
        there = indices >= 0
        terms = np.zeros(p.shape)
        terms[there] = f[indices[there]] / p[there]
        found.append(terms.mean())
    off = np.mean(found) / f.sum() - 1
    assert abs(off) < 4 * np.std(found, ddof=1) / np.sqrt(20) / f.sum()


def test_draws_are_reproducible_and_one_from_each_table(client):
    sampler, local = pair_of(False, client)
    first = sampler.sample(X[:5], seed=3)
    assert first[0].shape == (5, HASHER.n_hashes)
    for a, b in zip(first, sampler.sample(X[:5], seed=3), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (sampler.sample(X[:5])[0] != sampler.sample(X[:5])[0]).any()
    single, p = sampler.sample(X[0], 7, seed=0)
    assert single.shape == p.shape == (7,)
    fresh = DaskLSHSampler(HASHER, seed=0, client=client).fit(blocks(X, CHUNKS))
    np.testing.assert_array_equal(
        fresh.sample(X[:5])[0], pair_of(False, client)[0].sample(X[:5])[0]
    )


def test_empty_buckets(client):
    hasher = EuclideanLSH(6, 2, 4, width=1.0, seed=0)
    sampler, local = pair_of(False, client, hasher)
    far = np.full((1, 6), 1e4)
    indices, probabilities = sampler.sample(far, 9)
    assert (indices == -1).all() and not probabilities.any()
    indptr, rows, inclusion = sampler.union(far)
    assert indptr.tolist() == [0, 0] and len(rows) == len(inclusion) == 0


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_union_and_local_sampler(weighted, client):
    sampler, local = pair_of(weighted, client)
    for sampled in (sampler, sampler.to_local()):
        for mine, wanted in zip(sampled.union(X[:9]), local.union(X[:9]), strict=True):
            np.testing.assert_array_equal(mine, wanted)
    copied = LSHSampler.from_bytes(sampler.to_local().to_bytes())
    drawn = (x.sample(X[:9], 5, seed=1) for x in (copied, local))
    for mine, wanted in zip(*drawn, strict=True):
        np.testing.assert_array_equal(mine, wanted)
    assert sampler.n_rows == 1500 and sampler.n_shards == 4
    weights = ", weighted" if weighted else ""
    assert repr(sampler) == f"DaskLSHSampler({HASHER!r}, n_rows=1500, n_shards=4{weights})"


def test_rows(client):
    sampler, _ = pair_of(False, client)
    indices = np.array([1499, 3, 99, 100, 799, 800, 3])
    np.testing.assert_array_equal(sampler.rows(indices), X[indices])
    assert sampler.rows(np.zeros(0, int)).shape == sampler.rows([]).shape == (0, 6)
    for wrong in (3, [[1, 2]]):
        with pytest.raises(ValueError, match=r"indices must have shape \(n,\), got \("):
            sampler.rows(wrong)
    np.testing.assert_array_equal(sampler.rows(indices.astype(np.uint64)), X[indices])
    with pytest.raises(ValueError, match="indices must be from 0 to 1499, got 1500"):
        sampler.rows([1500])
    sampler.partial_fit(blocks(X[:50], 20))
    assert sampler.n_rows == 1550
    np.testing.assert_array_equal(sampler.rows([1549, 1500]), X[[49, 0]])
    single = X[:9].astype(np.float32)
    sampler.fit(blocks(single, 9)).partial_fit(blocks(X[:50], 50))
    assert sampler.rows([0]).dtype == np.float32
    np.testing.assert_array_equal(sampler.rows([0, 9]), [single[0], X[0]])


def test_log_partition(client):
    sampler, _ = pair_of(False, client)
    query = X[:20] / 4  # of which few rows are near
    true = np.log(np.exp(query @ X.T).sum(axis=1))
    value, error = sampler.log_partition(query, n_samples=1500, seed=0)
    np.testing.assert_allclose(value, true, atol=1e-5)  # every row is read
    assert not error.any()
    offs = []
    for seed in range(10):
        value, error = sampler.log_partition(query, n_samples=300, seed=seed)
        offs.append((value - true) / error)
    assert 0.7 < np.sqrt(np.mean(np.square(offs))) < 1.4
    one = sampler.log_partition(query[0], seed=0)
    assert np.ndim(one.value) == np.ndim(one.standard_error) == 0
    # Rows that come later count too.
    sampler.partial_fit(blocks(X, 500))
    value, _ = sampler.log_partition(query, n_samples=3000, seed=0)
    np.testing.assert_allclose(value, true + np.log(2), atol=1e-5)


def test_bad_input(client):
    sampler = DaskLSHSampler(HASHER, client=client)
    with pytest.raises(NotFittedError, match="call fit first"):
        sampler.sample(X[:1])
    bad = X.copy()
    bad[1111] = np.inf
    rows = blocks(X, CHUNKS)
    short = rows.map_blocks(lambda x: x[:9], meta=X[:0])
    for error, arguments, message in [
        (TypeError, (X,), "X must be a Dask array or dataframe"),
        (ValueError, (rows.rechunk((100, 3)),), "X must be chunked by rows alone"),
        (ValueError, (rows[rows[:, 0] > 0],), "unknown chunk sizes"),
        (ValueError, (rows[:, :3],), r"X must have shape \(n, 6\)"),
        (ValueError, (blocks(bad, CHUNKS),), "X must be finite, row 311 has"),  # of its block
        (ValueError, (rows, -blocks(WEIGHTS, CHUNKS)), "weights must be finite and >= 0"),
        (TypeError, (rows, WEIGHTS), "weights must be a Dask array like X"),
        (ValueError, (rows, blocks(WEIGHTS, CHUNKS)[1:]), "weights must have shape"),
        (ValueError, (rows[:0],), "X must have at least one row"),
        (ValueError, (short,), r"X must have .*: \d+ in this block, got 9"),
    ]:
        with pytest.raises(error, match=message):
            sampler.fit(*arguments)
        assert sampler.n_rows == 0
    sampler.fit(rows)
    with pytest.raises(ValueError, match="weights must be None, as in fit"):
        sampler.partial_fit(rows, blocks(WEIGHTS, CHUNKS))
    with pytest.raises(TypeError, match="query must be an array, got a Dask collection"):
        sampler.sample(rows)
    with pytest.raises(ValueError, match=r"query must have shape \(n_q, 6\)"):
        sampler.sample(X[:, :5])
    with pytest.raises(ValueError, match="n_samples must be"):
        sampler.sample(X, 0)
    with pytest.raises(ValueError, match="query must be finite"):
        sampler.union(bad)
    with pytest.raises(TypeError, match="hasher must be a family"):
        DaskLSHSampler(3)
    with pytest.raises(TypeError, match="belongs to its client"):
        pickle.dumps(sampler)

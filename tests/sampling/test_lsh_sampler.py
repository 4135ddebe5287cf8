"""LSHSampler: its estimates without bias, its errors as large as it says."""

import numpy as np
import pytest
from cases.sampling import FAMILIES, METHODS, clustered

from lshkit.hashing import FastHadamard, Hyperplane, RandomBinning
from lshkit.sampling import LSHSampler, estimates


def repeated(family, weights=None, runs=120):
    """Estimates and errors `(runs, n_q)` of every method over independent hash functions."""
    spread, n = (0.5, 12) if family == "mostly empty" else (1.0, 60)
    X, queries = clustered(n, 6, spread)
    p = FAMILIES[family](0).collision_probability(queries[:, None], X)
    f = np.sqrt(p) * (1 + np.arange(n) % 3)  # large where rows collide, and more than p says

    def of_pairs(i, j):
        return f[i, j]

    results = {method: [] for method in METHODS}
    empty = 0.0
    for seed in range(runs):
        sampler = LSHSampler(FAMILIES[family](seed), seed=seed).fit(X, weights)
        empty += (sampler.tables.bucket_sizes(sampler.hasher.hash(queries)) == 0).mean() / runs
        for method in METHODS:
            results[method].append(sampler.estimate(queries, of_pairs, method))
    return f.sum(1), {k: np.array(v).swapaxes(0, 1) for k, v in results.items()}, empty


def assert_unbiased(values, exact):
    error = values.std(0, ddof=1) / np.sqrt(len(values))
    assert (np.abs(values.mean(0) - exact) < 4 * error).all(), (values.mean(0), exact, error)


@pytest.mark.parametrize("family", FAMILIES)
def test_estimates_are_unbiased_and_errors_as_stated(family):
    exact, results, empty = repeated(family)
    assert empty > 0.5 if family == "mostly empty" else empty < 0.5
    for method, (values, errors) in results.items():
        assert_unbiased(values, exact)
        # The squared errors estimate the variance: without bias for means of independent tables,
        # from above for the jackknife. Compared over all queries, which are not independent.
        squares = errors**2
        variance = (values - exact) ** 2
        difference = (squares - variance).mean(1)
        slack = 4 * difference.std(ddof=1) / np.sqrt(len(difference))
        assert difference.mean() > -slack
        if method != "horvitz_thompson":
            assert difference.mean() < slack


def test_weighted_draws_are_unbiased():
    weights = np.random.default_rng(1).exponential(size=60)
    exact, results, _ = repeated("hadamard", weights, runs=200)
    assert_unbiased(results["hbe"][0], exact)
    assert_unbiased(results["horvitz_thompson"][0], exact)


def test_sample_estimates_a_sum_when_samples_are_no_multiple_of_the_tables():
    X, queries = clustered(40, 6, 1.0)
    f = np.arange(1.0, 41)
    means = []
    for seed in range(300):
        sampler = LSHSampler(Hyperplane(6, 2, 3, seed=seed)).fit(X)
        indices, probabilities = sampler.sample(queries, 5, seed=seed)
        found = indices >= 0
        terms = np.where(found, f[indices], 0) / np.where(found, probabilities, 1)
        means.append(terms.mean(1))
    assert_unbiased(np.array(means), f.sum())


@pytest.mark.parametrize("weighted", [False, True])
def test_draw_frequencies(weighted):
    """One table: the draws of a query against probability / collision probability."""
    X, queries = clustered(50, 6, 1.0)
    weights = np.random.default_rng(1).integers(0, 4, 50) if weighted else None
    hasher = Hyperplane(6, 2, 1, seed=3)
    sampler = LSHSampler(hasher).fit(X, weights)
    n = 20000
    indices, probabilities = sampler.sample(queries[0], n, seed=0)
    rows, counts = np.unique(indices, return_counts=True)
    chance = np.zeros(50)
    chance[indices] = probabilities / hasher.collision_probability(queries[0], X[indices])
    members = hasher.hash(X)[:, 0] == hasher.hash(queries[:1])[0, 0]
    if weighted:
        members &= weights > 0
    np.testing.assert_array_equal(rows, np.flatnonzero(members))
    assert chance[rows].sum() == pytest.approx(1)
    chi_square = ((counts - n * chance[rows]) ** 2 / (n * chance[rows])).sum()
    k = len(rows) - 1
    assert abs(chi_square - k) < 4 * np.sqrt(2 * k)


@pytest.mark.parametrize("family", ["hadamard", "L2", "binning"])
def test_inclusion_frequencies(family):
    X, queries = clustered(60, 6, 1.0)
    runs, seen, stated = 400, np.zeros((3, 60)), np.zeros((3, 60))
    for seed in range(runs):
        sampler = LSHSampler(FAMILIES[family](seed)).fit(X)
        indptr, indices, probabilities = sampler.union(queries)
        i = np.repeat(np.arange(3), np.diff(indptr))
        seen[i, indices] += 1
        stated[i, indices] = probabilities
    p = FAMILIES[family](0).collision_probability(queries[:, None], X)
    expected = 1 - (1 - p) ** 4
    np.testing.assert_allclose(stated[seen > 0], expected[seen > 0], rtol=1e-5)
    likely = expected * runs > 10
    z = (seen - runs * expected) / np.sqrt(runs * expected * (1 - expected) + 1e-12)
    assert likely.sum() > 40
    assert np.abs(z[likely]).max() < 4.5  # of some 100 numbers


def test_inclusion_probability():
    p = np.array([0, 1e-12, 0.3, 1])
    expected = [0, 5e-12, 1 - 0.7**5, 1]
    np.testing.assert_allclose(estimates.inclusion_probability(p, 5), expected, rtol=1e-11)


def test_far_rows_that_share_a_code_by_chance():
    """One in 2^32 pairs of different bins: such a row has to weigh 2^32 in one table, not more."""
    hasher = RandomBinning(1, 1, bandwidth=1.0, seed=0)
    X = 1e9 * np.arange(1.0, 4)[:, None]
    sampler = LSHSampler(hasher).fit(X)
    sampler._data()["codes"][:] = hasher.hash(np.zeros((1, 1)))  # as if by chance
    _, rows, inclusion = sampler.union(np.zeros((1, 1)))
    assert rows.tolist() == [0, 1, 2]
    np.testing.assert_allclose(inclusion, 2.0**-32)
    assert sampler.estimate(np.zeros(1), np.ones(3), "full_bucket").value == 3 * 2.0**32


def test_values_of_several_columns_and_by_array():
    X, queries = clustered(60, 6, 1.0)
    sampler = LSHSampler(FAMILIES["hadamard"](0), seed=1).fit(X)
    table = np.random.default_rng(0).normal(size=(60, 2))
    for method in METHODS:
        both = sampler.estimate(queries, table, method, seed=5)
        assert both.value.shape == both.standard_error.shape == (3, 2)
        called = sampler.estimate(queries, lambda i, j: table[j], method, seed=5)
        for a, e in zip(called, both, strict=True):
            np.testing.assert_array_equal(a, e)
        for k in range(2):
            one = sampler.estimate(queries, table[:, k], method, seed=5)
            np.testing.assert_allclose(one.value, both.value[:, k], rtol=1e-12)
            np.testing.assert_allclose(one.standard_error, both.standard_error[:, k], rtol=1e-9)
        first = sampler.estimate(queries[0], table, method, seed=5)
        assert first.value.shape == (2,)
        if method != "hbe":
            np.testing.assert_allclose(first.value, both.value[0], rtol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_shapes_do_not_depend_on_what_is_found(method):
    """Queries that meet no row, alone or in a block of their own, and no queries."""
    X = np.abs(np.random.default_rng(0).normal(size=(50, 6))) + 1
    sampler = LSHSampler(FastHadamard(6, 16, 3, seed=0)).fit(X)
    for queries in (-X[:4], X[:0]):
        for f, shape in ((np.ones(50), ()), (np.ones((50, 2)), (2,))):
            value, error = sampler.estimate(queries, f, method)
            assert value.shape == error.shape == (len(queries), *shape)
            assert value.dtype == error.dtype == np.float64
            assert not value.any() and not error.any()


def test_blocks_of_queries_do_not_change_the_result(monkeypatch):
    X = np.abs(np.random.default_rng(0).normal(size=(60, 6))) + 1
    sampler = LSHSampler(FAMILIES["mostly empty"](0)).fit(X)
    queries = X[:3] * [[1], [-1], [1]]  # the second meets no row

    def f(i, j):
        return np.stack([i + j, j], 1)

    expected = sampler.estimate(queries, f)
    assert not expected.value[1].any() and expected.value[[0, 2]].all()
    monkeypatch.setattr(estimates, "_PAIRS", 1)
    for a, e in zip(sampler.estimate(queries, f), expected, strict=True):
        np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize("exponent", [-1000, -600, 600, 990])
def test_errors_are_in_proportion_to_the_values(exponent):
    """Bit for bit, though float64 holds no squares of them."""
    X, queries = clustered(60, 6, 1.0)
    sampler = LSHSampler(Hyperplane(6, 3, 8, seed=0), seed=0).fit(X)
    f = np.stack([np.exp(X[:, 0]), np.zeros(60)], 1)
    for method in METHODS:
        one = sampler.estimate(queries, f, method, seed=1)
        other = sampler.estimate(queries, np.ldexp(f, exponent), method, seed=1)
        assert (one.standard_error[:, 0] > 0).all() and (one.standard_error[:, 1] == 0).all()
        for x, y in zip(one, other, strict=True):
            np.testing.assert_array_equal(np.ldexp(x, exponent), y)


def test_one_table_has_no_standard_error():
    X, queries = clustered(60, 6, 1.0)
    sampler = LSHSampler(FastHadamard(6, 2, 1, seed=0)).fit(X)
    for method in METHODS:
        value, error = sampler.estimate(queries, np.ones(60), method)
        assert np.isfinite(value).all() and np.isnan(error).all()


def test_a_query_with_no_bucket_has_probability_zero():
    X = np.array([[1.0, 0.01], [1.0, 0.02]])
    sampler = LSHSampler(FastHadamard(2, 16, 5, seed=0)).fit(X)
    indices, probabilities = sampler.sample([-1.0, 0.3], 5)
    assert (indices == -1).all() and not probabilities.any()
    for method in METHODS:
        assert sampler.estimate([-1.0, 0.3], np.ones(2), method) == (0, 0)


def test_seeds():
    X, queries = clustered(60, 6, 1.0)
    hasher = FastHadamard(6, 2, 8, seed=0)

    def draws(*seeds):
        sampler = LSHSampler(hasher, seed=4).fit(X)
        return [sampler.sample(queries, 20, seed=seed)[0].tolist() for seed in seeds]

    assert draws(None, None) == draws(None, None)
    a, b, c, d = draws(None, None, 7, 7)
    assert a != b and c == d and c != a
    data = LSHSampler(hasher).fit(X).to_bytes()
    a, b = (LSHSampler.from_bytes(data, seed=4).sample(queries, 20)[0].tolist() for _ in range(2))
    assert a == b == draws(None)[0]


def test_memory_counts_every_array_once():
    rows = np.random.default_rng(0).normal(size=(500, 6)).astype(np.float32)
    hasher = FastHadamard(6, 3, 4, seed=0)
    for options in ({}, {"weights": np.ones(500)}, {"weights": np.ones(500, np.float32)}):
        sampler = LSHSampler(hasher).fit(rows, **options).partial_fit(rows, **options)
        found = [*sampler._data().values(), *sampler.tables._tables]
        arrays = {id(x): x.nbytes for x in found if x is not None}
        assert sampler.nbytes == sum(arrays.values())

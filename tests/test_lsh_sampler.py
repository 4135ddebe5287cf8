"""LSHSampler: its estimates without bias, its errors as large as it says, its data as if by fit."""

import re

import numpy as np
import pytest

from lshkit.hashing import EuclideanLSH, FastHadamard, Hyperplane, RandomBinning
from lshkit.sampling import LSHSampler, estimates

METHODS = "horvitz_thompson", "hbe", "full_bucket"


def clustered(n, d, spread, seed=0, clusters=4):
    """Rows around a few unit vectors, and some of them as queries."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(clusters, d))
    centers /= np.linalg.norm(centers, axis=1, keepdims=True)
    noise = spread / np.sqrt(d) * rng.normal(size=(n + 3, d))
    rows = centers[rng.integers(clusters, size=n + 3)] + noise
    return rows[:n], rows[n:]


FAMILIES = {
    "hadamard": lambda seed: FastHadamard(6, 5, 4, seed=seed),
    "hyperplane": lambda seed: Hyperplane(6, 4, 4, seed=seed),
    "mostly empty": lambda seed: FastHadamard(6, 14, 4, seed=seed),
    "L2": lambda seed: EuclideanLSH(6, 2, 4, width=2.0, seed=seed),
    "L1": lambda seed: EuclideanLSH(6, 2, 4, width=4.0, p=1, seed=seed),
    "binning": lambda seed: RandomBinning(6, 4, bandwidth=2.0, seed=seed),
}


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


def test_probabilities_of_nearly_parallel_rows_are_exact():
    """Angles that the cosine does not hold in float32."""
    x = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)
    X = np.concatenate([x, x * 3, x + np.float32(1e-4), -x]).astype(np.float32)
    hasher = FastHadamard(64, 8, 50, seed=0)
    indptr, indices, inclusion = LSHSampler(hasher).fit(X).union(x)
    assert {0, 1, 2} <= set(indices.tolist())
    p = hasher.collision_probability(x, X[indices])
    np.testing.assert_allclose(inclusion, 1 - (1 - p) ** 50, rtol=1e-12)
    assert p[0] == 1


@pytest.mark.parametrize("scale", [1e-25, 1e-19, 1e-12, 1e15, 1e25])
def test_probabilities_of_long_and_short_rows(scale):
    X, queries = clustered(60, 6, 1.0)
    hasher = FAMILIES["hadamard"](0)
    indptr, rows, inclusion = LSHSampler(hasher).fit((scale * X).astype(np.float32)).union(queries)
    p = hasher.collision_probability(np.repeat(queries, np.diff(indptr), 0), X[rows])
    np.testing.assert_allclose(inclusion, 1 - (1 - p) ** 4, rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-300, 1e-50, 1e50, 1e300])
def test_lengths_that_float32_does_not_hold(scale):
    """Angles are hashed in float32, lengths are not what counts."""
    X, queries = clustered(60, 6, 1.0)
    for rows, asked in ((scale * X, queries), (X.astype(np.float32), scale * queries)):
        expected = LSHSampler(FAMILIES["hadamard"](0)).fit(X.astype(rows.dtype)).union(queries)
        got = LSHSampler(FAMILIES["hadamard"](0)).fit(rows).union(asked)
        np.testing.assert_array_equal(got[1], expected[1])
        np.testing.assert_allclose(got[2], expected[2], rtol=1e-4)


def test_values_that_the_type_of_the_rows_does_not_hold():
    hasher = EuclideanLSH(6, 2, 4, width=1.0, seed=0)
    sampler = LSHSampler(hasher).fit(np.ones((3, 6), np.float32))
    with pytest.raises(ValueError, match="X in float32, the type of the rows, must be finite, row"):
        sampler.partial_fit(np.full((1, 6), 1e300))
    with pytest.raises(ValueError, match="query in float32, the type of the rows, must be finite"):
        sampler.union(np.full(6, 1e300))
    with pytest.raises(ValueError, match="the rows of other in float32, .* must be finite, row 1"):
        sampler.merge(LSHSampler(hasher).fit([[1.0] * 6, [1e300] * 6]))


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("scale", [1e-30, 1e-23, 1e-20, 1e20])
def test_distances_whose_squares_float32_does_not_hold(scale, p):
    X, queries = (x.astype(np.float32) * np.float32(scale) for x in clustered(60, 6, 1.0))
    hasher = EuclideanLSH(6, 2, 4, width=3 * scale, p=p, seed=0)
    indptr, rows, inclusion = LSHSampler(hasher).fit(X).union(queries)
    probability = hasher.collision_probability(np.repeat(queries, np.diff(indptr), 0), X[rows])
    np.testing.assert_allclose(inclusion, 1 - (1 - probability) ** 4, rtol=1e-5)


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


def test_one_table_has_no_standard_error():
    X, queries = clustered(60, 6, 1.0)
    sampler = LSHSampler(FastHadamard(6, 2, 1, seed=0)).fit(X)
    for method in METHODS:
        value, error = sampler.estimate(queries, np.ones(60), method)
        assert np.isfinite(value).all() and np.isnan(error).all()


def assert_same(a, b, queries, rename=lambda j: j):
    """Same draws, unions and estimates, with indices renamed."""
    for seed in (0, 1):
        got, expected = a.sample(queries, 9, seed=seed), b.sample(queries, 9, seed=seed)
        np.testing.assert_array_equal(got[0], rename(expected[0]))
        np.testing.assert_array_equal(got[1], expected[1])
    got, expected = a.union(queries), b.union(queries)
    np.testing.assert_array_equal(got[1], rename(expected[1]))
    for k in (0, 2):
        np.testing.assert_array_equal(got[k], expected[k])
    assert a.n_rows == b.n_rows


@pytest.mark.parametrize("weighted", [False, True])
def test_add_then_remove_equals_never_added(weighted):
    X, queries = clustered(90, 6, 1.0)
    weights = np.random.default_rng(1).random(90) if weighted else None

    def rows(part):
        return X[part], None if weights is None else weights[part]

    hasher = FastHadamard(6, 4, 8, seed=0)
    never = LSHSampler(hasher).fit(*rows(slice(0, 60)))
    sampler = LSHSampler(hasher).fit(*rows(slice(0, 60))).partial_fit(*rows(slice(60, 90)))
    assert_same(sampler, LSHSampler(hasher).fit(*rows(slice(None))), queries)
    sampler.remove(np.arange(60, 90))
    assert_same(sampler, never, queries)
    assert sampler.remove([]).n_rows == 60
    sampler.remove(range(10, 30))
    kept = np.r_[0:10, 30:60]
    np.testing.assert_array_equal(sampler.indices_, kept)
    without = LSHSampler(hasher).partial_fit(*rows(kept))
    assert_same(sampler, without, queries, lambda j: np.where(j < 0, -1, kept[j]))
    sampler.partial_fit(*rows(slice(10, 30)))
    np.testing.assert_array_equal(sampler.indices_[-20:], np.arange(90, 110))  # never used again


def test_all_rows_removed():
    X, queries = clustered(20, 6, 1.0)
    sampler = LSHSampler(FastHadamard(6, 4, 8, seed=0)).fit(X).remove(np.arange(20))
    indices, probabilities = sampler.sample(queries, 3)
    assert (indices == -1).all() and not probabilities.any()
    assert sampler.union(queries)[0].tolist() == [0, 0, 0, 0]
    for method in METHODS:
        value, error = sampler.estimate(queries, np.ones(20), method)
        assert not value.any() and not error.any()
    assert sampler.partial_fit(X).n_rows == 20


def test_merge_equals_fit_of_both():
    X, queries = clustered(60, 6, 1.0)
    hasher = FastHadamard(6, 4, 8, seed=0)
    a = LSHSampler(hasher).fit(X[:25])
    b = LSHSampler(FastHadamard(6, 4, 8, seed=0)).fit(X[25:])
    assert_same(a.merge(b), LSHSampler(hasher).fit(X), queries)
    assert b.n_rows == 35


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


def test_data_is_copied():
    X, queries = clustered(60, 6, 1.0)
    sampler = LSHSampler(FAMILIES["hadamard"](0)).fit(X)
    before = sampler.union(queries)
    X[:] = 1
    np.testing.assert_array_equal(sampler.union(queries)[2], before[2])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64])
def test_types_of_rows(dtype):
    X = np.random.default_rng(0).integers(-9, 9, (40, 6)) + 0.5 * (dtype != np.int64)
    expected = LSHSampler(FAMILIES["hadamard"](0)).fit(X).union(X[:3])
    got = LSHSampler(FAMILIES["hadamard"](0)).fit(X.astype(dtype)).union(X[:3].astype(dtype))
    np.testing.assert_array_equal(got[1], expected[1])
    np.testing.assert_allclose(got[2], expected[2], rtol=1e-5)


def test_tensors():
    torch = pytest.importorskip("torch")
    X, queries = clustered(60, 6, 1.0)
    arrays = LSHSampler(FAMILIES["hadamard"](0), seed=1).fit(X)
    tensors = LSHSampler(FAMILIES["hadamard"](0), seed=1).fit(torch.from_numpy(X))
    q = torch.from_numpy(queries).requires_grad_()
    values = torch.from_numpy(np.arange(60.0))
    pairs = [
        (arrays.sample(queries, 5), tensors.sample(q, 5)),
        (arrays.union(queries), tensors.union(q)),
        (arrays.estimate(queries, values.numpy()), tensors.estimate(q, lambda i, j: values[j])),
        (arrays.estimate(queries[0], values.numpy()), tensors.estimate(q[0], values)),
    ]
    for expected, got in pairs:
        for a, e in zip(got, expected, strict=True):
            assert isinstance(a, torch.Tensor)
            np.testing.assert_array_equal(a.numpy(), e)
            assert a.numpy().dtype == e.dtype


# ---------------------------------------------------------------- bad arguments


def test_unfitted():
    from sklearn.exceptions import NotFittedError

    sampler = LSHSampler(FAMILIES["hadamard"](0))
    query = np.ones(6)
    for call in (
        lambda: sampler.sample(query, 3),
        lambda: sampler.union(query),
        lambda: sampler.estimate(query, np.ones(3)),
        lambda: sampler.remove([0]),
        lambda: sampler.save("nowhere.npz"),
        lambda: sampler.merge(LSHSampler(sampler.hasher)),
    ):
        with pytest.raises(NotFittedError, match="call fit first"):
            call()


ROWS = np.random.default_rng(0).normal(size=(5, 6))


def with_value(value, row=2):
    x = ROWS.copy()
    x[row, 1] = value
    return x


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.fit(ROWS[:0]), ValueError, "X must have at least one row"),
        (lambda s: s.fit(ROWS[:, :5]), ValueError, "X must have shape (n, 6)"),
        (lambda s: s.fit(ROWS[0]), ValueError, "X must have shape (n, 6)"),
        (lambda s: s.fit(ROWS * 1j), TypeError, "X must hold real numbers"),
        (lambda s: s.fit(with_value(np.nan)), ValueError, "X must be finite, row 2"),
        (lambda s: s.fit(with_value(np.inf)), ValueError, "X must be finite, row 2"),
        (lambda s: s.fit(np.eye(6) * [1, 0, 1, 1, 1, 1]), ValueError, "row 1"),
        (lambda s: s.fit(ROWS, [1, 1, -1, 1, 1]), ValueError, "weights must be finite and >= 0"),
        (lambda s: s.fit(ROWS, [1, 1, np.nan, 1, 1]), ValueError, "in row 2"),
        (lambda s: s.fit(ROWS, np.ones(4)), ValueError, "weights must have shape (5,)"),
        (lambda s: s.partial_fit(ROWS, np.ones(5)), ValueError, "no weights, as in fit"),
        (lambda s: s.partial_fit(ROWS[:0]), ValueError, "at least one row"),
        (lambda s: s.remove([5]), ValueError, "rows that are there, got 5"),
        (lambda s: s.remove([1, 1]), ValueError, "each row once"),
        (lambda s: s.remove([0.5]), TypeError, "indices must hold integers"),
        (lambda s: s.merge(s.hasher), TypeError, "other must be an LSHSampler"),
        (
            lambda s: s.merge(LSHSampler(FastHadamard(6, 5, 4, seed=1)).fit(ROWS)),
            ValueError,
            "other must have the same hash functions",
        ),
        (
            lambda s: s.merge(LSHSampler(s.hasher).fit(ROWS, np.ones(5))),
            ValueError,
            "other must have weights",
        ),
        (lambda s: s.sample(ROWS[:, :5], 3), ValueError, "query must have shape (n_q, 6) or (6,)"),
        (lambda s: s.sample(with_value(np.nan), 3), ValueError, "query must be finite, row 2"),
        (lambda s: s.sample(np.zeros(6), 3), ValueError, "query must have no row of zeros"),
        (lambda s: s.sample(ROWS, 0), ValueError, "n_samples must be an integer >= 1"),
        (lambda s: s.sample(ROWS, 3, seed=-1), ValueError, "seed must be"),
        (lambda s: s.union(ROWS[None]), ValueError, "query must have shape"),
        (lambda s: s.estimate(ROWS, np.ones(4)), ValueError, "f must have shape (5,) or (5, k)"),
        (lambda s: s.estimate(ROWS, np.ones(5), "hb"), ValueError, "method must be one of"),
        (lambda s: s.estimate(ROWS, lambda i, j: 1.0), ValueError, "f(i, j) must have shape"),
        (lambda s: s.estimate(ROWS, lambda i, j: j[:-1]), ValueError, "f(i, j) must have shape"),
        (lambda s: LSHSampler(3), TypeError, "hasher must be a family of lshkit.hashing, got int"),
        (lambda s: LSHSampler(s.hasher, seed=-1), ValueError, "seed must be an integer >= 0"),
    ],
)
def test_bad_arguments(call, error, message):
    sampler = LSHSampler(FAMILIES["hadamard"](0)).fit(ROWS)
    before = sampler.n_rows, sampler.union(ROWS)[1].tolist()
    with pytest.raises(error, match=re.escape(message)):
        call(sampler)
    assert before == (sampler.n_rows, sampler.union(ROWS)[1].tolist())

"""LSHSampler's rows: of any size and type, added, removed and merged, refused by name."""

import re

import numpy as np
import pytest
from cases.sampling import FAMILIES, METHODS, assert_same, clustered

from lshkit.hashing import EuclideanLSH, FastHadamard, RandomBinning
from lshkit.sampling import LSHSampler


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
    hasher = EuclideanLSH(6, 2, 4, width=1e30, seed=0)
    sampler = LSHSampler(hasher).fit(np.ones((3, 6), np.float32))
    with pytest.raises(ValueError, match="X in float32, the type of the rows, must be finite, row"):
        sampler.partial_fit(np.full((1, 6), 1e40))
    with pytest.raises(ValueError, match="query in float32, the type of the rows, must be finite"):
        sampler.union(np.full(6, 1e40))
    with pytest.raises(ValueError, match="the rows of other in float32, .* must be finite, row 1"):
        sampler.merge(LSHSampler(hasher).fit([[1.0] * 6, [1e40] * 6]))


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("scale", [1e-30, 1e-23, 1e-20, 1e20])
def test_distances_whose_squares_float32_does_not_hold(scale, p):
    X, queries = (x.astype(np.float32) * np.float32(scale) for x in clustered(60, 6, 1.0))
    hasher = EuclideanLSH(6, 2, 4, width=3 * scale, p=p, seed=0)
    indptr, rows, inclusion = LSHSampler(hasher).fit(X).union(queries)
    probability = hasher.collision_probability(np.repeat(queries, np.diff(indptr), 0), X[rows])
    np.testing.assert_allclose(inclusion, 1 - (1 - probability) ** 4, rtol=1e-5)


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


@pytest.mark.parametrize("make", [EuclideanLSH, RandomBinning])
def test_rows_beyond_exact_bins_are_refused(make):
    """Two rows at +-1e18 widths shared all their codes, and were estimated as 268,435,457 rows."""
    sizes = ((1, 2, 16), {"width": 1.0}) if make is EuclideanLSH else ((1, 16), {"bandwidth": 1.0})
    hasher = make(*sizes[0], **sizes[1], seed=0)
    X = np.array([[1.0], [1e18], [-1e18]])
    sampler = LSHSampler(hasher).fit(X[:1])
    for call in (sampler.fit, sampler.partial_fit):
        with pytest.raises(ValueError, match=r"X must be less than 2\^51 .* row 1 is .* bins away"):
            call(X)
    for call in (sampler.sample, sampler.union, lambda x: sampler.estimate(x, np.ones(1))):
        with pytest.raises(ValueError, match=r"query must be less than 2\^51 .* row 0 is"):
            call(X[2])


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
        (lambda s: s.partial_fit(ROWS, np.ones(5)), ValueError, "weights must be None, as in fit"),
        (lambda s: s.partial_fit(ROWS[:0]), ValueError, "at least one row"),
        (lambda s: s.remove([5]), ValueError, "rows in the sampler, got 5"),
        (lambda s: s.remove([1, 1]), ValueError, "must be distinct"),
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
        (lambda s: s.sample(ROWS, 0), ValueError, "n_samples must be an integer"),
        (lambda s: s.sample(ROWS, 3, seed=-1), ValueError, "seed must be"),
        (lambda s: s.union(ROWS[None]), ValueError, "query must have shape"),
        (lambda s: s.estimate(ROWS, np.ones(4)), ValueError, "f must have shape (5,) or (5, k)"),
        (lambda s: s.estimate(ROWS, np.ones(5), "hb"), ValueError, "method must be one of"),
        (lambda s: s.estimate(ROWS, np.ones(5), []), ValueError, "method must be one of"),
        (lambda s: s.estimate(ROWS, lambda i, j: 1.0), ValueError, "f(i, j) must have shape"),
        (lambda s: s.estimate(ROWS, lambda i, j: j[:-1]), ValueError, "f(i, j) must have shape"),
        (lambda s: LSHSampler(3), TypeError, "hasher must be a family of lshkit.hashing, got int"),
        (lambda s: LSHSampler(s.hasher, seed=-1), ValueError, "seed must be an integer >= 0"),
        (lambda s: LSHSampler(s.hasher, seed=2**128), ValueError, "seed must be below 2**128"),
        (lambda s: s.sample(ROWS, 3, seed=2**128), ValueError, "seed must be below 2**128"),
    ],
)
def test_bad_arguments(call, error, message):
    sampler = LSHSampler(FAMILIES["hadamard"](0)).fit(ROWS)
    before = sampler.n_rows, sampler.union(ROWS)[1].tolist()
    with pytest.raises(error, match=re.escape(message)):
        call(sampler)
    assert before == (sampler.n_rows, sampler.union(ROWS)[1].tolist())

"""log_partition: near classes exactly, a sample of the others, without bias for any tables."""

import re

import numpy as np
import pytest

from lshkit import _C, reference
from lshkit.sampling import PartitionSampler, log_partition


def classes(n, d, spread=0.5, scale=5.0, clusters=20, n_queries=8, seed=0):
    """Unit-length classes in clusters, and queries of length `scale` from the same clusters."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(clusters, d))
    centers /= np.linalg.norm(centers, axis=1, keepdims=True)
    x = centers[rng.integers(clusters, size=n + n_queries)]
    x += spread / np.sqrt(d) * rng.normal(size=x.shape)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x[:n].astype(np.float32), (scale * x[n:]).astype(np.float32)


def exact(query, weights, bias=0.0):
    logits = query.astype(np.float64) @ weights.astype(np.float64).T + bias
    largest = logits.max(-1, keepdims=True)
    return np.log(np.exp(logits - largest).sum(-1)) + largest[..., 0]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("min_count", [1, 2, 3])
@pytest.mark.parametrize(
    ("n", "d", "n_queries", "n_sample"), [(400, 60, 33, 57), (3000, 17, 5, 700)]
)
def test_sums_equal_to_reference(n, d, n_queries, n_sample, min_count, biased):
    weights, queries = classes(n, d, n_queries=n_queries)
    bias = np.random.default_rng(1).normal(size=n).astype(np.float32) if biased else None
    sampler = PartitionSampler(weights, n_bits=6, n_hashes=9, n_probes=3, seed=0)
    codes = sampler.hasher.hash(weights - weights.mean(0, dtype=np.float64).astype(np.float32))
    sample = np.random.default_rng(0).choice(n, n_sample, replace=False).astype(np.int32)
    probes = sampler.probes(queries)
    expected = reference.partition_sums(queries, weights, bias, codes, probes, min_count, sample)
    order, bins = sampler.tables._tables[:2]
    results = []
    for threads in (1, 2):
        out = np.empty((n_queries, 6))
        _C.partition_sums(
            *(queries, weights, bias, order, bins, probes, min_count, sample, out, threads)
        )
        results.append(out)
    np.testing.assert_array_equal(*results)
    np.testing.assert_allclose(out[:, :4], expected[:, :4], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(out[:, 4:], expected[:, 4:])
    assert expected[:, 4].max() > 0


def test_all_classes_sampled_is_exact():
    weights, queries = classes(500, 24)
    bias = np.random.default_rng(1).normal(size=500)
    for options in ({}, {"bias": bias}):
        value, error = log_partition(queries, weights, n_samples=500, seed=0, **options)
        np.testing.assert_allclose(value, exact(queries, weights, **options), atol=2e-6)
        assert not error.any()


@pytest.mark.parametrize("stale", [False, True])
def test_unbiased_for_any_tables_and_errors_as_stated(stale):
    """Over samples, with tables as they are: of these weights, or of others altogether."""
    weights, queries = classes(3000, 24)
    hashed = classes(3000, 24, seed=5)[0] if stale else weights
    sampler = PartitionSampler(hashed, n_bits=6, n_hashes=4, n_probes=2, seed=0)
    bias = np.random.default_rng(1).normal(size=3000)
    z = exact(queries, weights, bias)
    results = [
        log_partition(queries, weights, bias=bias, sampler=sampler, n_samples=200, seed=seed)
        for seed in range(800)
    ]
    values = np.exp(np.array([value for value, _ in results]) - z)
    errors = values * np.array([error for _, error in results])
    assert values.std() > 1e-3
    standard = values.std(0, ddof=1) / np.sqrt(len(values))
    assert (np.abs(values.mean(0) - 1) < 4 * standard).all()
    difference = errors**2 - (values - 1) ** 2  # expectation 0, without replacement too
    slack = 4 * difference.std(0, ddof=1) / np.sqrt(len(values))
    assert (np.abs(difference.mean(0)) < slack).all()


def test_near_classes_reduce_the_error():
    weights, queries = classes(20000, 32, spread=0.4, scale=12.0, clusters=40, n_queries=32)
    z = exact(queries, weights)
    sampler = PartitionSampler(weights, seed=0)
    assert sampler.hasher.n_bits == 8
    far = PartitionSampler(np.roll(weights, 1, 1) * -1, seed=0)  # tables that know nothing
    rms = [
        np.sqrt(np.mean(np.expm1(log_partition(queries, weights, sampler=s, seed=1)[0] - z) ** 2))
        for s in (sampler, far)
    ]
    assert rms[0] < rms[1] / 3


def test_centering_does_not_change_what_is_estimated():
    weights, queries = classes(1000, 24)
    weights += 3
    options = dict(n_samples=1000, seed=0)
    for center in (False, True):
        sampler = PartitionSampler(weights, center=center, seed=0)
        value, _ = log_partition(queries, weights, sampler=sampler, **options)
        np.testing.assert_allclose(value, exact(queries, weights), rtol=1e-5)


def test_refresh():
    weights, queries = classes(1000, 24)
    other = classes(1000, 24, seed=3)[0]
    samplers = PartitionSampler(weights, seed=0).refresh(other), PartitionSampler(other, seed=0)
    values = [log_partition(queries, other, sampler=s, n_samples=50, seed=0) for s in samplers]
    np.testing.assert_array_equal(*values)


def test_single_queries_seeds_and_few_classes():
    weights, queries = classes(500, 24)
    sampler = PartitionSampler(weights, n_bits=8, n_probes=2, seed=0)
    options = dict(sampler=sampler, n_samples=50)
    value, error = log_partition(queries, weights, seed=3, **options)
    one, one_error = log_partition(queries[2], weights, seed=3, **options)
    assert (one, one_error) == (value[2], error[2]) and np.ndim(one) == 0
    again, _ = log_partition(queries, weights, seed=3, **options)
    np.testing.assert_array_equal(again, value)
    other, _ = log_partition(queries, weights, seed=4, **options)
    assert (other != value).all()
    value, error = log_partition(queries[:0], weights, **options)
    assert value.shape == error.shape == (0,)
    assert log_partition(queries[0], weights[:1], seed=0).value == pytest.approx(
        float(queries[0] @ weights[0]), rel=1e-5
    )


def test_classes_alike():
    """All in the bucket of code 0, so that the tables have no bucket but that."""
    sampler = PartitionSampler(np.ones((600, 4)), n_bits=10, n_probes=8, seed=0)
    value, _ = log_partition(np.ones(4), np.ones((600, 4)), sampler=sampler, n_samples=50, seed=0)
    assert value == pytest.approx(4 + np.log(600))


def test_a_sample_of_one_class_has_no_standard_error():
    weights, queries = classes(300, 6)
    value, error = log_partition(queries, weights, n_samples=1, seed=0)
    assert np.isfinite(value).all() and np.isnan(error).all()
    assert log_partition(queries, weights[:1], n_samples=1).standard_error.tolist() == [0] * 8


def test_tensors():
    torch = pytest.importorskip("torch")
    weights, queries = classes(500, 24)
    bias = np.random.default_rng(1).normal(size=500).astype(np.float32)
    expected = log_partition(queries, weights, bias=bias, n_samples=50, seed=0)
    w = torch.nn.Parameter(torch.from_numpy(weights))
    b = torch.from_numpy(bias)
    got = log_partition(torch.from_numpy(queries), w, bias=b, n_samples=50, seed=0)
    for a, e in zip(got, expected, strict=True):
        assert isinstance(a, torch.Tensor) and not a.requires_grad
        np.testing.assert_array_equal(a.numpy(), e)
    sampler = PartitionSampler(w, seed=0)
    one = log_partition(torch.from_numpy(queries[0]).bfloat16(), w, sampler=sampler, n_samples=50)
    assert one.value.shape == ()


def test_a_bias_of_minus_infinity_leaves_classes_out():
    weights, queries = classes(500, 8)
    bias = np.where(np.arange(500) % 3, -np.inf, 0.5)
    got = log_partition(queries, weights, bias=bias, n_samples=500, seed=0)
    np.testing.assert_allclose(got.value, exact(queries, weights[::3], 0.5), rtol=1e-5)
    # Without bias for samples that hold none of the others, too, whose estimate of Z may be 0.
    bias = np.where(np.arange(500) > 3, -np.inf, 0.0)
    sampler = PartitionSampler(weights, n_hashes=2, n_probes=1, seed=0)
    options = dict(bias=bias, sampler=sampler, n_samples=50)
    found = [log_partition(queries, weights, **options, seed=seed) for seed in range(2000)]
    values, errors = (np.stack(x) for x in zip(*found, strict=True))
    assert np.isneginf(values).any() and (np.isposinf(errors) == np.isneginf(values)).all()
    z = np.exp(values - exact(queries, weights[:4]))
    spread = z.std(axis=0) / np.sqrt(len(z))
    assert (np.abs(z.mean(axis=0) - 1) < 4.5 * spread).all()


WEIGHTS, QUERIES = classes(40, 6)


def with_value(x, value, row=2):
    x = x.copy()
    x[row, ..., 1:2] = value
    return x


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: log_partition(QUERIES[:, :5], WEIGHTS), ValueError, "weight_matrix must have"),
        (lambda s: log_partition(QUERIES[None], WEIGHTS), ValueError, "query must have shape"),
        (lambda s: log_partition(QUERIES, WEIGHTS[0]), ValueError, "weight_matrix must have shape"),
        (lambda s: log_partition(QUERIES, WEIGHTS * 1j), TypeError, "weight_matrix must hold real"),
        (lambda s: log_partition(QUERIES, WEIGHTS[:0]), ValueError, "must have at least one class"),
        (
            lambda s: log_partition(with_value(QUERIES, np.nan), WEIGHTS),
            ValueError,
            "query in float32 must be finite, row 2",
        ),
        (
            lambda s: log_partition(QUERIES, with_value(WEIGHTS, np.inf), sampler=s),
            ValueError,
            "weight_matrix in float32 must be finite, row 2",
        ),
        (
            lambda s: log_partition(QUERIES, WEIGHTS, sampler=s, bias=np.full(40, np.nan)),
            ValueError,
            "bias must be finite, or -inf for classes to leave out, row 0 has nan",
        ),
        (  # no matter whether its class is read
            lambda s: log_partition(
                QUERIES, WEIGHTS, sampler=s, bias=np.r_[np.zeros(39), np.inf], n_samples=2, seed=0
            ),
            ValueError,
            "bias must be finite, or -inf for classes to leave out, row 39 has inf",
        ),
        (
            lambda s: log_partition(QUERIES, WEIGHTS, sampler=s, bias=np.full(40, -np.inf)),
            ValueError,
            "bias must leave in a class, got -inf for all",
        ),
        (
            lambda s: log_partition(QUERIES * 1e20, WEIGHTS * 1e20, sampler=s),
            ValueError,
            "the logits of query 0 overflow float32",
        ),
        (lambda s: log_partition(QUERIES, WEIGHTS, bias=np.ones(3)), ValueError, "bias must have"),
        (lambda s: log_partition(QUERIES, WEIGHTS, n_samples=0), ValueError, "n_samples must be"),
        (lambda s: log_partition(QUERIES, WEIGHTS, sampler=1), TypeError, "sampler must be a Part"),
        (lambda s: log_partition(QUERIES, WEIGHTS, sampler=s, seed=-1), ValueError, "seed must be"),
        (
            lambda s: log_partition(QUERIES, WEIGHTS, sampler=s, seed=2**128),
            ValueError,
            "seed must be below 2**128",
        ),
        (lambda s: log_partition(QUERIES, WEIGHTS, sampler=s, seed=1.5), TypeError, "seed must be"),
        (
            lambda s: log_partition(QUERIES, WEIGHTS[:39], sampler=s),
            ValueError,
            "weight_matrix must have the sampler's shape (40, 6), got (39, 6)",
        ),
        (lambda s: s.refresh(WEIGHTS[:, :5]), ValueError, "the sampler's shape (40, 6)"),
        (lambda s: PartitionSampler(WEIGHTS[0]), ValueError, "weight_matrix must have shape"),
        (lambda s: PartitionSampler(with_value(WEIGHTS, np.nan)), ValueError, "row 2"),
        (lambda s: PartitionSampler(WEIGHTS, n_bits=17), ValueError, "n_bits must be an integer"),
        (lambda s: PartitionSampler(WEIGHTS, n_bits=11), ValueError, "from 1 to 10"),
        (lambda s: PartitionSampler(WEIGHTS, n_hashes=0), ValueError, "n_hashes must be"),
        (lambda s: PartitionSampler(WEIGHTS, n_bits=2, n_probes=5), ValueError, "from 1 to 4"),
        (lambda s: PartitionSampler(WEIGHTS, min_count=4), ValueError, "from 1 to 3"),
        (lambda s: PartitionSampler(WEIGHTS, n_hashes=1), ValueError, "from 1 to 1, got 2"),
        (lambda s: PartitionSampler(WEIGHTS, center=1), TypeError, "center must be a bool"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(PartitionSampler(WEIGHTS, seed=0))


def test_bad_arguments_of_the_core():
    sampler = PartitionSampler(WEIGHTS, n_bits=3, seed=0)
    order, bins = sampler.tables._tables[:2]
    good = dict(
        queries=QUERIES,
        rows=WEIGHTS,
        bias=None,
        order=order,
        start=bins,
        probes=sampler.probes(QUERIES),
        min_count=1,
        sample=np.zeros(1, np.int32),
        out=np.empty((8, 6)),
    )
    _C.partition_sums(**good)
    for name, value in {
        "queries": QUERIES.astype(np.float64),
        "rows": WEIGHTS[:, :3],
        "bias": np.zeros(39, np.float32),
        "order": order[:, :39],
        "start": bins[:3],
        "probes": good["probes"][:, :3],
        "min_count": 4,
        "sample": np.zeros(1, np.int64),
        "out": np.empty((8, 5)),
    }.items():
        with pytest.raises((TypeError, ValueError), match=name):
            _C.partition_sums(**(good | {name: value}))

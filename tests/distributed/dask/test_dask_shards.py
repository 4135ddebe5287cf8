"""Densities of rows that stay on the workers: exact sums, errors of the total, lazy results."""

import gc

import numpy as np
import pytest

from lshkit.kde import LSHKernelDensity

pytest.importorskip("dask.array")
from cases.dask_arrays import blocks, compute  # noqa: E402

from lshkit.distributed import DaskKernelDensity  # noqa: E402
from lshkit.distributed.dask import shards, tolerance  # noqa: E402
from lshkit.kde.method import Accuracy  # noqa: E402
from lshkit.kde.sums import Sums  # noqa: E402

RNG = np.random.default_rng(0)
N, D = 16_000, 12
CENTRES = 2 * RNG.normal(size=(8, D))
LABELS = np.sort(RNG.integers(8, size=N))
SORTED = CENTRES[LABELS] + 0.7 * RNG.normal(size=(N, D))  # a query has its rows in one shard
SHUFFLED = RNG.permutation(SORTED)
WEIGHTS = RNG.uniform(0.01, 30, size=N)
QUERIES = CENTRES[RNG.integers(8, size=1000)] + 0.7 * RNG.normal(size=(1000, D))
ORDERS = {"sorted": SORTED, "shuffled": SHUFFLED}


def exact(X, weights=None, **options):
    parameters = {"algorithm": "brute"} | options
    return LSHKernelDensity(**parameters).fit(X, sample_weight=weights)


@pytest.mark.parametrize("kernel", ["gaussian", "exponential", "laplacian", "tophat", "cosine"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_exact_sums(kernel, weighted, client):
    X, weights = SORTED[:2000], WEIGHTS[:2000].copy() if weighted else None
    if weighted:
        weights[100:300] = 0  # a shard without weight
        weights[1500:] *= 1e-30
    local = exact(X, weights, kernel=kernel, bandwidth=3.0)
    density = DaskKernelDensity(kernel, 3.0, algorithm="brute", client=client)
    chunks = (100, 200, 0, 1700)
    density.fit(blocks(X, chunks), sample_weight=blocks(weights, 500) if weighted else None)
    got, std = density.score_samples(blocks(QUERIES, 300), return_std=True)
    assert got.chunks == std.chunks == ((300, 300, 300, 100),)
    got, std = compute(client, got, std)
    np.testing.assert_allclose(got, local.score_samples(QUERIES), rtol=0, atol=1e-5)
    assert not std.any()
    assert density.algorithm_ == "brute" and density.n_shards_ == 4
    mean = compute(client, density.kernel_mean(blocks(QUERIES, 300)))[0]
    np.testing.assert_allclose(mean, local.kernel_mean(QUERIES), rtol=1e-5)


def test_far_queries_and_float32(client):
    X = SORTED[:1000].astype(np.float32)
    far = np.concatenate([QUERIES[:5], 1e4 + QUERIES[:5]]).astype(np.float32)
    density = DaskKernelDensity(client=client).fit(blocks(X, 300))
    log = compute(client, density.score_samples(blocks(far, 10)))[0]
    assert log.dtype == np.float32 and np.isfinite(log).all()
    np.testing.assert_allclose(log, exact(X).score_samples(far), rtol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("algorithm", ["auto", "random", "near_far", "hbe"])
def test_rtol_is_of_the_total_and_errors_are_stated(order, algorithm, client):
    X, weights = ORDERS[order], WEIGHTS if algorithm == "random" else None
    true = exact(X, weights).score_samples(QUERIES)
    density = DaskKernelDensity(algorithm=algorithm, random_state=0, client=client)
    density.fit(blocks(X, 2000), sample_weight=None if weights is None else blocks(weights, 2000))
    got, std = compute(client, *density.score_samples(blocks(QUERIES, 500), return_std=True))
    errors = np.abs(np.expm1(got - true))
    # What calibration tolerates on queries that it has seen, 1.3 rtol, and a tenth for others.
    assert errors.mean() <= 0.14
    report = density.report_
    assert report["error"] <= 0.13
    # 1.5 % of queries are off by more than 3 stated errors; a standard deviation of the share
    # among 1000 is 0.4 %.
    assert (np.abs(np.expm1(true - got)) > 3 * std).mean() <= 0.027
    if order == "sorted":
        assert report["shrinkage"] > 0.9 and report["rtol"] == pytest.approx(0.1, rel=0.1)
    else:  # 1 / sqrt(8) for rows that are spread evenly
        assert report["shrinkage"] == pytest.approx(8**-0.5, rel=0.1)
        assert errors.mean() >= 0.02  # the shards are not read as if each were asked for 0.1
    assert len(report["shards"]) == 8
    if algorithm != "auto":
        assert density.algorithm_ in (algorithm, f"brute, {algorithm}")


def test_hbe_states_an_error_where_a_small_shard_needs_few_draws(client):
    X, queries = (np.random.default_rng(i).normal(size=(5000, 2)) for i in range(2))
    density = DaskKernelDensity("angular", n_bits=8, algorithm="hbe", random_state=0, client=client)
    density.fit(blocks(X, (873, 2453, 1080, 594)))
    _, std = compute(client, *density.kernel_mean(blocks(queries, 5000), return_std=True))
    assert np.isfinite(std).all()


def test_unbiased_over_shards(client):
    """The mean of estimates over seeds is the exact mean, and their spread what is stated."""
    X, queries = SHUFFLED[:8000], QUERIES[:20]
    true = exact(X).kernel_mean(queries)
    found = []
    for seed in range(16):
        density = DaskKernelDensity(algorithm="random", rtol=0.3, random_state=seed, client=client)
        density.fit(blocks(X, 2000))
        found.append(compute(client, *density.kernel_mean(blocks(queries, 20), return_std=True)))
    means, errors = np.stack(found, axis=1)
    off = means / true - 1
    error = off.std(axis=0, ddof=1) / np.sqrt(len(off))
    assert (np.abs(off.mean(axis=0)) < 4 * error).all()
    ratio = np.sqrt((errors**2).mean(axis=0)) / means.std(axis=0, ddof=1)
    assert 0.8 < np.median(ratio) < 1.6  # calibrated errors are larger rather than smaller


def test_confidence_bounds_the_error_of_the_total(client):
    true = exact(SHUFFLED).score_samples(QUERIES)
    density = DaskKernelDensity(confidence=0.95, random_state=0, client=client)
    density.fit(blocks(SHUFFLED, 4000))
    got = compute(client, density.score_samples(blocks(QUERIES, 500)))[0]
    # 5 % of 1000 queries with a standard deviation of 0.7 %
    assert (np.abs(np.expm1(got - true)) > 0.1).mean() <= 0.065


def test_atol_makes_sparse_regions_cheap(client):
    X = SHUFFLED
    costs = []
    for atol in (0.0, 1e30):
        density = DaskKernelDensity(
            algorithm="random", atol=atol, random_state=0, normalize=False, client=client
        )
        density.fit(blocks(X, 4000))
        compute(client, density.kernel_mean(blocks(QUERIES, 500)))
        costs.append(density.report_["error"])
    assert costs[1] < 1e-6 < costs[0]  # relative to an error that is enough


def test_partial_fit_and_to_local(client):
    density = DaskKernelDensity(random_state=4, client=client)
    density.fit(blocks(SHUFFLED[:10_000], 2500), sample_weight=blocks(WEIGHTS[:10_000], 2500))
    before = density.report_["n_samples"]
    density.partial_fit(blocks(SHUFFLED[10_000:], 2500))  # weights of 1
    density.set_params(kernel="laplacian")  # what was fitted stays as it was
    assert density.n_shards_ == 7 and before == 10_000 == density.report_["n_samples"] - 6000
    local = density.to_local()
    weights = np.concatenate([WEIGHTS[:10_000], np.ones(6000)])
    np.testing.assert_array_equal(local._kde_rows[0], SHUFFLED)
    np.testing.assert_array_equal(local._kde_weights[0], weights)
    assert local.random_state == 4
    true = exact(SHUFFLED, weights).score_samples(QUERIES)
    got = compute(client, density.score_samples(blocks(QUERIES, 500)))[0]
    assert np.abs(np.expm1(got - true)).mean() <= 0.14
    assert np.abs(np.expm1(local.score_samples(QUERIES) - true)).mean() <= 0.14
    with pytest.raises(ValueError, match="kernel and n_bits must be 'gaussian' and 12"):
        density.partial_fit(blocks(SHUFFLED, 2500))


def test_queries_are_lazy_and_do_not_change_it(client):
    density = DaskKernelDensity(random_state=0, client=client).fit(blocks(SHUFFLED, 4000))

    def bad(block):
        raise RuntimeError("computed")

    queries = blocks(QUERIES, 500).map_blocks(bad, meta=np.zeros((0, D)))
    log = density.score_samples(queries)
    with pytest.raises(RuntimeError, match="computed"):
        compute(client, log)
    first, again = (density.score_samples(blocks(QUERIES, 500)) for _ in range(2))
    np.testing.assert_array_equal(*compute(client, first, again))
    whole = compute(client, density.score_samples(blocks(QUERIES, (0, 1000))))[0]
    np.testing.assert_array_equal(whole, compute(client, first)[0])


def test_results_outlive_the_estimator(client):
    density = DaskKernelDensity(algorithm="brute", client=client).fit(blocks(SHUFFLED[:300], 100))
    wanted = compute(client, density.score_samples(blocks(QUERIES[:20], 10)))[0]
    log = density.score_samples(blocks(QUERIES[:20], 10))
    mean = density.fit(blocks(SORTED[:300], 100)).kernel_mean(blocks(QUERIES[:20], 10)).sum()
    del density
    gc.collect()
    got, _ = compute(client, log, mean)
    np.testing.assert_array_equal(got, wanted)


def test_dataframes(client):
    pd, dd = pytest.importorskip("pandas"), pytest.importorskip("dask.dataframe")
    frame = pd.DataFrame(SHUFFLED[:3000]).rename(columns=str)
    density = DaskKernelDensity(bandwidth="scott", client=client)
    density.fit(dd.from_pandas(frame, npartitions=3))
    local = exact(frame, bandwidth="scott")
    np.testing.assert_array_equal(density.bandwidth_, local.bandwidth_)
    queries = dd.from_pandas(frame[:50], npartitions=2)
    got = compute(client, density.score_samples(queries))[0]
    np.testing.assert_allclose(got, local.score_samples(frame[:50]), rtol=1e-5)
    assert list(density.to_local().feature_names_in_) == list(frame.columns)
    assert density.score(queries) == pytest.approx(got.sum())
    with pytest.raises(ValueError, match="X must have the feature names of the earlier rows"):
        density.partial_fit(queries.rename(columns={"0": "z"}))


def test_warns_where_an_algorithm_does_not_keep_rtol(client):
    density = DaskKernelDensity(
        bandwidth=0.05, algorithm="hbe", rtol=0.01, random_state=0, client=client
    )
    message = "algorithm='hbe' has a mean relative error of"
    with pytest.warns(UserWarning, match=message) as caught:
        density.fit(blocks(SHUFFLED[:4000, :4], 1000))
        density.partial_fit(blocks(SHUFFLED[:1000, :4], 1000)).bandwidth_  # noqa: B018
        density.score_samples(blocks(SHUFFLED[:9, :4], 9))
    assert [x.filename for x in caught if message in str(x.message)] == 2 * [__file__]
    density.set_params(algorithm="auto").fit(blocks(SHUFFLED[:4000, :4], 1000))
    assert density.report_["error"] <= 0.013


def test_an_unknown_error_of_next_to_nothing_is_none():
    """exp(-400) is a number, its square is none."""
    known = Sums(np.zeros(1), np.ones(1), np.ones(1))
    unknown = Sums(np.full(1, -400.0), np.ones(1), np.full(1, np.inf))
    assert shards.combined([known, unknown]).squares == [1.0]


def test_shrinkage():
    n = 1000
    alike = [Sums(np.zeros(n), np.full(n, 2.0), np.zeros(n)) for _ in range(16)]
    total = Sums(np.zeros(n), np.full(n, 32.0), np.zeros(n))
    least = tolerance.least_total(total, -np.inf)
    assert least == pytest.approx(np.log(32))
    assert tolerance.shrinkage(alike, total, -np.inf) == pytest.approx(1 / 4)
    assert tolerance.of_shard(Accuracy(0.1), 1 / 4) == pytest.approx(0.4)
    assert tolerance.of_shard(Accuracy(0.1), 1 / 40) == tolerance.MOST
    apart = [Sums(np.zeros(n), np.where(np.arange(n) % 4 == s, 7.0, 1e-9), 0) for s in range(4)]
    total = Sums(np.zeros(n), np.full(n, 7.0), np.zeros(n))
    assert tolerance.shrinkage(apart, total, -np.inf) == pytest.approx(1)

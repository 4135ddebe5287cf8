"""LSHKernelRegressor: exact, sampled and sketched predictions, and scikit-learn's contract."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cases.kde import KERNELS, clustered
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.multioutput import RegressorChain
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from lshkit.kde import LSHKernelRegressor, value_sums
from lshkit.reference import log_kernel

COMPACT = "tophat", "epanechnikov", "linear", "cosine"
rng = np.random.default_rng(0)
ROWS, QUERIES = rng.normal(size=(700, 4)), rng.normal(size=(30, 4))
VALUES = np.sin(ROWS[:, :2]) + 0.1 * rng.normal(size=(700, 2)) + [5.0, -3.0]
WEIGHTS = rng.uniform(0.1, 1, 700)


def plain(kernel, queries, rows, values, bandwidth=1.0, n_bits=8, weights=None):
    """The weighted mean in float64, `(n_queries, n_outputs)`."""
    logs = log_kernel(kernel, queries, rows, bandwidth, n_bits)
    terms = np.exp(logs - logs.max(axis=1, keepdims=True))
    terms = terms if weights is None else terms * weights
    return terms @ values / terms.sum(axis=1, keepdims=True)


@parametrize_with_checks(
    [
        LSHKernelRegressor(),
        LSHKernelRegressor("epanechnikov", 2.0),
        LSHKernelRegressor(algorithm="random", random_state=0),
        LSHKernelRegressor("laplacian", algorithm="bucket_sum", random_state=0),
    ]
)
def test_scikit_learns_checks(estimator, check):
    check(estimator)


# --- Exact --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n", [200, 700])  # sums in float64, and the core's
def test_exact_is_the_formula(kernel, n):
    bandwidth = 4.0 if kernel in COMPACT else 0.5
    bandwidth = 1.0 if kernel == "angular" else np.array([1.0, 2.0, 0.7, 1.0]) * bandwidth
    rows, values, weights = ROWS[:n], VALUES[:n], WEIGHTS[:n]
    model = LSHKernelRegressor(kernel, bandwidth).fit(rows, values, weights)
    got, std = model.predict(QUERIES, return_std=True)
    wanted = plain(kernel, QUERIES, rows, values, bandwidth, weights=weights)
    assert got.shape == std.shape == (30, 2) and not std.any()
    assert np.abs(got - wanted).max() < (1e-12 if n == 200 else 2e-6)
    one = LSHKernelRegressor(kernel, bandwidth).fit(rows, values[:, 1], weights)
    assert np.abs(one.predict(QUERIES) - wanted[:, 1]).max() < 2e-6


def test_rules_for_the_bandwidth_are_those_of_the_density():
    from lshkit.kde import LSHKernelDensity

    for name in ("scott", "silverman"):
        model = LSHKernelRegressor(bandwidth=name).fit(ROWS, VALUES)
        density = LSHKernelDensity(bandwidth=name, algorithm="brute").fit(ROWS)
        assert np.array_equal(model.bandwidth_, density.bandwidth_)


@pytest.mark.parametrize("kernel", ["gaussian", "exponential", "laplacian"])
@pytest.mark.parametrize("n", [200, 700])
def test_far_queries_take_the_nearest_rows(kernel, n):
    """Where every kernel underflows, even in float64."""
    far = np.array([[1e3, 0, 0, 0], [0, -1e4, 0, 0], [1e5, 1e5, 0, 0]])
    model = LSHKernelRegressor(kernel, 0.2).fit(ROWS[:n], VALUES[:n])
    wanted = plain(kernel, far, ROWS[:n], VALUES[:n], 0.2)
    assert np.abs(model.predict(far) - wanted).max() < 2e-2
    assert np.isfinite(model.predict(1e150 * far)).all()


@pytest.mark.parametrize("kernel", COMPACT)
@pytest.mark.parametrize("n", [200, 700])
def test_where_no_row_is_near_the_mean_is_predicted(kernel, n):
    model = LSHKernelRegressor(kernel, 0.5).fit(ROWS[:n], VALUES[:n], WEIGHTS[:n])
    got, std = model.predict(np.r_[QUERIES + 50, ROWS[:1]], return_std=True)
    mean = np.average(VALUES[:n], axis=0, weights=WEIGHTS[:n])
    assert np.allclose(got[:-1], mean, rtol=0, atol=1e-12) and np.isinf(std[:-1]).all()
    assert not std[-1].any()


def test_gridded_rows_at_the_edge_of_a_kernel_are_outside():
    rows = np.random.default_rng(1).integers(0, 4, size=(200, 3)).astype(float)
    for unit in (1.0, 0.1, 1 / 3):
        model = LSHKernelRegressor("tophat", unit).fit(unit * rows, VALUES[:200])
        same = (rows[:, None] == rows).all(axis=2)
        wanted = same @ VALUES[:200] / same.sum(axis=1, keepdims=True)
        assert np.allclose(model.predict(unit * rows), wanted, rtol=0, atol=1e-12)


def test_targets_of_any_size():
    """A huge target changes predictions near it only, and none overflows."""
    values = VALUES.copy()
    values[0] = 1e15
    far = np.abs(QUERIES - ROWS[0]).max(axis=1) > 2
    model = LSHKernelRegressor("epanechnikov", 1.9)
    wanted = plain("epanechnikov", QUERIES[far], ROWS, VALUES, 1.9)
    assert far.any()
    assert np.abs(model.fit(ROWS, values).predict(QUERIES[far]) - wanted).max() < 2e-6
    for scale in (1e-300, 1e300):
        got = model.fit(ROWS, scale * VALUES).predict(QUERIES[far])
        assert np.allclose(got / scale, wanted, rtol=1e-5)
    constant = model.fit(ROWS, np.full(700, 7.5)).predict(QUERIES)
    assert (constant == 7.5).all()


@pytest.mark.parametrize("share", [0.4, 0.6, 0.98])
@pytest.mark.parametrize("n", [200, 1000])
def test_small_targets_far_from_large_ones_keep_their_digits(n, share):
    """Also where most are large, and their median is."""
    rng = np.random.default_rng(0)
    rows, values = rng.normal(size=(n, 2)), rng.normal(size=n)
    large = np.arange(n) < share * n
    rows[large] += 1000
    values[large] = 1e9 * rng.uniform(1, 2, large.sum())
    got = LSHKernelRegressor(bandwidth=1.0, rtol=0).fit(rows, values).predict(rows[~large])
    kernel = np.exp(log_kernel("gaussian", rows[~large], rows[~large], 1.0))
    wanted = kernel @ values[~large] / kernel.sum(axis=1)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


def test_targets_that_float32_does_not_hold_beside_each_other():
    """Runs of 4,096 rows: also those in which nothing is left of a target."""
    rows, values, queries = problem("normal")
    for huge in (1e30, 1e50, 1e150):
        values[17] = huge, -huge
        for kernel, bandwidth in (("gaussian", 0.8), ("epanechnikov", 2.0)):
            model = LSHKernelRegressor(kernel, bandwidth, algorithm="brute").fit(rows, values)
            wanted = plain(kernel, queries, rows, values, bandwidth)
            assert np.allclose(model.predict(queries), wanted, rtol=2e-5, atol=1e-5)
        model = LSHKernelRegressor(algorithm="random", random_state=0).fit(rows, values)
        got, std = model.predict(queries, return_std=True)
        wanted = plain("gaussian", queries, rows, values)
        exact = std == 0  # of queries that few rows are near
        assert exact.mean() < 0.5 and np.allclose(got[exact], wanted[exact], rtol=2e-5)


def test_outputs_that_are_zero_in_most_rows():
    rows, values, queries = problem("normal")
    values = np.abs(values)
    values[np.arange(len(rows)) % 8000 != 5, 1] = 0
    got = LSHKernelRegressor(bandwidth=0.8, algorithm="brute").fit(rows, values).predict(queries)
    assert np.allclose(got, plain("gaussian", queries, rows, values, 0.8), rtol=2e-5, atol=0)


def test_results_hold_what_targets_do():
    rows, queries = ROWS.astype(np.float32), QUERIES.astype(np.float32)
    wanted = LSHKernelRegressor().fit(rows, VALUES).predict(queries)
    for scale in (1e-200, 1e200):
        got = LSHKernelRegressor().fit(rows, scale * VALUES).predict(queries)
        assert got.dtype == np.float64 and np.allclose(got / scale, wanted)
    with pytest.raises(ValueError, match="y must lie within"), np.errstate(invalid="ignore"):
        LSHKernelRegressor().fit(ROWS, np.where(VALUES > 0, 1.7e308, -1.7e308))


@pytest.mark.parametrize("n", [200, 700])
def test_rows_of_weight_zero_do_not_count(n):
    weights = np.arange(n) % 3
    model = LSHKernelRegressor(bandwidth=0.5).fit(ROWS[:n], VALUES[:n], weights)
    kept = np.repeat(np.arange(n), weights)
    other = LSHKernelRegressor(bandwidth=0.5).fit(ROWS[kept], VALUES[kept])
    assert np.abs(model.predict(QUERIES) - other.predict(QUERIES)).max() < 1e-6


def test_float32_stays():
    rows, values, queries = (x.astype(np.float32) for x in (ROWS, VALUES[:, 0], QUERIES))
    for options in ({}, dict(kernel="angular", algorithm="bucket_sum")):
        model = LSHKernelRegressor(bandwidth=1.0, **options).fit(rows, values)
        got, std = model.predict(queries, return_std=True)
        assert got.dtype == std.dtype == np.float32
        assert model.predict(queries.astype(np.float64)).dtype == np.float64
    narrow = LSHKernelRegressor(bandwidth=0.4).fit(rows, values)
    wanted = plain("gaussian", queries, rows, values[:, None], 0.4)[:, 0]
    assert np.abs(narrow.predict(queries) - wanted).max() < 2e-5


# --- Sampled ------------------------------------------------------------------------------------


def problem(name, n=16384, d=4, n_queries=40):
    """Rows and queries alike, with their values."""
    rng = np.random.default_rng(5)
    if name == "clusters":
        rows, queries = clustered(n, d, 60, n_queries=n_queries)
    else:
        draw = rng.standard_normal if name != "heavy" else lambda size: rng.standard_t(2, size)
        rows, queries = draw(size=(n, d)), draw(size=(n_queries, d))
        if name == "copies":
            rows, queries = (rows[rng.integers(300, size=k)] for k in (n, n_queries))
    values = np.stack([np.sin(2 * rows[:, 0]), rows[:, 1]], axis=1)
    noise = rng.standard_t(2, size=values.shape) if name == "heavy" else rng.normal(size=(n, 2))
    return rows, values + 0.3 * noise, queries


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["normal", "clusters", "copies", "heavy"])
def test_samples_have_the_stated_error(name, weighted):
    """Over seeds: unbiased, the error as large as stated, and at most rtol of the targets'."""
    rows, values, queries = problem(name)
    weights = np.random.default_rng(6).uniform(0.2, 2, len(rows)) if weighted else None
    options = dict(bandwidth=0.8, rtol=0.1)
    exact = LSHKernelRegressor(algorithm="brute", **options).fit(rows, values, weights)
    exact, runs = exact.predict(queries), 24
    got, std = np.empty((2, runs, *exact.shape))
    for seed in range(runs):
        model = LSHKernelRegressor(algorithm="random", random_state=seed, **options)
        got[seed], std[seed] = model.fit(rows, values, weights).predict(queries, return_std=True)
    error = got - exact
    assert not error[std == 0].any()
    sampled = (std > 0).all(axis=(0, 2))
    assert sampled.sum() >= 10
    error, std = error[:, sampled], std[:, sampled]
    # The queries of a run share its sample: means over queries are compared over runs.
    of_runs = (error / values.std(axis=0)).mean(axis=1)
    assert (np.abs(of_runs.mean(axis=0)) < 4 * of_runs.std(axis=0, ddof=1) / np.sqrt(runs)).all()
    assert (np.abs(error) > 3 * std).mean() < 0.015
    observed, stated = (np.sqrt((x**2).mean(axis=(0, 1))) for x in (error, std))
    assert (stated / observed > 0.8).all() and (stated / observed < 1.5).all()
    assert (observed < 0.1 * values.std(axis=0)).all()


def test_a_sample_is_the_formula(monkeypatch):
    """112 outlying rows, 64 of history and 64 of the sample, which stands for 660 others too."""
    monkeypatch.setattr(value_sums, "FIRST", 64)
    monkeypatch.setattr(value_sums, "MIN_EFFECTIVE", 2)
    rows, values, queries = problem("normal", n=900, n_queries=5)
    weights = np.random.default_rng(6).uniform(0.2, 2, 900)
    options = dict(bandwidth=1.5, algorithm="random", rtol=100.0, random_state=0)
    model = LSHKernelRegressor(**options).fit(rows, values, weights)
    got = model.predict(queries, return_std=True)
    order = np.random.default_rng([model._regression_seed, 1]).permutation(900)
    average = np.average(values, axis=0, weights=weights)
    spread = np.sqrt(np.average((values - average) ** 2, axis=0, weights=weights))
    far = weights * np.hypot(1, (np.abs(values - average) / spread).max(axis=1))
    outlying = far >= np.sort(far)[-112]
    order = order[~outlying[order]]
    history, sample = order[:64], order[64:128]
    terms = weights * np.exp(log_kernel("gaussian", queries, rows, 1.5))
    copies = np.zeros(900)
    copies[outlying], copies[history], copies[sample] = 1, 1, 724 / 64
    total = (copies * terms).sum(axis=1, keepdims=True)
    mean = (copies * terms) @ values / total
    residuals = terms[:, sample, None] * (values[sample] - mean[:, None])
    variance = 724**2 * (1 - 64 / 724) * residuals.var(axis=1, ddof=1) / 64
    assert np.allclose(got[0], mean, rtol=0, atol=1e-3)  # distances of samples are float32
    changes, own = (weights[:, None] * (values - average))[order], weights[order]
    met = terms[:, order[:128]]
    met = (met.sum(axis=1) ** 2 / (met**2).sum(axis=1))[:, None]
    deviation = changes.std(axis=0) / np.sqrt((own**2).mean())
    least = np.minimum(deviation / np.sqrt(met), np.ptp(changes, axis=0) / own.mean() / met)
    least *= 1 - terms[:, outlying].sum(axis=1, keepdims=True) / total
    wanted = np.maximum(np.sqrt(variance) / total, least * np.sqrt(1 - 128 / 788))
    assert np.allclose(got[1], wanted, rtol=1e-2)


def test_a_few_rows_that_agree_are_not_believed():
    """29 rows carry the weight; those that a history holds mostly have equal targets."""
    rows, values = np.random.default_rng(0).normal(size=(16384, 4)) + 30, np.zeros(16384)
    rows[:29], values[:3] = 0, 1.0
    exact = LSHKernelRegressor(bandwidth=2.0, algorithm="brute").fit(rows, values)
    for seed in range(4):
        model = LSHKernelRegressor(bandwidth=2.0, algorithm="random", random_state=seed)
        got, std = model.fit(rows, values).predict(np.zeros((1, 4)), return_std=True)
        assert got == exact.predict(np.zeros((1, 4))) and std == 0


def test_a_query_that_needs_all_rows_gets_them():
    rows, values, _ = problem("normal")
    alone = np.array([[8.0, 8.0, 0.0, 0.0]])  # a few rows carry all its weight
    model = LSHKernelRegressor(bandwidth=0.8, algorithm="random", random_state=0)
    got, std = model.fit(rows, values).predict(alone, return_std=True)
    exact = LSHKernelRegressor(bandwidth=0.8, algorithm="brute").fit(rows, values)
    assert np.array_equal(got, exact.predict(alone)) and not std.any()


def test_auto_samples_many_rows_where_that_is_faster():
    rows, values, _ = problem("normal")
    for n, options, wanted in (
        (16384, {}, "brute"),
        (20_000, {}, "random"),
        (20_000, dict(bandwidth=0.1), "brute"),
        (20_000, dict(rtol=0), "brute"),
        (20_000, dict(kernel="tophat"), "brute"),
    ):
        keep = np.arange(n) % len(rows)
        model = LSHKernelRegressor(random_state=0, **options).fit(rows[keep], values[keep])
        assert model.algorithm_ == wanted


# --- Sketches -----------------------------------------------------------------------------------

SKETCHES = {
    "angular": dict(kernel="angular", n_bits=4),
    "laplacian": dict(kernel="laplacian", n_bits=8, bandwidth=3.0),
}


def sketch(name, **options):
    settings = dict(algorithm="bucket_sum", random_state=0, n_hashes=64)
    return LSHKernelRegressor(**settings | SKETCHES[name] | options)


@pytest.mark.parametrize("name", SKETCHES)
def test_sketch_is_the_formula_of_equal_codes(name):
    model = sketch(name, n_hashes=8).fit(ROWS, VALUES, WEIGHTS)
    inner = model._regression_sketch
    equal = inner.codes(QUERIES)[:, None] == inner.codes(ROWS)  # of each hash
    chance = 0 if name == "angular" else 2.0**-8
    terms = (equal - chance).mean(axis=2) * WEIGHTS
    wanted = terms @ VALUES / terms.sum(axis=1, keepdims=True)
    got, std = model.predict(QUERIES, return_std=True)
    near = np.isfinite(std[:, 0])
    assert near.sum() > 20
    wanted = np.clip(wanted, VALUES.min(axis=0), VALUES.max(axis=0))
    assert np.allclose(got[near], wanted[near], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", SKETCHES)
@pytest.mark.parametrize("data", ["normal", "clusters", "copies", "heavy"])
def test_sketches_have_the_stated_error(name, data):
    rows, values, queries = problem(data, n=2000, n_queries=20)
    options = SKETCHES[name]
    bandwidth, n_bits = options.get("bandwidth", 1.0), options["n_bits"]
    exact = plain(options["kernel"], queries, rows, values, bandwidth, n_bits)
    runs = 40
    got, std = np.empty((2, runs, *exact.shape))
    for seed in range(runs):
        model = sketch(name, random_state=seed, n_hashes=128).fit(rows, values)
        got[seed], std[seed] = model.predict(queries, return_std=True)
    known = np.isfinite(std).all(axis=(0, 2))
    error, std = (got - exact)[:, known], std[:, known]
    assert known.sum() >= 8
    # A ratio is biased by about its variance: small beside the error of a run.
    of_runs = (error / values.std(axis=0)).mean(axis=1)
    assert (np.abs(of_runs.mean(axis=0)) < 4 * of_runs.std(axis=0, ddof=1) / np.sqrt(runs)).all()
    ratio = np.sqrt((std**2).mean(axis=(0, 1)) / (error**2).mean(axis=(0, 1)))
    assert (ratio > 0.7).all() and (ratio < 1.6).all()


@pytest.mark.parametrize("name", SKETCHES)
def test_streamed_parts_are_the_whole_in_constant_memory(name):
    whole = sketch(name).fit(ROWS, VALUES, WEIGHTS)
    stream, sizes = sketch(name), set()
    for part in np.array_split(np.arange(700), 7):
        stream.partial_fit(ROWS[part], VALUES[part], WEIGHTS[part])
        sizes.add(len(pickle.dumps(stream)) // 1000)
    assert len(sizes) == 1 and stream.n_samples_seen_ == 700
    for a, b in zip(*(x.predict(QUERIES, return_std=True) for x in (whole, stream)), strict=True):
        known = np.isfinite(a)
        assert np.allclose(a[known], b[known], rtol=0, atol=1e-9)


def test_sketch_predicts_the_mean_where_it_finds_noise():
    model = sketch("laplacian", bandwidth=0.5).fit(ROWS, VALUES)
    got, std = model.predict(QUERIES + 100, return_std=True)
    nowhere = np.isinf(std[:, 0])
    assert nowhere.mean() > 0.8
    assert np.allclose(got[nowhere], VALUES.mean(axis=0))
    assert (got >= VALUES.min(axis=0)).all() and (got <= VALUES.max(axis=0)).all()
    one = sketch("angular", n_hashes=1).fit(ROWS, VALUES).predict(QUERIES, return_std=True)[1]
    assert np.isinf(one).all()


def test_hashes_that_agree_are_not_exact():
    """Of rows so far apart that a query meets one or none, or whose targets are mostly equal."""
    rng = np.random.default_rng(0)
    rows, queries = rng.normal(size=(50, 32)), rng.normal(size=(200, 32))
    targets = rng.normal(size=50)
    for values, n_bits in ((targets, 12), (targets > 1, 8)):
        exact = plain("angular", queries, rows, values[:, None].astype(float), 1.0, n_bits)[:, 0]
        model = sketch("angular", n_bits=n_bits, n_hashes=32).fit(rows, values.astype(float))
        got, std = model.predict(queries, return_std=True)
        known = np.isfinite(std)
        assert known.sum() > 90 and (std > 0).all()
        ratio = np.sqrt(((got - exact)[known] ** 2).mean() / (std[known] ** 2).mean())
        assert 0.7 < ratio < 1.6


@pytest.mark.parametrize("name", SKETCHES)
@pytest.mark.parametrize(("of_values", "of_weights"), [(200, 0), (-200, 0), (0, 160), (0, -200)])
def test_units_of_targets_and_weights_do_not_matter(name, of_values, of_weights):
    wanted = sketch(name).fit(ROWS, VALUES, WEIGHTS).predict(QUERIES, return_std=True)
    model = sketch(name).fit(ROWS, VALUES * 10.0**of_values, WEIGHTS * 10.0**of_weights)
    for a, b in zip(model.predict(QUERIES, return_std=True), wanted, strict=True):
        assert np.allclose(a / 10.0**of_values, b, rtol=1e-9)


# --- The contract -------------------------------------------------------------------------------


def test_sketches_refuse_rows_beyond_float64_in_bandwidths():
    model = LSHKernelRegressor("laplacian", 1e-300, algorithm="bucket_sum")
    message = r"X must lie within 1.8e\+308 bandwidths of 0 .*in row 0, feature 0"
    with pytest.raises(ValueError, match=message):
        model.fit(1e10 + ROWS, VALUES)
    model.fit(ROWS, VALUES)
    with pytest.raises(ValueError, match=message):
        model.predict(1e10 + QUERIES)


VARIANTS = {
    "brute": dict(algorithm="brute", bandwidth="scott"),
    "random": dict(algorithm="random", bandwidth=0.8),
    "laplacian": dict(kernel="laplacian", algorithm="bucket_sum"),
    "angular": dict(kernel="angular", n_bits=4, algorithm="bucket_sum"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_same_seed_same_bits(name):
    """At any number of threads, batch size and batch of queries, from threads and from a pickle."""
    rows, values, queries = problem("normal")
    model = LSHKernelRegressor(random_state=3, **VARIANTS[name]).fit(rows, values)
    wanted = model.predict(queries, return_std=True)
    for other in (
        clone(model).set_params(n_jobs=2).fit(rows, values),
        clone(model).set_params(batch_size=7).fit(rows, values),
        pickle.loads(pickle.dumps(model)),
        clone(model).partial_fit(rows[:5000], values[:5000]).fit(rows, values),
    ):
        for a, b in zip(wanted, other.predict(queries, return_std=True), strict=True):
            assert np.array_equal(a, b)
    state = pickle.dumps(vars(model))
    fresh = pickle.loads(pickle.dumps(model))
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(lambda i: fresh.predict(queries[i : i + 10]), range(0, 40, 10))
        assert np.array_equal(np.concatenate(list(parts)), wanted[0])
    assert pickle.dumps(vars(model)) == state
    assert model.extra_memory_ > 0 and model.algorithm_ == VARIANTS[name]["algorithm"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n", [5, 255, 256])
def test_few_rows_have_the_same_bits_at_any_batch_size(kernel, n):
    bandwidth = 1.0 if kernel == "angular" else 3.0
    queries = np.random.default_rng(1).normal(size=(1030, 4))
    for values in (VALUES[:n, 0], VALUES[:n], np.tile(VALUES[:n], 5)):
        model = LSHKernelRegressor(kernel, bandwidth).fit(ROWS[:n], values, WEIGHTS[:n])
        wanted = model.predict(queries)
        for size in (1, 2, 7):
            some = queries[:: 1 if size > 1 else 8]
            got = clone(model).set_params(batch_size=size)
            got = got.fit(ROWS[:n], values, WEIGHTS[:n]).predict(some)
            assert np.array_equal(got, wanted[:: 1 if size > 1 else 8])


def test_parts_of_kept_rows_are_the_whole():
    whole = LSHKernelRegressor(bandwidth="scott").fit(ROWS, VALUES, WEIGHTS)
    stream, buffer = LSHKernelRegressor(bandwidth="scott"), np.empty((100, 4))
    for i in range(0, 700, 100):
        buffer[:] = ROWS[i : i + 100]
        stream.partial_fit(buffer, VALUES[i : i + 100], WEIGHTS[i : i + 100])
        stream.predict(QUERIES)
    assert np.array_equal(stream.predict(QUERIES), whole.predict(QUERIES))
    assert np.array_equal(stream.bandwidth_, whole.bandwidth_)


@pytest.mark.parametrize("options", [{}, dict(kernel="angular", algorithm="bucket_sum")])
def test_a_later_part_may_have_no_weight(options):
    model = LSHKernelRegressor(random_state=0, **options)
    with pytest.raises(ValueError, match="sample_weight must not be all zero"):
        model.partial_fit(ROWS, VALUES, 0 * WEIGHTS)
    wanted = model.partial_fit(ROWS, VALUES, WEIGHTS).predict(QUERIES)
    model.partial_fit(QUERIES, VALUES[:30], np.zeros(30))
    assert np.array_equal(model.predict(QUERIES), wanted)


def test_parameters_that_are_set_wait_for_the_next_fit():
    rows, values, queries = problem("normal", n=20_000)
    model = LSHKernelRegressor(random_state=0).fit(rows, values)
    wanted = model.predict(queries)
    model.set_params(kernel="laplacian", bandwidth=3.0, algorithm="brute", rtol=0.5, n_jobs=2)
    older = pickle.loads(pickle.dumps(model))
    older._regression_fitted = tuple(older._regression_fitted)  # as pickles once had it
    for same in (model, pickle.loads(pickle.dumps(model)), older):
        assert np.array_equal(same.predict(queries), wanted) and same.algorithm_ == "random"
    assert not np.array_equal(model.partial_fit(rows[:9], values[:9]).predict(queries), wanted)
    assert model.bandwidth_ == 3.0


def test_parameters_that_a_sketch_cannot_follow_are_refused():
    model = sketch("angular").fit(ROWS, VALUES)
    with pytest.raises(ValueError, match="kernel must be 'angular', as for the earlier rows"):
        model.set_params(kernel="laplacian").partial_fit(ROWS, VALUES)


def test_a_rule_sees_all_rows_of_a_stream():
    """Parts may be too few for it, but for the first of a sketch."""
    stream = LSHKernelRegressor(bandwidth="scott")
    stream.partial_fit(ROWS[:1], VALUES[:1])
    with pytest.raises(ValueError, match="at least 2 rows"):
        stream.predict(QUERIES)
    stream.partial_fit(ROWS[1:600], VALUES[1:600])
    for i in range(600, 700):
        stream.partial_fit(ROWS[i : i + 1], VALUES[i : i + 1])
    whole = LSHKernelRegressor(bandwidth="scott").fit(ROWS, VALUES)
    assert np.array_equal(stream.predict(QUERIES), whole.predict(QUERIES))
    sketched = LSHKernelRegressor("laplacian", "scott", algorithm="bucket_sum")
    with pytest.raises(ValueError, match="at least 2 rows"):
        sketched.partial_fit(ROWS[:1], VALUES[:1])


@pytest.mark.parametrize("options", [{}, dict(kernel="laplacian", algorithm="bucket_sum")])
def test_a_rule_depends_on_ratios_of_weights_alone(options):
    model = LSHKernelRegressor(bandwidth="scott", random_state=0, **options)
    wanted = clone(model).fit(ROWS, VALUES).bandwidth_
    assert np.allclose(model.fit(ROWS, VALUES, np.full(700, 1e308)).bandwidth_, wanted, rtol=1e-12)


@pytest.mark.parametrize("options", [{}, dict(kernel="angular", algorithm="bucket_sum")])
def test_tensors_are_rows_targets_weights_and_queries(options):
    torch = pytest.importorskip("torch")
    model = LSHKernelRegressor(random_state=0, **options)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        tensors = [torch.tensor(x).to(dtype) for x in (ROWS, VALUES, WEIGHTS, QUERIES)]
        arrays = [(x if x.itemsize > 2 else x.float()).numpy() for x in tensors]
        wanted = model.fit(*arrays[:3]).predict(arrays[3])
        tensors = [x.requires_grad_() for x in tensors]
        got = clone(model).partial_fit(*tensors[:3]).predict(tensors[3])
        assert got.dtype == wanted.dtype and np.array_equal(got, wanted)
    with pytest.raises(TypeError, match="y must hold real numbers"):
        model.fit(ROWS, torch.tensor(VALUES).to(torch.complex64))
    with pytest.raises(ValueError, match="X must be on the cpu"):
        model.fit(torch.zeros(5, 2, device="meta"), VALUES[:5])


def test_pipeline_grid_search_and_chain():
    target = VALUES[:, 0]
    pipeline = make_pipeline(StandardScaler(), LSHKernelRegressor())
    grid = {"lshkernelregressor__bandwidth": [0.01, 0.4, 50.0]}
    search = GridSearchCV(pipeline, grid, cv=3).fit(ROWS, target)
    assert search.best_params_ == {"lshkernelregressor__bandwidth": 0.4}
    assert search.best_score_ > 0.8
    chain = RegressorChain(LSHKernelRegressor(bandwidth=0.4)).fit(ROWS, VALUES)
    assert chain.predict(QUERIES).shape == (30, 2)


def test_shapes_of_targets():
    for values, shape in ((VALUES[:, 0], (30,)), (VALUES[:, :1], (30, 1)), (VALUES, (30, 2))):
        model = LSHKernelRegressor(bandwidth=0.5).fit(ROWS, values)
        assert [x.shape for x in model.predict(QUERIES, return_std=True)] == [shape, shape]
    assert np.array_equal(
        LSHKernelRegressor(bandwidth=0.5).fit(ROWS, VALUES[:, 0] > 5).predict(QUERIES),
        LSHKernelRegressor(bandwidth=0.5).fit(ROWS, 1.0 * (VALUES[:, 0] > 5)).predict(QUERIES),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kernel="box"), "kernel"),
        (dict(kernel=None), "kernel"),
        (dict(algorithm="near_far"), "algorithm"),
        (dict(algorithm=None), "algorithm"),
        (dict(kernel="tophat", algorithm="random"), "kernel must be one of"),
        (dict(kernel="gaussian", algorithm="bucket_sum"), "kernel must be one of"),
        (dict(rtol=-1), "rtol"),
        (dict(rtol=np.nan), "rtol"),
        (dict(rtol=0, algorithm="random"), "rtol"),
        (dict(bandwidth=0.0), "bandwidth"),
        (dict(bandwidth="isj"), "scott"),
        (dict(bandwidth=[1.0, 2.0]), "4 features"),
        (dict(kernel="angular", bandwidth=2.0), "n_bits"),
        (dict(kernel="angular", n_bits=0), "n_bits"),
        (dict(kernel="angular", n_bits=17, algorithm="bucket_sum"), "n_bits"),
        (dict(n_hashes=0), "n_hashes"),
        (dict(n_jobs=0), "n_jobs"),
        (dict(batch_size=0), "batch_size"),
    ],
)
def test_bad_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        LSHKernelRegressor(**options).fit(ROWS, VALUES)


def test_bad_calls():
    model = LSHKernelRegressor()
    with pytest.raises(NotFittedError):
        model.predict(QUERIES)
    for weights, message in (
        (-WEIGHTS, ">= 0"),
        (0 * WEIGHTS, "zero"),
        (WEIGHTS[:5], "shape"),
        (WEIGHTS * np.nan, "NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(ROWS, VALUES, weights)
    for values in (VALUES[:9], VALUES * np.nan, VALUES + np.inf, VALUES[:0]):
        with pytest.raises(ValueError):
            model.fit(ROWS, values)
    with pytest.raises(ValueError):
        model.fit(ROWS * np.nan, VALUES)
    with pytest.raises(NotFittedError):
        model.predict(QUERIES)
    model.fit(ROWS, VALUES)
    with pytest.raises(ValueError, match="features"):
        model.predict(QUERIES[:, :2])
    with pytest.raises(ValueError, match=r"y must have shape \(700, 2\)"):
        model.partial_fit(ROWS, VALUES[:, 0])
    with pytest.raises(ValueError, match="algorithm must not be 'bucket_sum'"):
        sketched = dict(kernel="angular", algorithm="bucket_sum")
        clone(model).fit(ROWS, VALUES).set_params(**sketched).partial_fit(ROWS, VALUES)
    with pytest.raises(ValueError, match="algorithm must be 'bucket_sum'"):
        sketch("angular").fit(ROWS, VALUES).set_params(algorithm="auto").partial_fit(ROWS, VALUES)
    for rows, message in ((ROWS[:1], "2 rows"), (ROWS * [1, 0, 1, 1], "feature 1")):
        with pytest.raises(ValueError, match=message):
            LSHKernelRegressor(bandwidth="scott").fit(rows, VALUES[: len(rows)])
    with pytest.raises(TypeError, match="n_hashes"):
        LSHKernelRegressor(n_hashes=1.5).fit(ROWS, VALUES)
    with pytest.raises(ValueError, match="zeros"):
        LSHKernelRegressor("angular").fit(0 * ROWS, VALUES)
    with pytest.raises(ValueError, match="zeros"):
        LSHKernelRegressor("angular").fit(ROWS, VALUES).predict(0 * QUERIES)


@pytest.mark.parametrize(
    ("first", "later"),
    [((1, 1), (1, 1e155)), ((1, 1e-300), (1, 1e9)), ((1, 1), (1e200, 1))],
    ids=["weights", "tiny weights", "targets"],
)
def test_a_sketch_refuses_rows_of_another_scale(first, later):
    X, y = np.random.default_rng(0).standard_normal((2, 40, 3))
    y = y[:, 0]
    model = LSHKernelRegressor("laplacian", 4.0, algorithm="bucket_sum", random_state=0)
    model.fit(X, first[0] * y, np.full(40, first[1]))
    before = model.predict(X)
    with pytest.raises(ValueError, match="must be less than 2.* times as large as in the first ro"):
        model.partial_fit(X, later[0] * y, np.full(40, float(later[1])))
    np.testing.assert_array_equal(model.predict(X), before)


@pytest.mark.parametrize("n_positive", [4, 20, 80])
def test_samples_that_miss_a_rare_class_state_an_error(n_positive):
    """What none of m rows is may be 3 / m of all with a probability of 5 %: one sample in twenty
    may be off by three errors, in all queries at once."""
    rng = np.random.default_rng(0)
    rows, queries, values = rng.normal(size=(20_000, 4)), rng.normal(size=(50, 4)), np.zeros(20_000)
    values[rng.choice(20_000, n_positive, replace=False)] = 1
    wanted = LSHKernelRegressor(bandwidth=1.2, algorithm="brute").fit(rows, values).predict(queries)
    ratios = []
    for seed in range(20):
        model = LSHKernelRegressor(bandwidth=1.2, algorithm="random", random_state=seed)
        means, errors = model.fit(rows, values).predict(queries, return_std=True)
        assert (np.abs(means - wanted) <= 1e-9)[errors == 0].all()
        ratios.append(np.abs(means - wanted)[errors > 0] / errors[errors > 0])
    assert (np.concatenate(ratios) > 3).mean() <= 0.05


@pytest.mark.parametrize("n_heavy, weight", [(1, 1e5), (6, 1e4), (60, 100), (600, 100)])
def test_samples_that_miss_the_heaviest_rows_state_an_error(n_heavy, weight):
    rng = np.random.default_rng(0)
    rows, queries = rng.normal(size=(20_000, 4)), rng.normal(size=(50, 4)) / 2
    values, weights = np.sin(2 * rows[:, 0]) + rng.normal(size=20_000), np.ones(20_000)
    weights[rng.choice(20_000, n_heavy, replace=False)] = weight
    exact = LSHKernelRegressor(bandwidth=1.2, algorithm="brute").fit(rows, values, weights)
    wanted, beyond, stated, observed = exact.predict(queries), [], [], []
    for seed in range(6):
        model = LSHKernelRegressor(bandwidth=1.2, algorithm="random", random_state=seed)
        means, errors = model.fit(rows, values, weights).predict(queries, return_std=True)
        beyond.append(np.abs(means - wanted) > 3 * errors + 1e-9)
        stated.append(errors)
        observed.append(means - wanted)
    assert np.mean(beyond) <= 0.02
    stated, observed = (np.sqrt(np.mean(np.square(x))) for x in (stated, observed))
    assert 0.8 < stated / observed < 1.7

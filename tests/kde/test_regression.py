"""LSHKernelRegressor: exact predictions, and what all methods keep to."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cases.kde import KERNELS
from cases.regression import QUERIES, ROWS, VALUES, WEIGHTS, plain, problem, sketch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.multioutput import RegressorChain
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from lshkit.kde import LSHKernelDensity, LSHKernelRegressor, LSHOutlierDetector
from lshkit.reference import log_kernel

COMPACT = "tophat", "epanechnikov", "linear", "cosine"
VARIANTS = {
    "brute": dict(algorithm="brute", bandwidth="scott"),
    "random": dict(algorithm="random", bandwidth=0.8),
    "laplacian": dict(kernel="laplacian", algorithm="bucket_sum"),
    "angular": dict(kernel="angular", n_bits=4, algorithm="bucket_sum"),
}


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


@pytest.mark.parametrize("n", [100, 200, 300])
def test_rows_end_at_a_bandwidth_per_feature_as_densities_do(n):
    rows = 0.1 * np.random.default_rng(2).integers(0, 10, size=(n, 3))
    widths = np.array([0.3, 0.5, 0.4])
    inside = np.sqrt((((rows[:, None] - rows) / widths) ** 2).sum(axis=2)) < 1
    wanted = inside @ VALUES[:n] / inside.sum(axis=1, keepdims=True)
    model = LSHKernelRegressor("tophat", widths).fit(rows, VALUES[:n])
    assert np.abs(model.predict(rows) - wanted).max() < 1e-6
    assert np.isfinite(model.predict(1e160 * rows)).all()  # whose squares overflow


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
    # Beside an output of a usual size too: float32 does not hold it.
    tiny = np.stack([ROWS[:, 0], np.full(700, 1e-60)], 1)
    predicted = model.fit(ROWS.astype(np.float32), tiny).predict(QUERIES.astype(np.float32))
    assert (predicted[:, 1] == 1e-60).all()


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


@pytest.mark.parametrize("model", [LSHKernelRegressor(), LSHKernelDensity(), LSHOutlierDetector()])
def test_a_failed_fit_leaves_what_was_fitted(model):
    model = clone(model).fit(ROWS, VALUES[:, 0])
    query = model.predict if isinstance(model, LSHKernelRegressor) else model.score_samples
    wanted, before = query(QUERIES), vars(model).copy()
    with pytest.raises(ValueError, match="NaN"):
        model.fit(np.where(ROWS > 3, np.nan, ROWS), VALUES[:, 0])
    with pytest.raises(ValueError, match="at least 2|minimum of 1|2 rows"):
        model.fit(ROWS[:1] if isinstance(model, LSHOutlierDetector) else ROWS[:0], VALUES[:0, 0])
    assert np.array_equal(query(QUERIES), wanted) and vars(model).keys() == before.keys()


@pytest.mark.parametrize("algorithm", ["brute", "random", "bucket_sum"])
def test_rows_of_weight_zero_may_have_any_target(algorithm):
    weights = (np.arange(700) % 2).astype(float)
    values = np.where(weights == 0, 1e300, VALUES[:, 0])
    model = LSHKernelRegressor("laplacian", 4.0, algorithm=algorithm, random_state=0)
    wanted = clone(model).fit(ROWS[1::2], VALUES[1::2, 0]).predict(QUERIES)
    got = model.fit(ROWS, values, weights).predict(QUERIES)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


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
    with pytest.raises(TypeError, match="sample_weight must hold real numbers, got dtype complex"):
        model.fit(ROWS, VALUES, 1j * WEIGHTS)
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
    with pytest.raises(TypeError, match="return_std must be a bool, got 'yes'"):
        model.predict(QUERIES, return_std="yes")
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

"""LSHKernelRegressor(algorithm="bucket_sum"): predictions and stated errors of sketches."""

import pickle

import numpy as np
import pytest
from cases.regression import QUERIES, ROWS, SKETCHES, VALUES, WEIGHTS, plain, problem, sketch
from threadpoolctl import threadpool_limits

from lshkit.kde import LSHKernelDensity, LSHKernelRegressor


@pytest.mark.parametrize("n", [20, 700])
@pytest.mark.parametrize("name", SKETCHES)
def test_sketch_is_the_formula_of_equal_codes(name, n):
    rows, values, weights = ROWS[:n], VALUES[:n], WEIGHTS[:n]
    model = sketch(name, n_hashes=8).fit(rows, values, weights)
    inner = model._regression_sketch
    equal = inner.codes(QUERIES)[:, None] == inner.codes(rows)  # of each hash
    chance = 0 if name == "angular" else 2.0**-8
    each = (equal - chance).swapaxes(1, 2) * weights  # queries, hashes, rows

    def ratio(terms):
        return terms @ values / terms.sum(axis=-1, keepdims=True)

    wanted = ratio(each.sum(axis=1))
    without = ratio(each.sum(axis=1, keepdims=True) - each)  # a hash
    jackknife = np.sqrt(7 / 8 * ((without - wanted[:, None]) ** 2).sum(axis=1))
    met = each.sum(axis=(1, 2)) * weights.sum() / (weights**2).sum()
    mean = weights @ values / weights.sum()
    spread = np.sqrt(weights @ (values - mean) ** 2 / weights.sum())
    got, std = model.predict(QUERIES, return_std=True)
    near = np.isfinite(std[:, 0])
    assert near.sum() > 5
    clipped = np.clip(wanted, values.min(axis=0), values.max(axis=0))
    assert np.allclose(got[near], clipped[near], rtol=0, atol=1e-9)
    of_met = spread / np.sqrt(met[:, None])
    # The buckets' sums of A - m B, as shares of the weight, and those without a query's own.
    buckets, codes, rest, squares, own = 2**inner.n_bits, inner.codes(rows), 0, 0, 0
    for h in range(8):
        shares = np.zeros((buckets, 3))
        np.add.at(shares, codes[:, h], np.c_[np.ones(n), values] * weights[:, None] / weights.sum())
        of_bucket = shares[:, 1:] - wanted[:, None] * shares[:, :1]  # queries, buckets, outputs
        at = inner.codes(QUERIES)[:, h].astype(int)
        of_bucket[np.arange(len(at)), at] = 0
        rest, squares = rest + of_bucket.sum(1) / 8, squares + (of_bucket**2).sum(1) / 8
        own = own + shares[at, :1] / 8
    odds = 1 / (buckets - 1)
    cells = np.sqrt(np.maximum(squares - odds * rest**2, 0))
    unmet = odds * np.maximum(np.abs(rest), cells) / own
    of_others = np.minimum(unmet, np.sqrt(odds / 8) * cells / ((own - chance) / (1 - chance)))
    parts = np.stack([jackknife, of_met, of_others])[:, near]
    greatest = set(np.unique(parts.argmax(axis=0)))
    assert greatest == {0} | ({1} if n == 20 else set()) | ({2} if name == "angular" else set())
    assert np.allclose(std[near], parts.max(axis=0), rtol=1e-7)


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


def laplacian_errors(rows, values, queries, bandwidth, seeds, least_known, **options):
    """Errors and stated ones of the queries near which sketches of each seed find rows."""
    exact = LSHKernelRegressor("laplacian", bandwidth, rtol=0).fit(rows, values).predict(queries)
    found = []
    for seed in range(seeds):
        options |= {"algorithm": "bucket_sum", "random_state": seed}
        model = LSHKernelRegressor("laplacian", bandwidth, **options).fit(rows, values)
        mean, std = model.predict(queries, return_std=True)
        known = np.isfinite(std)
        assert known.mean() > least_known
        found.append([np.abs(mean - exact)[known], std[known]])
    errors, stated = np.concatenate(found, axis=1)
    return errors, stated, np.sqrt((stated**2).mean() / (errors**2).mean())


@pytest.mark.parametrize("n_hashes", [32, 256])
def test_errors_hold_beside_a_heavy_row(n_hashes):
    """In few hashes is it folded to a query's bucket, while its share of all is subtracted."""
    rng = np.random.default_rng(0)
    places = rng.normal(size=(1000, 5))
    shares = np.r_[0.4, np.full(999, 0.6 / 999)]
    rows, queries = places[rng.choice(1000, 20_000, p=shares)], places[1:400]
    values = np.sin(3 * rows[:, 0]) + 0.3 * rng.normal(size=20_000)
    sizes = {"n_bits": 12, "n_hashes": n_hashes}
    errors, stated, ratio = laplacian_errors(rows, values, queries, 0.05, 4, 0.9, **sizes)
    assert (errors > 3 * stated).mean() < 0.015
    assert 0.7 < ratio < 2


@pytest.mark.parametrize(("n_bits", "n_hashes"), [(12, 32), (16, 32)])
def test_errors_hold_beside_many_repeated_rows(n_bits, n_hashes):
    """What is subtracted for each is little, and nearly always no hash has met most of them."""
    rng = np.random.default_rng(0)
    n = 60 if n_bits == 12 else 250
    rows = np.r_[np.repeat(100 * rng.normal(size=(n, 5)) + 10, 30, axis=0), np.zeros((100, 5))]
    rows[-100:] = -200 - 100 * np.abs(rng.normal(size=(100, 5)))
    values = np.r_[1 + rng.normal(size=30 * n), rng.normal(size=100)]
    sizes = {"n_bits": n_bits, "n_hashes": n_hashes}
    errors, stated, ratio = laplacian_errors(rows, values, rows[-100:], 1.0, 8, 0.3, **sizes)
    assert (errors > 3 * stated).mean() < 0.02
    assert 0.8 < ratio < 1.6


@pytest.mark.parametrize("n_hashes", [8, 32, 128])
@pytest.mark.parametrize("kinds", [60, 8])
def test_errors_hold_for_rows_of_few_kinds(kinds, n_hashes):
    """One-hot rows, of which no hash may have met the kind with other targets."""
    shares = np.arange(1, 61) ** -1.1 if kinds == 60 else 0.5 ** np.arange(1, 9)
    errors, stated = [], []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        kind = rng.choice(kinds, 4200, p=shares / shares.sum())
        rows, values = np.eye(kinds)[kind], (kind == 0) + 0.3 * rng.normal(size=4200)
        exact = LSHKernelRegressor("angular", n_bits=8, rtol=0).fit(rows[200:], values[200:])
        model = sketch("angular", random_state=seed, n_bits=8, n_hashes=n_hashes)
        mean, std = model.fit(rows[200:], values[200:]).predict(rows[:200], return_std=True)
        errors.append(np.abs(mean - exact.predict(rows[:200])))
        stated.append(std)
    errors, stated = np.array(errors), np.array(stated)
    assert (errors > 3 * stated).mean() < 0.005
    assert 0.8 < np.sqrt((stated**2).mean() / (errors**2).mean()) < 1.6


@pytest.mark.parametrize(("n_bits", "n_hashes"), [(8, 256), (10, 128)])
def test_rows_that_share_buckets_leave_no_more(n_bits, n_hashes):
    rng = np.random.default_rng(0)
    rows, queries = rng.normal(size=(40_000, 4)), 0.5 * rng.normal(size=(100, 4))
    values = np.sin(rows[:, 0]) + 3 + 0.3 * rng.normal(size=40_000)
    sizes = {"n_bits": n_bits, "n_hashes": n_hashes}
    *_, ratio = laplacian_errors(rows, values, queries, 0.2, 1, 0.9, **sizes)
    assert 0.7 < ratio < 1.5


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
        assert 0.6 < ratio < 1.2  # what is stated is the greatest of three such errors


@pytest.mark.parametrize("name", SKETCHES)
def test_no_error_leaves_the_range_of_the_targets(name):
    """Nor could it be larger: a mean and its estimate lie between the least and the largest."""
    rng = np.random.default_rng(0)
    rows, queries = rng.normal(size=(2, 300, 8))
    targets, weights = rng.integers(-1, 2, size=300).astype(float), np.exp(3 * rng.normal(size=300))
    mean, std = sketch(name, n_hashes=2).fit(rows, targets, weights).predict(queries, True)
    known = np.isfinite(std)
    assert known.sum() > 30
    farther = np.maximum(mean + 1, 1 - mean)[known]
    assert (std[known] <= farther + 1e-12).all() and (std[known] > farther - 1e-12).any()
    # Estimates that leave the range, and are clipped to it.
    rows = np.r_[100 * rng.normal(size=(200, 3)), rng.normal(size=(3, 3))]
    targets, queries = np.r_[-np.ones(200), np.ones(3)], rng.normal(size=(50, 3))
    for seed in range(20):
        model = LSHKernelRegressor(
            "laplacian", 1.0, algorithm="bucket_sum", n_bits=4, n_hashes=4, random_state=seed
        )
        mean, std = model.fit(rows, targets).predict(queries, return_std=True)
        known = np.isfinite(std)
        assert (std[known] <= np.maximum(mean + 1, 1 - mean)[known] + 1e-12).all()


@pytest.mark.parametrize("name", SKETCHES)
@pytest.mark.parametrize(("of_values", "of_weights"), [(200, 0), (-200, 0), (0, 160), (0, -200)])
def test_units_of_targets_and_weights_do_not_matter(name, of_values, of_weights):
    wanted = sketch(name).fit(ROWS, VALUES, WEIGHTS).predict(QUERIES, return_std=True)
    model = sketch(name).fit(ROWS, VALUES * 10.0**of_values, WEIGHTS * 10.0**of_weights)
    for a, b in zip(model.predict(QUERIES, return_std=True), wanted, strict=True):
        assert np.allclose(a / 10.0**of_values, b, rtol=1e-9)


@pytest.mark.parametrize("make", [LSHKernelDensity, LSHKernelRegressor])
def test_errors_do_not_depend_on_the_threads_of_matrix_products(make):
    rng = np.random.default_rng(0)
    rows, weights = rng.normal(size=(20_000, 6)), rng.uniform(0.1, 1, size=20_000)
    options = dict(algorithm="bucket_sum", n_bits=16, random_state=0)
    results = []
    for threads in (1, 2):
        with threadpool_limits(threads):
            if make is LSHKernelRegressor:
                model = make("laplacian", 0.3, **options).fit(rows, rows[:, 0], weights)
                results.append(model.predict(rows[:200], return_std=True))
            else:
                model = make("laplacian", 0.3, **options).fit(rows, sample_weight=weights)
                results.append(model.kernel_mean(rows[:200], return_std=True))
    assert np.array_equal(*results)


def test_sketches_refuse_rows_beyond_float64_in_bandwidths():
    model = LSHKernelRegressor("laplacian", 1e-300, algorithm="bucket_sum")
    message = r"X must lie within 1.8e\+308 bandwidths of 0 .*in row 0, feature 0"
    with pytest.raises(ValueError, match=message):
        model.fit(1e10 + ROWS, VALUES)
    model.fit(ROWS, VALUES)
    with pytest.raises(ValueError, match=message):
        model.predict(1e10 + QUERIES)


def test_parameters_that_a_sketch_cannot_follow_are_refused():
    model = sketch("angular").fit(ROWS, VALUES)
    with pytest.raises(ValueError, match="kernel must be 'angular', as for the earlier rows"):
        model.set_params(kernel="laplacian").partial_fit(ROWS, VALUES)


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

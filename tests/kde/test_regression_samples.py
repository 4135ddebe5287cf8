"""LSHKernelRegressor(algorithm="random"): predictions and stated errors of samples."""

import numpy as np
import pytest
from cases.regression import plain, problem

from lshkit.kde import LSHKernelRegressor, sampled_means
from lshkit.reference import log_kernel


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


@pytest.mark.parametrize(("n", "n_strata"), [(900, 1), (6000, 3)])
def test_a_sample_is_the_formula(monkeypatch, n, n_strata):
    """Outlying rows and history as they are; of each stratum, a sample stands for the others."""
    monkeypatch.setattr(sampled_means, "FIRST", 64)
    monkeypatch.setattr(sampled_means, "MIN_EFFECTIVE", 2)
    rng = np.random.default_rng(6)
    rows, values, queries = problem("normal", n=n, n_queries=5)
    weights = rng.uniform(0.2, 2, n)
    if n_strata > 1:
        weights = np.exp(1.5 * rng.normal(size=n))
    options = dict(bandwidth=1.5, algorithm="random", rtol=100.0, random_state=0)
    model = LSHKernelRegressor(**options).fit(rows, values, weights)
    got = model.predict(queries, return_std=True)

    order = np.random.default_rng([model._regression_seed, 1]).permutation(n)
    average = np.average(values, axis=0, weights=weights)
    spread = np.sqrt(np.average((values - average) ** 2, axis=0, weights=weights))
    sizes = weights * np.hypot(1, (np.abs(values - average) / spread).max(axis=1))
    outlying, strata, first = sampled_means._strata(sizes, order)
    assert len(strata) == n_strata and len(outlying) >= min(512, n // 8)
    history = [x[: round(k)] for x, k in zip(strata, first, strict=True)]
    sample = [x[round(k) : round(2 * k)] for x, k in zip(strata, first, strict=True)]
    copies = np.zeros(n)
    copies[outlying] = 1
    for rest, old, new in zip(strata, history, sample, strict=True):
        copies[old], copies[new] = 1, (len(rest) - len(old)) / len(new)
    terms = weights * np.exp(log_kernel("gaussian", queries, rows, 1.5))
    total = (copies * terms).sum(axis=1, keepdims=True)
    mean = (copies * terms) @ values / total
    assert np.allclose(got[0], mean, rtol=0, atol=1e-3)  # distances of samples are float32

    variance = 0
    for new in sample:
        residuals = terms[:, new, None] * (values[new] - mean[:, None])
        c = copies[new[0]]
        variance += len(new) * c * (c - 1) * residuals.var(axis=1, ddof=1)
    met = total_of_squares = squares = own = counted = 0
    changes, rest = [], np.concatenate(strata)
    average = np.average(values[rest], axis=0, weights=weights[rest])
    for part, old, new in zip(strata, history, sample, strict=True):
        read = terms[:, np.concatenate([old, new])]
        c = len(part) / read.shape[1]
        met = met + c * read.sum(axis=1)
        total_of_squares = total_of_squares + c**2 * (read**2).sum(axis=1)
        change = weights[part, None] * (values[part] - average)
        squares = squares + (c - 1) * (change**2).sum(axis=0)
        own += c * (weights[part] ** 2).sum()
        changes.append(np.sqrt(c * (c - 1)) * change)
        counted += len(part) / c
    met = (met**2 / total_of_squares)[:, None]
    span = np.ptp(np.concatenate(changes), axis=0) / (weights[rest].sum() / counted)
    least = np.minimum(np.sqrt(squares / own) / np.sqrt(met), span / met)
    least = least * (1 - terms[:, outlying].sum(axis=1, keepdims=True) / total)
    assert np.allclose(got[1], np.maximum(np.sqrt(variance) / total, least), rtol=1e-2)


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


@pytest.mark.parametrize("n_positive", [4, 20, 80, 600, 1000])
def test_samples_that_miss_a_rare_class_state_an_error(n_positive):
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
    assert (np.concatenate(ratios) > 3).mean() <= 0.02


@pytest.mark.parametrize("n_heavy, weight", [(1, 1e5), (6, 1e4), (60, 100), (550, 300), (600, 100)])
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


def problem_of_classes(name):
    """20,000 rows with rare values of another kind, in one output or in several."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(20_000, 4))
    if name == "a class that depends on the rows":
        return rows, (rows[:, 0] + rng.normal(size=20_000) > 2.33).astype(float)[:, None]
    values = rng.normal(size=(20_000, 10)) if name == "outliers" else np.zeros((20_000, 10))
    for j in range(10):
        values[rng.choice(20_000, 100, replace=False), j] += 100
    return rows, values


@pytest.mark.parametrize("name", ["a class that depends on the rows", "outliers", "one of ten"])
def test_samples_of_rare_values_state_an_error(name):
    rows, values = problem_of_classes(name)
    queries = np.random.default_rng(1).normal(size=(50, 4))
    wanted = LSHKernelRegressor(bandwidth=1.2, rtol=0).fit(rows, values).predict(queries)
    ratios = []
    for seed in range(12):
        model = LSHKernelRegressor(bandwidth=1.2, algorithm="random", random_state=seed)
        means, errors = model.fit(rows, values).predict(queries, return_std=True)
        sampled = errors > 0
        ratios.append(((means.reshape(errors.shape) - wanted) / errors)[sampled])
    ratios = np.concatenate([x.ravel() for x in ratios])
    assert len(ratios) > 300 and (np.abs(ratios) > 3).mean() <= 0.01
    assert 0.6 < np.sqrt((ratios**2).mean()) < 1.2


@pytest.mark.parametrize("deviation", [0.0, 0.5, 2.0, 6.0])
def test_strata_are_sampled_by_size(deviation):
    """No row counts for much more than another: sizes over rates differ by the ratio, but for the
    smallest rows."""
    rng = np.random.default_rng(0)
    sizes, order = np.exp(deviation * rng.normal(size=20_000)), rng.permutation(20_000)
    outlying, strata, first = sampled_means._strata(sizes, order)
    assert np.array_equal(np.sort(np.concatenate([outlying, *strata])), np.arange(20_000))
    assert 512 <= len(outlying) <= 512 + 2 * 2048
    assert sizes[outlying].max() >= max(sizes[rows].max() for rows in strata)
    assert first.sum() == pytest.approx(2048, rel=0.05)
    counted = [sizes[rows] * len(rows) / n for rows, n in zip(strata, first, strict=True)]
    most = max(x.max() for x in counted)
    larger = zip(counted[1:], first[1:], strict=True)  # 32 rows are the least of a sample
    assert all(x.min() > 0.24 * most for x, n in larger if n > 32)
    for rows in strata:
        assert np.array_equal(rows, order[np.isin(order, rows)])


@pytest.mark.parametrize("weight", [1e18, 1e24, 1e30])
@pytest.mark.parametrize("n_heavy", [1, 10_000])
def test_errors_of_samples_beside_far_heavier_rows(weight, n_heavy):
    """Squares of the light rows' weights, over the largest, are less than float32 holds."""
    rng = np.random.default_rng(0)
    rows, queries = rng.normal(size=(20_000, 2)), rng.normal(size=(50, 2))
    rows[:n_heavy, 0] += 20
    values, weights = rows[:, 1] + rng.normal(size=20_000), np.ones(20_000)
    weights[:n_heavy] = weight
    model = LSHKernelRegressor(bandwidth=1.0, algorithm="random", random_state=0)
    means, errors = model.fit(rows, values, weights).predict(queries, return_std=True)
    wanted = plain("gaussian", queries, rows, values[:, None], weights=weights)[:, 0]
    assert (np.abs(means - wanted) > 3 * errors + 1e-6).mean() <= 0.02

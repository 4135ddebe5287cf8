"""The rule bandwidth="likelihood", in densities, pipelines, streams and files."""

import warnings

import numpy as np
import pytest
from cases.kde import rows_of
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lshkit.kde import LSHKernelDensity, kernels, likelihood_curve

DENSITIES = "gaussian", "exponential", "laplacian", *kernels.COMPACT


@pytest.mark.parametrize("kernel", DENSITIES)
def test_rule_is_the_maximum_of_the_curve(kernel):
    X = rows_of(200, 3, dtype=np.float32)
    density = LSHKernelDensity(kernel, "likelihood", algorithm="brute").fit(X)
    candidates = [likelihood_curve(X, kernel=kernel, scale=s) for s in (None, "std")]
    best = max(candidates, key=lambda c: c.best_log_likelihood)
    others = min(candidates, key=lambda c: c.best_log_likelihood)
    close = best.best_log_likelihood - others.best_log_likelihood < 0.05
    assert np.allclose(density.bandwidth_, best.bandwidth, rtol=1e-3) or (
        close and np.allclose(density.bandwidth_, others.bandwidth, rtol=1e-3)
    )


def test_rule_scales_features_where_that_is_likelier():
    X = rows_of(400, 3)
    scaled = LSHKernelDensity(bandwidth="likelihood").fit(X * [0.01, 1, 1000])
    ratios = scaled.bandwidth_ / X.std(axis=0) / [0.01, 1, 1000]
    assert np.allclose(ratios, ratios[0], rtol=0.01)
    # Features whose means differ more between clusters than others' do, and vary as much within.
    means = np.random.default_rng(0).normal(size=(20, 3)) * [1, 10, 100]
    clusters = means[np.arange(400) % 20] + 0.3 * X
    assert np.ndim(LSHKernelDensity(bandwidth="likelihood").fit(clusters).bandwidth_) == 0
    # A feature that never varies has no standard deviation to multiply.
    assert np.ndim(LSHKernelDensity(bandwidth="likelihood").fit(X * [1, 1, 0]).bandwidth_) == 0


@pytest.mark.parametrize(("n", "factor"), [(600, 30), (600, 1e3), (600, 1e5), (3000, 1e3)])
def test_rule_takes_the_likelier_scaling_where_one_row_is_far_off(n, factor):
    X = rows_of(n, 30)
    X[0] *= factor
    curves = [likelihood_curve(X, scale=s, random_state=0) for s in (None, "std")]
    plain, scaled = (c.best_log_likelihood for c in curves)
    assert scaled > plain + 0.5
    found = LSHKernelDensity(bandwidth="likelihood", random_state=0).fit(X).bandwidth_
    # Far rows are sampled by both scalings' distances in the rule, by one's in a curve.
    assert np.allclose(found, curves[1].bandwidth, rtol=1e-4 if n < 2048 else 0.01)


@pytest.mark.parametrize("d", [2, 32, 512])
def test_rule_predicts_other_rows_better_than_scotts(d):
    rng = np.random.default_rng(d)
    means = 1.5 * rng.normal(size=(20, d))
    X = means[rng.integers(20, size=1500)] + rng.normal(size=(1500, d))
    rows, others = X[:1000], X[1000:]
    scores = {
        rule: LSHKernelDensity(bandwidth=rule, rtol=0).fit(rows).score_samples(others)
        for rule in ("scott", "silverman", "likelihood")
    }
    for rule in ("scott", "silverman"):
        gain = scores["likelihood"] - scores[rule]
        error = gain.std() / np.sqrt(500)
        # In 2 dimensions as good, in 32 and 512 better: by 1.3 and 30 nats.
        assert gain.mean() > (4 if d > 2 else -4) * error


def test_rule_in_pipelines_grid_searches_and_set_params():
    X = rows_of(300, 4)
    pipeline = make_pipeline(StandardScaler(), LSHKernelDensity(algorithm="brute"))
    pipeline.set_params(lshkerneldensity__bandwidth="likelihood").fit(X)
    assert 0.4 < pipeline[-1].bandwidth_.mean() if np.ndim(pipeline[-1].bandwidth_) else True
    grid = {"bandwidth": ["scott", "likelihood", 1e-3]}
    search = GridSearchCV(LSHKernelDensity(algorithm="brute"), grid, cv=3).fit(X)
    assert search.best_params_["bandwidth"] in ("scott", "likelihood")
    curve = likelihood_curve(X)
    scores = GridSearchCV(
        LSHKernelDensity(algorithm="brute"), {"bandwidth": curve.best * np.geomspace(0.3, 3, 9)}
    ).fit(X)
    assert 0.7 < scores.best_params_["bandwidth"] / curve.best < 1.4  # a step of that grid


def test_rule_with_stored_rows_sees_all_of_them():
    X, weights = rows_of(500, 3), np.random.default_rng(2).uniform(size=500)
    options = dict(bandwidth="likelihood", random_state=0)
    whole = LSHKernelDensity(**options).fit(X, sample_weight=weights)
    parts = LSHKernelDensity(**options)
    for part in (slice(0, 100), slice(100, 500)):
        parts.partial_fit(X[part], sample_weight=weights[part])
    assert np.array_equal(parts.bandwidth_, whole.bandwidth_)
    merged = LSHKernelDensity(**options).fit(X[:100], sample_weight=weights[:100])
    merged.merge(LSHKernelDensity(**options).fit(X[100:], sample_weight=weights[100:]))
    assert np.array_equal(merged.bandwidth_, whole.bandwidth_)


@pytest.mark.parametrize("rule", ["scott", "silverman", "likelihood", "neighbors"])
def test_rules_wait_for_rows_to_come(rule):
    X = rows_of(40, 2)
    density = LSHKernelDensity(bandwidth=rule, random_state=0).partial_fit(X[:1])
    for ask in (lambda: density.bandwidth_, lambda: density.score_samples(X)):
        with pytest.raises(ValueError, match=f"bandwidth='{rule}' needs at least 2 rows"):
            ask()
    whole = LSHKernelDensity(bandwidth=rule, random_state=0).fit(X)
    assert np.array_equal(density.partial_fit(X[1:]).bandwidth_, whole.bandwidth_)
    sketch = LSHKernelDensity("laplacian", rule, algorithm="bucket_sum")
    for refused in (sketch.partial_fit, LSHKernelDensity(bandwidth=rule).fit):
        with pytest.raises(ValueError, match=f"bandwidth='{rule}' needs at least 2 rows"):
            refused(X[:1])
        assert not [name for name in vars(refused.__self__) if name.startswith("_kde")]
    assert sketch.partial_fit(X).n_samples_seen_ == 40


def test_rule_of_a_sketch_takes_its_first_rows(tmp_path):
    X = rows_of(400, 3)
    options = dict(kernel="laplacian", bandwidth="likelihood", random_state=0)
    first = LSHKernelDensity(**options).fit(X[:100]).bandwidth_
    sketch = LSHKernelDensity(**options, algorithm="bucket_sum").partial_fit(X[:100])
    assert np.array_equal(sketch.partial_fit(X[100:]).bandwidth_, first)
    sketch.save(tmp_path / "sketch.npz")
    assert np.array_equal(LSHKernelDensity.load(tmp_path / "sketch.npz").bandwidth_, first)


def test_rule_is_saved_with_its_bandwidth(tmp_path, monkeypatch):
    density = LSHKernelDensity(bandwidth="likelihood", random_state=0).fit(rows_of(300, 3))
    density.save(tmp_path / "density.npz")
    loaded = LSHKernelDensity.load(tmp_path / "density.npz")
    assert loaded.bandwidth == "likelihood"
    assert np.array_equal(loaded.bandwidth_, density.bandwidth_)
    more = [x.partial_fit(5 + rows_of(200, 3, 1)) for x in (density, loaded)]
    assert np.array_equal(more[0].bandwidth_, more[1].bandwidth_)


def test_rule_gives_the_same_bits_at_any_number_of_threads():
    X = rows_of(3000, 4)
    found = [
        LSHKernelDensity(bandwidth="likelihood", random_state=1, n_jobs=n).fit(X).bandwidth_
        for n in (1, 2)
    ]
    assert np.array_equal(*found)


def test_rule_that_cannot_be_leaves_nothing_behind():
    density = LSHKernelDensity(bandwidth="likelihood")
    for rows, weights in ((np.ones((5, 2)), None), (np.eye(2), [1, 0]), (np.ones((1, 2)), None)):
        with pytest.raises(ValueError, match="at least 2 rows that differ"):
            density.fit(rows, sample_weight=weights)
        assert not hasattr(density, "n_samples_seen_")
    with pytest.raises(ValueError, match="n_bits is its width"):
        LSHKernelDensity("angular", "likelihood").fit(np.eye(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert density.fit(np.array([[0.0], [1.0]])).bandwidth_ > 0

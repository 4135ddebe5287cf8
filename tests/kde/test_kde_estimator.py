"""LSHKernelDensity as a scikit-learn estimator: contract, files, bad input."""

import io

import numpy as np
import pytest
from cases.kde import reloaded
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from lshkit.kde import LSHKernelDensity

rng = np.random.default_rng(0)
ROWS, QUERIES = rng.normal(size=(1500, 4)), rng.normal(size=(20, 4))
WEIGHTS = rng.uniform(0.1, 1, 1500)


@parametrize_with_checks(
    [
        LSHKernelDensity(),
        LSHKernelDensity(bandwidth="likelihood", random_state=0),
        LSHKernelDensity("laplacian", algorithm="bucket_sum", random_state=0),
    ]
)
def test_scikit_learns_checks(estimator, check):
    check(estimator)


def test_pipeline_and_grid_search():
    pipeline = make_pipeline(StandardScaler(), LSHKernelDensity(algorithm="brute"))
    grid = {"lshkerneldensity__bandwidth": [0.05, 0.5, 20.0]}
    search = GridSearchCV(pipeline, grid, cv=3).fit(ROWS[:300])
    assert search.best_params_ == {"lshkerneldensity__bandwidth": 0.5}


VARIANTS = {
    "brute": dict(algorithm="brute", bandwidth=[0.5, 1.0, 2.0, 0.7]),
    "rule": dict(bandwidth="scott", algorithm="brute"),
    "random": dict(algorithm="random", random_state=3),
    "near_far": dict(algorithm="near_far", random_state=3),
    "angular": dict(kernel="angular", n_bits=5, algorithm="bucket_sum", random_state=1),
    "laplacian": dict(
        kernel="laplacian", algorithm="bucket_sum", random_state=1, sliding_window=900
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("way", ["file", "pickle"])
def test_saved_and_loaded(name, way, tmp_path):
    density = LSHKernelDensity(**VARIANTS[name]).fit(ROWS, sample_weight=WEIGHTS)
    loaded = reloaded(density, way, tmp_path)
    assert np.array_equal(loaded.kernel_mean(QUERIES), density.kernel_mean(QUERIES))
    for one, other in zip(loaded.get_params().values(), density.get_params().values(), strict=True):
        assert np.array_equal(one, other)
    more = [x.partial_fit(ROWS[:700] + 1, sample_weight=WEIGHTS[:700]) for x in (density, loaded)]
    assert np.array_equal(*(x.kernel_mean(QUERIES) for x in more))
    assert loaded.algorithm_ == density.algorithm_
    assert loaded.n_features_in_ == 4


def test_merged_rows_have_the_same_feature_names():
    density, other = (LSHKernelDensity().fit(ROWS[:20]) for _ in range(2))
    density.feature_names_in_ = np.array(["a", "b", "c", "d"], object)
    assert density.merge(other).n_samples_seen_ == 40  # whose features have no names
    other.feature_names_in_ = np.array(["b", "a", "c", "d"], object)
    with pytest.raises(ValueError, match="feature names"):
        density.merge(other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kernel="box"), "kernel"),
        (dict(kernel=["gaussian"]), "kernel"),
        (dict(n_jobs=0), "n_jobs"),
        (dict(n_jobs=1.5), "n_jobs"),
        (dict(n_jobs=2**31), "n_jobs"),
        (dict(algorithm="kd_tree"), "algorithm"),
        (dict(algorithm=np.array(["auto", "brute"])), "algorithm"),
        (dict(rtol=-1), "rtol"),
        (dict(rtol=np.nan), "rtol"),
        (dict(rtol=0, algorithm="random"), "rtol"),
        (dict(kernel="tophat", algorithm="random"), "tophat"),
        (dict(bandwidth=0.0), "bandwidth"),
        (dict(bandwidth=-1), "bandwidth"),
        (dict(bandwidth=np.inf), "bandwidth"),
        (dict(bandwidth=1e-310), "bandwidth"),
        (dict(bandwidth=[1.0, 2.0]), "4 features"),
        (dict(bandwidth=[1.0, 2.0, 0.0, 1.0]), "bandwidth"),
        (dict(bandwidth="isj"), "scott"),
        (dict(kernel="angular", bandwidth=2.0), "n_bits"),
        (dict(kernel="angular", n_bits=0), "n_bits"),
        (dict(kernel="angular", n_bits=20, algorithm="bucket_sum"), "n_bits"),
        (dict(n_hashes=0), "n_hashes"),
        (dict(batch_size=0), "batch_size"),
    ],
)
def test_bad_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        LSHKernelDensity(**options).fit(ROWS)


def test_bad_calls():
    density = LSHKernelDensity(algorithm="brute")
    for call in (
        lambda: density.score_samples(QUERIES),
        lambda: density.kernel_mean(QUERIES),
        lambda: density.sample(),
        lambda: density.merge(density),
        lambda: density.save(io.BytesIO()),
    ):
        with pytest.raises(NotFittedError):
            call()
    for weights, message in (
        (-WEIGHTS, ">= 0"),
        (0 * WEIGHTS, "zero"),
        (WEIGHTS[:5], "shape"),
        (WEIGHTS * np.nan, "NaN"),
        (WEIGHTS[:, None], "sample_weight must have shape"),
        (2.0, "sample_weight must have shape"),
        (WEIGHTS[:0], "sample_weight must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            density.fit(ROWS, sample_weight=weights)
    for rows in (ROWS * np.nan, ROWS + np.inf, ROWS[0], ROWS[:0]):
        with pytest.raises(ValueError):
            density.fit(rows)
    density.fit(ROWS)
    for query in (density.score_samples, density.kernel_mean):
        assert len(query(QUERIES, return_std=np.True_)) == 2
        with pytest.raises(TypeError, match="return_std must be a bool, got 1"):
            query(QUERIES, return_std=1)
    with pytest.raises(ValueError, match="features"):
        density.score_samples(QUERIES[:, :2])
    with pytest.raises(ValueError, match="features"):
        density.partial_fit(ROWS[:, :2])
    with pytest.raises(TypeError, match="LSHKernelDensity"):
        density.merge(1)
    with pytest.raises(ValueError, match="bandwidth"):
        density.merge(LSHKernelDensity(bandwidth=2.0).fit(ROWS))
    with pytest.raises(ValueError, match="kernel"):
        density.merge(LSHKernelDensity("laplacian").fit(ROWS))
    with pytest.raises(ValueError, match="zeros"):
        LSHKernelDensity("angular").fit(np.zeros((3, 2)))
    for algorithm in ("brute", "random", "bucket_sum"):
        angular = LSHKernelDensity("angular", algorithm=algorithm).fit(ROWS)
        with pytest.raises(ValueError, match="zeros"):
            angular.kernel_mean(0 * QUERIES)
    with pytest.raises(ValueError, match="vary"):
        LSHKernelDensity(bandwidth="scott").fit(np.ones((30, 2)))
    assert clone(density).get_params() == density.get_params()


def test_fit_forgets_what_was_before():
    density = LSHKernelDensity(algorithm="brute").fit(ROWS)
    density.fit(ROWS[:, :2])
    assert density.n_features_in_ == 2 and density.n_samples_seen_ == 1500


@pytest.mark.parametrize("algorithm", ["brute", "random"])
def test_rows_are_copied(algorithm):
    buffer, weights = ROWS.copy(), WEIGHTS.copy()
    density = LSHKernelDensity(algorithm=algorithm, random_state=0)
    density.partial_fit(buffer, sample_weight=weights)
    buffer[:], weights[:] = 100, 1
    wanted = LSHKernelDensity(algorithm=algorithm, random_state=0).fit(ROWS, sample_weight=WEIGHTS)
    assert np.array_equal(density.score_samples(QUERIES), wanted.score_samples(QUERIES))

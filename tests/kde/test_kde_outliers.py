"""LSHOutlierDetector: scikit-learn's contract, fitted and other rows, streams, files, PyOD."""

import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cases.archives import changed
from cases.kde import reloaded
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer
from sklearn.exceptions import NotFittedError
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from lshkit.kde import LSHKernelDensity, LSHOutlierDetector, known_rows, outliers
from lshkit.kde.fitted_rows import log_means_of_rows

rng = np.random.default_rng(0)
ROWS = np.r_[rng.normal(size=(1470, 5)), 4 * rng.normal(size=(30, 5))]
TRUTH = np.arange(1500) >= 1470
OTHERS = rng.normal(size=(40, 5))


def sketched(**options):
    return LSHKernelDensity("laplacian", 3.0, algorithm="bucket_sum", random_state=0, **options)


DENSITIES = {
    "default": None,
    "near_far": LSHKernelDensity(bandwidth=0.7, algorithm="near_far"),
    "random": LSHKernelDensity("exponential", 0.7, algorithm="random"),
    "tophat": LSHKernelDensity("tophat", "neighbors"),
    "angular": LSHKernelDensity("angular", n_bits=6),
    "sketch": sketched(n_hashes=64),
    "window": sketched(sliding_window=400),
    "half_life": sketched(half_life=300.0),
}


def detector_of(name, **options):
    return LSHOutlierDetector(DENSITIES[name], random_state=3, **options)


@parametrize_with_checks([LSHOutlierDetector(), LSHOutlierDetector(sketched())])
def test_scikit_learns_checks(estimator, check):
    check(estimator)


# --- Fitted rows and others ---------------------------------------------------------------------


def test_fitted_rows_are_scored_by_the_others():
    X = ROWS[-300:]
    detector = LSHOutlierDetector(LSHKernelDensity(bandwidth=0.8)).fit(X)
    for i in (0, 299):
        rest = LSHKernelDensity(bandwidth=0.8, normalize=False).fit(np.delete(X, i, axis=0))
        assert detector.score_samples(X[[i]]) == pytest.approx(rest.score_samples(X[[i]]), rel=1e-5)
    whole = LSHKernelDensity(bandwidth=0.8, normalize=False).fit(X)
    assert np.array_equal(detector.score_samples(OTHERS), whole.score_samples(OTHERS))


@pytest.mark.parametrize("name", DENSITIES)
def test_fit_predict_is_fit_and_predict(name):
    X = ROWS if name != "window" else ROWS[-400:]
    labels = detector_of(name).fit_predict(X)
    assert np.array_equal(labels, detector_of(name).fit(X).predict(X))
    assert np.array_equal(np.unique(labels), [-1, 1]) and labels.dtype.kind == "i"


def test_fitted_rows_are_found_in_any_order_and_type():
    X = np.round(ROWS[:600], 1).astype(np.float32)  # some are equal
    X[:5] = 0.0
    X[0] = -0.0
    detector = LSHOutlierDetector().fit(X)
    scores = detector.score_samples(X)
    order = rng.permutation(600)
    assert np.array_equal(detector.score_samples(X[order].astype(np.float64)), scores[order])
    assert len(set(scores[:5])) == 1
    assert np.abs(detector.score_samples(X + np.float32(1e-4)) - scores).min() > 1e-5


def test_rows_with_the_same_hash_keep_their_scores(monkeypatch):
    want = LSHOutlierDetector().fit(ROWS[-50:])._prepare()[1]
    monkeypatch.setattr(known_rows, "hashes_of_rows", lambda X: np.zeros(len(X), np.uint64))
    assert np.array_equal(LSHOutlierDetector().fit(ROWS[-50:])._prepare()[1], want)


def test_new_rows_are_no_more_outliers_than_fitted_ones():
    """In 30 dimensions, at a small bandwidth, a row's own kernel outweighs all others."""
    X, new = rng.normal(size=(600, 30)), rng.normal(size=(600, 30))
    density = LSHKernelDensity(bandwidth=1.0)
    detector = LSHOutlierDetector(density, contamination=0.1).fit(X)
    share = (detector.predict(new) < 0).mean()
    assert abs(share - 0.1) < 4 * np.sqrt(2 * 0.09 / 600)
    naive = clone(density).fit(X)
    level = np.percentile(naive.score_samples(X), 10)
    assert (naive.score_samples(new) < level).mean() == 1  # what leaving out avoids


def test_sampled_scores_find_what_exact_ones_do():
    X = np.r_[rng.normal(size=(6000, 8)), 1.8 * rng.normal(size=(100, 8))]
    truth = np.arange(6100) >= 6000
    areas = []
    for algorithm in ("brute", "random", "near_far"):
        density = LSHKernelDensity(bandwidth="neighbors", algorithm=algorithm, rtol=0.05)
        detector = LSHOutlierDetector(density, random_state=0).fit(X)
        areas.append(roc_auc_score(truth, -detector.score_samples(X)))
    assert areas[0] > 0.8 and np.ptp(areas) < 0.01


def test_works_on_data_in_its_own_units():
    X, y = load_breast_cancer(return_X_y=True)
    X = np.c_[X, np.full(len(X), 7.0)]  # and a constant feature
    kept = np.r_[np.flatnonzero(y == 1), np.flatnonzero(y == 0)[:36]]
    areas = [
        roc_auc_score(y[kept] == 0, -LSHOutlierDetector().fit(x).score_samples(x))
        for x in (X[kept], X[kept] * np.geomspace(1e-6, 1e6, 31))
    ]
    assert areas[0] > 0.85 and areas[1] == pytest.approx(areas[0], abs=1e-3)


# --- Threshold ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "near_far", "sketch"])
@pytest.mark.parametrize("contamination", [0.02, 0.5])
def test_share_of_outliers(name, contamination):
    detector = detector_of(name, contamination=contamination).fit(ROWS)
    labels = detector.predict(ROWS)
    assert (labels < 0).mean() == pytest.approx(contamination, abs=0.01)
    assert np.array_equal(detector.decision_function(ROWS) < 0, labels < 0)
    assert (labels[TRUTH] < 0).mean() > 0.6


def test_auto_is_the_box_plots_rule():
    detector = LSHOutlierDetector().fit(ROWS)
    low, high = np.percentile(detector.score_samples(ROWS), (25, 75))
    assert detector.offset_ == low - 1.5 * (high - low)


def test_rows_without_density_are_outliers_with_finite_scores():
    X = np.r_[rng.uniform(size=(300, 2)), 50 + 10 * np.arange(40)[:, None] * np.ones((40, 2))]
    detector = LSHOutlierDetector(LSHKernelDensity("tophat", 0.3), contamination=0.05).fit(X)
    assert np.array_equal(detector.predict(X) < 0, np.arange(340) >= 300)
    assert np.isfinite(detector.score_samples(X)).all()
    alone = LSHOutlierDetector(LSHKernelDensity("tophat", 1.0)).fit(np.eye(4) * 100)
    assert (alone.predict(np.eye(4) * 100) < 0).all()


def test_far_rows_have_scores_of_their_own():
    X = np.r_[rng.normal(size=(100, 2)), [[1e20, 0], [1e30, 0], [1e60, 0]]]
    detector = LSHOutlierDetector(LSHKernelDensity(bandwidth=1.0, algorithm="brute")).fit(X)
    for scores in (detector.score_samples(X), detector.score_samples(2 * X)):
        np.testing.assert_allclose(scores[-3:], [-5e39, -5e59, -5e119])


def test_equal_rows_are_inliers():
    for n in (2, 300):
        detector = LSHOutlierDetector().fit(np.ones((n, 3)))
        assert (detector.predict(np.ones((2, 3))) == 1).all()
        assert detector.predict([[1.0, 1.0, 9.0]]) == -1


@pytest.mark.parametrize(
    "contamination", [0, 0.0, -0.1, 0.51, 1, np.nan, "automatic", True, None, [0.1]]
)
def test_contamination_out_of_range(contamination):
    for call in ("fit", "fit_predict", "partial_fit"):
        with pytest.raises(ValueError, match=r"contamination must be 'auto' or a number in \(0, 0"):
            getattr(LSHOutlierDetector(contamination=contamination), call)(ROWS)


def test_bad_calls():
    detector = LSHOutlierDetector()
    for call in (detector.predict, detector.score_samples, detector.decision_function):
        with pytest.raises(NotFittedError):
            call(ROWS)
    with pytest.raises(NotFittedError):
        detector.save(io.BytesIO())
    with pytest.raises(TypeError, match="density must be an LSHKernelDensity, got StandardScaler"):
        LSHOutlierDetector(StandardScaler()).fit(ROWS)
    for rows in (ROWS * np.nan, ROWS + np.inf, ROWS[0], ROWS[:0], ROWS[:1]):
        with pytest.raises(ValueError):
            detector.fit(rows)
    with pytest.raises(ValueError, match="2 rows, got n_samples = 1"):
        LSHOutlierDetector(LSHKernelDensity()).fit(ROWS[:1])
    detector.fit(ROWS)
    for call in (detector.predict, detector.partial_fit):
        with pytest.raises(ValueError, match="features"):
            call(ROWS[:, :2])


# --- Streams, threads, files --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["near_far", "sketch", "window", "half_life"])
def test_parts_give_the_same_as_all_at_once(name):
    whole, parts = detector_of(name).fit(ROWS), detector_of(name)
    for part in np.array_split(ROWS, 3):
        parts.partial_fit(part)
    assert np.array_equal(parts.score_samples(OTHERS), whole.score_samples(OTHERS))
    assert parts.offset_ == whole.offset_


def test_a_half_life_leaves_a_row_out_by_its_weight():
    weights = 2.0 ** (-np.arange(len(ROWS))[::-1] / 300)
    density = LSHKernelDensity("laplacian", 3.0, algorithm="bucket_sum", n_hashes=2000)
    density.set_params(half_life=300.0, random_state=0)
    scores = LSHOutlierDetector(density).fit(ROWS).score_samples(ROWS)
    exact = LSHKernelDensity("laplacian", 3.0, algorithm="brute").fit(ROWS, None, weights)
    want = log_means_of_rows(exact._method, 1)
    dense = want > np.quantile(want, 0.3)
    assert np.abs(np.expm1(scores - want)[dense]).mean() < 0.1


def test_a_window_of_blocks_leaves_a_row_out_by_its_weight():
    """Rows of the oldest block count partly: two outliers there are neighbors of each other."""
    X = 0.1 * rng.normal(size=(3000, 24)) + 6 * np.eye(24)[0]
    X[450:452] = -6 * np.eye(24)[0] + 1e-3 * rng.normal(size=(2, 24))  # of age 2,549 and 2,548
    scores = []
    for error in (0.0, 0.2):
        density = LSHKernelDensity("angular", algorithm="bucket_sum", n_bits=6, n_hashes=128)
        density.set_params(sliding_window=2600, sliding_window_error=error, random_state=0)
        detector = LSHOutlierDetector(density).fit(X)
        scores.append(detector.score_samples(X[450:452]))
        assert np.array_equal(detector._scores_of_fitted(X)[450:452], scores[-1])
    forgetting = density.set_params(normalize=False).fit(X)._kde_sketch.forgetting
    assert forgetting.name == "blocked_window" and 0 < forgetting.inside < 1
    exact, blocked = scores
    assert np.allclose(blocked, exact + np.log(forgetting.inside), atol=0.01)


@pytest.mark.parametrize(
    "options", [{"sliding_window": 300}, {"sliding_window_error": 0.3}, {"half_life": 100.0}]
)
def test_weights_of_rows_in_a_sketch(options):
    """What a row counts is what the table would lack without it."""
    if "sliding_window_error" in options:
        options = options | {"sliding_window": 1000}
    X = np.eye(40)[np.arange(1203) % 40] * (1 + np.arange(1203) % 7)[:, None]
    sketch = sketched(n_hashes=4, n_bits=16, **options).fit(X)._kde_sketch
    weights = sketch.weights_of(np.arange(len(X))[::-1])
    assert weights.sum() == pytest.approx(sketch.total)
    assert (np.diff(weights) >= 0).all() and weights[0] < weights[-1]


def test_rows_of_a_window_that_are_forgotten_again():
    density = sketched(sliding_window=400)
    detector = LSHOutlierDetector(density, random_state=3).fit(ROWS)
    scores = detector._scores_of_fitted(ROWS)
    assert np.allclose(scores[:-400], detector.score_samples(ROWS[:-400]))
    assert np.array_equal(scores[-400:], detector.score_samples(ROWS[-400:]))


def test_a_stream_of_single_rows():
    detector = LSHOutlierDetector(sketched())
    for row in ROWS[:20]:
        detector.partial_fit(row[None])
    assert detector.score_samples(ROWS[:20]).shape == (20,)


def test_a_sketch_keeps_some_rows(monkeypatch):
    monkeypatch.setattr(outliers, "N_KEPT", 500)
    detector = LSHOutlierDetector(sketched(n_hashes=64), contamination=0.1)
    labels = detector.fit_predict(ROWS)
    kept = detector._kept[0]
    assert len(kept) == 500
    order = np.array([np.flatnonzero((ROWS == row).all(axis=1))[0] for row in kept])
    assert abs(order.mean() - 750) < 4 * 1500 / np.sqrt(12 * 500)  # of all times alike
    share = (labels < 0).mean()
    assert abs(share - 0.1) < 4 * np.sqrt(0.09 / 500)


def test_a_sliding_window_forgets():
    detector = LSHOutlierDetector(sketched(sliding_window=300), contamination=0.05)
    detector.fit(ROWS[:600]).partial_fit(20 + ROWS[600:900])
    assert (detector.predict(20 + OTHERS) > 0).mean() > 0.8
    assert (detector.predict(OTHERS) < 0).all()


@pytest.mark.parametrize(("contamination", "after"), [(0.05, 6), ("auto", 12)])
def test_a_half_life_forgets_the_threshold_of_old_rows(contamination, after):
    """The rows kept for the threshold, most of them from before, count by their age."""
    density = LSHKernelDensity("laplacian", 1.0, algorithm="bucket_sum", half_life=100, n_hashes=64)
    detector = LSHOutlierDetector(density, contamination=contamination, random_state=0)
    new = 50 + rng.normal(size=(after * 100 + 2000, 2))
    detector.partial_fit(rng.normal(size=(5000, 2))).partial_fit(new[2000:])
    assert len(detector._kept[0]) == outliers.N_KEPT
    assert (detector.predict(rng.uniform(100, 200, (50, 2))) < 0).all()
    assert (detector.predict(new[:2000]) > 0).mean() > 0.85


def test_equal_weights_are_none():
    scores = np.sort(rng.normal(size=1001))
    for contamination in (0.1, "auto"):  # at whole ranks there is nothing to interpolate
        plain = outliers.threshold(scores, contamination)
        ones = outliers.threshold(scores[::-1], contamination, np.ones(1001))
        assert ones == pytest.approx(plain, abs=0.02)
    assert outliers.threshold(np.arange(-4.0, 0.0), 0.5, np.array([0, 0, 1e-300, 3e-300])) == -1


def test_queries_change_nothing_and_threads_agree():
    detector = LSHOutlierDetector(DENSITIES["near_far"], random_state=0).fit(ROWS)
    before = pickle.dumps(detector)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(detector.score_samples, [np.r_[ROWS, OTHERS]] * 8))
    assert all(np.array_equal(x, found[0]) for x in found)
    assert pickle.dumps(detector) == before
    two = LSHOutlierDetector(DENSITIES["near_far"], random_state=0, n_jobs=2).fit(ROWS)
    assert np.array_equal(two.score_samples(ROWS), found[0][: len(ROWS)])


@pytest.mark.parametrize("name", DENSITIES)
@pytest.mark.parametrize("way", ["file", "pickle"])
def test_saved_and_loaded(name, way, tmp_path):
    detector = detector_of(name, contamination=0.05).fit(ROWS)
    loaded = reloaded(detector, way, tmp_path)
    queries = np.r_[ROWS[::50], OTHERS]
    assert loaded.offset_ == detector.offset_
    assert np.array_equal(loaded.score_samples(queries), detector.score_samples(queries))
    for one in (detector, loaded):
        one.partial_fit(ROWS[:200] + 0.5)
    assert np.array_equal(loaded.decision_function(queries), detector.decision_function(queries))
    assert np.array_equal(loaded.fit_predict(ROWS), detector.fit_predict(ROWS))


@pytest.mark.parametrize("name", ["default", "sketch"])
def test_numpys_numbers_in_a_file(name):
    options = {"contamination": np.float32(0.1), "n_jobs": np.int64(1)}
    detector = LSHOutlierDetector(DENSITIES[name], random_state=np.int32(3), **options).fit(ROWS)
    detector.save(file := io.BytesIO())
    file.seek(0)
    loaded = LSHOutlierDetector.load(file)
    assert (loaded.n_jobs, loaded.random_state) == (1, 3)
    assert loaded.contamination == np.float32(0.1) and loaded.offset_ == detector.offset_


@pytest.mark.parametrize(("name", "value"), [("n_jobs", "x"), ("random_state", {})])
def test_parameters_in_a_file_are_checked(name, value):
    LSHOutlierDetector(random_state=0).fit(ROWS[:50]).save(file := io.BytesIO())
    file.seek(0)
    with pytest.raises(ValueError, match=name):
        LSHOutlierDetector.load(changed(file, lambda x, _: x["parameters"].update({name: value})))


def test_in_a_pipeline():
    pipeline = make_pipeline(StandardScaler(), LSHOutlierDetector(contamination=0.02))
    assert (pipeline.fit_predict(ROWS)[TRUTH] < 0).mean() > 0.6
    assert pipeline.predict(OTHERS).shape == (40,)
    searched = LSHOutlierDetector(LSHKernelDensity()).set_params(density__bandwidth=2.0)
    assert searched.fit(ROWS).density_.bandwidth_ == 2.0


# --- PyOD ---------------------------------------------------------------------------------------


def test_without_pyod_the_error_says_how_to_install_it(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyod.models.base", None)
    monkeypatch.delitem(sys.modules, "lshkit.kde.pyod", raising=False)
    with pytest.raises(ImportError, match="pip install pyod"):
        import lshkit.kde.pyod  # noqa: F401


def test_a_detector_of_pyod():
    pytest.importorskip("pyod", reason="pip install pyod")
    from lshkit.kde.pyod import LSHKDE

    detector = LSHKDE(contamination=0.02, random_state=0).fit(ROWS)
    assert detector.decision_scores_.shape == (1500,)
    assert roc_auc_score(TRUTH, detector.decision_scores_) > 0.9
    assert detector.labels_.sum() == 30
    assert np.array_equal(detector.decision_function(ROWS), detector.decision_scores_)
    assert np.array_equal(detector.predict(ROWS), detector.labels_)
    assert detector.predict_proba(OTHERS).shape == (40, 2)
    assert detector.predict_confidence(OTHERS).shape == (40,)
    assert clone(detector).get_params() == detector.get_params()
    copied = pickle.loads(pickle.dumps(detector))
    assert np.array_equal(copied.decision_function(OTHERS), detector.decision_function(OTHERS))
    far = np.array([[1e3, 1e3]])
    rows = np.r_[ROWS[:300, :2], far * np.arange(2, 42)[:, None]]  # 40 without a neighbor
    density = LSHKernelDensity("tophat", 1.0)
    for contamination in (0.05, 0.3):
        detector = LSHKDE(contamination, density).fit(rows)
        own = LSHOutlierDetector(density, contamination=contamination).fit(rows)
        assert np.array_equal(detector.labels_, own.predict(rows) < 0)
        assert detector.labels_[300:].all() and detector.predict(far) == 1
    with pytest.raises(ValueError, match="contamination"):
        LSHKDE(contamination=0.6)
    with pytest.raises(NotFittedError):
        LSHKDE().decision_function(OTHERS)


def test_one_row_first():
    X = np.random.default_rng(0).normal(size=(60, 3))
    detector = LSHOutlierDetector(random_state=0).partial_fit(X[:1])
    with pytest.raises(ValueError, match="at least 2 rows"):
        detector.predict(X)
    whole = LSHOutlierDetector(random_state=0).fit(X)
    assert np.array_equal(detector.partial_fit(X[1:]).score_samples(X), whole.score_samples(X))

"""Queries change nothing; what is learnt from them is asked for by `tune`."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cases.kde import clustered, log_mean
from sklearn.exceptions import NotFittedError

from lshkit.kde import LSHKernelDensity, estimator
from lshkit.kde.method import Estimate, Method, Tuned
from lshkit.kde.methods import METHODS
from lshkit.kde.training import Training


def fitted_attributes(density):
    names = [name for name in dir(density) if name.endswith("_") and not name.startswith("_")]
    return {name: copy.deepcopy(getattr(density, name)) for name in names}


@pytest.mark.parametrize("algorithm", ["auto", *METHODS])
def test_queries_change_nothing(algorithm):
    """Few and many, like the rows and unlike them, by every method that answers queries."""
    rows, queries = clustered(6000, 5, 40, scale=0.3, seed=1, n_queries=300)
    options = dict(algorithm=algorithm, rtol=0.2, random_state=3)
    density = LSHKernelDensity("laplacian", 0.5, **options).fit(rows)
    before, state = fitted_attributes(density), pickle.dumps(density)
    expected = density.score_samples(queries)
    for some in (queries[:3], queries + 5, 1e8 * queries):
        density.score_samples(some, return_std=True)
        density.kernel_mean(some)
        density.score(some)
    assert fitted_attributes(density) == before and {"report_", "algorithm_"} < before.keys()
    assert pickle.dumps(density) == state
    assert np.array_equal(density.score_samples(queries), expected)


@pytest.mark.parametrize("algorithm", ["auto", *METHODS])
def test_threads_on_one_estimator(algorithm, monkeypatch):
    """All at once, of an estimator that has yet to make its method again: once."""
    rows, queries = clustered(6000, 5, 40, scale=0.3, seed=1, n_queries=300)
    options = dict(algorithm=algorithm, rtol=0.3, random_state=3)
    density = LSHKernelDensity("laplacian", 0.4, **options).fit(rows)
    shared = pickle.loads(pickle.dumps(density))
    expected = density.score_samples(queries, return_std=True)
    made = []
    training_of = estimator.training_of
    monkeypatch.setattr(estimator, "training_of", lambda *a: made.append(1) or training_of(*a))
    together = threading.Barrier(6)

    def ask(_):
        together.wait(30)
        return shared.score_samples(queries, return_std=True)

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(ask, range(6)))
    assert len(made) == (algorithm != "bucket_sum")
    assert all(np.array_equal(result, expected) for result in results)


def test_tune_looks_at_all_queries(monkeypatch):
    rows, _ = clustered(3000, 3, 8)
    seen = []
    tune = METHODS["random"].tune
    monkeypatch.setattr(
        METHODS["random"], "tune", lambda pilot, rtol: seen.append(pilot) or tune(pilot, rtol)
    )
    density = LSHKernelDensity(algorithm="random", random_state=0).partial_fit(rows)
    density.tune(rows[:383])
    (one,) = seen  # the pilot did not run for rows before
    ends = one.training.geometry.scale(rows[[0, 382]])
    assert len(one.queries) == 128 and np.array_equal(one.queries[[0, -1]], ends)


def test_tune_goes_by_what_was_fitted():
    """As all else does whose parameters were set after fitting."""
    rows, queries = clustered(3000, 5, 40, scale=0.3, seed=1, n_queries=300)
    options = dict(algorithm="random", rtol=0.2, random_state=3)
    density, same = (LSHKernelDensity("laplacian", 0.5, **options).fit(rows) for _ in range(2))
    density.set_params(rtol=0.01, kernel="tophat", algorithm="bucket_sum").tune(queries)
    assert density.report_ == same.tune(queries).report_
    score = same.score_samples(queries)
    assert np.array_equal(density.score_samples(queries), score)
    more = same.partial_fit(rows[:10])  # rows: what was tuned is gone
    assert more.report_["queries"] == "rows"


@pytest.mark.parametrize("algorithm", ["brute", "auto"])
def test_tune_where_there_is_nothing_to_choose(algorithm):
    rows, queries = clustered(500, 4, 8)
    density = LSHKernelDensity(algorithm=algorithm, rtol=0).fit(rows)
    before = density.score_samples(queries)
    assert density.tune(queries) is density and density.algorithm_ == "brute"
    assert np.array_equal(density.score_samples(queries), before)
    with pytest.raises(ValueError, match="features"):
        density.tune(queries[:, :2])
    with pytest.raises(NotFittedError):
        LSHKernelDensity().tune(queries)


def test_tune_tries_what_it_picks_on_the_queries(monkeypatch):
    """Rows that deceive tuning: a method that then misses rtol on the queries is not taken."""
    rows, queries = clustered(6000, 8, 60, n_queries=300)
    wrong = {
        "n_samples": 64,
        "limit": 1e9,
        "least": -1e9,
        "cost": 1.0,
        "error": 0.0,
    }  # reads on for no query
    make = METHODS["random"].from_settings
    monkeypatch.setattr(
        METHODS["random"],
        "tune",
        lambda pilot, rtol: Tuned(dict(wrong), lambda: make(wrong, pilot.training)),
    )
    density = LSHKernelDensity(bandwidth=0.4, random_state=0, normalize=False).fit(rows)
    for asked in (None, queries):
        if asked is not None:
            density.tune(asked)
        assert density.algorithm_ == "brute" and "random" in density.report_["reason"]
        assert density.report_["methods"]["random"]["error"] > 0.13
        score = density.score_samples(queries)
        assert np.abs(np.expm1(score - log_mean("gaussian", queries, rows, 0.4))).mean() < 0.1


def test_tune_sets_the_sizes_for_queries():
    """Most rows are alone, which asks for all rows; the queries are of the clusters."""
    rng = np.random.default_rng(0)
    rows, queries = clustered(12_000, 6, 30, scale=0.1, seed=2, n_queries=300)
    rows = np.r_[rows, 40 * rng.normal(size=(8000, 6))]
    density = LSHKernelDensity(bandwidth=0.3, algorithm="random", random_state=0, normalize=False)
    density.fit(rows)
    at_first = density.report_["methods"]["random"]["cost"]
    score = density.tune(queries).score_samples(queries)
    assert density.report_["methods"]["random"]["cost"] < 0.5 * at_first
    exact = log_mean("gaussian", queries, rows, 0.3)
    assert np.abs(np.expm1(score - exact)).mean() < 0.12


def test_a_new_method_is_a_class_in_the_registry(monkeypatch, tmp_path):
    class EveryOther(Method):
        name, nbytes, looked_up = "every_other", 0, 10**9

        def __init__(self, training, step):
            part = training.X[::step].copy()
            self.training = training
            self.part = Training(part, None, training.geometry, training.seed)

        @classmethod
        def tune(cls, pilot, rtol):
            settings = {"step": 2, "cost": 1.0, "error": rtol}
            return Tuned(settings, lambda: cls(pilot.training, 2))

        @classmethod
        def from_settings(cls, settings, training, permuted=None):
            return cls(training, settings["step"])

        def sampled(self, queries, threads, stop=None, with_error=True):
            sums = self.part.sums(queries, threads)
            rows = np.full(len(queries), len(self.part.X))
            return Estimate(sums.shift, sums.total / self.part.total, 0 * sums.total, rows)

    monkeypatch.setitem(METHODS, "every_other", EveryOther)
    rows, queries = clustered(3000, 5, 40, scale=0.3, seed=1)
    wanted = LSHKernelDensity(algorithm="brute").fit(rows[::2]).score_samples(queries)
    for algorithm in ("auto", "every_other"):
        density = LSHKernelDensity(algorithm=algorithm).fit(rows)
        assert density.algorithm_ == "every_other"
        assert np.allclose(density.score_samples(queries), wanted, atol=1e-5)
        density.save(tmp_path / "density.npz")
        loaded = LSHKernelDensity.load(tmp_path / "density.npz")
        assert np.array_equal(loaded.score_samples(queries), density.score_samples(queries))
    with pytest.raises(ValueError, match="rtol"):
        density.set_params(rtol=0).fit(rows)

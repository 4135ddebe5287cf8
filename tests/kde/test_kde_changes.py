"""Sketches that are changed by several threads, or by a call that is interrupted."""

import pickle
import sys
import threading

import numpy as np
import pytest
from cases.kde import SKETCHES, clustered, sketch

from lshkit.buckets import BucketTable
from lshkit.kde import LSHKernelDensity, LSHKernelRegressor, LSHOutlierDetector

FORGETTING = [
    {},
    {"half_life": 500.0},
    {"sliding_window": 3000},
    {"sliding_window": 3000, "sliding_window_error": 0.1},
]


@pytest.fixture
def rows():
    return clustered(12_000, 5, 20, n_queries=6)[0]


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C behind the n-th change of a table from now on."""

    def after(n, method="add"):
        plain, calls = getattr(BucketTable, method), []

        def change(self, *args):
            plain(self, *args)
            calls.append(0)
            if len(calls) == n:
                monkeypatch.setattr(BucketTable, method, plain)
                raise KeyboardInterrupt

        monkeypatch.setattr(BucketTable, method, change)

    return after


def check_refused(model, rows, *more):
    for use in (
        lambda: model.partial_fit(rows, *more),
        lambda: pickle.dumps(model),
        lambda: model.predict(rows) if hasattr(model, "predict") else model.score_samples(rows),
    ):
        with pytest.raises(RuntimeError, match="only some of the rows of a call that was interr"):
            use()


@pytest.mark.parametrize("kernel", SKETCHES)
@pytest.mark.parametrize("forgets", FORGETTING)
@pytest.mark.parametrize("n", [1, 3])
def test_an_interrupted_sketch_is_refused(kernel, forgets, n, rows, interrupted, tmp_path):
    density = sketch(kernel, **forgets).fit(rows[:500])
    interrupted(n)
    with pytest.raises(KeyboardInterrupt):
        density.partial_fit(rows)
    check_refused(density, rows[:10])
    with pytest.raises(RuntimeError, match="interrupted"):
        density.save(tmp_path / "density")
    again = density.fit(rows[:500]).kernel_mean(rows[:5])
    assert np.array_equal(again, sketch(kernel, **forgets).fit(rows[:500]).kernel_mean(rows[:5]))


def test_an_interrupted_removal_or_merge_is_refused(rows, interrupted, monkeypatch):
    density = sketch("angular").fit(rows)
    interrupted(2, "remove")
    with pytest.raises(KeyboardInterrupt):
        density.partial_unfit(rows[:9000])
    check_refused(density, rows[:10])
    whole = sketch("angular").fit(rows)
    with pytest.raises(RuntimeError, match="interrupted"):
        whole.merge(density)
    whole.merge(whole)  # itself: no thread waits for itself
    interrupted(1, "merge")
    with pytest.raises(KeyboardInterrupt):
        whole.merge(sketch("angular").fit(rows))
    check_refused(whole, rows[:10])


def test_refused_rows_leave_a_sketch_in_use(rows):
    density = sketch("angular").fit(rows)
    before = density.kernel_mean(rows[:5])
    with pytest.raises(ValueError, match="must be rows that were added"):
        density.partial_unfit(-rows[:10])
    with pytest.raises(ValueError, match="sample_weight"):
        density.partial_fit(rows, sample_weight=np.full(len(rows), 1e300))
    assert np.array_equal(density.kernel_mean(rows[:5]), before)
    density.partial_fit(rows[:10])


def test_an_interrupted_fit_leaves_what_was_fitted(rows, interrupted):
    density = sketch("laplacian").fit(rows[:500])
    before = density.kernel_mean(rows[:5])
    interrupted(2)
    with pytest.raises(KeyboardInterrupt):
        density.fit(rows)
    assert np.array_equal(density.kernel_mean(rows[:5]), before)


def test_an_interrupted_regression_sketch_is_refused(rows, interrupted):
    y = rows[:, 0]
    model = LSHKernelRegressor("angular", algorithm="bucket_sum", n_bits=6).fit(rows[:500], y[:500])
    interrupted(2)
    with pytest.raises(KeyboardInterrupt):
        model.partial_fit(rows, y)
    check_refused(model, rows[:10], y[:10])
    assert np.isfinite(model.fit(rows[:500], y[:500]).predict(rows[:10])).all()


@pytest.mark.parametrize("where", ["rows", "sample"])
def test_an_interrupted_detector_of_a_sketch_is_refused(where, rows, interrupted, monkeypatch):
    detector = LSHOutlierDetector(sketch("angular")).fit(rows[:500])
    if where == "rows":
        interrupted(2)
    else:

        def keep(self, X):
            raise KeyboardInterrupt

        monkeypatch.setattr(LSHOutlierDetector, "_keep", keep)
    with pytest.raises(KeyboardInterrupt):
        detector.partial_fit(rows)
    check_refused(detector, rows[:10])


@pytest.fixture
def switching():
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def together(*calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("kernel", SKETCHES)
def test_threads_add_rows_one_after_another(kernel, rows, switching):
    density, parts = sketch(kernel).fit(rows[:500]), np.array_split(rows, 60)

    def add(parts):
        for part in parts:
            density.partial_fit(part)

    together(*(lambda i=i: add(parts[i::3]) for i in range(3)))
    assert density.n_samples_seen_ == 12_500
    wanted = sketch(kernel).fit(rows[:500]).partial_fit(rows).kernel_mean(rows[:20])
    assert np.array_equal(density.kernel_mean(rows[:20]), wanted)


def test_threads_add_rows_with_values(rows, switching):
    y = np.round(rows[:, 0])
    model = LSHKernelRegressor("angular", algorithm="bucket_sum", n_bits=6, random_state=0)
    model.fit(rows[:500], y[:500])
    parts = [(a, b) for a, b in zip(np.array_split(rows, 60), np.array_split(y, 60), strict=True)]

    def add(parts):
        for part in parts:
            model.partial_fit(*part)

    together(*(lambda i=i: add(parts[i::3]) for i in range(3)))
    assert model.n_samples_seen_ == 12_500
    one = LSHKernelRegressor("angular", algorithm="bucket_sum", n_bits=6, random_state=0)
    wanted = one.fit(rows[:500], y[:500]).partial_fit(rows, y)
    got, want = (np.array(x.predict(rows[:20], return_std=True)) for x in (model, wanted))
    assert np.allclose(got, want, rtol=1e-12)


def test_a_query_waits_for_rows_that_another_thread_adds(rows, monkeypatch):
    density = sketch("angular").fit(rows[:500])
    begun, ended, plain = threading.Event(), [], BucketTable.add

    def add(self, *args):
        begun.set()
        ended.append(begun.wait(0) and threading.Event().wait(0.2))
        return plain(self, *args)

    monkeypatch.setattr(BucketTable, "add", add)
    thread = threading.Thread(target=lambda: density.partial_fit(rows[:900]))
    thread.start()
    begun.wait()
    assert (density.kernel_mean(rows[:5]) <= 1).all() and len(ended) == 1
    thread.join()
    assert density.n_samples_seen_ == 1400


def test_copies_have_changes_of_their_own(rows):
    density = sketch("angular").fit(rows)
    copy = pickle.loads(pickle.dumps(density))
    assert copy._kde_sketch.changes is not density._kde_sketch.changes
    state = vars(density._kde_sketch).copy()
    del state["changes"]  # as of an older version
    old = object.__new__(type(density._kde_sketch))
    old.__setstate__(state)
    density._kde_sketch = old
    assert isinstance(density.partial_fit(rows[:10]), LSHKernelDensity)

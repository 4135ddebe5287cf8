"""Sketches that are changed by several threads, or by a call that is interrupted."""

import copy
import os
import pickle
import sys
import threading
import time

import numpy as np
import pytest
from cases.kde import SKETCHES, clustered, sketch

from lshkit.buckets import BucketTable
from lshkit.kde import LSHKernelRegressor, LSHOutlierDetector
from lshkit.kde.sketch import Sketch
from lshkit.kde.value_sketch import ValueSketch

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


def ctrl_c(*args):
    raise KeyboardInterrupt


def no_memory(*args):
    raise MemoryError


def check_refused(model, rows, *more):
    for use in (
        lambda: model.partial_fit(rows, *more),
        lambda: pickle.dumps(model),
        lambda: model.predict(rows) if hasattr(model, "predict") else model.score_samples(rows),
    ):
        with pytest.raises(RuntimeError, match="only some of the rows of a call of partial_fit"):
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


def test_an_interrupted_removal_or_merge_is_refused(rows, interrupted):
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
    with monkeypatch.context() as patch:
        if where == "rows":
            interrupted(2)
        else:
            patch.setattr(LSHOutlierDetector, "_keep", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            detector.partial_fit(rows)
    check_refused(detector, rows[:10])
    with pytest.raises(RuntimeError, match="interrupted"):
        detector.offset_  # noqa: B018


def test_a_call_that_fails_before_its_first_row_leaves_a_sketch_in_use(rows, monkeypatch):
    density = sketch("laplacian").fit(rows[:500])
    before = density.kernel_mean(rows[:5])
    for error in (ctrl_c, no_memory):
        with monkeypatch.context() as patch:
            patch.setattr(Sketch, "codes", error)
            with pytest.raises((KeyboardInterrupt, MemoryError)):
                density.partial_fit(rows)
        assert np.array_equal(density.kernel_mean(rows[:5]), before)
    assert density.partial_fit(rows[500:600]).n_samples_seen_ == 600


def test_a_handler_of_a_signal_is_refused_while_rows_are_added(rows, monkeypatch):
    """It runs in the thread that adds them, which does not wait for itself."""
    density, plain, said = sketch("angular").fit(rows[:500]), BucketTable.add, []

    def add(self, *args):
        plain(self, *args)
        for use in (lambda: density.kernel_mean(rows[:5]), lambda: density.partial_fit(rows[:5])):
            with pytest.raises(RuntimeError, match="has not ended") as error:
                use()
            said.append(error)

    with monkeypatch.context() as patch:
        patch.setattr(BucketTable, "add", add)
        density.partial_fit(rows[500:600])
    assert len(said) == 2
    assert np.array_equal(
        density.kernel_mean(rows[:5]), sketch("angular").fit(rows[:600]).kernel_mean(rows[:5])
    )


@pytest.fixture
def adding(monkeypatch):
    """A thread that adds rows to a sketch, in its first change of a table, until `wait` ends."""

    def begun(density, rows, wait):
        inside, plain = threading.Event(), BucketTable.add

        def add(self, *args):
            plain(self, *args)
            inside.set()
            wait()

        monkeypatch.setattr(BucketTable, "add", add)
        thread = threading.Thread(target=density.partial_fit, args=(rows,))
        thread.start()
        inside.wait()
        return thread

    return begun


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_while_another_thread_adds_rows_is_refused(rows, adding):
    density, go_on = sketch("angular").fit(rows[:500]), threading.Event()
    thread = adding(density, rows[500:600], go_on.wait)
    if (child := os.fork()) == 0:  # nothing of pytest's may run there
        code = 1
        try:
            density.kernel_mean(rows[:5])
        except RuntimeError:
            code = 0
        finally:
            os._exit(code)
    go_on.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert (density.kernel_mean(rows[:5]) <= 1).all()


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


def test_threads_add_rows_with_values_one_after_another(rows, monkeypatch):
    y, plain, inside, at_once = np.round(rows[:, 0]), ValueSketch._add_values, [], []
    model = LSHKernelRegressor("angular", algorithm="bucket_sum", n_bits=6).fit(rows[:500], y[:500])

    def add_values(self, *args):
        inside.append(0)
        time.sleep(0.01)
        at_once.append(len(inside))
        plain(self, *args)
        inside.pop()

    monkeypatch.setattr(ValueSketch, "_add_values", add_values)
    parts = [slice(first, first + 1000) for first in (0, 1000, 2000, 3000)]
    together(*(lambda part=part: model.partial_fit(rows[part], y[part]) for part in parts))
    assert at_once == [1] * 4 and model.n_samples_seen_ == 4500


def test_a_query_waits_for_rows_that_another_thread_adds(rows, adding):
    density, ended = sketch("angular").fit(rows[:500]), []
    thread = adding(density, rows[:900], lambda: ended.append(time.sleep(0.2)))
    assert (density.kernel_mean(rows[:5]) <= 1).all() and len(ended) == 1
    thread.join()
    assert density.n_samples_seen_ == 1400


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "file": lambda x: type(x).from_bytes(x.to_bytes()),
}


@pytest.mark.parametrize("copy_of", COPIES.values(), ids=COPIES)
def test_copies_are_of_whole_changes(copy_of, rows, switching):
    """Of rows that all equal the query, the mean kernel is 1."""
    same = np.repeat(rows[:1], 40, axis=0)
    density, added = sketch("angular").fit(same), []

    def add():
        for _ in range(300):
            density.partial_fit(same)
        added.append(True)

    def copies():
        while not added:
            copied = copy_of(density)
            wrong.append(abs(copied.kernel_mean(same[:1])[0] - 1) > 1e-12)
            wrong.append(copied.n_samples_seen_ != copied._kde_sketch.table.count)

    wrong = []
    together(add, copies)
    assert not any(wrong)


@pytest.mark.parametrize("copy_of", COPIES.values(), ids=COPIES)
def test_a_copy_waits_for_rows_that_another_thread_adds(copy_of, rows, adding):
    density = sketch("angular").fit(rows[:500])
    thread = adding(density, rows[500:600], lambda: time.sleep(0.2))
    copied = copy_of(density)
    thread.join()
    assert copied.n_samples_seen_ == copied._kde_sketch.table.count == 600
    assert np.array_equal(copied.kernel_mean(rows[:5]), density.kernel_mean(rows[:5]))
    assert copied._kde_sketch.changes is not density._kde_sketch.changes


def test_errors_after_a_change_are_of_the_changed_table(rows, monkeypatch):
    """Also where a query that had begun before has read the table meanwhile."""
    density, plain = sketch("laplacian").fit(rows[:500]), BucketTable.add

    def add(self, *args):
        density._kde_sketch.estimate(rows[:5])
        plain(self, *args)

    monkeypatch.setattr(BucketTable, "add", add)
    density.partial_fit(np.repeat(rows[:1], 5000, axis=0))
    monkeypatch.undo()
    whole = sketch("laplacian").fit(np.r_[rows[:500], np.repeat(rows[:1], 5000, axis=0)])
    for x, y in zip(*(x.kernel_mean(rows[:500], True) for x in (density, whole)), strict=True):
        assert np.array_equal(x, y)

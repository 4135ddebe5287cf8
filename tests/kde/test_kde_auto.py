"""Picks of LSHKernelDensity: tuning, files, threads, and what its methods stand on."""

import numpy as np
import pytest
from cases.kde import clustered, log_mean, reloaded
from sklearn.utils.estimator_checks import parametrize_with_checks

from lshkit import _C, hashing
from lshkit.kde import LSHKernelDensity, arguments, pilot
from lshkit.kde.geometry import Geometry
from lshkit.kde.hbe import HashedDraws, tables
from lshkit.kde.method import MOST_TUNED
from lshkit.kde.samples import history_of, stages
from lshkit.kde.sums import Sums
from lshkit.kde.training import PermutedRows, Training, blocks_of


def training_of(rows, kernel="gaussian", seed=0, weights=None):
    d = rows.shape[1]
    return Training(rows, weights, Geometry(kernel, 6, np.zeros(d), np.ones(d)), seed)


@pytest.mark.parametrize("way", ["file", "pickle"])
@pytest.mark.parametrize("algorithm", ["random", "near_far", "hbe"])
def test_a_loaded_estimator_keeps_its_pick(algorithm, way, tmp_path, monkeypatch):
    rows, queries = clustered(3000, 5, 40, scale=0.3, seed=1, n_queries=300)
    density = LSHKernelDensity(bandwidth=0.4, algorithm=algorithm, rtol=0.15, random_state=3)
    density.fit(rows)
    density.tune(queries)
    assert density.report_["queries"] == "given"
    monkeypatch.setattr(pilot, "choose", None)  # no pilot runs again
    loaded = reloaded(density, way, tmp_path)
    assert np.array_equal(loaded.score_samples(queries), density.score_samples(queries))
    assert loaded.report_ == density.report_ and loaded.algorithm_ == algorithm


@pytest.mark.parametrize("way", ["file", "pickle"])
@pytest.mark.parametrize(
    ("kernel", "algorithm", "changes"),
    [
        ("gaussian", "brute", {"bandwidth": 3.0, "kernel": "exponential"}),
        ("gaussian", "random", {"bandwidth": 3.0}),
        ("laplacian", "near_far", {"bandwidth": "scott"}),
        (
            "laplacian",
            "bucket_sum",
            {"bandwidth": 3.0, "n_hashes": 8, "n_bits": 5, "sliding_window": 7},
        ),
    ],
)
def test_parameters_set_after_fitting_wait_for_the_next(kernel, algorithm, changes, way, tmp_path):
    rows, queries = clustered(2000, 5, 20, scale=0.3, seed=1, n_queries=40)
    density = LSHKernelDensity(kernel, algorithm=algorithm, random_state=3).fit(rows)
    before = density.score_samples(queries)
    drawn = None if algorithm == "bucket_sum" else density.sample(9, random_state=0)
    density.set_params(**changes)
    loaded = reloaded(density, way, tmp_path)
    for one in (density, loaded, reloaded(loaded, "pickle", tmp_path)):
        assert np.array_equal(one.score_samples(queries), before) and one.bandwidth_ == 1.0
        if algorithm != "bucket_sum":
            assert np.array_equal(one.sample(9, random_state=0), drawn)
    anew = LSHKernelDensity(**loaded.get_params()).fit(rows)
    assert np.array_equal(loaded.fit(rows).score_samples(queries), anew.score_samples(queries))
    assert not np.array_equal(anew.score_samples(queries), before)


def test_a_kernel_set_after_fitting_says_nothing_of_queries_and_samples():
    rows = clustered(500, 4, 5)[0]
    density = LSHKernelDensity(normalize=False, rtol=0).fit(rows)
    before = density.score_samples(0 * rows[:2]), density.sample(3, random_state=0)
    density.set_params(kernel="angular")  # for which a row of zeros is none
    after = density.score_samples(0 * rows[:2]), density.sample(3, random_state=0)
    assert all(map(np.array_equal, before, after))
    angular = LSHKernelDensity("angular").fit(rows).set_params(kernel="gaussian")
    with pytest.raises(ValueError, match="zeros"):
        angular.kernel_mean(0 * rows[:2])
    with pytest.raises(ValueError, match="no density"):
        angular.sample()


def test_numbers_of_numpy_as_parameters_are_saved(tmp_path):
    rows, queries = clustered(2000, 5, 20, scale=0.3, seed=1, n_queries=300)
    numbers = dict(rtol=np.float32(0.1), bandwidth=np.float32(0.5), random_state=np.int64(0))
    numbers |= dict(n_bits=np.int16(5), n_hashes=np.int32(9), batch_size=np.int64(128))
    for algorithm in ("auto", "random", "near_far"):
        density = LSHKernelDensity(algorithm=algorithm, normalize=np.bool_(True), **numbers)
        score = density.fit(rows).score_samples(queries[:9])
        loaded = reloaded(density, "file", tmp_path)
        assert np.array_equal(loaded.score_samples(queries[:9]), score)
        density.tune(queries)
        density.save(tmp_path / "density.npz")


@pytest.mark.parametrize(("seed", "df"), [(0, 1.5), (1, 3.0)])
def test_auto_on_heavy_tails(seed, df):
    rng = np.random.default_rng(seed)
    rows, queries = (rng.standard_t(df, size=(n, 6)) for n in (24_000, 400))
    density = LSHKernelDensity(bandwidth=0.7, random_state=seed, normalize=False).fit(rows)
    exact = LSHKernelDensity(bandwidth=0.7, algorithm="brute", normalize=False).fit(rows)
    error = np.abs(np.expm1(density.score_samples(queries) - exact.score_samples(queries)))
    assert error.mean() < 0.13


def test_stages():
    """No more rows than there are, whatever the sizes."""
    assert stages(256, 300, 1000) == [256, 1000] and stages(2000, 64, 1000) == [1000]
    assert history_of(64) == 256 and history_of(2**16) == 4096


def test_blocks_give_the_bits_of_rows():
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        rows, queries = (rng.normal(size=(n, 7)).astype(dtype) for n in (777, 5))
        blocks, out = blocks_of(rows), np.empty((2, 5, 3))
        assert blocks.shape == (13, 7, 64)
        centre, scale = rng.normal(size=7), rng.uniform(0.5, 2, 7)
        given = queries / scale + centre
        for code in range(8):
            for of, n in ((rows, -1), (blocks, 777)):
                args = queries, of, centre, scale, None, out[int(n > 0)], 1, n, given, 1 / scale
                _C.kernel_sums(code, 3, *args)
            assert np.array_equal(out[0], out[1])
    with pytest.raises(ValueError, match="given: .* got None"):
        _C.kernel_sums(4, 1, queries, rows, centre, scale, None, out[0])
    with pytest.raises(ValueError, match="n_keys"):
        _C.kernel_sums(0, 1, queries, blocks, None, None, None, out[0], 1, 13 * 64 + 1)


def test_one_query_has_the_bits_that_it_has_among_others():
    rows, queries = clustered(5000, 9, 20, scale=0.5, n_queries=40)
    for algorithm in ("brute", "random", "near_far"):
        options = dict(bandwidth=0.8, algorithm=algorithm, random_state=0)
        density = LSHKernelDensity(**options).fit(rows.astype(np.float32))
        together = density.score_samples(queries)
        alone = np.concatenate([density.score_samples(q[None]) for q in queries])
        assert np.array_equal(together, alone)


def test_far_off_queries_in_several_places():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(500, 3))
    rows[:40] += 1e7
    rows[40:80] -= 3e7
    queries = np.r_[1e7 + rng.normal(size=(9, 3)), -3e7 + rng.normal(size=(9, 3)), rows[100:109]]
    density = LSHKernelDensity(algorithm="brute", normalize=False).fit(rows)
    assert np.abs(density.score_samples(queries) - log_mean("gaussian", queries, rows)).max() < 1e-5


def test_draws_that_meet_no_row_say_that_nothing_is_known():
    rows, _ = clustered(2000, 4, 5)
    permuted = PermutedRows(training_of(rows))
    hasher = hashing.EuclideanLSH(4, 8, 16, width=0.5, seed=0)
    got = HashedDraws(tables(permuted, hasher)).estimate(np.full((2, 4), 30.0), 1)
    assert np.isinf(got.error).all()


def test_a_method_that_cannot_keep_rtol_warns():
    rows = np.random.default_rng(0).normal(size=(3000, 12))
    density = LSHKernelDensity(bandwidth=0.4, algorithm="hbe", rtol=0.01, random_state=0)
    calls = [
        lambda: density.fit(rows),
        lambda: density.partial_fit(rows[:9]).score_samples(rows[:5]),
        lambda: density.partial_fit(rows[:9]).kernel_mean(rows[:5]),
        lambda: density.partial_fit(rows[:9]).tune(rows[:200]),
        lambda: density.partial_fit(rows[:9]).bandwidth_,
    ]
    for call in calls:
        with pytest.warns(UserWarning, match="hbe.*rtol=0.01") as caught:
            call()
        assert [x.filename for x in caught] == [__file__]


def test_a_method_that_states_too_much_warns():
    """Counts, where a cell holds all of a density or nothing; "auto" takes another method."""
    rng = np.random.default_rng(0)
    rows = rng.poisson(2 * rng.gamma(0.5, 2, 12), (2300, 12)).astype(float)
    density = LSHKernelDensity(bandwidth=0.2, algorithm="near_far", random_state=0)
    with pytest.warns(UserWarning, match="'near_far' states a median relative error of .* which"):
        errors = density.fit(rows[:2000]).score_samples(rows[2000:], return_std=True)[1]
    assert np.median(errors) > 1
    assert density.set_params(algorithm="auto").fit(rows[:2000]).algorithm_ != "near_far"


def test_a_sketch_asks_for_no_more_hashes_than_a_method_takes():
    rng = np.random.default_rng(0)
    rows = (3 * rng.normal(size=(50, 8)))[rng.integers(50, size=20_000)]
    rows = (rows + 0.02 * rng.normal(size=rows.shape)).astype(np.float32)
    density = LSHKernelDensity("angular", n_bits=8, rtol=0.004, random_state=0, normalize=False)
    found = density.fit(rows).report_["methods"]["bucket_sum"]
    assert found["n_hashes"] == MOST_TUNED == found["cost"] / 3
    assert found["error"] > 0.004  # as it is with so many, not with as many as were wanted


@pytest.mark.parametrize("algorithm", ["bucket_sum", "near_far"])
def test_n_jobs_reaches_hashing(algorithm, monkeypatch):
    asked = []
    monkeypatch.setattr(
        arguments._C, "set_max_threads", lambda n, f=_C.set_max_threads: asked.append(n) or f(n)
    )
    before = _C.max_threads()
    rows = np.random.default_rng(0).normal(size=(2000, 4))
    options = dict(algorithm=algorithm, random_state=0, n_jobs=2, normalize=False)
    density = LSHKernelDensity("angular", **options).fit(rows)
    assert asked[:2] == [2, before] and _C.max_threads() == before
    within = []
    inside = density._kde_sketch or density._kde_method
    whole = inside.estimate
    seen = lambda *args: within.append(asked[-1]) or whole(*args)  # noqa: E731
    monkeypatch.setattr(inside, "estimate", seen)
    density.score_samples(rows[:9])
    assert within == [2] and asked[-1] == before == _C.max_threads()


def test_blocks_that_another_thread_makes_shorter():
    class Shared(PermutedRows):
        blocks = property(lambda self: self.kept, lambda self, new: vars(self).update(kept=new[:1]))

    rows, queries = clustered(1000, 5, 8)
    got, expected = (
        kind(training_of(rows)).sums(queries, 64, 900, 1) for kind in (Shared, PermutedRows)
    )
    assert np.array_equal(got.total, expected.total)


@pytest.mark.parametrize("algorithm", ["random", "near_far", "hbe", "auto"])
def test_rows_are_permuted_once(algorithm, monkeypatch):
    made = []
    init = PermutedRows.__init__
    monkeypatch.setattr(PermutedRows, "__init__", lambda *args: made.append(1) or init(*args))
    rows, queries = clustered(3000, 5, 40, scale=0.3, seed=1, n_queries=300)
    density = LSHKernelDensity(bandwidth=0.4, algorithm=algorithm, rtol=0.2, random_state=3)
    density.fit(rows).tune(queries).score_samples(queries)
    assert len(made) == 1 and density.report_["queries"] == "given"


def test_sums_without_a_part():
    a, b = (
        Sums(np.array([x]), np.array([y]), np.array([z])) for x, y, z in ((0, 3, 5), (-1, 1, 1))
    )
    rest = (a + b).without(b)
    assert rest.total[0] == pytest.approx(3) and rest.squares[0] == pytest.approx(5)


@parametrize_with_checks(
    [LSHKernelDensity("angular", normalize=False)],
    expected_failed_checks=lambda _: {"check_estimators_dtypes": "gives a row of zeros: no angle"},
)
def test_scikit_learns_checks_of_the_angular_kernel(estimator, check):
    check(estimator)


@pytest.mark.filterwarnings("error")
def test_a_laplacian_sketch_is_no_pick_where_rows_lie_alone():
    """It has noise of them alone, any multiple of their density: an error of 2 is no bound."""
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(300, 10))[rng.integers(300, size=30_200)]
    rows += 0.01 * rng.normal(size=rows.shape)
    alone = rng.random(len(rows)) < 0.02
    rows[alone] = 5 * rng.normal(size=(alone.sum(), 10))
    queries, rows, alone = rows[:200], rows[200:], alone[200:]
    exact, density = (
        LSHKernelDensity("laplacian", 0.5, rtol=rtol, random_state=0) for rtol in (0, 0.1)
    )
    wanted = exact.fit(rows).kernel_mean(queries)
    error = np.abs(density.fit(rows).kernel_mean(queries) / wanted - 1)
    assert density.algorithm_ != "bucket_sum" and error.mean() < 0.1
    assert density.fit(rows[~alone]).algorithm_ == "bucket_sum"

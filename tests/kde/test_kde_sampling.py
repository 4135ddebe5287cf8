"""Sampled densities: unbiased, with the error that they state and the one that was asked for."""

import numpy as np
import pytest
from cases.kde import clustered, log_mean
from sklearn.datasets import load_digits

from lshkit.kde import LSHKernelDensity
from lshkit.kde.cells import Cells
from lshkit.kde.geometry import Geometry
from lshkit.kde.hbe import HashedDraws, family, tables
from lshkit.kde.methods import METHODS
from lshkit.kde.near_far import NearFar
from lshkit.kde.random_sampling import RandomSampling
from lshkit.kde.samples import Stages, sample_size
from lshkit.kde.training import PermutedRows, Training

N_BITS = 6
KERNELS = ["gaussian", "exponential", "laplacian", "angular"]


def training_of(kernel, rows, weights, seed):
    d = rows.shape[1]
    geometry = Geometry(kernel, N_BITS, rows.mean(axis=0), np.ones(d))
    return Training(rows, weights, geometry, seed)


def make(name, kernel, rows, weights, seed):
    """A method with fixed settings, its randomness all from the seed."""
    permuted = PermutedRows(training_of(kernel, rows, weights, seed))
    if name == "random":
        return RandomSampling(permuted, Stages(150, np.inf))
    if name == "random in stages":
        return RandomSampling(permuted, Stages(100, 0.2))
    if name == "near_far":
        return NearFar(Cells(permuted, 1), 4, Stages(150, np.inf))
    if name == "near_far in stages":
        return NearFar(Cells(permuted, 1), 2, Stages(100, 0.2))
    hasher = family(permuted.training, 1.0, 12, 2)
    return HashedDraws(tables(permuted, hasher))


def estimates(name, kernel, rows, weighted, queries, runs):
    """Kernel means of the queries and stated errors in so many runs, and the exact means."""
    weights = np.random.default_rng(2).uniform(0.2, 2, len(rows)) if weighted else None
    exact = np.exp(log_mean(kernel, queries, rows, n_bits=N_BITS, weights=weights))
    means, errors = np.empty((2, runs, len(queries)))
    for seed in range(runs):
        got = make(name, kernel, rows, weights, seed).estimate(queries, 1)
        means[seed], errors[seed] = np.exp(got.shift) * got.mean, np.exp(got.shift) * got.error
    return means, errors, exact


SAMPLED = ["random", "random in stages", "near_far", "near_far in stages", "hbe"]


@pytest.mark.parametrize(
    ("kernel", "weighted"), [(kernel, i % 2 == 1) for i, kernel in enumerate(KERNELS)]
)
@pytest.mark.parametrize("name", SAMPLED)
def test_unbiased_with_the_stated_error(name, kernel, weighted):
    # In clusters of a hundred rows or so: of sums that rare rows make up, few runs tell little.
    rows, queries = clustered(1000, 6, 8, scale=0.15, seed=1, n_queries=5)
    runs = 150
    means, errors, exact = estimates(name, kernel, rows, weighted, queries, runs)
    spread = means.std(axis=0, ddof=1)
    assert (np.abs(means.mean(axis=0) - exact) < 4 * spread / np.sqrt(runs) + 1e-6 * exact).all()
    # The mean stated variance against the observed one, whose own error is sqrt(2 / runs) for
    # normal estimates and more for skewed ones: the middle of the queries.
    varied = spread > 1e-6 * exact
    ratio = (errors**2).mean(axis=0)[varied] / spread[varied] ** 2
    assert not len(ratio) or 0.65 < np.median(ratio) < 1.5


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", SAMPLED)
def test_queries_that_are_rows(name, kernel, weighted):
    """Their own kernel, which a sample may miss, is a large part of the mean; one has 60 copies."""
    rows = np.random.default_rng(1).normal(size=(1000, 16))
    rows[100:160] = rows[0]
    queries = np.r_[rows[:4], rows[:1] + 0.5]
    runs = 60
    means, errors, exact = estimates(name, kernel, rows, weighted, queries, runs)
    spread = means.std(axis=0, ddof=1)
    assert (np.abs(means.mean(axis=0) - exact) < 4 * spread / np.sqrt(runs) + 1e-3 * exact).all()
    varied = (spread > 2e-3 * exact) & (errors < np.inf).all(axis=0)
    ratio = (errors**2).mean(axis=0)[varied] / spread[varied] ** 2
    assert not len(ratio) or 0.6 < np.median(ratio) < 1.6


@pytest.mark.parametrize("algorithm", ["auto", "random", "near_far", "hbe"])
@pytest.mark.parametrize(
    ("kernel", "d", "bandwidth"),
    [("gaussian", 32, 1.7), ("laplacian", 32, 3.4), ("exponential", 16, 0.42)],
)
@pytest.mark.filterwarnings("ignore:algorithm='hbe' has an expected")
def test_fitted_rows_have_the_stated_errors(kernel, d, bandwidth, algorithm):
    """Of which a sample alone misses what may be most of their density: their own kernel."""
    rows = np.random.default_rng(1).normal(size=(8000, d))
    density = LSHKernelDensity(kernel, bandwidth, algorithm=algorithm, random_state=0).fit(rows)
    assert density.algorithm_ != "brute"
    log, std = density.score_samples(rows[:1000], return_std=True)
    exact = LSHKernelDensity(kernel, bandwidth, rtol=0).fit(rows).score_samples(rows[:1000])
    assert np.abs(np.expm1(log - exact)).mean() <= 0.1  # rtol
    assert (np.abs(log - exact) > 3 * std + 1e-3).mean() <= 0.015


def test_families_collide_half_the_time_at_their_distance():
    rows = np.random.default_rng(0).normal(size=(50, 5))
    for kernel, distance in (("gaussian", 0.7), ("exponential", 3.0), ("laplacian", 2.0)):
        hasher = family(training_of(kernel, rows, None, 0), distance, 4, 3)
        assert hasher.probability_of_distance(distance) == pytest.approx(0.5, 1e-6)


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian"])
@pytest.mark.filterwarnings("ignore:algorithm='hbe' has an expected")
def test_rows_beyond_exact_bins_are_drawn_from_too(kernel):
    """Families refuse them; a kernel density of rows near the centre has nothing of them."""
    rows = np.random.default_rng(0).normal(size=(500, 3))
    far = np.concatenate([rows, 1e18 * np.sign(rows[:50])])
    density, of_all = (
        LSHKernelDensity(kernel, 1.0, algorithm="hbe", random_state=0).fit(x).kernel_mean(rows[:9])
        for x in (rows, far)
    )
    np.testing.assert_allclose(of_all * 550 / 500, density, rtol=0.5)  # rtol=0.1 is asked for


def test_sample_size_against_its_own_error():
    spread = np.random.default_rng(0).lognormal(1, 1, 500)
    small, large = (sample_size(spread, 10**6, rtol) for rtol in (0.2, 0.02))
    assert 50 < large / small < 110  # the error falls with the root, less so near exhaustion
    assert sample_size(np.full(10, np.inf), 1000, 0.1) == 1000
    assert sample_size(np.zeros(10), 1000, 0.1) == 1


def near_far_errors(rows, queries, bandwidth):
    """Relative errors of a density tuned for the queries, and those that are stated."""
    density = LSHKernelDensity(bandwidth=bandwidth, algorithm="near_far", random_state=0)
    density.fit(rows).tune(queries)
    score, std = density.score_samples(queries, return_std=True)
    exact = LSHKernelDensity(bandwidth=bandwidth, rtol=0).fit(rows).score_samples(queries)
    return np.abs(np.expm1(score - exact)), std


def rms(x):
    return np.sqrt((x**2).mean())


@pytest.mark.parametrize(("noise", "bandwidth"), [(2, 10.0), (1, 4.0)])
def test_near_far_states_the_error_of_near_rows_that_it_misses(noise, bandwidth):
    # Copies of digits: the sums are a few near rows, and a sample holds none of those missed.
    digits, rng = load_digits().data, np.random.default_rng(0)
    rows = np.repeat(digits, 6, axis=0) + rng.normal(0, noise, (6 * len(digits), 64))
    queries = digits[:300] + rng.normal(0, noise, (300, 64))
    error, std = near_far_errors(rows, queries, bandwidth)
    assert (error < 3 * std + 1e-3).mean() > 0.985
    assert np.median(std) < 1.5 * rms(error) < 0.2


def test_near_far_states_no_more_where_nothing_is_missed():
    rng = np.random.default_rng(1)
    rows, queries = rng.normal(size=(3000, 4)), rng.normal(size=(300, 4))
    error, std = near_far_errors(rows, queries, 0.5)
    assert 0.3 * rms(error) < np.median(std) < 1.5 * rms(error)
    rows[:3] = 30 * np.eye(4)[:3]  # each its own density
    error, std = near_far_errors(rows, rows[:3], 0.5)
    assert error.max() < 1e-5 and std.max() < 0.15


@pytest.mark.parametrize("n", [4, 100, 256, 257, 300])
def test_near_far_of_few_rows(n):
    rng = np.random.default_rng(n)
    rows = rng.normal(size=(n, 4))
    error, std = near_far_errors(rows, rows[:4] + 0.1, 0.5)
    assert error.max() < 1e-3 and std.max() < 1e-3


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("algorithm", ["random", "near_far", "auto"])
def test_rtol_is_kept_on_other_queries(algorithm, kernel):
    rows, queries = clustered(6000, 8, 60, scale=0.2, seed=3, n_queries=600)
    bandwidth = 1.0 if kernel == "angular" else {"gaussian": 0.4}.get(kernel, 0.5)
    options = dict(n_bits=12, random_state=0, normalize=False)
    density = LSHKernelDensity(kernel, bandwidth, algorithm=algorithm, rtol=0.1, **options)
    density.fit(rows)
    exact = log_mean(kernel, queries, rows, bandwidth, n_bits=12)
    score, std = density.score_samples(queries, return_std=True)
    error = np.abs(np.expm1(score - exact))
    assert error.mean() < 0.1
    assert density.algorithm_ in density.report_["methods"]
    if std.any():
        assert 0.4 < np.sqrt((error**2).mean()) / np.sqrt((std**2).mean()) < 2.5


def test_far_queries_get_more_rows():
    """A query whose density is a few rows' gets the exact answer, though the others need few."""
    rng = np.random.default_rng(0)
    rows = np.r_[rng.normal(size=(20_000, 4)), [[9.0, 0, 0, 0]]]
    density = LSHKernelDensity(bandwidth=0.8, algorithm="random", random_state=0).fit(rows)
    far = np.array([[9.5, 0.5, 0, 0], [9.0, 0, 1.0, 0]])
    exact = log_mean("gaussian", far, rows, 0.8)
    score, std = density.set_params(normalize=False).score_samples(far, return_std=True)
    assert np.abs(np.expm1(score - exact)).max() < max(4 * std.max(), 1e-3) < 1
    assert density.report_["methods"]["random"]["n_samples"] < 2000


def unlike_the_rows():
    rng = np.random.default_rng(3)
    normal = rng.normal(size=(24_000, 6))
    yield "wider", "gaussian", 0.5, normal, 2 * rng.normal(size=(300, 6))
    yield "aside", "gaussian", 0.5, normal, rng.normal(size=(300, 6)) + 1.5
    heap = np.r_[0.3 * rng.normal(size=(20_000, 5)), 5 + rng.normal(size=(150, 5))]
    yield "in a thin cloud", "exponential", 0.6, heap, 5 + rng.normal(size=(300, 5))
    tight = 3 * rng.normal(size=(50, 8))[rng.integers(50, size=24_000)]
    tight += 0.02 * rng.normal(size=tight.shape)
    yield "in other directions", "angular", 1.0, tight, 3 * rng.normal(size=(300, 8))


@pytest.mark.parametrize("case", list(unlike_the_rows()), ids=lambda case: case[0])
@pytest.mark.parametrize("algorithm", ["auto", "random", "near_far", "hbe"])
@pytest.mark.filterwarnings("ignore:algorithm='hbe'")
def test_stated_errors_hold_for_queries_unlike_the_rows(case, algorithm):
    """A normal error is within three of its own for 99.7 %; of sums of few rows it is skewed."""
    _, kernel, bandwidth, rows, queries = case
    options = dict(random_state=0, normalize=False)
    density = LSHKernelDensity(kernel, bandwidth, algorithm=algorithm, **options).fit(rows)
    exact = LSHKernelDensity(kernel, bandwidth, rtol=0, normalize=False).fit(rows)
    exact, (score, std) = exact.score_samples(queries), density.score_samples(queries, True)
    error = np.abs(np.expm1(score - exact))
    rounding = 2e-3  # of the float32 distances of sampled log kernels: SAMPLED, of both sides
    assert (error < 3 * std + rounding).mean() > 0.93


def test_same_seed_same_bits_whatever_the_batches():
    rows, queries = clustered(6000, 8, 60, n_queries=300)
    for algorithm in ("random", "near_far"):
        options = dict(bandwidth=0.5, algorithm=algorithm, random_state=3)
        first = LSHKernelDensity(**options).fit(rows).score_samples(queries)
        other = LSHKernelDensity(**options, batch_size=77).fit(rows)
        assert np.array_equal(other.score_samples(queries), first)


def test_auto_reports_its_pick(caplog):
    rows, _ = clustered(6000, 8, 60)
    with caplog.at_level("INFO", "lshkit.kde"):
        density = LSHKernelDensity(bandwidth=2.0, random_state=0).fit(rows)
    (line,) = caplog.messages
    assert line.startswith("algorithm random (the cheapest of")
    report = density.report_
    assert density.algorithm_ == report["algorithm"] == "random"
    assert report["methods"]["random"]["cost"] < report["methods"]["brute"]["cost"] == 6000
    assert 0 < report["methods"]["random"]["error"] <= 0.1
    assert report["reason"].startswith("the cheapest of")
    assert LSHKernelDensity(rtol=0).fit(rows).algorithm_ == "brute"
    noise = np.random.default_rng(0).normal(size=(6000, 60))  # where no row is near another
    assert LSHKernelDensity(bandwidth=0.3, random_state=0).fit(noise).algorithm_ == "brute"


@pytest.fixture
def few_rows_do(monkeypatch):
    """Cells and hash tables are tried from few rows on, where a test takes less."""
    for method in METHODS.values():
        monkeypatch.setattr(method, "min_rows", min(method.min_rows, 2000))
        monkeypatch.setattr(method, "worth", min(method.worth, 600))


def test_auto_tries_cells_and_hash_tables_where_random_sampling_is_expensive(few_rows_do):
    rows, queries = clustered(12_000, 16, 2000, scale=0.05, seed=5, n_queries=100)
    density = LSHKernelDensity(bandwidth=0.15, random_state=0, normalize=False).fit(rows)
    costs = {name: found["cost"] for name, found in density.report_["methods"].items()}
    assert {"brute", "random", "near_far", "hbe"} == set(costs)
    assert density.algorithm_ == "near_far"
    exact = log_mean("gaussian", queries, rows, 0.15)
    assert np.abs(np.expm1(density.score_samples(queries) - exact)).mean() < 0.1


@pytest.mark.parametrize("kernel", ["angular", "laplacian"])
def test_auto_takes_a_sketch_where_it_is_the_cheapest(kernel, few_rows_do):
    rows, queries = clustered(6000, 12, 200, scale=0.02, seed=5, n_queries=100)
    bandwidth = 1.0 if kernel == "angular" else 0.6
    options = dict(n_bits=16, random_state=0, normalize=False)
    density = LSHKernelDensity(kernel, bandwidth, **options).fit(rows)
    assert density.algorithm_ == "bucket_sum"
    exact = log_mean(kernel, queries, rows, bandwidth, n_bits=16)
    score, std = density.score_samples(queries, return_std=True)
    assert np.abs(np.expm1(score - exact)).mean() < 0.1
    assert 0 < std.mean() < 0.2
    assert density.sample(3, random_state=0).shape == (3, 12) if kernel == "laplacian" else True
    more = density.partial_fit(rows[:10]).score_samples(queries[:5])
    assert np.isfinite(more).all() and density.n_samples_seen_ == 6010


def test_auto_tries_a_sketch_where_sampling_is_cheap_too(monkeypatch):
    for method in METHODS.values():
        monkeypatch.setattr(method, "min_rows", min(method.min_rows, 1000))
    rows, _ = clustered(6000, 12, 200, scale=0.02, seed=5, n_queries=100)
    density = LSHKernelDensity("angular", n_bits=8, random_state=0, normalize=False).fit(rows)
    methods = density.report_["methods"]
    assert methods["random"]["cost"] < METHODS["hbe"].worth
    assert "bucket_sum" in methods and "hbe" not in methods


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kernel", ["gaussian", "exponential", "laplacian"])
def test_near_far_where_no_row_is_near(kernel):
    """Log kernels of -1e18 are known to a hundred or so: those of parts may exceed the whole's."""
    rows = np.random.default_rng(0).normal(size=(2000, 2))
    density = LSHKernelDensity(kernel, 1e-9, algorithm="near_far", random_state=0)
    density.fit(rows).set_params(normalize=False)
    assert np.allclose(density.kernel_mean(rows[:20]), 1 / 2000, rtol=1e-3)
    log_density, std = density.score_samples(rows[:20] + 0.1, return_std=True)
    assert (log_density < -1e5).all() and not np.isnan(std).any()


@pytest.mark.filterwarnings("ignore:algorithm=")
def test_hbe_finds_rows_beside_a_group_of_equal_ones():
    """At the distance that is usual there, 0, no draw would meet another row. 4 standard errors."""
    generator = np.random.default_rng(5)
    X = generator.normal(size=(1200, 3))
    X[:600] = X[0]
    queries = np.r_[X[:1], X[:1] + 0.1, generator.normal(size=(2, 3))]
    exact = LSHKernelDensity("laplacian", 0.7, algorithm="brute").fit(X).kernel_mean(queries)
    means = np.array([
        LSHKernelDensity("laplacian", 0.7, algorithm="hbe", rtol=0.3, random_state=seed)
        .fit(X)
        .kernel_mean(queries)
        for seed in range(200)
    ])  # fmt: skip
    z = (means.mean(0) - exact) / (means.std(0) / 200**0.5)
    assert np.abs(z).max() < 4, z


@pytest.mark.filterwarnings("ignore:algorithm=")
def test_hbe_of_angles_where_most_rows_are_equal():
    """Whose angle is not 0 in float32."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2000, 8))
    X[:1400] = X[0]
    queries = rng.normal(size=(100, 8))
    options = {"kernel": "angular", "n_bits": 8, "normalize": False}
    exact = LSHKernelDensity(algorithm="brute", **options).fit(X).kernel_mean(queries)
    hashed = LSHKernelDensity(algorithm="hbe", rtol=0.3, random_state=0, **options).fit(X)
    error = hashed.kernel_mean(queries) / exact - 1
    assert np.sqrt(np.mean(error**2)) < 0.3


@pytest.mark.filterwarnings("ignore:algorithm=")
@pytest.mark.parametrize("rtol", [0.5, 1.0])
def test_hbe_states_an_error_where_one_draw_would_do(rtol):
    rng = np.random.default_rng(0)
    X, queries = rng.normal(size=(5000, 2)), rng.normal(size=(1000, 2))
    options = {"kernel": "angular", "n_bits": 8, "rtol": rtol, "random_state": 0}
    density = LSHKernelDensity(algorithm="hbe", **options).fit(X)
    mean, std = density.kernel_mean(queries, return_std=True)
    exact = LSHKernelDensity(**options | {"rtol": 0}).fit(X).kernel_mean(queries)
    assert np.isfinite(std).all()
    assert (np.abs(mean - exact) > 3 * std).mean() <= 0.027  # as promised, and 3 deviations


def test_hbe_of_tight_clusters():
    """Its width is that of the clusters, not of what is between them."""
    rng = np.random.default_rng(0)
    centres = 4 * rng.normal(size=(40, 8))
    X = centres[rng.integers(40, size=4200)] + 3e-4 * rng.normal(size=(4200, 8))
    exact = LSHKernelDensity(bandwidth=6e-4, algorithm="brute").fit(X[:4000]).kernel_mean(X[4000:])
    hashed = LSHKernelDensity(bandwidth=6e-4, algorithm="hbe", random_state=0).fit(X[:4000])
    error = hashed.kernel_mean(X[4000:]) / exact - 1
    assert np.sqrt(np.mean(error**2)) < 0.15


@pytest.mark.filterwarnings("error:::lshkit", "ignore:algorithm=")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("algorithm", ["near_far", "hbe"])
@pytest.mark.parametrize("kernel", ["gaussian", "exponential", "laplacian"])
def test_queries_that_the_type_of_the_tables_does_not_hold(kernel, algorithm, dtype):
    """They are answered as by brute force; those beside them as without them."""
    X = clustered(6000, 16, 60)[0].astype(dtype)
    exact = LSHKernelDensity(kernel, algorithm="brute").fit(X)
    hashed = LSHKernelDensity(kernel, algorithm=algorithm, rtol=0.2, random_state=0).fit(X)
    largest = 37 if dtype == np.float32 else 300
    queries = X[:12] * np.array(
        [1.0] * 4 + [10.0**p for p in (7, 13, 19, 20, 30, 37, 37, largest)]
    )[:, None].astype(dtype)
    got, std = hashed.score_samples(queries, return_std=True)
    assert np.isfinite(got[:4]).all() and not std[np.isfinite(got)][4:].any()
    np.testing.assert_allclose(got[4:], exact.score_samples(queries[4:]), rtol=1e-6)
    np.testing.assert_array_equal(got[:4], hashed.score_samples(queries[:4]))
    assert hashed.tune(queries).algorithm_ == algorithm


@pytest.mark.parametrize("kernel", ["laplacian", "gaussian", "exponential"])
@pytest.mark.parametrize(
    "each", [2, 25]
)  # of which one is: the centre is far off with them, or not
def test_hbe_where_some_rows_are_far(kernel, each):
    """Half of them have the centre, so that all near rows are far from it; a few do not."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3000, 4))
    X[::each] *= 1e60
    near = X[1:101:2]
    density = LSHKernelDensity(kernel, algorithm="hbe", random_state=0).fit(X)
    exact = LSHKernelDensity(kernel, algorithm="brute").fit(X).kernel_mean(near)
    got, error = density.kernel_mean(near, return_std=True)
    assert np.mean(np.abs(got - exact) <= 3 * error + 1e-6 * exact) > 0.9
    assert (error > 0).any() == (each == 25)


@pytest.mark.filterwarnings("ignore:algorithm='hbe'")
@pytest.mark.parametrize("bandwidth", [1.0, 1e-3, 1e-6])
def test_hbe_of_densities_below_float64(bandwidth):
    """Draws far below e^-745 count as others do, beside tables that have none."""
    X, queries = clustered(6000, 3, 40, scale=0.3, n_queries=200)
    exact = LSHKernelDensity("laplacian", bandwidth, rtol=0).fit(X).score_samples(queries)
    hbe = LSHKernelDensity("laplacian", bandwidth, algorithm="hbe", random_state=0).fit(X)
    got, std = hbe.score_samples(queries, return_std=True)
    assert np.isfinite(got).all() and (got < exact + 5).all()
    assert (np.abs(np.expm1(got - exact)) > 3 * std + 1e-3).mean() < 0.02
    if bandwidth == 1e-6:
        assert (exact < -745).mean() > 0.9 and hbe.report_["methods"]["hbe"]["error"] > 0.1


def test_a_standard_error_far_above_its_density_is_infinite():
    scales, rng = 10.0 ** np.arange(-3, 4), np.random.default_rng(0)
    centres = np.random.default_rng(3).normal(size=(7, 6)) * 1e3

    def draw(n):
        of = rng.integers(7, size=n)
        return centres[of] + scales[of][:, None] * rng.normal(size=(n, 6))

    X, queries = draw(6000), draw(6000)
    density = LSHKernelDensity(bandwidth=6.86, rtol=0.7, random_state=0).fit(X)
    got, std = density.score_samples(queries, return_std=True)
    exact = LSHKernelDensity(bandwidth=6.86, rtol=0).fit(X).score_samples(queries)
    assert np.isinf(std).any() and std[np.isfinite(std)].max() < 1e153
    with np.errstate(divide="ignore"):  # |estimate - exact| in units of the estimate, in logs
        below, above = np.minimum(exact - got, 0), np.maximum(exact - got, 0)
        off = np.where(above > 0, above + np.log(-np.expm1(-above)), np.log(-np.expm1(below)))
        beyond = (off > np.log(3 * std)) & (np.abs(got - exact) > 2e-3)
    assert beyond.mean() < 0.015


@pytest.mark.filterwarnings("ignore:algorithm='hbe'", "error::RuntimeWarning")
@pytest.mark.parametrize("seed", range(6))
def test_stated_errors_are_no_larger_than_kernels(seed):
    """hbe of kernels so narrow that no draw tells of the nearest row."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(20, 4)) * 3
    X = centres[rng.integers(20, size=3000)] + 0.3 * rng.normal(size=(3000, 4))
    weights = rng.pareto(1.5, size=3000) + 0.01
    options = dict(algorithm="hbe", normalize=False, random_state=0)
    density = LSHKernelDensity("gaussian", 1e-3, **options).fit(X, sample_weight=weights)
    mean, std = density.kernel_mean(X[:200], return_std=True)
    assert np.allclose(mean, weights[:200] / weights.sum(), rtol=1e-6)
    assert std.max() <= 1


@pytest.mark.parametrize("n_features", [16, 1000])
def test_exponential_kernels_of_near_rows_with_many_features(n_features):
    """Each adds its own rounding to squared distances, whose roots these are."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(40, n_features))
    centres *= 3.9 / np.linalg.norm(centres, axis=1, keepdims=True)

    def near(which):
        return centres[which] + 0.003 / np.sqrt(n_features) * rng.normal(size=(len(which), 1))

    rows, queries = near(rng.integers(40, size=3000)), near(np.arange(40))
    density = LSHKernelDensity("exponential", algorithm="random", normalize=False, random_state=0)
    got, std = density.set_params(rtol=0.02).fit(rows).score_samples(queries, return_std=True)
    off = np.abs(got - log_mean("exponential", queries, rows))
    assert (off < 4 * std + 1e-3).all()

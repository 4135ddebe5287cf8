"""Exact densities: every kernel against plain numpy and scikit-learn, and the rows' care."""

import numpy as np
import pytest
from cases.kde import KERNELS, log_mean
from scipy import stats
from scipy.special import logsumexp
from sklearn.neighbors import KernelDensity

from lshkit import reference
from lshkit.kde import LSHKernelDensity, kernels
from lshkit.kde.geometry import Geometry
from lshkit.kde.methods import METHODS

SCIKIT = [kernel for kernel in KERNELS if kernel not in ("laplacian", "angular")]


def brute(kernel="gaussian", bandwidth=1.0, **options):
    return LSHKernelDensity(kernel, bandwidth, algorithm="brute", **options)


def assert_close(got, wanted, tolerance=1e-5):
    assert np.array_equal(np.isfinite(got), np.isfinite(wanted))
    finite = np.isfinite(wanted)
    assert np.abs(got[finite] - wanted[finite]).max(initial=0) < tolerance


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("d", [1, 2, 5, 64])
@pytest.mark.parametrize("kernel", KERNELS)
def test_equals_the_reference(kernel, d, dtype):
    rng = np.random.default_rng(d)
    rows, queries = (rng.normal(size=(n, d)).astype(dtype) for n in (333, 41))
    weights = rng.uniform(0.1, 2, len(rows))
    bandwidth = 1.0 if kernel == "angular" else 1.2 * np.sqrt(d)
    density = brute(kernel, bandwidth, normalize=False).fit(rows, sample_weight=weights)
    got = density.score_samples(queries)
    assert got.dtype == dtype
    assert_close(got, log_mean(kernel, queries, rows, bandwidth, weights=weights))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_sums_of_terms_and_squares(kernel, scaled):
    rng = np.random.default_rng(0)
    rows, queries = rng.normal(size=(200, 4)), rng.normal(size=(30, 4))
    weights, bandwidth = rng.uniform(size=200), np.array([2.0, 2.5, 3.0, 3.5])
    bandwidth = np.ones(4) if kernel == "angular" else bandwidth
    geometry = Geometry(kernel, 5, rows.mean(axis=0), bandwidth)
    keys = geometry.scale(rows) if scaled else rows
    options = dict(scaled=scaled, tolerance=1e-6, reach=10.0, threads=1, given=queries)
    got = geometry.sums(geometry.scale(queries), keys, weights, **options)
    total, squares = reference.kernel_sums(kernel, queries, rows, bandwidth, 5, weights)
    assert np.allclose(np.exp(got.shift) * got.total, total, rtol=1e-5, atol=1e-12)
    assert np.allclose(np.exp(2 * got.shift) * got.squares, squares, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("d", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("kernel", SCIKIT)
def test_equals_scikit_learn(kernel, d):
    if kernel == "cosine" and d % 2 == 0:
        pytest.skip("scikit-learn's cosine kernel has another integral than 1 in even dimensions")
    if kernel == "cosine" and d == 64:
        pytest.skip("scikit-learn's normaliser is NaN")
    rng = np.random.default_rng(d)
    rows, queries = (rng.normal(size=(n, d)) for n in (300, 50))
    weights = rng.uniform(0.1, 2, len(rows))
    bandwidth = 1.5 * np.sqrt(d)
    theirs = KernelDensity(kernel=kernel, bandwidth=bandwidth).fit(rows, sample_weight=weights)
    ours = brute(kernel, bandwidth).fit(rows, sample_weight=weights)
    assert_close(ours.score_samples(queries), theirs.score_samples(queries))
    assert ours.score(queries) == pytest.approx(theirs.score(queries), abs=1e-3)


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k != "angular"])
def test_integrates_to_one(kernel, d):
    """Monte Carlo over draws of a Student distribution, wide enough for every kernel's tails."""
    rng = np.random.default_rng(0)
    bandwidth = np.linspace(0.5, 1.5, d)
    density = brute(kernel, bandwidth).fit(rng.normal(size=(3, d)) * 0.3)
    scale = 2.0 if kernel not in ("exponential", "laplacian") else 3.0
    proposal = stats.multivariate_t(np.zeros(d), scale * np.eye(d), df=3, seed=1)
    points = proposal.rvs(40_000).reshape(-1, d)
    ratio = np.exp(density.score_samples(points) - proposal.logpdf(points))
    error = ratio.std() / np.sqrt(len(ratio))
    assert error < 0.05
    assert abs(ratio.mean() - 1) < 4 * error


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k != "angular"])
@pytest.mark.parametrize("d", [1, 3])
def test_samples_come_from_the_density(kernel, d):
    """One row: the distance of a sample from it has the distribution that the kernel gives."""
    bandwidth = 0.7
    density = brute(kernel, bandwidth).fit(np.full((1, d), 5.0))
    drawn = density.sample(4000, random_state=0)
    assert drawn.shape == (4000, d)
    offsets = (drawn - 5.0) / bandwidth
    r = np.abs(offsets).sum(1) if kernel == "laplacian" else np.linalg.norm(offsets, axis=1)
    grid = np.linspace(0, 40 if kernel in ("exponential", "laplacian") else 8, 200_001)[1:]
    line = np.zeros((len(grid), d))
    line[:, 0] = grid * bandwidth
    log_density = density.score_samples(line + 5.0)
    mass = np.exp(log_density) * grid ** (d - 1)  # laplacian: the simplex grows alike
    steps = np.cumsum(mass) / mass.sum()
    assert stats.kstest(np.interp(r, grid, steps), "uniform").pvalue > 1e-3


def test_samples_follow_the_weights_and_the_bandwidth():
    rows = np.array([[0.0, 0.0], [100.0, 100.0], [200.0, 200.0]])
    density = brute(bandwidth=[1.0, 3.0]).fit(rows, sample_weight=[1.0, 0.0, 3.0])
    drawn = density.sample(4000, random_state=1)
    high = drawn[:, 0] > 150
    assert not ((drawn[:, 0] > 50) & (drawn[:, 0] < 150)).any()
    assert abs(high.mean() - 0.75) < 4 * np.sqrt(0.75 * 0.25 / 4000)
    assert abs(drawn[high].std(axis=0) - [1, 3]).max() < 0.2
    assert brute().fit(rows.astype(np.float32)).sample(3).dtype == np.float32


def test_cosine_normaliser_in_many_dimensions():
    from scipy.integrate import quad

    for d in (2, 10, 100):
        integral = quad(lambda r, d=d: r ** (d - 1) * np.cos(np.pi / 2 * r), 0, 1)[0]
        log_ball = 0.5 * d * np.log(np.pi) - kernels.gammaln(0.5 * d + 1)
        wanted = np.log(integral) + log_ball + np.log(d)
        assert kernels.log_normalizer("cosine", d) == pytest.approx(wanted, rel=1e-9)


def test_no_underflow_and_no_cancellation():
    rng = np.random.default_rng(0)
    rows, queries = (rng.normal(size=(n, 300)) for n in (200, 20))
    for offset in (0.0, 1e6):
        got = brute(bandwidth=0.05, normalize=False).fit(rows + offset)
        got = got.score_samples(queries + offset)
        wanted = log_mean("gaussian", queries + offset, rows + offset, 0.05)
        assert wanted.max() < -8e4
        assert np.allclose(got, wanted, rtol=1e-9, atol=0)
    far = brute(normalize=False).fit(rows).score_samples(np.full((1, 300), 1e8))
    assert np.isfinite(far).all()
    for kernel in KERNELS[:-1]:
        farthest = brute(kernel).fit(rows).score_samples(np.full((1, 300), 1e200))
        assert farthest == -np.inf


def test_float32_far_from_the_origin_keeps_its_accuracy():
    rng = np.random.default_rng(0)
    rows, queries = ((rng.normal(size=(n, 8)) + 1000).astype(np.float32) for n in (300, 30))
    got = brute(bandwidth=0.3, normalize=False).fit(rows).score_samples(queries)
    assert_close(got, log_mean("gaussian", queries, rows, 0.3), 5e-5)  # float32's step at -50: 4e-6


@pytest.mark.parametrize("kernel", KERNELS[:-1])
@pytest.mark.parametrize("offset", [1e6, 1e9])
def test_rows_far_apart_keep_their_near_distances(kernel, offset):
    """Two clusters, neither at the centre, and one row from which the mean is far away."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 3))
    rows[:100] += offset
    rows[100:-1] -= offset
    rows[-1] = 1e25
    queries = np.r_[rows[:10] + 0.2, rows[90:105]]
    density = brute(kernel, 1.3, normalize=False).fit(rows)
    assert_close(density.score_samples(queries), log_mean(kernel, queries, rows, 1.3))
    means = density.kernel_mean(queries + 0.1)
    assert np.allclose(means, np.exp(log_mean(kernel, queries + 0.1, rows, 1.3)), rtol=1e-5)


@pytest.mark.parametrize("kernel", ["gaussian", "exponential", "laplacian"])
@pytest.mark.parametrize("far", [1e10, 1e13, 1e16, 1e20])
@pytest.mark.parametrize("bandwidth", [1.0, 0.7, 3.0])
def test_few_rows_beside_many_far_ones_keep_their_distances(kernel, far, bandwidth):
    """Less a centre among the far rows, rows near 0 would be rounded to one another, and times the
    inverse of most bandwidths the far ones.
    """
    rng = np.random.default_rng(0)
    rows = np.r_[rng.normal(size=(60, 2)), rng.integers(9, size=(60, 2)) + far, [[far, far]] * 9]
    for shift in (0, 3 * far):  # of one feature
        rows[60:, 0] -= shift
        queries = np.r_[rows[:20] + 0.1, rows[60:80]]
        differences = (queries[:, None] - rows) / bandwidth  # scaled rows would not do
        logs = kernels_of(kernel, differences)
        wanted = logsumexp(logs, axis=1) - np.log(len(rows))
        for algorithm in ("brute", "random", "near_far"):  # of 129 rows all are read
            density = LSHKernelDensity(
                kernel, bandwidth, algorithm=algorithm, normalize=False, random_state=0
            )
            tolerance = 1e-6 if algorithm == "brute" else 1e-3  # as documented
            assert_close(density.fit(rows).score_samples(queries), wanted, tolerance)


@pytest.mark.parametrize("kernel", ["gaussian", "exponential", "laplacian"])
def test_far_queries_that_scaling_would_make_one(kernel):
    """Neighbouring float64, of which most bandwidths' inverse makes one number."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(80, 3))
    rows[40:, 0] = 1.7e25 + np.spacing(1.7e25) * rng.integers(4, size=40)
    queries = rows[40:] + [0, 0.1, 0]
    logs = kernels_of(kernel, (queries[:, None] - rows) / 0.7)
    density = brute(kernel, 0.7, normalize=False).fit(rows)
    assert_close(density.score_samples(queries), logsumexp(logs, axis=1) - np.log(80))


@pytest.mark.parametrize("n", [4, 100])
@pytest.mark.parametrize("kernel", ["gaussian", "exponential", "laplacian"])
@pytest.mark.parametrize("unit", [1e15, 1e16, 1e40, 1e100])
def test_the_nearest_row_decides_at_any_distance(kernel, unit, n):
    rng = np.random.default_rng(0)
    rows, queries = unit * rng.normal(size=(n, 2)), unit * rng.normal(size=(20, 2))
    density = brute(kernel, 1.0, normalize=False).fit(rows)
    got = density.score_samples(queries)
    logs = kernels_of(kernel, (queries[:, None] - rows) / unit).max(axis=1)
    wanted = logs * (unit**2 if kernel == "gaussian" else unit)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert all(density.score_samples(x[None]) == y for x, y in zip(queries, got, strict=True))


def kernels_of(kernel, differences):
    if kernel == "gaussian":
        return -0.5 * (differences**2).sum(-1)
    return -np.linalg.norm(differences, 1 if kernel == "laplacian" else 2, axis=-1)


@pytest.mark.parametrize("kernel", ["exponential", "linear"])
@pytest.mark.parametrize("scale", [1e3, 1e5])
def test_kernels_with_a_tip_keep_the_distances_of_rows_that_nearly_meet(kernel, scale):
    """An error of the squared distance is one of its root in these."""
    rng = np.random.default_rng(0)
    rows = scale * rng.normal(size=(300, 5))
    queries = np.r_[rows[:50], rows[:50] + 1e-3 * rng.normal(size=(50, 5))]
    got = brute(kernel, normalize=False).fit(rows).score_samples(queries)
    assert_close(got, log_mean(kernel, queries, rows))


def test_angular_kernels_of_opposite_rows_do_not_underflow():
    rng = np.random.default_rng(0)
    rows, queries = 10 + rng.normal(size=(5000, 4)), -10 - rng.normal(size=(9, 4))
    wanted = log_mean("angular", queries, rows, n_bits=64)
    assert wanted.max() < -100
    weights = rng.uniform(size=5000)
    got = brute("angular", n_bits=64, normalize=False).fit(rows)
    assert_close(got.score_samples(queries), wanted)
    got = got.fit(rows, sample_weight=weights).score_samples(queries)
    assert_close(got, log_mean("angular", queries, rows, n_bits=64, weights=weights))
    sampled = LSHKernelDensity("angular", n_bits=64, algorithm="random", random_state=0)
    got, std = sampled.set_params(normalize=False).fit(rows).score_samples(queries, return_std=True)
    assert (np.abs(np.expm1(got - wanted)) < 5 * std + 1e-3).all()
    assert (std < 0.5).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("algorithm", METHODS)
def test_angular_kernels_of_rows_of_any_norm(algorithm):
    """1e160 and 1e-200, whose squares overflow and underflow, among ordinary rows."""
    rng = np.random.default_rng(0)
    rows, queries = rng.normal(size=(3000, 4)), rng.normal(size=(40, 4))
    scales, query_scales = (10.0 ** rng.choice([-200, 0, 160, 300], (n, 1)) for n in (3000, 40))
    options = dict(n_bits=6, algorithm=algorithm, random_state=0, normalize=False)
    one, plain = (LSHKernelDensity("angular", **options).fit(x) for x in (scales * rows, rows))
    got = one.score_samples(query_scales * queries)
    assert np.allclose(got, plain.score_samples(queries), rtol=1e-12)
    if algorithm == "brute":
        assert_close(got, log_mean("angular", queries, rows, n_bits=6))
        assert_close(got, log_mean("angular", query_scales * queries, scales * rows, n_bits=6))
    for bad, message in ((0.0, "zeros"), (np.nan, "NaN")):
        rows[7] = bad
        with pytest.raises(ValueError, match=message):
            one.fit(scales * rows)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kernel", KERNELS[:-1])
@pytest.mark.parametrize("unit", [1e160, 1e-200])
def test_densities_do_not_depend_on_units(kernel, unit):
    rng = np.random.default_rng(0)
    rows, queries = rng.normal(size=(300, 3)), rng.normal(size=(20, 3))
    for bandwidth in (1.5, "scott"):
        plain = brute(kernel, bandwidth, normalize=False).fit(rows)
        other = 1.5 * unit if bandwidth == 1.5 else bandwidth
        other = brute(kernel, other, normalize=False).fit(unit * rows)
        assert np.allclose(other.bandwidth_ / unit, plain.bandwidth_, rtol=1e-12)
        assert_close(other.score_samples(unit * queries), plain.score_samples(queries))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kernel", KERNELS[:-1])
def test_rows_whose_distances_overflow_are_refused(kernel):
    """Not a NaN for all queries. Queries as far off have the density 0."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 3))
    density = brute(kernel).fit(rows)
    assert (density.score_samples(1e155 * np.eye(3)) == -np.inf).all()
    rows[:100] *= 1e155
    with pytest.raises(ValueError, match="X must lie within 1e.150 bandwidths"):
        density.fit(rows)
    assert np.isfinite(density.fit(1e-150 * rows).kernel_mean(rows[200:])).all()


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian"])
def test_many_features_do_not_add_up_float32s_rounding(kernel):
    rng = np.random.default_rng(0)
    rows, queries = rng.exponential(size=(40, 50_000)), rng.exponential(size=(5, 50_000))
    bandwidth = np.sqrt(50_000) / 3.5 if kernel == "gaussian" else 5000.0
    density = brute(kernel, bandwidth, normalize=False).fit(rows)
    wanted = np.concatenate([log_mean(kernel, q[None], rows, bandwidth) for q in queries])
    assert_close(density.score_samples(queries), wanted)


def test_a_far_row_does_not_take_the_centre_away():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3000, 4))
    alone = log_mean("gaussian", rows[:20], rows)
    rows = np.r_[rows, np.full((1, 4), 1e30)]
    for algorithm in ("brute", "random"):
        density = LSHKernelDensity(algorithm=algorithm, random_state=0, normalize=False).fit(rows)
        assert_close(density.score_samples(rows[:20]), alone, 1e-3 if algorithm == "brute" else 0.6)


@pytest.mark.parametrize("scale", [1e-200, 1e-60, 1e39, 1e300])
def test_only_ratios_of_weights_count(scale):
    rng = np.random.default_rng(0)
    rows, weights = rng.normal(size=(3000, 3)), rng.integers(0, 9, 3000).astype(float)
    for options in (dict(algorithm="brute"), dict(algorithm="random", bandwidth="scott")):
        options |= dict(random_state=0)
        density = LSHKernelDensity(**options).fit(rows, sample_weight=weights)
        other = LSHKernelDensity(**options).fit(rows, sample_weight=scale * weights)
        assert_close(other.score_samples(rows[:9]), density.score_samples(rows[:9]))
        drawn = (x.sample(50, random_state=0) for x in (density, other))
        assert np.allclose(*drawn)


def test_scores_stay_as_rows_are_added():
    """Log-densities in 64 dimensions do not jump as rows are added (scikit-learn #7492)."""
    rng = np.random.default_rng(0)
    rows, query = rng.normal(size=(4000, 64)), rng.normal(size=(5, 64))
    before = None
    for n in (500, 1000, 2000, 4000):
        score = brute(bandwidth=0.8).fit(rows[:n]).score_samples(query)
        assert_close(score, brute(bandwidth=0.8, batch_size=2).fit(rows[:n]).score_samples(query))
        if before is not None:
            assert (score >= before - np.log(2) - 1e-6).all()  # no term is lost, n doubles
        before = score


def test_queries_do_not_depend_on_each_other():
    rng = np.random.default_rng(0)
    rows, queries = rng.normal(size=(9000, 20)), rng.normal(size=(700, 20)) * 3
    density = brute(bandwidth=0.5).fit(rows)
    together = density.score_samples(queries)
    for jobs, size in ((1, 1000), (2, 97)):
        density.set_params(n_jobs=jobs, batch_size=size)
        assert np.array_equal(density.score_samples(queries), together)
    assert np.array_equal(density.score_samples(queries[600:610]), together[600:610])


@pytest.mark.parametrize("rule", ["scott", "silverman"])
def test_bandwidth_rules_are_scipys(rule):
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(60, 1)) * 7 + 3, rng.uniform(0.5, 2, 60)
    query = rng.normal(size=(9, 1)) * 7
    wanted = stats.gaussian_kde(x.T, bw_method=rule, weights=weights).logpdf(query.T)
    density = brute(bandwidth=rule).fit(x, sample_weight=weights)
    assert_close(density.score_samples(query), wanted)
    wide = brute(bandwidth=rule).fit(np.c_[x, 20 * x])
    assert wide.bandwidth_[1] == pytest.approx(20 * wide.bandwidth_[0])


def test_bandwidth_of_each_feature():
    rng = np.random.default_rng(0)
    rows, queries = rng.normal(size=(200, 3)), rng.normal(size=(20, 3))
    widths = np.array([0.5, 2.0, 3.0])
    for kernel in KERNELS[:-1]:
        got = brute(kernel, widths).fit(rows).score_samples(queries)
        same = brute(kernel).fit(rows / widths).score_samples(queries / widths)
        assert_close(got, same - np.log(widths).sum())


def test_parts_make_the_whole_bit_for_bit():
    rng = np.random.default_rng(0)
    rows, queries = rng.normal(size=(500, 6)), rng.normal(size=(40, 6))
    weights = rng.uniform(size=500)
    for bandwidth in (0.8, "scott"):
        whole = brute(bandwidth=bandwidth, random_state=0).fit(rows, sample_weight=weights)
        parts = brute(bandwidth=bandwidth, random_state=0)
        for part in np.array_split(np.arange(500), 3):
            parts.partial_fit(rows[part], sample_weight=weights[part])
        merged = brute(bandwidth=bandwidth).fit(rows[:100], sample_weight=weights[:100])
        other = brute(bandwidth=bandwidth).fit(rows[100:], sample_weight=weights[100:])
        merged.merge(other)
        for density in (parts, merged):
            assert np.array_equal(density.score_samples(queries), whole.score_samples(queries))
            assert density.n_samples_seen_ == 500
            assert np.array_equal(density.bandwidth_, whole.bandwidth_)


def test_rows_of_weight_zero_do_not_count():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(100, 3))
    weights = np.r_[np.ones(60), np.zeros(40)]
    rows[60:] += 50  # near the query alone
    query = np.full((1, 3), 50.0)
    some = brute().fit(rows, sample_weight=weights).score_samples(query)
    assert_close(some, brute().fit(rows[:60]).score_samples(query))


def test_weights_that_float32_does_not_hold():
    """A row of next to no weight takes nothing from the others, even where it is the nearest."""
    rows, query = np.array([[0.0], [20.0], [21.0]]), np.zeros((1, 1))
    got = brute().fit(rows, sample_weight=[1e-300, 1.0, 1.0]).score_samples(query)
    assert_close(got, brute().fit(rows[1:]).score_samples(query))


def test_kernel_mean_and_std():
    rng = np.random.default_rng(0)
    rows, queries = rng.normal(size=(300, 4)), rng.normal(size=(7, 4))
    density = brute("angular", n_bits=5).fit(rows)
    mean, std = density.kernel_mean(queries, return_std=True)
    assert np.allclose(mean, np.exp(log_mean("angular", queries, rows, n_bits=5)), rtol=1e-6)
    assert not std.any()
    with pytest.raises(ValueError, match="kernel_mean"):
        density.score_samples(queries)
    assert np.allclose(density.set_params(normalize=False).score_samples(queries), np.log(mean))


def test_empty_estimates_are_minus_infinity():
    density = brute("tophat").fit(np.zeros((5, 2)))
    score, std = density.score_samples([[3.0, 0.0], [0.5, 0.0]], return_std=True)
    assert score[0] == -np.inf and np.isfinite(score[1])
    assert not std.any()
    assert density.kernel_mean([[3.0, 0.0]])[0] == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kernel", [kernel for kernel in kernels.CODES if kernel != "angular"])
def test_a_far_row_finds_itself(kernel, dtype):
    """However far it is from the others, and whatever 1 / bandwidth rounds to."""
    for power in [15, 17, 19, 25, 37, *([60, 100] if dtype == np.float64 else [])]:
        X = np.random.default_rng(power).normal(size=(300, 8))
        X[:5] *= 10.0**power
        X = X.astype(dtype)
        density = LSHKernelDensity(kernel, 0.7, normalize=False).fit(X)
        np.testing.assert_allclose(density.score_samples(X[:5]), -np.log(300), rtol=1e-6)


@pytest.mark.parametrize("distance", [3, 10, 30, 100])
@pytest.mark.parametrize("d", [3, 32, 33, 300, 1000])
def test_log_kernels_of_the_laplacian_are_within_1e_6(d, distance):
    """Of one row: root mean square, which adding up many features in float32 would exceed."""
    rng = np.random.default_rng(d)
    x, queries = rng.standard_normal((1, d)), rng.standard_normal((200, d))
    scale = distance / np.abs(x - queries).sum(1).mean()
    x, queries = x * scale, queries * scale
    model = LSHKernelDensity("laplacian", rtol=0, normalize=False).fit(x)
    errors = model.score_samples(queries) + np.abs(x - queries).sum(1)
    assert np.sqrt(np.mean(errors**2)) < 1.2e-6 and np.abs(errors).max() < 4e-6


@pytest.mark.parametrize("n_bits", [1, 2, 8])
@pytest.mark.parametrize("angle", [1e-3, 1e-6, 1e-7, 1e-9, 0.0])
def test_angular_queries_nearly_opposite_to_all_rows(angle, n_bits):
    density = LSHKernelDensity("angular", rtol=0, normalize=False, n_bits=n_bits)
    log = density.fit([[1.0, 0, 0]]).score_samples([[-np.cos(angle), np.sin(angle), 0]])[0]
    with np.errstate(divide="ignore"):
        wanted = n_bits * np.log(angle / np.pi)
    assert log == wanted if angle == 0 else np.isclose(log, wanted, rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("algorithm", [name for name in METHODS if name != "bucket_sum"])
@pytest.mark.parametrize("n_features", [3, 65, 1000])
def test_angular_kernels_of_nearly_parallel_rows(n_features, algorithm, sign):
    """Whose cosines float32 rounds by up to their distance from 1: errors were up to 0.04."""
    rng = np.random.default_rng(0)
    X = 1e4 + rng.normal(size=(3000, n_features))
    X[100:200] = X[:100]  # and equal rows, of which float32 makes an angle of 1e-3
    queries = 1e4 + rng.normal(size=(20, n_features))
    queries[:10] = 3 * X[:10]
    if sign < 0:  # 1e-2 of the rows decide
        X[30:] *= -1
    units = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, X)]
    logs = []
    for q in units[0]:
        apart, together = (np.linalg.norm(q + s * units[1], axis=1) for s in (-1, 1))
        with np.errstate(divide="ignore"):
            logs.append(64 * np.log(2 / np.pi * np.arctan2(together, apart)))
    wanted = logsumexp(logs, axis=1) - np.log(len(X))
    density = LSHKernelDensity(
        "angular", n_bits=64, algorithm=algorithm, normalize=False, random_state=0
    )
    got, std = density.fit(X).score_samples(queries, return_std=True)
    rounding = 2e-6 if algorithm == "brute" else 1e-4
    assert (np.abs(got - wanted) < 4 * std + rounding).all()


def test_small_features_beside_a_large_one():
    """Each is rounded the same way where it is added to what is large: 4,000 made 2e-5."""
    rng = np.random.default_rng(0)
    rows, noise = np.zeros((100, 4000)), rng.normal(size=(40, 4000))
    rows[np.arange(100), rng.integers(50, size=100)] = 1
    queries = rows[:40] + 0.01 * noise / np.linalg.norm(noise, axis=1, keepdims=True)
    off = brute("gaussian", normalize=False).fit(rows).score_samples(queries)
    assert np.abs(off - log_mean("gaussian", queries, rows)).max() < 1e-6
    query = np.full((1, 20_000), 5e-8)
    query[0, :16] = 1
    density = brute("laplacian", query.sum(), normalize=False).fit(np.zeros((1, 20_000)))
    assert abs(density.score_samples(query)[0] + 1) < 4e-6

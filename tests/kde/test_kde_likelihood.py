"""Bandwidths by leave-one-out likelihood, against the plain definition and against each other."""

import re

import numpy as np
import pytest
from cases.kde import rows_of
from scipy.special import logsumexp

from lshkit import _C, reference
from lshkit.kde import LSHKernelDensity, kernels, leave_one_out, likelihood_curve
from lshkit.kde.leave_one_out import LeaveOneOut, distinct_rows
from lshkit.kde.likelihood import inclusion_chances

SMOOTH = "gaussian", "exponential", "laplacian"
DENSITIES = (*SMOOTH, *kernels.COMPACT)


def by_definition(kernel, X, bandwidth, weights=None):
    """log f_-i(x_i)."""
    d = X.shape[1]
    log_norm = kernels.log_normalizer(kernel, d) + np.log(np.broadcast_to(bandwidth, d)).sum()
    return reference.leave_one_out(kernel, X, bandwidth, weights) - log_norm


def holding_out_all(X, kernel, weights=None, scale=None):
    scale = np.ones(X.shape[1]) if scale is None else scale
    whole = LeaveOneOut(X, weights, kernel, scale, 1)
    return whole.holding_out(np.arange(len(X)), np.ones(len(X)) if weights is None else weights)


# --- Log-densities ------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", DENSITIES)
@pytest.mark.parametrize(("n", "d"), [(2, 1), (131, 2), (300, 33)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log_densities_are_those_of_the_definition(kernel, n, d, dtype):
    X, weights = rows_of(n, d, dtype=dtype) + dtype(3), np.random.default_rng(1).uniform(0.1, 1, n)
    scale = np.linspace(0.5, 2, d)
    widths = np.array([0.1, 0.7, 2.0, 9.0])
    left_out = holding_out_all(X, kernel, weights, scale)
    got, _ = left_out.log_densities(widths / left_out.unit)
    for column, width in zip(got.T, widths, strict=True):
        wanted = by_definition(kernel, X, width * scale, weights)
        assert np.array_equal(np.isfinite(column), np.isfinite(wanted))
        finite = np.isfinite(wanted)
        # TOLERANCE of a log-density in float32, and 1e-6 of it where it is large.
        assert np.allclose(column[finite], wanted[finite], rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("kernel", SMOOTH)
@pytest.mark.parametrize("noise", [1e-7, 1e-5, 1e-3])
def test_log_densities_of_rows_with_others_next_to_them(kernel, noise):
    """Whose distances, but not their squares, float32 would lose."""
    X = np.repeat(rows_of(20, 2), 3, axis=0)
    X += noise * rows_of(60, 2, seed=1)
    widths = np.array([0.03, 0.3])
    left_out = holding_out_all(X, kernel)
    got, _ = left_out.log_densities(widths / left_out.unit)
    wanted = np.stack([by_definition(kernel, X, width) for width in widths], axis=1)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-4)


def log_densities_without_each_row(X, kernel, bandwidth, step=1):
    """Of every step-th row."""
    others = [np.delete(X, i, axis=0) for i in range(0, len(X), step)]
    fits = [LSHKernelDensity(kernel, bandwidth, algorithm="brute").fit(x) for x in others]
    return np.array([fit.score_samples(x[None])[0] for fit, x in zip(fits, X[::step], strict=True)])


@pytest.mark.parametrize(
    ("kernel", "scale", "dtype"),
    [
        *((kernel, None, np.float64) for kernel in kernels.COMPACT),
        ("tophat", None, np.float32),
        ("tophat", [3.0, 3.0, 3.0], np.float32),
        ("tophat", [0.3, 0.7, 1.1], np.float64),
    ],
)
@pytest.mark.parametrize("step, offset", [(0.1, 0.0), (1 / 3, 7.0), (0.1, -1e5), (1e-145, 0.0)])
def test_kernels_end_where_those_of_densities_end(kernel, scale, step, offset, dtype):
    """On grids, where many rows lie at exactly one bandwidth; log-densities are right to 1e-6."""
    if dtype == np.float32 and step < 1e-30:
        step = dtype(1e-18)
    some = np.random.default_rng(3).permutation(4**3)[:30]
    grid = np.stack(np.unravel_index(some, (4, 4, 4)), axis=1) * (1.0 if scale is None else scale)
    X = (grid * step + offset).astype(dtype)
    X = X[np.unique(X, axis=0, return_index=True)[1]]
    left_out = holding_out_all(X, kernel, scale=np.array(scale or [1.0] * 3))
    for bandwidth in step * np.sqrt([1, 2, 5]):
        got = left_out.log_densities([bandwidth / left_out.unit])[0][::3, 0]
        wanted = log_densities_without_each_row(X, kernel, bandwidth * np.array(scale or 1.0), 3)
        assert np.array_equal(np.isfinite(got), np.isfinite(wanted))
        assert np.allclose(got, wanted, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("kernel", kernels.COMPACT)
def test_curve_is_that_of_densities_on_a_grid(kernel):
    X = 0.1 * np.stack(np.unravel_index(np.arange(9), (3, 3)), axis=1)
    bandwidth = 0.1 * np.sqrt(2)
    curve = likelihood_curve(X, [bandwidth], kernel, n_held_out=None)
    wanted = log_densities_without_each_row(X, kernel, bandwidth)
    assert np.isclose(curve.log_likelihood[0], wanted.mean(), atol=2e-6)


@pytest.mark.filterwarnings("error")
def test_large_features_that_do_not_vary_change_nothing():
    X = 1e-10 * rows_of(50, 2)
    both = [holding_out_all(x, "linear") for x in (X, np.c_[X, np.full(50, 1e300)])]
    assert np.allclose(*(x.nearest() * x.unit for x in both), atol=0)


@pytest.mark.parametrize("kernel", SMOOTH)
def test_slopes_are_derivatives(kernel):
    left_out = holding_out_all(rows_of(200, 5), kernel)
    logs, step = np.log([0.3, 0.8, 2.0]), 1e-2
    low, _ = left_out.log_densities(np.exp(logs - step))
    high, _ = left_out.log_densities(np.exp(logs + step))
    _, slopes = left_out.log_densities(np.exp(logs))
    # Central differences: the third derivative times step^2 / 6, and float32's 1e-6 / step.
    assert np.allclose(slopes, (high - low) / (2 * step), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kernel", ("gaussian", "tophat"))
def test_rows_in_many_parts_and_threads_give_the_same(kernel, monkeypatch):
    X, weights = rows_of(500, 3), np.random.default_rng(1).uniform(size=500)
    widths = np.array([0.2, 1.0])
    whole = holding_out_all(X, kernel, weights).log_densities(widths)
    two = LeaveOneOut(X, weights, kernel, np.ones(3), 2).holding_out(np.arange(500), weights)
    assert np.array_equal(two.log_densities(widths)[0], whole[0])
    monkeypatch.setattr(leave_one_out, "ROWS_AT_ONCE", 77)
    parts = holding_out_all(X, kernel, weights).log_densities(widths)
    for one, other in zip(parts, whole, strict=True):
        assert np.allclose(one, other, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_weights_that_differ_by_30_orders_of_magnitude():
    X, weights = rows_of(60, 2), np.logspace(-30, 0, 60)
    got, _ = (left_out := holding_out_all(X, "gaussian", weights)).log_densities([0.5 / 2])
    wanted = by_definition("gaussian", X, 0.5 / 2 * left_out.unit, weights)
    assert np.allclose(got[:, 0], wanted, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("largest", [1e15, 1e19, 1e30])
def test_one_weight_far_above_all_others(largest):
    """The weight of the other rows is no difference of two sums."""
    X = rows_of(300, 2)
    weights = np.r_[largest, np.ones(299)]
    curve = likelihood_curve(X, [0.4, 0.5], sample_weight=weights, n_held_out=None)
    exponents = -0.5 * ((X[0] - X[1:]) ** 2).sum(1) / 0.25
    wanted = logsumexp(exponents) - np.log(299) - np.log(2 * np.pi * 0.25)
    assert np.isclose(curve.log_likelihood[1], wanted, atol=1e-4)
    assert LSHKernelDensity(bandwidth="likelihood").fit(X, sample_weight=weights).score(X) < 0


@pytest.mark.parametrize("rule", ["likelihood", "neighbors", "scott"])
def test_weights_that_leave_one_row(rule):
    X, weights = rows_of(30, 2), np.r_[1e300, np.ones(29)]
    with pytest.raises(ValueError, match="needs at least 2 rows.*weight"):
        LSHKernelDensity(bandwidth=rule).fit(X, sample_weight=weights)
    with pytest.raises(ValueError, match="2 rows that differ of weights above 1e-37 of the larg"):
        likelihood_curve(X, sample_weight=weights)


def test_core_refuses_arrays_that_do_not_fit():
    X, scales = rows_of(10, 3), np.ones(2)
    arrays = dict(
        kernel=0,
        queries=X,
        own=np.arange(10),
        keys=X,
        weights=None,
        scales=scales,
        nearest=np.empty(10),
        out=np.empty((10, 2, 2)),
    )
    _C.leave_one_out(**arrays)
    for name, bad in (
        ("kernel", 3),
        ("own", np.arange(9)),
        ("keys", X[:, :2].copy()),
        ("keys", X.astype(np.float32)),
        ("weights", np.ones(9)),
        ("scales", np.ones((2, 1))),
        ("nearest", np.empty(9)),
        ("out", np.empty((10, 3, 2))),
    ):
        with pytest.raises((ValueError, TypeError), match=name):
            _C.leave_one_out(**(arrays | {name: bad}))


# --- The curve ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", DENSITIES)
def test_the_best_bandwidth_is_the_maximum(kernel):
    X = rows_of(250, 3)
    curve = likelihood_curve(X, kernel=kernel, n_held_out=None)
    fine = curve.best * np.geomspace(0.8, 1.25, 9 if kernel in kernels.COMPACT else 41)
    values = [by_definition(kernel, X, h).mean() for h in fine]
    # A step of a tophat is found to 1e-3 of the bandwidth, which is 3 of it in the log-likelihood.
    assert curve.best_log_likelihood >= max(values) - (3e-3 if kernel == "tophat" else 1e-6)
    if kernel in SMOOTH:
        assert np.isclose(curve.best_log_likelihood, max(values), atol=1e-5)
        assert np.abs(np.log(curve.best / fine[np.argmax(values)])) < 0.45 / 40 + 1e-3
    wanted = [by_definition(kernel, X, h) for h in curve.bandwidths]
    means = np.mean(wanted, axis=1)
    assert np.allclose(curve.log_likelihood, means, rtol=1e-6, atol=1e-5)
    assert np.allclose(
        curve.standard_error, np.std(wanted, axis=1, ddof=1) / np.sqrt(250), rtol=1e-4
    )
    assert (np.diff(curve.bandwidths) > 0).all() and np.isfinite(curve.log_likelihood).all()
    assert curve.n_held_out == curve.n_distinct == 250


@pytest.mark.filterwarnings("ignore:the likelihood is largest at:UserWarning")
@pytest.mark.parametrize("kernel", kernels.COMPACT)
@pytest.mark.parametrize("name", ["10 x 30", "50 x 5", "integers"])
def test_compact_kernels_have_the_largest_of_their_many_maxima(kernel, name):
    """The likelihood has a corner or a step at every distance between rows."""
    rng, weights = np.random.default_rng(0), None
    if name == "integers":
        X = rng.integers(0, 60, size=(80, 1)).astype(float)
        weights = rng.uniform(0.1, 3, 80)
    else:
        X = rng.normal(size=[int(x) for x in name.split(" x ")])
    options = dict(kernel=kernel, sample_weight=weights, n_held_out=None)
    curve = likelihood_curve(X, **options)
    grid = np.geomspace(curve.bandwidths[0], curve.bandwidths[-1], 400)
    fine = likelihood_curve(X, grid, **options)
    # Found to 1e-3 of the bandwidth, which is so many times that at a step.
    lost = 1e-3 * X.shape[1] if kernel == "tophat" else 1e-4
    assert curve.best_log_likelihood >= fine.best_log_likelihood - lost
    assert (np.diff(curve.bandwidths) > 0).all() and len(curve.bandwidths) < 40
    assert curve.best_log_likelihood == curve.log_likelihood.max()
    if kernel == "tophat":  # largest right after a distance
        distances = np.unique(np.linalg.norm(X[:, None] - X, axis=2))
        steps = distances[distances >= curve.bandwidths[0] * (1 - 1e-5)] * (1 + 1e-6)
        exact = likelihood_curve(X, steps, **options)
        assert curve.best_log_likelihood >= exact.best_log_likelihood - lost
    rule = LSHKernelDensity(kernel, "likelihood", algorithm="brute").fit(X, sample_weight=weights)
    scale = np.full(X.shape[1], rule.bandwidth_)
    reached = likelihood_curve(X, [1.0], scale=scale, **options)
    assert reached.best_log_likelihood >= fine.best_log_likelihood - lost


def test_bandwidths_that_are_given():
    X = rows_of(300, 4)
    curve = likelihood_curve(X, [2.0, 0.1, 0.6, 0.6], n_held_out=None)
    assert np.array_equal(curve.bandwidths, [0.1, 0.6, 2.0])
    assert curve.best == curve.bandwidth == 0.6 and curve.best_log_likelihood == max(
        curve.log_likelihood
    )
    wanted = [by_definition("gaussian", X, h).mean() for h in curve.bandwidths]
    assert np.allclose(curve.log_likelihood, wanted, atol=1e-5)
    for grid, word in (([0.01, 0.1], "larger"), ([3.0, 9.0], "smaller")):
        with pytest.warns(UserWarning, match=f"grows towards {word}"):
            assert np.isnan(likelihood_curve(X, grid).best_standard_error)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("unit", [1e-300, 1e-60, 1e-42, 1e45, 1e300])
def test_the_size_of_weights_does_not_matter(unit):
    X, weights = rows_of(200, 2), np.random.default_rng(1).uniform(0.1, 1, 200)
    one = likelihood_curve(X, sample_weight=weights, n_held_out=100, random_state=0)
    other = likelihood_curve(X, sample_weight=weights * unit, n_held_out=100, random_state=0)
    assert np.isclose(other.best, one.best, rtol=1e-6)
    assert np.allclose(other.log_likelihood, one.log_likelihood, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [None, "std"])
def test_one_row_is_not_enough(scale):
    X = rows_of(20, 2)
    for bad, weights in ((X[:1], None), (X, np.eye(20)[3]), (X, np.r_[1, np.full(19, 1e-50)])):
        with pytest.raises(ValueError, match="at least 2 rows that differ.*, got 1"):
            likelihood_curve(bad, scale=scale, sample_weight=weights)


def test_scales_multiply_bandwidths():
    X, scale = rows_of(200, 3) * [1, 10, 100], np.array([2.0, 9.0, 70.0])
    for given, factors in ((scale, scale), ("std", X.std(axis=0, ddof=1)), (None, np.ones(3))):
        curve = likelihood_curve(X, scale=given, n_held_out=None)
        assert np.allclose(curve.bandwidth, curve.best * factors)
        at = len(curve.bandwidths) // 2
        wanted = by_definition("gaussian", X, curve.bandwidths[at] * factors).mean()
        assert np.isclose(curve.log_likelihood[at], wanted, atol=1e-4)
    assert LSHKernelDensity(bandwidth=curve.bandwidth).fit(X).bandwidth_ == curve.best


def test_equal_rows_are_left_out_together():
    """As rows of weight 2; where all rows come twice a likelihood would grow without bound."""
    X = rows_of(300, 2)
    X[0, 0] = 0.0
    twice = np.concatenate([X, X[:150]])
    twice[300, 0] = -0.0  # equal to 0
    kept, weights = distinct_rows(twice, None)
    assert len(kept) == 300 and weights.sum() == 450
    curve = likelihood_curve(twice, n_held_out=None)
    weighted = likelihood_curve(X, n_held_out=None, sample_weight=np.repeat([2, 1], 150))
    # The cubic between points is right to 1e-4, and windows differ.
    assert np.isclose(curve.best, weighted.best, rtol=1e-4) and curve.n_distinct == 300
    assert np.isclose(curve.best_log_likelihood, weighted.best_log_likelihood)
    repeated = likelihood_curve(np.repeat(X, 3, axis=0), n_held_out=None)
    assert np.isclose(repeated.best, likelihood_curve(X, n_held_out=None).best, rtol=1e-4)
    assert distinct_rows(X, None)[0] is X


def data_sets(n):
    rng = np.random.default_rng(5)
    means = rng.normal(size=(50, 6))
    clusters = means[rng.integers(50, size=n)] + 0.1 * rng.normal(size=(n, 6))
    return {
        "normal": rng.normal(size=(n, 6)),
        "clusters": clusters,
        "duplicates": np.concatenate([clusters[: n // 2], clusters[: n // 4], clusters[: n // 4]]),
        "heavy tails": rng.standard_t(2, size=(n, 3)),
    }


@pytest.mark.parametrize(
    ("name", "weighted"),
    [("normal", False), ("clusters", True), ("duplicates", False), ("heavy tails", True)],
)
def test_samples_agree_with_all_rows_within_the_stated_error(name, weighted):
    X = data_sets(4000)[name]
    weights = np.random.default_rng(1).exponential(size=len(X)) if weighted else None
    options = dict(sample_weight=weights)
    exact = likelihood_curve(X, n_held_out=None, **options)
    curves = [
        likelihood_curve(X, exact.bandwidths, n_held_out=400, random_state=seed, **options)
        for seed in range(40)
    ]
    off = np.array([c.log_likelihood - exact.log_likelihood for c in curves])
    stated = np.sqrt(np.mean([c.standard_error**2 for c in curves], axis=0))
    # Unbiased, up to the ratio's bias of 1 / n; no larger than stated, as errors go over 40 seeds:
    # a standard deviation of them is known to 1 / sqrt(2 * 39), four of those are 0.45.
    assert (np.abs(off.mean(axis=0)) < 4 * stated / np.sqrt(40) + stated / 10).all()
    assert (np.sqrt((off**2).mean(axis=0)) < 1.45 * stated).all()
    best = [likelihood_curve(X, n_held_out=400, random_state=s, **options) for s in range(8)]
    off = np.array([(c.best - exact.best) / c.best_standard_error for c in best])
    assert np.sqrt(np.mean(off**2)) < 2  # four standard errors of eight
    lost = exact.best_log_likelihood - np.interp(
        [c.best for c in best], exact.bandwidths, exact.log_likelihood
    )
    assert lost.max() < 2 * exact.standard_error.max()


def test_far_rows_are_all_held_out():
    """Where one row decides on the bandwidth, a sample has it."""
    X = rows_of(5000, 3)
    X[17] = 1000
    exact = likelihood_curve(X, n_held_out=None)
    for seed in range(5):
        sampled = likelihood_curve(X, n_held_out=300, random_state=seed)
        assert abs(sampled.best / exact.best - 1) < 0.05


@pytest.mark.parametrize("n_clusters", [40, 1000])
@pytest.mark.parametrize("kernel", ["gaussian", "laplacian", "epanechnikov"])
def test_isolated_rows_are_held_out_wherever_they_lie(kernel, n_clusters):
    """Within a sphere of clusters, nearer to the centre than all other rows."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(n_clusters, 5))
    centres *= 5 / np.linalg.norm(centres, axis=1, keepdims=True)
    X = centres[np.arange(5000) % n_clusters] + 0.01 * rng.normal(size=(5000, 5))
    X[:6] = 0.8 * rng.normal(size=(6, 5))
    exact = likelihood_curve(X, kernel=kernel, n_held_out=None)
    for seed in range(8):
        sampled = likelihood_curve(X, kernel=kernel, n_held_out=500, random_state=seed)
        assert abs(sampled.best / exact.best - 1) < 0.05
        assert abs(sampled.best_log_likelihood - exact.best_log_likelihood) < 0.2


@pytest.mark.parametrize("kernel", ["gaussian", "exponential", "laplacian"])
@pytest.mark.parametrize("size", [1e-5, 1e-12])
def test_isolated_rows_of_clusters_that_are_points_in_float32(kernel, size):
    rng = np.random.default_rng(0)
    X = size * rng.normal(size=(3000, 4))
    X[:10] *= 30
    X += rng.choice([-1.0, 1.0], size=(3000, 1))
    exact = likelihood_curve(X, kernel=kernel, n_held_out=None)
    for seed in range(4):
        sampled = likelihood_curve(X, kernel=kernel, n_held_out=400, random_state=seed)
        assert abs(sampled.best / exact.best - 1) < 0.1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("n_heavy", "n_held_out"), [(1, 2), (2, 4), (200, 400), (200, 401)])
def test_weights_that_float64_cannot_add_up(n_heavy, n_held_out):
    X, weights = rows_of(1000, 2), np.full(1000, 1e-30)
    weights[:n_heavy] = 1
    curve = likelihood_curve(X, sample_weight=weights, n_held_out=n_held_out, random_state=0)
    assert curve.n_held_out == n_held_out and np.isfinite(curve.best)


def test_chances_add_up_and_none_is_above_1():
    chances = inclusion_chances(np.array([1.0, 1.0, 2.0, 100.0]), 2)
    assert np.allclose(chances, [0.25, 0.25, 0.5, 1.0])


def test_stated_error_of_the_best_bandwidth_over_new_rows():
    """Of all rows held out: the spread over data sets, four standard errors of it wide."""
    curves = [likelihood_curve(rows_of(400, 5, seed), n_held_out=None) for seed in range(60)]
    ratio = np.std([c.best for c in curves]) / np.median([c.best_standard_error for c in curves])
    # The same rows are summed too, which the error leaves out: it is an order of magnitude.
    assert 0.5 < ratio < 1 + 4 / np.sqrt(120)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kernel", ("gaussian", "laplacian", "epanechnikov"))
def test_curves_do_not_depend_on_units(kernel):
    X = rows_of(200, 3)
    plain = likelihood_curve(X, kernel=kernel, n_held_out=None)
    for unit in (1e150, 1e-150):
        other = likelihood_curve(X * unit, kernel=kernel, n_held_out=None)
        assert np.isclose(other.best / unit, plain.best, rtol=1e-4)
        log_unit = 3 * np.log(unit)
        assert np.isclose(other.best_log_likelihood + log_unit, plain.best_log_likelihood)
    moved = likelihood_curve(X + 1e6, kernel=kernel, n_held_out=None)
    assert np.isclose(moved.best, plain.best, rtol=1e-4)


@pytest.mark.filterwarnings("error")
def test_one_row_far_off():
    X = rows_of(300, 3)
    X[0] = 1e25  # its squares leave float32
    for kernel in SMOOTH:
        curve = likelihood_curve(X, kernel=kernel)
        assert np.isfinite(curve.log_likelihood).all() and 0 < curve.best < 1e25


def test_rows_that_all_have_others_next_to_them():
    X = rows_of(100, 2)
    X = np.concatenate([X, X + 1e-7])
    curve = likelihood_curve(X, n_held_out=None)
    assert 1e-8 < curve.best < 1e-6  # the maximum, narrow as it is
    wide = np.concatenate([X, X + 1e-200, [[0, 0], [0, 1e-200]]])
    assert np.isfinite(likelihood_curve(wide, n_held_out=None).log_likelihood).all()


def test_compact_kernels_need_a_row_within_the_bandwidth():
    X = rows_of(200, 2)
    isolated = holding_out_all(X, "tophat")
    farthest = isolated.nearest().max() * isolated.unit
    grid = [0.5 * farthest, 1.1 * farthest]
    with pytest.warns(UserWarning, match="larger"):
        curve = likelihood_curve(X, grid, "epanechnikov", n_held_out=None)
    assert curve.log_likelihood[0] == -np.inf and curve.best == grid[1]
    with pytest.raises(ValueError, match=re.escape(f"above {float(farthest)!r}")):
        likelihood_curve(X, grid[:1], "linear", n_held_out=None)
    # The bandwidth that the message names is the least that has a density, to the last digit.
    with pytest.raises(ValueError, match="bandwidths must be above"):
        likelihood_curve(X, [np.nextafter(farthest, 0)], "tophat", n_held_out=None)
    above = [farthest * (1 + 1e-12)]
    assert np.isfinite(likelihood_curve(X, above, "tophat", n_held_out=None).log_likelihood).all()


def test_bad_arguments():
    X = rows_of(20, 2)
    for options, message in (
        (dict(kernel="angular"), "angular"),
        (dict(kernel="box"), "kernel must be one of"),
        (dict(n_jobs=0), "n_jobs must be None or a nonzero 32-bit integer, got 0"),
        (dict(bandwidths=[]), "bandwidths must have shape"),
        (dict(bandwidths=[[1.0]]), "bandwidths must have shape"),
        (dict(bandwidths=[1.0, 0.0]), "bandwidths must be finite and > 0"),
        (dict(bandwidths=[np.nan]), "bandwidths must be finite"),
        (dict(bandwidths=[1e-155]), "larger: at 1e-155 log-likelihoods are below float64"),
        (dict(scale="iqr"), "scale"),
        (dict(scale=[1.0]), "scale must have shape"),
        (dict(scale=[1.0, -1.0]), "scale must be finite and > 0"),
        (dict(n_held_out=1), "n_held_out"),
        (dict(sample_weight=-np.ones(20)), "sample_weight"),
        (dict(sample_weight=np.ones(3)), "sample_weight"),
        (dict(sample_weight=np.eye(20)[0]), "2 rows that differ"),
    ):
        with pytest.raises(ValueError, match=message):
            likelihood_curve(X, **options)
    for bad, message in (
        (np.ones((9, 2)), "2 rows that differ"),
        (X * np.nan, "NaN"),
        (X[0], r"X must be \(n, n_features\), got shape \(2,\)"),
        (np.r_[X, [[1e200, 0]]], "1e.150"),
    ):
        with pytest.raises(ValueError, match=message):
            likelihood_curve(bad)
    with pytest.raises(ValueError, match="feature 1 does not"):
        likelihood_curve(X * [1, 0], scale="std")
    with pytest.raises(TypeError, match="bandwidths"):
        likelihood_curve(X, ["wide"])


def test_torch_tensors_are_rows_too():
    torch = pytest.importorskip("torch")
    X = rows_of(50, 2)
    curves = [likelihood_curve(x, random_state=0) for x in (X, torch.from_numpy(X))]
    assert curves[0].best == curves[1].best


def test_plot():
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot as plt

    curve = likelihood_curve(rows_of(50, 2))
    axes = curve.plot()
    assert axes is plt.gca() and axes.get_xscale() == "log"
    assert curve.plot(plt.figure().subplots()) is not axes
    plt.close("all")

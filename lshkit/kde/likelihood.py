"""The rule bandwidth="likelihood": where the leave-one-out likelihood has its maximum."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import CubicHermiteSpline

from lshkit.kde import kernels
from lshkit.kde.deviations import standard_deviations
from lshkit.kde.isolation import isolation
from lshkit.kde.leave_one_out import LeaveOneOut, distinct_rows

HELD_OUT = 2048  # rows, unless asked otherwise
FIRST = 256  # of them, which find where the maximum is
RATIO = 1.3  # of bandwidths that are looked at first
BRACKET, POINTS = 1.5, 9  # then from maximum / BRACKET to maximum * BRACKET
WIDE = 17  # points of a curve from the least to the largest bandwidth that can be a maximum
BESIDE = 2.0  # such a curve goes so far beside that bracket at least
LEAST_BANDWIDTH = 1e-10  # of the largest
MOST_MOVES = 200  # of that bracket
# Compact kernels have no slopes: their maximum is searched to FINE of the bandwidth, with so many
# bandwidths at a time as keep to PAIRS terms.
FINE, PAIRS, LEAST_POINTS, MOST_POINTS = 1e-3, 2**24, 6, 2000


def of_largest_likelihood(
    kernel: str, X: np.ndarray, weights: np.ndarray | None, seed: int, threads: int
) -> np.ndarray:
    """The rule "likelihood": bandwidths `(n_features,)` for rows that are checked.

    One number for all features, or one number times each feature's standard deviation: what has
    the larger likelihood.
    """
    scales, deviations = [np.ones(X.shape[1])], standard_deviations(X, weights)
    rows, weights = distinct_rows(X, weights)
    with np.errstate(over="ignore", divide="ignore"):
        if X.shape[1] > 1 and (deviations > 0).all() and np.isfinite(1 / deviations).all():
            scales.append(deviations)
    candidates = [LeaveOneOut(rows, weights, kernel, scale, threads) for scale in scales]
    candidates = holding_out(candidates, HELD_OUT, seed)
    # First looks do not tell which is larger: one far row may decide, and they sample rows.
    maxima = [maximum(around_maximum(x, first_look(x)), kernel) for x in candidates]
    which = int(np.argmax([likelihood for _, _, likelihood in maxima]))
    return maxima[which][0] * candidates[which].unit * scales[which]


# --- Rows held out ------------------------------------------------------------------------------


def holding_out(
    candidates: Sequence[LeaveOneOut], n_held_out: int | None, seed: int
) -> list[LeaveOneOut]:
    """The candidates, all leaving out the same rows: a sample in random order, or all.

    Half of it is sampled by weight, half by weight times `isolation`: rows far from all others, of
    which a few may decide on the bandwidth, are all there. A row counts its weight over its chance.
    """
    X, weights = candidates[0].X, candidates[0].weights
    n = len(X)
    order = np.random.default_rng([seed, 4]).permutation(n)
    weights = np.ones(n) if weights is None else weights
    if n_held_out is None or n_held_out >= n:
        return [x.holding_out(order, weights[order]) for x in candidates]
    rng = np.random.default_rng([seed, 5])
    chances = inclusion_chances(weights, n_held_out / 2)
    for x in candidates:
        sizes = weights * (1e-12 + isolation(x, rng))
        chances += inclusion_chances(sizes, n_held_out / 2 / len(candidates))
    # Weights may differ by more than float64's digits, and chances be 0 that must not all be.
    chances = np.minimum(chances, 1) + 1e-20 * weights / weights.max()
    chances = inclusion_chances(chances, n_held_out)
    drawn = rng.permutation(sample(chances, order, rng))
    return [x.holding_out(drawn, weights[drawn] / chances[drawn]) for x in candidates]


def sample(chances: np.ndarray, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Places drawn systematically, in an order, with chances that add up to their number."""
    steps = np.cumsum(chances[order])
    count = round(steps[-1])
    marks = (rng.uniform() + np.arange(count)) * (steps[-1] / count)
    return np.unique(order[np.minimum(np.searchsorted(steps, marks, side="right"), len(order) - 1)])


def inclusion_chances(sizes: np.ndarray, count: float) -> np.ndarray:
    """min(1, c * sizes) that add up to count."""
    chances, certain = np.zeros(len(sizes)), np.zeros(len(sizes), bool)
    while True:
        rest = sizes[~certain].sum()
        chances = np.where(certain, 1.0, sizes * ((count - certain.sum()) / rest))
        more = (chances >= 1) & ~certain
        if not more.any():
            return chances
        certain |= more


# --- The maximum --------------------------------------------------------------------------------


def at_bandwidths(left_out: LeaveOneOut, bandwidths: ArrayLike) -> list[np.ndarray]:
    """Bandwidths, mean log-likelihoods and their standard errors, slopes and theirs."""
    values, slopes = left_out.log_densities(bandwidths)
    return [np.asarray(bandwidths), *left_out.mean(values), *left_out.mean(slopes)]


def _bounds(left_out: LeaveOneOut) -> tuple[float, float]:
    """The least and largest bandwidth that can be a maximum.

    Where the slope is 0, a mean over the rows of a weighted mean of exponents r^2 / h^2 (gaussian)
    or r / h is the number of features d. The weights fall with the distance r: the mean lies
    between the nearest row's and the plain mean over all rows, which moments bound. (Kernels that
    end: every row needs another one within h; the other bound is that of the gaussian kernel of
    about the same variance.)
    """
    n, d = left_out.X.shape
    nearest = left_out.nearest()
    variance = left_out.variance()
    root_mean_square = math.sqrt(2 * variance.sum())
    if left_out.kernel in kernels.COMPACT:
        low = (1 + 1e-6) * nearest.max()
        return low, max(2 * low, 1.25 * math.sqrt((d + 4) / d) * root_mean_square)
    if left_out.kernel == "gaussian":
        low = math.sqrt(left_out.mean(nearest**2)[0] / d)
        high = root_mean_square / math.sqrt(d)
    else:
        low = left_out.mean(nearest)[0] / d
        high = root_mean_square / d
        if left_out.kernel == "laplacian":
            high = float(np.sqrt(2 * variance).sum()) / d
    high *= n / (n - 1)
    low = max(low, LEAST_BANDWIDTH * high)  # where all rows have others next to them
    return low, max(1.001 * low, high)


def first_look(left_out: LeaveOneOut) -> tuple[float, float]:
    """About where the maximum is and how large, from some of the rows held out."""
    if left_out.kernel not in kernels.COMPACT:
        left_out = left_out.holding_out(left_out.held_out[:FIRST], left_out.counts[:FIRST])
    low, high = _bounds(left_out)
    span = math.log(high / low)
    points = max(5, math.ceil(span / math.log(RATIO)) + 1)
    if left_out.kernel in kernels.COMPACT:
        points = max(points, min(_points(left_out), math.ceil(span / FINE)))
    found = at_bandwidths(left_out, np.geomspace(low, high, points))
    best, _, likelihood = maximum(found, left_out.kernel)
    return best, likelihood


def around_maximum(left_out: LeaveOneOut, look: tuple[float, float]) -> list[np.ndarray]:
    """`at_bandwidths` around the maximum: the bracket moves until the maximum is inside."""
    best, _ = look
    least = _bounds(left_out)[0] if left_out.kernel in kernels.COMPACT else 0.0
    for _ in range(MOST_MOVES):
        bracket = np.geomspace(max(best / BRACKET, least), best * BRACKET, POINTS)
        found = at_bandwidths(left_out, bracket)
        at = int(np.argmax(found[1]))
        # Kernels that end may have theirs at the least bandwidth of all.
        below = at == 0 and bracket[0] > least and not found[3][0] > 0
        above = at == POINTS - 1 and not found[3][-1] < 0
        if not (below or above):
            break
        best = bracket[at]
    if left_out.kernel in kernels.COMPACT:
        return with_maximum(left_out, found, look[0])
    return found


def with_maximum(left_out: LeaveOneOut, found: list[np.ndarray], look: float) -> list[np.ndarray]:
    """`at_bandwidths` and there also the maximum, of compact kernels.

    Their curve has a corner or a step at every distance, so that few rows give many maxima: first
    looks are as fine as is cheap, and what they found is looked at again.
    """
    points = _points(left_out)
    finer = joined(found, at_bandwidths(left_out, [look]))
    while True:
        at = int(np.argmax(finer[1]))
        low, high = finer[0][max(at - 1, 0)], finer[0][min(at + 1, len(finer[0]) - 1)]
        if high <= low * (1 + 2 * FINE):
            return joined(found, [values[[at]] for values in finer])
        between = np.geomspace(low, high, points + 2)[1:-1]
        finer = joined(finer, at_bandwidths(left_out, between))


def _points(left_out: LeaveOneOut) -> int:
    pairs = len(left_out.held_out) * len(left_out.X)
    return min(max(PAIRS // pairs, LEAST_POINTS), MOST_POINTS)


def joined(found: list[np.ndarray], more: list[np.ndarray]) -> list[np.ndarray]:
    """Two of `at_bandwidths` in the order of bandwidths, each once."""
    both = [np.concatenate(pair) for pair in zip(found, more, strict=True)]
    _, order = np.unique(both[0], return_index=True)
    return [values[order] for values in both]


def beside(left_out: LeaveOneOut, bracket: np.ndarray) -> np.ndarray:
    """Bandwidths around a bracket, as far as a maximum could be and to BESIDE times its ends."""
    low, high = _bounds(left_out)
    if left_out.kernel not in kernels.COMPACT:  # 0 below
        low = min(low, bracket[0] / BESIDE)
    wide = np.geomspace(low, max(high, bracket[-1] * BESIDE), WIDE)
    return wide[(wide < bracket[0] / 1.01) | (wide > bracket[-1] * 1.01)]


def maximum(found: list[np.ndarray], kernel: str) -> tuple[float, float, float]:
    """The maximum of the curve through the points and their slopes, its standard error, its value.

    The curve is a cubic in log h between points.
    """
    bandwidths, values, _, slopes, slope_errors = found
    at = int(np.argmax(values))
    if kernel in kernels.COMPACT or len(bandwidths) == 1:
        return float(bandwidths[at]), math.nan, float(values[at])
    logs = np.log(bandwidths)
    curve = CubicHermiteSpline(logs, values, slopes)
    roots = curve.derivative().roots(extrapolate=False)
    roots = roots[np.isfinite(roots)]
    candidates = np.concatenate([roots, logs[[0, -1]]])
    log_best = candidates[np.argmax(curve(candidates))]
    curvature = -float(curve(log_best, 2))
    inside = logs[0] < log_best < logs[-1] and curvature > 0
    error = np.interp(log_best, logs, slope_errors) / curvature if inside else math.nan
    best = math.exp(log_best)
    return best, best * float(error), float(curve(log_best))

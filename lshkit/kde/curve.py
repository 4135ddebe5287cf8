"""The leave-one-out likelihood of a density as a curve over bandwidths."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import TYPE_CHECKING

import numpy as np
from joblib import effective_n_jobs
from numpy.typing import ArrayLike
from sklearn.utils import check_array

from lshkit import checks
from lshkit.kde import kernels
from lshkit.kde.arguments import as_weights, check_n_jobs, detached_rows, of_unit_size, random_of
from lshkit.kde.deviations import standard_deviations
from lshkit.kde.leave_one_out import LeaveOneOut, distinct_rows
from lshkit.kde.likelihood import (
    HELD_OUT,
    around_maximum,
    at_bandwidths,
    beside,
    first_look,
    holding_out,
    joined,
    maximum,
)
from lshkit.kde.training import LEAST
from lshkit.typing import RandomState, Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True, eq=False)
class LikelihoodCurve:
    """Leave-one-out log-likelihood per row at many bandwidths: what `likelihood_curve` returns.

    Attributes
    ----------
    bandwidths : float64 array `(n_bandwidths,)`, ascending
        Multiples of `scale`.
    log_likelihood : float64 array `(n_bandwidths,)`
        Weighted mean over the rows held out, in nats, of the log-density, in the units of X, that
        all other rows give to a row. -inf where some row has none.
    standard_error : float64 array `(n_bandwidths,)`
        Standard error of `log_likelihood` as a mean over the population of the rows.
    best : float
        The bandwidth of the largest log-likelihood, a multiple of `scale`: one of those that were
        given, or else the maximum of the curve through all points and their slopes (of a finer
        grid, for compact kernels).
    best_standard_error : float
        Standard error of `best`, from the spread of the rows' slopes and the curvature; NaN where
        bandwidths were given, and for compact kernels.
    best_log_likelihood : float
    scale : float64 array `(n_features,)` or None
        What bandwidths multiply, None: 1 for every feature.
    kernel : str
    n_held_out, n_distinct : int
        Rows that were left out in turn, and rows that differ from each other.
    """

    bandwidths: np.ndarray
    log_likelihood: np.ndarray
    standard_error: np.ndarray
    best: float
    best_standard_error: float
    best_log_likelihood: float
    scale: np.ndarray | None
    kernel: str
    n_held_out: int
    n_distinct: int

    @property
    def bandwidth(self) -> float | np.ndarray:
        """The best bandwidth as `LSHKernelDensity` takes it: a float, or `(n_features,)`."""
        return self.best if self.scale is None else self.best * self.scale

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the curve with a band of two standard errors and its maximum; returns the axes.

        ax: of matplotlib, the current ones by default. ImportError without matplotlib.
        """
        if ax is None:
            try:
                from matplotlib import pyplot as plt
            except ImportError as error:
                raise ImportError(
                    f"plot needs matplotlib: pip install matplotlib ({error})", name="matplotlib"
                ) from error
            ax = plt.gca()
        finite = np.isfinite(self.log_likelihood)
        shown = self.bandwidths, self.log_likelihood, self.standard_error
        x, y, error = (values[finite] for values in shown)
        (line,) = ax.plot(x, y, ".-", ms=4, lw=1.2, label=self.kernel)
        ax.fill_between(x, y - 2 * error, y + 2 * error, color=line.get_color(), alpha=0.2, lw=0)
        ax.plot(self.best, self.best_log_likelihood, "o", ms=7, mfc="none", color=line.get_color())
        ax.set(xscale="log", xlabel="bandwidth", ylabel="leave-one-out log-likelihood per row")
        return ax


def likelihood_curve(
    X: Rows,
    bandwidths: ArrayLike | None = None,
    kernel: str = "gaussian",
    *,
    scale: str | ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
    n_held_out: int | None = HELD_OUT,
    random_state: RandomState = None,
    n_jobs: int | None = None,
) -> LikelihoodCurve:
    """Leave-one-out log-likelihood of a kernel density at many bandwidths, in one pass.

    Row i is scored with the density of all other rows (Duin 1976; Habbema, Hermans and van den
    Broek 1974), at every bandwidth from the same distances. Rows that are equal are left out
    together.

    Parameters
    ----------
    X : array or tensor `(n_samples, n_features)`, float32 or float64
    bandwidths : array `(n_bandwidths,)`, optional
        By default the curve spans all bandwidths that can be a maximum (a bound from the distances
        of nearest rows and of all), with more points around the maximum, which is refined.
    kernel : str
        Of the density, as in `LSHKernelDensity`: "gaussian", "exponential", "laplacian", or one
        that is 0 from r = 1 on ("tophat", "epanechnikov", "linear", "cosine"), under which a row
        without others within the bandwidth makes the likelihood 0. Not "angular", which has no
        density in R^d and no bandwidth.
    scale : None, "std" or array `(n_features,)`
        What bandwidths multiply: 1, every feature's standard deviation, or numbers > 0.
    sample_weight : array `(n_samples,)`, >= 0, optional
    n_held_out : int or None
        Rows that are held out: a random sample of so many (isolated rows more often, and counted
        less), None all. The sums always contain all other rows: a sample of those would move the
        maximum.
    random_state : None, int or RandomState
        Of the rows that are held out; an int makes results reproducible.
    n_jobs : int, optional
        Threads, as in joblib: None is 1, -1 all. Results do not depend on it.

    Returns
    -------
    LikelihoodCurve

    Raises
    ------
    ValueError
        For fewer than two rows that differ, and where every bandwidth has the likelihood 0: under
        kernels that are 0 from r = 1 on (the message names the least bandwidth that has not), and
        for bandwidths so small that no log-likelihood is within float64.

    Warns
    -----
    UserWarning
        If the likelihood still grows at the least or largest of the given bandwidths.

    Examples
    --------
    >>> import numpy as np
    >>> from lshkit.kde import LSHKernelDensity, likelihood_curve
    >>> X = np.random.default_rng(0).normal(size=(2000, 8))
    >>> curve = likelihood_curve(X, random_state=0)
    >>> density = LSHKernelDensity(bandwidth=curve.bandwidth).fit(X)
    """
    checks.choice("kernel", kernel, kernels.CODES)
    if kernel == "angular":
        raise ValueError(
            "kernel must not be 'angular': it has no density in R^d and no bandwidth (n_bits is "
            "its width)"
        )
    X = detached_rows("X", X)
    X = check_array(X, order="C", dtype=[np.float64, np.float32], input_name="X")
    weights = of_unit_size(as_weights(sample_weight, len(X)))
    if bandwidths is not None:
        bandwidths = _checked("bandwidths", bandwidths, None)
        bandwidths = np.unique(bandwidths)
    if n_held_out is not None:
        n_held_out = checks.integer("n_held_out", n_held_out, 2)
    rows, totals = distinct_rows(X, weights)
    if len(rows) < 2:
        few = weights is not None and weights.min() < LEAST * weights.max()
        less = f" of weights above {LEAST:g} of the largest" if few else ""
        raise ValueError(f"X must have at least 2 rows that differ{less}, got {len(rows)}")
    if scale is None:
        factors = np.ones(X.shape[1])
    elif isinstance(scale, str):
        if scale != "std":
            raise ValueError(f"scale must be None, 'std' or an array of numbers, got {scale!r}")
        factors = standard_deviations(X, weights)
        if not (factors > 0).all():
            feature = int(np.flatnonzero(~(factors > 0))[0])
            raise ValueError(f"scale='std' needs features that vary, feature {feature} does not")
    else:
        factors = _checked("scale", scale, X.shape[1])
    check_n_jobs(n_jobs)
    seed = random_of(random_state).randint(2**31 - 1)
    left_out = LeaveOneOut(rows, totals, kernel, factors, effective_n_jobs(n_jobs))
    (left_out,) = holding_out([left_out], n_held_out, seed)
    if bandwidths is None:
        found = around_maximum(left_out, first_look(left_out))
        wide = beside(left_out, found[0])
        if len(wide):
            found = joined(found, at_bandwidths(left_out, wide))
        best, error, likelihood = maximum(found, kernel)
    else:
        found = at_bandwidths(left_out, bandwidths / left_out.unit)
        best, error, likelihood = _best_given(found, left_out)
    return LikelihoodCurve(
        bandwidths=found[0] * left_out.unit,
        log_likelihood=found[1],
        standard_error=found[2],
        best=best * left_out.unit,
        best_standard_error=error * left_out.unit,
        best_log_likelihood=likelihood,
        scale=None if scale is None else factors,
        kernel=kernel,
        n_held_out=len(left_out.held_out),
        n_distinct=len(rows),
    )


def _checked(name: str, values: ArrayLike, size: int | None) -> np.ndarray:
    values = np.asarray(checks.array(name, values), np.float64)
    shape = "(n_bandwidths,)" if size is None else f"({size},)"
    if values.ndim != 1 or len(values) == 0 or (size is not None and len(values) != size):
        raise ValueError(f"{name} must have shape {shape}, got {values.shape}")
    if not (np.isfinite(values) & (values >= np.finfo(np.float64).tiny)).all():
        raise ValueError(f"{name} must be finite and > 0, got {values}")
    return values


def _best_given(found: list[np.ndarray], left_out: LeaveOneOut) -> tuple[float, float, float]:
    bandwidths, values, _, slopes, _ = found
    if not (values > -np.inf).any():
        largest = bandwidths[-1] * left_out.unit
        if left_out.kernel not in kernels.COMPACT:
            raise ValueError(
                f"bandwidths must be larger: at {largest:.6g} log-likelihoods are below float64"
            )
        least = float(left_out.nearest().max() * left_out.unit)
        raise ValueError(
            f"bandwidths must be above {least!r}, the distance of the most isolated row from the "
            f"others, for the kernel {left_out.kernel!r}: its density is 0 at {float(largest)!r}"
        )
    at = int(np.argmax(values))
    ends = (at == 0, "smaller", not slopes[0] >= 0), (at == len(values) - 1, "larger", True)
    if left_out.kernel not in kernels.COMPACT:
        ends = ends[0], (ends[1][0], "larger", not slopes[-1] <= 0)
    for is_end, word, grows in ends:
        if is_end and grows and len(values) > 1:
            warnings.warn(
                f"the likelihood is largest at {bandwidths[at] * left_out.unit:.6g}, an end of "
                f"bandwidths, and grows towards {word} ones",
                stacklevel=checks.outside(),
            )
    return float(bandwidths[at]), math.nan, float(values[at])

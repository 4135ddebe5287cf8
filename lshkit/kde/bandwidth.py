"""Bandwidths: checked numbers, or rules that see the scale of the data."""

import numbers

import numpy as np
from numpy.typing import ArrayLike

from lshkit import checks
from lshkit.kde.deviations import effective_rows, standard_deviations
from lshkit.kde.likelihood import of_largest_likelihood
from lshkit.kde.neighbors import of_neighbors
from lshkit.kde.training import LEAST

RULES = ("scott", "silverman", "likelihood", "neighbors")


def check(
    bandwidth: float | str | ArrayLike,
    n_features: int,
    kernel: str,
    supported: tuple[str, ...] = RULES,
) -> str | np.ndarray:
    """bandwidth as a rule's name or as of `check_widths`, or a ValueError.

    supported: the rules that an error about a name lists.
    """
    if isinstance(bandwidth, str):
        if bandwidth not in RULES:
            *others, last = map(repr, supported)
            raise ValueError(
                f"bandwidth must be a number > 0, one for each feature, {', '.join(others)} or "
                f"{last}, got {bandwidth!r}"
            )
        if kernel == "angular":
            raise ValueError("bandwidth must be 1.0 for the angular kernel: n_bits is its width")
        return bandwidth
    return check_widths(bandwidth, n_features, kernel)


def check_widths(bandwidth: float | ArrayLike, n_features: int, kernel: str) -> np.ndarray:
    """Numbers as a float64 array `(n_features,)`, or a ValueError."""
    if isinstance(bandwidth, numbers.Real) and not isinstance(bandwidth, bool):
        widths = np.full(n_features, checks.real(bandwidth))
    else:
        found = checks.array("bandwidth", bandwidth, kinds="fiuO")
        checks.refuse_words("bandwidth", bandwidth, found)
        try:
            widths = found.astype(np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"bandwidth must hold real numbers: {error}") from None
        if widths.ndim == 0:
            widths = np.full(n_features, float(widths))
        if widths.shape != (n_features,):
            raise ValueError(
                f"bandwidth must be one number or one for each of the {n_features} features, "
                f"got shape {widths.shape}"
            )
    least = np.finfo(np.float64).tiny  # below, 1 / bandwidth overflows
    if not (np.isfinite(widths).all() and (widths >= least).all()):
        raise ValueError(
            f"bandwidth must be finite and > 0 (at least {least:.2g}), got "
            f"{checks.shown(bandwidth)}"
        )
    if kernel == "angular" and not (widths == 1).all():
        raise ValueError(
            f"bandwidth must be 1.0 for the angular kernel (n_bits is its width), got {bandwidth!r}"
        )
    return widths


def check_rows(name: str, X: np.ndarray, weights: np.ndarray | None) -> None:
    """ValueError where a rule cannot give bandwidths for rows."""
    if name == "neighbors":
        check_effective_rows(name, X, weights)
        return
    if name != "likelihood":
        of_deviations(name, X, weights)
        return
    counted, less = X, ""
    if weights is not None and weights.min() < LEAST * weights.max():
        counted = X[weights >= LEAST * weights.max()]
        less = f"; weights below {LEAST:g} of the largest do not count"
    if not (counted != counted[0]).any():
        raise ValueError(
            f"bandwidth='likelihood' needs at least 2 rows that differ (n_samples = {len(X)}{less})"
        )


def check_effective_rows(name: str, X: np.ndarray, weights: np.ndarray | None) -> float:
    """Kish's W^2 / sum w^2; ValueError where that is one row."""
    effective = effective_rows(X, weights)
    if effective <= 1 + 1e-9:
        less = ", and one weight is far above all others" if len(X) > 1 else ""
        raise ValueError(f"bandwidth={name!r} needs at least 2 rows (n_samples = {len(X)}{less})")
    return effective


def rule(
    name: str,
    kernel: str,
    X: np.ndarray,
    weights: np.ndarray | None,
    seed: int,
    threads: int,
    sketch: bool = False,
) -> np.ndarray:
    """The rule's bandwidths, float64 `(n_features,)`; ValueError as `check_rows`."""
    if name in ("scott", "silverman"):
        return of_deviations(name, X, weights)
    check_rows(name, X, weights)
    if name == "neighbors":
        return of_neighbors(kernel, X, weights, sketch)
    return of_largest_likelihood(kernel, X, weights, seed, threads)


def of_deviations(name: str, X: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Scott's or Silverman's factor times the standard deviation of every feature.

    scipy.stats.gaussian_kde's factors and weighting, of the diagonal of its covariance: equal to it
    in one dimension. With W the sum of the weights, n = W^2 / sum w^2 and d the features,
    n^(-1 / (d + 4)), for Silverman times (4 / (d + 2))^(1 / (d + 4)). (scikit-learn's rules leave
    the standard deviation out.)
    """
    d, effective = X.shape[1], check_effective_rows(name, X, weights)
    deviations = standard_deviations(X, weights)
    if not (deviations > 0).all():
        feature = int(np.flatnonzero(~(deviations > 0))[0])
        raise ValueError(f"bandwidth={name!r} needs features that vary, feature {feature} does not")
    factor = effective ** (-1 / (d + 4))
    if name == "silverman":
        factor *= (4 / (d + 2)) ** (1 / (d + 4))
    return factor * deviations

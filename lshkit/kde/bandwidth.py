"""Bandwidths: checked numbers, or rules that see the scale of the data."""

import numbers

import numpy as np

RULES = ("scott", "silverman")


def check(bandwidth, n_features, kernel):
    """bandwidth as a rule's name or a float64 array `(n_features,)`, or a ValueError."""
    if isinstance(bandwidth, str):
        if bandwidth not in RULES:
            raise ValueError(
                f"bandwidth must be a number > 0, one for each feature, 'scott' or 'silverman', "
                f"got {bandwidth!r}"
            )
        if kernel == "angular":
            raise ValueError("bandwidth must be 1.0 for the angular kernel: n_bits is its width")
        return bandwidth
    if isinstance(bandwidth, numbers.Real) and not isinstance(bandwidth, bool):
        widths = np.full(n_features, float(bandwidth))
    else:
        try:
            widths = np.asarray(bandwidth, np.float64)
        except (TypeError, ValueError):
            raise TypeError(
                f"bandwidth must be a number, an array of numbers or a rule, got {bandwidth!r}"
            ) from None
        if widths.ndim == 0 and not isinstance(bandwidth, bool):
            widths = np.full(n_features, float(widths))
        if widths.shape != (n_features,):
            raise ValueError(
                f"bandwidth must be one number or one for each of the {n_features} features, "
                f"got shape {widths.shape}"
            )
    least = np.finfo(np.float64).tiny  # below, 1 / bandwidth overflows
    if not (np.isfinite(widths).all() and (widths >= least).all()):
        raise ValueError(
            f"bandwidth must be finite and > 0 (at least {least:.2g}), got {bandwidth!r}"
        )
    if kernel == "angular" and not (widths == 1).all():
        raise ValueError(
            f"bandwidth must be 1.0 for the angular kernel (n_bits is its width), got {bandwidth!r}"
        )
    return widths


def rule(name, X, weights=None):
    """Scott's or Silverman's factor times the standard deviation of every feature.

    scipy.stats.gaussian_kde's factors and weighting, of the diagonal of its covariance: equal to it
    in one dimension. With W the sum of the weights, n = W^2 / sum w^2 and d the features,
    n^(-1 / (d + 4)), for Silverman times (4 / (d + 2))^(1 / (d + 4)). (scikit-learn's rules leave
    the standard deviation out.)
    """
    d = X.shape[1]
    shares = np.full(len(X), 1 / len(X)) if weights is None else weights / weights.sum()
    effective = 1 / np.sum(shares**2)
    if effective <= 1 + 1e-9:
        raise ValueError(f"bandwidth={name!r} needs at least 2 rows (n_samples = {len(X)})")
    # In units in which the squares of float64 neither overflow nor underflow.
    units = np.frexp(np.maximum(X.max(axis=0), -X.min(axis=0)).astype(np.float64))[1]
    mean, variance = np.zeros(d), np.zeros(d)
    parts = [slice(first, first + 8192) for first in range(0, len(X), 8192)]
    for part in parts:
        mean += shares[part] @ np.ldexp(X[part].astype(np.float64), -units)
    for part in parts:
        deviations = np.ldexp(X[part].astype(np.float64), -units) - mean
        variance += shares[part] @ deviations**2
    variance /= 1 - 1 / effective
    counted = X if weights is None else X[weights > 0]
    constant = (variance <= 0) | (counted == counted[0]).all(axis=0)
    if constant.any():
        feature = int(np.flatnonzero(constant)[0])
        raise ValueError(f"bandwidth={name!r} needs features that vary, feature {feature} does not")
    factor = effective ** (-1 / (d + 4))
    if name == "silverman":
        factor *= (4 / (d + 2)) ** (1 / (d + 4))
    return np.ldexp(factor * np.sqrt(variance), units)

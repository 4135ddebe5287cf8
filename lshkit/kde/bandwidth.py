"""Bandwidths: checked numbers, or rules that see the scale of the data."""

import numbers

import numpy as np
from scipy.spatial.distance import cdist
from sklearn.metrics import euclidean_distances

from lshkit.kde.kernels import COMPACT
from lshkit.kde.known_rows import hashes_of_rows

RULES = ("scott", "silverman", "neighbors")
# Of "neighbors": how many, the rows whose neighbors are looked for and among how many, of which so
# many are enough; the distance, of its size, below which a row is a copy; the kernel mean that
# a sketch of 256 hashes tells from its noise.
NEIGHBORS, SAMPLED, NEAREST, COPY, SHARE = 5, (128, 2**15), 1024, 1e-7, 0.05


def check(bandwidth, n_features, kernel):
    """bandwidth as a rule's name or a float64 array `(n_features,)`, or a ValueError."""
    if isinstance(bandwidth, str):
        if bandwidth not in RULES:
            raise ValueError(
                f"bandwidth must be a number > 0, one for each feature, or one of {RULES}, got "
                f"{bandwidth!r}"
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


def rule(name, X, weights=None, kernel="gaussian", sketch=False):
    """The rule's factor times the standard deviation of every feature, `(n_features,)`.

    sketch: for one of a few hundred hashes, whose noise hides less than a twentieth of the rows.

    ValueError for fewer than 2 rows, and, but for "neighbors", for a feature that does not vary.
    """
    shares = np.full(len(X), 1 / len(X)) if weights is None else weights / weights.sum()
    effective = 1 / np.sum(shares**2)
    if effective <= 1 + 1e-9:
        raise ValueError(f"bandwidth={name!r} needs at least 2 rows (n_samples = {len(X)})")
    deviations, constant = _standard_deviations(X, weights, shares, effective)
    if name == "neighbors":
        deviations[constant | (deviations < np.finfo(np.float64).tiny)] = 1.0
        counted = X if weights is None else X[weights > 0]
        width = _width_of_share if sketch else _neighbor_distance
        return width(counted, 1 / deviations, kernel) * deviations
    if constant.any():
        feature = int(np.flatnonzero(constant)[0])
        raise ValueError(f"bandwidth={name!r} needs features that vary, feature {feature} does not")
    return _plug_in_factor(name, effective, X.shape[1]) * deviations


def _plug_in_factor(name, effective, d):
    """Scott's or Silverman's factor.

    scipy.stats.gaussian_kde's factors and weighting, of the diagonal of its covariance: equal to it
    in one dimension. With W the sum of the weights, n = W^2 / sum w^2 and d the features,
    n^(-1 / (d + 4)), for Silverman times (4 / (d + 2))^(1 / (d + 4)). (scikit-learn's rules leave
    the standard deviation out.)
    """
    factor = effective ** (-1 / (d + 4))
    if name == "silverman":
        factor *= (4 / (d + 2)) ** (1 / (d + 4))
    return factor


def _standard_deviations(X, weights, shares, effective):
    """Of each feature, and which features do not vary."""
    d = X.shape[1]
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
    return np.ldexp(np.sqrt(variance), units), constant


def _width_of_share(X, scale, kernel):
    """The bandwidth of scaled rows at which the median kernel mean is SHARE, without copies.

    Of 128 rows over 4,096 at most, evenly spaced. 1 if all rows are equal.
    """
    some, among = (np.linspace(0, len(X) - 1, min(n, len(X))).astype(int) for n in (128, 4096))
    centre = np.median(X[some], axis=0)
    queries, rows = ((X[part] - centre) * scale for part in (some, among))
    distances = cdist(queries, rows, "cityblock" if kernel == "laplacian" else "euclidean")
    distances[distances <= COPY * np.linalg.norm(queries, axis=1, keepdims=True)] = np.inf
    found = distances[np.isfinite(distances)]
    if len(found) == 0:
        return 1.0
    power = 2 if kernel == "gaussian" else 1
    low, high = 1e-3 * found.min(), 1e3 * found.max()
    while high > 1.001 * low:
        width = np.sqrt(low) * np.sqrt(high)
        few = np.median(np.exp(-((distances / width) ** power) / power).mean(axis=1)) < SHARE
        low, high = (width, high) if few else (low, width)
    return float(width)


def _neighbor_distance(X, scale, kernel):
    """The bandwidth of scaled rows at which a median row has 5 effective neighbors.

    (sum k)^2 / sum k^2 of them (Kish 1965), equal rows counted once; of compact kernels, the
    distance to the 5th. Of 128 rows, among 32,768 at most, evenly spaced. 1 if all rows are equal.
    """
    some, among = (np.linspace(0, len(X) - 1, min(n, len(X))).astype(int) for n in SAMPLED)
    among = among[np.unique(hashes_of_rows(X[among]), return_index=True)[1]]
    centre = np.median(X[some], axis=0)
    queries = (X[some] - centre) * scale
    size = np.linalg.norm(queries, axis=1, keepdims=True)
    nearest = np.full((len(queries), 0), np.inf)
    for first in range(0, len(among), 4096):
        rows = (X[among[first : first + 4096]] - centre) * scale
        if kernel == "laplacian":
            distances = cdist(queries, rows, "cityblock")
        else:
            distances = euclidean_distances(queries, rows)
        distances[distances <= COPY * size] = np.inf
        nearest = np.hstack([nearest, distances])
        if nearest.shape[1] > NEAREST:
            nearest = np.partition(nearest, NEAREST, axis=1)[:, :NEAREST]
    nearest = np.sort(nearest, axis=1)
    nearest = nearest[np.isfinite(nearest[:, 0])]
    if len(nearest) == 0:
        return 1.0
    counts = np.isfinite(nearest).sum(axis=1)
    if kernel in COMPACT or np.median(counts) < 2 * NEIGHBORS:
        at = np.minimum(counts, NEIGHBORS) - 1
        return float(np.median(nearest[np.arange(len(nearest)), at]))
    power = 2 if kernel == "gaussian" else 1
    low, high = 1e-3 * nearest.min(), 1e3 * nearest[np.isfinite(nearest)].max()
    while high > 1.001 * low:
        width = np.sqrt(low) * np.sqrt(high)
        k = np.exp(((nearest[:, :1] / width) ** power - (nearest / width) ** power) / power)
        few = np.median(k.sum(axis=1) ** 2 / (k**2).sum(axis=1)) < NEIGHBORS
        low, high = (width, high) if few else (low, width)
    return float(width)

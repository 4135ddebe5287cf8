"""The kernels: names, normalisers in R^d, random draws.

All are functions of the distance r of rows divided by the bandwidth: Euclidean, or the sum of the
absolute differences (laplacian), or the angle (angular). The names and normalisers of those that
scikit-learn has are scikit-learn's.
"""

import math

import numpy as np
from scipy.special import gammaln

CODES = {  # lshkit::DensityKernel of the C++ core
    "gaussian": 0,
    "exponential": 1,
    "laplacian": 2,
    "angular": 3,
    "tophat": 4,
    "epanechnikov": 5,
    "linear": 6,
    "cosine": 7,
}
COMPACT = ("tophat", "epanechnikov", "linear", "cosine")  # zero from the distance 1 on
COLLISION = ("laplacian", "angular")  # probabilities that hash codes are equal


def log_normalizer(kernel: str, n_features: int) -> float:
    """log of the integral of the kernel over R^n_features, at bandwidth 1.

    ValueError for the angular kernel, whose integral is infinite.
    """
    d = n_features
    log_ball = 0.5 * d * math.log(math.pi) - gammaln(0.5 * d + 1)  # volume of the unit ball
    log_sphere = log_ball + math.log(d)  # its surface
    if kernel == "gaussian":
        return 0.5 * d * math.log(2 * math.pi)
    if kernel == "exponential":
        return log_sphere + gammaln(d)
    if kernel == "laplacian":
        return d * math.log(2)
    if kernel == "tophat":
        return log_ball
    if kernel == "epanechnikov":
        return log_ball + math.log(2 / (d + 2))
    if kernel == "linear":
        return log_ball - math.log(d + 1)
    if kernel == "cosine":
        # Integral of r^(d - 1) sin(pi (1 - r) / 2) over 0 to 1, by the series of the sine and the
        # beta function: its terms fall at least fivefold, whatever d.
        term, total, k = math.pi / 2 / (d * (d + 1)), 0.0, 0
        while abs(term) > 1e-18 * abs(total) or k == 0:
            total += term
            k += 1
            term *= -((math.pi / 2) ** 2) / ((d + 2 * k) * (d + 2 * k + 1))
        return log_sphere + math.log(total)
    raise ValueError(
        "the angular kernel has no normaliser in R^d (its integral is infinite): use kernel_mean, "
        "or normalize=False"
    )


def compact(kernel: str, distances: np.ndarray, edge: float) -> np.ndarray:
    """Kernels of distances that are 0 from the distance edge on, rounded as the core's are."""
    inside = distances < edge
    if kernel == "tophat":
        return inside.astype(np.float64)
    values = np.minimum(distances, edge)
    if kernel == "epanechnikov":
        values *= values
        values /= edge * edge
    elif kernel == "cosine":
        values *= math.pi / 2
        values /= edge
        np.cos(values, out=values)
    else:
        values /= edge
    if kernel != "cosine":
        np.subtract(1, values, out=values)
    values *= inside
    return values


def draw(kernel: str, n_samples: int, n_features: int, rng: np.random.RandomState) -> np.ndarray:
    """n_samples random rows of the kernel's density at bandwidth 1, float64. rng: RandomState."""
    shape = n_samples, n_features
    if kernel == "gaussian":
        return rng.normal(size=shape)
    if kernel == "laplacian":
        return rng.laplace(size=shape)
    directions = rng.normal(size=shape)
    directions /= np.linalg.norm(directions, axis=1)[:, None]
    return directions * _radii(kernel, n_samples, n_features, rng)[:, None]


def _radii(kernel: str, n_samples: int, d: int, rng: np.random.RandomState) -> np.ndarray:
    """Distances of rows from the centre: of density r^(d - 1) k(r)."""
    if kernel == "exponential":
        return rng.gamma(d, size=n_samples)
    if kernel == "tophat":
        return np.sqrt(rng.beta(0.5 * d, 1, size=n_samples))
    if kernel == "epanechnikov":
        return np.sqrt(rng.beta(0.5 * d, 2, size=n_samples))
    radii = rng.beta(d, 2, size=n_samples)
    if kernel == "linear":
        return radii
    # cos(pi r / 2) is from 1 to pi / 2 times 1 - r: accept in that proportion.
    accepted = np.zeros(n_samples, bool)
    while not accepted.all():
        open_ = np.flatnonzero(~accepted)
        r = rng.beta(d, 2, size=len(open_))
        ratio = np.cos(math.pi / 2 * r) / (math.pi / 2 * (1 - r))
        take = rng.uniform(size=len(open_)) < ratio
        radii[open_[take]] = r[take]
        accepted[open_[take]] = True
    return radii

"""The exact log-density as torch computes it, differentiable in the query as often as wanted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lshkit.kde import kernels
from lshkit.kde.arguments import as_rows
from lshkit.kde.geometry import DOUBLE_ROUNDING
from lshkit.kde.sketch import Sketch

if TYPE_CHECKING:
    from lshkit.kde.estimator import LSHKernelDensity
    from lshkit.kde.geometry import Geometry

BLOCK = 2**21  # numbers in memory for a block of pairs
NEAR = 1e-7  # 1 - |cosine|, below which the rounding of the cosine counts
ANGLE = 1e-10  # radians, at which the rounding of unit rows turns a gradient by 1e-6


def log_mean(estimator: LSHKernelDensity, X: Tensor) -> Tensor:
    """log of the kernel mean of the rows of X, float64, with gradients.

    Blocks of pairs are computed again for the gradient, so that memory stays a block's. Where two
    rows coincide, distances have the gradient 0.
    """
    method = estimator._method
    as_rows(estimator, X, False, method.geometry.kernel)
    if isinstance(method, Sketch) or not method.exact:
        raise ValueError(
            f"a gradient needs algorithm='brute' or rtol=0, got {method.name!r}: fit again, "
            "or pass X.detach()"
        )
    training = method.training
    geometry = training.geometry
    queries = _scaled(X.double(), geometry)
    with torch.no_grad():  # far from the centre, products cancel: differences then
        lost = float((queries**2).sum(1).max()) * DOUBLE_ROUNDING
        far = lost > (1e-12 if geometry.kernel == "exponential" else 1e-7)
    # Of rows as given: compact kernels end for these, and scaled ones are rounded.
    as_given = geometry.kernel in kernels.COMPACT or geometry.kernel == "laplacian"
    direct = geometry.kernel != "angular" and (as_given or far)
    if direct:
        queries = X.double()
    pairs = len(X) * (X.shape[1] if direct else 1)
    step = max(16, BLOCK // max(pairs, 1))
    parts = []
    for first in range(0, len(training.X), step):
        rows = training.X[first : first + step]
        rows = np.asarray(rows, np.float64) if direct else geometry.scale(rows)
        keys = torch.from_numpy(rows)
        weights = torch.ones(len(keys), dtype=torch.float64)
        if training.weights is not None:
            weights = torch.from_numpy(training.weights[first : first + step])
        args = queries, keys, weights.log(), geometry, direct
        parts.append(checkpoint(_log_sum, *args, use_reentrant=False))
    result = _log_sum_exp(torch.stack(parts), 0) - math.log(training.total)
    return torch.where(result > -1e299, result, -math.inf)


def _scaled(X: Tensor, geometry: Geometry) -> Tensor:
    X = (X - torch.from_numpy(geometry.centre)) * torch.from_numpy(geometry.inverse)
    if geometry.kernel == "angular":
        X = X / X.detach().abs().amax(1, keepdim=True)  # squares neither overflow nor underflow
        X = X / X.norm(dim=1, keepdim=True)
    return X


def _log_sum(
    queries: Tensor, keys: Tensor, log_weights: Tensor, geometry: Geometry, direct: bool
) -> Tensor:
    logs = _log_kernel(queries, keys, geometry, direct).clamp_min(-1e300)  # squares overflow
    return _log_sum_exp(logs + log_weights, 1)


def _log_sum_exp(logs: Tensor, dim: int) -> Tensor:
    """As torch.logsumexp, whose gradient exp(log - result) has a sum other than 1 where the result
    is too large to hold the logarithm of the sum: here each term is divided by the sum."""
    largest = logs.detach().amax(dim, keepdim=True)
    return (logs - largest).exp().sum(dim).log() + largest.squeeze(dim)


def _log_kernel(queries: Tensor, keys: Tensor, geometry: Geometry, direct: bool) -> Tensor:
    """log k of all pairs, -1e300 for 0: whose gradient is 0, and not NaN."""
    kernel = geometry.kernel
    if kernel == "laplacian":
        inverse = torch.from_numpy(geometry.inverse)
        return -((queries[:, None] - keys) * inverse).abs().sum(-1)
    if kernel in kernels.COMPACT:
        squares = _squares(queries, keys, geometry.widths)
        return _log_compact(squares, kernel, geometry.edge)
    if direct:
        return _log_radial(_squares(queries, keys, geometry.bandwidth), kernel)
    products = queries @ keys.T
    if kernel == "angular":
        return _log(*_agreements(queries, keys, products)) * geometry.n_bits
    return _log_radial((queries**2).sum(1)[:, None] + (keys**2).sum(1) - 2 * products, kernel)


def _agreements(queries: Tensor, keys: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """1 - angle / pi of unit rows, and where it is not 0; constant within ANGLE of 0 and pi."""
    sign = torch.where(products.detach() < 0, -1.0, 1.0)
    left = 1 - sign * products
    near = left.detach() < NEAR
    if near.any():
        left = left + _lost(queries.detach(), keys, sign, left.detach(), near)
        apart = left.detach() > 0.5 * ANGLE**2
        fixed = _over_pi(left.detach().clamp_min(0))
        small = torch.where(apart, _over_pi(torch.where(apart, left, 1.0)), fixed)
    else:
        small = _over_pi(left)
    agreement = torch.where(sign > 0, 1 - small, small)
    return agreement, agreement.detach() > 0


def _over_pi(left: Tensor) -> Tensor:
    """The angle over pi from 1 - cosine."""
    return 2 / math.pi * (0.5 * left).sqrt().arcsin()


def _lost(queries: Tensor, keys: Tensor, sign: Tensor, left: Tensor, near: Tensor) -> Tensor:
    """What 1 - |cosine| lacks of half the squared difference of near unit rows; 0 of others."""
    lost, pairs = torch.zeros_like(left), near.nonzero()
    for i, j in (some.unbind(1) for some in pairs.split(max(BLOCK // keys.shape[1], 1))):
        difference = sign[i, j, None] * queries[i] - keys[j]
        lost[i, j] = 0.5 * difference.square().sum(1) - left[i, j]
    return lost


def _squares(queries: Tensor, keys: Tensor, widths: np.ndarray | None) -> Tensor:
    """Squared distances by differences over widths, the features in order: as the core does."""
    squares = queries.new_zeros(len(queries), len(keys))
    for c in range(queries.shape[1]):
        difference = queries[:, c, None] - keys[:, c]
        squares = squares + (difference if widths is None else difference / widths[c]) ** 2
    return squares


def _log_radial(squares: Tensor, kernel: str) -> Tensor:
    return -0.5 * squares.clamp_min(0) if kernel == "gaussian" else -_root(squares, 1e-20)


def _log_compact(squares: Tensor, kernel: str, edge: float) -> Tensor:
    inside = squares < _least_square(edge)
    r = _root(squares, 1e-20 * edge**2).clamp_max(math.nextafter(edge, 0)) / edge
    if kernel == "tophat":
        return torch.where(inside, 0.0 * r, -1e300)
    if kernel == "epanechnikov":
        return _log(1 - r**2, inside)
    if kernel == "linear":
        return _log(1 - r, inside)
    return _log((math.pi / 2 * r).cos(), inside)


def _least_square(edge: float) -> float:
    """The least number whose root is not below `edge`: squares below it are inside, as for the
    core. The root itself would not tell: torch's, by MKL on Intel, may be off by a last bit."""
    square = edge * edge
    while math.sqrt(square) < edge:
        square = math.nextafter(square, math.inf)
    while math.sqrt(below := math.nextafter(square, 0)) >= edge:
        square = below
    return square


def _root(squares: Tensor, least: float) -> Tensor:
    """The root, from `least` on: else 0, of the gradient 0."""
    apart = squares > least
    return torch.where(apart, torch.where(apart, squares, 1.0).sqrt(), 0.0)


def _log(values: Tensor, inside: Tensor) -> Tensor:
    return torch.where(inside, torch.where(inside, values, 1.0).log(), -1e300)

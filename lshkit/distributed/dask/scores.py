"""Log-densities and kernel means of a block of queries."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lshkit.distributed.dask.tasks import Held
from lshkit.kde import LSHKernelDensity
from lshkit.kde.sums import Sums
from lshkit.typing import FloatArray

Scores = FloatArray | tuple[FloatArray, FloatArray]


class Scale(NamedTuple):
    """What the sums over all rows become. log_norm: None for kernel means.

    least_error: relative, None where the sums are exact.
    """

    log_weight: float
    log_norm: float | None
    least_error: float | None
    return_std: bool


def of_sketch(sketch: LSHKernelDensity, X: Any, return_std: bool, is_mean: bool) -> Scores:
    if len(X) == 0:
        none = np.empty(0, getattr(X, "dtype", np.float64))
        return (none, none) if return_std else none
    query = sketch.kernel_mean if is_mean else sketch.score_samples
    return query(X, return_std)


def of_sums(sums: Sums, queries: np.ndarray, scale: Scale, held: Held) -> Scores:
    """Of sums and their variances over the rows of all shards.

    queries: for their type. held: the shards, which must outlive the estimator.
    """
    dtype = queries.dtype
    positive = np.maximum(sums.total, 0.0)
    error = np.sqrt(sums.squares)
    if scale.least_error is not None:
        error = np.maximum(error, scale.least_error * positive)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if scale.log_norm is None:
            factor = np.exp(sums.shift - scale.log_weight)
            values = factor * sums.total
            std = factor * error
        else:
            unknown = 0 if scale.least_error is None else np.inf
            values = np.log(positive) + (sums.shift - scale.log_weight - scale.log_norm)
            std = np.where(positive > 0, error / positive, unknown)
        values, std = (x.astype(dtype, copy=False) for x in (values, std))
    return (values, std) if scale.return_std else values

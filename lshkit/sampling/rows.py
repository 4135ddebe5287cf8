"""Rows and queries as the samplers take them."""

from typing import Any

import numpy as np

from lshkit import checks


def as_numpy(name: str, x: Any) -> tuple[np.ndarray, Any]:
    """A numpy array of an array or tensor of real numbers, and torch if it was a tensor.

    float32 and float64 are kept, shorter floats become float32 and all others float64.
    """
    torch = checks.torch_of(**{name: x})
    x = checks.as_floats(checks.to_numpy(checks.array(name, x, torch), torch))
    return np.ascontiguousarray(x, x.dtype.newbyteorder("=")), torch


def check_rows(name: str, x: np.ndarray, *, direction: bool = False) -> None:
    """ValueError naming the first row that is not finite; with direction, or that is zero."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        sums = np.einsum("nd,nd->n", x, x)
    for row in np.flatnonzero(~np.isfinite(sums)):  # or with squares that are beyond the type
        if not np.isfinite(x[row]).all():
            raise ValueError(f"{name} must be finite, row {row} has a NaN or infinity")
    if direction and not sums.all():
        for row in np.flatnonzero(sums == 0):
            if not x[row].any():
                raise ValueError(f"{name} must have no row of zeros, which has no angle: row {row}")

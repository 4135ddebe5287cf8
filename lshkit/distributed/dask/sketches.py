"""Sketches of blocks, and their sums."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from lshkit.kde import LSHKernelDensity


def of_block(parameters: dict[str, Any], X: Any, weights: Any) -> LSHKernelDensity | None:
    """The sketch of a block, with the random_state of all; None for a block without rows."""
    if len(X) == 0:
        return None
    weights = None if weights is None else np.asarray(weights)
    return LSHKernelDensity(**parameters)._add(X, weights, part=True)


def merged(parts: list[Any]) -> LSHKernelDensity | None:
    """One sketch of all rows, from sketches, or boxes of one as those of `mapped`.

    Sums of counts and of rounded weights are exact in any order.
    """
    unboxed = (x.item() if isinstance(x, np.ndarray) else x for x in parts)
    found = [x for x in unboxed if x is not None]
    if not found:
        return None
    whole = copy.deepcopy(found[0])  # a task may run again: its arguments stay
    for part in found[1:]:
        whole.merge(part)
    return whole

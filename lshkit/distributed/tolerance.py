"""The errors that shards may have, so that their sum keeps a relative error.

A shard knows its own rows. With T the sum over all rows, S_s that of shard s, and relative errors e
of all S_s that are independent, the relative error of T is e * k with k^2 = sum_s (S_s / T)^2: k is
1 / sqrt(shards) where rows lie in random order, and 1 where a query has all its rows in one shard.
So the shards are tuned for rtol / k, with k the mean over the pilot's queries. Relative errors of
an S_s below the least T of these queries need not be small: they are relative to that.
"""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp

from lshkit.kde.calibration import TOLERATED, most_failures
from lshkit.kde.method import Accuracy
from lshkit.kde.sums import Sums

MOST = 0.5  # relative error that a shard is tuned for: of larger ones the pilot knows little


def least_total(totals: Sums, negligible: float) -> float:
    """Log of the sum that errors of shards may be relative to.

    negligible: log of a sum over all rows below which errors relative to it are enough.
    """
    return max(float(totals.log().min()), negligible)


def shrinkage(shards: list[Sums], totals: Sums, least: float) -> float:
    """k: by how much the relative error of the sum is less than that of the shards."""
    logs = np.stack([np.maximum(x.log(), least) for x in shards])
    wanted = np.maximum(totals.log(), least)
    with np.errstate(over="ignore"):
        k = np.exp(0.5 * logsumexp(2 * logs, axis=0) - wanted)
    return float(np.mean(np.minimum(k, 1.0)))


def of_shard(accuracy: Accuracy, k: float) -> float:
    """rtol of a shard."""
    return max(accuracy.rtol, min(accuracy.rtol / k, MOST))


def keeps(accuracy: Accuracy, exact: Sums, got: Sums, negligible: float) -> tuple[bool, float]:
    """Whether estimates of the pilot's queries keep the accuracy, and their mean relative error."""
    shift = np.maximum(exact.log(), negligible)
    with np.errstate(over="ignore", invalid="ignore"):
        errors = np.abs(
            got.total * np.exp(got.shift - shift) - exact.total * np.exp(exact.shift - shift)
        )
    mean = float(errors.mean())
    if accuracy.confidence is None:
        return mean <= TOLERATED * accuracy.rtol, mean
    failures = int((errors > accuracy.rtol).sum())
    return failures <= most_failures(len(errors), 1 - accuracy.confidence), mean

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

from lshkit.kde.calibration import BEYOND, STATED_RISK, TOLERATED, WITHIN, most_failures
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


class Trial:
    """Estimates of the pilot's queries beside the exact sums, both relative to these.

    negligible: log of the sum below which errors relative to it are enough.
    """

    def __init__(self, exact: Sums, got: Sums, negligible: float) -> None:
        shift = np.maximum(exact.log(), negligible)
        with np.errstate(over="ignore", invalid="ignore"):
            factor = np.exp(got.shift - shift)
            true = exact.total * np.exp(exact.shift - shift)
            self.errors = np.abs(got.total * factor - true)
            self.stated = np.sqrt(got.squares) * factor

    def keeps(self, accuracy: Accuracy) -> bool:
        """Whether the mean error is rtol, or rtol a bound that few enough errors exceed."""
        if accuracy.confidence is None:
            return self.mean <= TOLERATED * accuracy.rtol
        failures = int((self.errors > accuracy.rtol).sum())
        return failures <= most_failures(len(self.errors), 1 - accuracy.confidence)

    @property
    def mean(self) -> float:
        """The mean relative error."""
        return float(self.errors.mean())

    def least_error(self) -> float:
        """The least relative error to state, so that few enough are off by more than WITHIN of it.

        Each shard calibrates its own error for the queries to which its rows matter. Where the
        rest is exact, or nearly, this is the error of what others add, and of rounding.
        """
        wanted = np.where(self.errors > WITHIN * self.stated, self.errors / WITHIN, 0)
        allowed = max(most_failures(len(wanted), BEYOND, STATED_RISK), 0)
        return float(np.sort(wanted)[::-1][allowed])

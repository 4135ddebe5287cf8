"""The base class of density methods, the result of tuning, and estimates."""

import abc
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lshkit import checks
from lshkit.kde import kernels

MOST_TUNED = 2**12  # of every method: tuning asks for no more, files with more are refused
# Of tables that are made again from a file's settings: no pilot asks for more.
MOST_HASHES, MOST_BITS, MOST_PROJECTIONS, MOST_BYTES = 256, 16, 1024, 2**26
MOST = 2.0  # relative error expected of an estimate >= 0 whose expectation is right


class Estimate:
    """Kernel means: exp(shift) * mean with standard error exp(shift) * error (0: exact)."""

    __slots__ = ("error", "mean", "shift")

    def __init__(self, shift, mean, error):
        self.shift, self.mean, self.error = shift, mean, error

    def __setitem__(self, index, part):
        for name in ESTIMATE:
            getattr(self, name)[index] = getattr(part, name)

    @classmethod
    def joined(cls, parts):
        return cls(*(np.concatenate([getattr(p, a) for p in parts]) for a in ESTIMATE))


ESTIMATE = "shift", "mean", "error"


class Tuned(NamedTuple):
    """What a pilot found out about a method."""

    settings: dict  # JSON values, for `from_settings`; "cost" of a query in rows, "error" expected
    make: Callable  # () -> the method, from what tuning has built already


class Method(abc.ABC):
    """A way to estimate the kernel mean over rows: a subclass in its own file, listed in `METHODS`.

    An instance answers queries and does not change. It keeps its `training` (rows, weights, kernel,
    seed), from which and its settings it can be made again, equal bit for bit.
    """

    name: str  # as `algorithm`
    kernels = tuple(k for k in kernels.CODES if k not in kernels.COMPACT)  # that it can do
    exact = False
    uses_rtol = True  # where it is asked for by name
    keeps_rows = True  # where it is asked for by name
    max_bits = 64  # of the angular kernel
    # "auto" tunes it from so many rows on, where the methods before it cost more than `worth`.
    min_rows = worth = 0
    most = MOST  # the largest relative error that tuning expects of a query
    permuted = None  # `PermutedRows`, where it has them

    @classmethod
    @abc.abstractmethod
    def tune(cls, pilot, rtol):
        """`Tuned` with the cheapest settings of mean relative error rtol on the pilot's queries.

        Where none reach it, with those that come nearest. None where the method cannot be used.
        """

    @classmethod
    @abc.abstractmethod
    def from_settings(cls, settings, training, permuted=None):
        """The method; ValueError, TypeError or KeyError for settings that cannot be.

        permuted: `PermutedRows` of the training, where there are some.
        """

    @classmethod
    def check_saved(cls, settings, n_rows, kernel, n_bits):
        """ValueError for a file's settings whose tables would be larger than any that are tuned."""
        most = {"n_hashes": MOST_HASHES, "n_bits": MOST_BITS, "n_projections": MOST_BITS}
        sizes = {k: checks.integer(k, settings[k], 1, most[k]) for k in most if k in settings}
        if kernel != "angular" and math.prod(sizes.values()) > MOST_PROJECTIONS:
            raise ValueError(
                f"{cls.name} must have at most {MOST_PROJECTIONS} projections, got {sizes}"
            )
        if sizes and n_rows < 4:
            raise ValueError(f"{cls.name} must have at least 4 rows, got {n_rows}")

    @abc.abstractmethod
    def estimate(self, X, threads, with_error=True, scaled=False):
        """`Estimate` of rows X as given, or scaled=True: as `Geometry.scale` gives them."""

    @property
    @abc.abstractmethod
    def nbytes(self):
        """Bytes beside the rows as given."""

    @property
    def geometry(self):
        return self.training.geometry

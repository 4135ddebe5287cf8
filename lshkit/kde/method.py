"""The base classes of density methods, the result of tuning, and estimates."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.stats import norm

from lshkit import checks
from lshkit.kde import kernels
from lshkit.kde.sums import SAMPLED, Sums
from lshkit.kde.training import PermutedRows

if TYPE_CHECKING:
    from typing_extensions import Self

    from lshkit.kde.geometry import Geometry
    from lshkit.kde.pilot import Pilot
    from lshkit.kde.training import Training

MOST_TUNED = 2**12  # of every method: tuning asks for no more, files with more are refused
# Of tables that are made again from a file's settings: no pilot asks for more.
MOST_HASHES, MOST_BITS, MOST_PROJECTIONS, MOST_BYTES = 256, 16, 1024, 2**26
# Mean of |z| for a standard normal z: from a standard error to a mean error.
MEAN_ABSOLUTE = 0.7978845608
MOST_LOG = 350.0  # of a number whose square float64 holds
MOST = 2.0  # relative error expected of an estimate >= 0 whose expectation is right


class Estimate:
    """Kernel means: exp(shift) * mean with standard error exp(shift) * error (0: exact).

    least: log of the least standard error, which may be far above all that exp(shift) holds.
    rows: how many rows were read for each, all of them where it is exact. at_risk: exp(shift) *
    at_risk is the part of the mean that rows like those not read have; all of it where nothing is
    said. cost: in rows of an exact sum, those read where nothing is said. sampled: of those read,
    the rows that stand for those not read; all of them where nothing is said.
    """

    __slots__ = ("at_risk", "cost", "error", "least", "mean", "rows", "sampled", "shift")

    def __init__(
        self,
        shift: np.ndarray,
        mean: np.ndarray,
        error: np.ndarray,
        rows: np.ndarray,
        at_risk: np.ndarray | None = None,
        cost: np.ndarray | None = None,
        sampled: np.ndarray | None = None,
        least: np.ndarray | None = None,
    ) -> None:
        self.shift, self.mean, self.error, self.rows = shift, mean, error, rows
        self.at_risk = mean.copy() if at_risk is None else at_risk
        self.cost = rows.astype(np.float64) if cost is None else cost
        self.sampled = rows.copy() if sampled is None else sampled
        self.least = np.full(len(rows), -np.inf) if least is None else least

    @classmethod
    def exact(cls, sums: Sums, total: float, n_rows: int) -> Estimate:
        """Of sums over all rows, whose weight is `total`."""
        n = len(sums.total)
        return cls(sums.shift, sums.total / total, np.zeros(n), np.full(n, n_rows))

    @property
    def stated(self) -> np.ndarray:
        """The standard errors over exp(shift); infinite where float64 would not hold squares."""
        with np.errstate(invalid="ignore"):  # of nothing at all
            log = self.least - self.shift
        least = np.exp(np.minimum(log, MOST_LOG))
        return np.fmax(self.error, np.where(log > MOST_LOG, np.inf, least))

    @property
    def stated_of_means(self) -> np.ndarray:
        """The standard errors."""
        with np.errstate(invalid="ignore"):
            own = np.where(self.error == np.inf, np.inf, np.exp(self.shift) * self.error)
        return np.maximum(own, np.exp(self.least))

    def __setitem__(self, index: Any, part: Estimate) -> None:
        for name in ESTIMATE:
            getattr(self, name)[index] = getattr(part, name)

    @classmethod
    def joined(cls, parts: Sequence[Estimate]) -> Estimate:
        return cls(*(np.concatenate([getattr(p, a) for p in parts]) for a in ESTIMATE))


ESTIMATE = "shift", "mean", "error", "rows", "at_risk", "cost", "sampled", "least"


class Accuracy(NamedTuple):
    """What is asked of a method: rtol as a mean error, or as a bound that holds with `confidence`.

    negligible: the kernel mean below which errors relative to it are enough. at_risk: what counts
    as at risk at least, `Estimate`.
    """

    rtol: float
    negligible: float = 0.0
    confidence: float | None = None
    at_risk: float = 0.0

    @property
    def mean(self) -> float:
        """The mean relative error to tune for."""
        if self.confidence is None:
            return self.rtol
        return self.rtol * MEAN_ABSOLUTE / max(norm.ppf(0.5 + 0.5 * self.confidence), 1e-10)


def finite_or_none(name: str, value: Any) -> float | None:
    """A number of a file's settings as a float, or None; ValueError for anything else."""
    if value is None:
        return None
    number = checks.real(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be None or a finite number, got {checks.shown(value)}")
    return number


class Tuned(NamedTuple):
    """What a pilot found out about a method."""

    settings: dict[
        str, Any
    ]  # JSON values, for `from_settings`; "cost" of a query in rows, "error" expected
    make: Callable[[], Any]  # () -> the method, from what tuning has built already


class Method(abc.ABC):
    """A way to estimate the kernel mean over rows: a subclass in its own file, listed in `METHODS`.

    An instance answers queries and does not change. It keeps its `training` (rows, weights, kernel,
    seed), from which and its settings it can be made again, equal bit for bit.
    """

    name: str  # as `algorithm`
    training: Training
    kernels: tuple[str, ...] = tuple(
        k for k in kernels.CODES if k not in kernels.COMPACT
    )  # that it can do
    exact = False
    uses_rtol = True  # where it is asked for by name
    keeps_rows = True  # where it is asked for by name
    max_bits = 64  # of the angular kernel
    # "auto" tunes it from so many rows on, where the methods before it cost more than `worth`.
    min_rows = worth = 0
    most = MOST  # the largest relative error that tuning expects of a query
    permuted: PermutedRows | None = None  # where it has them
    # Log of the least squared error that is stated, over the part of the kernel mean that is at
    # risk, or None. What a sample does not hold it does not know of: where that dominates a
    # density, the error that it shows is too small. Such errors are like those of counts: squared,
    # in proportion to what is counted.
    error_floor: float | None = None
    # Log of the kernel mean that counts as at risk where less is: with atol an error relative to a
    # smaller one says nothing, and the floor that it would take is far above all others.
    least_at_risk = -math.inf
    looked_up = 0  # permuted rows that `stop` cannot leave out

    @classmethod
    @abc.abstractmethod
    def tune(cls, pilot: Pilot, rtol: float) -> Tuned | None:
        """`Tuned` with the cheapest settings of mean relative error rtol on the pilot's queries.

        Where none reach it, with those that come nearest. None where the method cannot be used.
        """

    @classmethod
    @abc.abstractmethod
    def from_settings(
        cls, settings: dict[str, Any], training: Training, permuted: PermutedRows | None = None
    ) -> Self:
        """The method; ValueError, TypeError or KeyError for settings that cannot be.

        permuted: `PermutedRows` of the training, where there are some.
        """

    @classmethod
    def restored(cls, settings: dict[str, Any], training: Training) -> Self:
        """The method as it was calibrated, from settings of a file or a pickle."""
        method = cls.from_settings(settings, training)
        method.error_floor = finite_or_none("error_floor", settings.get("error_floor"))
        least_at_risk = finite_or_none("least_at_risk", settings.get("least_at_risk"))
        if least_at_risk is not None:
            method.least_at_risk = least_at_risk
        return method

    @classmethod
    def check_saved(cls, settings: dict[str, Any], n_rows: int, kernel: str, n_bits: int) -> None:
        """ValueError for a file's settings whose tables would be larger than any that are tuned."""
        most = {"n_hashes": MOST_HASHES, "n_bits": MOST_BITS, "n_projections": MOST_BITS}
        sizes = {k: checks.integer(k, settings[k], 1, most[k]) for k in most if k in settings}
        if kernel != "angular" and math.prod(sizes.values()) > MOST_PROJECTIONS:
            raise ValueError(
                f"{cls.name} must have at most {MOST_PROJECTIONS} projections, got {sizes}"
            )
        if sizes and n_rows < 4:
            raise ValueError(f"{cls.name} must have at least 4 rows, got {n_rows}")

    def sampled(
        self, queries: np.ndarray, threads: int, stop: int | None = None, with_error: bool = True
    ) -> Estimate:
        """`Estimate` of scaled queries, with the errors that their own samples show.

        stop: of the permuted rows only those before it count (their kernels, over the total weight
        of all), as if the others had never been: those may then be the queries. Not of exact
        methods, which have an `estimate` of their own.
        """
        raise NotImplementedError

    def scaled(self, X: np.ndarray) -> np.ndarray:
        """Rows as `sampled` takes them."""
        return self.geometry.scale(X)

    def estimate(self, X: np.ndarray, threads: int, with_error: bool = True) -> Estimate:
        """`Estimate` of rows X as given; errors are at least `error_floor`, unless all is read.

        Exact for queries so far from the centre that scaled rows beside them are rounded.
        """
        scaled = self.scaled(X)
        far = self.geometry.far(scaled)
        if not far.any():
            got = self.sampled(scaled, threads, None, with_error)
        else:
            training = self.training
            got = Estimate.exact(Sums.zeros(len(X)), training.total, self.n_rows)
            if not far.all():
                got[~far] = self.sampled(scaled[~far], threads, None, with_error)
            sums = training.sums(scaled[far], threads, in_blocks=False, given=X[far])
            got[far] = Estimate.exact(sums, training.total, self.n_rows)
        raised = got.rows < self.n_rows
        if with_error:  # of nothing that was seen, too, there is rounding
            got.error[raised] = np.maximum(got.error[raised], SAMPLED * got.mean[raised])
        if with_error and self.error_floor is not None:
            with np.errstate(divide="ignore"):
                at_risk = got.shift[raised] + np.log(np.maximum(got.at_risk[raised], 0))
                most = np.maximum(got.shift[raised] + np.log(np.maximum(got.mean[raised], 0)), 0)
            at_risk = np.maximum(at_risk, self.least_at_risk)
            # Means of kernels are at most 1, so no error is more than that or than the estimate.
            got.least[raised] = np.minimum(0.5 * (self.error_floor + at_risk), most)
        return got

    @property
    def n_rows(self) -> int:
        """Of an exact estimate."""
        return len(self.training.X if self.permuted is None else self.permuted)

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes beside the rows as given."""

    @property
    def geometry(self) -> Geometry:
        return self.training.geometry


class ExactFarQueries(Method):
    """A method that answers queries which the type of its `permuted` rows does not hold exactly.

    Distances from such a query would be wrong, or infinite; rows beside it there are none.
    """

    permuted: PermutedRows

    def sampled(
        self, queries: np.ndarray, threads: int, stop: int | None = None, with_error: bool = True
    ) -> Estimate:
        held = self.permuted.hold(queries)
        if held.all():
            return self._sampled(queries, threads, stop)
        last = len(self.permuted) if stop is None else stop
        out = Estimate.exact(Sums.zeros(len(queries)), self.training.total, last)
        if held.any():
            out[held] = self._sampled(queries[held], threads, stop)
        rest = queries[~held]
        if last == self.n_rows and isinstance(self.permuted, PermutedRows):  # no part of them
            sums = self.training.sums(rest, threads, in_blocks=False)
        else:  # those before `stop`, or all but a block
            sums = self.permuted.sums(rest, 0, last, threads)
        out[~held] = Estimate.exact(sums, self.training.total, last)
        return out

    @abc.abstractmethod
    def _sampled(self, queries: np.ndarray, threads: int, stop: int | None) -> Estimate:
        """The same of queries that the rows' type holds."""

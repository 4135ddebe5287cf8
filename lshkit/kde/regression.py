"""`LSHKernelRegressor`: Nadaraya-Watson regression on kernel sums, exact, sampled or sketched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data

from lshkit import checks
from lshkit.kde import bandwidth as bandwidths
from lshkit.kde import kernels
from lshkit.kde.arguments import (
    as_queries,
    as_weights,
    bits_of,
    check_as_earlier,
    check_n_jobs,
    check_tolerance,
    core_threads,
    detached,
    detached_rows,
    of_unit_size,
    random_of,
)
from lshkit.kde.fitted import FittedEstimator, restored_after_errors
from lshkit.kde.geometry import Geometry, has_zero_row
from lshkit.kde.sampled_means import SampledMeans
from lshkit.kde.sketch import SKETCH_BITS
from lshkit.kde.training import LEAST, training_of
from lshkit.kde.value_sketch import ValueSketch
from lshkit.kde.value_sums import ExactMeans
from lshkit.typing import FloatArray, RandomState, Rows

if TYPE_CHECKING:
    from typing_extensions import Self

ALGORITHMS = "auto", "brute", "random", "bucket_sum"
RULES = "scott", "silverman"
# "auto" samples from so many rows on, if queries like so many of them (evenly spaced) then cost at
# most that share of what all rows do.
MIN_SAMPLED, PILOT, WORTHWHILE = 20_000, 64, 0.8
LARGEST = 1e307  # target, whose differences float64 holds


class Units(NamedTuple):
    """Of each output the number from which values are counted, their unit and their mean."""

    offset: np.ndarray
    unit: np.ndarray
    mean: np.ndarray


class Settings(NamedTuple):
    """What a method was made with: parameters may be set since. rtol: None where it is exact."""

    kernel: str
    n_bits: int
    bandwidth: np.ndarray
    rtol: float | None


class Means(NamedTuple):
    """A method, and the units of its means."""

    method: ValueSketch | ExactMeans | SampledMeans
    units: Units


class LSHKernelRegressor(RegressorMixin, FittedEstimator):
    """Nadaraya-Watson kernel regression in many dimensions, exact or to a stated error.

    The prediction is a weighted mean of the targets (Nadaraya 1964, Watson 1964), ::

        m(x) = sum_j w_j k(x, x_j) y_j / sum_j w_j k(x, x_j)

    See docs/regression.md for what each algorithm does and when to use it.

    Parameters
    ----------
    kernel : str
        As in `LSHKernelDensity`. With r the distance over the bandwidth: "gaussian" exp(-r^2 / 2),
        "exponential" exp(-r), "laplacian" exp(-r) with the L1 distance, "angular"
        (1 - angle / pi)^n_bits, and those that are 0 from r = 1 on: "tophat", "epanechnikov",
        "linear", "cosine".
    bandwidth : float, array `(n_features,)`, "scott" or "silverman"
        The rules take each feature's standard deviation times scipy's factor. 1.0 for the angular
        kernel.
    algorithm : str
        "brute": every row, exactly (the only one for kernels that are 0 from r = 1 on). "random":
        the rows that may change a prediction most, by their weights and targets, and a stratified
        sample of the others, for each query as large as rtol requires, or every row. "bucket_sum":
        a sketch of constant size that keeps no rows, for the kernels "angular" and "laplacian";
        n_hashes sets its error, not rtol. "auto": "random" from 20,000 rows on where that is
        faster for 64 of them, else "brute".
    rtol : float >= 0
        Not relative to the prediction: a standard error, in standard deviations of y (of each
        output), that "random" aims at. 0.1 costs about 0.01 of a coefficient of determination. 0:
        exact.
    n_bits : int, optional
        Width of the angular kernel (1 to 64, default 8; at most 16 for "bucket_sum"), and of the
        laplacian sketch's tables (1 to 16, default 12): 2^n_bits buckets per hash.
    n_hashes : int
        Hashes of a sketch: its standard error is proportional to 1 / sqrt(n_hashes).
    random_state : None, int or RandomState
        An int makes results reproducible.
    n_jobs : int, optional
        Threads, as in joblib: None is 1, -1 all.
    batch_size : int
        Queries per batch; memory grows with it. Results do not depend on it.

    Attributes
    ----------
    algorithm_ : str
        The algorithm in use.
    bandwidth_ : float or array `(n_features,)`
    n_samples_seen_ : int
        Rows in the estimator.
    n_features_in_ : int
    extra_memory_ : int
        Bytes kept beside the rows as given; of a sketch, all that is kept.

    Notes
    -----
    `predict` does not change the estimator: several threads may use it and get the same results.
    After a `partial_fit` of a sketch that was interrupted, all but `fit` raises RuntimeError.
    Arguments may be torch CPU tensors; results are arrays.

    Examples
    --------
    >>> import numpy as np
    >>> from lshkit.kde import LSHKernelRegressor
    >>> X = np.random.default_rng(0).uniform(-3, 3, size=(2000, 1))
    >>> model = LSHKernelRegressor(bandwidth=0.1).fit(X, np.sin(X[:, 0]))
    >>> model.predict([[0.5]]).round(2)
    array([0.48])
    """

    _prefix = "_regression"
    _regression_seed: int
    _regression_shape: tuple[int, ...]  # of the targets, but for the rows
    _regression_parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]  # rows, values, weights
    _regression_sketch: ValueSketch | None
    _regression_method: Means | None
    _regression_fitted: Settings | None

    def __init__(
        self,
        kernel: str = "gaussian",
        bandwidth: float | str | ArrayLike = 1.0,
        *,
        algorithm: str = "auto",
        rtol: float = 0.1,
        n_bits: int | None = None,
        n_hashes: int = 32,
        random_state: RandomState = None,
        n_jobs: int | None = None,
        batch_size: int = 1024,
    ) -> None:
        self.kernel = kernel
        self.bandwidth = bandwidth
        self.algorithm = algorithm
        self.rtol = rtol
        self.n_bits = n_bits
        self.n_hashes = n_hashes
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.batch_size = batch_size

    # ---- fitting ----

    def fit(self, X: Rows, y: Rows, sample_weight: Rows | None = None) -> Self:
        """Fits rows X `(n_samples, n_features)` and y `(n_samples,)` or `(n_samples, n_outputs)`.

        float32 rows stay float32. sample_weight: `(n_samples,)`, >= 0 and not all 0. Returns self.

        Raises
        ------
        TypeError, ValueError
            Parameters of the wrong type, out of range or that do not go together; rows, targets or
            weights of a wrong shape or not finite; rows of zeros with the angular kernel; a rule
            for the bandwidth with fewer than two rows or a feature that does not vary. What was
            fitted before stays.
        """
        with restored_after_errors(self):
            for name in [x for x in vars(self) if x.endswith("_") or x.startswith("_regression")]:
                delattr(self, name)
            self._add(X, y, sample_weight, all_rows=True)
            self._method  # noqa: B018  made ready
        return self

    def partial_fit(self, X: Rows, y: Rows, sample_weight: Rows | None = None) -> Self:
        """Adds rows, as if all had been passed to `fit`; returns self.

        "bucket_sum" adds them to its sketch, whose size does not change; with a rule for the
        bandwidth, it keeps the bandwidth of its first rows. The other algorithms keep the rows and
        are made ready at the next prediction, which raises what `fit` would for a rule. After the
        first rows, the weights of a call may all be 0.

        Raises
        ------
        TypeError, ValueError
            As `fit`; rows or targets of another shape than the earlier ones; an algorithm that was
            changed to or from "bucket_sum" since; another kernel, n_bits or n_hashes of a sketch,
            or weights 2^400 or targets 2^250 times as large as its first rows'.
        """
        return self._add(X, y, sample_weight)

    def _add(self, X: Rows, y: Rows, sample_weight: Rows | None, all_rows: bool = False) -> Self:
        """all_rows: no others are to come, so that a rule must suit them."""
        first = not hasattr(self, "n_samples_seen_")
        self._check_parameters()
        streams = self.algorithm == "bucket_sum"
        if not first:
            check_as_earlier(self, self._regression_sketch, self._bits())
        options = dict(reset=first, order="C", dtype=[np.float64, np.float32])
        X, y = detached_rows("X", X), detached("y", y)
        X, y = validate_data(self, X, y, multi_output=True, y_numeric=True, **options)
        if self.kernel == "angular" and has_zero_row(X):
            raise ValueError("X has a row of zeros, which has no angle")
        values = np.asarray(y, np.float64).reshape(len(X), -1)
        if np.abs(values).max() > LARGEST:
            raise ValueError(f"y must lie within +-{LARGEST:g}, got {np.abs(values).max()}")
        if not first and y.shape[1:] != self._regression_shape:
            wanted = (len(X), *self._regression_shape)
            raise ValueError(f"y must have shape {wanted}, as for the earlier rows, got {y.shape}")
        weights = as_weights(sample_weight, len(X), all_zero=not first)
        widths = bandwidths.check(self.bandwidth, X.shape[1], self.kernel)
        if first:
            if isinstance(widths, str) and (streams or all_rows):  # before anything is kept
                bandwidths.check_rows(widths, X, of_unit_size(weights))
            self._regression_seed = random_of(self.random_state).randint(2**31 - 1)
            self._regression_shape, self._regression_parts = y.shape[1:], []
            self._regression_sketch = None
            self._regression_fitted = None
        if streams:
            with core_threads(self.n_jobs):
                self._add_to_sketch(X, values, weights, widths)
        else:  # copies: a stream's buffer will be filled again
            weights = np.ones(len(X)) if weights is None else weights.copy()
            self._regression_parts.append((X.copy(), values.copy(), weights))
            self.n_samples_seen_ = len(X) + (0 if first else self.n_samples_seen_)
        self._regression_method = self._regression_fitted = None
        return self

    def _check_parameters(self) -> None:
        checks.choice("kernel", self.kernel, kernels.CODES)
        checks.choice("algorithm", self.algorithm, ALGORITHMS)
        sketched = self.algorithm == "bucket_sum"
        known = kernels.COLLISION if sketched else tuple(kernels.CODES)
        if self.algorithm == "random":
            known = [name for name in kernels.CODES if name not in kernels.COMPACT]
        if self.kernel not in known:
            raise ValueError(
                f"kernel must be one of {list(known)} for algorithm={self.algorithm!r}, got "
                f"{self.kernel!r} ('brute' supports every kernel)"
            )
        check_tolerance("rtol", self.rtol)
        if self.algorithm == "random" and self.rtol == 0:
            raise ValueError("rtol must be > 0 for algorithm='random', got 0")
        if isinstance(self.bandwidth, str) and self.bandwidth not in RULES:
            raise ValueError(
                f"bandwidth must be a number > 0, one for each feature, 'scott' or 'silverman', "
                f"got {self.bandwidth!r}"
            )
        checks.integer("batch_size", self.batch_size, 1)
        checks.integer("n_hashes", self.n_hashes, 1, 65535)
        check_n_jobs(self.n_jobs)
        self._bits()

    def _bits(self) -> int:
        return bits_of(self, SKETCH_BITS if self.algorithm == "bucket_sum" else 64)

    def _add_to_sketch(
        self,
        X: np.ndarray,
        values: np.ndarray,
        weights: np.ndarray | None,
        widths: str | np.ndarray,
    ) -> None:
        sketch = self._regression_sketch
        if sketch is None:
            if isinstance(widths, str):
                widths = bandwidths.of_deviations(widths, X, of_unit_size(weights))
            geometry = Geometry(self.kernel, self._bits(), np.zeros(X.shape[1]), widths)
            options = self._bits(), self.n_hashes, self._regression_seed, weights, values
            sketch = ValueSketch(geometry, *options)
        with sketch.changes.alone():
            sketch.add(X, weights, values)
            self._regression_sketch = sketch
            self.n_samples_seen_ = len(X) + getattr(self, "n_samples_seen_", 0)

    # ---- the method ----

    @property
    def _method(self) -> ValueSketch | ExactMeans | SampledMeans:
        return self._means.method

    @property
    def _means(self) -> Means:
        """What answers queries: the sketch, or what is made of all rows."""
        check_is_fitted(self)
        if (sketch := self._regression_sketch) is not None:
            sketch.changes.check()
            unit = np.ldexp(1.0, sketch.exponents)
            mean = sketch.totals[1:] / sketch.totals[0]
            return Means(sketch, Units(sketch.offset * unit, unit, mean))
        if self._regression_method is None:
            # Of the settings as fitted. Threads that make it at once make equal ones.
            self._regression_method = self._make_method()
        return self._regression_method

    def _make_method(self) -> Means:
        X, values, weights = self._rows()
        values, units, spread = standardised(values, weights)
        fitted = self._regression_fitted
        with core_threads(self.n_jobs) as threads:
            # Older pickles have a plain tuple.
            settings = self._settings(X, weights) if fitted is None else Settings(*fitted)
            equal = (weights == weights[0]).all()
            rows = X, None if equal else weights, self._regression_seed
            training = training_of(*settings[:3], *rows)
            if settings.rtol is None:
                method: ExactMeans | SampledMeans = ExactMeans(training, values)
            else:
                method = SampledMeans(training, values, spread, settings.rtol)
                if fitted is None and self.algorithm == "auto":
                    if method.cost(X[:: -(-len(X) // PILOT)], threads) > WORTHWHILE:
                        method, settings = method.exact, settings._replace(rtol=None)
        self._regression_fitted = settings
        return Means(method, units)

    def _rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows that count, their values and their weights."""
        parts = self._regression_parts
        if len(parts) > 1:
            X, values, weights = (np.concatenate(x) for x in zip(*parts, strict=True))
            parts = self._regression_parts = [(X, values, weights)]
        X, values, weights = parts[0]
        weights = of_unit_size(weights)
        counted = weights >= LEAST
        if counted.all():
            return X, values, weights
        return X[counted], values[counted], weights[counted]

    def _settings(self, X: np.ndarray, weights: np.ndarray) -> Settings:
        """Those of the parameters, which may have been set since rows came."""
        self._check_parameters()
        widths = bandwidths.check(self.bandwidth, X.shape[1], self.kernel)
        if isinstance(widths, str):
            widths = bandwidths.of_deviations(widths, X, weights)
        rtol = float(self.rtol) if self._may_sample(len(X)) else None
        return Settings(self.kernel, self._bits(), widths, rtol)

    def _may_sample(self, n: int) -> bool:
        if self.algorithm == "random":
            return True
        wanted = self.rtol > 0 and self.kernel not in kernels.COMPACT
        return self.algorithm == "auto" and wanted and n >= MIN_SAMPLED

    # ---- queries ----

    @overload
    def predict(self, X: Rows, return_std: Literal[False] = ...) -> FloatArray: ...
    @overload
    def predict(self, X: Rows, return_std: Literal[True]) -> tuple[FloatArray, FloatArray]: ...
    @overload
    def predict(self, X: Rows, return_std: bool) -> Any: ...
    def predict(self, X: Rows, return_std: bool = False) -> Any:
        """m(x) of each row of X `(n_samples, n_features)`.

        Returns
        -------
        y : array `(n_samples,)` or `(n_samples, n_outputs)`, as y was fitted
            float32 if X is and float32 holds numbers of y's size. Where no row is near (all kernels
            are 0, or what a sketch finds is noise) the mean of the targets.
        std : array of the same shape, with return_std=True
            Standard error of y as an estimate of the exact m(x), by the delta method for a ratio
            (of a sketch by the jackknife over its hashes): 0 where it is exact, inf where no row is
            near. It does not contain the noise of the targets: m(x) itself is uncertain too.

        Raises
        ------
        NotFittedError
            Before any rows were added.
        TypeError, ValueError
            return_std that is no bool; X with another number of features than the fitted rows, not
            finite, or with a row of zeros for the angular kernel; after `partial_fit` also a
            bandwidth that does not suit all rows.
        """
        return_std = checks.boolean("return_std", return_std)
        method, (offset, unit, mean) = self._means
        X = as_queries(self, X, method.geometry.kernel)
        size = checks.integer("batch_size", self.batch_size, 1)
        with core_threads(self.n_jobs) as threads:
            batches = [X[i : i + size] for i in range(0, len(X), size)]
            parts = [method.estimate(batch, threads, return_std) for batch in batches]
        means, errors = (np.concatenate(x) for x in zip(*parts, strict=True))
        nowhere = np.isnan(means)
        means = np.where(nowhere, mean, means)
        errors = np.where(nowhere, np.inf, errors)
        shape = (len(X), *self._regression_shape)
        size = (np.abs(offset) + unit)[unit > 0]
        dtype = X.dtype if ((size > 1e-30) & (size < 1e38)).all() else np.float64
        with np.errstate(over="ignore"):
            means, errors = means * unit + offset, errors * unit
            results = [x.astype(dtype).reshape(shape) for x in (means, errors)]
        return tuple(results) if return_std else results[0]

    # ---- scikit-learn ----

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def standardised(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, Units, np.ndarray]:
    """Values in their `Units`, these, and the standard deviation in them of each output."""
    # Not from 0 only where nearly all are near a number: so small ones keep their digits.
    low, offset, high = np.quantile(values, [0.01, 0.5, 0.99], axis=0)
    offset = np.where(np.abs(offset) > 8 * (high - low), offset, 0.0)
    values = values - offset
    # Units that are powers of 2 bring values into the range of float32, and round nothing.
    largest = np.abs(values).max(axis=0)
    largest = np.where(largest > 0, largest, np.abs(offset))  # a constant has its own size
    unit = np.ldexp(1.0, np.frexp(largest)[1] - 1)
    values /= unit
    mean = np.average(values, axis=0, weights=weights)
    spread = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))
    return values, Units(offset, unit, mean), spread

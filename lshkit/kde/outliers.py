"""`LSHOutlierDetector`: outliers and novelties by their density."""

from __future__ import annotations

import copy
import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, OutlierMixin, clone
from sklearn.utils.validation import check_is_fitted

from lshkit import checks
from lshkit.archive import InBytes
from lshkit.kde import persistence
from lshkit.kde.arguments import (
    as_queries,
    as_rows,
    check_n_jobs,
    check_parameters,
    core_threads,
    random_of,
)
from lshkit.kde.changes import alone
from lshkit.kde.estimator import LSHKernelDensity
from lshkit.kde.fitted import restored_after_errors
from lshkit.kde.fitted_rows import log_means_of_rows, log_without_own
from lshkit.kde.known_rows import KnownRows
from lshkit.kde.method import Method
from lshkit.typing import File, RandomState, Rows

if TYPE_CHECKING:
    from typing_extensions import Self

FENCE = 1.5  # interquartile ranges below the lower quartile (Tukey 1977): contamination="auto"
N_KEPT = 4096  # rows of a stream from which a sketch's threshold comes
LEAST = -1e150  # in the place of the logarithm of 0: scores are finite, and so are their squares


class LSHOutlierDetector(InBytes, OutlierMixin, BaseEstimator):
    """Outlier and novelty detection by kernel density, with the interface of IsolationForest.

    The score of a row is the log of the mean of the kernel between it and the fitted rows: at most
    0, low for outliers. A fitted row is scored without itself (leave-one-out); otherwise each would
    be a neighbor of its own, and rows that were not fitted would all look like outliers beside
    them. See docs/outliers.md for measurements.

    Parameters
    ----------
    density : LSHKernelDensity, optional
        The density, cloned by `fit`; default ``LSHKernelDensity(bandwidth="neighbors")``. With
        algorithm="bucket_sum" the detector stores a sketch and 4,096 rows instead of all rows.
    contamination : "auto" or float in (0, 0.5]
        The share of outliers in the fitted rows, which sets the threshold `offset_`. "auto": the
        lower quartile of the fitted rows' scores less 1.5 times their interquartile range, as in a
        box plot. Rows with density 0 (of compact kernels) are all outliers: where they
        are more than that share, they and no other fitted rows are flagged. Where 75 % of the
        rows score alike, "auto" flags all that score less: give a share.
    random_state, n_jobs
        Of the density; None leaves the density's own.

    Attributes
    ----------
    density_ : LSHKernelDensity
        The fitted density, with normalize=False.
    offset_ : float
        `decision_function` is `score_samples` minus it.
    n_features_in_ : int
    feature_names_in_ : array `(n_features,)`, where X had names

    Notes
    -----
    Fitted rows are recognised by their values: a row equal to a fitted one is scored without that
    one, also by `predict`, so ``fit_predict(X)`` equals ``fit(X).predict(X)``. All other rows are
    scored against all fitted rows. Equal rows have the score of the first of them. Where the
    density is a sketch, `fit_predict` leaves every row out, and `predict` the 4,096 that are kept.

    Unlike IsolationForest's, `fit` takes no sample_weight: scores and thresholds treat rows alike,
    and a weight would need a rule of its own for each (what share of the weight, or of the rows,
    are outliers; whether a row is left out whole or by one copy).

    References
    ----------
    Novelties as rows of low density: Bishop, "Novelty detection and neural network validation",
    1994. Densities that leave the row itself out: Habbema, Hermans and van den Broek, 1974; Duin,
    1976. contamination="auto": Tukey, "Exploratory Data Analysis", 1977. The default bandwidth
    counts neighbors, (sum k)^2 / sum k^2, as Kish, "Survey Sampling", 1965, counts weighted rows;
    its number of 5 comes from the measurements in docs/outliers.md.

    Examples
    --------
    >>> import numpy as np
    >>> from lshkit.kde import LSHOutlierDetector
    >>> X = np.r_[np.random.default_rng(0).normal(size=(500, 4)), np.full((1, 4), 6.0)]
    >>> detector = LSHOutlierDetector(contamination=0.01).fit(X)
    >>> detector.predict(np.array([[0.0] * 4, [7.0] * 4]))
    array([ 1, -1])
    """

    density: LSHKernelDensity | None
    density_: LSHKernelDensity
    n_features_in_: int
    feature_names_in_: np.ndarray
    _n_added: int
    _kept: Any  # of a sketch: some of its rows, and their keys
    _prepared: tuple[float, np.ndarray, KnownRows] | None

    def __init__(
        self,
        density: LSHKernelDensity | None = None,
        *,
        contamination: float | str = "auto",
        random_state: RandomState = None,
        n_jobs: int | None = None,
    ) -> None:
        self.density = density
        self.contamination = contamination
        self.random_state = random_state
        self.n_jobs = n_jobs

    # ---- fitting ----

    def fit(self, X: Rows, y: object = None) -> Self:
        """Fits the rows X `(n_samples, n_features)`, outliers among them or not. Returns self.

        y is ignored. ValueError for fewer than 2 rows, and as `LSHKernelDensity.fit`: what was
        fitted before stays then.
        """
        with restored_after_errors(self):
            self._add(X, first=True)
            self._prepare()
        return self

    def partial_fit(self, X: Rows, y: object = None) -> Self:
        """Adds the rows X `(n_samples, n_features)`; returns self. Sketches need constant memory.

        y is ignored. One row is enough, but for a sketch with a rule for the bandwidth; scores need
        2 in all. ValueError for another number of features than before, and as
        `LSHKernelDensity.partial_fit`.

        The threshold is computed when it is next asked for: from all rows, or, where the density is
        a sketch, from a random sample of 4,096 of them (the last, where the sketch forgets).
        """
        self._add(X, first=not self.__sklearn_is_fitted__())
        return self

    def _add(self, X: Rows, first: bool) -> None:
        check_contamination(self.contamination)
        density = self._new_density() if first else self.density_
        X = as_rows(self, X, first, density.kernel)
        with alone(None if first else density._kde_sketch):
            self._prepared = None
            density.partial_fit(X)
            if first:
                self._lock, self._kept = threading.RLock(), None
            if density._kde_sketch is not None:
                self._keep(density, X)
            self.density_ = density

    def _check_parameters(self) -> None:
        """Those that the density of `fit` would not be made with."""
        check_contamination(self.contamination)
        density = self._new_density()
        check_parameters(density)
        random_of(density.random_state)

    def _new_density(self) -> LSHKernelDensity:
        density = self.density
        if density is None:
            density = LSHKernelDensity(bandwidth="neighbors")
        elif not isinstance(density, LSHKernelDensity):
            raise TypeError(f"density must be an LSHKernelDensity, got {type(density).__name__}")
        given = {"random_state": self.random_state, "n_jobs": self.n_jobs}
        given = {name: value for name, value in given.items() if value is not None}
        return clone(density).set_params(normalize=False, **given)

    def _is_sketch(self) -> bool:
        return self.density_.algorithm == "bucket_sum"

    def _keep(self, density: LSHKernelDensity, X: np.ndarray) -> None:
        """Keeps the rows with the largest keys: random ones, or numbers that count the rows."""
        kept = N_KEPT
        rows, keys = self._kept or (X[:0], np.zeros(0))
        first = 0 if self._kept is None else self._n_added
        self._n_added = first + len(X)
        if density.sliding_window is None and density.half_life is None:
            new = np.random.default_rng([density._kde_seed, 6, first]).random(len(X))
        else:
            new = first + np.arange(len(X), dtype=np.float64)
            kept = min(kept, density.sliding_window or kept)
        rows, keys = np.concatenate([rows, X]), np.concatenate([keys, new])
        if len(keys) > kept:
            largest = np.sort(np.argpartition(keys, -kept)[-kept:])
            rows, keys = rows[largest], keys[largest]
        self._kept = rows, keys

    def _prepare(self) -> tuple[float, np.ndarray, KnownRows]:
        """Threshold, and of rows their scores and their index; computed when there are none."""
        check_is_fitted(self)
        prepared = self._prepared
        if prepared is None:
            with self._lock:
                prepared = self._prepared
                if prepared is None:
                    prepared = self._prepared = self._make()
        return prepared

    def _make(self) -> tuple[float, np.ndarray, KnownRows]:
        if self.density_.n_samples_seen_ < 2:
            raise ValueError("X must have at least 2 rows, got n_samples = 1: others score a row")
        if self._is_sketch():
            rows, arrivals = self._kept
            scores = self._without_own(rows, self._n_added - 1 - arrivals)
        else:
            density = self.density_
            method = density._method
            assert isinstance(method, Method)
            with core_threads(density.n_jobs) as threads:
                scores = np.maximum(log_means_of_rows(method, threads), LEAST)
        known = KnownRows(self._known_rows())
        first = known.find(*[self._known_rows()] * 2)
        # -1: the hash of another row is the same.
        scores = scores[np.where(first >= 0, first, np.arange(len(scores)))]
        return threshold(scores, self.contamination, self._weights_of_kept()), scores, known

    def _weights_of_kept(self) -> np.ndarray | None:
        """What the rows kept by a sketch with a half-life count for the threshold; or None."""
        half_life = self.density_.half_life if self._is_sketch() else None
        if half_life is None:
            return None
        return np.exp2((self._kept[1] - (self._n_added - 1)) / half_life)

    def _known_rows(self) -> np.ndarray:
        return self._kept[0] if self._is_sketch() else self.density_._training_rows()[0]

    def _without_own(self, X: np.ndarray, ages: np.ndarray) -> np.ndarray:
        """Scores of rows that were added to a sketch, each without itself.

        ages: the number of rows after each; not read where the sketch doesn't forget.
        """
        mean = self.density_.kernel_mean(np.asarray(X, np.float64))
        sketch = self.density_._kde_sketch
        assert sketch is not None
        logs = log_without_own(mean, sketch.total, sketch.weights_of(ages))
        return np.maximum(logs, self._least())

    def _least(self) -> float:
        """The least score: of a sketch half of what one row adds in one hash."""
        sketch = self.density_._kde_sketch
        if sketch is None:
            return LEAST
        (newest,) = sketch.weights_of(np.zeros(1))
        return -math.log(2 * sketch.n_hashes * max(sketch.total / newest, 1.0))

    @property
    def offset_(self) -> float:
        """The threshold."""
        return self._prepare()[0]

    # ---- queries ----

    def score_samples(self, X: Rows) -> NDArray[np.float64]:
        """log of the kernel mean of each row of X `(n_samples, n_features)`.

        `(n_samples,)` float64, finite: the lower, the more of an outlier. Fitted rows are scored
        without themselves. NotFittedError before `fit`; ValueError for rows with NaN or infinity,
        for another number of features than fitted, and where fewer than 2 rows were.
        """
        check_is_fitted(self)
        _, known_scores, known = self._prepare()
        X = np.asarray(as_queries(self, X, self.density_.kernel), np.float64)
        scores = np.maximum(self.density_.score_samples(X), self._least())
        rows = known.find(X, self._known_rows())
        return np.where(rows >= 0, known_scores[rows], scores)

    def decision_function(self, X: Rows) -> NDArray[np.float64]:
        """`score_samples` minus `offset_`: negative for outliers; `(n_samples,)` float64.

        Rows X and errors as of `score_samples`.
        """
        return self.score_samples(X) - self.offset_

    def predict(self, X: Rows) -> NDArray[np.int64]:
        """-1 for outliers and 1 for inliers, `(n_samples,)` int64.

        Rows X and errors as of `score_samples`.
        """
        return np.where(self.decision_function(X) < 0, -1, 1)

    def fit_predict(self, X: Rows, y: object = None) -> NDArray[np.int64]:
        """Fits X and returns -1 for its outliers, each judged by the other rows, and 1 for others.

        X `(n_samples, n_features)`, the result `(n_samples,)` int64; errors as of `fit`.
        The same as ``fit(X).predict(X)``, but a sketch leaves out every row, known or not.
        """
        self.fit(X)
        return np.where(self._scores_of_fitted(X) < self.offset_, -1, 1)

    def _scores_of_fitted(self, X: Rows) -> np.ndarray:
        """Scores of the rows X that `fit` was last given, each without itself; `(n_samples,)`."""
        _, scores, _ = self._prepare()
        if not self._is_sketch() or len(scores) == self._n_added:
            return scores
        X = as_rows(self, X, False, self.density_.kernel)
        return self._without_own(X, np.arange(len(X))[::-1])

    # ---- persistence ----

    def save(self, file: File) -> None:
        """Writes the detector to an .npz file, without pickle; see `LSHKernelDensity.save`."""
        self._prepare()
        persistence.save_detector(self, file)

    @classmethod
    def load(cls, file: File) -> Self:
        """Reads a detector written by `save`; ValueError for other files."""
        return persistence.load_detector(cls, LSHKernelDensity, file)

    def _restore(
        self, density: LSHKernelDensity, header: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> None:
        """Takes the contents of a file; ValueError for what no detector has."""
        check_contamination(self.contamination)
        check_n_jobs(self.n_jobs)
        random_of(self.random_state)
        self.density_, self._lock, self._kept = density, threading.RLock(), None
        self.density, self.n_features_in_ = clone(density), density.n_features_in_
        offset = checks.real(header["offset"])
        if self._is_sketch():
            self._n_added = checks.integer("n_added", header["n_added"], 1)
            self._kept = rows, keys = tuple(arrays[name] for name in persistence.KEPT)
            n, d = len(rows), self.n_features_in_
            if n == 0 or rows.shape != (n, d) or keys.shape != (n,):
                raise ValueError(f"rows kept for the threshold must have shape (n, {d})")
        scores, rows = arrays["detector.scores"], self._known_rows()
        if scores.shape != (len(rows),):
            raise ValueError(f"scores must have shape ({len(rows)},), got {scores.shape}")
        for x in arrays.values():
            if not np.isfinite(x).all():
                raise ValueError("scores and rows must be finite numbers")
        if not math.isfinite(offset):
            raise ValueError(f"offset must be a finite number, got {header['offset']!r}")
        self._prepared = offset, scores, KnownRows(rows)

    def __getstate__(self) -> dict[str, Any]:
        density = vars(self).get("density_")
        sketch = None if density is None else density._kde_sketch
        with alone(sketch):
            state = super().__getstate__().copy()
            if sketch is not None:
                state["density_"] = copy.deepcopy(density)
        state.pop("_lock", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.__sklearn_is_fitted__():
            self._lock = threading.RLock()

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "density_")


def check_contamination(contamination: float | str) -> None:
    if isinstance(contamination, str) and contamination == "auto":
        return
    if not 0 < checks.real(contamination) <= 0.5:
        got = checks.shown(contamination)
        raise ValueError(f"contamination must be 'auto' or a number in (0, 0.5], got {got}")


def threshold(
    scores: np.ndarray, contamination: float | str, weights: np.ndarray | None = None
) -> float:
    """The score below which rows are outliers; those without density always are."""
    if isinstance(contamination, str):  # "auto"
        low, high = (quantile(scores, share, weights) for share in (0.25, 0.75))
        level = float(low - FENCE * (high - low))
    else:
        level = float(quantile(scores, contamination, weights))
    return level if level > LEAST else float(np.min(scores[scores > LEAST], initial=0.0))


def quantile(scores: np.ndarray, share: float, weights: np.ndarray | None) -> float:
    """np.quantile; with weights, the least score at or below which this share of them lies."""
    if weights is None:
        return np.percentile(scores, 100 * share)
    order = np.argsort(scores)
    below = np.cumsum(weights[order])
    return scores[order][np.searchsorted(below, share * below[-1])]

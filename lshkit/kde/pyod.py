"""`LSHKDE`: `LSHOutlierDetector` as a detector of PyOD. Importing this module imports pyod."""

from __future__ import annotations

try:
    from pyod.models.base import BaseDetector
except ImportError as error:
    raise ImportError(f"lshkit.kde.pyod needs PyOD ({error}): pip install pyod") from error

from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from lshkit.kde.estimator import LSHKernelDensity
from lshkit.kde.outliers import LEAST, LSHOutlierDetector, threshold
from lshkit.typing import RandomState, Rows

if TYPE_CHECKING:
    from typing_extensions import Self


class LSHKDE(BaseDetector):
    """Kernel density as an outlier detector of PyOD; fitted rows are scored without themselves.

    Parameters
    ----------
    contamination : float in (0, 0.5], or a thresholding object
        The share of outliers in the fitted rows, as in PyOD's other detectors. Where more of them
        have density 0 (of compact kernels), those are the outliers.
    density, random_state, n_jobs
        As of `lshkit.kde.LSHOutlierDetector`.

    Attributes
    ----------
    detector_ : LSHOutlierDetector
    decision_scores_ : array `(n_samples,)`
        Of the fitted rows, high for outliers: minus their scores.
    threshold_ : float
    labels_ : array `(n_samples,)`
        1 for outliers, 0 for inliers.

    Examples
    --------
    >>> from lshkit.kde.pyod import LSHKDE  # doctest: +SKIP
    >>> LSHKDE(contamination=0.05).fit(X).predict(X_new)  # doctest: +SKIP
    """

    threshold_: float
    labels_: np.ndarray

    def __init__(
        self,
        contamination: float = 0.1,
        density: LSHKernelDensity | None = None,
        random_state: RandomState = None,
        n_jobs: int | None = None,
    ) -> None:
        super().__init__(contamination=contamination)
        self.density = density
        self.random_state = random_state
        self.n_jobs = n_jobs

    def fit(self, X: Rows, y: object = None) -> Self:
        """Fits the rows X `(n_samples, n_features)`. y is ignored. Returns self."""
        self._set_n_classes(y)
        options: dict[str, Any] = {"random_state": self.random_state, "n_jobs": self.n_jobs}
        self.detector_ = LSHOutlierDetector(self.density, **options).fit(X)
        self.decision_scores_ = -self.detector_._scores_of_fitted(X)
        self._process_decision_scores()
        if self.threshold_ == -LEAST:  # no score is above that of density 0
            self.threshold_ = -threshold(-self.decision_scores_, self.contamination)
            self.labels_ = (self.decision_scores_ > self.threshold_).astype(int)
        return self

    def decision_function(self, X: Rows) -> np.ndarray:
        """Scores of the rows of X `(n_samples, n_features)`, float64: high for outliers.

        Rows that were fitted have the scores in `decision_scores_`, which leave the row itself out.
        """
        check_is_fitted(self, ["decision_scores_", "threshold_", "labels_"])
        return -self.detector_.score_samples(X)

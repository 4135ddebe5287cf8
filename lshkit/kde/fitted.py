"""What the estimators share that answer queries by a method or a sketch, their `_method`."""

import contextlib
from collections.abc import Iterator

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import Tags


@contextlib.contextmanager
def restored_after_errors(estimator: BaseEstimator) -> Iterator[None]:
    """The attributes come back after an error: a fit that fails leaves what was fitted."""
    before = vars(estimator).copy()
    try:
        yield
    except BaseException:
        estimator.__dict__.clear()
        estimator.__dict__.update(before)
        raise


class FittedEstimator(BaseEstimator):
    n_features_in_: int
    n_samples_seen_: int

    @property
    def algorithm_(self) -> str:
        """The algorithm in use."""
        return self._method.name

    @property
    def bandwidth_(self) -> float | np.ndarray:
        """The bandwidth in use: one number where all features have the same."""
        widths = self._method.geometry.bandwidth
        return float(widths[0]) if (widths == widths[0]).all() else widths

    @property
    def extra_memory_(self) -> int:
        """Bytes kept beside the rows, at most; of a sketch, all that is kept."""
        return self._method.nbytes

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "n_samples_seen_")

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        return tags

"""What the estimators share that answer queries by a method or a sketch, their `_method`."""

import contextlib
from collections.abc import Iterator

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import Tags


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

    @contextlib.contextmanager
    def _fitted_anew(self, prefix: str) -> Iterator[None]:
        """Without what was fitted, under names with that prefix: it comes back after an error."""
        before = vars(self).copy()
        for name in before:
            if name.endswith("_") or name.startswith(prefix):
                delattr(self, name)
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "n_samples_seen_")

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        return tags

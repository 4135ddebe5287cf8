"""What the estimators share that answer queries by a method or a sketch, their `_method`."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import Tags

from lshkit.kde.changes import alone


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
    _prefix: ClassVar[str]  # of the names of _sketch, _method and, if there is one, _lock

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

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy or pickle, with a sketch of its own, as it is between two changes."""
        sketch, method, lock = (f"{self._prefix}{x}" for x in ("_sketch", "_method", "_lock"))
        kept = vars(self).get(sketch)
        with alone(kept):
            state = super().__getstate__().copy()
            if kept is not None:
                state[sketch] = copy.deepcopy(kept)
        if state.get(method) is not None:
            state[method] = None  # made again, equal, at first use
        state.pop(lock, None)
        return state

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        return tags

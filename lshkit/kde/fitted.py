"""What the estimators share that answer queries by a method or a sketch, their `_method`."""

from sklearn.base import BaseEstimator


class FittedEstimator(BaseEstimator):
    @property
    def algorithm_(self):
        """The algorithm in use."""
        return self._method.name

    @property
    def bandwidth_(self):
        """The bandwidth in use: one number where all features have the same."""
        widths = self._method.geometry.bandwidth
        return float(widths[0]) if (widths == widths[0]).all() else widths

    @property
    def extra_memory_(self):
        """Bytes kept beside the rows, at most; of a sketch, all that is kept."""
        return self._method.nbytes

    def __sklearn_is_fitted__(self):
        return hasattr(self, "n_samples_seen_")

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        return tags

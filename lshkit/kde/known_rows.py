"""Which rows were fitted: found by their values, to be scored without themselves."""

import numpy as np

CHUNK = 8192
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class KnownRows:
    """An index of rows by a hash of their values: 16 bytes a row. The rows are kept elsewhere."""

    def __init__(self, X: np.ndarray) -> None:
        keys = hashes_of_rows(X)
        self.order = np.argsort(keys, kind="stable")
        self.keys = keys[self.order]

    def find(self, queries: np.ndarray, X: np.ndarray) -> np.ndarray:
        """The first row of X, those of the index, that is equal to each query; -1: none."""
        keys = hashes_of_rows(queries)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        rows = np.where(self.keys[at] == keys, self.order[at], -1)
        found = np.flatnonzero(rows >= 0)
        equal = (X[rows[found]] == queries[found]).all(axis=1)
        rows[found[~equal]] = -1
        return rows


def hashes_of_rows(X: np.ndarray) -> np.ndarray:
    """64 bits for each row, the same for equal rows."""
    rng = np.random.default_rng(0)
    factors = rng.integers(2**64, size=X.shape[1], dtype=np.uint64) | np.uint64(1)
    keys = np.empty(len(X), np.uint64)
    for first in range(0, len(X), CHUNK):
        part = np.asarray(X[first : first + CHUNK], np.float64) + 0.0  # of -0.0 makes 0.0
        words = np.ascontiguousarray(part).view(np.uint64)
        # A small integer has all its bits at the top, where a product loses them.
        words = (words ^ (words >> np.uint64(32))) * _FACTOR
        words ^= words >> np.uint64(29)
        keys[first : first + CHUNK] = (words * factors).sum(axis=1)
    return keys

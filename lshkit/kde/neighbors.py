"""bandwidth="neighbors": a width from distances between rows, for any units and dimension."""

from collections.abc import Callable

import numpy as np
from scipy.spatial.distance import cdist
from sklearn.metrics import euclidean_distances

from lshkit.kde.deviations import standard_deviations
from lshkit.kde.kernels import COMPACT
from lshkit.kde.known_rows import hashes_of_rows

NEIGHBORS = 5  # effective ones, of the median row
SAMPLED = 128, 2**15  # rows whose neighbors are looked for, and rows among which
NEAREST = 1024  # neighbors of a row that are kept
COPY = 1e-7  # the distance, of a row's own size, below which another is a copy
SHARE = 0.05  # the kernel mean that a sketch of 256 hashes tells from its noise


def of_neighbors(
    kernel: str, X: np.ndarray, weights: np.ndarray | None, sketch: bool = False
) -> np.ndarray:
    """The bandwidths `(n_features,)`: a width times the standard deviations, or 1 where one is 0.

    sketch: for one of a few hundred hashes, whose noise hides less than a twentieth of the rows.
    """
    deviations = standard_deviations(X, weights)
    deviations = np.where(deviations >= np.finfo(np.float64).tiny, deviations, 1.0)
    counted = X if weights is None else X[weights > 0]
    width = _width_of_share if sketch else _neighbor_distance
    return width(counted, 1 / deviations, kernel) * deviations


def _width_of_share(X: np.ndarray, scale: np.ndarray, kernel: str) -> float:
    """The bandwidth of scaled rows at which the median kernel mean is SHARE, without copies.

    Of 128 rows over 4,096 at most, evenly spaced, equal rows counted once: where most are equal,
    the others may be less than SHARE of all. 1 if all rows are equal.
    """
    some, among = (np.linspace(0, len(X) - 1, min(n, len(X))).astype(int) for n in (128, 4096))
    among = among[np.sort(np.unique(hashes_of_rows(X[among]), return_index=True)[1])]
    centre = np.median(X[some], axis=0)
    queries, rows = ((X[part] - centre) * scale for part in (some, among))
    distances = cdist(queries, rows, "cityblock" if kernel == "laplacian" else "euclidean")
    distances[distances <= COPY * np.linalg.norm(queries, axis=1, keepdims=True)] = np.inf
    found = distances[np.isfinite(distances)]
    if len(found) == 0:
        return 1.0
    power = 2 if kernel == "gaussian" else 1

    def share(width: float) -> float:
        return np.median(np.exp(-((distances / width) ** power) / power).mean(axis=1))

    return _width_at(SHARE, share, found)


def _neighbor_distance(X: np.ndarray, scale: np.ndarray, kernel: str) -> float:
    """The bandwidth of scaled rows at which a median row has 5 effective neighbors.

    (sum k)^2 / sum k^2 of them (Kish 1965), equal rows counted once; of compact kernels, the
    distance to the 5th. Of 128 rows, among 32,768 at most, evenly spaced. 1 if all rows are equal.
    """
    some, among = (np.linspace(0, len(X) - 1, min(n, len(X))).astype(int) for n in SAMPLED)
    among = among[np.unique(hashes_of_rows(X[among]), return_index=True)[1]]
    centre = np.median(X[some], axis=0)
    queries = (X[some] - centre) * scale
    size = np.linalg.norm(queries, axis=1, keepdims=True)
    nearest = np.full((len(queries), 0), np.inf)
    for first in range(0, len(among), 4096):
        rows = (X[among[first : first + 4096]] - centre) * scale
        if kernel == "laplacian":
            distances = cdist(queries, rows, "cityblock")
        else:
            distances = euclidean_distances(queries, rows)
        distances[distances <= COPY * size] = np.inf
        nearest = np.hstack([nearest, distances])
        if nearest.shape[1] > NEAREST:
            nearest = np.partition(nearest, NEAREST, axis=1)[:, :NEAREST]
    nearest = np.sort(nearest, axis=1)
    nearest = nearest[np.isfinite(nearest[:, 0])]
    if len(nearest) == 0:
        return 1.0
    counts = np.isfinite(nearest).sum(axis=1)
    if kernel in COMPACT or np.median(counts) < 2 * NEIGHBORS:
        at = np.minimum(counts, NEIGHBORS) - 1
        return float(np.median(nearest[np.arange(len(nearest)), at]))
    power = 2 if kernel == "gaussian" else 1

    def neighbors(width: float) -> float:
        k = np.exp(((nearest[:, :1] / width) ** power - (nearest / width) ** power) / power)
        return np.median(k.sum(axis=1) ** 2 / (k**2).sum(axis=1))

    return _width_at(NEIGHBORS, neighbors, nearest[np.isfinite(nearest)])


def _width_at(wanted: float, of_width: Callable[[float], float], distances: np.ndarray) -> float:
    """The width at which a value that grows with it is as wanted, to 0.1 %, by bisection."""
    low, high = 1e-3 * distances.min(), 1e3 * distances.max()
    while high > 1.001 * low:
        width = np.sqrt(low) * np.sqrt(high)
        low, high = (width, high) if of_width(width) < wanted else (low, width)
    return float(width)

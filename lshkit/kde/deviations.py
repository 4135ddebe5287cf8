"""Standard deviations of features, weighted."""

import numpy as np


def effective_rows(X: np.ndarray, weights: np.ndarray | None) -> float:
    """(sum of weights)^2 over the sum of their squares."""
    return 1 / np.sum(_shares(X, weights) ** 2)


def standard_deviations(X: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Of every feature, float64 `(n_features,)`, unbiased variances; 0 for constant features.

    All are 0 where a single row counts.
    """
    shares, effective = _shares(X, weights), effective_rows(X, weights)
    if len(X) < 2 or effective <= 1:
        return np.zeros(X.shape[1])
    # In units in which the squares of float64 neither overflow nor underflow.
    units = np.frexp(np.maximum(X.max(axis=0), -X.min(axis=0)).astype(np.float64))[1]
    mean, variance = np.zeros(X.shape[1]), np.zeros(X.shape[1])
    parts = [slice(first, first + 8192) for first in range(0, len(X), 8192)]
    for part in parts:
        mean += shares[part] @ np.ldexp(X[part].astype(np.float64), -units)
    for part in parts:
        deviations = np.ldexp(X[part].astype(np.float64), -units) - mean
        variance += shares[part] @ deviations**2
    counted = X if weights is None else X[weights > 0]
    constant = (variance <= 0) | (counted == counted[0]).all(axis=0)
    variance = np.where(constant, 0, variance / (1 - 1 / effective))
    return np.ldexp(np.sqrt(variance), units)


def _shares(X: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    return np.full(len(X), 1 / len(X)) if weights is None else weights / weights.sum()

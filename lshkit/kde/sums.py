"""Sums of kernels over rows, in log space: what all exact and sampled sums are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

EXACT = 1e-6  # error of a log kernel that float32 may bring
SAMPLED = 1e-3  # the same of a sampled estimate
LOWEST = -1e308  # a log kernel, of rows that are FARTHEST apart, is more
SUMS = "shift", "total", "squares"


class Sums:
    """Sums of terms and of their squares for every query: exp(shift) * total, exp(2 shift) * ..."""

    __slots__ = ("shift", "squares", "total")

    def __init__(self, shift: np.ndarray, total: np.ndarray, squares: np.ndarray) -> None:
        self.shift, self.total, self.squares = shift, total, squares

    @classmethod
    def zeros(cls, n: int) -> Sums:
        return cls(np.full(n, -np.inf), np.zeros(n), np.zeros(n))

    @classmethod
    def of(cls, columns: np.ndarray) -> Sums:
        """Sums as the core writes them, in the first columns of an array."""
        return cls(columns[:, 0], columns[:, 1], columns[:, 2])

    @classmethod
    def joined(cls, parts: Sequence[Sums]) -> Sums:
        return cls(*(np.concatenate([getattr(p, a) for p in parts]) for a in SUMS))

    def __add__(self, other: Sums) -> Sums:
        shift = np.maximum(self.shift, other.shift)
        finite = np.maximum(shift, LOWEST)  # so that the factor of a shift of -inf is 0
        a, b = np.exp(self.shift - finite), np.exp(other.shift - finite)
        squares = self.squares * a**2 + other.squares * b**2
        return Sums(shift, self.total * a + other.total * b, squares)

    def without(self, part: Sums) -> Sums:
        """The sums without those of a part of the rows; what rounding leaves below 0 is 0."""
        rest = self + Sums(part.shift, -part.total, -part.squares)
        return Sums(rest.shift, np.maximum(rest.total, 0), np.maximum(rest.squares, 0))

    def log(self) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return self.shift + np.log(self.total)

    def __getitem__(self, index: Any) -> Sums:
        return Sums(self.shift[index], self.total[index], self.squares[index])

    def __setitem__(self, index: Any, part: Sums) -> None:
        for name in SUMS:
            getattr(self, name)[index] = getattr(part, name)


def sums_of_pairs(indptr: np.ndarray, log_terms: np.ndarray, factors: np.ndarray) -> Sums:
    """`Sums` over each query's listed pairs of factor * exp(log_term), -inf for terms of 0."""
    n = len(indptr) - 1
    sums = Sums.zeros(n)
    full = np.flatnonzero(np.diff(indptr))
    if len(full) == 0:
        return sums
    starts = indptr[full]
    sums.shift[full] = np.maximum.reduceat(log_terms, starts)
    rows = np.repeat(np.arange(n), np.diff(indptr))
    terms = factors * np.exp(log_terms - np.maximum(sums.shift, LOWEST)[rows])
    sums.total[full] = np.add.reduceat(terms, starts)
    sums.squares[full] = np.add.reduceat(terms**2, starts)
    return sums

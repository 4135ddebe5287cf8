"""What the methods share that find rows by hashing: tables, pairs, far queries, and costs."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import numpy as np

from lshkit.buckets import HashTables, pair_distances, pair_products
from lshkit.hashing.family import HashFamily
from lshkit.kde.method import Estimate, Method
from lshkit.kde.sums import DOUBLE_ROUNDING, ROUNDING, SAMPLED, Sums

if TYPE_CHECKING:
    from lshkit.kde.sums import PermutedRows

# Costs in rows (what brute force spends on one): of a row that is looked up, of a bucket's entry
# that is counted, of a draw, of hashing a query by one hash. Measured at d = 64.
LOOK_UP, ENTRY, DRAW, HASH = 30.0, 1.5, 150.0, 5.0


class HashedMethod(Method):
    """A method with `buckets`, which answers queries that their rows' type does not hold exactly.

    Distances from such a query would be wrong, or infinite; rows beside it there are none.
    """

    buckets: Buckets
    permuted: PermutedRows

    def sampled(
        self, queries: np.ndarray, threads: int, stop: int | None = None, with_error: bool = True
    ) -> Estimate:
        held = self.buckets.hold(queries)
        if held.all():
            return self._sampled(queries, threads, stop)
        n = len(queries)
        out = Estimate(np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n, np.int64))
        if held.any():
            out[held] = self._sampled(queries[held], threads, stop)
        rest = queries[~held]
        last = len(self.permuted) if stop is None else stop
        if last == len(self.training.X):
            sums = self.training.sums(rest, threads, in_blocks=False)
        else:  # those before `stop`, or all but a block
            sums = self.permuted.sums(rest, 0, last, threads)
        rows = np.full(len(rest), last)
        out[~held] = Estimate(sums.shift, sums.total / self.training.total, 0.0 * sums.total, rows)
        return out

    @abc.abstractmethod
    def _sampled(self, queries: np.ndarray, threads: int, stop: int | None) -> Estimate:
        """The same of queries that the buckets hold."""

    @property
    def nbytes(self) -> int:
        return self.buckets.nbytes


class Buckets:
    """Hash tables of the permuted rows from `start` to `stop`."""

    def __init__(
        self, permuted: PermutedRows, hasher: HashFamily, start: int = 0, stop: int | None = None
    ) -> None:
        self.permuted, self.hasher, self.start = permuted, hasher, start
        self.stop = len(permuted) if stop is None else stop
        self.rows = permuted.rows[start:stop]
        self.weights = None if permuted.weights is None else permuted.weights[start:stop]
        self.tables = HashTables(hasher.hash(self.rows), weights=self.weights)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def kernel(self) -> str:
        return self.permuted.training.geometry.kernel

    def hold(self, queries: np.ndarray) -> np.ndarray:
        """Which scaled queries have distances from the rows that are right in the rows' type."""
        unit = ROUNDING if self.rows.dtype == np.float32 else DOUBLE_ROUNDING
        with np.errstate(over="ignore"):
            norms = np.sqrt(np.einsum("ij,ij->i", queries, queries))
            return self.permuted.training.geometry.rounding(norms, unit) <= SAMPLED

    def codes(self, queries: np.ndarray) -> np.ndarray:
        return self.hasher.hash(queries.astype(self.rows.dtype))

    def weights_of(self, indices: np.ndarray) -> np.ndarray:
        return np.ones(len(indices)) if self.weights is None else self.weights[indices]

    def distances(self, queries: np.ndarray, indptr: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Of listed pairs: what the kernel is a function of, the angle for the angular one."""
        queries = queries.astype(self.rows.dtype)
        if self.kernel == "angular":
            cosines = pair_products(queries, self.rows, indptr, indices).astype(np.float64)
            return np.arccos(np.clip(cosines, -1, 1))
        p = 1 if self.kernel == "laplacian" else 2
        distances = pair_distances(queries, self.rows, indptr, indices, p=p).astype(np.float64)
        return distances if p == 1 else np.sqrt(distances)

    @property
    def nbytes(self) -> int:
        return self.permuted.nbytes + self.tables.nbytes


def sums_of_pairs(indptr: np.ndarray, log_terms: np.ndarray, factors: np.ndarray) -> Sums:
    """`Sums` over each query's listed pairs of factor * exp(log_term)."""
    n = len(indptr) - 1
    sums = Sums.zeros(n)
    full = np.flatnonzero(np.diff(indptr))
    if len(full) == 0:
        return sums
    starts = indptr[full]
    sums.shift[full] = np.maximum.reduceat(log_terms, starts)
    rows = np.repeat(np.arange(n), np.diff(indptr))
    terms = factors * np.exp(log_terms - sums.shift[rows])
    sums.total[full] = np.add.reduceat(terms, starts)
    sums.squares[full] = np.add.reduceat(terms**2, starts)
    return sums

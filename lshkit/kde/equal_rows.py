"""Which of the permuted rows are equal, and equal to a query."""

from __future__ import annotations

import functools

import numpy as np

from lshkit.kde.cells import Groups
from lshkit.kde.sums import Sums
from lshkit.kde.training import PermutedRows

AT_ONCE = 8192  # rows that are hashed
EMPTY = 8  # entries, about, of the table of hashes' first bits, to one that is filled


class EqualRows(Groups):
    """Groups of rows with one hash of their bits, which `NearFar` reads as it does cells.

    No result depends on whether rows of one hash are equal: what is summed is their kernel.
    """

    n_cells = 1  # of which more could be read

    def __init__(self, permuted: PermutedRows) -> None:
        self.permuted = permuted
        rows = permuted.rows
        rng = np.random.default_rng(0)
        self.factors = rng.integers(2**64, size=rows.shape[1], dtype=np.uint64) | np.uint64(1)
        parts = [self._hash(rows[i : i + AT_ONCE]) for i in range(0, len(rows), AT_ONCE)]
        hashes = np.concatenate(parts)
        self.order = np.argsort(hashes, kind="stable").astype(np.int32)
        self.hashes, first = np.unique(hashes[self.order], return_index=True)
        self.shift = np.uint64(64 - max(len(rows) * EMPTY, 2).bit_length())
        self.filled = np.zeros(2 ** (64 - int(self.shift)), bool)
        self.filled[self.hashes >> self.shift] = True
        self.indptr = np.append(first, len(rows)).astype(np.int64)

    def _hash(self, rows: np.ndarray) -> np.ndarray:
        dtype = self.permuted.rows.dtype
        bits = np.ascontiguousarray(rows, dtype) + dtype.type(0)  # -0 is 0
        whole = bits.view(np.uint64 if bits.shape[1] % 2 == 0 else f"u{dtype.itemsize}")
        return whole.astype(np.uint64, copy=False) @ self.factors[: whole.shape[1]]

    def nearest(self, queries: np.ndarray, n_probes: int, threads: int) -> np.ndarray:
        """The group of each query, -1 for none, `(n, 1)`."""
        hashes, groups = self._hash(queries), np.full((len(queries), 1), -1, np.int32)
        some = np.flatnonzero(self.filled[hashes >> self.shift])  # of others, few
        at = np.minimum(np.searchsorted(self.hashes, hashes[some]), len(self.hashes) - 1)
        equal = self.hashes[at] == hashes[some]
        groups[some[equal], 0] = at[equal]
        return groups

    def before(self, groups: np.ndarray, stop: int | None) -> np.ndarray:
        """Which groups (-1: none) have a permuted row before `stop`."""
        last = len(self.order) if stop is None else stop
        return (groups >= 0) & (self.order[self.indptr[:-1][groups]] < last)

    @functools.cached_property
    def of_row(self) -> np.ndarray:
        """The group of each permuted row, int32."""
        groups = np.empty(len(self.order), np.int32)
        groups[self.order] = np.repeat(
            np.arange(len(self.hashes), dtype=np.int32), np.diff(self.indptr)
        )
        return groups

    def sums(
        self,
        queries: np.ndarray,
        probes: np.ndarray,
        threads: int,
        first: int = 0,
        last: int | None = None,
    ) -> tuple[Sums, np.ndarray]:
        """`Sums` over the rows of some groups, and their number, as of `Cells`."""
        if probes.shape[1] == 0:
            return Sums.zeros(len(queries)), np.zeros(len(queries))
        last = len(self.order) if last is None else last
        return self.few_sums(queries, probes, threads, first, last)

    def few_sums(
        self, queries: np.ndarray, probes: np.ndarray, threads: int, first: int, last: int
    ) -> tuple[Sums, np.ndarray]:
        sums, counts, groups = Sums.zeros(len(queries)), np.zeros(len(queries)), probes[:, 0]
        lowest, highest = self.order[self.indptr[groups]], self.order[self.indptr[groups + 1] - 1]
        some = np.flatnonzero((lowest < last) & (highest >= first))  # of most groups, none
        if len(some):
            found = super().few_sums(queries[some], probes[some], threads, first, last)
            sums[some], counts[some] = found
        return sums, counts

    @property
    def nbytes(self) -> int:
        made = self.__dict__.get("of_row")
        of_row = 0 if made is None else made.nbytes
        arrays = self.order, self.hashes, self.indptr, self.filled
        return sum(x.nbytes for x in arrays) + of_row

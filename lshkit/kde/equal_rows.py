"""Which of the permuted rows are equal, and equal to a query."""

from __future__ import annotations

import numpy as np

from lshkit.kde.cells import Groups
from lshkit.kde.sums import Sums
from lshkit.kde.training import PermutedRows

AT_ONCE = 8192  # rows that are hashed


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
        self.indptr = np.append(first, len(rows)).astype(np.int64)

    def _hash(self, rows: np.ndarray) -> np.ndarray:
        dtype = self.permuted.rows.dtype
        bits = np.ascontiguousarray(rows, dtype) + dtype.type(0)  # -0 is 0
        return bits.view(f"u{dtype.itemsize}").astype(np.uint64) @ self.factors

    def nearest(self, queries: np.ndarray, n_probes: int, threads: int) -> np.ndarray:
        """The group of each query, -1 for none, `(n, 1)`."""
        hashes = self._hash(queries)
        at = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return np.where(self.hashes[at] == hashes, at, -1).astype(np.int32)[:, None]

    def before(self, groups: np.ndarray, stop: int | None) -> np.ndarray:
        """Which groups (-1: none) have a permuted row before `stop`."""
        last = len(self.order) if stop is None else stop
        return (groups >= 0) & (self.order[self.indptr[:-1][groups]] < last)

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

    @property
    def nbytes(self) -> int:
        return self.order.nbytes + self.hashes.nbytes + self.indptr.nbytes

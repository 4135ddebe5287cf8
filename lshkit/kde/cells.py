"""The rows in cells, each of those nearest to one of some centres: k-means of a random sample.

A Voronoi partition: where rows lie densely its cells are small, so that a few cells hold the near
rows of any query and hardly more. A cell's rows lie side by side, and are read as they lie.
"""

from __future__ import annotations

import numpy as np

from lshkit import _C
from lshkit.kde import kernels
from lshkit.kde.sums import Sums
from lshkit.kde.training import BLOCK, PermutedRows, blocks_of

CENTRES, MOST_CELLS = 4.0, 2048  # times the root of the number of rows, rounded to a power of 2
SAMPLE, N_STEPS = 16, 3  # rows of the sample, times the number of cells; steps of k-means
AT_ONCE = 256  # blocks that are filled from one copy of their rows


def count_of(n_rows: int) -> int:
    """How many cells so many rows get."""
    return int(min(2 ** round(np.log2(CENTRES * np.sqrt(n_rows))), MOST_CELLS, n_rows))


class Groups:
    """Permuted rows in groups: those of group g are order[indptr[g] : indptr[g + 1]]."""

    permuted: PermutedRows
    order: np.ndarray  # int32
    indptr: np.ndarray  # int64

    def few_sums(
        self, queries: np.ndarray, probes: np.ndarray, threads: int, first: int, last: int
    ) -> tuple[Sums, np.ndarray]:
        """`Sums` over the rows of some groups, and their number, for few rows in each.

        Of the permuted rows from `first` to `last`.
        """
        out = np.empty((len(queries), 4))
        geometry, permuted = self.permuted.training.geometry, self.permuted
        _C.listed_kernel_sums(
            kernels.CODES[geometry.kernel],
            geometry.n_bits,
            np.ascontiguousarray(queries, permuted.rows.dtype),
            np.ascontiguousarray(probes),
            permuted.rows,
            self.order,
            self.indptr,
            permuted.weights,
            first,
            last,
            out,
            threads,
        )
        return Sums.of(out), out[:, 3]


class Cells(Groups):
    """Permuted rows in cells, of which there are some multiple of the root of their number.

    The sample that the centres come from does not depend on the permutation, so that the rows of
    some cells are spread over it evenly.
    """

    def __init__(self, permuted: PermutedRows, threads: int) -> None:
        self.permuted = permuted
        rows, training = permuted.rows, permuted.training
        n_cells = count_of(len(rows))
        size = min(n_cells * SAMPLE, len(rows))
        chosen = np.random.default_rng([training.seed, 5]).choice(len(rows), size, replace=False)
        sample = rows[np.argsort(permuted.order, kind="stable")[chosen]]
        self.n_cells, self.centres = n_cells, blocks_of(sample[:n_cells])
        for _ in range(N_STEPS):
            self._move_centres(sample, threads)
        cells = self.nearest(rows, 1, threads)[:, 0]
        self.order = np.argsort(cells, kind="stable").astype(np.int32)
        self.counts = np.bincount(cells, minlength=n_cells).astype(np.int64)
        self.indptr = np.concatenate([[0], np.cumsum(self.counts)])
        self._fill_blocks(rows, permuted.weights)

    def _move_centres(self, sample: np.ndarray, threads: int) -> None:
        """A step of k-means; a centre that no row is nearest to stays."""
        cells = self.nearest(sample, 1, threads)[:, 0]
        order = np.argsort(cells, kind="stable")
        found, starts = np.unique(cells[order], return_index=True)
        sums = np.add.reduceat(sample[order], starts, axis=0, dtype=np.float64)
        counts = np.diff(starts, append=len(sample))
        self.centres[found // BLOCK, :, found % BLOCK] = sums / counts[:, None]

    def _fill_blocks(self, rows: np.ndarray, weights: np.ndarray | None) -> None:
        """Copies the rows cell by cell; the rows of a cell begin a block."""
        n_blocks = -(-self.counts // BLOCK)
        self.first = np.cumsum(n_blocks) - n_blocks
        shift = self.first * BLOCK - self.indptr[:-1]
        places = np.arange(len(rows)) + np.repeat(shift, self.counts)
        self.blocks = np.zeros((int(n_blocks.sum()), rows.shape[1], BLOCK), rows.dtype)
        for first in range(0, len(self.blocks), AT_ONCE):
            last = min(first + AT_ONCE, len(self.blocks))
            some = slice(*np.searchsorted(places, (first * BLOCK, last * BLOCK)))
            padded = np.zeros(((last - first) * BLOCK, rows.shape[1]), rows.dtype)
            padded[places[some] - first * BLOCK] = rows[self.order[some]]
            self.blocks[first:last] = blocks_of(padded)
        self.weights = None
        if weights is not None:
            self.weights = np.zeros((len(self.blocks), BLOCK))
            self.weights.reshape(-1)[places] = weights[self.order]

    def nearest(self, queries: np.ndarray, n_probes: int, threads: int) -> np.ndarray:
        """The cells of the centres nearest to each query, the nearest first."""
        probes = np.empty((len(queries), n_probes), np.int32)
        queries = np.ascontiguousarray(queries, self.centres.dtype)
        _C.nearest_cells(queries, self.centres, self.n_cells, probes, threads)
        return probes

    def sums(
        self,
        queries: np.ndarray,
        probes: np.ndarray,
        threads: int,
        first: int = 0,
        last: int | None = None,
    ) -> tuple[Sums, np.ndarray]:
        """`Sums` over the rows of some cells, and their number.

        Of the permuted rows from `first` to `last`.
        """
        begin, end = self.counts_before(first), self.counts_before(last)
        if probes.shape[1] == 0:
            return Sums.zeros(len(queries)), np.zeros(len(queries), np.int64)
        out = np.empty((len(queries), 3))
        geometry = self.permuted.training.geometry
        _C.cell_kernel_sums(
            kernels.CODES[geometry.kernel],
            geometry.n_bits,
            np.ascontiguousarray(queries, self.blocks.dtype),
            np.ascontiguousarray(probes),
            self.blocks,
            self.first,
            begin,
            end,
            self.weights,
            out,
            threads,
        )
        return Sums.of(out), (end - begin)[probes].sum(axis=1)

    def counts_before(self, stop: int | None) -> np.ndarray:
        """How many rows of each cell are permuted rows before `stop`."""
        if stop is None or stop >= len(self.permuted):
            return self.counts
        if stop == 0:
            return np.zeros_like(self.counts)
        before = np.concatenate([[0], np.cumsum(self.order < stop)])
        return np.diff(before[self.indptr])

    @property
    def nbytes(self) -> int:
        arrays = self.blocks, self.weights, self.centres, self.order, self.indptr
        return self.permuted.nbytes + sum(x.nbytes for x in arrays if x is not None)

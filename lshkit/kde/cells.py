"""The rows in cells, each of those nearest to one of some centres: k-means of a random sample.

A Voronoi partition: where rows lie densely its cells are small, so that a few cells hold the near
rows of any query and hardly more. A cell's rows lie side by side, and are read as they lie.
"""

import numpy as np

from lshkit import _C
from lshkit.kde import kernels
from lshkit.kde.sums import BLOCK, Sums, blocks_of

CENTRES, MOST_CELLS = 4.0, 2048  # times the root of the number of rows, rounded to a power of 2
SAMPLE, N_STEPS = 16, 3  # rows of the sample, times the number of cells; steps of k-means


def count_of(n_rows):
    """How many cells so many rows get."""
    return int(min(2 ** round(np.log2(CENTRES * np.sqrt(n_rows))), MOST_CELLS, n_rows))


class Cells:
    """Permuted rows in cells, of which there are some multiple of the root of their number.

    The sample that the centres come from does not depend on the permutation, so that the rows of
    some cells are spread over it evenly.
    """

    def __init__(self, permuted, threads):
        self.permuted = permuted
        rows, training = permuted.rows, permuted.training
        n_cells = count_of(len(rows))
        size = min(n_cells * SAMPLE, len(rows))
        chosen = np.random.default_rng([training.seed, 5]).choice(len(rows), size, replace=False)
        place = np.empty(len(rows), np.int64)
        place[permuted.order] = np.arange(len(rows))
        sample = rows[place[chosen]]
        self.n_cells, self.centres = n_cells, blocks_of(sample[:n_cells])
        for _ in range(N_STEPS):
            self._move_centres(sample, threads)
        cells = self.nearest(rows, 1, threads)[:, 0]
        self.order = np.argsort(cells, kind="stable").astype(np.int32)
        self.counts = np.bincount(cells, minlength=n_cells).astype(np.int64)
        self.indptr = np.concatenate([[0], np.cumsum(self.counts)])
        n_blocks = -(-self.counts // BLOCK)
        self.first = np.cumsum(n_blocks) - n_blocks
        # Where the rows lie in the blocks: those of a cell from the start of its first one.
        shift = self.first * BLOCK - self.indptr[:-1]
        places = np.arange(len(rows)) + np.repeat(shift, self.counts)
        self.blocks = np.zeros((int(n_blocks.sum()), rows.shape[1], BLOCK), rows.dtype)
        for first in range(0, len(self.blocks), 256):
            some = slice(*np.searchsorted(places, (first * BLOCK, (first + 256) * BLOCK)))
            padded = np.zeros((min(256, len(self.blocks) - first) * BLOCK, rows.shape[1]))
            padded[places[some] - first * BLOCK] = rows[self.order[some]]
            self.blocks[first : first + 256] = blocks_of(padded)
        self.weights = None
        if permuted.weights is not None:
            self.weights = np.zeros((len(self.blocks), BLOCK))
            self.weights.reshape(-1)[places] = permuted.weights[self.order]

    def _move_centres(self, sample, threads):
        """A step of k-means; a centre that no row is nearest to stays."""
        cells = self.nearest(sample, 1, threads)[:, 0]
        order = np.argsort(cells, kind="stable")
        found, starts = np.unique(cells[order], return_index=True)
        sums = np.add.reduceat(sample[order], starts, axis=0, dtype=np.float64)
        counts = np.diff(starts, append=len(sample))
        self.centres[found // BLOCK, :, found % BLOCK] = sums / counts[:, None]

    def nearest(self, queries, n_probes, threads):
        """The cells of the centres nearest to each query, the nearest first."""
        probes = np.empty((len(queries), n_probes), np.int32)
        queries = np.ascontiguousarray(queries, self.centres.dtype)
        _C.nearest_cells(queries, self.centres, self.n_cells, probes, threads)
        return probes

    def sums(self, queries, probes, threads, first=0, last=None):
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
        return Sums(*out.T), (end - begin)[probes].sum(axis=1)

    def few_sums(self, queries, probes, threads, first, last):
        """The same, for as few rows as a sample has of a few cells."""
        out = np.empty((len(queries), 4))
        geometry, permuted = self.permuted.training.geometry, self.permuted
        _C.listed_kernel_sums(
            kernels.CODES[geometry.kernel],
            geometry.n_bits,
            np.ascontiguousarray(queries, self.blocks.dtype),
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
        return Sums(*out.T[:3]), out[:, 3]

    def counts_before(self, stop):
        """How many rows of each cell are permuted rows before `stop`."""
        if stop is None or stop >= len(self.permuted):
            return self.counts
        if stop == 0:
            return np.zeros_like(self.counts)
        before = np.concatenate([[0], np.cumsum(self.order < stop)])
        return np.diff(before[self.indptr])

    @property
    def nbytes(self):
        arrays = self.blocks, self.centres, self.order, self.indptr
        return self.permuted.nbytes + sum(x.nbytes for x in arrays)

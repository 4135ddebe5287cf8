"""The rows of an estimator, as given or permuted, and exact sums over them."""

from __future__ import annotations

import numpy as np

from lshkit.kde.geometry import (
    DOUBLE_ROUNDING,
    FARTHEST,
    ROUNDING,
    Geometry,
    centre_of,
    in_range_of_squares,
)
from lshkit.kde.sums import EXACT, SAMPLED, Sums

LEAST = 1e-37  # weight, of the largest, that float32 still holds
FEW = 8  # queries in a call, for which the rows are worth a copy in blocks
IN_BLOCKS = 2**17  # permuted rows that are kept in blocks too, where samples read them
HEAVY = 4  # mean weights, at most, of a permuted row
BLOCK = 64  # rows of a block, lshkit::kKeyBlock of the C++ core


class Training:
    """The rows of an estimator: as given, with their weights and geometry.

    Of the angular kernel, rows whose squares float64 does not hold are multiplied by powers of 2.
    ValueError for rows that are FARTHEST or more from the centre, in bandwidths.
    """

    def __init__(
        self, X: np.ndarray, weights: np.ndarray | None, geometry: Geometry, seed: int
    ) -> None:
        self.X = in_range_of_squares(X) if geometry.kernel == "angular" else X
        self.weights, self.geometry, self.seed = weights, geometry, seed
        self.total = float(len(X)) if weights is None else float(np.sum(weights))
        self.reach = 0.0
        self.blocks: np.ndarray | None = None
        with np.errstate(over="ignore", invalid="ignore"):
            for first in range(0, len(X), 4096):
                scaled = geometry.scale(X[first : first + 4096])
                norms = np.einsum("ij,ij->i", scaled, scaled)
                self.reach = float(np.maximum(self.reach, np.sqrt(norms.max())))
        if not self.reach < FARTHEST:
            raise ValueError(
                f"the fitted X must lie within {FARTHEST:g} bandwidths of its centre (the "
                f"distances of farther rows overflow), got {self.reach:.2g}"
            )

    def sums(
        self,
        queries: np.ndarray,
        threads: int,
        in_blocks: bool = True,
        given: np.ndarray | None = None,
    ) -> Sums:
        """`Sums` over all rows for queries that are scaled.

        in_blocks: whether the rows may be kept in blocks too. given: the queries as given, which
        compact kernels want.
        """
        if in_blocks and self.blocks is None and len(queries) <= FEW:
            self.blocks = blocks_of(self.X)
        return self.geometry.sums(
            queries,
            self.X,
            self.weights,
            scaled=False,
            tolerance=EXACT,
            reach=self.reach,
            threads=threads,
            blocks=self.blocks,
            given=given,
        )

    def far(self) -> np.ndarray:
        """Which rows are so far from the centre that scaled ones beside them are rounded."""
        out = np.zeros(len(self.X), bool)
        if self.geometry.far(np.full((1, 1), self.reach)).any():
            for first in range(0, len(out), 4096):
                part = slice(first, first + 4096)
                out[part] = self.geometry.far(self.geometry.scale(self.X[part]))
        return out

    @property
    def nbytes_of_blocks(self) -> int:
        """Bytes of the rows in blocks, which the first call of few queries makes."""
        return bytes_of_blocks(self.X, len(self.X))


def training_of(
    kernel: str,
    n_bits: int,
    bandwidth: np.ndarray,
    X: np.ndarray,
    weights: np.ndarray | None,
    seed: int,
) -> Training:
    """The `Training` of rows, centred for their distances; without rows that do not count."""
    if weights is not None and weights.min() < LEAST:
        X, weights = X[weights >= LEAST], weights[weights >= LEAST]
    return Training(X, weights, Geometry(kernel, n_bits, centre_of(X), bandwidth), seed)


class PermutedRows:
    """A random permutation of the rows, scaled, in float32 where that is enough.

    A row of more than HEAVY times the mean weight is several that share its weight, up to 1 / HEAVY
    of all rows more: none that a sample misses stands for much more than another.
    order[i] is the training's row that is the permuted row i.
    """

    rows: np.ndarray

    def __init__(self, training: Training) -> None:
        self.training, weights = training, training.weights
        rng = np.random.default_rng([training.seed, 1])
        n, copies = len(training.X), np.ones(len(training.X), np.int64)
        if weights is not None:
            share = weights * (n / (HEAVY * training.total))
            copies = np.maximum(np.ceil(share), 1).astype(np.int64)
        self.split = copies > 1  # of the training's rows
        self.order = np.repeat(np.arange(n), copies)[rng.permutation(copies.sum())]
        geometry = training.geometry
        single = geometry.rounding(training.reach) <= SAMPLED
        shape = len(self.order), training.X.shape[1]
        self.rows = np.empty(shape, np.float32 if single else np.float64)
        for first in range(0, len(self.rows), 4096):
            part = self.order[first : first + 4096]
            self.rows[first : first + 4096] = geometry.scale(training.X[part])
        self.weights = None if weights is None else (weights / copies)[self.order]
        self.blocks = np.empty((0, training.X.shape[1], BLOCK), self.rows.dtype)

    def __len__(self) -> int:
        return len(self.rows)

    def sums(self, queries: np.ndarray, first: int, last: int, threads: int) -> Sums:
        """`Sums` over the permuted rows from `first` to `last` for queries that are scaled."""
        weights = None if self.weights is None else self.weights[first:last]
        blocks = None
        if first % BLOCK == 0 and last <= IN_BLOCKS:
            blocks = self.blocks  # another thread may put shorter ones there
            if last > len(blocks) * BLOCK:  # made ready as far as they are wanted
                blocks = self.blocks = blocks_of(self.rows[: -(-last // BLOCK) * BLOCK])
            blocks = blocks[first // BLOCK :]
        return self.training.geometry.sums(
            queries,
            self.rows[first:last],
            weights,
            scaled=True,
            tolerance=SAMPLED,
            reach=self.training.reach,
            threads=threads,
            blocks=blocks,
        )

    def hold(self, queries: np.ndarray) -> np.ndarray:
        """Which scaled queries have distances from the rows that are right in the rows' type."""
        unit = ROUNDING if self.rows.dtype == np.float32 else DOUBLE_ROUNDING
        with np.errstate(over="ignore"):
            norms = np.sqrt(np.einsum("ij,ij->i", queries, queries))
            return self.training.geometry.rounding(norms, unit) <= SAMPLED

    @property
    def nbytes(self) -> int:
        blocks = bytes_of_blocks(self.rows, min(len(self.rows), IN_BLOCKS))
        weights = 0 if self.weights is None else self.weights.nbytes
        return self.rows.nbytes + self.order.nbytes + self.split.nbytes + weights + blocks


def blocks_of(rows: np.ndarray) -> np.ndarray:
    """Rows in blocks of 64 with features first, `(n_blocks, n_features, 64)`: 0 past the last."""
    n, d = rows.shape
    blocks = np.zeros((-(-n // BLOCK), d, BLOCK), rows.dtype)
    whole = n // BLOCK
    blocks[:whole] = rows[: whole * BLOCK].reshape(whole, BLOCK, d).transpose(0, 2, 1)
    if whole < len(blocks):
        blocks[whole, :, : n - whole * BLOCK] = rows[whole * BLOCK :].T
    return blocks


def bytes_of_blocks(rows: np.ndarray, n: int) -> int:
    return -(-n // BLOCK) * BLOCK * rows.shape[1] * rows.itemsize

"""What the sketch of a stream forgets: rows beyond a sliding window, or all rows gradually.

Objects of these classes add rows to the sketch's table and take out of it what is forgotten. Ages
count rows, not calls: results do not depend on how a stream is cut into batches.
"""

from __future__ import annotations

import abc
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from lshkit import checks
from lshkit.archive import Expected
from lshkit.buckets import BucketTable

if TYPE_CHECKING:
    from typing_extensions import Self

MIN_BLOCK = 256  # rows: the end of a block costs a few passes over the table
MAX_GROWTH = 256  # half-lives until the table is scaled down: 2^256 times 2^29 is far from infinity
PACKED = ("<u2", 2**16), ("<u4", 2**32)  # of blocks: types, and the sums that they do not hold


class Forgetting(abc.ABC):
    """A way to forget; what it keeps beside the sketch's table."""

    name: str
    exact = True  # sums of weights have no rounding
    oldest: BucketTable | None = None  # of the oldest rows, of which only the share `inside` counts
    inside = 1.0

    @abc.abstractmethod
    def add(self, table: BucketTable, codes: np.ndarray, weights: np.ndarray) -> None:
        """Adds rows, codes `(n, n_hashes)` and weights `(n,)`, to the table and forgets others."""

    def weight(self, table: BucketTable) -> float:
        """Of the rows that count, in the unit of the table."""
        return float(table.table[0].sum())

    def n_rows(self, table: BucketTable) -> int:
        return table.count

    def counting(self, table: BucketTable) -> float:
        """How many rows count, old ones in part."""
        return self.n_rows(table)

    @abc.abstractmethod
    def weights_of(self, ages: np.ndarray) -> np.ndarray:
        """What rows of these ages `(n,)`, added with weight 1, count in the unit of the table."""

    def check_mergeable(self, other: Self) -> None:
        """ValueError where `merge` has no meaning."""
        raise ValueError(
            "sketches with a sliding window cannot be merged: pass their rows to partial_fit"
        )

    def merge(self, table: BucketTable, other: Self, other_table: BucketTable) -> None:
        """Adds the table of another sketch, as if its rows had come after this one's."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return 0

    def settings(self) -> dict[str, Any]:
        """For the header of a file, JSON values."""
        return {"name": self.name}

    def arrays(self) -> dict[str, np.ndarray]:
        """For a file, by name."""
        return {}

    @classmethod
    def expected(cls, settings: dict[str, Any], table_shape: tuple[int, int, int]) -> Expected:
        """What `Archive.read` is to expect of `arrays`; ValueError for settings that cannot be."""
        return {}

    @classmethod
    @abc.abstractmethod
    def restored(
        cls,
        settings: dict[str, Any],
        arrays: dict[str, np.ndarray],
        table: BucketTable,
        n_rows: int,
    ) -> Self:
        """As it was saved; sets the table's count. ValueError for what doesn't fit the table."""


class SlidingWindow(Forgetting):
    """The last `size` rows exactly: their codes, in a ring."""

    name = "sliding_window"

    def __init__(self, size: int, n_hashes: int, n_buckets: int) -> None:
        row_bytes = max(n_hashes * _code_bytes(n_buckets), 8)
        checks.integer("sliding_window", size, 1, checks.MOST_BYTES // row_bytes)
        self.size, self.at, self.filled = size, 0, 0
        self.codes = np.zeros((size, n_hashes), f"=u{_code_bytes(n_buckets)}")
        self.weights = np.zeros(size)

    def add(self, table: BucketTable, codes: np.ndarray, weights: np.ndarray) -> None:
        codes, weights = codes[-self.size :], weights[-self.size :]  # others would go at once
        slots = (self.at + np.arange(len(codes))) % self.size
        n_old = max(0, self.filled + len(slots) - self.size)
        old = slots[len(slots) - n_old :]  # the oldest lie past the end of the filled part
        table.remove(self.codes[old], self.weights[old, None])
        table.add(codes, weights[:, None])
        self.codes[slots], self.weights[slots] = codes, weights
        self.at = int((self.at + len(slots)) % self.size)
        self.filled = min(self.size, self.filled + len(slots))

    def weights_of(self, ages: np.ndarray) -> np.ndarray:
        return np.where(ages < self.size, 1.0, 0.0)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.weights.nbytes

    def settings(self) -> dict[str, Any]:
        return {"name": self.name, "size": self.size, "at": self.at, "filled": self.filled}

    def arrays(self) -> dict[str, np.ndarray]:
        return {"forgetting.codes": self.codes, "forgetting.weights": self.weights}

    @classmethod
    def expected(cls, settings: dict[str, Any], table_shape: tuple[int, int, int]) -> Expected:
        size = checks.integer("sliding_window", settings["size"], 1)
        checks.integer("the sliding window's place", settings["at"], 0, size - 1)
        checks.integer("the sliding window's rows", settings["filled"], 0, size)
        code = "|u1" if _code_bytes(table_shape[1]) == 1 else "<u2"
        return {
            "forgetting.codes": ((code,), (size, table_shape[0])),
            "forgetting.weights": (("<f8",), (size,)),
        }

    @classmethod
    def restored(
        cls,
        settings: dict[str, Any],
        arrays: dict[str, np.ndarray],
        table: BucketTable,
        n_rows: int,
    ) -> Self:
        codes, weights = arrays["forgetting.codes"], arrays["forgetting.weights"]
        if codes.max(initial=0) >= table.n_buckets:
            raise ValueError(f"forgetting.codes must be below {table.n_buckets}")
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError("forgetting.weights must be finite and >= 0")
        if settings["filled"] != n_rows:
            raise ValueError(f"n_samples_seen must be the window's {settings['filled']} rows")
        window = cls.__new__(cls)
        window.size, window.at, window.filled = (settings[k] for k in ("size", "at", "filled"))
        window.codes, window.weights, table.count = codes, weights, n_rows
        return window


class BlockedWindow(Forgetting):
    """About the last `size` rows: the bucket sums of blocks of `rows` rows each.

    The sketch's table holds all blocks. Of the oldest one, which extends beyond the window, only
    the share of its rows that are inside the window counts. So a row counts fully up to an age of
    size - rows, and not at all from size + rows on.
    """

    name = "blocked_window"

    def __init__(self, size: int, rows: int, n_hashes: int, n_buckets: int) -> None:
        self.size, self.rows = size, rows
        self.filled = 0  # rows after the last whole block
        self.blocks: deque[np.ndarray] = (
            deque()
        )  # sums of whole blocks, the oldest first, in the smallest type
        self.whole = np.zeros((n_hashes, n_buckets, 1))  # all of them: the rest is the table's

    def add(self, table: BucketTable, codes: np.ndarray, weights: np.ndarray) -> None:
        while len(codes):
            n = min(len(codes), self.rows - self.filled)
            table.add(codes[:n], weights[:n, None])
            codes, weights = codes[n:], weights[n:]
            self.filled += n
            if self.filled == self.rows:
                self.blocks.append(_packed(table.table - self.whole))
                self.whole[:], self.filled = table.table, 0
            self._forget(table)

    def _forget(self, table: BucketTable) -> None:
        outside = table.count - self.size
        if outside >= self.rows:
            gone = self.blocks.popleft()
            table.table -= gone
            self.whole -= gone
            table.count -= self.rows
            outside, self.oldest = outside - self.rows, None
        if outside > 0 and self.oldest is None:
            self.oldest = BucketTable(*table.table.shape, dtype=np.float64)
            self.oldest.table[:], self.oldest.count = self.blocks[0], self.rows
        self.inside = 1 - max(outside, 0) / self.rows

    def weights_of(self, ages: np.ndarray) -> np.ndarray:
        held = len(self.blocks) * self.rows + self.filled
        return np.where(ages < held - self.rows, 1.0, np.where(ages < held, self.inside, 0.0))

    def weight(self, table: BucketTable) -> float:
        outside = (1 - self.inside) * self.oldest.table[0].sum() if self.oldest else 0.0
        return float(table.table[0].sum() - outside)

    def n_rows(self, table: BucketTable) -> int:
        return min(table.count, self.size)

    @property
    def nbytes(self) -> int:
        kept = sum(block.nbytes for block in self.blocks) + self.whole.nbytes
        return kept + (self.oldest.table.nbytes if self.oldest else 0)

    def settings(self) -> dict[str, Any]:
        sizes = {"size": self.size, "rows": self.rows, "filled": self.filled}
        return {"name": self.name, "n_blocks": len(self.blocks)} | sizes

    def arrays(self) -> dict[str, np.ndarray]:
        shape = 0, *self.whole.shape
        return {"forgetting.blocks": np.stack(self.blocks) if self.blocks else np.zeros(shape)}

    @classmethod
    def expected(cls, settings: dict[str, Any], table_shape: tuple[int, int, int]) -> Expected:
        size = checks.integer("sliding_window", settings["size"], 1, 2**63 - 1)
        rows = checks.integer("a block's rows", settings["rows"], 1, size)
        filled = checks.integer("the last block's rows", settings["filled"], 0, rows - 1)
        n_blocks = checks.integer("n_blocks", settings["n_blocks"], 0, (size - filled) // rows + 1)
        if n_blocks * rows + filled - size >= rows:
            raise ValueError(f"n_blocks must be less: a window of {size} rows forgets the oldest")
        types = *(name for name, _ in PACKED), "<f8"
        return {"forgetting.blocks": (types, (n_blocks, *table_shape))}

    @classmethod
    def restored(
        cls,
        settings: dict[str, Any],
        arrays: dict[str, np.ndarray],
        table: BucketTable,
        n_rows: int,
    ) -> Self:
        window = cls(settings["size"], settings["rows"], *table.table.shape[:2])
        window.filled = settings["filled"]
        for block in arrays["forgetting.blocks"]:
            if not (np.isfinite(block) & (block >= 0)).all():
                raise ValueError("forgetting.blocks must be finite and >= 0")
            if np.ptp(block.sum(axis=(1, 2), dtype=np.float64)) > 0:  # the sums are exact
                raise ValueError("forgetting.blocks must add up to the same for each hash")
            window.whole += block
            window.blocks.append(_packed(block))
        if (window.whole > table.table).any():
            raise ValueError("forgetting.blocks must not exceed the table")
        table.count = len(window.blocks) * window.rows + window.filled
        if n_rows != window.n_rows(table):
            raise ValueError(f"n_samples_seen must be the window's {window.n_rows(table)} rows")
        window._forget(table)
        return window


class HalfLife(Forgetting):
    """A row of age a, the number of rows after it, counts 2^(-a / half_life).

    Instead of shrinking the table, rows enter with weights that grow by 2^(1 / half_life) a row;
    only ratios of sums matter. After `period` rows the table is scaled down once.
    """

    name, exact = "half_life", False

    def __init__(self, half_life: float) -> None:
        self.half_life = half_life
        self.period = max(1, int(MAX_GROWTH * half_life))
        self.place = 0  # rows since the table was scaled

    def add(self, table: BucketTable, codes: np.ndarray, weights: np.ndarray) -> None:
        while len(codes):
            if self.place == self.period:
                table.table *= 2.0 ** (-self.period / self.half_life)
                self.place = 0
            n = min(len(codes), self.period - self.place)
            growth = np.exp2((self.place + np.arange(n)) / self.half_life)
            table.add(codes[:n], (weights[:n] * growth)[:, None])
            codes, weights = codes[n:], weights[n:]
            self.place += n

    def counting(self, table: BucketTable) -> float:
        rate = -np.log(2) / self.half_life
        return float(np.expm1(rate * table.count) / np.expm1(rate))

    def weights_of(self, ages: np.ndarray) -> np.ndarray:
        return np.exp2((self.place - 1 - ages) / self.half_life)

    def check_mergeable(self, other: Self) -> None:
        if other.half_life != self.half_life:
            raise ValueError(f"half_life differ: {self.half_life} and {other.half_life}")

    def merge(self, table: BucketTable, other: Self, other_table: BucketTable) -> None:
        # The newest row of each has weight 2^((place - 1) / half_life); the rows here become older
        # by the number of the others, and take their scale.
        aging = (other.place - self.place - other_table.count) / self.half_life
        table.table = 2.0**aging * table.table + other_table.table  # other may be this one
        table.count += other_table.count
        self.place = other.place

    def settings(self) -> dict[str, Any]:
        return {"name": self.name, "half_life": self.half_life, "place": self.place}

    @classmethod
    def restored(
        cls,
        settings: dict[str, Any],
        arrays: dict[str, np.ndarray],
        table: BucketTable,
        n_rows: int,
    ) -> Self:
        forgetting = cls(check_half_life(settings["half_life"]))
        forgetting.place = checks.integer(
            "the place in half_life", settings["place"], 0, min(forgetting.period, n_rows)
        )
        table.count = n_rows
        return forgetting


BY_NAME = {x.name: x for x in (SlidingWindow, BlockedWindow, HalfLife)}


def forgetting_of(
    sliding_window: int | None, error: float, half_life: float | None, n_hashes: int, n_buckets: int
) -> Forgetting | None:
    """How a new sketch forgets: None, or a `Forgetting`.

    The window is exact where blocks would be tiny, or take more memory (with weights of 1).
    """
    if half_life is not None:
        return HalfLife(check_half_life(half_life))
    if sliding_window is None:
        return None
    rows = int(error * sliding_window)
    if rows >= MIN_BLOCK:
        count_bytes = 2 if rows < 2**16 else 4
        n_blocks = sliding_window / rows + 1
        blocked = n_hashes * n_buckets * (count_bytes * n_blocks + 16)
        if blocked < sliding_window * (n_hashes * _code_bytes(n_buckets) + 8):
            return BlockedWindow(sliding_window, rows, n_hashes, n_buckets)
    return SlidingWindow(sliding_window, n_hashes, n_buckets)


def check_half_life(half_life: float) -> float:
    if checks.positive("half_life", half_life) < 1:
        raise ValueError(f"half_life must be at least 1 (row), got {half_life!r}")
    return float(half_life)


def _code_bytes(n_buckets: int) -> int:
    return 1 if n_buckets <= 256 else 2


def _packed(sums: np.ndarray) -> np.ndarray:
    """Sums >= 0 in the smallest type that holds them exactly."""
    if (sums == np.floor(sums)).all():
        for name, too_large in PACKED:
            if sums.max() < too_large:
                return sums.astype(name)
    return sums.copy()

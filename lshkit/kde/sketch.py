"""algorithm="bucket_sum": a sketch of constant size, for kernels that are collision probabilities.

Every row adds its weight to one bucket of each hash; the mean over the hashes of a query's buckets
is the kernel sum, unbiased (Coleman and Shrivastava 2020, RACE). No row is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from lshkit import checks, hashing
from lshkit.buckets import BucketTable
from lshkit.hashing.family import HashFamily
from lshkit.kde import kernels
from lshkit.kde.changes import Changes
from lshkit.kde.forgetting import Forgetting
from lshkit.kde.geometry import Geometry
from lshkit.kde.method import (
    MEAN_ABSOLUTE,
    MOST,
    MOST_BITS,
    MOST_BYTES,
    MOST_TUNED,
    Estimate,
    Method,
    Tuned,
)
from lshkit.kde.samples import sample_size, spread_of_trials
from lshkit.kde.training import PermutedRows

if TYPE_CHECKING:
    from typing_extensions import Self

    from lshkit.kde.pilot import Pilot
    from lshkit.kde.training import Training

# Weights are rounded to multiples of it, so that sums of weights are exact in float64: the same
# bits in whatever order rows come, are merged and go.
WEIGHT_UNIT = 2.0**-24
MAX_WEIGHT = 2.0**53 * WEIGHT_UNIT
MAX_COUNT = 2.0**53  # of weights that are whole numbers, as those of rows without weights
# Of the codes that are in memory at once. Few, and one buffer for scaled rows: where malloc gives
# memory back at once, as with the settings of Dask's workers, fresh pages cost more than the codes.
CODE_BYTES = 2**16
LEAST_CHUNK = 1024  # rows, which threads share
SKETCH_BITS = 16
N_TRIED, MAX_BYTES = 32, 2**26  # of sketches that tuning tries and may ask for
LOOKED_INTO = {"angular": 3.0, "laplacian": 25.0}  # cost of a hash of it and of the look-up


class Sketch:
    """Counts by bucket.

    angular: FastHadamard's codes are the buckets. laplacian: RandomBinning's codes (32 bits) are
    folded into 2^n_bits buckets by (a c + b) >> (64 - n_bits), a and b random 64-bit numbers:
    different codes collide with probability 2^-n_bits exactly (Dietzfelbinger 1996), which
    `estimate` takes out again.
    """

    name, exact = "bucket_sum", False
    _kept: tuple[int, Any] = (-1, None)  # changes so far, and what was computed of the table then

    def __init__(
        self,
        geometry: Geometry,
        n_bits: int,
        n_hashes: int,
        seed: int,
        forgetting: Forgetting | None = None,
        hasher: HashFamily | None = None,
    ) -> None:
        self.geometry, self.n_bits, self.n_hashes = geometry, n_bits, n_hashes
        d = len(geometry.bandwidth)
        if geometry.kernel == "angular":
            self.hasher = hasher or hashing.FastHadamard(d, n_bits, n_hashes, seed=seed)
        else:
            self.hasher = hasher or hashing.RandomBinning(d, n_hashes, bandwidth=1.0, seed=seed)
            rng = np.random.default_rng([seed, 2])
            self.fold = rng.integers(2**64, size=(2, n_hashes), dtype=np.uint64)
        self.table = BucketTable(n_hashes, 2**n_bits, 1, dtype=np.float64)
        self.total = 0.0
        self.whole = True  # no weight had a fraction
        self.forgetting = forgetting
        self.changes = Changes()

    def __getstate__(self) -> dict[str, Any]:
        self.changes.check()
        return {
            name: value for name, value in vars(self).items() if name not in ("changes", "_kept")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.changes = Changes()

    def codes(self, X: np.ndarray, scaled: np.ndarray | None = None) -> np.ndarray:
        """Buckets `(n, n_hashes)` of rows as given. scaled: memory, of the shape of X."""
        if isinstance(self.hasher, hashing.RandomBinning):
            return self.hasher._folded(self.geometry.scale(X, scaled), self.fold, self.n_bits)
        return self.hasher.hash(X)

    def check_range(self, X: np.ndarray) -> None:
        """ValueError for rows that overflow float64 in units of the bandwidth."""
        if self.geometry.kernel == "angular" or not X.size:
            return
        with np.errstate(over="ignore"):
            largest = np.float64(np.maximum(-X.min(), X.max())) + np.abs(self.geometry.centre)
            if np.isfinite(largest * self.geometry.inverse).all():
                return
            beyond = np.argwhere(~np.isfinite(self.geometry.scale(X)))
        if len(beyond):
            row, feature = beyond[0]
            raise ValueError(
                f"X must lie within {np.finfo(np.float64).max:.2g} bandwidths of 0 (farther rows "
                f"overflow float64), got {X[row, feature]:.2g} in row {row}, feature {feature}, "
                f"whose bandwidth is {self.geometry.bandwidth[feature]:.2g}"
            )

    def codes_by_chunk(self, X: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Parts of the rows and their codes. Rows out of range are refused before the first."""
        self.check_range(X)
        step = max(LEAST_CHUNK, CODE_BYTES // (self.n_hashes * (1 if self.n_bits <= 8 else 2)))
        scaled = np.empty((min(step, len(X)), X.shape[1]))
        for first in range(0, len(X), step):
            part = X[first : first + step]
            yield slice(first, first + len(part)), self.codes(part, scaled[: len(part)])

    def add(self, X: np.ndarray, weights: np.ndarray | None, sign: int = 1) -> None:
        """Adds (or takes out) rows; ValueError when less than nothing would be left."""
        with self.changes.alone():
            self._add(X, weights, sign)

    def _add(self, X: np.ndarray, weights: np.ndarray | None, sign: int) -> None:
        whole = self.whole
        if weights is None:
            rounded = np.broadcast_to(1.0, len(X))
        else:
            with np.errstate(over="ignore"):
                rounded = np.round(weights / WEIGHT_UNIT) * WEIGHT_UNIT
            whole = whole and bool((rounded == np.floor(rounded)).all())
        # Sums of multiples of the unit are exact below the bound, and never rounded to below it.
        total = self._held + sign * float(rounded.sum())
        if self.forgetting is None or self.forgetting.exact:
            check_total(total, whole)
        elif not rounded.max(initial=0) < MAX_WEIGHT:
            raise ValueError(
                f"sample_weight must stay below 2^29 with a half_life, got {rounded.max()}"
            )
        if total < 0 or self.table.count + sign * len(X) < 0:
            raise ValueError("cannot remove more rows or weight than the sketch holds")
        if weights is not None and (np.abs(rounded - weights) > 1e-3 * weights).any():
            raise ValueError(
                f"sample_weight must be 0 or at least {500 * WEIGHT_UNIT:.1e} for "
                "algorithm='bucket_sum' (weights are rounded to multiples of 2^-24): scale "
                "them up"
            )
        if sign < 0:
            self._remove(X, rounded)
        else:
            for part, codes in self.codes_by_chunk(X):
                self.changes.begin()
                if self.forgetting is None:
                    self.table.add(codes, rounded[part, None])
                else:
                    self.forgetting.add(self.table, codes, rounded[part])
        self.total = total if self.forgetting is None else self.forgetting.weight(self.table)
        self.whole = whole

    def _remove(self, X: np.ndarray, weights: np.ndarray) -> None:
        """ValueError, and nothing is removed, when less than nothing would be left in a bucket."""
        hashes = np.arange(self.n_hashes)
        for part, codes in self.codes_by_chunk(X):
            self.changes.begin()
            self.table.remove(codes, weights[part, None])
            if (self.table.table[hashes, codes.astype(np.intp)] < 0).any():
                for again, codes in self.codes_by_chunk(X[: part.stop]):
                    self.table.add(codes, weights[again, None])
                self.changes.end()
                raise ValueError("X must be rows that were added, with their weights, got others")

    @property
    def _held(self) -> float:
        """Weight in the table, in its unit."""
        return self.total if self.forgetting is None else float(self.table.table[0].sum())

    @property
    def n_rows(self) -> int:
        """Rows that count."""
        return self.table.count if self.forgetting is None else self.forgetting.n_rows(self.table)

    @property
    def _n_counting(self) -> float:
        """Rows that count, old ones in part where a sketch forgets."""
        return self.table.count if self.forgetting is None else self.forgetting.counting(self.table)

    def weights_of(self, ages: np.ndarray) -> np.ndarray:
        """What rows of these ages, the numbers of rows after them, count if added with weight 1."""
        return np.ones(len(ages)) if self.forgetting is None else self.forgetting.weights_of(ages)

    def merge(self, other: Sketch) -> None:
        """Adds the rows of another sketch, as if they had come after this one's."""
        if type(self.forgetting) is not type(other.forgetting):
            raise ValueError(
                "sketches can only be merged if both or none have a half_life, and none a window"
            )
        if self.hasher != other.hasher or self.n_bits != other.n_bits:
            raise ValueError(
                "sketches with different hash functions cannot be merged: fit both with the same "
                "integer random_state, n_bits, n_hashes and bandwidth, got "
                f"n_bits={self.n_bits}, {self.hasher!r} and n_bits={other.n_bits}, {other.hasher!r}"
            )
        with self.changes.alone():
            whole = self.whole and other.whole
            if self.forgetting is not None and other.forgetting is not None:
                self.forgetting.check_mergeable(other.forgetting)
                self.changes.begin()
                self.forgetting.merge(self.table, other.forgetting, other.table)
                self.total = self.forgetting.weight(self.table)
            else:
                check_total(self.total + other.total, whole)
                self.changes.begin()
                self.table.merge(other.table)
                self.total += other.total
            self.whole = whole

    def estimate(
        self, X: np.ndarray, threads: int | None = None, with_error: bool = True
    ) -> Estimate:
        """Of rows as given. with_error=False skips the error, which is then 0.

        threads are not read: the verb uses the core's.
        """
        known = with_error and self.n_hashes > 1 and self.total > 0
        squares = self._of_table(self._squares) if known else None
        parts = [self._estimate(codes, with_error, squares) for _, codes in self.codes_by_chunk(X)]
        return parts[0] if len(parts) == 1 else Estimate.joined(parts)

    def _of_table(self, compute: Callable[[], Any]) -> Any:
        """What that gives, until the table changes."""
        count, kept = self._kept
        if count != self.changes.count:
            count = self.changes.count  # before the table is read, which another thread may change
            kept = compute()
            self._kept = count, kept
        return kept

    def _squares(self) -> float:
        """Sum over the buckets of the squares of their shares of the weight, mean of the hashes."""
        shares = (self._counted((h, ..., 0)) / self.total for h in range(self.n_hashes))
        return float(np.mean([np.einsum("i,i->", x, x) for x in shares]))

    def _counted(self, at: Any) -> np.ndarray:
        """Numbers of the table there, of which a window leaves out a share of the oldest rows."""
        numbers = self.table.table[at]
        if self.forgetting is not None and self.forgetting.oldest is not None:
            return numbers - (1 - self.forgetting.inside) * self.forgetting.oldest.table[at]
        return numbers

    def _estimate(self, codes: np.ndarray, with_error: bool, squares: float | None) -> Estimate:
        sums = self.table.query(codes)[:, 0]
        forgetting = self.forgetting
        oldest = None if forgetting is None else forgetting.oldest
        if forgetting is not None and oldest is not None:
            inside, old = forgetting.inside, oldest.query(codes)[:, 0]
            sums = sums - (1 - inside) * old
        mean, error = self._corrected(sums), np.zeros(len(codes))
        if with_error and squares is None:
            error = np.full(len(codes), np.inf)  # nobody knows
        elif squares is not None:
            own = self._own(codes)
            error = self._corrected(own).std(axis=1, ddof=1) / np.sqrt(self.n_hashes)
            own /= self.total
            of_others = squares - (own**2).mean(axis=1)
            error = np.maximum(error, self._by_chance(of_others, 1 - own.mean(axis=1)))
            # Hashes that agree do not tell what another would show: 1/m of the estimate, or a row.
            row = 1 / max(self._n_counting, 1)
            error = np.maximum(error, np.maximum(np.abs(mean), row) / self.n_hashes)
            if oldest is not None:
                # All rows of its bucket, or all others, are inside the window or outside.
                share, weight = sums / self.total, oldest.table[0].sum()
                moved = (1 - share) * old + share * (weight - old)
                moved *= np.sqrt(inside * (1 - inside)) / self.total
                error = np.hypot(error, moved / (1 - self._chance))
        return Estimate(np.zeros(len(codes)), mean, error, np.zeros(len(codes), np.int64))

    def _by_chance(
        self,
        squares: np.ndarray,
        rest: np.ndarray,
        met: np.ndarray | float = 1.0,
        near: np.ndarray | float = 1.0,
    ) -> np.ndarray:
        """The least standard error, from what the other buckets of each hash hold.

        squares, rest: sums over these buckets of squares and of numbers; means of the hashes. met,
        near: what a sum is divided by before and after the correction for folding.

        By chance p = 2^-n_bits a hash brings rows of another cell into the query's bucket: folding,
        or, of the angular kernel, what is at right angles. Where no hash has met any of them, the
        share of all that was to be met is the error; never is it more than the standard deviation,
        which is that of cells: where cells share buckets the sum of squares is larger by p rest^2.
        """
        odds = 1 / (2.0**self.n_bits - 1)
        cells = np.sqrt(np.maximum(squares - odds * rest**2, 0))
        unmet = odds * np.maximum(np.abs(rest), cells) / met
        return np.minimum(unmet, np.sqrt(odds / self.n_hashes) * cells / near)

    def of_each_hash(self, X: np.ndarray) -> np.ndarray:
        """The estimate of each hash alone, `(len(X), n_hashes)`."""
        return self._corrected(self._own(self.codes(X)))

    def _own(self, codes: np.ndarray) -> np.ndarray:
        """What each hash's bucket holds, `(n, n_hashes)`."""
        return self._counted((np.arange(self.n_hashes), codes.astype(np.intp), 0))

    @property
    def _chance(self) -> float:
        """That different codes share a bucket."""
        return 0.0 if self.geometry.kernel == "angular" else 2.0**-self.n_bits

    def _corrected(self, sums: np.ndarray) -> np.ndarray:
        if self.total == 0:
            return 0 * sums
        return (sums / self.total - self._chance) / (1 - self._chance)

    @property
    def nbytes(self) -> int:
        numbers = [getattr(self.hasher, name) for name in self.hasher._numbers]
        if isinstance(self.hasher, hashing.RandomBinning):
            numbers.append(self.fold)
        kept = 0 if self.forgetting is None else self.forgetting.nbytes
        return self.table.table.nbytes + sum(x.nbytes for x in numbers) + kept


def check_total(total: float, whole: bool) -> None:
    """ValueError where sums of weights would no longer be exact."""
    if total >= (MAX_COUNT if whole else MAX_WEIGHT):
        most = "2^53" if whole else "2^29 (2^53 where all are whole numbers)"
        raise ValueError(f"the sum of sample_weight must stay below {most}, would be {total}")


class SketchedRows(Method):
    """A sketch of rows that are kept: for "auto"."""

    name = Sketch.name
    kernels = kernels.COLLISION
    uses_rtol = keeps_rows = False
    max_bits = SKETCH_BITS
    min_rows = 20_000

    permuted: PermutedRows

    def __init__(self, permuted: PermutedRows, n_hashes: int) -> None:
        self.permuted, self.training = permuted, permuted.training
        self.sketch, self.unit = sketch_of(permuted, n_hashes)
        self.most = most_of(self.geometry.kernel)

    @classmethod
    def tune(cls, pilot: Pilot, rtol: float) -> Tuned | None:
        geometry, weights = pilot.training.geometry, pilot.training.weights
        narrow = weights is not None and weights.min() < 1e-3 * weights.mean()
        if geometry.n_bits > cls.max_bits or narrow:
            return None
        # Without the pilot's rows, which may be its queries: each would meet itself in every hash.
        sketch, unit = sketch_of(pilot.permuted, N_TRIED, slice(pilot.n_pilot, None))
        sums = sketch.of_each_hash(pilot.queries) * sketch.total * unit
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            exact = np.exp(pilot.sums.shift) * pilot.sums.total
            spread = spread_of_trials(sums / exact[:, None], 1.0) * pilot.counted(np.log(exact))
        most = most_of(geometry.kernel)
        n_hashes = sample_size(spread, 10**6, rtol, most)
        n_hashes = int(min(n_hashes, MAX_BYTES // (8 * 2**geometry.n_bits), MOST_TUNED))
        error = float(np.minimum(MEAN_ABSOLUTE * spread / np.sqrt(n_hashes), most).mean())
        cost = float(LOOKED_INTO[geometry.kernel] * n_hashes)
        make = functools.partial(cls, pilot.permuted, n_hashes)
        return Tuned({"n_hashes": n_hashes, "cost": cost, "error": error}, make)

    @classmethod
    def from_settings(
        cls, settings: dict[str, Any], training: Training, permuted: PermutedRows | None = None
    ) -> Self:
        n_hashes = checks.integer("n_hashes", settings["n_hashes"], 1, MOST_TUNED)
        return cls(PermutedRows(training) if permuted is None else permuted, n_hashes)

    @classmethod
    def check_saved(cls, settings: dict[str, Any], n_rows: int, kernel: str, n_bits: int) -> None:
        n_buckets = 2 ** checks.integer("n_bits", n_bits, 1, MOST_BITS)
        # Never of fewer rows than hashes: the hash functions could be larger than the file.
        most = min(n_rows, MOST_BYTES // (8 * n_buckets))
        checks.integer("n_hashes", settings["n_hashes"], 1, most)

    def scaled(self, X: np.ndarray) -> np.ndarray:
        return X if self.geometry.kernel == "angular" else super().scaled(X)  # its codes need none

    def sampled(
        self, queries: np.ndarray, threads: int, stop: int | None = None, with_error: bool = True
    ) -> Estimate:
        sketch = self.sketch
        if stop is not None:
            sketch, _ = sketch_of(self.permuted, sketch.n_hashes, slice(stop))
        got = sketch.estimate(queries, with_error=with_error)
        share = sketch.total * self.unit / self.training.total
        return Estimate(got.shift, got.mean * share, got.error * share, got.rows)

    @property
    def nbytes(self) -> int:
        return self.permuted.nbytes + self.sketch.nbytes


def sketch_of(
    permuted: PermutedRows, n_hashes: int, part: slice = slice(None)
) -> tuple[Sketch, float]:
    """A `Sketch` of the permuted rows, or a part, and the weight that counts as 1 in it."""
    d, training = permuted.rows.shape[1], permuted.training
    kernel, n_bits = training.geometry.kernel, training.geometry.n_bits
    seed = int(np.random.default_rng([training.seed, 5]).integers(2**31))
    sketch = Sketch(Geometry(kernel, n_bits, np.zeros(d), np.ones(d)), n_bits, n_hashes, seed)
    weights = permuted.weights
    unit = 1.0 if weights is None else weights.mean()
    sketch.add(permuted.rows[part], None if weights is None else weights[part] / unit)
    return sketch, unit


def most_of(kernel: str) -> float:
    """The largest relative error that may be expected of a query.

    No bound for the laplacian kernel: where far rows alone are folded into a query's buckets,
    what is left after the correction is noise, of any multiple of the density.
    """
    return MOST if kernel == "angular" else 1e100

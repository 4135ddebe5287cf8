"""The families of the distance: a code names the bins that random projections or features fall in.

The integers of the bins are hashed to 32 bits: the sum of bin times a random 32-bit multiplier in
64-bit arithmetic, mixed. Different bins share a code with a probability of about 2^-32, which
collision probabilities include: a weight 1 / p of a pair of far rows is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lshkit import _C, checks
from lshkit.buckets.pairs import pair_distances
from lshkit.hashing.family import HashFamily, entry, holds, integer_power, named_row
from lshkit.typing import ArrayOrTensor, Seed

MAX_PROJECTIONS = 2**16  # of one code: more bins than that make no kernel
_BINS = 2.0**51  # the core adds them to 1.5 2^52 to round them: beyond, 2x has the bins of x


class _BinnedFamily(HashFamily):
    """What the families of the distance share."""

    _core: Callable[..., bool]
    shifts: NDArray[np.float64]
    multipliers: NDArray[np.uint32]

    def _largest_factor(self) -> float:
        """A bound on how many bins a row moves when it moves by the width or bandwidth."""
        raise NotImplementedError

    def _largest_bins(self, rows: np.ndarray) -> np.ndarray:
        """How many bins from the origin rows `(n, d)` are, where that is most: `(n,)`."""
        raise NotImplementedError

    def _bin_probability(self, distance: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    @property
    def n_buckets(self) -> int:
        """Number of different codes, 2^32."""
        return 2**32

    def hash(self, x: ArrayOrTensor, *, check_finite: bool = True) -> ArrayOrTensor:
        """Codes of the rows of x.

        Parameters
        ----------
        x : array or tensor `(..., n_features)`
            Real numbers of any type; bins are computed in float64.
        check_finite : bool
            False accepts rows with a NaN or infinity, and rows beyond 2^51 bins.

        Returns
        -------
        codes : uint32 array or tensor `(..., n_hashes)`, like x
            Bins are exact to the rounding of float64. Without the check, the codes of a row with a
            NaN or infinity, or beyond 2^51 bins, are undefined: any two may be equal. Other rows
            are not affected.

        Raises
        ------
        TypeError, ValueError
            x is no array of real numbers, its last dimension is not n_features, or, named by its
            number, a row has a NaN or infinity or is in a bin 2^51 or farther from the origin. The
            message says within how many widths of the origin all rows are accepted.
        """
        torch = checks.torch_of(x=x)
        given = checks.to_numpy(self._rows("x", x, torch), torch)
        shape = given.shape[:-1] + (self.n_hashes,)
        short = given.dtype.kind == "f" and given.dtype.itemsize <= 4
        given = np.ascontiguousarray(given, np.float32 if short else np.float64)
        codes: Any = np.empty(shape, np.uint32)
        if codes.size:
            threads = 0 if torch is None else torch.get_num_threads()
            numbers = (getattr(self, name) for name in self._numbers)
            rows = given.reshape(-1, self.n_features), codes.reshape(-1, self.n_hashes)
            finite = self._core(rows[0], *numbers, rows[1], threads)
            if check_finite:
                if not finite:
                    self._refuse_non_finite(given, None)  # names the row
                self._check_range("x", given)
        return codes if torch is None else torch.from_numpy(codes)

    @cached_property
    def _reach(self) -> float:
        """Widths or bandwidths from the origin within which all rows have bins below 2^51."""
        return (_BINS - 1) / self._largest_factor()

    @np.errstate(over="ignore", invalid="ignore", under="ignore")
    def _check_range(self, name: str, x: np.ndarray) -> None:
        unit = self._settings[0]  # width or bandwidth
        reach = self._reach * float(np.min(getattr(self, unit)))
        # The norm of all rows at once, in one pass, is nearly always enough; float32 holds squares.
        if reach > 1e-15 and np.vdot(x, x) <= reach * reach:
            return
        rows = x.reshape(-1, self.n_features)
        norms = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64))
        far = np.flatnonzero(~(norms <= reach))
        step = max(1, 2**20 // self.shifts.size)
        for first in range(0, len(far), step):
            some = far[first : first + step]
            bins = self._largest_bins(rows[some].astype(np.float64))
            beyond = np.flatnonzero(~(bins < _BINS - 1))
            if len(beyond):
                row = named_row(some[beyond[0]], x.shape[:-1])
                raise ValueError(  # with a reach that is rounded down
                    f"{name} must be less than 2^51 = 2.3e15 bins from the origin, as all rows "
                    f"within {0.995 * self._reach:.3g} {unit}s of it are, {row} is "
                    f"{bins[beyond[0]]:.2g} "
                    "bins away: subtract a centre from all rows"
                )

    def _check_numbers(self) -> None:
        if not ((self.shifts >= 0) & (self.shifts < 1)).all():
            raise ValueError("shifts must be in [0, 1)")
        if not self.multipliers.any():
            raise ValueError("multipliers must not all be 0: all codes would be equal")

    def _probability(self, distance: np.ndarray) -> np.ndarray:
        of_bins = self._bin_probability(distance)
        return of_bins + (1 - of_bins) / self.n_buckets


@np.errstate(invalid="ignore", over="ignore")
def _sum_by_feature(
    x: np.ndarray, y: np.ndarray, term: Callable[[np.ndarray, int], np.ndarray]
) -> Any:
    """sum_i term(x_i - y_i, i), feature by feature: all pairs of two sets take no (pairs, d)."""
    total = 0.0
    for i, (u, v) in enumerate(zip(np.moveaxis(x, -1, 0), np.moveaxis(y, -1, 0), strict=True)):
        total = total + term(np.subtract(u, v, dtype=np.float64), i)
    return total


class EuclideanLSH(_BinnedFamily):
    """Bins of width w of random projections (Datar et al. 2004), for the L2 and the L1 distance.

    A code is made of n_bits numbers floor((a . x + b) / w): a from a p-stable distribution (normal
    for p=2, Cauchy for p=1), b uniform in [0, w). With `r = w / |x - y|_p`, two rows share a code
    with probability P(r)^n_bits, ::

        p=2:  P = erf(r / sqrt 2) - sqrt(2 / pi) (1 - exp(-r^2 / 2)) / r
        p=1:  P = 2 arctan(r) / pi - ln(1 + r^2) / (pi r)

    (Datar et al. 2004, section 4.1, integrated).

    Parameters
    ----------
    n_features : int >= 1
        Dimension of the vectors.
    n_bits : int, 1 to 65536
        Projections per code: more make the kernel sharper.
    n_hashes : int, 1 to 65535
        Number of independent codes of a vector: more reduce the noise.
    width : float from 1e-37 to 3.4e38
        Of a bin, in the unit of the data.
    p : 2 or 1
        The distance is L2 or L1, also in `probability_of_distance`.
    seed : None, int from 0 to 2**128 - 1 or numpy.random.Generator
        The same integer always gives the same hash functions.

    Attributes
    ----------
    n_buckets : int
        2^32: codes are 32-bit hashes of the bins.
    directions : float64 array `(n_hashes, n_bits, n_features)`
        a / width.
    shifts : float64 array `(n_hashes, n_bits)`
        b / width, in [0, 1).
    multipliers : uint32 array `(n_hashes, n_bits)`
        Of the bins in the hash of a code.
    """

    n_bits: int
    _settings = ("width", "p")
    _numbers = ("directions", "shifts", "multipliers")
    _core = staticmethod(_C.euclidean_hash)

    width: float
    p: int
    directions: NDArray[np.float64]
    shifts: NDArray[np.float64]
    multipliers: NDArray[np.uint32]

    def __init__(
        self,
        n_features: int,
        n_bits: int,
        n_hashes: int,
        *,
        width: float,
        p: int = 2,
        seed: Seed = None,
    ) -> None:
        sizes = {"n_features": n_features, "n_bits": n_bits, "n_hashes": n_hashes}
        self._set_sizes(MAX_PROJECTIONS, **sizes)
        self.width = checks.positive("width", width)
        self.p = checks.integer("p", p, 1, 2)
        self.seed = checks.seed(seed)
        rng = np.random.default_rng(self.seed)
        shape = self.n_hashes, self.n_bits
        draw = rng.standard_normal if self.p == 2 else rng.standard_cauchy
        self.directions = draw((*shape, self.n_features)) / self.width
        self.shifts = rng.random(shape)
        self.multipliers = rng.integers(2**32, size=shape, dtype=np.uint32)

    def _restore(self, arrays: Mapping[str, Any]) -> None:
        self._restore_sizes(arrays, MAX_PROJECTIONS)
        self.p = checks.integer("p", np.asarray(entry(arrays, "p"))[()], 1, 2)
        self.width = checks.positive("width", np.asarray(entry(arrays, "width"))[()])
        shape = self.n_hashes, self.n_bits
        directions = {"directions": (*shape, self.n_features), "shifts": shape}
        self._restore_numbers(arrays, directions, np.float64)
        self._restore_numbers(arrays, {"multipliers": shape}, np.uint32)
        self._check_numbers()
        if not self.directions.any(-1).all():
            raise ValueError("directions must have no rows of zeros")

    def _largest_factor(self) -> float:
        return float(np.linalg.norm(self.directions, axis=-1).max()) * self.width

    def _largest_bins(self, rows: np.ndarray) -> np.ndarray:
        return np.abs(rows @ self.directions.reshape(-1, self.n_features).T).max(1)

    def _distance(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if self.p == 1:
            return _sum_by_feature(x, y, lambda z, i: np.abs(z))
        squares = np.asarray(_sum_by_feature(x, y, lambda z, i: z * z))
        if holds(squares).all():
            return np.sqrt(squares)
        # Zeros, and what float64 holds while it does not hold the squares: scaled by powers of two.
        largest = np.zeros_like(squares)
        _sum_by_feature(x, y, lambda z, i: np.maximum(largest, np.abs(z), out=largest))
        exponent = np.clip(np.frexp(largest)[1], -1000, 1000)
        scaled = _sum_by_feature(x, y, lambda z, i: np.square(np.ldexp(z, -exponent)))
        return np.ldexp(np.sqrt(scaled), exponent)

    def _quick_pairs(
        self,
        x: np.ndarray,
        y: np.ndarray,
        indptr: np.ndarray,
        indices: np.ndarray,
        y_norms: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        distance = pair_distances(x, y, indptr, indices, p=self.p)
        left = np.flatnonzero(~holds(distance))
        distance = np.sqrt(distance, dtype=np.float64) if self.p == 2 else distance
        return self._probability(distance.astype(np.float64, copy=False)), left

    def _bin_probability(self, distance: np.ndarray) -> np.ndarray:
        from scipy.special import erf

        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            r = self.width / np.abs(distance)  # 0 has two signs
            if self.p == 1:
                one = (2 * np.arctan(r) - np.log1p(r * r) / r) / np.pi
            else:
                one = erf(r / np.sqrt(2)) + np.sqrt(2 / np.pi) * np.expm1(-r * r / 2) / r
        one = np.where(r > 1e150, 1.0, np.where(r < 1e-150, 0.0, one))  # whose squares are lost
        return integer_power(one, self.n_bits)


class RandomBinning(_BinnedFamily):
    """Random grids (Rahimi and Recht 2007): the collision probability is the Laplacian kernel.

    A hash cuts feature i at shift + k pitch, with the pitch from a Gamma distribution of shape 2
    and scale h_i and a uniform shift; a code identifies the cell. Two rows share one with
    probability `exp(-sum_i |x_i - y_i| / h_i)`, exactly. `probability_of_distance` takes the L1
    distance `|x - y|_1` when the bandwidth is one number, and `sum_i |x_i - y_i| / h_i` when there
    is one for each feature.

    Parameters
    ----------
    n_features : int >= 1
        Dimension of the vectors.
    n_hashes : int, 1 to 65535
        Number of independent codes of a vector: more reduce the noise.
    bandwidth : float from 1e-37 to 3.4e38 or array `(n_features,)` of such
        h, one for all features or one for each.
    seed : None, int from 0 to 2**128 - 1 or numpy.random.Generator
        The same integer always gives the same hash functions.

    Attributes
    ----------
    n_buckets : int
        2^32: codes are 32-bit hashes of the cells.
    scales : float64 array `(n_hashes, n_features)`
        1 / pitch.
    shifts : float64 array `(n_hashes, n_features)`
        In pitches, in [0, 1): the bin of x_i is floor(x_i scale + shift).
    multipliers : uint32 array `(n_hashes, n_features)`
        Of the bins in the hash of a code.
    """

    _sizes = ("n_features", "n_hashes")
    _settings = ("bandwidth",)
    _numbers = ("scales", "shifts", "multipliers")
    _core = staticmethod(_C.random_binning_hash)

    @classmethod
    def array_names(cls, numbers: Mapping[str, Any]) -> tuple[str, ...]:
        one_for_all = "bandwidth" in numbers
        return cls._numbers if one_for_all else (*cls._numbers, "bandwidth")

    bandwidth: float | NDArray[np.float64]
    scales: NDArray[np.float64]
    shifts: NDArray[np.float64]
    multipliers: NDArray[np.uint32]

    def __init__(
        self, n_features: int, n_hashes: int, *, bandwidth: float | ArrayLike, seed: Seed = None
    ) -> None:
        self._set_sizes(None, n_features=n_features, n_hashes=n_hashes)
        self.bandwidth = self._checked(bandwidth)
        self.seed = checks.seed(seed)
        rng = np.random.default_rng(self.seed)
        shape = self.n_hashes, self.n_features
        self.scales = 1 / (rng.standard_gamma(2, shape) * self.bandwidth)
        self.shifts = rng.random(shape)
        self.multipliers = rng.integers(2**32, size=shape, dtype=np.uint32)

    def _folded(self, x: np.ndarray, fold: np.ndarray, n_bits: int) -> np.ndarray:
        """Codes c of float64 rows `(n, d)` as (a c + b) >> (64 - n_bits), 1 to 16 bits.

        fold: a and b, random 64-bit numbers `(2, n_hashes)`. Different codes share a bucket with
        probability 2^-n_bits exactly (Dietzfelbinger 1996).
        """
        codes = np.empty((len(x), self.n_hashes), np.uint8 if n_bits <= 8 else np.uint16)
        numbers = self.scales, self.shifts, self.multipliers
        if codes.size and not _C.random_binning_hash(x, *numbers, codes, 0, fold, n_bits):
            self._refuse_non_finite(x, None)  # names the row
        return codes

    def _checked(self, bandwidth: Any) -> float | np.ndarray:
        if np.ndim(bandwidth) == 0:
            return checks.positive("bandwidth", bandwidth)
        bandwidth = checks.array("bandwidth", bandwidth).astype(np.float64)
        if bandwidth.shape != (self.n_features,):
            wanted = f"a number or an array of shape ({self.n_features},)"
            raise ValueError(f"bandwidth must be {wanted}, got shape {bandwidth.shape}")
        for h in bandwidth:
            checks.positive("bandwidth", float(h))
        return bandwidth

    def _restore(self, arrays: Mapping[str, Any]) -> None:
        self._restore_sizes(arrays, None)
        self.bandwidth = self._checked(np.asarray(entry(arrays, "bandwidth"))[()])
        shape = self.n_hashes, self.n_features
        self._restore_numbers(arrays, {"scales": shape, "shifts": shape}, np.float64)
        if not (self.scales > 0).all():
            raise ValueError("scales must be > 0")
        self._restore_numbers(arrays, {"multipliers": shape}, np.uint32)
        self._check_numbers()

    def _largest_factor(self) -> float:
        return float((self.scales * self.bandwidth).max())

    def _largest_bins(self, rows: np.ndarray) -> np.ndarray:
        return np.max(np.abs(rows) * self.scales.max(0), 1)

    def _distance(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        h = self.bandwidth
        if isinstance(h, float):
            return _sum_by_feature(x, y, lambda z, i: np.abs(z))
        return _sum_by_feature(x, y, lambda z, i: np.abs(z) / h[i])

    def _bin_probability(self, distance: np.ndarray) -> np.ndarray:
        scale = self.bandwidth if np.ndim(self.bandwidth) == 0 else 1.0
        with np.errstate(over="ignore"):
            return np.exp(-distance / scale)

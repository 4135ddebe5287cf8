"""What all hash families share: checks, equality, and conversion to arrays and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lshkit import checks
from lshkit.buckets.codes import like
from lshkit.buckets.pairs import as_pair_lists, check_pair_lists
from lshkit.hash_functions import MAX_HASHES
from lshkit.typing import ArrayOrTensor, Seed

if TYPE_CHECKING:
    from typing_extensions import Self

FORMAT = 2  # of to_arrays
SLACK = 0.01  # that angles and cosines may be beyond their ends by rounding: of bfloat16 2^-7
_PAIR_NUMBERS = 2**16  # of gathered rows at a time: they stay in cache
FAMILIES: dict[str, type[HashFamily]] = {}  # class name to class, filled as they are defined


def integer_power(x: Any, exponent: int) -> Any:
    """x^exponent by squaring: several times faster than numpy's power."""
    power = None
    while exponent:
        if exponent & 1:
            power = x if power is None else power * x
        exponent >>= 1
        if exponent:
            x = x * x
    return power


@np.errstate(over="ignore", invalid="ignore", under="ignore")
def squared_norms(x: np.ndarray) -> np.ndarray:
    return np.einsum("nd,nd->n", x, x)


def holds(sums: np.ndarray) -> np.ndarray:
    """Whether sums of squares are neither near the smallest nor beyond the largest numbers."""
    limits = np.finfo(sums.dtype)
    return (sums > limits.tiny / limits.eps**1.5) & (sums < limits.max)


def named_row(index: int, leading: tuple[int, ...]) -> str:
    """What messages call the row of this number among rows with these leading dimensions."""
    row = tuple(int(i) for i in np.unravel_index(index, leading))
    return f"row {row[0] if len(row) == 1 else row}" if row else "it"


class HashFamily:
    """A set of n_hashes random hash functions of vectors of n_features numbers.

    A subclass names the integers that it is made from in `_sizes`, other numbers and arrays of them
    in `_settings` and its random numbers in `_numbers`; two families are equal when these are.
    """

    _sizes: tuple[str, ...] = ("n_features", "n_bits", "n_hashes")
    _settings: tuple[str, ...] = ()
    _numbers: tuple[str, ...] = ("parameters",)
    _first_format = 1  # whose numbers still mean the same functions
    _farthest = np.inf  # the largest distance that there is
    directional = False  # whether only a row's direction matters, which a row of zeros has not

    n_features: int
    n_hashes: int
    seed: Seed

    @property
    def n_buckets(self) -> int:
        """Number of different codes."""
        raise NotImplementedError

    def hash(self, x: ArrayOrTensor, *, check_finite: bool = True) -> ArrayOrTensor:
        """Codes `(..., n_hashes)` of the rows of x `(..., n_features)`."""
        raise NotImplementedError

    def _distance(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _probability(self, distance: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("_"):
            FAMILIES[cls.__name__] = cls

    def _set_sizes(self, max_bits: int | None, **sizes: Any) -> None:
        limits = {"n_bits": max_bits, "n_hashes": MAX_HASHES}
        for name in self._sizes:
            setattr(self, name, checks.integer(name, sizes[name], 1, limits.get(name)))

    def _rows(self, name: str, x: Any, torch: Any, cuda: bool = False) -> Any:
        x = checks.array(name, x, torch, cuda=cuda)
        if x.ndim == 0 or x.shape[-1] != self.n_features:
            wanted = f"(..., {self.n_features}), the last dimension being n_features"
            raise ValueError(f"{name} must have shape {wanted}, got {tuple(x.shape)}")
        return x

    @staticmethod
    def _refuse_non_finite(x: Any, torch: Any) -> None:
        """ValueError naming the first row of x with a NaN or infinity."""
        if torch is not None:
            from lshkit.torch_ops.assertions import may_be_read

            if not may_be_read(x) or not x.is_floating_point() or not x.numel():
                return
            if torch._C._functorch.is_functorch_wrapped_tensor(x):  # by vmap, by grad
                return
            if all(end.isfinite() for end in x.detach().aminmax()):
                return
            x = x.detach().double().numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(x.sum()):  # without an array of its size
                return
        rows = np.isfinite(x).all(-1)
        if rows.all():
            return
        row = named_row(np.flatnonzero(~rows)[0], x.shape[:-1])
        raise ValueError(
            f"x must be finite, {row} has a NaN or infinity: take it out, or give "
            "check_finite=False for an undefined code"
        )

    def _check_range(self, name: str, x: np.ndarray) -> None:
        """ValueError naming the first of finite rows that are too far off to be hashed."""

    def _pairs(self, x: Any, y: Any) -> tuple[np.ndarray, np.ndarray, Any]:
        """x and y as numpy arrays whose leading dimensions broadcast, and torch if tensors."""
        torch = checks.torch_of(x=x, y=y)
        x, y = self._rows("x", x, torch), self._rows("y", y, torch)
        if torch is not None:
            x, y = (z.detach().to(torch.float64).numpy() for z in (x, y))
        try:
            np.broadcast_shapes(x.shape[:-1], y.shape[:-1])
        except ValueError:
            shapes = f"x {x.shape} and y {y.shape}"
            raise ValueError(f"the leading dimensions of {shapes} do not broadcast") from None
        return x, y, torch

    # ---------------------------------------------------------------- probabilities

    def distance(self, x: ArrayOrTensor, y: ArrayOrTensor) -> ArrayOrTensor:
        """The angle or distance that determines the collision probability of two rows.

        Parameters
        ----------
        x, y : arrays or tensors `(..., n_features)`
            The leading dimensions are broadcast: `x[:, None]`, `y[None]` gives all pairs.

        Returns
        -------
        distance : float64 array or tensor `(...)`
            Of the angular families the angle, from 0 to pi; of the others a distance. NaN where x
            or y is not finite or has no angle. Not differentiable.

        Raises
        ------
        TypeError, ValueError
            x or y as in `hash`, not of one kind, or leading dimensions that do not broadcast.
        """
        a, b, torch = self._pairs(x, y)
        return like(torch, self._distance_of_finite(a, b))[0]

    def probability_of_distance(self, distance: ArrayOrTensor) -> ArrayOrTensor:
        """`collision_probability` of rows whose `distance` is known.

        Parameters
        ----------
        distance : array or tensor
            Real numbers >= 0; angles to pi, or by rounding 0.01 beyond, which counts as pi.
            ValueError for others.

        Returns
        -------
        probability : float64 array or tensor of the same shape
            NaN where the distance is. Not differentiable.
        """
        torch = checks.torch_of(distance=distance)
        given = checks.to_numpy(checks.array("distance", distance, torch), torch)
        given = np.asarray(given, np.float64)
        if (given < 0).any():
            raise ValueError(f"distance must be >= 0, got {np.nanmin(given)}")
        if (given > self._farthest + SLACK).any():
            raise ValueError(f"distance must be an angle from 0 to pi, got {np.nanmax(given)}")
        return like(torch, np.asarray(self._probability(given)))[0]

    def collision_probability(self, x: ArrayOrTensor, y: ArrayOrTensor) -> ArrayOrTensor:
        """Probability that rows of x and y share a code, over the choice of the hash functions.

        `probability_of_distance` of their `distance` (see there for x, y and errors): a float64
        array or tensor `(...)`, NaN where the distance is.
        """
        a, b, torch = self._pairs(x, y)
        probability = self._probability(self._distance_of_finite(a, b))
        return like(torch, np.asarray(probability))[0]

    def pair_probability(
        self,
        x: ArrayOrTensor,
        y: ArrayOrTensor,
        indptr: ArrayOrTensor,
        indices: ArrayOrTensor,
        *,
        y_norms: np.ndarray | None = None,
    ) -> ArrayOrTensor:
        """`collision_probability` of listed pairs: row i of x with `y[indices[k]]`, in CSR form.

        Parameters
        ----------
        x, y : arrays or tensors `(n, n_features)`
            Computed in float64 if both are float64, otherwise in float32, except for pairs whose
            probability would lose its precision.
        indptr : integer array or tensor `(len(x) + 1,)`
        indices : integer array or tensor `(nnz,)`, each from 0 to len(y) - 1
        y_norms : float64 array `(len(y),)`, optional
            `row_norms(y)`: saves computing them again for the same y. Its numbers are trusted.

        Returns
        -------
        probability : float64 array or tensor `(nnz,)`
            NaN where `collision_probability` is. Not differentiable.

        Raises
        ------
        TypeError, ValueError
            x or y as in `hash`; indptr and indices that are no integers, do not fit each other, or
            name rows that y lacks.
        """
        torch = checks.torch_of(x=x, y=y, indptr=indptr, indices=indices)
        a, b = self._rows("x", x, torch), self._rows("y", y, torch)
        a, b = (checks.as_floats(checks.to_numpy(z, torch)) for z in (a, b))
        starts, columns = as_pair_lists(indptr, indices, len(a), torch)
        if y_norms is not None:
            y_norms = checks.array("y_norms", y_norms, kinds="f", wanted="the norms of y")
            if y_norms.shape != (len(b),):
                raise ValueError(f"y_norms must have shape {(len(b),)}, got {y_norms.shape}")
        probability, left = self._quick_pairs(a, b, starts, columns, y_norms)
        of_pair = np.repeat(np.arange(len(a)), np.diff(starts))
        step = max(1, _PAIR_NUMBERS // self.n_features)
        for first in range(0, len(left), step):
            some = left[first : first + step]
            pairs = a[of_pair[some]], b[columns[some]]
            probability[some] = self._probability(self._distance_of_finite(*pairs))
        return like(torch, probability)[0]

    def row_norms(self, x: np.ndarray) -> np.ndarray | None:
        """float64 `(n,)` for `pair_probability`, or None where it needs none."""
        return None

    def within_float32(self, x: np.ndarray) -> np.ndarray:
        """Rows `(..., n_features)` with the same codes that float32 holds.

        Of a family of directions: those of another size are scaled by a power of two.
        """
        return x

    def _quick_pairs(
        self,
        x: np.ndarray,
        y: np.ndarray,
        indptr: np.ndarray,
        indices: np.ndarray,
        y_norms: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities of pairs, and the numbers of those that must be computed one by one.

        ValueError for indices of rows that y lacks.
        """
        check_pair_lists(indptr, indices, len(y))
        return np.empty(len(indices)), np.arange(len(indices))

    @np.errstate(invalid="ignore", over="ignore")
    def _distance_of_finite(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        finite = np.isfinite(x).all(-1) & np.isfinite(y).all(-1)
        return np.where(finite, self._distance(x, y), np.nan)

    # ---------------------------------------------------------------- identity

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._identity() == other._identity() and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in self._numbers
        )

    def __hash__(self) -> int:
        first = getattr(self, self._numbers[0])
        return hash((type(self), self._identity(), first.ravel()[-16:].tobytes()))

    def _identity(self) -> tuple[Any, ...]:
        settings = (np.asarray(getattr(self, name)).tobytes() for name in self._settings)
        return *(getattr(self, name) for name in self._sizes), *settings

    def __repr__(self) -> str:
        options = [repr(getattr(self, name)) for name in self._sizes]
        options += [f"{name}={getattr(self, name)}" for name in self._settings]
        return f"{type(self).__name__}({', '.join(options)}, seed={self.seed!r})"

    # ---------------------------------------------------------------- persistence

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The family as a dict of numpy arrays, from which `from_arrays` makes an equal one.

        Numbers and short strings, so that `numpy.savez` needs no pickle.
        """
        seed = "" if self.seed is None or isinstance(self.seed, np.random.Generator) else self.seed
        arrays = {
            "family": np.array(type(self).__name__),
            "format": np.array(FORMAT),
            "seed": np.array(str(seed)),
        }
        for name in (*self._sizes, *self._settings):
            arrays[name] = np.array(getattr(self, name))
        for name in self._numbers:
            arrays[name] = getattr(self, name).copy()
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> Self:
        """The family from the arrays of `to_arrays`; ValueError if they are not valid.

        Called on a subclass, the family must be of that class. `lshkit.hashing.from_arrays` accepts
        any.
        """
        name = str(entry(arrays, "family"))
        family = FAMILIES.get(name)
        if family is None:
            raise ValueError(f"family must be one of {', '.join(sorted(FAMILIES))}, got {name!r}")
        if not issubclass(family, cls):
            raise ValueError(f"family must be {cls.__name__}, got {name}")
        version = _integer(arrays, "format")
        family._check_format(version)
        self = family.__new__(family)
        try:
            self._restore(arrays)
        except TypeError as error:  # of a number that is none
            raise ValueError(str(error)) from None
        seed = str(entry(arrays, "seed"))
        if seed and not seed.isdecimal():
            raise ValueError(f"seed must be an integer >= 0 or empty, got {seed!r}")
        self.seed = checks.seed(int(seed)) if seed else None
        return self

    @classmethod
    def _check_format(cls, version: int) -> None:
        if not 1 <= version <= FORMAT:
            hint = ": use a newer lshkit" if version > FORMAT else ""
            raise ValueError(f"format must be 1 to {FORMAT}, got {version}{hint}")
        if version < cls._first_format:
            raise ValueError(
                f"format of {cls.__name__} must be {cls._first_format}, got {version}, of an older "
                "lshkit, in which the same numbers were other functions: make it anew"
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"format": FORMAT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self._check_format(state.pop("format", 1))
        self.__dict__.update(state)

    @classmethod
    def array_names(cls, numbers: Mapping[str, Any]) -> tuple[str, ...]:
        """Which entries of `to_arrays` are arrays, for a family with these single numbers."""
        return cls._numbers

    def _restore(self, arrays: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _restore_sizes(self, arrays: Mapping[str, Any], max_bits: int | None) -> None:
        self._set_sizes(max_bits, **{name: _integer(arrays, name) for name in self._sizes})

    def _restore_numbers(
        self, arrays: Mapping[str, Any], shapes: dict[str, tuple[int, ...]], dtype: type
    ) -> None:
        """The arrays of these names and shapes; finite, and of dtype."""
        for name, shape in shapes.items():
            value = np.asarray(entry(arrays, name))
            if value.dtype != dtype or value.shape != shape:
                got = f"{value.dtype} {value.shape}"
                raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}, got {got}")
            if not np.isfinite(value).all():
                raise ValueError(f"{name} must be finite")
            setattr(self, name, np.array(value, order="C"))


def from_arrays(arrays: Mapping[str, Any]) -> HashFamily:
    """The hash family, of any class, from the arrays of `to_arrays`.

    ValueError if one of them is missing or not valid, TypeError if `arrays` is no mapping.

    >>> from_arrays(FastHadamard(64, 8, 32, seed=0).to_arrays())  # doctest: +SKIP
    FastHadamard(64, 8, 32, seed=0)
    """
    return HashFamily.from_arrays(arrays)


def entry(arrays: Mapping[str, Any], name: str) -> Any:
    try:
        return arrays[name]
    except KeyError:
        raise ValueError(f"the arrays of a hash family must have {name!r}") from None
    except (TypeError, IndexError):  # no mapping
        got = type(arrays).__name__
        raise TypeError(f"arrays must be a dict of arrays, as of to_arrays, got {got}") from None


def _integer(arrays: Mapping[str, Any], name: str) -> int:
    value = np.asarray(entry(arrays, name))
    if value.dtype.kind not in "iu" or value.size != 1:
        got = f"{value.dtype} {value.shape}"
        raise ValueError(f"{name} must be one integer, got {got}")
    return int(value.reshape(-1)[0])

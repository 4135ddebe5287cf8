"""What all hash families share: checks, identity, and their way to arrays and back."""

import numpy as np

from lshkit import checks

MAX_HASHES = 2**16 - 1  # the core counts the collisions of a pair in 16 bits
FORMAT = 1  # of to_arrays
FAMILIES = {}  # class name to class, filled as they are defined


def code_dtype(n_buckets):
    """The smallest unsigned numpy dtype that holds the codes 0 .. n_buckets - 1."""
    return np.min_scalar_type(n_buckets - 1)


def integer_power(x, exponent):
    """x^exponent by squaring: several times faster than numpy's power."""
    power = None
    while exponent:
        if exponent & 1:
            power = x if power is None else power * x
        exponent >>= 1
        if exponent:
            x = x * x
    return power


class HashFamily:
    """A set of n_hashes random hash functions of vectors of n_features numbers.

    A subclass names the integers that it is made from in `_sizes` and its random numbers in
    `_numbers`; two families are equal when these are.
    """

    _sizes = ("n_features", "n_bits", "n_hashes")
    _numbers = ("parameters",)

    def __init_subclass__(cls):
        if not cls.__name__.startswith("_"):
            FAMILIES[cls.__name__] = cls

    def _set_sizes(self, max_bits, **sizes):
        limits = {"n_bits": max_bits, "n_hashes": MAX_HASHES}
        for name in self._sizes:
            setattr(self, name, checks.integer(name, sizes[name], 1, limits.get(name)))

    def _set_seed(self, seed):
        if not (seed is None or isinstance(seed, np.random.Generator)):
            seed = checks.integer("seed", seed, 0)
            if seed >= 2**128:  # the key of a counter
                raise ValueError(f"seed must be below 2**128, got {seed}")
        self.seed = seed

    def _rows(self, name, x, torch, cuda=False):
        x = checks.array(name, x, torch, cuda=cuda)
        if x.ndim == 0 or x.shape[-1] != self.n_features:
            wanted = f"(..., {self.n_features}), the last dimension being n_features"
            raise ValueError(f"{name} must have shape {wanted}, got {tuple(x.shape)}")
        return x

    def _pairs(self, x, y):
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

    # ---------------------------------------------------------------- identity

    def __eq__(self, other):
        if type(other) is not type(self):
            return NotImplemented
        return self._identity() == other._identity() and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in self._numbers
        )

    def __hash__(self):
        first = getattr(self, self._numbers[0])
        return hash((type(self), self._identity(), first.ravel()[-16:].tobytes()))

    def _identity(self):
        return tuple(getattr(self, name) for name in self._sizes)

    def __repr__(self):
        options = [repr(size) for size in self._identity()]
        options += [f"{name}={getattr(self, name)!r}" for name in (*self._options(), "seed")]
        return f"{type(self).__name__}({', '.join(options)})"

    def _options(self):
        """Names of the settings beside the sizes; numbers or arrays."""
        return ()

    # ---------------------------------------------------------------- persistence

    def to_arrays(self):
        """The family as a dict of numpy arrays, which `from_arrays` turns back into an equal one.

        For `numpy.savez` and the like: numbers and short strings, nothing that needs pickle.
        """
        seed = "" if self.seed is None or isinstance(self.seed, np.random.Generator) else self.seed
        arrays = {
            "family": np.array(type(self).__name__),
            "format": np.array(FORMAT),
            "seed": np.array(str(seed)),
        }
        for name in (*self._sizes, *self._options()):
            arrays[name] = np.array(getattr(self, name))
        for name in self._numbers:
            arrays[name] = getattr(self, name).copy()
        return arrays

    @classmethod
    def from_arrays(cls, arrays):
        """The family that `to_arrays` gave these for; ValueError where they make none.

        Called on a subclass, the family must be of it. `lshkit.hashing.from_arrays` takes any.
        """
        name = str(entry(arrays, "family"))
        family = FAMILIES.get(name)
        if family is None:
            raise ValueError(f"family must be one of {', '.join(sorted(FAMILIES))}, got {name!r}")
        if not issubclass(family, cls):
            raise ValueError(f"family must be {cls.__name__}, got {name}")
        version = _integer(arrays, "format")
        if not 1 <= version <= FORMAT:
            raise ValueError(f"format must be 1 to {FORMAT}, got {version}: use a newer lshkit")
        self = family.__new__(family)
        self._restore(arrays)
        seed = str(entry(arrays, "seed"))
        if seed and not seed.isdecimal():
            raise ValueError(f"seed must be an integer >= 0 or empty, got {seed!r}")
        self.seed = int(seed) if seed else None
        return self

    def _restore(self, arrays):
        raise NotImplementedError

    def _restore_sizes(self, arrays, max_bits):
        self._set_sizes(max_bits, **{name: _integer(arrays, name) for name in self._sizes})

    def _restore_numbers(self, arrays, shapes, dtype):
        """The arrays of these names and shapes; finite, and of dtype."""
        for name, shape in shapes.items():
            value = np.asarray(entry(arrays, name))
            if value.dtype != dtype or value.shape != shape:
                got = f"{value.dtype} {value.shape}"
                raise ValueError(f"{name} must be {np.dtype(dtype)} {shape}, got {got}")
            if not np.isfinite(value).all():
                raise ValueError(f"{name} must be finite")
            setattr(self, name, np.array(value, order="C"))


def from_arrays(arrays):
    """The hash family of any class that `to_arrays` gave these arrays for.

    >>> from_arrays(FastHadamard(64, 8, 32, seed=0).to_arrays())  # doctest: +SKIP
    FastHadamard(64, 8, 32, seed=0)
    """
    return HashFamily.from_arrays(arrays)


def entry(arrays, name):
    try:
        return arrays[name]
    except KeyError:
        raise ValueError(f"the arrays of a hash family must have {name!r}") from None
    except (TypeError, IndexError):  # no mapping
        got = type(arrays).__name__
        raise TypeError(f"arrays must be a dict of arrays, as of to_arrays, got {got}") from None


def _integer(arrays, name):
    value = np.asarray(entry(arrays, name))
    if value.dtype.kind not in "iu" or value.size != 1:
        got = f"{value.dtype} {value.shape}"
        raise ValueError(f"{name} must be one integer, got {got}")
    return int(value.reshape(-1)[0])

"""What hash families and operators both stand on: limits, and the random numbers of the angular
families in the layout of the core (hash.hpp)."""

from typing import Any

import numpy as np

from lshkit import _C
from lshkit.typing import Seed

MAX_BITS = 64
MAX_PROBE_BITS = 16  # of soft codes, and of what keeps a table of all buckets
MAX_HASHES = 2**16 - 1  # the core counts the collisions of a pair in 16 bits
FAMILY: dict[str, int] = {"hyperplane": 0, "hadamard": 1}  # lshkit::Family of the C++ core
ANGLE_ROWS = 3  # of FastHadamard's parameters, before the signs


def code_dtype(n_buckets: int) -> np.dtype:
    """The smallest unsigned numpy dtype that holds the codes 0 .. n_buckets - 1."""
    return np.dtype(np.min_scalar_type(n_buckets - 1).str)  # not another type of 8 bytes


def make_parameters(
    family: str, n_features: int, n_bits: int, n_hashes: int, n_sets: int = 1, seed: Seed = None
) -> np.ndarray:
    """The random numbers that make `n_sets` independent hash function sets.

    Returns a float32 array `(n_sets,) + parameter_shape(...)` in the layout of the core (hash.hpp).
    Set 0 of several equals the only set of one with the same seed. seed: None, an int or a
    `numpy.random.Generator`. Nothing is checked here: `Hyperplane` and `FastHadamard` do that.
    """
    if not isinstance(seed, (int, np.integer)):
        seed = int(np.random.default_rng(seed).integers(2**63))
    key = np.array(divmod(int(seed), 2**64)[::-1], np.uint64)
    shape = parameter_shape(family, n_features, n_bits, n_hashes)
    parameters = np.empty((n_sets, *shape), np.float32)
    fill_parameters(family, key, parameters)
    return parameters


def fill_parameters(family: str, seed: Any, parameters: Any) -> None:
    """The same in an array or tensor of that shape, on the CPU or on CUDA.

    seed: an int64 tensor of one element on the device, or two uint64, the lower half first.
    """
    if family == "hyperplane":
        _C.random_normals(seed, parameters)
    else:
        _C.random_numbers(seed, ANGLE_ROWS, parameters)


def parameter_shape(family: str, n_features: int, n_bits: int, n_hashes: int) -> tuple[int, int]:
    """(rows, columns) of one hash function set."""
    if family == "hyperplane":
        return n_hashes * n_bits, n_features
    columns = max(64, 1 << (n_features - 1).bit_length())
    groups = -(-n_hashes // columns)
    return ANGLE_ROWS + groups * n_bits, columns

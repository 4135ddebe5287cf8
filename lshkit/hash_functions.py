"""What hash families and operators both stand on: limits, and the random numbers of the angular
families in the layout of the core (hash.hpp)."""

import numpy as np

from lshkit.typing import Seed

MAX_BITS = 64
MAX_PROBE_BITS = 16  # of soft codes, and of what keeps a table of all buckets
MAX_HASHES = 2**16 - 1  # the core counts the collisions of a pair in 16 bits
FAMILY: dict[str, int] = {"hyperplane": 0, "hadamard": 1}  # lshkit::Family of the C++ core
ANGLE_ROWS = 3  # of FastHadamard's parameters, before the signs

# Row i: the eight bits of i as signs. One look-up turns a random byte into eight of them.
_BYTE_SIGNS = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, -1, 1).astype(np.float32)


def code_dtype(n_buckets: int) -> np.dtype:
    """The smallest unsigned numpy dtype that holds the codes 0 .. n_buckets - 1."""
    return np.min_scalar_type(n_buckets - 1)


def make_parameters(
    family: str, n_features: int, n_bits: int, n_hashes: int, n_sets: int = 1, seed: Seed = None
) -> np.ndarray:
    """The random numbers that make `n_sets` independent hash function sets.

    Returns a float32 array `(n_sets,) + parameter_shape(...)` in the layout of the core (hash.hpp).
    Set 0 of several equals the only set of one with the same seed. seed: None, an int or a
    `numpy.random.Generator`. Nothing is checked here: `Hyperplane` and `FastHadamard` do that.
    """
    rows, columns = parameter_shape(family, n_features, n_bits, n_hashes)
    if family == "hyperplane":
        return _normals(seed, n_sets, rows * columns).reshape(n_sets, rows, columns)
    half = columns // 2
    angle_words = ANGLE_ROWS * half // 2
    words = angle_words + (rows - ANGLE_ROWS) * columns // 64
    bits = _random_words(seed, n_sets * words).reshape(n_sets, words)
    angles = _angles(bits[:, :angle_words].view(np.uint32)).reshape(n_sets, ANGLE_ROWS, half)
    parameters = np.empty((n_sets, rows, columns), np.float32)
    np.cos(angles, out=parameters[:, :ANGLE_ROWS, :half])
    np.sin(angles, out=parameters[:, :ANGLE_ROWS, half:])
    signs = _BYTE_SIGNS.take(bits[:, angle_words:].view(np.uint8), axis=0)
    parameters[:, ANGLE_ROWS:] = signs.reshape(n_sets, rows - ANGLE_ROWS, columns)
    return parameters


def _random_words(seed: Seed, n: int) -> np.ndarray:
    """64-bit words of a counter's block cipher, for attention, which draws new functions in every
    training step: a Generator takes twice as long, and a GPU cannot make its numbers."""
    if not isinstance(seed, (int, np.integer)):
        seed = int(np.random.default_rng(seed).integers(2**63))
    return np.random.Philox(key=int(seed)).random_raw(n)


def _angles(words: np.ndarray) -> np.ndarray:
    """Of 32 bits each, from 0 to 2 pi."""
    angles = words.astype(np.float32)
    angles *= np.float32(2 * np.pi / 2**32)
    return angles


def _normals(seed: Seed, n_sets: int, n: int) -> np.ndarray:
    """`n_sets` times `n` standard normal numbers, two a word (Box and Muller 1958)."""
    words = -(-n // 2)
    bits = _random_words(seed, n_sets * words).view(np.uint32).reshape(n_sets, words, 2)
    # In double: float32 has no numbers close enough to 1, whose logarithms are the small radii.
    radii = np.sqrt(-2 * np.log((bits[..., 0] + 0.5) / 2**32)).astype(np.float32)
    angles = _angles(bits[..., 1])
    normals = np.empty((n_sets, words, 2), np.float32)
    np.multiply(radii, np.cos(angles), out=normals[..., 0])
    np.multiply(radii, np.sin(angles), out=normals[..., 1])
    return np.ascontiguousarray(normals.reshape(n_sets, 2 * words)[:, :n])


def parameter_shape(family: str, n_features: int, n_bits: int, n_hashes: int) -> tuple[int, int]:
    """(rows, columns) of one hash function set."""
    if family == "hyperplane":
        return n_hashes * n_bits, n_features
    columns = max(64, 1 << (n_features - 1).bit_length())
    groups = -(-n_hashes // columns)
    return ANGLE_ROWS + groups * n_bits, columns

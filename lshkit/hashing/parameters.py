"""The random numbers of the angular families, in the layout of the core (hash.hpp)."""

import numpy as np

FAMILY = {"hyperplane": 0, "hadamard": 1}  # lshkit::Family of the C++ core
ANGLE_ROWS = 3  # of FastHadamard's parameters, before the signs, and of a gradient's rotation

_ROTATION_STREAM = 2**64  # added to a Philox key, whose seeds lie below

# Row i: the eight bits of i as signs. One look-up turns a random byte into eight of them.
_BYTE_SIGNS = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, -1, 1).astype(np.float32)


def make_parameters(family, n_features, n_bits, n_hashes, n_sets=1, seed=None):
    """The random numbers that make `n_sets` independent hash function sets.

    Returns a float32 array `(n_sets,) + parameter_shape(...)` in the layout of the core (hash.hpp).
    Set 0 of several equals the only set of one with the same seed. seed: None, an int or a
    `numpy.random.Generator`. Nothing is checked here: `Hyperplane` and `FastHadamard` do that.
    """
    rows, columns = parameter_shape(family, n_features, n_bits, n_hashes)
    if family == "hyperplane":
        rng = np.random.default_rng(seed)
        return rng.standard_normal((n_sets, rows, columns), dtype=np.float32)
    # Raw words, 32 bits for each angle and one for each sign, straight from a counter: attention
    # draws new functions in every training step, and a Generator would take twice as long.
    if not isinstance(seed, (int, np.integer)):
        seed = int(np.random.default_rng(seed).integers(2**63))
    half = columns // 2
    angle_words = ANGLE_ROWS * half // 2
    words = angle_words + (rows - ANGLE_ROWS) * columns // 64
    bits = np.random.Philox(key=seed).random_raw(n_sets * words).reshape(n_sets, words)
    angles = bits[:, :angle_words].view(np.uint32).astype(np.float32)
    angles *= np.float32(2 * np.pi / 2**32)
    angles = angles.reshape(n_sets, ANGLE_ROWS, half)
    parameters = np.empty((n_sets, rows, columns), np.float32)
    np.cos(angles, out=parameters[:, :ANGLE_ROWS, :half])
    np.sin(angles, out=parameters[:, :ANGLE_ROWS, half:])
    signs = _BYTE_SIGNS.take(bits[:, angle_words:].view(np.uint8), axis=0)
    parameters[:, ANGLE_ROWS:] = signs.reshape(n_sets, rows - ANGLE_ROWS, columns)
    return parameters


def make_rotation(n_values, n_sets=1, seed=None):
    """The random numbers of `n_sets` rotations of `n_values` coordinates, for a gradient's sketch.

    Returns a float32 array `(n_sets, ANGLE_ROWS, D)` as the core takes it (GradientSketch), D a
    power of two: rows of D/2 cosines, then D/2 sines. From a stream of its own: with an int seed
    they are independent of the hash functions that `make_parameters` gives for it.
    """
    half = rotation_columns(n_values) // 2
    if not isinstance(seed, (int, np.integer)):
        seed = int(np.random.default_rng(seed).integers(2**63))
    bits = np.random.Philox(key=int(seed) + _ROTATION_STREAM).random_raw(
        n_sets * ANGLE_ROWS * half // 2
    )
    angles = bits.view(np.uint32).astype(np.float32).reshape(n_sets, ANGLE_ROWS, half)
    angles *= np.float32(2 * np.pi / 2**32)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)


def rotation_columns(n_values):
    """D of `make_rotation`: the power of two that holds the coordinates, 16 or more."""
    return max(16, 1 << (n_values - 1).bit_length())


def parameter_shape(family, n_features, n_bits, n_hashes):
    """(rows, columns) of one hash function set."""
    if family == "hyperplane":
        return n_hashes * n_bits, n_features
    columns = max(64, 1 << (n_features - 1).bit_length())
    groups = -(-n_hashes // columns)
    return ANGLE_ROWS + groups * n_bits, columns

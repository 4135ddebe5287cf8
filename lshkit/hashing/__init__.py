"""Locality-sensitive hash families: codes = hasher.hash(x).

Two vectors share a code with a probability that depends on one number of the pair only: the cosine
of their angle (`Hyperplane`, `FastHadamard`) or their distance (`EuclideanLSH`, `RandomBinning`).
A family knows that probability; what is done with codes is the business of the verbs in
`lshkit.buckets`.
"""

from lshkit.hashing.angular import MAX_BITS, MAX_PROBE_BITS, FastHadamard, Hyperplane
from lshkit.hashing.binned import EuclideanLSH, RandomBinning
from lshkit.hashing.family import MAX_HASHES, code_dtype, from_arrays
from lshkit.hashing.parameters import (
    ANGLE_ROWS,
    FAMILY,
    make_parameters,
    make_rotation,
    parameter_shape,
    rotation_columns,
)

__all__ = [
    "ANGLE_ROWS",
    "FAMILY",
    "MAX_BITS",
    "MAX_HASHES",
    "MAX_PROBE_BITS",
    "EuclideanLSH",
    "FastHadamard",
    "Hyperplane",
    "RandomBinning",
    "code_dtype",
    "from_arrays",
    "make_parameters",
    "make_rotation",
    "parameter_shape",
    "rotation_columns",
]

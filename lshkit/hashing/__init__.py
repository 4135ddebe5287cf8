"""Locality-sensitive hash families: codes = hasher.hash(x).

Two vectors share a code with a probability that depends only on their angle (`Hyperplane`,
`FastHadamard`) or on their distance (`EuclideanLSH`, `RandomBinning`). A family computes codes,
distances and collision probabilities; the functions in `lshkit.buckets` operate on codes.
"""

from lshkit.hashing.angular import FastHadamard, Hyperplane
from lshkit.hashing.binned import EuclideanLSH, RandomBinning
from lshkit.hashing.family import from_arrays

__all__ = ["EuclideanLSH", "FastHadamard", "Hyperplane", "RandomBinning", "from_arrays"]


def __dir__() -> list[str]:
    return __all__

"""Locality-sensitive hash families: codes = hasher.hash(x).

Two vectors share a code with a probability that depends on one number of the pair only: their angle
(`Hyperplane`, `FastHadamard`) or their distance (`EuclideanLSH`, `RandomBinning`). A family knows
that number and that probability; what is done with codes is the business of the verbs in
`lshkit.buckets`.
"""

from lshkit.hashing.angular import FastHadamard, Hyperplane
from lshkit.hashing.binned import EuclideanLSH, RandomBinning
from lshkit.hashing.family import from_arrays

__all__ = ["EuclideanLSH", "FastHadamard", "Hyperplane", "RandomBinning", "from_arrays"]


def __dir__():
    return __all__

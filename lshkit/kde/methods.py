"""The density methods by name, in the order in which "auto" tunes them."""

from lshkit.kde.brute import BruteForce
from lshkit.kde.hbe import HashedDraws
from lshkit.kde.near_far import NearFar
from lshkit.kde.random_sampling import RandomSampling
from lshkit.kde.sketch import SketchedRows

METHODS = {m.name: m for m in (BruteForce, RandomSampling, NearFar, SketchedRows, HashedDraws)}

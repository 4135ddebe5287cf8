"""The verbs on codes, for numpy arrays and torch tensors. They do not depend on hash families."""

from lshkit.buckets.codes import fold
from lshkit.buckets.draw import HashTables, draw
from lshkit.buckets.pairs import collisions, pair_distances, pair_products
from lshkit.buckets.sum import bucket_sum
from lshkit.buckets.table import BucketTable

__all__ = [
    "BucketTable",
    "HashTables",
    "bucket_sum",
    "collisions",
    "draw",
    "fold",
    "pair_distances",
    "pair_products",
]

"""A method from its name and its settings: what a pilot picked, or what a file remembers of it."""

import numpy as np

from lshkit import checks, hashing
from lshkit.kde.exact import BruteForce
from lshkit.kde.hashed import Buckets, family
from lshkit.kde.hbe import HashedDraws, Share
from lshkit.kde.near_far import NearFar
from lshkit.kde.random_sampling import PermutedRows, RandomSampling
from lshkit.kde.sketch import SketchedRows

MAX_HASHES = 2**12  # of every method: pilots ask for no more, files with more are none


def make(name, settings, training, permuted=None, buckets=None):
    """The method; ValueError, TypeError or KeyError for settings that are none.

    permuted, buckets: where they are ready, those that the method would make again.
    """
    if name == "brute":
        return BruteForce(training)
    permuted = PermutedRows(training) if permuted is None else permuted
    if name == "random":
        return RandomSampling(permuted, _size(settings), _limit(settings))
    n_hashes = checks.integer("n_hashes", settings["n_hashes"], 1, MAX_HASHES)
    if name == "bucket_sum":
        return SketchedRows(permuted, training.geometry.n_bits, n_hashes)
    if name == "near_far":
        if buckets is None:
            buckets = Buckets(permuted, near_hasher(training, settings), 0)
        counts = (
            checks.integer("min_count", settings["min_count"], 1, 255),
            checks.integer("max_bucket_size", settings["max_bucket_size"], 0, 2**31 - 1),
        )
        unseen = float(settings.get("unseen", 0.0))  # older files know nothing of it
        if not 0 <= unseen < np.inf:
            raise ValueError(f"unseen must be a finite number of 0 or more, is {unseen}")
        return NearFar(buckets, *counts, _size(settings), _limit(settings), unseen)
    distance = checks.positive("distance", settings["distance"])
    sharpness = checks.integer("sharpness", settings["sharpness"], 1, 64)
    if buckets is None:
        buckets = Buckets(permuted, family(training, distance, n_hashes, sharpness))
    if name == "hbe":
        return HashedDraws(buckets)
    if name != "split":
        raise ValueError(f"there is no method {name!r}")
    share = Share(buckets.hasher, float(settings["a"]), checks.positive("r", settings["largest"]))
    return HashedDraws(buckets, share, _size(settings))


def near_hasher(training, settings):
    """The hash functions of near_far: FastHadamard, or EuclideanLSH where there is a width."""
    seed = int(np.random.default_rng([training.seed, 4]).integers(2**31))
    sizes = len(training.geometry.bandwidth), settings["n_bits"], settings["n_hashes"]
    if settings.get("width") is None:
        return hashing.FastHadamard(*sizes, seed=seed)
    return hashing.EuclideanLSH(*sizes, width=settings["width"], seed=seed)


def _size(settings):
    return checks.integer("n_samples", settings["n_samples"], 1)


def _limit(settings):
    return checks.positive("limit", settings["limit"])

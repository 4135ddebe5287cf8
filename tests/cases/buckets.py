"""Random codes and values for the tests of the sum verb, and what its result must be."""

import numpy as np

from lshkit import reference
from lshkit.hash_functions import code_dtype

# Sums of up to n_hashes * n_k terms in any order, then one scaling. The relative error of a sum of
# numbers of both signs is bounded only against the sum of their sizes, so tests compare to that.
ROUNDING = {np.float16: 2.0**-10, np.float32: 1e-6, np.float64: 1e-14}


def random_case(n_q, n_k, n_hashes, n_buckets, d_v, leading=(), seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    query_codes, key_codes = (
        rng.integers(0, n_buckets, (*leading, n, n_hashes)).astype(code_dtype(n_buckets))
        for n in (n_q, n_k)
    )
    values = rng.standard_normal((*leading, n_k, d_v)).astype(dtype)
    return query_codes, key_codes, values


def weighted_case(
    n_q, n_k, n_hashes, n_buckets, d_v, n_probes=(4, 4), leading=(), seed=0, dtype=np.float32
):
    """query_codes, key_codes, values and the weights of both."""
    rng = np.random.default_rng(seed)
    sides = []
    for n, t in ((n_q, n_probes[0]), (n_k, n_probes[1])):
        shape = (*leading, n, n_hashes, t)
        codes = rng.integers(0, n_buckets, shape).astype(code_dtype(n_buckets))
        sides.append((codes, rng.standard_normal(shape).astype(dtype)))
    values = rng.standard_normal((*leading, n_k, d_v)).astype(dtype)
    (query_codes, query_weights), (key_codes, key_weights) = sides
    weights = {"query_weights": query_weights, "key_weights": key_weights}
    return (query_codes, key_codes, values), weights


def random_codes(n_q, n_k, n_hashes, n_buckets, dtype, seed=0, spread=False):
    """Codes below n_buckets, or with `spread` as many codes all over the type's range."""
    rng = np.random.default_rng(seed)
    codes = [rng.integers(0, n_buckets, (n, n_hashes)).astype(dtype) for n in (n_q, n_k)]
    factor = np.array(0x9E3779B97F4A7C15, np.uint64).astype(dtype)
    return [c * factor for c in codes] if spread else codes


def assert_close(got, query_codes, key_codes, values, **options):
    """got equals the reference up to the rounding of its type."""
    expected = reference.bucket_sum(query_codes, key_codes, values, **options)
    size = reference.bucket_sum(
        query_codes, key_codes, np.abs(np.asarray(values, np.float64)), **options
    )
    assert got.shape == expected.shape
    assert (np.abs(got - expected) <= ROUNDING[got.dtype.type] * size).all()

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


def assert_close(got, query_codes, key_codes, values, **options):
    """got equals the reference up to the rounding of its type."""
    expected = reference.bucket_sum(query_codes, key_codes, values, **options)
    size = reference.bucket_sum(
        query_codes, key_codes, np.abs(np.asarray(values, np.float64)), **options
    )
    assert got.shape == expected.shape
    assert (np.abs(got - expected) <= ROUNDING[got.dtype.type] * size).all()

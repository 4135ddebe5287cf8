"""What the core makes of rows, for the tests of hash functions and of threads."""

import numpy as np

from lshkit import _C
from lshkit.hash_functions import FAMILY, code_dtype

N_BITS, N_HASHES, HYPERPLANE = 8, 16, FAMILY["hyperplane"]


def rows_and_planes(n):
    """2 x 2 x n rows of 64 features, and hyperplanes for `hash_rows`."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 2, n, 64)).astype(np.float32)
    planes = rng.standard_normal((1, N_BITS * N_HASHES, 64)).astype(np.float32)
    return x, planes


def hash_rows(x, planes, threads):
    codes = np.empty((*x.shape[:3], N_HASHES), np.uint8)
    _C.hash(x, planes, HYPERPLANE, N_BITS, N_HASHES, codes, threads)
    return codes


def soft_codes_of_core(x, parameters, family, n_bits, n_hashes, n_probes, sharpness, grad, threads):
    """Every array that the core makes of soft codes and of the gradient of their weights."""
    rows, r = x.shape[:3], (n_probes - 1).bit_length()
    codes = np.empty((*rows, n_hashes), code_dtype(2**n_bits))
    margins = np.empty((*rows, n_hashes * r), np.int32)
    probes = np.empty((*rows, n_hashes * n_probes), codes.dtype)
    weights = np.empty(probes.shape, np.float32)
    options = x, parameters, sharpness, FAMILY[family], n_bits, n_hashes, n_probes
    finite = _C.soft_hash(*options, codes, margins, probes, weights, threads)
    grad_x, grad_sharpness = np.empty_like(x), np.empty(rows[:2], np.float32)
    planes = np.empty_like(parameters) if family == "hyperplane" else None
    saved = codes, margins, weights
    _C.soft_hash_backward(*options, *saved, grad, grad_x, grad_sharpness, planes, threads)
    out = [codes, margins, probes, weights, grad_x, grad_sharpness, np.array(finite)]
    return out if planes is None else [*out, planes]

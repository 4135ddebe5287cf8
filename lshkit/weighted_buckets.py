"""The sum verb with weights, behind `lshkit.buckets.bucket_sum`."""

import numpy as np

from lshkit import _C, buckets, checks


def bucket_sum(query, key, values, n_buckets, causal, key_mask):
    """query and key: codes with their weights, one of which may be None."""
    (query_codes, query_weights), (key_codes, key_weights) = query, key
    torch = checks.torch_of(
        query_codes=query_codes,
        key_codes=key_codes,
        values=values,
        key_mask=key_mask,
        query_weights=query_weights,
        key_weights=key_weights,
    )
    n_buckets = checks.integer("n_buckets", n_buckets, 1, buckets.MAX_BUCKETS)
    causal = checks.boolean("causal", causal)
    query = _side("query", query_codes, query_weights, n_buckets, torch)
    key = _side("key", key_codes, key_weights, n_buckets, torch)
    values = checks.array("values", values, torch, cuda=True)
    if key_mask is not None:
        key_mask = checks.array(
            "key_mask", key_mask, torch, kinds="biu", wanted="booleans", cuda=True
        )
    # One probe stands for all: the shapes that must agree are those of plain codes.
    leading = buckets._check_shapes(query[0][..., 0], key[0][..., 0], values, key_mask)

    query, key = (
        [None if x is None else _heads(x, leading, torch) for x in side] for side in (query, key)
    )
    values = buckets._heads(values, leading, torch)
    if key_mask is not None:
        key_mask = buckets._heads((key_mask != 0)[..., None], leading, torch)[:, 0, :, 0]
    order = 1 if causal else 0
    if torch is None:
        sums = _numpy_bucket_sum(query, key, values, n_buckets, order, key_mask)
    else:
        from lshkit import torch_ops

        values = values if values.is_floating_point() else values.double()
        weights = query[1], key[1]
        sums = torch_ops.weighted_bucket_sum(
            query[0], key[0], values, *weights, n_buckets, order, key_mask
        )
    return sums.reshape(leading + tuple(sums.shape[-2:]))


def _side(side, codes, weights, n_buckets, torch):
    """Codes (..., rows, n_hashes, n_probes) and weights of the same shape or None."""
    name = f"{side}_codes"
    if weights is None:
        codes = buckets.as_codes(name, codes, n_buckets, torch, cuda=True)
        return codes[..., None], None
    codes = checks.array(name, codes, torch, kinds="iu", wanted="integer codes", cuda=True)
    weights = checks.array(f"{side}_weights", weights, torch, cuda=True)
    shape = tuple(codes.shape)
    if codes.ndim < 3 or 0 in shape[-2:] or shape[-1] > buckets.MAX_BUCKETS:
        raise ValueError(
            f"{name} must have shape (..., n, n_hashes, n_probes) with n_hashes and n_probes >= 1, "
            f"as {side}_weights is given, got {shape}"
        )
    if tuple(weights.shape) != shape:
        raise ValueError(
            f"{side}_weights must have the shape {shape} of {name}, got {tuple(weights.shape)}"
        )
    return buckets.as_codes(name, codes, n_buckets, torch, cuda=True), weights


def _heads(x, leading, torch):
    """x broadcast to the leading dimensions and reshaped to (batch, 1, rows, hashes, probes)."""
    rows = x.reshape(tuple(x.shape[:-2]) + (x.shape[-2] * x.shape[-1],))
    rows = buckets._heads(rows, leading, torch)
    return rows.reshape(tuple(rows.shape[:-1]) + tuple(x.shape[-2:]))


def _numpy_bucket_sum(query, key, values, n_buckets, order, key_mask):
    given, dtype = values.dtype, buckets.sum_dtype(values)
    shape = query[0].shape[:-2] + values.shape[-1:]
    if 0 in shape or 0 in values.shape:
        return np.zeros(shape, given if given == np.float16 else dtype)
    sums = np.empty(shape, dtype)
    values = np.ascontiguousarray(values, dtype)
    key_mask = None if key_mask is None else np.ascontiguousarray(key_mask)
    sides = []
    for codes, weights in (query, key):
        flat = codes.shape[:3] + (-1,)
        if weights is not None:
            weights = np.ascontiguousarray(weights, dtype).reshape(flat)
        sides += np.ascontiguousarray(codes).reshape(flat), weights, codes.shape[-1]
    scale = 1 / query[0].shape[-2]
    _C.weighted_bucket_sum(*sides, values, n_buckets, order, key_mask, scale, sums, 0)
    return sums.astype(given) if given == np.float16 else sums

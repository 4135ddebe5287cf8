"""The sum verb, of codes and of codes with weights."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lshkit import _C, checks
from lshkit.buckets.codes import MAX_BUCKETS, as_codes, as_n_buckets
from lshkit.typing import ArrayOrTensor


def bucket_sum(
    query_codes: ArrayOrTensor,
    key_codes: ArrayOrTensor,
    values: ArrayOrTensor,
    n_buckets: int,
    *,
    causal: bool = False,
    key_mask: ArrayOrTensor | None = None,
    query_weights: ArrayOrTensor | None = None,
    key_weights: ArrayOrTensor | None = None,
) -> ArrayOrTensor:
    """Mean over the hashes of the sum of the values whose key shares the query's bucket.

    For codes from one hash family, an unbiased estimate of sum_j p(q, k_j) v_j with p the collision
    probability (YOSO, ICML 2021, section 3.2). The cost is linear in n_q + n_k.
    Leading dimensions are broadcast; all arrays or all tensors.

    Parameters
    ----------
    query_codes : integer array or tensor `(..., n_q, n_hashes)`
    key_codes : integer array or tensor `(..., n_k, n_hashes)`
        Codes from 0 to n_buckets - 1. uint8 (n_buckets <= 256) and uint16 are used without
        conversion.
    values : array or tensor `(..., n_k, d_v)`
        float32 and float64 are summed in their own type, 16-bit floats in float32 and then rounded
        to their type, everything else in float64. Differentiable in torch.
    n_buckets : int, 1 to 65536
    causal : bool
        Query i sees the keys j <= i only.
    key_mask : boolean array or tensor `(..., n_k)`, optional
        False (or 0) excludes a key, whatever its value contains.
    query_weights, key_weights : arrays or tensors like their codes, optional
        With either, a row belongs to several buckets of a hash: codes and weights of that side are
        `(..., n, n_hashes, n_probes)`, and a pair counts with the sum over its shared buckets of
        query weight times key weight. The numbers of probes of the two sides may differ; a side
        without weights has one code per hash. Once differentiable in torch.

    Returns
    -------
    sums : array or tensor `(..., n_q, d_v)`
        0 for a query that collides with no key. A NaN or infinity in a value affects only the
        queries whose sum contains it, with a weight of 0 too: 0 times NaN is NaN.

    Raises
    ------
    TypeError, ValueError
        Arguments of the wrong type or shape, codes of n_buckets or more, arrays and tensors mixed.
    """
    torch = checks.torch_of(
        query_codes=query_codes,
        key_codes=key_codes,
        values=values,
        key_mask=key_mask,
        query_weights=query_weights,
        key_weights=key_weights,
    )
    n_buckets = as_n_buckets(n_buckets)
    order = 1 if checks.boolean("causal", causal) else 0
    query = _side("query", query_codes, query_weights, n_buckets, torch)
    key = _side("key", key_codes, key_weights, n_buckets, torch)
    given: Any = checks.array("values", values, torch, cuda=True)
    mask: Any = None
    if key_mask is not None:
        mask = checks.array("key_mask", key_mask, torch, kinds="biu", wanted="booleans", cuda=True)
    # One probe stands for all: the shapes that must agree are those of plain codes.
    leading = _check_shapes(query[0][..., 0], key[0][..., 0], given, mask)

    sides: list[Any] = [
        [None if x is None else _heads(x, leading, torch, 3) for x in side] for side in (query, key)
    ]
    given = _heads(given, leading, torch)
    if mask is not None:
        mask = _heads((mask != 0)[..., None], leading, torch)[:, 0, :, 0]
    sums: Any
    if torch is None:
        sums = _numpy_sum(sides[0], sides[1], given, n_buckets, order, mask)
    else:
        from lshkit import torch_ops

        given = given if given.is_floating_point() else given.double()
        of_queries, of_keys = sides[0][0], sides[1][0]
        weights = sides[0][1], sides[1][1]
        if weights == (None, None):
            codes = of_queries[..., 0], of_keys[..., 0]
            sums = torch_ops.bucket_sum(*codes, given, n_buckets, order, mask)
        else:
            sums = torch_ops.weighted_bucket_sum(
                of_queries, of_keys, given, *weights, n_buckets, order, mask
            )
    return sums.reshape(leading + tuple(sums.shape[-2:]))


def _side(side: str, codes: Any, weights: Any, n_buckets: int, torch: Any) -> tuple[Any, Any]:
    """Codes (..., rows, n_hashes, n_probes) and weights of the same shape or None."""
    name = f"{side}_codes"
    if weights is None:
        return as_codes(name, codes, n_buckets, torch)[..., None], None
    codes = checks.array(name, codes, torch, kinds="iu", wanted="integer codes", cuda=True)
    weights = checks.array(f"{side}_weights", weights, torch, cuda=True)
    shape = tuple(codes.shape)
    if codes.ndim < 3 or 0 in shape[-2:] or shape[-1] > MAX_BUCKETS:
        raise ValueError(
            f"{name} must have shape (..., n, n_hashes, n_probes) with n_hashes and n_probes >= 1, "
            f"as {side}_weights is given, got {shape}"
        )
    if tuple(weights.shape) != shape:
        raise ValueError(
            f"{side}_weights must have the shape {shape} of {name}, got {tuple(weights.shape)}"
        )
    return as_codes(name, codes, n_buckets, torch), weights


def _check_shapes(query_codes: Any, key_codes: Any, values: Any, key_mask: Any) -> tuple[int, ...]:
    """The leading dimensions that all arguments broadcast to."""
    shapes = {
        "query_codes": tuple(query_codes.shape),
        "key_codes": tuple(key_codes.shape),
        "values": tuple(values.shape),
    }
    if values.ndim < 2:
        raise ValueError(f"values must have shape (..., n_k, d_v), got {shapes['values']}")
    leading = {name: shape[:-2] for name, shape in shapes.items()}
    if key_mask is not None:
        shapes["key_mask"] = tuple(key_mask.shape)
        leading["key_mask"] = shapes["key_mask"][:-1]
    n_hashes, n_keys = shapes["query_codes"][-1], shapes["key_codes"][-2]
    if shapes["key_codes"][-1] != n_hashes:
        raise ValueError(
            f"key_codes must have the {n_hashes} hashes of query_codes in its last dimension, "
            f"got shape {shapes['key_codes']}"
        )
    if shapes["values"][-2] != n_keys:
        raise ValueError(
            f"values must have a row for each of the {n_keys} keys, got shape {shapes['values']}"
        )
    if key_mask is not None and shapes["key_mask"][-1:] != (n_keys,):
        raise ValueError(
            f"key_mask must have shape (..., {n_keys}), got shape {shapes['key_mask']}"
        )
    try:
        return np.broadcast_shapes(*leading.values())
    except ValueError:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"the leading dimensions do not match: {listed}") from None


def _heads(x: Any, leading: tuple[int, ...], torch: Any, n_own: int = 2) -> Any:
    """x broadcast to the leading dimensions and reshaped to (batch, 1, ...), n_own more of them."""
    own = tuple(x.shape[-n_own:])
    x = np.broadcast_to(x, leading + own) if torch is None else x.expand(leading + own)
    return x.reshape((math.prod(leading), 1) + own)


def _numpy_sum(
    query: Sequence[Any],
    key: Sequence[Any],
    values: np.ndarray,
    n_buckets: int,
    order: int,
    key_mask: np.ndarray | None,
) -> np.ndarray:
    given = values.dtype.newbyteorder("=")
    dtype = np.float32 if given.kind == "f" and given.itemsize <= 4 else np.float64
    shape = query[0].shape[:3] + values.shape[-1:]
    if 0 in shape or 0 in values.shape:
        return np.zeros(shape, given if given == np.float16 else dtype)
    sums = np.empty(shape, dtype)
    # A broadcast or transposed array may reach this point as a view that is not contiguous.
    values = np.ascontiguousarray(values, dtype)
    key_mask = None if key_mask is None else np.ascontiguousarray(key_mask)
    sides: list[tuple[np.ndarray, np.ndarray | None, int]] = []
    for codes, weights in (query, key):
        flat = codes.shape[:3] + (-1,)
        if weights is not None:
            weights = np.ascontiguousarray(weights, dtype).reshape(flat)
        sides.append((np.ascontiguousarray(codes).reshape(flat), weights, codes.shape[-1]))
    rest = order, key_mask, 1 / query[0].shape[3], sums, 0
    if query[1] is None and key[1] is None:
        _C.bucket_sum(sides[0][0], sides[1][0], values, n_buckets, *rest)
    else:
        _C.weighted_bucket_sum(*(*sides[0], *sides[1], values, n_buckets), *rest)
    return sums.astype(given) if given == np.float16 else sums

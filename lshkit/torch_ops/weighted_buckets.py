"""The sum verb with weights: codes and weights are (batch, heads, rows, n_hashes, n_probes).

A side with one code per hash, whose weights are None, has n_probes 1.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from lshkit import _C
from lshkit.torch_ops import library
from lshkit.torch_ops.tensors import check_codes, float_dtype, mask_rows, rows

_INPUTS = (
    "Tensor query_codes, Tensor key_codes, Tensor values, Tensor? query_weights, "
    "Tensor? key_weights, SymInt n_buckets, int order, Tensor? key_mask"
)
library.define(
    f"weighted_bucket_sum({_INPUTS}) -> Tensor",
    f"weighted_bucket_sum_backward(Tensor grad_out, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
)


def _new_output(query_codes: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.new_empty((*query_codes.shape[:-2], values.shape[-1]), dtype=dtype)


def _side(
    name: str, codes: Tensor, weights: Tensor | None, n_buckets: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, int]:
    """Codes, weights or None, and n_probes, as the core takes them."""
    shape = tuple(codes.shape)
    if len(shape) != 5:
        wanted = "(batch, heads, rows, n_hashes, n_probes), n_probes 1 for one code per hash"
        raise ValueError(f"{name} must have shape {wanted}, got {shape}")
    check_codes(name, codes, n_buckets)
    if weights is not None:
        if tuple(weights.shape) != shape:
            of = name.replace("codes", "weights")
            raise ValueError(
                f"{of} must have the shape {shape} of {name}, got {tuple(weights.shape)}"
            )
        weights = weights.to(dtype).contiguous().flatten(-2)
    return codes.contiguous().flatten(-2), weights, codes.shape[-1]


# Codes, weights and n_probes of both sides; values, n_buckets, order, key_mask, scale.
Arguments: TypeAlias = tuple[
    Tensor, Tensor | None, int, Tensor, Tensor | None, int, Tensor, int, int, Tensor | None, float
]


def _arguments(
    query_codes: Tensor,
    key_codes: Tensor,
    values: Tensor,
    query_weights: Tensor | None,
    key_weights: Tensor | None,
    n_buckets: int,
    *options: Any,
) -> Arguments:
    order, key_mask = options
    dtype = float_dtype(values)
    query = _side("query_codes", query_codes, query_weights, n_buckets, dtype)
    key = _side("key_codes", key_codes, key_weights, n_buckets, dtype)
    scale = 1.0 / query_codes.shape[-2]
    return *query, *key, rows(values, dtype), n_buckets, order, mask_rows(key_mask), scale


def _weighted_bucket_sum(
    query_codes: Tensor, key_codes: Tensor, values: Tensor, *rest: Any
) -> Tensor:
    out = _new_output(query_codes, values, float_dtype(values))
    if out.numel() == 0 or key_codes.numel() == 0:
        return out.zero_().to(values.dtype)
    arguments = _arguments(query_codes, key_codes, values, *rest)
    _C.weighted_bucket_sum(*arguments, out, torch.get_num_threads())
    return out.to(values.dtype)


def _weighted_bucket_sum_backward(
    grad_out: Tensor, query_codes: Tensor, key_codes: Tensor, values: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    dtype = float_dtype(values)
    given = values, *rest[:2]
    grads = [None if x is None else x.new_empty(x.shape, dtype=dtype) for x in given]
    if grad_out.numel() == 0 or key_codes.numel() == 0:
        for grad in grads:
            if grad is not None:
                grad.zero_()
    else:
        arguments = _arguments(query_codes, key_codes, values, *rest)
        flat = [grad if grad is None else grad.flatten(-2) for grad in grads[1:]]
        given_rows, threads = rows(grad_out, dtype), torch.get_num_threads()
        _C.weighted_bucket_sum_backward(*arguments, given_rows, grads[0], flat[0], flat[1], threads)
    return tuple(
        values.new_empty((values.shape[0], 0)) if grad is None else grad.to(x.dtype)
        for grad, x in zip(grads, given, strict=True)
    )


library.register_kernel("weighted_bucket_sum", _weighted_bucket_sum)
library.register_kernel("weighted_bucket_sum_backward", _weighted_bucket_sum_backward)


@library.fake("weighted_bucket_sum")
def _(query_codes: Tensor, key_codes: Tensor, values: Tensor, *options: Any) -> Any:
    return _new_output(query_codes, values, values.dtype)


@library.fake("weighted_bucket_sum_backward")
def _(
    grad_out: Tensor,
    query_codes: Tensor,
    key_codes: Tensor,
    values: Tensor,
    query_weights: Tensor | None,
    key_weights: Tensor | None,
    *options: Any,
) -> Any:
    return tuple(
        values.new_empty((values.shape[0], 0)) if x is None else x.new_empty(x.shape)
        for x in (values, query_weights, key_weights)
    )


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, n_buckets, order, key_mask = inputs
    ctx.save_for_backward(*tensors, key_mask)
    ctx.options = n_buckets, order


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, key_mask = ctx.saved_tensors
    grads = weighted_bucket_sum_backward(grad_out, *tensors, *ctx.options, key_mask)
    given = tensors[2:]
    grads = (grad if x is not None else None for grad, x in zip(grads, given, strict=True))
    return None, None, *grads, None, None, None


weighted_bucket_sum = library.differentiable("weighted_bucket_sum", _setup, _backward)
weighted_bucket_sum_backward = library.gradient_of("weighted_bucket_sum")
library.register_vmap("weighted_bucket_sum", (0, 1, 2, 3, 4, 7))
library.register_vmap("weighted_bucket_sum_backward", (0, 1, 2, 3, 4, 5, 8))

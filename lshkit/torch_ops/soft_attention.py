"""Attention with soft codes."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lshkit import _C
from lshkit.hash_functions import FAMILY
from lshkit.torch_ops import library
from lshkit.torch_ops.soft import check_sharpness, selected_bits
from lshkit.torch_ops.tensors import (
    check_codes,
    core_dtype,
    in_dtype,
    mask_rows,
    new_codes,
    new_gradients,
    new_output,
    rows,
    rows_of,
    wanted_only,
)

_QKV = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor? query_starts, "
    "Tensor? key_starts"
)
_OPTIONS = (
    "Tensor parameters, Tensor sharpness, int family, int n_bits, int n_hashes, "
    "int query_probes, int key_probes, bool is_causal, int normalize"
)
# Of queries, then of keys: own codes (batch, heads, rows, n_hashes) and margins (..., n_selected),
# int32 words as soft_hash has them.
_CODES = "Tensor q_codes, Tensor q_margins, Tensor k_codes, Tensor k_margins"
library.define(
    # The output, the codes, and what each row of sums was divided by: (batch, heads, rows), or
    # (batch, heads, 0) without a normalisation.
    f"soft_attention({_QKV}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    # The gradient of sharpness is for every (batch, head). What is not wanted is empty: by the
    # output_mask of query, key, value and sharpness, and of the parameters.
    f"soft_attention_backward(Tensor grad_out, Tensor? out, {_QKV}, {_CODES}, Tensor divisors, "
    f"{_OPTIONS}, "
    "bool parameters_too, bool[4] output_mask) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


# Codes and margins of queries, then of keys.
SoftCodes: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]


def _new_soft_codes(x: Tensor, n_bits: int, n_hashes: int, n_probes: int) -> tuple[Tensor, Tensor]:
    codes = new_codes(x, n_bits, n_hashes)
    selected = (*codes.shape, selected_bits(n_probes))
    return codes, x.new_empty(selected, dtype=torch.int32)


def _new_results(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    n_bits: int,
    n_hashes: int,
    query_probes: int,
    key_probes: int,
    normalize: int,
    dtype: torch.dtype,
) -> tuple[Tensor, SoftCodes, Tensor]:
    of_query = _new_soft_codes(query, n_bits, n_hashes, query_probes)
    of_key = _new_soft_codes(key, n_bits, n_hashes, key_probes)
    divisors = (*query.shape[:2], query.shape[2] if normalize else 0)
    return (
        new_output(query, value, dtype),
        (*of_query, *of_key),
        query.new_empty(divisors, dtype=torch.float32),
    )


def _core_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    parameters: Tensor,
    sharpness: Tensor,
) -> Inputs:
    inputs = rows_of(core_dtype(query), query, key, value)
    sharpness = sharpness.to(torch.float32).contiguous()
    return *inputs, mask_rows(key_mask), parameters.contiguous(), sharpness


def _flat(soft_codes: SoftCodes) -> SoftCodes:
    """Hashes and what each has as one dimension, as the core takes them."""
    a, b, c, d = (x.contiguous().flatten(3) for x in soft_codes)
    return a, b, c, d


def _soft_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_starts: Tensor | None,
    key_starts: Tensor | None,
    parameters: Tensor,
    sharpness: Tensor,
    *options: Any,
) -> tuple[Tensor, ...]:
    check_sharpness(sharpness)
    family, n_bits, n_hashes, query_probes, key_probes, is_causal, normalize = options
    sizes = n_bits, n_hashes, query_probes, key_probes, normalize
    out, soft_codes, divisors = _new_results(query, key, value, *sizes, core_dtype(query))
    if out.numel() == 0 or key.numel() == 0:
        return in_dtype(out.zero_(), query.dtype), *(x.zero_() for x in (*soft_codes, divisors))
    _C.soft_attention_forward(
        *_core_inputs(query, key, value, key_mask, parameters, sharpness),
        *(family, n_bits, n_hashes, query_probes, key_probes, is_causal),
        normalize,
        out,
        *_flat(soft_codes),
        *(divisors, torch.get_num_threads()),
        query_starts=query_starts,
        key_starts=key_starts,
    )
    return in_dtype(out, query.dtype), *soft_codes, divisors


def _new_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor | None,
    parameters: Tensor,
    parameters_too: bool,
    output_mask: Sequence[bool],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sequences = query.shape[0] if query_starts is None else query_starts.shape[0] - 1
    heads = query.shape[1] if output_mask[3] else 0
    return (
        *new_gradients(dtype, query, key, value, output_mask),
        query.new_empty((sequences, heads), dtype=torch.float32),
        parameters.new_empty(parameters.shape if parameters_too else (0,)),
    )


def _soft_attention_backward(
    grad_out: Tensor,
    out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_starts: Tensor | None,
    key_starts: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    soft_codes: Any = rest[:4]
    divisors, parameters, sharpness, *options, parameters_too, output_mask = rest[4:]
    dtype = core_dtype(query)
    wanted = parameters_too, output_mask
    gradients = _new_gradients(query, key, value, query_starts, parameters, *wanted, dtype)
    if grad_out.numel() == 0 or key.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
    else:
        family, n_bits, n_hashes, query_probes, key_probes, is_causal, normalize = options
        check_codes("query_codes", soft_codes[0], 2**n_bits)
        check_codes("key_codes", soft_codes[2], 2**n_bits)
        _C.soft_attention_backward(
            *_core_inputs(query, key, value, key_mask, parameters, sharpness),
            *(family, n_bits, n_hashes, query_probes, key_probes, is_causal),
            normalize,
            rows(grad_out, dtype),
            *_flat(soft_codes),
            divisors.contiguous(),
            None if out is None else rows(out, dtype),
            *(*wanted_only(gradients[:4], output_mask), torch.get_num_threads()),
            query_starts=query_starts,
            key_starts=key_starts,
            grad_parameters=gradients[4] if parameters_too else None,
        )
    return *(in_dtype(g, query.dtype) for g in gradients[:3]), *gradients[3:]


library.register_kernel("soft_attention", _soft_attention)
library.register_kernel("soft_attention_backward", _soft_attention_backward)


@library.fake("soft_attention")
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_starts: Tensor | None,
    key_starts: Tensor | None,
    parameters: Tensor,
    sharpness: Tensor,
    *options: Any,
) -> tuple[Tensor, ...]:
    _, n_bits, n_hashes, query_probes, key_probes, _, normalize = options
    sizes = n_bits, n_hashes, query_probes, key_probes, normalize
    out, soft_codes, divisors = _new_results(query, key, value, *sizes, query.dtype)
    return out, *soft_codes, divisors


@library.fake("soft_attention_backward")
def _(
    grad_out: Tensor,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_starts: Tensor | None,
    key_starts: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    *_, parameters_too, output_mask = rest
    wanted = parameters_too, output_mask
    return _new_gradients(query, key, value, query_starts, rest[5], *wanted, query.dtype)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, parameters, sharpness, _, _, _, _, _, _, _ = inputs
    out, *soft_codes = output  # and divisors
    ctx.mark_non_differentiable(*soft_codes)
    ctx.set_materialize_grads(False)  # zeros for the codes would cost as much as the codes
    ctx.options = inputs[len(tensors) + 2 :]
    # The output costs no memory where what comes next keeps it too, as a projection does. Without
    # a normalisation the gradient does not need it.
    needed = out if ctx.options[-1] else None
    ctx.save_for_backward(needed, *tensors, *soft_codes, parameters, sharpness)


def _backward(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 15
    tensors = ctx.saved_tensors  # once: unpacking is what makes checkpointing compute again
    sharpness = tensors[-1]
    parameters_too = ctx.needs_input_grad[6] and ctx.options[0] == FAMILY["hyperplane"]
    output_mask = (*ctx.needs_input_grad[:3], ctx.needs_input_grad[7])
    *gradients, grad_parameters = soft_attention_backward(
        grad_out, *tensors, *ctx.options, parameters_too, output_mask
    )
    *gradients, grad_sharpness = wanted_only(gradients, output_mask)
    if grad_sharpness is not None:
        # One sharpness a head of keys, or one for all.
        key_heads = tensors[2].shape[1]
        groups = grad_sharpness.shape[1] // max(1, key_heads)
        grad_sharpness = grad_sharpness.sum(0).unflatten(0, (key_heads, groups)).sum(1)
        if sharpness.shape[0] == 1:
            grad_sharpness = grad_sharpness.sum(0, keepdim=True)
        grad_sharpness = grad_sharpness.to(sharpness.dtype)
    return (
        *(*gradients, None, None, None),
        grad_parameters if parameters_too else None,
        grad_sharpness,
        *(None,) * 7,
    )


soft_attention = library.differentiable("soft_attention", _setup, _backward)
soft_attention_backward = library.gradient_of("soft_attention")
library.register_autocast("soft_attention")
library.register_vmap("soft_attention", (0, 1, 2, 3), (4, 5))
library.register_vmap("soft_attention_backward", (0, 1, 2, 3, 4, 5, *range(8, 13)), (6, 7, 22))

"""Sampled and expected attention.

query_starts and key_starts, int64, say where packed sequences start (batch 1). gradient_hashes 0
takes the gradient from all hashes. output_mask says which of a backward operator's gradients are
wanted: the others are empty. divisors (batch, heads, n_queries) is what the rows of sums were
divided by, (batch, heads, 0) without a normalisation: with the output, the sums that the backward
pass would add up again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lshkit import _C
from lshkit.torch_ops import library
from lshkit.torch_ops.hashing import drawn
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

NORMALIZE: dict[str | None, int] = {None: 0, "sum": 1, "l2": 2}
# "exact" is the expectation's alone, "collided" and "unbiased" are of sampling alone.
GRADIENT: dict[str, int] = {"lower_bound": 0, "exact": 1, "collided": 2, "unbiased": 3}

_QKV = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor? query_starts, "
    "Tensor? key_starts"
)
_OPTIONS = "bool is_causal, int normalize, int gradient"
_SUBSET = "int gradient_hashes=0"
_MASK = "bool[3] output_mask=[True, True, True]"
_THREE = "(Tensor, Tensor, Tensor)"
library.define(
    f"yoso_attention({_QKV}, Tensor parameters, int family, int n_bits, int n_hashes, {_OPTIONS}, "
    f"{_SUBSET}) -> (Tensor, Tensor, Tensor, Tensor)",
    f"yoso_attention_backward(Tensor grad_out, {_QKV}, Tensor query_codes, Tensor key_codes, "
    f"int n_bits, {_OPTIONS}, {_SUBSET}, Tensor? out=None, Tensor? divisors=None, "
    f"{_MASK}) -> {_THREE}",
    f"expected_attention({_QKV}, int n_bits, {_OPTIONS}) -> (Tensor, Tensor)",
    f"expected_attention_backward(Tensor grad_out, {_QKV}, int n_bits, {_OPTIONS}, "
    f"Tensor? out=None, Tensor? divisors=None, {_MASK}) -> {_THREE}",
)


def expectation_keeps_output(query: Tensor) -> bool:
    """Whether its backward pass restores the sums from the output, as that of samples does.

    The numbers kept with it are float32: from them the gradients of float64 would have its error.
    """
    return query.dtype is not torch.float64


def _new_divisors(query: Tensor, normalize: int, *, kept: bool = True) -> Tensor:
    shape = (*query.shape[:2], query.shape[2] if normalize and kept else 0)
    return query.new_empty(shape, dtype=torch.float32)


def _yoso_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_starts: Tensor | None,
    key_starts: Tensor | None,
    parameters: Tensor,
    family: int,
    n_bits: int,
    n_hashes: int,
    is_causal: bool,
    normalize: int,
    gradient: int,
    gradient_hashes: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = core_dtype(query)
    out = new_output(query, value, dtype)
    query_codes, key_codes = new_codes(query, n_bits, n_hashes), new_codes(key, n_bits, n_hashes)
    divisors = _new_divisors(query, normalize)
    if out.numel() == 0 or key.numel() == 0:
        out = in_dtype(out.zero_(), query.dtype)
        return out, query_codes.zero_(), key_codes.zero_(), divisors.zero_()
    parameters = drawn(parameters, key.shape[1], key.shape[3], n_bits, n_hashes, family)
    q, k, v = rows_of(dtype, query, key, value)
    _C.yoso_forward(
        *(q, k, v, mask_rows(key_mask), parameters, family, n_bits, n_hashes),
        *(is_causal, normalize, out, query_codes, key_codes, torch.get_num_threads()),
        query_starts=query_starts,
        key_starts=key_starts,
        divisors=divisors,
    )
    return in_dtype(out, query.dtype), query_codes, key_codes, divisors


def _yoso_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_starts: Tensor | None,
    key_starts: Tensor | None,
    query_codes: Tensor,
    key_codes: Tensor,
    n_bits: int,
    is_causal: bool,
    normalize: int,
    gradient: int,
    gradient_hashes: int = 0,
    out: Tensor | None = None,
    divisors: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[Tensor, ...]:
    dtype = core_dtype(query)
    gradients = new_gradients(dtype, query, key, value, output_mask)
    if grad_out.numel() == 0 or key.numel() == 0:
        return tuple(in_dtype(g.zero_(), query.dtype) for g in gradients)
    check_codes("query_codes", query_codes, 2**n_bits)
    check_codes("key_codes", key_codes, 2**n_bits)
    q, k, v = rows_of(dtype, query, key, value)
    subset = (None, None)
    if 0 < gradient_hashes < query_codes.shape[-1]:
        subset = tuple(c[..., :gradient_hashes].contiguous() for c in (query_codes, key_codes))
    _C.yoso_backward(
        *(q, k, v, mask_rows(key_mask), query_codes.contiguous(), key_codes.contiguous()),
        *(n_bits, is_causal, normalize, gradient, rows(grad_out, dtype)),
        *(*wanted_only(gradients, output_mask), torch.get_num_threads()),
        bfloat16_products=dtype is torch.bfloat16,
        query_starts=query_starts,
        key_starts=key_starts,
        gradient_query_codes=subset[0],
        gradient_key_codes=subset[1],
        out=None if out is None else rows(out, dtype),
        divisors=None if divisors is None else divisors.contiguous(),
    )
    return tuple(in_dtype(g, query.dtype) for g in gradients)


def _new_expectation(query: Tensor, value: Tensor, normalize: int) -> tuple[Tensor, Tensor]:
    divisors = _new_divisors(query, normalize, kept=expectation_keeps_output(query))
    return new_output(query, value, query.dtype), divisors


def _expected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_starts: Tensor | None,
    key_starts: Tensor | None,
    n_bits: int,
    is_causal: bool,
    normalize: int,
    gradient: int,
) -> tuple[Tensor, Tensor]:
    out, divisors = _new_expectation(query, value, normalize)
    if out.numel() == 0 or key.numel() == 0:
        return out.zero_(), divisors.zero_()
    q, k, v = rows_of(query.dtype, query, key, value)
    _C.expected_forward(
        *(q, k, v, mask_rows(key_mask), n_bits, is_causal, normalize, out),
        torch.get_num_threads(),
        query_starts=query_starts,
        key_starts=key_starts,
        divisors=divisors if divisors.numel() else None,
    )
    return out, divisors


def _expected_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_starts: Tensor | None,
    key_starts: Tensor | None,
    n_bits: int,
    is_causal: bool,
    normalize: int,
    gradient: int,
    out: Tensor | None = None,
    divisors: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[Tensor, ...]:
    gradients = new_gradients(query.dtype, query, key, value, output_mask)
    if grad_out.numel() == 0 or key.numel() == 0:
        return tuple(g.zero_() for g in gradients)
    q, k, v = rows_of(query.dtype, query, key, value)
    _C.expected_backward(
        *(q, k, v, mask_rows(key_mask), n_bits, is_causal, normalize, gradient),
        rows(grad_out, query.dtype),
        *(*wanted_only(gradients, output_mask), torch.get_num_threads()),
        query_starts=query_starts,
        key_starts=key_starts,
        out=None if out is None else rows(out, query.dtype),
        divisors=None if divisors is None else divisors.contiguous(),
    )
    return gradients


for _name, _kernel in (
    ("yoso_attention", _yoso_attention),
    ("yoso_attention_backward", _yoso_attention_backward),
    ("expected_attention", _expected_attention),
    ("expected_attention_backward", _expected_attention_backward),
):
    library.register_kernel(_name, _kernel)


@library.fake("yoso_attention")
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_starts: Tensor | None,
    key_starts: Tensor | None,
    parameters: Tensor,
    *options: Any,
) -> Any:
    _, n_bits, n_hashes, _, normalize, *_ = options
    return (
        new_output(query, value, query.dtype),
        new_codes(query, n_bits, n_hashes),
        new_codes(key, n_bits, n_hashes),
        _new_divisors(query, normalize),
    )


@library.fake("expected_attention")
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Any:
    *_, normalize, _ = options
    return _new_expectation(query, value, normalize)


@library.fake("yoso_attention_backward", "expected_attention_backward")
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Any:
    # torch leaves out a last argument that is as by default.
    output_mask = options[-1] if isinstance(options[-1], Sequence) else (True,) * 3
    return new_gradients(query.dtype, query, key, value, output_mask)


def _setup_yoso(ctx: Any, inputs: Any, output: Any) -> None:
    tensors = inputs[:6]
    _, _, n_bits, _, is_causal, normalize, gradient, hashes = inputs[6:]
    out, *codes, divisors = output
    ctx.mark_non_differentiable(*codes, divisors)
    ctx.set_materialize_grads(False)  # zeros for the codes would cost as much as the codes
    # The output costs no memory where what comes next keeps it too, as a projection does.
    kept = (out, divisors) if normalize else (None, None)
    ctx.save_for_backward(*tensors, *codes, *kept)
    ctx.options = n_bits, is_causal, normalize, gradient, hashes


def _yoso_backward(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 14
    wanted = ctx.needs_input_grad[:3]
    *tensors, out, divisors = ctx.saved_tensors
    gradients = yoso_attention_backward(grad_out, *tensors, *ctx.options, out, divisors, wanted)
    return *wanted_only(gradients, wanted), *(None,) * 11


def _setup_expected(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, n_bits, is_causal, normalize, gradient = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    kept = output if normalize and expectation_keeps_output(inputs[0]) else (None, None)
    ctx.save_for_backward(*tensors, *kept)
    ctx.options = (n_bits, is_causal, normalize, gradient)


def _expected_backward(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 10
    wanted = ctx.needs_input_grad[:3]
    *tensors, out, divisors = ctx.saved_tensors
    gradients = expected_attention_backward(grad_out, *tensors, *ctx.options, out, divisors, wanted)
    return *wanted_only(gradients, wanted), *(None,) * 7


yoso_attention = library.differentiable("yoso_attention", _setup_yoso, _yoso_backward)
yoso_attention_backward = library.gradient_of("yoso_attention")
expected_attention = library.differentiable(
    "expected_attention", _setup_expected, _expected_backward
)
expected_attention_backward = library.gradient_of("expected_attention")
for _name in ("yoso_attention", "expected_attention"):
    library.register_autocast(_name)
for _name, _with_batch, _starts_at in (
    ("yoso_attention", (0, 1, 2, 3), 4),
    ("yoso_attention_backward", (0, 1, 2, 3, 4, 7, 8, 14, 15), 5),
    ("expected_attention", (0, 1, 2, 3), 4),
    ("expected_attention_backward", (0, 1, 2, 3, 4, 11, 12), 5),
):
    library.register_vmap(_name, _with_batch, (_starts_at, _starts_at + 1))

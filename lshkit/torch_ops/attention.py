"""Sampled and expected attention."""

from collections.abc import Callable

import torch
from torch import Tensor

from lshkit import _C
from lshkit.torch_ops.library import (
    LIBRARY,
    check_codes,
    define,
    differentiable,
    fake,
    mask_rows,
    new_codes,
    new_gradient,
    new_output,
    no_second_derivative,
    nothing_to_save,
    register_autocast,
    register_vmap,
    rows,
)

NORMALIZE = {None: 0, "sum": 1, "l2": 2}
GRADIENT = {"lower_bound": 0, "expected": 1, "collided": 2, "unbiased": 3}

_OPTIONS = "bool is_causal, int normalize, int gradient"
_QKV = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor? query_starts, "
    "Tensor? key_starts"
)
define(
    f"yoso_attention({_QKV}, Tensor parameters, int family, int n_bits, int n_hashes, {_OPTIONS}, "
    "int window=0) -> (Tensor, Tensor, Tensor)",
    f"yoso_attention_backward(Tensor grad_out, {_QKV}, Tensor query_codes, Tensor key_codes, "
    f"int n_bits, {_OPTIONS}, int window=0) -> (Tensor, Tensor, Tensor)",
    f"expected_attention({_QKV}, int n_bits, {_OPTIONS}) -> Tensor",
    f"expected_attention_backward(Tensor grad_out, {_QKV}, int n_bits, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)",
)


def _sampled_dtype(x: Tensor) -> torch.dtype:
    """What the core reads and writes: 16-bit floats as they are."""
    return torch.float32 if x.dtype is torch.float64 else x.dtype


def _expected_dtype(x: Tensor) -> torch.dtype:
    return x.dtype


def _starts(query_starts: Tensor | None, key_starts: Tensor | None) -> dict:
    return {"query_starts": query_starts, "key_starts": key_starts}


def _yoso_attention(
    query,
    key,
    value,
    key_mask,
    query_starts,
    key_starts,
    parameters,
    family,
    n_bits,
    n_hashes,
    is_causal,
    normalize,
    gradient,
    window=0,
):
    dtype = _sampled_dtype(query)
    out = new_output(query, value, dtype)
    codes = new_codes(query, n_bits, n_hashes), new_codes(key, n_bits, n_hashes)
    if out.numel() == 0 or key.numel() == 0:
        return out.zero_().to(query.dtype), *(c.zero_() for c in codes)
    _C.yoso_forward(
        *(rows(x, dtype) for x in (query, key, value)),
        mask_rows(key_mask),
        *(parameters.contiguous(), family, n_bits, n_hashes, is_causal, normalize),
        *(out, *codes, torch.get_num_threads()),
        **_starts(query_starts, key_starts),
        window=window,
    )
    return out.to(query.dtype), *codes


def _expected_attention(
    query, key, value, key_mask, query_starts, key_starts, n_bits, is_causal, normalize, gradient
):
    dtype = _expected_dtype(query)
    out = new_output(query, value, dtype)
    if out.numel() == 0 or key.numel() == 0:
        return out.zero_()
    _C.expected_forward(
        *(rows(x, dtype) for x in (query, key, value)),
        mask_rows(key_mask),
        *(n_bits, is_causal, normalize, out, torch.get_num_threads()),
        **_starts(query_starts, key_starts),
    )
    return out


def _backward_kernel(core: Callable, core_dtype: Callable) -> Callable:
    """The backward operators differ in the codes alone, which stand between starts and n_bits."""

    def kernel(grad_out, query, key, value, key_mask, query_starts, key_starts, *codes_and_options):
        dtype = core_dtype(query)
        inputs = (query, key, value)
        gradients = [new_gradient(x, dtype) for x in inputs]
        if grad_out.numel() == 0 or key.numel() == 0:
            return tuple(g.zero_().to(x.dtype) for g, x in zip(gradients, inputs, strict=True))
        n_codes = sum(isinstance(x, Tensor) for x in codes_and_options)
        codes, options = codes_and_options[:n_codes], codes_and_options[n_codes:]
        n_bits, is_causal, normalize, gradient, *more = options
        for name, c in zip(("query_codes", "key_codes"), codes, strict=False):
            check_codes(name, c, 2**n_bits)
        core(
            *(rows(x, dtype) for x in inputs),
            mask_rows(key_mask),
            *(c.contiguous() for c in codes),
            *(n_bits, is_causal, normalize, gradient),
            rows(grad_out, dtype),
            *gradients,
            torch.get_num_threads(),
            **_starts(query_starts, key_starts),
            **dict(zip(("window",), more, strict=False)),
        )
        return tuple(g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True))

    return kernel


for _name, _kernel in (
    ("yoso_attention", _yoso_attention),
    ("yoso_attention_backward", _backward_kernel(_C.yoso_backward, _sampled_dtype)),
    ("expected_attention", _expected_attention),
    ("expected_attention_backward", _backward_kernel(_C.expected_backward, _expected_dtype)),
):
    LIBRARY.impl(_name, _kernel, "CPU")


@fake("yoso_attention")
def _(query, key, value, key_mask, query_starts, key_starts, parameters, *options):
    _, n_bits, n_hashes, *_ = options
    return (
        new_output(query, value, query.dtype),
        new_codes(query, n_bits, n_hashes),
        new_codes(key, n_bits, n_hashes),
    )


@fake("expected_attention")
def _(query, key, value, *options):
    return new_output(query, value, query.dtype)


@fake("yoso_attention_backward", "expected_attention_backward")
def _(grad_out, query, key, value, *options):
    return tuple(new_gradient(x, x.dtype) for x in (query, key, value))


def _setup_yoso_attention(ctx, inputs, output):
    query, key, value, key_mask, query_starts, key_starts, _, _, n_bits, _, *options = inputs
    _, query_codes, key_codes = output
    ctx.mark_non_differentiable(query_codes, key_codes)
    ctx.set_materialize_grads(False)  # zeros for the codes would cost as much as the codes
    ctx.save_for_backward(
        query, key, value, key_mask, query_starts, key_starts, query_codes, key_codes
    )
    ctx.options = (n_bits, *options)


def _yoso_attention_backward(ctx, grad_out, *_):
    if grad_out is None:
        return (None,) * 14
    gradients = yoso_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return *gradients, *(None,) * 11


def _setup_expected_attention(ctx, inputs, output):
    *tensors, n_bits, is_causal, normalize, gradient = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = (n_bits, is_causal, normalize, gradient)


def _expected_attention_backward(ctx, grad_out):
    gradients = expected_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return *gradients, *(None,) * 7


yoso_attention = differentiable("yoso_attention", _setup_yoso_attention, _yoso_attention_backward)
yoso_attention_backward = differentiable(
    "yoso_attention_backward", nothing_to_save, no_second_derivative
)
expected_attention = differentiable(
    "expected_attention", _setup_expected_attention, _expected_attention_backward
)
expected_attention_backward = differentiable(
    "expected_attention_backward", nothing_to_save, no_second_derivative
)
for _name in ("yoso_attention", "expected_attention"):
    register_autocast(_name)
for _name, _with_batch, _starts_at in (
    ("yoso_attention", (0, 1, 2, 3), 4),
    ("yoso_attention_backward", (0, 1, 2, 3, 4, 7, 8), 5),
    ("expected_attention", (0, 1, 2, 3), 4),
    ("expected_attention_backward", (0, 1, 2, 3, 4), 5),
):
    register_vmap(_name, _with_batch, (_starts_at, _starts_at + 1))

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
    float_dtype,
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
GRADIENT = {"lower_bound": 0, "expected": 1}

_OPTIONS = "bool is_causal, int normalize, int gradient"
_SKETCH = "int gradient_rank=0, Tensor? rotation=None"
_QKV = "Tensor query, Tensor key, Tensor value, Tensor? key_mask"
define(
    f"yoso_attention({_QKV}, Tensor parameters, int family, int n_bits, int n_hashes, {_OPTIONS}, "
    f"{_SKETCH}) "
    "-> (Tensor, Tensor, Tensor)",
    f"yoso_attention_backward(Tensor grad_out, {_QKV}, Tensor query_codes, Tensor key_codes, "
    f"int n_bits, {_OPTIONS}, {_SKETCH}) -> (Tensor, Tensor, Tensor)",
    f"expected_attention({_QKV}, int n_bits, {_OPTIONS}) -> Tensor",
    f"expected_attention_backward(Tensor grad_out, {_QKV}, int n_bits, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)",
)


def _sampled_dtype(x: Tensor) -> torch.dtype:
    return torch.float32


def _yoso_attention(query, key, value, key_mask, parameters, family, n_bits, n_hashes, *options):
    is_causal, normalize, *_ = options  # the others are the backward's
    forward_options = family, n_bits, n_hashes, is_causal, normalize
    out = new_output(query, value, torch.float32)
    codes = new_codes(query, n_bits, n_hashes), new_codes(key, n_bits, n_hashes)
    if out.numel() == 0 or key.numel() == 0:
        return out.zero_().to(query.dtype), *(c.zero_() for c in codes)
    inputs = (rows(x, torch.float32) for x in (query, key, value))
    parameters = parameters.contiguous()
    threads = torch.get_num_threads()
    _C.yoso_forward(
        *inputs, mask_rows(key_mask), parameters, *forward_options, out, *codes, threads
    )
    return out.to(query.dtype), *codes


def _expected_attention(query, key, value, key_mask, n_bits, is_causal, normalize, gradient):
    dtype = float_dtype(query)
    out = new_output(query, value, dtype)
    if out.numel() == 0 or key.numel() == 0:
        return out.zero_().to(query.dtype)
    inputs = (rows(x, dtype) for x in (query, key, value))
    options = n_bits, is_causal, normalize
    _C.expected_forward(*inputs, mask_rows(key_mask), *options, out, torch.get_num_threads())
    return out.to(query.dtype)


def _backward_kernel(core: Callable, compute_dtype: Callable) -> Callable:
    """The backward operators differ in the codes, which stand between mask and n_bits, and in
    the sketch at the end. Codes are the first tensors among the options."""

    def kernel(grad_out, query, key, value, key_mask, *codes_and_options):
        dtype = compute_dtype(query)
        inputs = (query, key, value)
        gradients = [new_gradient(x, dtype) for x in inputs]
        if grad_out.numel() == 0 or key.numel() == 0:
            return tuple(g.zero_().to(x.dtype) for g, x in zip(gradients, inputs, strict=True))
        n_codes = sum(isinstance(x, Tensor) for x in codes_and_options[:2])
        codes = codes_and_options[:n_codes]
        n_bits, is_causal, normalize, gradient, *sketch = codes_and_options[n_codes:]
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
            **dict(zip(("gradient_rank", "rotation"), sketch, strict=False)),
            **({"bfloat16_products": True} if codes and query.dtype is torch.bfloat16 else {}),
        )
        return tuple(g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True))

    return kernel


for _name, _kernel in (
    ("yoso_attention", _yoso_attention),
    ("yoso_attention_backward", _backward_kernel(_C.yoso_backward, _sampled_dtype)),
    ("expected_attention", _expected_attention),
    ("expected_attention_backward", _backward_kernel(_C.expected_backward, float_dtype)),
):
    LIBRARY.impl(_name, _kernel, "CPU")


@fake("yoso_attention")
def _(query, key, value, key_mask, parameters, family, n_bits, n_hashes, *options):
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
    query, key, value, key_mask, _, _, n_bits, _, *options = inputs
    _, query_codes, key_codes = output
    ctx.mark_non_differentiable(query_codes, key_codes)
    ctx.set_materialize_grads(False)  # zeros for the codes would cost as much as the codes
    ctx.save_for_backward(query, key, value, key_mask, query_codes, key_codes)
    ctx.options = (n_bits, *options)
    ctx.n_inputs = len(inputs)


def _yoso_attention_backward(ctx, grad_out, *_):
    if grad_out is None:
        return (None,) * ctx.n_inputs
    gradients = yoso_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return *gradients, *(None,) * (ctx.n_inputs - 3)


def _setup_expected_attention(ctx, inputs, output):
    *tensors, n_bits, is_causal, normalize, gradient = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = (n_bits, is_causal, normalize, gradient)


def _expected_attention_backward(ctx, grad_out):
    gradients = expected_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return *gradients, *(None,) * 5


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
for _name, _with_batch in (
    ("yoso_attention", (0, 1, 2, 3)),
    ("yoso_attention_backward", (0, 1, 2, 3, 4, 5, 6)),
    ("expected_attention", (0, 1, 2, 3)),
    ("expected_attention_backward", (0, 1, 2, 3, 4)),
):
    register_vmap(_name, _with_batch)

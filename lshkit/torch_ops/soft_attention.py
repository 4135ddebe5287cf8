"""Attention with soft codes."""

import torch

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
from lshkit.torch_ops.soft import check_sharpness, selected_bits

_QKV = "Tensor query, Tensor key, Tensor value, Tensor? key_mask"
_OPTIONS = (
    "Tensor parameters, Tensor sharpness, int family, int n_bits, int n_hashes, "
    "int query_probes, int key_probes, bool is_causal, int normalize"
)
# Of queries, then of keys: own codes (batch, heads, rows, n_hashes), selected bits and their
# margins (..., n_selected).
_CODES = ", ".join(
    f"Tensor {side}_{part}" for side in "qk" for part in ("codes", "bits", "margins")
)
define(
    f"soft_attention({_QKV}, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    # The gradient of sharpness is for every (batch, head).
    f"soft_attention_backward(Tensor grad_out, {_QKV}, {_CODES}, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)


def _new_soft_codes(x, n_bits, n_hashes, n_probes):
    codes = new_codes(x, n_bits, n_hashes)
    selected = (*codes.shape, selected_bits(n_probes))
    return (
        codes,
        x.new_empty(selected, dtype=torch.uint8),
        x.new_empty(selected, dtype=torch.float32),
    )


def _new_results(query, key, value, n_bits, n_hashes, probes, dtype):
    return (
        new_output(query, value, dtype),
        *_new_soft_codes(query, n_bits, n_hashes, probes[0]),
        *_new_soft_codes(key, n_bits, n_hashes, probes[1]),
    )


def _core_inputs(query, key, value, key_mask, parameters, sharpness):
    inputs = (rows(x, torch.float32) for x in (query, key, value))
    sharpness = sharpness.to(torch.float32).contiguous()
    return *inputs, mask_rows(key_mask), parameters.contiguous(), sharpness


def _flat(soft_codes):
    """Hashes and what each has as one dimension, as the core takes them."""
    return (x.contiguous().flatten(3) for x in soft_codes)


def _soft_attention(query, key, value, key_mask, parameters, sharpness, *options):
    check_sharpness(sharpness)
    _, n_bits, n_hashes, *probes, _, _ = options
    results = _new_results(query, key, value, n_bits, n_hashes, probes, torch.float32)
    out, *soft_codes = results
    if out.numel() == 0 or key.numel() == 0:
        return out.zero_().to(query.dtype), *(x.zero_() for x in soft_codes)
    inputs = _core_inputs(query, key, value, key_mask, parameters, sharpness)
    threads = torch.get_num_threads()
    _C.soft_attention_forward(*inputs, *options, out, *_flat(soft_codes), threads)
    return out.to(query.dtype), *soft_codes


def _new_gradients(query, key, value, dtype):
    gradients = (new_gradient(x, dtype or x.dtype) for x in (query, key, value))
    return *gradients, query.new_empty(query.shape[:2], dtype=torch.float32)


def _soft_attention_backward(grad_out, query, key, value, key_mask, *rest):
    soft_codes, (parameters, sharpness, *options) = rest[:6], rest[6:]
    gradients = _new_gradients(query, key, value, torch.float32)
    if grad_out.numel() == 0 or key.numel() == 0:
        gradients = tuple(g.zero_() for g in gradients)
    else:
        n_bits = options[1]
        for name, codes, largest in zip(
            ("query_codes", "query_bits", "key_codes", "key_bits"),
            (*soft_codes[:2], *soft_codes[3:5]),
            (2**n_bits, n_bits) * 2,
            strict=True,
        ):
            if codes.numel():
                check_codes(name, codes, largest)
        inputs = _core_inputs(query, key, value, key_mask, parameters, sharpness)
        grad_out, threads = rows(grad_out, torch.float32), torch.get_num_threads()
        codes = _flat(soft_codes)
        _C.soft_attention_backward(*inputs, *options, grad_out, *codes, *gradients, threads)
    grads = (g.to(x.dtype) for g, x in zip(gradients, (query, key, value), strict=False))
    return *grads, gradients[3]


LIBRARY.impl("soft_attention", _soft_attention, "CPU")
LIBRARY.impl("soft_attention_backward", _soft_attention_backward, "CPU")


@fake("soft_attention")
def _(query, key, value, key_mask, parameters, sharpness, *options):
    _, n_bits, n_hashes, *probes, _, _ = options
    return _new_results(query, key, value, n_bits, n_hashes, probes, query.dtype)


@fake("soft_attention_backward")
def _(grad_out, query, key, value, *rest):
    return _new_gradients(query, key, value, None)


def _setup(ctx, inputs, output):
    query, key, value, key_mask, parameters, sharpness, *options = inputs
    _, *soft_codes = output
    ctx.mark_non_differentiable(*soft_codes)
    ctx.set_materialize_grads(False)  # zeros for the codes would cost as much as the codes
    ctx.save_for_backward(query, key, value, key_mask, *soft_codes, parameters, sharpness)
    ctx.options = options


def _backward(ctx, grad_out, *_):
    if grad_out is None:
        return (None,) * 13
    sharpness = ctx.saved_tensors[-1]
    *gradients, grad_sharpness = soft_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    grad_sharpness = grad_sharpness.sum(0)
    if sharpness.shape[0] == 1:
        grad_sharpness = grad_sharpness.sum(0, keepdim=True)
    return *gradients, None, None, grad_sharpness.to(sharpness.dtype), *(None,) * 7


soft_attention = differentiable("soft_attention", _setup, _backward)
soft_attention_backward = differentiable(
    "soft_attention_backward", nothing_to_save, no_second_derivative
)
register_autocast("soft_attention")
register_vmap("soft_attention", (0, 1, 2, 3))
register_vmap("soft_attention_backward", tuple(range(11)))

"""Softmax attention estimated from the pairs whose codes collide.

Inclusion probabilities are constants of the sample: no gradient goes through them or the codes.
Pairs are found anew from the codes in the backward pass; what is saved is linear in the lengths.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lshkit import _C
from lshkit.torch_ops import library
from lshkit.torch_ops.hashing import hash
from lshkit.torch_ops.tensors import (
    check_codes,
    in_dtype,
    mask_rows,
    new_codes,
    new_gradients,
    new_output,
    rows,
    rows_of,
    wanted_only,
)

WEIGHTING: dict[str, int] = {"horvitz_thompson": 0, "none": 1, "magicpig": 2}

_QKV = "Tensor query, Tensor key, Tensor value, Tensor? key_mask"
_OPTIONS = (
    "float scale, int weighting, bool is_causal, SymInt causal_offset, int window, int n_sinks"
)
library.define(
    f"lsh_attention({_QKV}, Tensor parameters, int family, int n_bits, int n_hashes, bool center, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    f"lsh_attention_backward(Tensor grad_out, {_QKV}, Tensor out, Tensor log_sum, Tensor centre, "
    f"Tensor query_codes, Tensor key_codes, int n_bits, {_OPTIONS}, "
    "bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
)


def key_centre(key: Tensor, key_mask: Tensor | None, is_causal: bool, window: int) -> Tensor:
    """What is taken from every key, `(batch, key_heads, 1, d)`: see reference.key_centre."""
    takes_part = None if key_mask is None else key_mask[:, None]
    centre = _mean_key(key, takes_part, is_causal, window)
    known = centre.isfinite().all()
    if not key.is_cuda and known:  # on CUDA to look would be to wait
        return centre
    finite = key.isfinite().all(-1)
    finite = finite if takes_part is None else finite & takes_part
    of_finite = _mean_key(key, finite, is_causal, window)
    return torch.where(known, centre, of_finite) if key.is_cuda else of_finite


def _mean_key(key: Tensor, takes_part: Tensor | None, is_causal: bool, window: int) -> Tensor:
    """takes_part: `(batch, 1 or key_heads, n_k)` or None."""
    if takes_part is None:
        key = key[:, :, : window if is_causal else None]
        return (key / max(key.shape[2], 1)).sum(2, keepdim=True)  # sums of keys may overflow
    if is_causal:
        first = takes_part.byte().argmax(-1, keepdim=True)
        takes_part = takes_part & (torch.arange(key.shape[2], device=key.device) < first + window)
    count = takes_part.sum(-1).clamp_min(1)[..., None, None]
    return torch.where(takes_part[..., None], key / count, 0.0).sum(2, keepdim=True)


def _hash_grouped(query: Tensor, key_heads: int, parameters: Tensor, *options: Any) -> Tensor:
    """Codes of queries, which share the hash functions of the head of keys that they read."""
    batch, heads, n, d = query.shape
    grouped = query.reshape(batch, key_heads, heads // max(key_heads, 1) * n, d)
    codes = hash(grouped, parameters, *options)
    return codes.reshape(batch, heads, n, codes.shape[-1])


def _lsh_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    parameters: Tensor,
    family: int,
    n_bits: int,
    n_hashes: int,
    center: bool,
    *options: Any,
) -> tuple[Tensor, ...]:
    scale, weighting, is_causal, offset, window, n_sinks = options
    q, k, v = rows_of(torch.float32, query, key, value)
    if center and key.shape[2]:
        centre = key_centre(k, key_mask, is_causal, window)
        k = k - centre
    else:
        centre = k.new_zeros((*key.shape[:2], 1, key.shape[3]))
    out = new_output(query, value, torch.float32)
    log_sum = out.new_empty(out.shape[:-1], dtype=torch.float64)
    pairs = out.new_empty(out.shape[:-1], dtype=torch.int32)
    hashing = parameters, family, n_bits, n_hashes
    query_codes, key_codes = _hash_grouped(q, key.shape[1], *hashing), hash(k, *hashing)
    if out.numel() == 0 or key.numel() == 0:
        out.zero_(), log_sum.fill_(-math.inf), pairs.zero_()
    else:
        _C.lsh_attention_forward(
            *(q, k, v, mask_rows(key_mask), query_codes, key_codes, n_bits, scale, weighting),
            *(is_causal, offset, window, n_sinks, out, log_sum, pairs, torch.get_num_threads()),
        )
    return in_dtype(out, query.dtype), log_sum, query_codes, key_codes, centre, pairs


def _lsh_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    out: Tensor,
    log_sum: Tensor,
    centre: Tensor,
    query_codes: Tensor,
    key_codes: Tensor,
    n_bits: int,
    *rest: Any,
) -> tuple[Tensor, ...]:
    *options, output_mask = rest
    q, k, v = rows_of(torch.float32, query, key, value)
    gradients = new_gradients(torch.float32, query, key, value, output_mask)
    if grad_out.numel() == 0 or key.numel() == 0:
        return tuple(in_dtype(g.zero_(), query.dtype) for g in gradients)
    scale, weighting, is_causal, offset, window, n_sinks = options
    check_codes("query_codes", query_codes, 2**n_bits)
    check_codes("key_codes", key_codes, 2**n_bits)
    _C.lsh_attention_backward(
        *(q, k - centre, v, mask_rows(key_mask), query_codes.contiguous(), key_codes.contiguous()),
        *(n_bits, scale, weighting, is_causal, offset, window),
        *(n_sinks, rows(grad_out, torch.float32), rows(out, torch.float32), log_sum.contiguous()),
        *(*wanted_only(gradients, output_mask), torch.get_num_threads()),
    )
    return tuple(in_dtype(g, query.dtype) for g in gradients)


library.LIBRARY.impl("lsh_attention", _lsh_attention, "CPU")
library.LIBRARY.impl("lsh_attention_backward", _lsh_attention_backward, "CPU")


@library.fake("lsh_attention")
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    parameters: Tensor,
    family: int,
    n_bits: int,
    n_hashes: int,
    *options: Any,
) -> tuple[Tensor, ...]:
    return (
        new_output(query, value, query.dtype),
        query.new_empty(query.shape[:-1], dtype=torch.float64),
        new_codes(query, n_bits, n_hashes),
        new_codes(key, n_bits, n_hashes),
        key.new_empty((*key.shape[:2], 1, key.shape[3]), dtype=torch.float32),
        query.new_empty(query.shape[:-1], dtype=torch.int32),
    )


@library.fake("lsh_attention_backward")
def _(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    return new_gradients(query.dtype, query, key, value, options[-1])


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, _, _, n_bits, _, _, scale, weighting, is_causal, offset, window, n_sinks = inputs
    out, log_sum, query_codes, key_codes, centre, pairs = output
    ctx.mark_non_differentiable(log_sum, query_codes, key_codes, centre, pairs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors[:4], out, log_sum, centre, query_codes, key_codes)
    ctx.options = n_bits, scale, weighting, is_causal, offset, window, n_sinks


def _backward(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 15
    wanted = ctx.needs_input_grad[:3]
    gradients = lsh_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options, wanted)
    return *wanted_only(gradients, wanted), *(None,) * 12


lsh_attention = library.differentiable("lsh_attention", _setup, _backward)
lsh_attention_backward = library.gradient_of("lsh_attention")
library.register_autocast("lsh_attention")
library.register_vmap("lsh_attention", (0, 1, 2, 3))
library.register_vmap("lsh_attention_backward", (0, 1, 2, 3, 4, 5, 6, 7, 8, 9))

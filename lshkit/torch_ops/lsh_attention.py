"""Softmax attention estimated from the pairs whose codes collide.

Inclusion probabilities are constants of the sample: no gradient goes through them or the codes.
Pairs are found anew from the codes in the backward pass; what is saved is linear in the lengths.
"""

import math

import torch

from lshkit.torch_ops.hashing import hash
from lshkit.torch_ops.library import (
    LIBRARY,
    define,
    differentiable,
    fake,
    new_codes,
    new_gradient,
    new_output,
    no_second_derivative,
    nothing_to_save,
    register_autocast,
    register_vmap,
)

WEIGHTING = {"horvitz_thompson": 0, "none": 1, "magicpig": 2}

_QKV = "Tensor query, Tensor key, Tensor value, Tensor? key_mask"
_OPTIONS = (
    "float scale, int weighting, bool is_causal, SymInt causal_offset, int window, int n_sinks"
)
define(
    f"lsh_attention({_QKV}, Tensor parameters, int family, int n_bits, int n_hashes, bool center, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    f"lsh_attention_backward(Tensor grad_out, {_QKV}, Tensor out, Tensor log_sum, Tensor centre, "
    f"Tensor query_codes, Tensor key_codes, int n_bits, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)


def _centre(key, key_mask, center, is_causal, window):
    """What is taken from every key, `(batch, key_heads, 1, d)`: see reference.key_centre."""
    if not center or key.shape[2] == 0:
        return key.new_zeros((*key.shape[:2], 1, key.shape[3]))
    takes_part = key.isfinite().all(-1)
    if key_mask is not None:
        takes_part = takes_part & key_mask.bool()[:, None]
    if is_causal:
        first = takes_part.byte().argmax(-1, keepdim=True)
        takes_part = takes_part & (torch.arange(key.shape[2]) < first + window)
    total = torch.where(takes_part[..., None], key, 0.0).sum(2, keepdim=True)
    return total / takes_part.sum(-1).clamp_min(1)[..., None, None]


def _hash_grouped(query, key_heads, parameters, *options):
    """Codes of queries, which share the hash functions of the head of keys that they read."""
    batch, heads, n, d = query.shape
    grouped = query.reshape(batch, key_heads, heads // key_heads * n, d)
    return hash(grouped, parameters, *options).reshape(batch, heads, n, -1)


def _logits(query, key, query_codes, key_codes, key_mask, first, n_bits, options):
    """Log weights of pairs of a run of queries, -inf where there is none; (..., rows, n_k)."""
    scale, weighting, is_causal, causal_offset, window, n_sinks = options
    n_hashes, n_keys = query_codes.shape[-1], key.shape[2]
    position = first + causal_offset + torch.arange(query.shape[2])[:, None]
    column = torch.arange(n_keys)
    valid = key.isfinite().all(-1)[:, :, None]
    masked = torch.ones(1, n_keys, dtype=torch.bool) if key_mask is None else key_mask.bool()
    exact = (position - column).abs() < window
    exact = exact | (masked & (masked.cumsum(-1) <= n_sinks))[:, None, None]
    valid = valid & masked[:, None, None]
    key = torch.where(valid[:, :, 0, :, None], key, 0.0).nan_to_num()
    if is_causal:
        valid = valid & (column <= position)
    counts = sum(
        (query_codes[..., h][..., :, None] == key_codes[..., h][..., None, :]).short()
        for h in range(n_hashes)
    )
    dots = query @ key.transpose(-1, -2)
    lengths = query.norm(dim=-1)[..., :, None] * key.norm(dim=-1)[..., None, :]
    cosine = (dots / lengths.clamp_min(1e-30)).clamp(-1, 1).double()
    p = (1 - torch.acos(cosine) / math.pi) ** n_bits
    miss = (n_hashes * torch.log1p(-p.clamp_max(1 - 1e-16))).exp()
    included = 1 - miss
    if WEIGHTING["magicpig"] == weighting:
        included = included - n_hashes * p * miss / (1 - p).clamp_min(1e-16)
    if WEIGHTING["none"] == weighting:
        included = torch.ones_like(p)
    included = torch.where(exact, 1.0, included).clamp_min(1e-30).log().float()
    hit = counts >= (2 if WEIGHTING["magicpig"] == weighting else 1)
    return torch.where(valid & (hit | exact), scale * dots - included, -math.inf)


_RUN = 64


def _repeat(x, heads):
    return x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] != heads else x


def _runs(query, key, value, query_codes, key_codes, key_mask, n_bits, options):
    heads = query.shape[1]
    key, key_codes = _repeat(key, heads), _repeat(key_codes.short(), heads)
    for first in range(0, query.shape[2], _RUN):
        run = slice(first, first + _RUN)
        yield (
            run,
            _logits(
                query[:, :, run], key, query_codes[:, :, run].short(), key_codes, key_mask, first,
                n_bits, options,
            ),
        )  # fmt: skip


def _lsh_attention(
    query, key, value, key_mask, parameters, family, n_bits, n_hashes, center, *options
):
    dtype = query.dtype
    query, key, value = query.float(), key.float(), value.float()
    _, _, is_causal, _, window, _ = options
    centre = _centre(key, key_mask, center, is_causal, window)
    key = key - centre
    hashing = family, n_bits, n_hashes
    query_codes = _hash_grouped(query, key.shape[1], parameters, *hashing)
    key_codes = hash(key, parameters, *hashing)
    out = new_output(query, value, torch.float32)
    log_sum = query.new_empty(query.shape[:-1])
    pairs = query.new_empty(query.shape[:-1], dtype=torch.int32)
    values = _repeat(value, query.shape[1])
    args = query, key, value, query_codes, key_codes, key_mask, n_bits, options
    for run, logits in _runs(*args):
        log_sum[:, :, run] = logits.logsumexp(-1) if logits.shape[-1] else -math.inf
        pairs[:, :, run] = (logits > -math.inf).sum(-1)
        weights = (logits - log_sum[:, :, run, None].clamp_min(-1e30)).exp()
        out[:, :, run] = weights @ torch.where((weights > 0).any(-2)[..., None], values, 0.0)
    return out.to(dtype), log_sum, query_codes, key_codes, centre, pairs


def _lsh_attention_backward(
    grad_out, query, key, value, key_mask, out, log_sum, centre, query_codes, key_codes, n_bits,
    *options,
):  # fmt: skip
    dtype = query.dtype
    query, key, value, grad_out = (
        query.float(),
        key.float() - centre,
        value.float(),
        grad_out.float(),
    )
    heads, key_heads = query.shape[1], key.shape[1]
    grads = [torch.zeros_like(query), torch.zeros_like(_repeat(key, heads))]
    grads.append(torch.zeros_like(_repeat(value, heads)))
    along = (grad_out * out.float()).sum(-1, keepdim=True)
    args = query, key, value, query_codes, key_codes, key_mask, n_bits, options
    for run, logits in _runs(*args):
        g = grad_out[:, :, run]
        weights = (logits - log_sum[:, :, run, None].clamp_min(-1e30)).exp()
        grads[2] += weights.transpose(-1, -2) @ g
        slope = weights * (g @ _repeat(value, heads).transpose(-1, -2) - along[:, :, run])
        slope = options[0] * torch.where(weights > 0, slope, 0.0)
        grads[0][:, :, run] = slope @ _repeat(key, heads)
        grads[1] += slope.transpose(-1, -2) @ query[:, :, run]
    if heads != key_heads:
        grads[1:] = (g.unflatten(1, (key_heads, -1)).sum(2) for g in grads[1:])
    return tuple(g.to(dtype) for g in grads)


LIBRARY.impl("lsh_attention", _lsh_attention, "CPU")
LIBRARY.impl("lsh_attention_backward", _lsh_attention_backward, "CPU")


@fake("lsh_attention")
def _(query, key, value, key_mask, parameters, family, n_bits, n_hashes, *options):
    return (
        new_output(query, value, query.dtype),
        query.new_empty(query.shape[:-1], dtype=torch.float32),
        new_codes(query, n_bits, n_hashes),
        new_codes(key, n_bits, n_hashes),
        key.new_empty((*key.shape[:2], 1, key.shape[3]), dtype=torch.float32),
        query.new_empty(query.shape[:-1], dtype=torch.int32),
    )


@fake("lsh_attention_backward")
def _(grad_out, query, key, value, *options):
    return tuple(new_gradient(x, x.dtype) for x in (query, key, value))


def _setup(ctx, inputs, output):
    *tensors, _, _, n_bits, _, _, scale, weighting, is_causal, offset, window, n_sinks = inputs
    out, log_sum, query_codes, key_codes, centre, pairs = output
    ctx.mark_non_differentiable(log_sum, query_codes, key_codes, centre, pairs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors[:4], out, log_sum, centre, query_codes, key_codes)
    ctx.options = n_bits, scale, weighting, is_causal, offset, window, n_sinks


def _backward(ctx, grad_out, *_):
    if grad_out is None:
        return (None,) * 15
    gradients = lsh_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return *gradients, *(None,) * 12


lsh_attention = differentiable("lsh_attention", _setup, _backward)
lsh_attention_backward = differentiable(
    "lsh_attention_backward", nothing_to_save, no_second_derivative
)
register_autocast("lsh_attention")
register_vmap("lsh_attention", (0, 1, 2, 3))
register_vmap("lsh_attention_backward", (0, 1, 2, 3, 4, 5, 6, 7, 8, 9))

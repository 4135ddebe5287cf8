"""Attention within a sliding window: so few pairs that each is computed, n w d in time and memory.

Nothing is estimated then: softmax attention is softmax attention, YOSO is its expectation.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lshkit.attention.arguments import autocast_device
from lshkit.attention.unit_norm import unit_rows

COSINE_FLOOR = {torch.float32: 1e-6, torch.float64: 1e-12}  # of 1 - x^2, as in yoso_attention


def yoso_band(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, options: dict[str, Any]
) -> Tensor:
    """YOSO-E (YOSO, ICML 2021, eq. 1-4) of the pairs in the band; options of `yoso_attention`.

    rows `(B, 2, N_k)`: the first query row that sees a key and the one behind the last.
    """
    mean, normalize = options["estimator"].mean, options["normalize"]
    if mean is None:
        raise NotImplementedError(
            f"estimator must be Sampled or Expected in a sliding window, got "
            f"{options['estimator']!r}, whose mean has no closed form"
        )
    if mean.unit_norm == "lift":
        raise NotImplementedError("unit_norm must not be 'lift' in a sliding window")
    n_bits, exact_slope = mean.n_bits, mean.gradient == "exact"

    def weigh(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
        cosine = unit_rows(q) @ unit_rows(k).transpose(-1, -2)
        x = cosine.detach().clamp(-1, 1)
        base = 1 - torch.acos(x) / math.pi
        weight = base**n_bits
        if exact_slope:
            root = (1 - x * x).clamp_min(COSINE_FLOOR[x.dtype]).sqrt()
            slope = n_bits * base ** (n_bits - 1) / (math.pi * root)
        else:
            slope = n_bits / 2 * weight
        weight = weight + slope * (cosine - cosine.detach())  # the weight, with this derivative
        return torch.where(visible, weight, 0.0)

    out, total = _banded(query, key, value, rows, weigh)
    if normalize == "l2":
        out = unit_rows(out)
    elif normalize == "sum":
        out = out / torch.where(total > 0, total, 1)
    return out.to(query.dtype)


def softmax_band(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scale: float | None
) -> Tensor:
    """Softmax attention of the pairs in the band."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale

    def weigh(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
        score = torch.where(visible, scale * (q @ k.transpose(-1, -2)), -math.inf)
        alone = ~visible.any(-1, keepdim=True)
        return torch.where(alone, 0.0, torch.softmax(torch.where(alone, 0.0, score), -1))

    return _banded(query, key, value, rows, weigh)[0].to(query.dtype)


@torch.compiler.disable  # the width of the band is read from the mask
def _banded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    weigh: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Sums of values by weight, and of the weights, block of queries by block."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    batch, heads, n_q, _ = query.shape
    n_keys, key_heads = key.shape[2], key.shape[1]
    first, end = rows[:, 0], rows[:, 1]
    seen = first < end
    if not seen.any():
        return value.new_zeros(batch, heads, n_q, value.shape[-1]), value.new_zeros(())
    # A query i sees keys from i - back to i - front only.
    column = torch.arange(n_keys, device=key.device)
    front = int(torch.where(seen, first - column, n_q).min())
    back = int(torch.where(seen, end - 1 - column, -n_keys).max())
    size = min(back - front + 1, n_q)  # of a block of queries
    n_blocks = -(-n_q // size)
    start = torch.arange(n_blocks, device=key.device)[:, None] * size
    index = start + torch.arange(-back, size - front, device=key.device)  # of a block's keys
    inside = (index >= 0) & (index < n_keys)
    index = index.clamp(0, n_keys - 1)
    row = start[:, None] + torch.arange(size, device=key.device)[None, :, None]
    visible = (
        inside[:, None] & (first[:, index][:, :, None] <= row) & (row < end[:, index][:, :, None])
    )
    visible = visible[:, None, None]  # (batch, 1, 1, blocks, size, keys of a block)

    key = torch.where(seen[:, None, :, None], key, 0.0)[:, :, None, index]
    value = torch.where(seen[:, None, :, None], value, 0.0)[:, :, None, index]
    query = F.pad(query, (0, 0, 0, n_blocks * size - n_q))
    query = query.unflatten(2, (n_blocks, size)).unflatten(1, (key_heads, heads // key_heads))
    with torch.autocast(autocast_device(query), enabled=False):
        weight = weigh(query, key, visible)
        out = (weight @ value).flatten(1, 2).flatten(2, 3)[:, :, :n_q]
    total = weight.sum(-1, keepdim=True).flatten(1, 2).flatten(2, 3)[:, :, :n_q]
    return out, total

"""LSH attention where a mask of pairs or a bias of positions comes in, which is of size n^2 itself.

The same estimate as `lsh_attention`, on the matrix of all pairs: quadratic in time and memory.
"""

import math

import torch
from torch import Tensor

from lshkit import torch_ops
from lshkit.attention.arguments import seed_tensor
from lshkit.torch_ops.lsh_attention import key_centre


def dense_lsh_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor | None,
    is_causal: bool,
    bias: Tensor | None = None,
    pairs: Tensor | None = None,
    *,
    scale: float | None,
    weighting: str,
    n_bits: int,
    n_hashes: int,
    hasher: str,
    window: int | None,
    n_sinks: int,
    center: bool,
    enable_gqa: bool,
    seed: int | None,
) -> Tensor:
    """`lsh_attention` with bias, added to scores, and pairs, True for a pair that takes part.

    Both are `(B or 1, H or 1, N_q, N_k)`, keys is `(B, N_k)`; is_causal: the last query stands at
    the last key. Which pairs collide does not depend on the bias. With pairs, whose pattern is not
    known, keys are hashed as they are: their mean could show a query what it must not see. Sinks
    are then the first n_sinks keys that a query sees: later queries change nothing.
    """
    dtype = query.dtype
    query, key, value = query.float(), key.float(), value.float()
    n_q, n_keys = query.shape[2], key.shape[2]
    device = query.device
    first_query = n_keys - n_q if is_causal else 0
    position = torch.arange(first_query, first_query + n_q, device=device)[:, None]
    column = torch.arange(n_keys, device=device)
    groups = query.shape[1] // key.shape[1]
    takes_part = query.new_ones(1, 1, n_keys, dtype=torch.bool) if keys is None else keys[:, None]
    finite = key.isfinite().all(-1)
    visible = takes_part[:, :, None] & finite.repeat_interleave(groups, 1)[:, :, None]
    if is_causal and pairs is None:
        visible = visible & (column <= position)
    if pairs is not None:
        visible = visible & pairs
        takes_part = takes_part & visible.any((1, 2))[:, None]

    window = window or 0
    key = torch.where(takes_part[..., None], key, 0.0)
    if center and pairs is None:
        key = key - key_centre(key, keys, is_causal, window)
    key = torch.where(finite[..., None], key, 0.0)
    first = visible & (visible.cumsum(-1) <= n_sinks)  # of those that a query sees
    exact = ((position - column).abs() < window) | first
    with torch.no_grad():
        family = torch_ops.FAMILY[hasher]
        sizes = key.shape[1], query.shape[-1], n_bits, n_hashes
        parameters = torch_ops.hash_parameters(seed_tensor(seed, device), *sizes, family)
        hash_options = parameters, family, n_bits, n_hashes
        grouped = query.unflatten(1, (-1, groups)).flatten(2, 3)
        query_codes = torch_ops.hash(grouped, *hash_options).unflatten(2, (groups, n_q))
        query_codes = query_codes.flatten(1, 2).short()
        key_codes = torch_ops.hash(key, *hash_options).short()
        key_codes = key_codes.repeat_interleave(groups, 1)
        counts = sum(
            (query_codes[..., :, None, h] == key_codes[..., None, :, h]).short()
            for h in range(n_hashes)
        )
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    dots = query @ key.transpose(-1, -2)
    with torch.no_grad():
        included = _inclusion(query, key, dots, n_bits, n_hashes, weighting)
        hit = counts >= (2 if weighting == "magicpig" else 1)
        log_weight = torch.where(exact, 0.0, -included.clamp_min(1e-30).log())
        log_weight = torch.where(visible & (hit | exact), log_weight, -math.inf)
    score = dots * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        score = score + bias.float()
    alone = ~log_weight.isfinite().any(-1, keepdim=True)  # no pair at all: zeros
    weight = torch.softmax(torch.where(alone, 0.0, score + log_weight), -1)
    weight = torch.where(alone, 0.0, weight)
    return (weight @ torch.where(takes_part[..., None], value, 0.0)).to(dtype)


def _inclusion(
    query: Tensor, key: Tensor, dots: Tensor, n_bits: int, n_hashes: int, weighting: str
) -> Tensor:
    """The probability that a pair is in the sample, 1 without weights."""
    if weighting == "none":
        return torch.ones_like(dots)
    q, k = query.norm(dim=-1)[..., :, None], key.norm(dim=-1)[..., None, :]
    cosine = (dots / (q * k).clamp_min(1e-30)).double().clamp(-1, 1)
    p = (1 - torch.acos(cosine) / math.pi) ** n_bits
    p = torch.where((q == 0) & (k == 0), 1.0, p)  # both have the code 0
    miss = (n_hashes * torch.log1p(-p.clamp_max(1 - 1e-16))).exp()
    included = 1 - miss
    if weighting == "magicpig":
        included = included - n_hashes * p * miss / (1 - p).clamp_min(1e-16)
    return included.float()

"""Inputs of a cache of codes, and its reference."""

import numpy as np
import torch

from lshkit.attention import CodeCache
from lshkit.attention.code_cache import normal_quantile
from lshkit.attention.coded_keys import EXACT_UP_TO
from lshkit.reference import StepOptions, code_step

SHAPES = ("spread", "peaked", "clustered")


def qkv(kind, n, heads=8, n_queries=1, d=64, d_v=32, key_heads=1, batch=1, seed=0):
    """Scores whose softmax is spread, peaked at a few keys, or shared by clusters of keys."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g)

    key = normal(batch, key_heads, n, d)
    query = normal(batch, heads, n_queries, d)
    group = heads // key_heads
    if kind == "peaked":
        at = torch.randint(n, (heads * n_queries,), generator=g)
        own = key.repeat_interleave(group, 1)[:, torch.arange(heads).repeat_interleave(n_queries)]
        own = own[:, torch.arange(len(at)), at].reshape(query.shape)
        query = 1.5 * (own + query)
    if kind == "clustered":
        centre = normal(64, d)
        key = centre[torch.randint(64, (batch, key_heads, n), generator=g)] + 0.5 * key
        query = centre[torch.randint(64, (batch, heads, n_queries), generator=g)] + 0.7 * query
    value = normal(batch, key_heads, n, d_v) + 0.3
    value[..., :d] += 0.5 * key[..., :d_v]
    return query, key, value


def filled(query, key, value, seed=0, **options):
    """A cache of these keys and values."""
    cache = CodeCache(
        *(len(key), query.shape[1], key.shape[3], value.shape[3]),
        num_key_heads=key.shape[1],
        seed=seed,
        dtype=key.dtype,
        **options,
    )
    cache.append(key, value)
    return cache


def softmax(query, key, value):
    """(attention, log sum of exponentials, root mean square norm) of the last query, float64."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = query.double() @ key.mT / query.shape[-1] ** 0.5
    weights = scores.softmax(-1)
    norm = (weights @ value.square().sum(-1, keepdim=True)).sqrt()
    return weights @ value, scores.logsumexp(-1), norm[..., 0]


def unpacked(cache, b, g):
    """(bits `(n, L)`, norms `(n,)`) of a key head, in order."""
    rows = cache.n_bits // 8 + 1
    blocks = cache._kept.codes[b, g].view(-1, rows, 32, 2)
    codes = blocks.permute(0, 3, 2, 1).reshape(-1, rows).numpy()
    bits = np.unpackbits(codes[:, :-1], axis=1, bitorder="little")
    return bits.astype(np.int64), codes[:, -1].astype(np.int64)


def reference_step(cache, query, head):
    """Of the last query `(d,)` of the first sequence."""
    g = head // (cache.num_heads // cache.num_key_heads)
    n = cache.positions
    bits, norms = unpacked(cache, 0, g)
    options = StepOptions(
        *(cache.scale, cache.n_sinks, cache.window, cache.epsilon, normal_quantile(cache.delta)),
        *(cache.min_share, cache.max_share, EXACT_UP_TO),
    )
    return code_step(
        *(query.float().numpy(), cache.key[0, g].float().numpy()),
        *(cache.value[0, g].float().numpy(), cache._kept.planes[g].numpy(), bits[:n], norms[:n]),
        *(cache._kept.centre[0, g].double().numpy(), float(cache._kept.norm[0, g])),
        *(options, cache.seed, head),
    )

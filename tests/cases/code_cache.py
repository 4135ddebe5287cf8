"""Inputs of a cache of codes, and its reference."""

import numpy as np
import torch

from lshkit.attention import CodeCache
from lshkit.attention.code_cache import normal_quantile
from lshkit.attention.coded_keys import EXACT_UP_TO
from lshkit.reference import Codes, StepOptions, code_step

SHAPES = ("spread", "peaked", "clustered", "outlying")


def qkv(kind, n, heads=8, n_queries=1, d=64, d_v=32, key_heads=1, batch=1, seed=0):
    """Scores whose softmax is spread, peaked at a few keys, or shared by clusters of keys. Outlying
    ones are spread, with values of which a few are 30 times as large as the others."""
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
    if kind == "outlying":
        value[:, :, torch.rand(n, generator=g) < 0.01] *= 30
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
    """(bits `(n, L)`, norms `(n,)`, sizes `(n,)`) of a key head, in order."""
    bytes_ = cache.n_bits // 8
    blocks = cache._kept.codes[b, g].view(-1, bytes_ + 2, 64)
    signs = blocks[:, :-2].unflatten(-1, (32, 2)).permute(0, 3, 2, 1).reshape(-1, bytes_)
    bits = np.unpackbits(signs.numpy(), axis=1, bitorder="little").astype(np.int64)
    norms, sizes = blocks[:, -2:].reshape(-1, 2).long().numpy().T
    return bits, norms, sizes


def reference_step(cache, query, head):
    """Of the last query `(d,)` of the first sequence."""
    g = head // (cache.num_heads // cache.num_key_heads)
    n = cache.positions
    kept = cache._kept
    codes = Codes(
        *(kept.planes[g].numpy(), kept.centre[0, g].double().numpy()),
        *(float(kept.norm[0, g]), kept.value_centre[0, g].double().numpy()),
        float(kept.value_norm[0, g]),
        *(x[:n] for x in unpacked(cache, 0, g)),
    )
    options = StepOptions(
        *(cache.scale, cache.n_sinks, cache.window, cache.epsilon, normal_quantile(cache.delta)),
        *(cache.min_share, cache.max_share, EXACT_UP_TO),
    )
    return code_step(
        *(query.float().numpy(), cache.key[0, g].float().numpy()),
        *(cache.value[0, g].float().numpy(), codes, options, cache.seed, head),
    )

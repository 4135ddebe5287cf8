"""What the tests of YosoState share: inputs, the state for them, and ways to feed it."""

import torch

from lshkit.attention import YosoState, yoso_attention

SEED = 11


def qkv(batch=2, heads=3, n=29, d=20, d_v=9, *, key_heads=None, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    key_heads = heads if key_heads is None else key_heads
    shapes = (batch, heads, n, d), (batch, key_heads, n, d), (batch, key_heads, n, d_v)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def state_for(query, key, value, **options):
    batch, heads, _, d = query.shape
    return YosoState(
        batch,
        heads,
        d,
        value.shape[-1],
        num_key_heads=key.shape[1],
        dtype=query.dtype,
        **{"seed": SEED, "n_hashes": 12, **options},
    )


def causal(query, key, value, mask=None, **options):
    options = {"seed": SEED, "n_hashes": 12, "estimator": "sampled", **options}
    return yoso_attention(query, key, value, mask, is_causal=True, **options)


def positions(tensors, first, last):
    return [x[:, :, first:last] for x in tensors]


def in_steps(state, tensors, mask=None):
    n = tensors[0].shape[2]
    masks = [() if mask is None else (mask[:, i : i + 1],) for i in range(n)]
    return torch.cat(
        [state.step(*positions(tensors, i, i + 1), *m) for i, m in enumerate(masks)], 2
    )


def in_chunks(state, tensors, sizes, mask=None):
    outs, first = [], 0
    for size in sizes:
        chunk_mask = () if mask is None else (mask[:, first : first + size],)
        outs.append(state.prefill(*positions(tensors, first, first + size), *chunk_mask))
        first += size
    return torch.cat(outs, 2)


def same_contents(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- The causal forward -----------------------------------------------------------------------

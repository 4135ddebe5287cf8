"""What the tests of YosoState share: inputs, the state for them, and ways to feed it."""

import numpy as np
import torch

from lshkit import reference
from lshkit.attention import Sampled, YosoState, yoso_attention

SEED = 11
SAMPLED = Sampled(n_bits=8, n_hashes=12, expectation="never")


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
        **{"seed": SEED, "estimator": SAMPLED, **options},
    )


def causal(query, key, value, mask=None, **options):
    options = {"seed": SEED, "estimator": SAMPLED, **options}
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


def decoded(module, state, x, sizes, ignored=None):
    """Causal self-attention of a module, so many positions a call."""
    outs, first = [], 0
    for size in sizes:
        rows = slice(first, first + size)
        hidden = None if ignored is None else ignored[:, rows]
        out, weights = module(*[x[:, rows]] * 3, hidden, is_causal=True, state=state)
        assert weights is None
        outs.append(out)
        first += size
    return torch.cat(outs, 1)


def same_contents(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- The causal forward -----------------------------------------------------------------------


def soft_features(x, functions, family, n_bits, n_hashes, n_probes, sharpness):
    """Rows as weights over the buckets of every hash, `(..., n, n_hashes, 2^n_bits)`, in numpy."""
    z = reference.projections(reference.unit(x), functions, family, n_bits, n_hashes)
    z = z / (functions.shape[-1] if family == "hadamard" else 1)
    margins = np.abs(z)
    order = np.argsort(margins, -1, kind="stable")
    features = np.zeros((*z.shape[:-1], 2**n_bits))
    own = reference.codes(z).astype(int)
    codes, logits = [], []
    for a in range(n_probes):
        code, logit = own, 0
        for k in range(n_bits):
            if a >> k & 1:
                bit = order[..., k]
                code = code ^ (1 << bit)
                picked = np.take_along_axis(margins, bit[..., None], -1)[..., 0]
                logit = logit - 2 * sharpness * picked
        codes.append(code)
        logits.append(logit + np.zeros_like(z[..., 0]))
    weights = np.exp(logits) / np.exp(logits).sum(0)
    for code, weight in zip(codes, weights, strict=True):
        np.put_along_axis(features, code[..., None], weight[..., None], -1)
    return features

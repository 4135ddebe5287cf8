"""BERT-LSH (2024): attention scores of the pairs that share a SimHash bucket, and no others."""

import math
from typing import Literal, overload

import numpy as np
import torch
from torch import Tensor

from lshkit import checks, hash_functions, torch_ops
from lshkit.attention.arguments import (
    check_cpu,
    check_tensors,
    folded,
    key_padding_mask,
    seed_tensor,
)

MAX_TABLE = 2**31 - 1


@overload
def bert_lsh_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    *,
    scale: float | None = ...,
    n_bits: int = ...,
    table_size: int = ...,
    n_hashes: int = ...,
    faithful: bool = ...,
    enable_gqa: bool = ...,
    seed: int | Tensor | None = ...,
    return_counts: Literal[False] = ...,
) -> Tensor: ...


@overload
def bert_lsh_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    *,
    scale: float | None = ...,
    n_bits: int = ...,
    table_size: int = ...,
    n_hashes: int = ...,
    faithful: bool = ...,
    enable_gqa: bool = ...,
    seed: int | Tensor | None = ...,
    return_counts: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def bert_lsh_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    n_bits: int = 2,
    table_size: int = 64,
    n_hashes: int = 1,
    faithful: bool = False,
    enable_gqa: bool = False,
    seed: int | Tensor | None = None,
    return_counts: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax over the pairs whose SimHash codes collide ("BERT-LSH: Reducing Absolute Compute For
    Attention", section 2).

    A hash joins the signs of n_bits random projections ("bands"); a pair is scored if its query and
    key agree in all of them for some of n_hashes hashes. No weights: the result is biased towards
    colliding pairs (`lsh_attention` corrects for that).

    Args:
        query, key, value, attn_mask, enable_gqa, seed: as of `lsh_attention`.
        scale: of the scores; None: 1 / sqrt(D).
        n_bits: bits of a code, 1 to 16.
        table_size: with faithful, buckets of the table, 1 to 2^31 - 1; otherwise ignored.
        n_hashes: number of codes, 1 to 65535.
        faithful: reproduce the paper's code, in quadratic time and memory. Its buckets are random
            subset sums of the bits modulo table_size, so that unequal codes collide too; pairs
            i <= j are scored and their scores copied to (j, i), so N_q = N_k; a pair without
            collision has the score 0 and takes part in the softmax. A NaN or infinity propagates to
            where its scores are copied. By default only colliding pairs take part, in both
            triangles; no others are visited after the comparison of codes, a query without any
            gives zeros, and NaN and infinity are handled as in `lsh_attention`.
        return_counts: also return the numbers of dot products of queries and keys.

    Returns:
        `(..., H, N_q, D_v)` in the dtype of query, and with return_counts int64 `(..., H)`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.
        NotImplementedError: tensors that are not on the CPU.
    """
    n_bits = checks.integer("n_bits", n_bits, 1, 16)
    n_hashes = checks.integer("n_hashes", n_hashes, 1, hash_functions.MAX_HASHES)
    table_size = checks.integer("table_size", table_size, 1, MAX_TABLE)
    faithful = checks.boolean("faithful", faithful)
    enable_gqa = checks.boolean("enable_gqa", enable_gqa)
    return_counts = checks.boolean("return_counts", return_counts)
    check_tensors(query, key, value, enable_gqa)
    check_cpu("bert_lsh_attention", query)
    if faithful and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"key must have query's length {query.shape[-2]} with faithful=True, got "
            f"{key.shape[-2]}: scores are copied across the diagonal"
        )
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else checks.positive("scale", scale)
    seed = seed_tensor(seed, query.device)
    shape = query.shape
    reason = "the pairs follow from the codes, and there is no causal order"
    key_mask = key_padding_mask(attn_mask, query, key, reason)
    query, key, value = folded(query), folded(key), folded(value)
    family = torch_ops.FAMILY["hyperplane"]
    sizes = key.shape[1], query.shape[-1], n_bits, n_hashes
    parameters = torch_ops.hash_parameters(seed, *sizes, family)
    if faithful:
        hashing_options = family, n_bits, n_hashes, table_size, int(seed)
        out, counts = _faithful(query, key, value, key_mask, scale, parameters, *hashing_options)
    else:
        out, *_, pairs = torch_ops.lsh_attention(
            *(query, key, value, key_mask, parameters, family, n_bits, n_hashes, False),
            *(scale, torch_ops.WEIGHTING["none"], False, 0, 0, 0),
        )
        counts = pairs.sum(-1, dtype=torch.int64)
    if len(shape) != 4:
        out, counts = out.reshape(*shape[:-1], value.shape[-1]), counts.reshape(shape[:-2])
    return (out, counts) if return_counts else out


def subset_sums(codes: Tensor, n_bits: int, table_size: int, seed: int) -> Tensor:
    """Buckets `(..., n, n_hashes)`, int64: sums of a hash's random numbers of the bits set.

    codes `(batch, heads, n, n_hashes)`; the numbers are below table_size, and so is the sum's
    remainder.
    """
    rng = np.random.default_rng([seed, 0x5B5E7])
    heads, n_hashes = codes.shape[1], codes.shape[3]
    numbers = torch.from_numpy(rng.integers(table_size, size=(heads, 1, n_hashes, n_bits)))
    numbers = numbers.to(codes.device)
    bits = codes.to(torch.int64)[..., None] >> torch.arange(n_bits, device=codes.device) & 1
    return (bits * numbers).sum(-1) % table_size


def _faithful(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    scale: float,
    parameters: Tensor,
    family: int,
    n_bits: int,
    n_hashes: int,
    table_size: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // max(key.shape[1], 1)
    if key_mask is not None:  # a masked key's score is copied to a row, but not its NaN
        unread = ~key_mask[:, None] & ~key.isfinite().all(-1)
        key = key.masked_fill(unread[..., None], 0.0)
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    if parameters.shape[0] > 1:
        parameters = parameters.repeat_interleave(groups, 0)
    buckets = [
        subset_sums(
            torch_ops.hash(x.detach(), parameters, family, n_bits, n_hashes),
            *(n_bits, table_size, seed),
        )
        for x in (query, key)
    ]
    collide = query.new_zeros(*query.shape[:-1], key.shape[2], dtype=torch.bool)
    for h in range(n_hashes):
        collide = collide | (buckets[0][..., :, None, h] == buckets[1][..., None, :, h])
    collide = collide.triu()
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2)
    scores = torch.where(collide, scores, 0.0)
    scores = scale * (scores + scores.triu(1).transpose(-1, -2))
    if key_mask is not None:
        alone = ~key_mask.any(-1)[:, None, None, None]  # queries that see no key: zeros
        scores = scores.masked_fill(~key_mask[:, None, None] & ~alone, -math.inf)
        value = torch.where(key_mask[:, None, :, None], value, 0.0)
    weights = torch.softmax(scores, -1)
    return (weights @ value.to(dtype)).to(query.dtype), collide.sum((-1, -2))

"""Softmax attention from the pairs whose codes collide, as a function."""

import math
from typing import Literal, overload

from torch import Tensor

from lshkit import checks, hash_functions, torch_ops
from lshkit.attention.arguments import (
    check_cpu,
    check_softmax_arguments,
    check_tensors,
    folded,
    key_padding_mask,
    resolve_causal_offset,
    seed_tensor,
)


@overload
def lsh_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    weighting: str = ...,
    n_bits: int = ...,
    n_hashes: int = ...,
    hasher: str = ...,
    window: int | None = ...,
    n_sinks: int = ...,
    center: bool = ...,
    causal_offset: int | None = ...,
    seed: int | Tensor | None = ...,
    return_pairs: Literal[False] = ...,
) -> Tensor: ...


@overload
def lsh_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    weighting: str = ...,
    n_bits: int = ...,
    n_hashes: int = ...,
    hasher: str = ...,
    window: int | None = ...,
    n_sinks: int = ...,
    center: bool = ...,
    causal_offset: int | None = ...,
    seed: int | Tensor | None = ...,
    return_pairs: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def lsh_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    weighting: str = "horvitz_thompson",
    n_bits: int = 8,
    n_hashes: int = 32,
    hasher: str = "hadamard",
    window: int | None = 8,
    n_sinks: int = 1,
    center: bool = True,
    causal_offset: int | None = None,
    seed: int | Tensor | None = None,
    return_pairs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention estimated from the pairs of queries and keys whose hash codes collide.

    Only the keys that share a code with a query in some of n_hashes hashes have their score
    exp(scale q . k) computed, each divided by the probability 1 - (1 - p)^n_hashes that this
    happens (Horvitz and Thompson 1952), p = (1 - acos(cosine) / pi)^n_bits: the sums of numerator
    and denominator are unbiased for softmax attention's (with hasher "hyperplane"; with "hadamard"
    pairs collide with this probability to within about 1 %). Pairs in a local window and with the
    first keys are always used. For models trained with softmax, without training.

    Args:
        query: `(..., H, N_q, D)`, or `(B, N_q, D)` for one head, as in
            `torch.nn.functional.scaled_dot_product_attention`. float32, bfloat16, float16 or
            float64; computed in float32.
        key: `(..., H, N_k, D)`, same leading sizes and dtype as query.
        value: `(..., H, N_k, D_v)`.
        attn_mask: boolean key padding mask `(B, N_k)` or `(B, 1, 1, N_k)` (3-D inputs: `(B, 1,
            N_k)`), True for a key that takes part. No other mask.
        dropout_p: 0: no weights are stored that could be dropped.
        is_causal: query i sees the keys j <= i + causal_offset.
        scale: of the scores; None: 1 / sqrt(D).
        enable_gqa: key and value may have fewer heads than query, a divisor of H: head h reads
            theirs number h // (H / H_k), and shares its hash functions.
        weighting: of a sampled pair. "horvitz_thompson"; "none", plain softmax over the colliding
            pairs, which is biased towards them; or "magicpig", which uses pairs that collide in at
            least two hashes and divides by the probability of that (Chen et al. 2024).
        n_bits: bits of a code, 1 to 16. Each bit roughly halves the pairs of unrelated rows.
        n_hashes: number of codes, 1 to 65535. More find more pairs and reduce the noise.
        hasher: "hadamard" (fast rotations) or "hyperplane" (independent normals).
        window: pairs of positions |i + causal_offset - j| < window (causal: only those that query i
            sees) are always used, with probability 1. None or 0: no window; a query without any
            pair then gives zeros.
        n_sinks: the first n_sinks keys that attn_mask lets take part are used by every query that
            sees them.
        center: subtract the mean of the keys before hashing. It adds the same to all scores of a
            query and so does not change softmax. Causal: the mean over the `window` positions from
            the first key on that takes part (without a window nothing is subtracted), so that no
            query depends on keys that it does not see, except through the rounding of this mean.
        causal_offset: position of query 0 among the keys, for causality and window. None: N_k - N_q
            when causal (the last query sees all keys: decoding with a cache), else 0.
        seed: of the hash functions, one set for each head of keys, shared by the batch. None draws
            a fresh seed from torch's generator, an int >= 0 or an int64 CPU tensor of one element
            fixes it.
        return_pairs: also return the number of keys that each query used.

    Returns:
        `(..., H, N_q, D_v)` in the dtype of query, and with return_pairs int32 `(..., H, N_q)`.
        A query with a NaN or infinity gives a NaN row, such a key is ignored.

    Gradients are those of the estimate with its inclusion probabilities held constant (they belong
    to the sample, not to the estimate): those of numerator and denominator are unbiased too. The
    same pairs are found again from the codes; memory is linear in the lengths.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.
        NotImplementedError: tensors that are not on the CPU.
    """
    n_bits = checks.integer("n_bits", n_bits, 1, 16)
    n_hashes = checks.integer("n_hashes", n_hashes, 1, hash_functions.MAX_HASHES)
    checks.choice("hasher", hasher, torch_ops.FAMILY)
    checks.choice("weighting", weighting, torch_ops.WEIGHTING)
    is_causal = checks.boolean("is_causal", is_causal)
    check_softmax_arguments("lsh_attention", dropout_p)
    center = checks.boolean("center", center)
    return_pairs = checks.boolean("return_pairs", return_pairs)
    enable_gqa = checks.boolean("enable_gqa", enable_gqa)
    window = 0 if window is None else checks.integer("window", window, 0, 2**31 - 1)
    n_sinks = checks.integer("n_sinks", n_sinks, 0, 2**31 - 1)
    check_tensors(query, key, value, enable_gqa)
    check_cpu("lsh_attention", query)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else checks.positive("scale", scale)
    causal_offset = resolve_causal_offset(causal_offset, is_causal, query, key)
    seed = seed_tensor(seed, query.device)
    shape = query.shape
    reason = "the pairs follow from the codes (for a causal mask give is_causal=True)"
    key_mask = key_padding_mask(attn_mask, query, key, reason)
    query, key, value = folded(query), folded(key), folded(value)
    family = torch_ops.FAMILY[hasher]
    sizes = key.shape[1], query.shape[-1], n_bits, n_hashes
    parameters = torch_ops.hash_parameters(seed, *sizes, family)
    out, *_, pairs = torch_ops.lsh_attention(
        *(query, key, value, key_mask, parameters, family, n_bits, n_hashes, center),
        *(scale, torch_ops.WEIGHTING[weighting], is_causal, causal_offset, window, n_sinks),
    )
    if len(shape) != 4:
        out, pairs = out.reshape(*shape[:-1], value.shape[-1]), pairs.reshape(shape[:-1])
    return (out, pairs) if return_pairs else out

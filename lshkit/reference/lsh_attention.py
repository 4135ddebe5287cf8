"""Softmax attention estimated from the pairs whose codes collide.

A pair enters the sample of its query with a probability that is known. Sums over the sample of
exp(score) divided by it are unbiased for the sums over all pairs (Horvitz and Thompson 1952), the
numerator and the denominator of softmax attention alike. Their ratio is what comes out.
"""

from typing import Any

import numpy as np

from lshkit.reference.buckets import collision_counts, visible
from lshkit.reference.hashing import cosine_probability, unit


def key_centre(
    key: np.ndarray, key_mask: np.ndarray | None = None, *, causal: bool = False, window: int = 0
) -> np.ndarray:
    """The mean of the keys that take part, `(..., 1, d)`: it is taken from them before hashing.

    Causal: of those less than `window` behind the first one that takes part, which no query that
    hashes sees less than all of. Zero where no key takes part.
    """
    takes_part = np.isfinite(key).all(-1)
    if key_mask is not None:
        takes_part &= np.asarray(key_mask) != 0
    if causal:
        first = takes_part.argmax(-1)[..., None]
        takes_part &= np.arange(key.shape[-2]) < first + window
    count = takes_part.sum(-1)[..., None, None]
    total = np.where(takes_part[..., None], key, 0).sum(-2, keepdims=True)
    return total / np.maximum(count, 1)


def inclusion_probability(
    p: np.ndarray | float, n_hashes: int, weighting: str = "horvitz_thompson"
) -> np.ndarray:
    """Of a pair that collides in one hash with probability p: in any, or ("magicpig") in two.

    1 - (1 - p)^m, and 1 - (1 - p)^m - m p (1 - p)^(m - 1) (Chen et al. 2024).
    """
    p = np.asarray(p, np.float64)
    miss = np.exp(n_hashes * np.log1p(-np.minimum(p, 1 - 1e-16)))
    if weighting == "horvitz_thompson":
        return 1 - miss
    return 1 - miss - n_hashes * p * miss / np.maximum(1 - p, 1e-16)


def exact_pairs(
    n_queries: int,
    n_keys: int,
    *,
    causal: bool,
    offset: int,
    window: int,
    n_sinks: int,
    key_mask: np.ndarray | None = None,
) -> np.ndarray:
    """Pairs in the window of positions i + offset and j, and those of the first keys that count."""
    distance = np.arange(n_queries)[:, None] + offset - np.arange(n_keys)
    near = (np.abs(distance) < window) & ((distance >= 0) | (not causal))
    valid = np.ones(n_keys, bool) if key_mask is None else np.asarray(key_mask) != 0
    sinks = valid & (np.cumsum(valid, -1) <= n_sinks)
    return near | sinks[..., None, :]


def sampled_pairs(
    query: np.ndarray,
    key: np.ndarray,
    query_codes: np.ndarray,
    key_codes: np.ndarray,
    n_bits: int,
    weighting: str,
    options: dict[str, Any],
) -> tuple[np.ndarray, np.ndarray]:
    """(pairs that are used, their inclusion probabilities), both `(..., n_q, n_k)`.

    key: centred, as it was hashed. weighting "none" takes every probability for 1.
    """
    causal, offset, key_mask = options["causal"], options["offset"], options["key_mask"]
    n_queries, n_keys = query.shape[-2], key.shape[-2]
    pairs = visible(n_queries, n_keys, False, key_mask) & np.isfinite(key).all(-1)[..., None, :]
    if causal:
        pairs = pairs & (np.arange(n_queries)[:, None] + offset >= np.arange(n_keys))
    counts = collision_counts(query_codes, key_codes)
    hit = counts >= (2 if weighting == "magicpig" else 1)
    exact = exact_pairs(n_queries, n_keys, **options)
    q, k = unit(np.nan_to_num(query)), unit(np.nan_to_num(key))
    p = cosine_probability(q @ np.swapaxes(k, -1, -2), n_bits)
    both_zero = ~np.any(q, -1)[..., :, None] & ~np.any(k, -1)[..., None, :]  # code 0, both of them
    p = np.where(both_zero, 1.0, p)
    if weighting == "none":
        probability = np.ones_like(p)
    else:
        probability = inclusion_probability(p, query_codes.shape[-1], weighting)
    probability = np.where(exact, 1.0, probability)
    return pairs & (hit | exact), np.where(probability < 1e-20, np.inf, probability)  # rounding


def lsh_attention_sums(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    query_codes: np.ndarray,
    key_codes: np.ndarray,
    n_bits: int,
    *,
    scale: float,
    weighting: str = "horvitz_thompson",
    causal: bool = False,
    offset: int = 0,
    key_mask: np.ndarray | None = None,
    window: int = 0,
    n_sinks: int = 0,
    centre: np.ndarray | float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(numerator, denominator, log scale, weights, pairs): out = numerator / denominator.

    weights `(..., n_q, n_k)`: exp(score - log scale) over the probability, 0 where a pair is not
    used. The sums are those of weights times values, and of weights.
    """
    key = np.asarray(key, np.float64) - centre
    options = {
        "causal": causal,
        "offset": offset,
        "key_mask": key_mask,
        "window": window,
        "n_sinks": n_sinks,
    }
    pairs, probability = sampled_pairs(
        query, key, query_codes, key_codes, n_bits, weighting, options
    )
    score = scale * (np.nan_to_num(query) @ np.swapaxes(np.nan_to_num(key), -1, -2))
    largest = np.where(pairs, score, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    largest = np.where(np.isfinite(largest), largest, 0)
    weights = np.where(pairs, np.exp(np.where(pairs, score - largest, 0)) / probability, 0)
    numerator = weights @ np.where(np.any(pairs, -2)[..., None], value, 0)
    return numerator, weights.sum(-1, keepdims=True), largest, weights, pairs


def lsh_attention_forward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    query_codes: np.ndarray,
    key_codes: np.ndarray,
    n_bits: int,
    **options: Any,
) -> np.ndarray:
    """Attention for given codes, `(..., n_q, d_v)`. A query without any pair gives zeros.

    A query with a NaN or infinity gives a NaN row, such a key is ignored. Options: see
    `lsh_attention_sums`.
    """
    numerator, denominator, *_ = lsh_attention_sums(
        query, key, value, query_codes, key_codes, n_bits, **options
    )
    out = np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)
    return np.where(np.isfinite(query).all(-1, keepdims=True), out, np.nan)


def lsh_attention_backward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    query_codes: np.ndarray,
    key_codes: np.ndarray,
    grad_out: np.ndarray,
    n_bits: int,
    *,
    scale: float,
    centre: np.ndarray | float = 0.0,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(grad_query, grad_key, grad_value) of `lsh_attention_forward` for given codes, finite rows.

    The inclusion probabilities are constants of the sample, so the derivatives of numerator and
    denominator stay unbiased. Through a softmax the centre has no derivative.
    """
    numerator, denominator, _, weights, _ = lsh_attention_sums(
        query, key, value, query_codes, key_codes, n_bits, scale=scale, centre=centre, **options
    )
    inverse = np.divide(1.0, denominator, out=np.zeros_like(denominator), where=denominator > 0)
    share = weights * inverse
    out = numerator * inverse
    along = (grad_out * out).sum(-1, keepdims=True)
    grad_score = scale * share * (grad_out @ np.swapaxes(value, -1, -2) - along)
    return (
        grad_score @ (np.asarray(key, np.float64) - centre),
        np.swapaxes(grad_score, -1, -2) @ query,
        np.swapaxes(share, -1, -2) @ grad_out,
    )


def bert_lsh_forward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    query_buckets: np.ndarray,
    key_buckets: np.ndarray,
    scale: float,
    key_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """BERT-LSH as its paper's code has it (section 2.2.2): (output, number of dot products).

    Pairs i <= j whose buckets `(..., n, n_hashes)` agree in some hash are scored, the score is
    copied to (j, i), and the others' is 0.
    """
    collide = np.triu(collision_counts(query_buckets, key_buckets) > 0)
    scores = np.where(collide, scale * (query @ np.swapaxes(key, -1, -2)), 0)
    scores = scores + np.swapaxes(np.triu(scores, 1), -1, -2)
    pairs = visible(query.shape[-2], key.shape[-2], False, key_mask)
    weights = np.where(pairs, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return weights @ value / weights.sum(-1, keepdims=True), collide.sum((-1, -2))

"""The verbs on codes: sums, pairs and draws."""

import numpy as np
from numpy.typing import ArrayLike


def collision_counts(query_codes: np.ndarray, key_codes: np.ndarray) -> np.ndarray:
    """How many hashes collide: `(..., n_q, m)` and `(..., n_k, m)` to `(..., n_q, n_k)`."""
    return (query_codes[..., :, None, :] == key_codes[..., None, :, :]).sum(-1)


def visible(
    n_queries: int, n_keys: int, causal: bool = False, key_mask: np.ndarray | None = None
) -> np.ndarray:
    """The pairs that count, `(..., n_q, n_k)`: query i sees the keys j <= i when causal."""
    pairs = np.ones((n_queries, n_keys), bool)
    if causal:
        pairs = np.tril(pairs)
    return pairs if key_mask is None else pairs & (np.asarray(key_mask)[..., None, :] != 0)


@np.errstate(invalid="ignore")
def weighted_sum(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """weights @ values, where a zero weight means absent: 0 * NaN and 0 * infinity count as 0."""
    if np.isfinite(weights).all() and np.isfinite(values).all():
        return weights @ values
    terms = weights[..., :, :, None] * values[..., None, :, :]
    return np.where(weights[..., None] != 0, terms, 0).sum(-2)


def bucket_sum(
    query_codes: np.ndarray,
    key_codes: np.ndarray,
    values: np.ndarray,
    *,
    causal: bool = False,
    key_mask: np.ndarray | None = None,
    query_weights: np.ndarray | None = None,
    key_weights: np.ndarray | None = None,
) -> np.ndarray:
    """Mean over the hashes of the sum of the values whose key shares the query's bucket.

    Pair by pair: the count of a pair's collisions over m estimates its collision probability. With
    weights, see `probe_weights`.
    """
    if query_weights is None and key_weights is None:
        pairs = visible(query_codes.shape[-2], key_codes.shape[-2], causal, key_mask)
        weights = collision_counts(query_codes, key_codes) / query_codes.shape[-1]
    else:
        query, key = as_probes(query_codes, query_weights), as_probes(key_codes, key_weights)
        pairs = visible(query[0].shape[-3], key[0].shape[-3], causal, key_mask)
        weights = probe_weights(*query, *key)
    return weighted_sum(weights * pairs, np.asarray(values, np.float64))


def as_probes(codes: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Codes and weights `(..., n, m, t)`; codes without weights are single probes of weight 1."""
    if weights is None:
        return codes[..., None], np.ones(codes.shape + (1,))
    return codes, np.asarray(weights, np.float64)


def probe_weights(
    query_codes: np.ndarray,
    query_weights: np.ndarray,
    key_codes: np.ndarray,
    key_weights: np.ndarray,
) -> np.ndarray:
    """`(..., n_q, m, t_q)` and `(..., n_k, m, t_k)` to weights of pairs `(..., n_q, n_k)`.

    The mean over the hashes of the product of both weights, summed over the shared buckets.
    """
    shared = query_codes[..., :, None, :, :, None] == key_codes[..., None, :, :, None, :]
    products = query_weights[..., :, None, :, :, None] * key_weights[..., None, :, :, None, :]
    return np.where(shared, products, 0).sum((-1, -2)).mean(-1)


def collisions(
    query_codes: np.ndarray,
    key_codes: np.ndarray,
    *,
    causal: bool = False,
    key_mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The colliding pairs of `(n_q, m)` and `(n_k, m)` codes in CSR form: indptr, indices, counts.

    Query i collides with the keys indices[indptr[i]:indptr[i + 1]], in counts[...] hashes.
    """
    pairs = visible(len(query_codes), len(key_codes), causal, key_mask)
    counts = collision_counts(query_codes, key_codes) * pairs
    _, indices = np.nonzero(counts)
    return np.append(0, np.cumsum((counts > 0).sum(-1))), indices, counts[counts > 0]


def random_words(seed: int, streams: ArrayLike, n: int) -> np.ndarray:
    """n random 64-bit words for each stream number: a uint64 array `(..., n)`.

    SplitMix64 (Steele, Lea, Flood 2014), started for each stream at a mixed counter: word t of a
    stream is known without the others, so no result depends on who computes it.
    """

    def mix(z: np.ndarray) -> np.ndarray:  # a bijection of 64-bit words
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    step = np.uint64(0x9E3779B97F4A7C15)
    streams = np.asarray(streams, np.uint64) + np.uint64(1)
    start = mix(mix(np.asarray([seed], np.uint64)) + streams * step)
    return mix(start[..., None] + np.arange(1, n + 1, dtype=np.uint64) * step)


def below(words: np.ndarray, bounds: ArrayLike) -> np.ndarray:
    """Uniform integers from 0 to bounds - 1: the high half of the 128-bit product word * bound."""
    words = np.asarray(words, np.uint64)
    bounds = np.broadcast_to(np.asarray(bounds, np.uint64), words.shape)
    high = [int(w) * int(b) >> 64 for w, b in zip(words.ravel(), bounds.ravel(), strict=True)]
    return np.array(high, np.int64).reshape(words.shape)


def draw(
    query_codes: np.ndarray,
    key_codes: np.ndarray,
    n_samples: int | None = None,
    weights: np.ndarray | None = None,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Members of the queries' buckets and the probability of each draw, given its table.

    Sample t of query i comes from table (offset_i + t) mod m, offset_i uniform; without n_samples
    there is one from each table in order. Member j of the bucket is drawn with probability
    1 / size, or weight_j / sum of the bucket's weights. Nothing to draw: -1 with probability 0.
    """
    query_codes, key_codes = np.asarray(query_codes), np.asarray(key_codes)
    n_queries, m = query_codes.shape
    samples = m if n_samples is None else n_samples
    words = random_words(seed, np.arange(n_queries), samples + 1)  # word 0 gives the offset
    offset = below(words[:, 0], m) if n_samples is not None else np.zeros(n_queries, np.int64)
    tables = ((offset[:, None] + np.arange(samples)) % m).astype(np.int32)
    indices = np.full((n_queries, samples), -1, np.int64)
    probabilities = np.zeros((n_queries, samples))
    for i, t in np.ndindex(indices.shape):
        h = tables[i, t]
        members = np.flatnonzero(key_codes[:, h] == query_codes[i, h])
        if weights is None and len(members):
            indices[i, t] = members[below(words[i, t + 1], len(members))]
            probabilities[i, t] = 1 / len(members)
        elif weights is not None and np.sum(weights[members]) > 0:
            sums = np.cumsum(weights[members])
            point = float(words[i, t + 1] >> np.uint64(11)) * 2.0**-53 * sums[-1]
            j = members[np.searchsorted(sums, point, side="right")]
            indices[i, t], probabilities[i, t] = j, weights[j] / sums[-1]
    return indices, probabilities, tables

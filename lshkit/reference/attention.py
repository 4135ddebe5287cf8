"""YOSO attention (Zeng et al., ICML 2021, equations 1-4), and the sketch of the lower bound.

Both estimators are weights @ value (eq. 2), then a normalisation. The weights are the collision
frequencies of m hashes (YOSO-m) or the collision probabilities (YOSO-E); the rest is the same.
"""

from typing import TypeAlias

import numpy as np

from lshkit.reference.buckets import collision_counts, visible, weighted_sum
from lshkit.reference.hashing import (
    cosine_probability,
    cosine_probability_slope,
    unit,
)

# Of query, key and value.
Gradients: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]


@np.errstate(invalid="ignore")
def attention_forward(weights: np.ndarray, value: np.ndarray, normalize: str | None) -> np.ndarray:
    """Raw sums normalised by "l2" (to unit rows), "sum" (of the weights) or None.

    A query whose raw sum is 0 or that has no weight gives 0.
    """
    return weighted_sum(weights, value) * _inverse_scale(weights, value, normalize)


def _inverse_scale(weights: np.ndarray, value: np.ndarray, normalize: str | None) -> np.ndarray:
    if normalize is None:
        return np.ones(weights.shape[:-1] + (1,))
    if normalize == "sum":
        scale = weights.sum(-1, keepdims=True)
        keep = scale > 0
    else:
        out = weighted_sum(weights, value)
        largest = np.abs(out).max(-1, keepdims=True, initial=0)  # squares of the rest stay in range
        largest = np.where(np.isfinite(largest) & (largest > 0), largest, 1)
        scale = largest * np.linalg.norm(out / largest, axis=-1, keepdims=True)
        keep = scale != 0  # NaN stays
    return np.divide(1.0, scale, out=np.zeros_like(scale), where=keep)


@np.errstate(invalid="ignore")
def attention_backward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    weights: np.ndarray,
    slopes: np.ndarray,
    normalize: str | None,
    grad_out: np.ndarray,
) -> Gradients:
    """Gradients of query, key and value. slopes: the derivatives of the weights in the cosines.

    With s_ij the derivative of the loss in weight ij, the unit rows get
    dq_i = sum_j slope_ij s_ij k_j and dk_j = sum_i slope_ij s_ij q_i (eq. 3 and 4).
    """
    grad_raw, bias = _grad_raw(value, weights, normalize, grad_out)
    grad_weights = grad_raw @ np.swapaxes(value, -1, -2) + bias
    grad_cosine = np.where(slopes != 0, slopes * grad_weights, 0)
    return (
        _through_unit(query, weighted_sum(grad_cosine, unit(key))),
        _through_unit(key, weighted_sum(np.swapaxes(grad_cosine, -1, -2), unit(query))),
        weighted_sum(np.swapaxes(weights, -1, -2), grad_raw),
    )


def _grad_raw(
    value: np.ndarray, weights: np.ndarray, normalize: str | None, grad_out: np.ndarray
) -> tuple[np.ndarray, np.ndarray | float]:
    """g and b, for which the derivative of the loss in weight ij is g_i . v_j + b_i."""
    inverse = _inverse_scale(weights, value, normalize)
    out = weighted_sum(weights, value) * inverse
    along = (grad_out * out).sum(-1, keepdims=True)
    if normalize == "l2":  # d(r / |r|) = (I - y y^T) dr / |r|
        return (grad_out - along * out) * inverse, 0.0
    # y = sum_j w_j v_j / sum_j w_j, so dy/dw_j has - y / sum_j w_j
    return grad_out * inverse, -along * inverse if normalize == "sum" else 0.0


def _through_unit(x: np.ndarray, grad: np.ndarray) -> np.ndarray:
    """Gradient through u = x / |x|: (grad - (grad . u) u) / |x|, and 0 for a row of zeros."""
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    tangent = grad - (grad * unit(x)).sum(-1, keepdims=True) * unit(x)
    return np.divide(tangent, norm, out=np.zeros_like(tangent), where=norm != 0)


def _finite_rows(x: np.ndarray) -> np.ndarray:
    return np.isfinite(x).all(-1)


def _clean(x: np.ndarray) -> np.ndarray:
    """x in float64 with its NaN and infinite rows replaced by zeros."""
    x = np.asarray(x, np.float64)
    return np.where(_finite_rows(x)[..., None], x, 0)


def _attending(
    query: np.ndarray, key: np.ndarray, causal: bool, key_mask: np.ndarray | None
) -> np.ndarray:
    """Visible pairs of a finite query and a finite key."""
    pairs = visible(query.shape[-2], key.shape[-2], causal, key_mask)
    return pairs & _finite_rows(query)[..., :, None] & _finite_rows(key)[..., None, :]


def _sampled(
    query: np.ndarray,
    key: np.ndarray,
    query_codes: np.ndarray,
    key_codes: np.ndarray,
    causal: bool,
    key_mask: np.ndarray | None,
) -> np.ndarray:
    counts = collision_counts(query_codes, key_codes)
    return _attending(query, key, causal, key_mask) * counts / query_codes.shape[-1]


def _expected(
    query: np.ndarray, key: np.ndarray, n_bits: int, causal: bool, key_mask: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    cosine = unit(_clean(query)) @ np.swapaxes(unit(_clean(key)), -1, -2)
    pairs = _attending(query, key, causal, key_mask)
    return pairs * cosine_probability(cosine, n_bits), pairs, cosine


def _forward(
    query: np.ndarray, value: np.ndarray, weights: np.ndarray, normalize: str | None
) -> np.ndarray:
    out = attention_forward(weights, np.asarray(value, np.float64), normalize)
    return np.where(_finite_rows(query)[..., None], out, np.nan)


def _slopes(
    gradient: str,
    weights: np.ndarray,
    pairs: np.ndarray,
    cosine: np.ndarray,
    n_bits: int,
    floor: float,
) -> np.ndarray:
    if gradient == "lower_bound":  # eq. 4: dp/dx >= n_bits / 2 * p
        return n_bits / 2 * weights
    return pairs * cosine_probability_slope(cosine, n_bits, floor)


def _collided(
    gradient: str, weights: np.ndarray, cosine: np.ndarray, n_bits: int, n_hashes: int
) -> np.ndarray:
    """What the slopes of the pairs are multiplied by where only those that collide count."""
    if gradient == "collided":
        return weights > 0
    with np.errstate(divide="ignore"):  # p = 1
        misses = n_hashes * np.log1p(-cosine_probability(cosine, n_bits))
    seen = -np.expm1(misses)  # 1 - (1 - p)^n_hashes
    return np.divide(weights > 0, seen, out=np.zeros_like(cosine), where=seen > 0)


def _backward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    weights: np.ndarray,
    slopes: np.ndarray,
    normalize: str | None,
    grad_out: np.ndarray,
    key_mask: np.ndarray | None,
) -> Gradients:
    grad_out = np.where(_finite_rows(query)[..., None], np.asarray(grad_out, np.float64), 0)
    if key_mask is None:
        key_mask = np.ones(key.shape[-2], bool)
    takes_part = np.asarray(key_mask)[..., None] != 0
    value = np.where(takes_part, np.asarray(value, np.float64), 0)
    grad_query, grad_key, grad_value = attention_backward(
        _clean(query), _clean(key), value, weights, slopes, normalize, grad_out
    )
    grad_query = np.where(_finite_rows(query)[..., None], grad_query, np.nan)
    grad_key = np.where(takes_part & ~_finite_rows(key)[..., None], np.nan, grad_key)
    return grad_query, grad_key, grad_value


def yoso_forward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    query_codes: np.ndarray,
    key_codes: np.ndarray,
    *,
    causal: bool = False,
    key_mask: np.ndarray | None = None,
    normalize: str | None = "l2",
) -> np.ndarray:
    """YOSO-m (eq. 2) for given codes: `(..., n_q, d_v)`.

    A query with a NaN or infinity gives a NaN row, such a key is ignored. normalize: "l2",
    "sum" or None. key_mask: `(..., n_k)`, nonzero takes part.
    """
    weights = _sampled(query, key, query_codes, key_codes, causal, key_mask)
    return _forward(query, value, weights, normalize)


def yoso_backward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    query_codes: np.ndarray,
    key_codes: np.ndarray,
    grad_out: np.ndarray,
    n_bits: int,
    *,
    causal: bool = False,
    key_mask: np.ndarray | None = None,
    normalize: str | None = "l2",
    gradient: str = "lower_bound",
    floor: float = 1e-6,
) -> Gradients:
    """(grad_query, grad_key, grad_value) of `yoso_forward` for given codes.

    A code is a step function of its input, so the queries and keys get the gradient of the
    expectation: "lower_bound", n_bits/2 times the observed collision frequency (eq. 4);
    "collided", the exact slope of the probability (eq. 3) on the pairs that collide in some hash
    (*YOSO, appendix 1.4); or "unbiased", those over the probability 1 - (1 - p)^m that such a pair
    does (Horvitz and Thompson 1952).
    """
    weights = _sampled(query, key, query_codes, key_codes, causal, key_mask)
    _, pairs, cosine = _expected(query, key, n_bits, causal, key_mask)
    slopes = _slopes(gradient, weights, pairs, cosine, n_bits, floor)
    if gradient != "lower_bound":
        n_hashes = query_codes.shape[-1]
        slopes = slopes * _collided(gradient, weights, cosine, n_bits, n_hashes)
    return _backward(query, key, value, weights, slopes, normalize, grad_out, key_mask)


def expected_forward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    n_bits: int,
    *,
    causal: bool = False,
    key_mask: np.ndarray | None = None,
    normalize: str | None = "l2",
) -> np.ndarray:
    """YOSO-E, the expectation of eq. 2 over the hash functions; otherwise like `yoso_forward`."""
    weights, _, _ = _expected(query, key, n_bits, causal, key_mask)
    return _forward(query, value, weights, normalize)


def expected_backward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    grad_out: np.ndarray,
    n_bits: int,
    *,
    causal: bool = False,
    key_mask: np.ndarray | None = None,
    normalize: str | None = "l2",
    gradient: str = "lower_bound",
    floor: float = 1e-12,
) -> Gradients:
    """(grad_query, grad_key, grad_value) of `expected_forward`.

    gradient: "lower_bound" or "exact": all pairs count, with their own weights.
    """
    weights, pairs, cosine = _expected(query, key, n_bits, causal, key_mask)
    slopes = _slopes(gradient, weights, pairs, cosine, n_bits, floor)
    return _backward(query, key, value, weights, slopes, normalize, grad_out, key_mask)

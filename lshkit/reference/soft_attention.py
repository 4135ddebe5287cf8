"""Attention with soft codes."""

from typing import TypeAlias

import numpy as np

from lshkit.reference.attention import (
    _attending,
    _clean,
    _finite_rows,
    _forward,
    _inverse_scale,
    _through_unit,
)
from lshkit.reference.buckets import probe_weights, weighted_sum
from lshkit.reference.hashing import soft_codes, unit_projections

# Parameters, family, n_bits and n_hashes; projections, probes and their weights.
Hasher: TypeAlias = tuple[np.ndarray, str, int, int]
Side: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]


def _soft_side(x: np.ndarray, hasher: Hasher, n_probes: int, sharpness: float | np.ndarray) -> Side:
    """Projections of the finite rows, their probes and the weights of these."""
    projected = unit_projections(_clean(x), *hasher)
    return projected, *soft_codes(projected, n_probes, sharpness)


def soft_attention_forward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    hasher: Hasher,
    n_probes: tuple[int, int] = (4, 4),
    sharpness: float | np.ndarray = 2.0,
    *,
    causal: bool = False,
    key_mask: np.ndarray | None = None,
    normalize: str | None = "l2",
) -> np.ndarray:
    """Attention whose weights are those of `probe_weights`: `(..., n_q, d_v)`.

    hasher: (parameters, family, n_bits, n_hashes). n_probes: of queries and keys. sharpness: a
    number, or an array that broadcasts with `(..., n, n_hashes, n_probes)`.
    """
    query_side, key_side = (
        _soft_side(x, hasher, t, sharpness) for x, t in zip((query, key), n_probes, strict=True)
    )
    pairs = _attending(query, key, causal, key_mask)
    return _forward(query, value, pairs * probe_weights(*query_side[1:], *key_side[1:]), normalize)


@np.errstate(invalid="ignore")
def soft_attention_backward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    hasher: Hasher,
    grad_out: np.ndarray,
    n_probes: tuple[int, int] = (4, 4),
    sharpness: float | np.ndarray = 2.0,
    *,
    causal: bool = False,
    key_mask: np.ndarray | None = None,
    normalize: str | None = "l2",
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(grad_query, grad_key, grad_value, grad_sharpness) of `soft_attention_forward`.

    Exact where the selected bits do not change. grad_sharpness: for every head, `(...)`.
    """
    sides = [
        _soft_side(x, hasher, t, sharpness) for x, t in zip((query, key), n_probes, strict=True)
    ]
    pairs = _attending(query, key, causal, key_mask)
    weights = pairs * probe_weights(*sides[0][1:], *sides[1][1:])
    value = np.asarray(value, np.float64)
    if key_mask is not None:
        value = np.where(np.asarray(key_mask)[..., None] != 0, value, 0)
    grad_out = np.where(_finite_rows(query)[..., None], np.asarray(grad_out, np.float64), 0)

    inverse = _inverse_scale(weights, value, normalize)
    out = weighted_sum(weights, value) * inverse
    along = (grad_out * out).sum(-1, keepdims=True)
    grad_raw = (grad_out - along * out if normalize == "l2" else grad_out) * inverse
    grad_pairs = grad_raw @ np.swapaxes(value, -1, -2)
    if normalize == "sum":
        grad_pairs = grad_pairs - along * inverse
    grad_pairs = np.where(pairs, grad_pairs, 0)
    grads: list[np.ndarray] = []
    grad_sharpness = np.zeros(())
    for x, side, other, grad in (
        (query, sides[0], sides[1], grad_pairs),
        (key, sides[1], sides[0], np.swapaxes(grad_pairs, -1, -2)),
    ):
        # d pair_ij / d weight_iha is the mean of what the other side's row has in the bucket
        shared = side[1][..., :, None, :, :, None] == other[1][..., None, :, :, None, :]
        met = np.where(shared, other[2][..., None, :, :, None, :], 0).sum(-1)
        grad_weights = (grad[..., None, None] * met).sum(-3) / side[1].shape[-2]
        grad_x, grad_beta = _soft_backward(x, side, grad_weights, hasher, sharpness)
        grads.append(grad_x)
        grad_sharpness = grad_sharpness + grad_beta
    if key_mask is not None:
        grads[1] = np.where(np.asarray(key_mask)[..., None] != 0, grads[1], 0)
    grad_value = weighted_sum(np.swapaxes(weights, -1, -2), grad_raw)
    return grads[0], grads[1], grad_value, grad_sharpness


def _soft_backward(
    x: np.ndarray,
    side: Side,
    grad_weights: np.ndarray,
    hasher: Hasher,
    sharpness: float | np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """From the gradient of the weights of probes to those of x and, summed over it, sharpness."""
    projected, _, weights = side
    n_probes = weights.shape[-1]
    flipped = np.arange(n_probes)[:, None] >> np.arange((n_probes - 1).bit_length()) & 1
    order = np.argsort(np.abs(projected), -1, kind="stable")[..., : flipped.shape[-1]]
    selected = np.take_along_axis(projected, order, -1)
    grad_logits = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdims=True))
    grad_flips = -2 * grad_logits @ flipped  # of sharpness * margin
    grad_sharpness = (grad_flips * np.abs(selected)).sum((-1, -2, -3))
    grad_projected = np.zeros_like(projected)
    np.put_along_axis(grad_projected, order, sharpness * np.sign(selected) * grad_flips, -1)
    # The projections are linear: those of the axes are their matrix.
    axes = np.broadcast_to(np.eye(x.shape[-1]), (*x.shape[:-2], x.shape[-1], x.shape[-1]))
    matrix = unit_projections(axes, *hasher)
    grad = _through_unit(_clean(x), np.einsum("...nhb,...dhb->...nd", grad_projected, matrix))
    return np.where(_finite_rows(x)[..., None], grad, np.nan), grad_sharpness
